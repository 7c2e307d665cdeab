"""Processes that read a store while its writers are killed.

python -m tests.fault_injection.reader_writer read STORE SEED
    opens, reads and checks the store until standard input ends, then prints its counts
python -m tests.fault_injection.reader_writer write STORE KILLS SECONDS SEED
    forks writers, kills each at a random time, and checks the store after each
"""

import json
import os
import pickle
import random
import signal
import sys
import time
import warnings

import numpy as np
import pytest

import tracestore
from tests.fault_injection.driver import small_commits
from tests.helpers import make_trace
from tracestore.errors import TracestoreWarning
from tracestore.store.format.labels import ScoreField
from tracestore.store.maintain.verify import verify_store
from tracestore.store.read.columns import TraceValues
from tracestore.store.write.record import record_from_dict
from tracestore.store.write.writer import StoreWriter

MAX_TRACES = 300


def trace(k):
    """Return trace k."""
    return make_trace(k, tokens=2 + k % 7, dim=32)


def check(store, rng):
    """Assert that random traces have their values and that all scores are of one commit."""
    for k in rng.sample(range(len(store)), min(6, len(store))):
        expected, found = trace(k), store[k]
        assert store.index_of(f"q{k}") == k and found.question_id == f"q{k}"
        np.testing.assert_array_equal(found.hidden_states, np.stack(expected["hidden_states"]))
        np.testing.assert_array_equal(found.tokens, expected["tokens"])
        assert found.tokens_decoded == expected["tokens_decoded"] and found.answer == expected["generated_answer_clean"]
    scores = np.floor(store.scores[~np.isnan(store.scores)])
    assert len(np.unique(scores)) <= 1, "scores of two commits"


def read(path, seed):
    """Read the store until standard input ends and print the counts."""
    warnings.simplefilter("error", TracestoreWarning)
    rng, done = random.Random(seed), {"opened": 0, "reopened": 0, "verified": 0, "newest": 0}
    os.set_blocking(0, False)
    while not _ended():
        with tracestore.open(path) as store:
            check(store, rng)
            done["opened"] += 1
            done["newest"] = store.generation
            if rng.random() < 0.3:
                time.sleep(rng.random() * 0.5)  # several commits long
                again = pickle.loads(pickle.dumps(store))
                assert again.generation == store.generation, "a pinned generation was removed"
                check(again, rng)
                again.close()
                done["reopened"] += 1
        if rng.random() < 0.05:
            report = verify_store(path, num_threads=1)
            assert not report.damaged, report.damaged
            done["verified"] += 1
    print(json.dumps(done))


def _ended():
    try:
        return os.read(0, 1) == b""
    except BlockingIOError:
        return False


def write_until_killed(path, seed):
    """Append traces and replace scores, one commit after the other."""
    rng = random.Random(seed)
    with StoreWriter(path) as writer:
        while True:
            count = writer.manifest.num_traces
            if count < MAX_TRACES and rng.random() < 0.6:
                for k in range(count, count + rng.randint(1, 4)):
                    writer.begin_source(f"append-{k:010d}", 0, "")
                    writer.append_packed(writer.pack(record_from_dict(trace(k), source_name="", position=0)))
                    writer.end_source()
            else:
                version = writer.manifest.generation
                writer.define_score("score", ScoreField())
                writer.update_values({k: TraceValues({"score": version + k * 1e-6}) for k in range(count)})
            writer.commit()
            time.sleep(rng.random() * 0.02)


def write(path, kills, seconds, seed):
    """Kill writers at random times and check the store after each."""
    small_commits(pytest.MonkeyPatch(), commit_bytes=1 << 30)
    with tracestore.create(path, append=True) as writer:
        writer.append(trace(0))
    rng, traces = random.Random(seed), 1
    for number in range(kills):
        child = os.fork()
        if child == 0:
            try:
                write_until_killed(path, f"{seed} {number}")
            finally:
                os._exit(1)
        time.sleep(seconds / kills * (0.5 + rng.random()))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, f"writer {number} was not killed"
        report = verify_store(path, num_threads=1)
        assert not report.damaged, f"seed {seed}, kill {number}: {report.damaged}"
        with tracestore.open(path) as store:
            assert len(store) >= traces, f"seed {seed}, kill {number}: traces were lost"
            traces = len(store)
    print(json.dumps({"kills": kills, "traces": traces, "generation": report.generation}))


if __name__ == "__main__":
    if sys.argv[1] == "read":
        read(sys.argv[2], sys.argv[3])
    else:
        write(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
