"""Measure speed and memory of conversion on large files, with the limits of the same run.

python bench/ingest.py speed|gzip|workers|memory|containers|tiny DIR [--gigabytes 1] [--rounds 5] [--traces FOLDER]

DIR selects the disk to measure; use tmpfs to exclude the disk. With --traces, `speed`, `gzip` and
`workers` convert the pickles in FOLDER (as `tracestore extract` writes them) instead of synthetic ones.
Python's gzip compresses the .pkl.gz files, because users' files come from it; files compressed by isal
inflate a tenth faster.
"""

import argparse
import os
import pickle
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from benchmarks.common import LARGE, ROOT, SMALL, baseline, convert, inflate, make_trace, open_source, run, warm
from containers import LAYOUTS
from containers import WRITERS as writers
from containers import write as write_container

COPY_BYTES = 1 << 20


class _Pickler(pickle._Pickler):  # type: ignore[name-defined]
    """Write a pickle of protocol 4 like pickle.dump, with one trace in memory at a time."""

    def __init__(self, file) -> None:
        super().__init__(file, 4)
        self._count = 0

    def memoize(self, value) -> None:
        self.write(pickle.MEMOIZE)
        self.memo[id(value)] = self._count, value
        self._count += 1

    def dump_all(self, traces) -> None:
        self.write(pickle.PROTO + b"\4" + pickle.EMPTY_LIST)
        self.memoize(root := [])  # noqa: F841
        self.write(pickle.MARK)
        for trace in traces:
            self.save(trace)
            self.memo = {
                k: v for k, v in self.memo.items() if not isinstance(v[1], dict | list | tuple | np.ndarray | bytes)
            }
        self.write(pickle.APPENDS + pickle.STOP)


def write_file(path: Path, traces) -> None:
    """Write a pickled list of traces."""
    with open_source(path, "wb") as file:
        _Pickler(file).dump_all(traces)


def synthetic_traces(num_bytes: float, shape: dict[str, int], tokens: tuple[int, int], first: int = 0):
    """Yield synthetic traces, numbered from `first`, until their arrays take `num_bytes`."""
    k, done, rng = first, 0, np.random.default_rng(first)
    while done < num_bytes:
        trace = make_trace(k, int(rng.integers(*tokens)), **shape)
        done += sum(a.nbytes for name in ("hidden_states", "attentions") for a in trace[name])
        yield trace
        k += 1


def disk_write(target: Path, num_bytes: int) -> float:
    """Return the seconds to write and sync `num_bytes` to a file."""
    data, start = os.urandom(8 << 20), time.perf_counter()
    with target.open("wb", buffering=0) as file:
        for _ in range(-(-num_bytes // len(data))):
            file.write(data)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    target.unlink()
    return seconds * num_bytes / (-(-num_bytes // len(data)) * len(data))


def source_dir(args: argparse.Namespace, suffix: str, files: int) -> Path:
    """Return the folder of files to convert: synthetic ones, or copies of those in --traces; made once."""
    name = f"{files}_files_{args.gigabytes:g}GB{suffix}" if args.traces is None else f"real{suffix}"
    folder: Path = args.folder / name
    if folder.exists():
        return folder
    partial = args.folder / f"partial_{name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if args.traces is None:
        for k in range(files):
            traces = synthetic_traces(args.gigabytes * 1e9 / files, SMALL, (30, 71), first=10_000 * k)
            write_file(partial / f"batch_{k}{suffix}", traces)
    else:
        for path in sorted(args.traces.glob("*.pkl")):
            with path.open("rb") as source, open_source(partial / f"{path.stem}{suffix}", "wb") as target:
                shutil.copyfileobj(source, target, COPY_BYTES)
    return partial.rename(folder)


def compare(args: argparse.Namespace, suffix: str, limit: str, seconds: Callable[[Path, int], float]) -> None:
    """Compare a conversion by one worker with `seconds`, which takes the source and the bytes of the store."""
    store, source = args.folder / "out.zarr", source_dir(args, suffix, 1)
    for mode in ("heads", "mean"):
        ratios = []
        for _ in range(args.rounds):
            warm(source)
            ours = convert(source, store, "--attention", mode, "--workers", "1")
            warm(source)
            base = seconds(source, int(ours["bytes"]))
            ratios.append(base / ours["seconds"])
            print(f"{suffix} {mode}: convert {ours['seconds']:.2f} s, {limit} {base:.2f} s", flush=True)
        print(f"{suffix} {mode}: {statistics.median(ratios):.2f} of the speed of {limit} ({ratios})", flush=True)
    shutil.rmtree(store)


def speed(args: argparse.Namespace) -> None:
    """Compare the conversion of a .pkl with pickle.load, a write and an fsync."""
    raw = args.folder / "raw"
    compare(args, ".pkl", "pickle.load + write + fsync", lambda source, size: baseline(source, raw, size))


def gzip(args: argparse.Namespace) -> None:
    """Compare the conversion of a .pkl.gz with isal's inflate."""
    compare(args, ".pkl.gz", "isal's inflate", lambda source, _: inflate(source))


def workers(args: argparse.Namespace) -> None:
    """Compare two workers with one, and with the write speed of the disk."""
    store, raw = args.folder / "out.zarr", args.folder / "raw"
    for suffix in (".pkl.gz", ".pkl"):
        source = source_dir(args, suffix, 8)
        gains, shares = [], []
        for _ in range(args.rounds):
            warm(source)
            one = convert(source, store, "--workers", "1")
            two = convert(source, store, "--workers", "2")
            gains.append(one["seconds"] / two["seconds"])
            shares.append(disk_write(raw, int(two["bytes"])) / two["seconds"])
            print(f"{suffix}: one worker {one['seconds']:.2f} s, two {two['seconds']:.2f} s", flush=True)
        print(
            f"{suffix}: two workers {statistics.median(gains):.2f} times one, "
            f"{statistics.median(shares):.2f} of the disk's write speed ({gains}, {shares})",
            flush=True,
        )
    shutil.rmtree(store)


def memory(args: argparse.Namespace) -> None:
    """Print the peak of anonymous memory of conversions."""
    store = args.folder / "out.zarr"

    def files(count: int, suffix: str, gigabytes: float, tokens: tuple[int, int]):
        folder = args.folder / "large"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for k in range(count):
            traces = synthetic_traces(gigabytes * 1e9 / count, LARGE, tokens, first=10_000 * k)
            write_file(folder / f"batch_{k:03}{suffix}", traces)
        return folder

    total = args.gigabytes
    for what, make in (
        (f"one {total:g} GB .pkl", lambda: files(1, ".pkl", total, (50, 70))),
        (f"one {total:g} GB .pkl.gz", lambda: files(1, ".pkl.gz", total, (50, 70))),
        (f"{40 * total:.0f} files of 25 MB", lambda: files(round(40 * total), ".pkl", total, (60, 65))),
        ("traces of 0.64 GB, .pkl", lambda: files(1, ".pkl", 1.5, (500, 501))),
        ("traces of 0.64 GB, .pkl.gz", lambda: files(1, ".pkl.gz", 1.5, (500, 501))),
    ):
        source = make()
        for mode in ("mean", "heads"):
            peak = convert(source, store, "--attention", mode, "--workers", "1", watch=True)["anonymous"]
            print(f"{what}, {mode}: {peak / 2**20:.0f} MiB of anonymous memory at the peak", flush=True)
        shutil.rmtree(source)
    shutil.rmtree(store)


def containers(args: argparse.Namespace) -> None:
    """Print the peak of anonymous memory of conversions of containers."""
    source, store = args.folder / "container", args.folder / "out.zarr"
    for name in args.only:
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir()
        write_container(name, source, args.gigabytes)
        size = sum(path.stat().st_size for path in source.iterdir())
        lines = [word for line in LAYOUTS[name] for word in ("--field", line)]
        done = convert(source, store, "--attention", "none", "--workers", "1", *lines, watch=True)
        peak = done["anonymous"] / 2**20
        print(
            f"{name}, {size / 1e9:.1f} GB: {peak:.0f} MiB of anonymous memory at the peak, {done['seconds']:.0f} s",
            flush=True,
        )
        shutil.rmtree(source)
        shutil.rmtree(store)


# Seconds of a processor that reading a file takes, and that converting it takes, the start apart.
_TINY = """
import sys, time
from pathlib import Path
from tracestore.cli import main
from tracestore.ingest.builtin.parts import find_sources
from tracestore.ingest.sources import read_traces
source, store = map(Path, sys.argv[1:])
start = time.process_time()
for trace in read_traces(find_sources([source], store)[0]):
    pass
read = time.process_time()
try:
    code = main(["convert", str(source), str(store), "--workers", "1", "--json"])
except SystemExit as error:
    code = error.code
assert not code
print(read - start, time.process_time() - read)
"""


def tiny(args: argparse.Namespace) -> None:
    """Read and convert one pickle of 50,000 traces of L=2 D=8 H=2 S=4, with each of the trees in turn."""
    count, path, store = 50_000, args.folder / "tiny.pkl", args.folder / "out.zarr"
    if not path.exists():
        path.write_bytes(pickle.dumps([make_trace(k, 4, layers=2, dim=8, heads=2) for k in range(count)], 4))
    times: dict[Path, list[list[float]]] = {tree: [] for tree in (*args.trees, ROOT)}
    for _ in range(args.rounds):
        for tree, found in times.items():
            shutil.rmtree(store, ignore_errors=True)
            out, _ = run("-c", _TINY, path, store, watch=False, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)})
            found.append([1e6 * float(number) / count for number in out.split()[-2:]])
    for tree, found in times.items():
        texts = [f"{statistics.median(v):.1f} ({min(v):.1f} to {max(v):.1f})" for v in zip(*found, strict=True)]
        print(f"{tree}: reading {texts[0]}, reading and storing {texts[1]} us per trace")
    shutil.rmtree(store)


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "gzip", "workers", "memory", "containers", "tiny"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=tuple(writers), choices=tuple(writers), help="of containers")
    parser.add_argument("--traces", type=Path, metavar="FOLDER")
    parser.add_argument("--trees", type=Path, nargs="*", default=(), help="of tiny: other commits, built in place")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    globals()[args.what](args)


if __name__ == "__main__":
    main()
