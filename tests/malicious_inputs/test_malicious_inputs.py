"""Malicious files are refused with one line, run nothing, and cost little memory and time."""

import json
import os
import subprocess
import sys

import pytest

from tests.fuzz.target import TARGETS
from tests.helpers import ROOT, convert, make_trace, make_traces, tree_bytes, write_pickle
from tests.malicious_inputs.files.bombs import valid_files
from tests.malicious_inputs.files.containers import gz
from tests.malicious_inputs.files.corpus import MARKER, crash_files, malicious_files

MAX_SECONDS = 1.0
MAX_BYTES = 64 << 20
KINDS = ("opcodes", "arrays", "bombs", "archives", "tensors", "callables", "names")


@pytest.fixture(scope="module")
def cases():
    return list(malicious_files())


def run(action, paths, folder, *arguments, attempts=3):
    """Run an action on paths in the working folder; return the results.

    The least time of several attempts counts, because other programs only add to a time.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.malicious_inputs.runner", action, *map(str, arguments)],
        input="".join(f"{p}\n" for p in paths),
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    slow = [k for k, result in enumerate(results) if result["seconds"] >= MAX_SECONDS]
    if slow and attempts > 1:
        again = run(action, [paths[k] for k in slow], folder, *arguments, attempts=attempts - 1)
        for k, result in zip(slow, again, strict=True):
            results[k]["seconds"] = min(results[k]["seconds"], result["seconds"])
    return results


def write(cases, folder):
    """Write the files of the cases; return the paths."""
    paths = []
    for k, case in enumerate(cases):
        path = folder / f"{k:04}{case.suffix}"
        path.write_bytes(case.data)
        paths.append(path)
    return paths


@pytest.mark.long
def test_the_corpus_is_large(cases):
    assert len(cases) >= 300 and len({c.name for c in cases}) == len(cases)
    assert {c.name.split("/")[0] for c in cases} == set(KINDS)


@pytest.mark.long
def test_the_valid_files_that_the_corpus_changes_are_accepted(tmp_path):
    """Otherwise a case could be refused for another reason than its change."""
    paths = []
    for name, (suffix, data) in valid_files().items():
        paths.append(tmp_path / f"{name}{suffix}")
        paths[-1].write_bytes(data)
    assert {r["path"]: r["ended"] for r in run("read", paths, tmp_path)} == {str(p): "accepted" for p in paths}


@pytest.mark.long
def test_their_gzip_files_are_accepted_within_the_limits(tmp_path):
    """The container inside is read; its values are limited by the bytes on disk."""
    paths = []
    for name, (_, data) in valid_files().items():
        paths.append(tmp_path / f"{name}.pkl.gz")
        paths[-1].write_bytes(gz(data))
    for result in run("read", paths, tmp_path):
        assert result["ended"] == "accepted", result
        assert result["seconds"] < MAX_SECONDS and result["bytes"] < MAX_BYTES, result


@pytest.mark.long
def test_unpickling_runs_the_code_of_the_corpus(tmp_path, cases):
    """pickle.load of these files creates the marker, so its absence elsewhere is significant."""
    live = [c for c in cases if c.runs]
    assert len(live) >= 60
    lines, folders = [], []
    for path in write(live, tmp_path):
        folders.append(tmp_path / path.name.split(".")[0])
        folders[-1].mkdir()
        lines.append(f"{path}\t{folders[-1]}")
    results = zip(live, folders, run("unpickle", lines, tmp_path), strict=True)
    without_marker = [(case.name, result) for case, folder, result in results if not os.path.lexists(folder / MARKER)]
    assert not without_marker


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_every_case_is_refused(tmp_path, cases, kind):
    cases = [c for c in cases if c.name.startswith(f"{kind}/")]
    (tmp_path / "files").mkdir()
    paths = write(cases, tmp_path / "files")
    faults = []
    for case, path, result in zip(cases, paths, run("read", paths, tmp_path), strict=True):
        text = result["text"]
        if result["ended"] != ("accepted" if case.is_read else "refused"):
            faults.append(f"{case.name}: {result['ended']}: {text}")
        elif case.is_read:
            pass
        elif "\n" in text or not text.isprintable() or not text.startswith(path.name):
            faults.append(f"{case.name}: not one line that begins with the name of the file: {text!r}")
        elif case.word is not None and case.word not in text:
            faults.append(f"{case.name}: no {case.word!r} in {text!r}")
        if result["seconds"] >= MAX_SECONDS:
            faults.append(f"{case.name}: {result['seconds']:.2f} s of processor time")
        if result["bytes"] >= MAX_BYTES:
            faults.append(f"{case.name}: {result['bytes'] / 2**20:.0f} MiB")
    left = list(tmp_path.rglob(MARKER))
    assert not faults and not left, f"{len(faults)} of {len(cases)}:\n" + "\n".join(faults) + f"\nleft: {left}"


@pytest.mark.long
def test_convert_does_not_change_the_store(tmp_path, cases):
    """Exit code 3, one line, and the same bytes of the store."""
    convert(write_pickle(tmp_path / "good.pkl", make_traces(3)), tmp_path / "s.zarr", "--attention", "heads")
    before = tree_bytes(tmp_path / "s.zarr")
    step = 1 if os.environ.get("TRACESTORE_MALICIOUS") == "all" else 24
    sample = cases[::step]
    assert len(sample) >= 40
    (tmp_path / "files").mkdir()
    paths = write(sample, tmp_path / "files")
    # These files are valid, but do not fit this store.
    known = make_traces(3)[1]
    misfits = {
        "other_layers": make_trace(9, layers=4),
        "other_columns": make_trace(9, dim=16),
        "other_content": {**known, "generated_answer_clean": "another"},
        "other_values": {**known, "hidden_states": [h * 2 for h in known["hidden_states"]]},
        "other_heads": make_trace(9, heads=4),
    }
    paths += [write_pickle(tmp_path / "files" / f"{name}.pkl", [trace]) for name, trace in misfits.items()]
    paths.append(
        write_pickle(tmp_path / "files" / "same_key.pkl", [make_trace(20), {**make_trace(21), "question_id": "q20"}])
    )
    first = None
    for path, result in zip(paths, run("convert", paths, tmp_path, tmp_path / "s.zarr"), strict=True):
        text = result["text"]
        assert result["ended"] == "exit 3" and text.count("\n") == 1 and text.endswith("\n"), (path, result)
        assert path.name in text
        first = first or result["store"]
        assert result["store"] == first, path
    assert tree_bytes(tmp_path / "s.zarr") == before
    assert not list(tmp_path.rglob(MARKER))


def test_inputs_that_fuzzing_found(tmp_path):
    """Inputs that once broke the reader may be refused or accepted."""
    paths = [path for path in crash_files() if not path.name.startswith(("store-", "layout-"))]
    results = run("read", paths, tmp_path) if paths else []
    for result in results:
        assert result["ended"] in ("refused", "accepted"), result
        assert result["seconds"] < MAX_SECONDS and result["bytes"] < MAX_BYTES, result


@pytest.mark.long
@pytest.mark.parametrize("path", [p for p in crash_files() if p.name.startswith("store-")], ids=lambda p: p.name)
def test_stores_that_fuzzing_found(path):
    """Changes of stores that once broke a reader may be refused or accepted."""
    pytest.importorskip("torch")
    is_accepted = TARGETS["store"](path.read_bytes())
    assert is_accepted in (True, False)
