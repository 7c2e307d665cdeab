"""Files that are truncated before they are opened or while they are mapped.

Every use of the store raises CorruptStoreError with the name of the file, unless it does not need the file. No
process is killed by a signal."""

import faulthandler
import os
import shutil
import signal
import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest

import tracestore
from tests.helpers import ROOT, make_traces, run_cli, segment_of, write_store
from tracestore._core import gather, kernels
from tracestore._core.mapping import MappedFile
from tracestore.errors import CorruptStoreError, TruncatedFileError
from tracestore.store.maintain.verify import verify_store

PAGE = 4096


EVERY = os.environ.get("TRACESTORE_TRUNCATIONS") == "all"


def make_store(path, codec="none", attention="mean", causal=True, edges=False, count=6):
    """Write a store of two commits, and so of two segments, with arrays of several pages and of less than one."""
    if edges:
        return Path(shutil.copytree(ROOT / "tests" / "golden" / "v1_edges.zarr", path))
    traces = make_traces(count, tokens=lambda k: 20 + k % 5, layers=3, dim=32, causal=causal)
    traces = [t | {"question": f"why {k}?", "note": [k]} for k, t in enumerate(traces)]
    return write_store(
        path, traces, score=lambda k: k / 10, commit_after=[count // 2], codec=codec, attention=attention
    )


def files_of(store):
    """Return the paths of the files in a store, without the lock."""
    return [p.relative_to(store).as_posix() for p in sorted(store.rglob("*")) if p.is_file() and p.name != "lock"]


def sizes_to_try(size):
    """Return the sizes to truncate a file to: around each page boundary, and one byte less. The default is a sample."""
    around = {b + d for b in range(0, size + 1, PAGE) for d in (-1, 0, 1)} | {size - 1}
    sizes = sorted(s for s in around if 0 <= s < size)
    return sizes if EVERY else sorted({s for s in (sizes[len(sizes) // 2] // PAGE * PAGE, size - 1) if s or size < 600})


def in_child(work, timeout_s=60):
    """Call work(say) in a forked child. Return its wait status and the lines that it passed to `say`."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        signal.alarm(timeout_s)
        faulthandler.disable()
        try:
            with os.fdopen(write, "w") as out:
                work(lambda text: print(" ".join(str(text).split()), file=out, flush=True))
        except BaseException:
            traceback.print_exc()
            os._exit(99)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as lines:
        text = lines.read().splitlines()
    return os.waitpid(pid, 0)[1], text


def outcome(use, say, damaged):
    """Report how a use ended: "fine", or "named" if the error names the damaged file."""
    try:
        use()
        say("fine")
    except CorruptStoreError as error:
        say("named" if damaged in str(error) else f"CorruptStoreError without {damaged}: {error}")
    except Exception as error:
        say(f"{type(error).__name__}: {error}")


def touch(trace):
    """Read all fields of a trace that are not views of the file."""
    _ = trace.question_id, trace.answer, trace.question, trace.tokens_decoded, trace.extras, trace.source
    _ = trace.attention, trace.prompt_length, trace.score
    if trace.attention_layout != "edges":
        _ = trace.attention_mean


def uses(store):
    """Return functions that read the store, by name."""
    indices, ids = np.arange(len(store)), list(store.question_ids)
    locations = store.internals.index.locations

    def batches():
        hidden = [s for row in locations(indices).tolist() for s in hidden_of(store, row)]
        job = gather.CopyJob(hidden, kernels.F16, kernels.F16)
        job.set_output(bytearray(job.out_bytes))
        job.run(2)

    return {
        "trace": lambda: [touch(t) for t in store],
        "gather": batches,
        "copy": lambda: [t.copy() for t in store],
        "index_of": lambda: [store.index_of(i) for i in ids],
        "ids": lambda: list(store.question_ids),
        "columns": lambda: (store.num_tokens, store.has_nonfinite, store.targets(), store.require_view("graph")),
    }


def hidden_of(store, row):
    """Return the sources of the hidden states of a trace, from its row of the index."""
    return (
        store.internals.segment(row[0]).array("hidden_states").copy_sources(row[1], row[1] + store.num_layers * row[3])
    )


def loader_uses(path, with_worker):
    """Return functions that read batches and items of a store again, by name, after a first epoch of each."""
    from torch.utils.data import DataLoader

    def loader(view, threads):
        return tracestore.TraceLoader(path, view, batch_size=4, num_threads=threads)

    made = {f"{v} {n}": loader(v, n) for v in ("sequence", "graph") for n in (0, 1, 2)}
    for each in made.values():
        for _ in each:
            pass
    found = {name: (lambda each=each: [None for _ in each]) for name, each in made.items()}
    for view in ("sequence", "graph"):
        items = tracestore.TraceDataset(path, view)
        _ = [items[k] for k in range(len(items))]
        found[f"items {view}"] = lambda items=items: [items[k] for k in range(len(items))]
    if not with_worker:
        return found
    stream = tracestore.TraceIterableDataset(path, "graph", batch_size=4)
    worker = DataLoader(stream, batch_size=None, num_workers=1)
    _ = list(stream)
    found["worker"] = lambda: [None for _ in worker]
    return found


CASES = {
    "none": {},
    "zstd": {"codec": "zstd"},
    "heads": {"attention": "heads"},
    "square": {"causal": False},
    "edges": {"edges": True},
}


def truncate(path, size):
    """Truncate a file even if it is read-only."""
    path.chmod(0o644)
    os.truncate(path, size)


@pytest.mark.long
@pytest.mark.parametrize("case", ["none", "zstd"])
def test_files_truncated_before_opening(tmp_path, case):
    whole = make_store(tmp_path / "whole.zarr", **CASES[case])
    store = tmp_path / "s.zarr"
    shutil.copytree(whole, store)
    names = files_of(whole)
    if not EVERY:
        names = [
            n
            for n in names
            if (not n.startswith("segments") or n.startswith(segment_of(whole))) or "hidden" in n or "_decoded" in n
        ]
    if case == "zstd" and not EVERY:
        names = [n for n in names if n.split("/")[2:3] in (["hidden_states"], ["attention"], ["last_token"])]
    named = set()
    for name in names:

        def work(say, name=name):
            warnings.simplefilter("ignore")
            for size in sizes_to_try((whole / name).stat().st_size):
                truncate(store / name, size)
                report = verify_store(store, num_threads=1)
                say("verified" if name in report.damaged else f"verify, {size} bytes: {report.damaged}")
                opened = []
                outcome(lambda: opened.append(tracestore.open(store)), say, name)
                for use in uses(opened[0]).values() if opened else ():
                    outcome(use, say, name)
                (store / name).unlink()
                shutil.copy2(whole / name, store / name)

        status, lines = in_child(work)
        assert status == 0, (name, status, lines)
        assert "verified" in lines and set(lines) <= {"fine", "named", "verified"}, (name, lines)
        if "named" in lines:
            named.add(name)
    # A reader reports every file that it needs.
    unread = {n for n in names if n not in named and n.split("/")[0] not in ("manifest", "columns", "index")}
    assert {n.split("/", 2)[2] for n in unread if n.startswith("segments/")} <= {"zarr.json"}, unread


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_files_truncated_while_open(tmp_path, case):
    whole = make_store(tmp_path / "whole.zarr", **CASES[case])
    store = tmp_path / "s.zarr"
    shutil.copytree(whole, store)
    wanted = ("hidden_states/c/0/0", "attention/c/0", "last_token/c/0/0/0", "rows.zip")
    if EVERY:
        wanted = ("",)
    elif case == "edges":
        wanted = ("edge_index/c/0/0", "edge_weight/c/0", "rows.zip")
    elif case != "none":
        wanted = wanted[:2]
    names = [
        n
        for n in files_of(whole)
        if n.endswith(wanted) and (not n.startswith("segments") or n.startswith(segment_of(whole)))
    ]
    names += [n for n in files_of(whole) if n.startswith("index/") and n.endswith(".zip")]
    for name in dict.fromkeys(names):

        def work(say, name=name):
            for size in sizes_to_try((whole / name).stat().st_size):
                opened = tracestore.open(store, cache_bytes=1)
                found = uses(opened)
                for use in found.values():
                    use()
                truncate(store / name, size)
                for use in found.values():
                    outcome(use, say, name)
                report = verify_store(store, num_threads=1)
                say("verified" if name in report.damaged else f"verify, {size} bytes: {report.damaged}")
                (store / name).unlink()
                shutil.copy2(whole / name, store / name)

        status, lines = in_child(work)
        assert status == 0, (name, status, lines)
        assert "verified" in lines and set(lines) <= {"fine", "named", "verified"}, (name, lines)
        read_again = case != "zstd" and name.endswith(("hidden_states/c/0/0", "attention/c/0", "question/c/0", "part"))
        assert lines.count("named") >= lines.count("verified") or not read_again, (name, lines)


def batches_of_truncated_files(folder):
    """Let loaders and datasets read a store again after a file was truncated. Runs in a separate process."""
    kinds = [("hidden_states/c/0/0", "graph"), ("attention/c/0", "graph"), ("last_token/c/0/0/0", "sequence")]
    for case in ("none", "zstd"):
        whole, store = make_store(folder / f"{case}.zarr", **CASES[case]), folder / "s.zarr"
        for kind, view in kinds if EVERY or case == "none" else kinds[:1]:
            name = f"{segment_of(whole)}/{kind}"
            size = (whole / name).stat().st_size
            lefts = [size // 2 // PAGE * PAGE, size - 1] if kind.startswith("hidden") else [size // 2 // PAGE * PAGE]
            for left in (0, *lefts) if EVERY else lefts:
                shutil.copytree(whole, store)
                found = loader_uses(store, with_worker=view == "graph" and 0 < left < size - 1)
                truncate(store / name, left)
                for use_name, use in found.items():
                    outcomes = []
                    outcome(use, outcomes.append, name)
                    # Batches of chunks that were decoded before the truncation are correct.
                    must_fail = case == "none" and (view in use_name or (use_name == "worker" and view == "graph"))
                    assert outcomes == ["named"] or (not must_fail and outcomes == ["fine"]), (name, left, use_name)
                del found
                shutil.rmtree(store)
    print("every use answered")


@pytest.mark.long
def test_batches_of_files_truncated_while_open(tmp_path):
    pytest.importorskip("torch")
    code = "import sys, pathlib; from tests.store.read import test_truncation as t; t.batches_of_truncated_files(pathlib.Path(sys.argv[1]))"
    done = run_cli("-c", code, tmp_path)
    assert (done.returncode, done.stdout) == (0, "every use answered\n"), done.stderr


def test_kernels_on_views_of_a_truncated_file(tmp_path):
    path = tmp_path / "input.bin"
    path.write_bytes(np.ones(4 * PAGE // 2, "f2").tobytes())
    mapped = MappedFile(path)
    view = np.frombuffer(mapped, "f2")
    assert kernels.checksum_scan([view], kernels.F16, view.size)[0] == 0
    os.truncate(path, PAGE)
    raw = view.view("u1")
    S = 64
    square, out = view[: S * S], np.empty(2 * S * S, "u1")
    f16 = kernels.F16
    calls = {
        "crc32c": lambda: kernels.crc32c(raw),
        "nonfinite": lambda: kernels.checksum_scan([raw], f16, raw.size // 2),
        "to_float16": lambda: kernels.to_float16(raw, f16, np.empty(len(raw), "u1")),
        "checksum_scan": lambda: kernels.checksum_scan([square], f16, S * S),
        "mean": lambda: kernels.pack_attention([square], f16, None, f16, 1, S, False, out),
        "heads": lambda: kernels.pack_attention([square], f16, [square], f16, 1, S, False, out),
        "unpack": lambda: kernels.unpack_triangle(view[: S * (S + 1) // 2], 2, 1, S, out),
        "mean_rows": lambda: kernels.mean_rows(square, f16, 1, S * S, out),
        "read": lambda: mapped.read(2 * PAGE, 3 * PAGE),
        "read before the end": lambda: mapped.read(0, 10),
        "check": mapped.check_intact,
    }
    for name, call in calls.items():
        with pytest.raises(TruncatedFileError, match=r"input\.bin: cut short"):
            call()
            pytest.fail(name)
    assert kernels.crc32c(raw[:PAGE]) == kernels.crc32c(raw[:PAGE].tobytes())


_OUTSIDE = """
import ctypes, faulthandler, os, signal, sys
from pathlib import Path
way, path = sys.argv[1], Path(sys.argv[2])
path.write_bytes(b"x" * 8192)
libc = ctypes.CDLL(None)
HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
@HANDLER
def earlier(number):
    os.write(1, b"earlier handler\\n")
    os._exit(42)
def install():
    if way == "c":
        libc.signal(signal.SIGBUS, earlier)
    elif way.startswith("faulthandler"):
        faulthandler.enable()
if way != "faulthandler after":
    install()
import numpy as np
from tracestore._core.mapping import MappedFile
from tracestore.errors import TruncatedFileError
mapped = MappedFile(path)
if way == "faulthandler after":
    install()
os.truncate(path, 0)
for _ in range(3):
    try:
        mapped.read(0, 10)
    except TruncatedFileError:
        os.write(1, b"guarded\\n")
int(np.frombuffer(mapped, "u1")[5])
"""


@pytest.mark.parametrize("way", ["none", "c", "faulthandler", "faulthandler after"])
def test_signal_handlers_of_other_libraries_are_kept(tmp_path, way):
    """A SIGBUS outside the guard goes to the handler that was installed before."""
    done = run_cli("-c", _OUTSIDE, way, tmp_path / "f")
    assert done.stdout.startswith("guarded\nguarded\nguarded\n")
    if way == "c":
        assert done.returncode == 42 and done.stdout.endswith("earlier handler\n")
    else:
        assert done.returncode == -signal.SIGBUS
        assert ("Fatal Python error: Bus error" in done.stderr) == (way != "none")
        assert done.stderr.count("Fatal Python error") <= 1
