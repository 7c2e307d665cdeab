"""Deterministic simulation of concurrent writers, readers, score, merge and verify.

Each actor is a thread, and one runs at a time. At a file system call the running actor may yield to
another one, which the seed's random generator chooses. A killed actor makes no further call, not even
in its cleanup; the simulation closes its files, as the kernel would.
"""

import fcntl
import gc
import io
import itertools
import os
import pickle
import random
import shutil
import threading
import time
import traceback

import numpy as np

# Imported here: an actor that yields inside an import would block the others.
from numpy.testing import assert_array_equal

import tracestore
from tests.helpers import make_trace
from tracestore.errors import StoreLockedError, UsageError
from tracestore.store.format.labels import ScoreField
from tracestore.store.io import files
from tracestore.store.maintain import merge
from tracestore.store.maintain.clean import clean_store
from tracestore.store.maintain.verify import verify_store
from tracestore.store.read.columns import TraceValues
from tracestore.store.write.record import record_from_dict
from tracestore.store.write.writer import StoreWriter

CALLS = "open write fsync link rename mkdir unlink rmdir truncate listdir scandir stat fchmod pread preadv"
NUM_TRACES = 6
MAX_KILLS = 3


class Killed(BaseException):
    """Raised in a killed actor. A BaseException, so that no handler of exceptions catches it."""


class Actor:
    """A thread of the simulation and the descriptors that it has open for writing."""

    def __init__(self, name, work):
        self.name, self.work = name, work
        self.turn = threading.Semaphore(0)
        self.killed = False
        self.fds = set()


class Simulation:
    """One run: the actors, the patched system calls and the checks."""

    def __init__(self, seed, folder, patch):
        self.seed, self.rng = seed, random.Random(seed)
        self.store, self.merged = folder / "s.zarr", folder / "merged.zarr"
        self.traces = [make_trace(k, layers=2, dim=4) for k in range(NUM_TRACES)]
        self.actors, self.failures, self.trail = [], [], []
        self.committed = self.kills = self.steps = 0
        self.finished = threading.Event()
        self.local = threading.local()
        for name in CALLS.split():
            patch.setattr(os, name, self._stepping(name, getattr(os, name)))
        patch.setattr(os, "close", self._closing(os.close))
        patch.setattr(io, "open", self._stepping("io.open", io.open))
        patch.setattr(fcntl, "flock", self._stepping("flock", fcntl.flock))
        tokens = itertools.count()
        patch.setattr(os, "urandom", lambda count: next(tokens).to_bytes(count, "big"))
        patch.setattr(time, "sleep", lambda _: self.step("sleep"))
        patch.setattr(files, "MappedFile", self._stepping("map", files.MappedFile))

    # Calls

    def _stepping(self, name, call):
        def stepping(*args, **kwargs):
            self.step(name)
            if name == "fsync":
                return None
            result = call(*args, **kwargs)
            actor = getattr(self.local, "actor", None)
            if actor is not None and name == "open" and args[1] & (os.O_WRONLY | os.O_RDWR):
                actor.fds.add(result)
            return result

        return stepping

    def _closing(self, call):
        def closing(fd):
            actor = getattr(self.local, "actor", None)
            if actor is not None:
                actor.fds.discard(fd)
            call(fd)

        self._close = call
        return closing

    def step(self, name, chance=0.25):
        """Count a call of the running actor, which yields with probability `chance`."""
        actor = getattr(self.local, "actor", None)
        if actor is None:
            return
        if actor.killed:
            raise Killed
        self.steps += 1
        self.trail.append((actor.name, name))
        # A low probability gives bursts of different lengths, which cover more interleavings.
        if self.rng.random() < chance:
            self._yield_turn()
            actor.turn.acquire()
        if actor.killed:
            raise Killed

    def _yield_turn(self):
        if not self.actors:
            self.finished.set()
            return
        following = self.rng.choice(self.actors)
        if following.name.startswith("writer") and self.kills < MAX_KILLS and self.rng.random() < 0.004:
            following.killed = True
            self.kills += 1
        following.turn.release()

    # Actors

    def start(self, name, work):
        """Start an actor, which waits for its turn."""
        actor = Actor(name, work)
        self.actors.append(actor)
        threading.Thread(target=self._run_actor, args=(actor,), daemon=True).start()

    def _run_actor(self, actor):
        self.local.actor = actor
        actor.turn.acquire()
        try:
            actor.work()
        except Killed:
            pass
        except BaseException:
            self.failures.append(f"{actor.name}: {traceback.format_exc()}")
        self.local.actor = None
        for fd in actor.fds:
            self._close(fd)
        self.actors.remove(actor)
        if actor.killed:
            self.start(f"writer after kill {self.kills}", self.write)
        self._yield_turn()

    def run(self):
        """Run all actors to their end and check the store."""
        self.start("writer", self.write)
        self.start("score", self.score)
        for k in range(2):
            self.start(f"reader {k}", self.read)
        self.start("verify", self.verify)
        self.start("merge", self.merge)
        gc.disable()  # a collection frees the generations that frames of killed actors hold, at any time
        try:
            self._yield_turn()
            ended = self.finished.wait(120)
        finally:
            gc.enable()
        last = "\n".join(f"{actor}: {call}" for actor, call in self.trail[-15:])
        assert ended, f"seed {self.seed}: stuck after\n{last}"
        assert not self.failures, f"seed {self.seed}: " + "\n".join(self.failures) + f"\nlast calls:\n{last}"
        self.check_end()

    def _writer(self, path):
        while True:
            try:
                return StoreWriter(path)
            except StoreLockedError:
                self.step("locked")

    def write(self):
        """Write like convert: skip committed sources, commit every other one by itself."""
        for k, trace in enumerate(self.traces):
            with self._writer(self.store) as writer:
                name = f"source {k}"
                if writer.has_source(name, 1, "f"):
                    continue
                writer.begin_source(name, 1, "f")
                writer.append_packed(writer.pack(record_from_dict(trace, source_name=name, position=0)))
                writer.end_source()
                writer.commit()
                self.committed = max(self.committed, writer.manifest.num_traces)

    def score(self):
        """Replace the scores three times."""
        for version in range(1, 4):
            with self._writer(self.store) as writer:
                count = writer.manifest.num_traces
                writer.define_score("score", ScoreField())
                values = {k: TraceValues({"score": version + k / 100}, group=f"v{version}") for k in range(count)}
                writer.update_values(values)
                writer.commit()

    def _when_created(self, call):
        """Retry a call until the store exists. Return its result and the traces committed before it."""
        while True:
            expected = self.committed
            try:
                return call(), expected
            except UsageError:
                assert expected == 0
                self.step("no store yet", chance=1)

    def check(self, store):
        """Assert that the traces have their values, and scores of one commit."""
        versions = set()
        for trace in store:
            expected = self.traces[trace.index]
            assert trace.question_id == expected["question_id"]
            assert_array_equal(trace.hidden_states, np.stack(expected["hidden_states"]))
            assert trace.tokens_decoded == expected["tokens_decoded"]
            if not np.isnan(trace.score):
                assert trace.group == f"v{int(trace.score)}"
                versions.add(int(trace.score))
        assert len(versions) <= 1, f"scores of several commits: {versions}"

    def read(self):
        """Open, read and reopen the store several times."""
        for _ in range(4):
            store, expected = self._when_created(lambda: tracestore.open(self.store))
            with store:
                assert len(store) >= expected, f"{len(store)} traces of {expected}"
                self.check(store)
                for _ in range(self.rng.choice((0, 50, 500))):  # the longest outlive several commits
                    self.step("hold", chance=1)
                again = pickle.loads(pickle.dumps(store))
                assert again.generation == store.generation, "a pinned generation was removed"
                self.check(again)
                again.close()

    def verify(self):
        """Verify the store several times."""
        for _ in range(3):
            report, _ = self._when_created(lambda: verify_store(self.store, num_threads=1))
            assert not report.damaged, report.damaged

    def merge(self):
        """Merge the store into another one, twice."""
        for _ in range(2):
            self._when_created(lambda: merge.merge_stores([self.store], self.merged))

    def check_end(self):
        """Assert that the final store is intact, complete and free of leftovers."""
        gc.collect()  # see `run`
        with StoreWriter(self.store):
            pass  # removes temporary folders and old generations
        clean_store(self.store, older_than_s=0)
        report = verify_store(self.store, num_threads=1)
        assert not report.damaged and not report.leftovers, f"seed {self.seed}: {report}"
        for folder in ("manifest", "index", "columns"):
            kept = len(list((self.store / folder).iterdir()))
            assert kept == 2 if folder == "manifest" else kept <= 8, f"seed {self.seed}: {kept} in {folder}"
        with tracestore.open(self.store) as store:
            assert len(store) == NUM_TRACES, f"seed {self.seed}: {len(store)} traces"
            self.check(store)
            generation = store.generation
        merge.merge_stores([self.store], self.merged)
        with tracestore.open(self.merged) as merged:
            assert sorted(merged.question_ids) == sorted(t["question_id"] for t in self.traces), f"seed {self.seed}"
        assert not verify_store(self.merged, num_threads=1).damaged, f"seed {self.seed}"
        self.generations = generation


def simulate(seed, folder, patch):
    """Run one simulation and return it. The message of an AssertionError begins with the seed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    simulation = Simulation(seed, folder, patch)
    simulation.run()
    return simulation
