"""An export that ends early does not look complete, and the same command continues it."""

import fcntl
import gc
import itertools
import json
import os
import random
import subprocess

import pytest

import tracestore
from tests.export.interrupted import Exports
from tests.helpers import command, convert, error_of, make_optional, make_traces, tree_bytes, write_store
from tracestore.errors import DiskFullError
from tracestore.export import exporter

FORMATS = ("pkl", "pt-lstm", "pt-gnn", "safetensors", "datasets")
KILLS = int(os.environ.get("TRACESTORE_EXPORT_KILLS", "10"))
LIST = "tracestore_export.json"


@pytest.fixture
def store(tmp_path):
    """Write a store of 24 traces with labels, scores and optional fields."""
    traces = [trace | make_optional(len(trace["tokens"])) for trace in make_traces(24, tokens=lambda k: 2 + k % 7)]
    return write_store(tmp_path / "s.zarr", traces, label=lambda k: float(k % 2), score=lambda k: k / 24)


def is_complete(out):
    """Return whether an export looks complete."""
    return (out / LIST).exists() and json.loads((out / LIST).read_text())["state"] == "complete"


def check_unfinished(out, expected, work):
    """Assert that each file of an unfinished export is complete, and that no command takes it for a complete one."""
    for name, data in tree_bytes(out).items():
        if not name.rpartition("/")[2].startswith(".tmp-") and name != LIST:
            assert data == expected[name], name
    if (out / LIST).exists():
        error = error_of("convert", out, work / "refused.zarr", code=3)
        assert "unfinished export" in error and "run the same" in error
        assert not (work / "refused.zarr").exists()
    else:
        assert not any(name.endswith((".pkl", ".pt", ".safetensors", ".parquet")) for name in tree_bytes(out))


@pytest.mark.long
def test_kills_at_random_moments(tmp_path, store):
    exports = Exports("torch", "torch_geometric.data")
    words = {name: ("--format", name, "--traces-per-file", 2) for name in FORMATS}
    expected, span_s = {}, {}
    for format in FORMATS:
        code, span_s[format] = exports.run(store, tmp_path / format, *words[format])
        assert code == 0
        expected[format] = tree_bytes(tmp_path / format)
    rng, num_killed = random.Random(KILLS), 0
    for k in itertools.takewhile(lambda _: num_killed < KILLS, itertools.count()):
        format, out = FORMATS[k % len(FORMATS)], tmp_path / f"out{k}"
        code, _ = exports.run(store, out, *words[format], after=rng.uniform(0, 1.1) * span_s[format])
        if code == 0:  # the machine may have become faster
            span_s[format] *= 0.9
        num_killed += code < 0
        if is_complete(out):
            assert tree_bytes(out) == expected[format]
            continue
        check_unfinished(out, expected[format], tmp_path)
        assert exports.run(store, out, *words[format])[0] == 0
        assert tree_bytes(out) == expected[format]
    exports.close()
    convert(out, tmp_path / "back.zarr")
    assert tracestore.open(tmp_path / "back.zarr").labels.tolist() == tracestore.open(store).labels.tolist()


@pytest.mark.long
@pytest.mark.parametrize("format", FORMATS)
def test_an_interrupt_between_any_two_files_continues(tmp_path, store, format, monkeypatch):
    options = ("--format", format, "--traces-per-file", 10)
    command("export", store, tmp_path / "whole", *options, check=0)
    expected = tree_bytes(tmp_path / "whole")
    original, at = exporter.atomic_write, 0

    def interrupt(path):
        nonlocal at
        at -= 1
        if at == 0:
            raise KeyboardInterrupt
        return original(path)

    monkeypatch.setattr(exporter, "atomic_write", interrupt)
    for number in range(1, 6):
        at, out = number, tmp_path / f"out{number}"
        done = command("export", store, out, *options, check=130)
        assert "of 24 traces are exported; run the same command to continue" in done.stderr, done.stderr
        check_unfinished(out, expected, tmp_path)
        command("export", store, out, *options, check=0)
        assert tree_bytes(out) == expected


def unfinished(store, out, *options, after=1):
    """Begin an export and interrupt it after some files."""

    def interrupt(done, total):
        if done >= after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), tracestore.open(store) as opened:
        exporter.export_store(opened, out, traces_per_file=5, progress=interrupt, **dict(options))
    return out


def change_scores(store, tmp_path):
    (tmp_path / "judge.csv").write_text("question_id,score\nq3,0.9\n")
    command("score", store, "--scores", tmp_path / "judge.csv", check=0)


def change_traces(store, tmp_path):
    with tracestore.create(store, append=True) as writer:
        writer.append(make_traces(25)[24])


@pytest.mark.parametrize("change", [change_scores, change_traces])
def test_a_store_that_changed_is_not_mixed(tmp_path, store, change):
    out = unfinished(store, tmp_path / "out")
    before = tree_bytes(out)
    change(store, tmp_path)
    error = error_of("export", store, out, "--traces-per-file", 5, code=2)
    assert "another state of this one" in error and "remove the folder" in error and tree_bytes(out) == before


@pytest.mark.parametrize("options", [("--traces-per-file", 6), ("--format", "safetensors", "--traces-per-file", 5)])
def test_other_options_are_not_mixed(tmp_path, store, options):
    out = unfinished(store, tmp_path / "out")
    assert "other options" in error_of("export", store, out, *options, code=2)
    other = write_store(tmp_path / "other.zarr", make_traces(24))
    assert "another store" in error_of("export", other, out, "--traces-per-file", 5, code=2)


def test_a_complete_export_is_not_written_again(tmp_path, store):
    command("export", store, tmp_path / "out", check=0)
    assert "holds a complete export" in error_of("export", store, tmp_path / "out", code=2)


def test_files_of_a_kill_are_removed_and_those_of_others_kept(tmp_path, store):
    out = unfinished(store, tmp_path / "out")
    (out / ".tmp-0123").write_bytes(b"partial")
    (out / "mine.txt").write_text("mine")
    command("export", store, out, "--traces-per-file", 5, check=0)
    assert not list(out.glob(".tmp-*")) and (out / "mine.txt").read_text() == "mine"
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".tmp-0123").write_bytes(b"of a kill before the list was written")
    command("export", store, tmp_path / "new", check=0)
    assert not list((tmp_path / "new").glob(".tmp-*"))


def test_a_second_process_waits_its_turn(tmp_path, store):
    out = unfinished(store, tmp_path / "out")
    fd = os.open(out, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert "another process exports" in error_of("export", store, out, "--traces-per-file", 5, code=5)
    os.close(fd)
    command("export", store, out, "--traces-per-file", 5, check=0)


@pytest.mark.long
def test_a_full_disk_is_continued(tmp_path, store, monkeypatch):
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", mount], capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs is not allowed here")
    monkeypatch.setattr(exporter, "require_free_bytes", lambda *_: None)
    try:
        for format in FORMATS:
            options = ("--format", format, "--traces-per-file", 2)
            command("export", store, tmp_path / format, *options, check=0)
            expected = tree_bytes(tmp_path / format)
            # Each file takes whole pages. With fewer, the export ends early at another file.
            pages = sum(-(-len(data) // 4096) for data in expected.values())
            for size in (pages // 4, pages // 2, pages - 2):
                out = mount / f"{format}-{size}"
                filler = mount / "filler"
                with filler.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, 4096 * (free_pages(mount) - size))
                done = command("export", store, out, *options, check=4)
                assert done.stderr.count("\n") == 1 and "run the same command to continue" in done.stderr
                check_unfinished(out, expected, tmp_path)
                filler.unlink()
                command("export", store, out, *options, check=0)
                assert tree_bytes(out) == expected
    finally:
        gc.collect()
        subprocess.run(["umount", mount], check=True)


def free_pages(folder):
    """Return the number of free pages of a file system."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize // 4096


def test_the_space_of_what_is_done_is_not_needed_again(tmp_path, store, monkeypatch):
    needed = []
    monkeypatch.setattr(exporter, "require_free_bytes", lambda path, count, what: needed.append(count))
    out = unfinished(store, tmp_path / "out", after=15)
    command("export", store, out, "--traces-per-file", 5, check=0)
    assert needed[1] < needed[0]

    def refuse(path, count, what):
        raise DiskFullError("too small")

    monkeypatch.setattr(exporter, "require_free_bytes", refuse)
    command("export", store, tmp_path / "no", check=4)
    assert list((tmp_path / "no").iterdir()) == []
