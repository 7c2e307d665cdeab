"""Timers, memory sampling, limits and fixtures that the benchmarks and the scripts in bench/ share."""

import gzip
import json
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

import tracestore

BENCH = Path(__file__).resolve().parent.parent
ROOT = BENCH.parent
BATCH_SIZE = 16
MILLION = 1_000_000
# Layers, hidden size, heads.
SMALL = {"layers": 30, "dim": 576, "heads": 9}  # 3.2 MB a trace with every head
LARGE = {"layers": 32, "dim": 4096, "heads": 32}  # 23 MB a trace of 60 tokens, 640 MB of 500
# Batches of the training steps: B traces, L layers, hidden size D, min and max tokens, top-k fraction, threshold.
STEP_SHAPES = {
    "L=30 D=576, 45-65 tokens": (16, 30, 576, 45, 65, None, 0.0),
    "L=32 D=4096, 45-65 tokens": (4, 32, 4096, 45, 65, None, 0.0),
    "L=30 D=576, 5-15 tokens": (16, 30, 576, 5, 15, None, 0.0),
    "L=30 D=576, 256-300 tokens": (1, 30, 576, 256, 300, None, 0.0),
    "L=30 D=576, 45-65 tokens, above 0.05": (16, 30, 576, 45, 65, None, 0.05),
    "L=30 D=576, 45-65 tokens, top-k 0.1": (16, 30, 576, 45, 65, 0.1, 0.0),
}
GRAPH_MODELS = ("gnn_det_lstm", "gvae_lstm")
# The fixtures. Pickles: traces of SMALL by suffix. Stores: layers, hidden size, traces.
PICKLED = {".pkl": 128, ".pkl.gz": 48}
STORES = {"small": (30, 576, 400), "large": (32, 4096, 40)}


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that one call of `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def median_seconds(work: Callable[[], object], repeats: int = 9) -> float:
    """Return the median of the seconds that `repeats` calls of `work` take."""
    return statistics.median(timed(work) for _ in range(repeats))


def anonymous_bytes(pid: int) -> int:
    """Return the resident anonymous memory of a process. A process that has ended has none."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("RssAnon:")), 0)


def process_tree(pid: int) -> Iterator[int]:
    """Yield `pid` and the ids of its descendants."""
    yield pid
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield from process_tree(int(child))
    except OSError:
        return


class Peak:
    """Sample the anonymous memory of a process and its descendants from outside, until `stop`."""

    def __init__(self, pid: int, interval_s: float = 0.01) -> None:
        self.pid, self.interval_s = pid, interval_s
        self.anonymous = 0
        self._sample()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _sample(self) -> None:
        self.anonymous = max(self.anonymous, sum(map(anonymous_bytes, process_tree(self.pid))))

    def _watch(self) -> None:
        while not self._done.wait(self.interval_s):
            self._sample()

    def stop(self) -> int:
        """Return the largest sample in bytes."""
        self._done.set()
        self._thread.join()
        return self.anonymous


def run(*command: object, watch: bool = True, **options: Any) -> tuple[str, int]:
    """Run a Python process. Return its standard output and, with `watch`, the peak of anonymous memory in bytes."""
    words = [sys.executable, *map(str, command)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, **options)
    peak = Peak(process.pid) if watch else None
    out, _ = process.communicate()
    anonymous = peak.stop() if peak else 0
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: exit {process.returncode}")
    return out, anonymous


def run_measured(module: str, *args: object) -> tuple[list[str], int]:
    """Run a module of this package in a process of its own.

    The module completes its setup, which is not measured, and calls `wait_for_start`.

    Returns
    -------
    lines : list of str
        Lines that the module printed afterwards.
    peak_bytes : int
        Largest anonymous memory of the process and its children, above what the process had at
        `wait_for_start`. Sampled every millisecond.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, args)]
    # Not in the root of the checkout, where `python -m` would import its tracestore instead of the installed one.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=BENCH) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{command} failed")
        baseline = anonymous_bytes(process.pid)
        peak = Peak(process.pid, 0.001)
        out, _ = process.communicate("go\n")
        peak_bytes = peak.stop() - baseline
    if process.returncode != 0:
        raise RuntimeError(f"{command} failed")
    return out.splitlines(), peak_bytes


def measure_steps(model: str, shape: str, kind: str, steps: int) -> tuple[float, int]:
    """Return the median seconds of a step, and the peak of anonymous memory above the batch in bytes."""
    lines, peak = run_measured("training", model, shape, kind, steps)
    return statistics.median(map(float, lines)), peak


def wait_for_start() -> None:
    """Tell `run_measured` that everything is prepared, and wait for it to begin measuring."""
    print("ready", flush=True)
    sys.stdin.readline()


class Memcpy:
    """A copy of `num_bytes` by two threads, between pages that were touched before."""

    def __init__(self, num_bytes: int, threads: int = 2) -> None:
        part = num_bytes // threads
        self.pairs = [(np.ones(part, "u1"), np.ones(part, "u1")) for _ in range(threads)]

    def __call__(self) -> None:
        """Copy once."""
        threads = [threading.Thread(target=np.copyto, args=p) for p in self.pairs]
        for t in threads:
            t.start()
        for t in threads:
            t.join()


def make_trace(k: int, tokens: int, *, layers: int, dim: int, heads: int) -> dict[str, object]:
    """Return trace k with values like a model's.

    Rows of attention sum to 1. The heads differ from one another, because equal heads would inflate
    faster than any real trace.
    """
    rng = np.random.default_rng(k)
    hidden = rng.standard_normal((tokens, dim), "f4").astype("f2")

    def attention() -> np.ndarray:
        weights = np.tril(np.exp(rng.standard_normal((heads, tokens, tokens), "f4")))
        return (weights / weights.sum(-1, keepdims=True)).astype("f2")

    return {
        "hidden_states": [np.roll(hidden, layer, axis=1) for layer in range(layers)],
        "attentions": [attention() for _ in range(layers)],
        "tokens": rng.integers(0, 50_000, tokens),
        "tokens_decoded": [f" token{t}" for t in range(tokens)],
        "generated_answer_clean": f"answer {k}",
        "question_id": f"q{k}",
    }


def open_source(path: Path, mode: str) -> IO[bytes]:
    """Open a pickle, packed by Python's gzip where it ends with .gz."""
    return gzip.open(path, mode) if path.suffix == ".gz" else path.open(mode)


def convert(source: Path, store: Path, *options: str, watch: bool = False) -> dict[str, float]:
    """Run one conversion in a process of its own.

    Returns
    -------
    dict
        `seconds` of the conversion, `bytes` of the store and, with `watch` (which takes processor
        time), `anonymous`, the peak of anonymous memory in bytes.
    """
    shutil.rmtree(store, ignore_errors=True)
    command = ["-m", "tracestore.convert", source, store, "--json", *options]
    out, anonymous = run(*command, watch=watch, stderr=subprocess.DEVNULL)
    summary = json.loads(out)
    return {"seconds": summary["seconds"], "bytes": summary["bytes_out"], "anonymous": anonymous}


# Call pickle.load, then write and sync as many bytes of the arrays as the store takes.
_BASELINE = """
import os, pickle, sys, time
start = time.perf_counter()
left, count = int(sys.argv[3]), 0
fd = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
for name in sorted(os.listdir(sys.argv[1])):
    for trace in pickle.load(open(os.path.join(sys.argv[1], name), "rb")):
        for array in trace["hidden_states"] + trace["attentions"]:
            view = memoryview(array).cast("B")[:left]
            left -= len(view)
            while len(view):
                view = view[os.write(fd, view):]
os.fsync(fd)
print(time.perf_counter() - start)
"""


def baseline(source: Path, target: Path, num_bytes: int) -> float:
    """Return the seconds of pickle.load, a write of `num_bytes` and an fsync."""
    out, _ = run("-c", _BASELINE, source, target, num_bytes, watch=False)
    target.unlink()
    return float(out)


_INFLATE = """
import sys, time
from isal import igzip_threaded
start, total = time.perf_counter(), 0
for name in sys.argv[1:]:
    with igzip_threaded.open(name, "rb", threads=1, block_size=1 << 20) as file:
        while data := file.read(1 << 20):
            total += len(data)
print(time.perf_counter() - start)
"""


def inflate(source: Path) -> float:
    """Return the seconds that isal takes to inflate the files of a folder."""
    return float(run("-c", _INFLATE, *sorted(source.iterdir()), watch=False)[0])


def warm(folder: Path) -> None:
    """Read the files of a folder into the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            while file.read(8 << 20):
                pass


def make_store(path: Path, layers: int, dim: int, count: int) -> None:
    """Write a store of traces of 30 to 70 tokens in float16: one head, every causal weight positive."""
    rng = np.random.default_rng(0)
    base = rng.standard_normal((layers, 70, dim), "f4").astype("f2")
    with tracestore.create(path) as writer:
        for k in range(count):
            tokens = int(rng.integers(30, 71))
            square = np.tril(rng.random((layers, 1, tokens, tokens), "f4") + 1e-3)
            writer.append(
                {
                    "hidden_states": list(np.roll(base[:, :tokens], k, axis=2)),
                    "attentions": list((square / square.sum(-1, keepdims=True)).astype("f2")),
                    "tokens": np.arange(tokens),
                    "tokens_decoded": [""] * tokens,
                    "generated_answer_clean": "",
                    "question_id": f"q{k}",
                },
                score=k % 2,
            )


def pickle_dir(folder: str | Path, suffix: str) -> Path:
    """Return the folder of the fixtures' pickles with one suffix."""
    return Path(folder) / f"pickles{suffix}"


def make_million(path: Path) -> None:
    """Write the index of a million traces in 2,000 segments, without their data."""
    sys.path.insert(0, str(ROOT))  # tracestore itself has been imported
    from tests.store.synthetic import make_index_only_store

    make_index_only_store(path, MILLION, num_segments=2000, num_parts=11)


class Fixtures:
    """Fixtures that asv creates once for all benchmarks.

    asv calls `setup_cache` in an empty folder, passes the folder's path to each benchmark, and removes
    the folder after the last one.
    """

    timeout = 600

    def setup_cache(self) -> str:
        """Write the fixtures into the current folder and return its path."""
        folder = Path.cwd()
        rng = np.random.default_rng(0)
        traces = [make_trace(k, int(rng.integers(30, 71)), **SMALL) for k in range(max(PICKLED.values()))]
        for suffix, count in PICKLED.items():
            pickle_dir(folder, suffix).mkdir()
            with open_source(pickle_dir(folder, suffix) / f"traces{suffix}", "wb") as file:
                pickle.dump(traces[:count], file, 4)
        for name, shape in STORES.items():
            make_store(folder / name, *shape)
        make_million(folder / "million")
        return str(folder)
