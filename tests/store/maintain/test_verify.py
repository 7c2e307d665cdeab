"""Verification of the bytes of a store. Repairs are tested in tests/fault_injection."""

import re
import shlex

import numpy as np

import tracestore
from tests.helpers import command, make_trace, make_traces, write_pickle, write_store
from tracestore.store.maintain.verify import verify_store


def test_a_flipped_bit_in_any_file_is_found(store_path):
    """One bit of each file is inverted; the report names the file."""
    rng = np.random.default_rng(0)
    files = [p for p in sorted(store_path.rglob("*")) if p.is_file() and p.name != "lock" and p.stat().st_size]
    for path in files:
        path.chmod(0o644)
        data = bytearray(path.read_bytes())
        position, bit = int(rng.integers(len(data))), 1 << int(rng.integers(8))
        data[position] ^= bit
        path.write_bytes(data)
        name = path.relative_to(store_path).as_posix()
        assert name in verify_store(store_path).damaged, f"{name} byte {position} bit {bit}"
        data[position] ^= bit
        path.write_bytes(data)
    assert verify_store(store_path).damaged == {}


def test_files_of_a_commit_during_the_verification_are_no_leftovers(store_path):
    done = []

    def commit_once(num_bytes, total):
        if not done:
            done.append(num_bytes)
            with tracestore.create(store_path, append=True) as writer:
                for trace in make_traces(2, seed=9):
                    writer.append(trace | {"question_id": f"new {trace['question_id']}"})
                    writer.flush()
            (store_path / "segments/.tmp-8").mkdir()
            (store_path / "segments/.tmp-8/x").write_bytes(b"")

    report = verify_store(store_path, num_threads=1, progress=commit_once)
    assert done and not report.damaged and report.leftovers == ["segments/.tmp-8/x"]


def test_printed_commands_hold_for_paths_with_blanks(tmp_path):
    store, csv, plan = write_store(tmp_path / "a b.zarr", make_traces(2)), tmp_path / "s.csv", tmp_path / "my plan.json"
    csv.write_text("question_id,score\nq0,1\n")
    command("score", store, "--scores", csv, check=0)
    newest, root = max((store / "manifest").iterdir()), store / "zarr.json"
    newest.chmod(0o644)
    newest.write_bytes(b"")
    content = root.read_bytes()
    for _ in range(2):
        refused = command("score", store, "--scores", csv).stderr
        printed = re.search(r"tracestore (verify .* --repair)", refused)[1]
        assert command(*shlex.split(printed)).returncode == 0
        root.chmod(0o644)
        root.unlink()
    command("verify", store, "--repair", check=0)
    assert root.read_bytes() == content
    write_pickle(tmp_path / "traces.pkl", [make_trace(0)])
    planned = command("convert", tmp_path / "traces.pkl", tmp_path / "c d.zarr", "--plan", plan, check=0).stdout
    for printed in re.search(r"next: tracestore (.*), then tracestore (.*)", planned).groups():
        command(*shlex.split(printed), check=0)
