"""Compare this checkout with another one, built in place: conversion, opening, batches, training, processor time.

python bench/checkouts.py OTHER DIR [--what NAME ...] [--rounds 9]

Every measurement is a process of its own, and the checkouts alternate; each reads the store that it wrote. A row has
the median seconds of both, and the ratio of this checkout to the other: of the medians, of the processor time, and the
range of the single rounds. Use a DIR on a tmpfs, and compare a checkout with itself to learn the noise of the machine:
rows below a second may need 100 rounds. Training runs for a fixed time: its processor time says nothing.
"""

import argparse
import os
import pickle
import resource
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from benchmarks.common import ROOT, SMALL, make_trace, open_source, timed

# Traces and files of each source.
SOURCES = {
    "24 MB": (8, 1, ".pkl", SMALL),
    "277 MB": (90, 10, ".pkl", SMALL),
    "50 MB .pkl.gz": (18, 3, ".pkl.gz", SMALL),
    "275 MB .pt": (85, 5, ".pt", SMALL),
    "tiny": (20_000, 4, ".pkl", {"layers": 2, "dim": 32, "heads": 1}),
}
READ = "277 MB"  # the source of the stores that are read
OPEN = """
import statistics, sys, time, tracestore
def once():
    begin = time.perf_counter()
    tracestore.open(sys.argv[1]).close()
    return time.perf_counter() - begin
once()
print(statistics.median(once() for _ in range(300)))
"""
EPOCHS = """
import sys, time, tracestore
loader = tracestore.TraceLoader(sys.argv[1], batch_size=16, view=sys.argv[2], seed=1, shuffle=True)
def once():
    begin = time.perf_counter()
    for batch in loader:
        pass
    return time.perf_counter() - begin
once()
end = time.perf_counter() + 1
epochs = [once() for _ in range(7)]
while time.perf_counter() < end:
    epochs.append(once())
print(min(epochs))
"""
# Commit e803559 has no --models, but a flag for each model.
TRAIN = """
import contextlib, io, os, runpy, shutil, subprocess, sys, tempfile, time
class Lines(io.StringIO):
    ends = []
    def write(self, text):
        if " epoch " in text:
            self.ends.append(time.perf_counter())
            ends = [end for end in self.ends if end > self.ends[0] + 1]
            if len(ends) > 3 and ends[-1] > ends[0] + 3:
                print(min(b - a for a, b in zip(ends, ends[1:])), file=sys.__stdout__, flush=True)
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(0)
        return super().write(text)
store, model = sys.argv[1:]
flags = ["--models", model]
command = [sys.executable, "-m", "tracestore", "train"]
if b"--models" not in subprocess.check_output([*command, "--help"]):
    names = {"lstm_solo": "lstm", "gnn_det_lstm": "gnn-det", "gvae_lstm": "gvae"}
    names |= {f"{name}_no_edges": f"{flag}-no-edges" for name, flag in names.items() if flag != "lstm"}
    flags = [f"--{'' if name == model else 'no-'}run-{flag}" for name, flag in names.items()]
folder = tempfile.mkdtemp()
sys.argv[1:] = ["train", "--store", store, "--output-dir", folder, "--overwrite", "--epochs", "1000000", "--no-probe"]
sys.argv += flags
with contextlib.redirect_stdout(Lines()):
    runpy.run_module("tracestore", run_name="__main__")
"""
MODELS = ("lstm_solo", "gnn_det_lstm", "gnn_det_lstm_no_edges", "gvae_lstm", "gvae_lstm_no_edges")
READING = {"opening": (OPEN,), "sequence": (EPOCHS, "sequence"), "graph": (EPOCHS, "graph")}
READING |= {model: (TRAIN, model) for model in MODELS}


def write_sources(folder: Path, count: int, num_files: int, suffix: str, shape: dict[str, int]) -> None:
    """Write files of lists of traces."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for begin in range(0, count, -(-count // num_files)):
        numbers = range(begin, min(count, begin + -(-count // num_files)))
        sizes = (2 if shape["dim"] < 100 else int(rng.integers(30, 71)) for _ in numbers)
        traces = [make_trace(k, tokens, **shape) for k, tokens in zip(numbers, sizes, strict=True)]
        with open_source(folder / f"traces_{begin:05}{suffix}", "wb") as file:
            if suffix == ".pt":
                torch.save([{key: as_tensors(value) for key, value in trace.items()} for trace in traces], file)
            else:
                pickle.dump(traces, file, 4)


def as_tensors(value: Any) -> Any:
    """Return a value with tensors instead of arrays."""
    if isinstance(value, list):
        return [as_tensors(item) for item in value]
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value


def output_of(checkout: Path, *words: str) -> list[str]:
    """Return the lines that a Python with a checkout prints."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.check_output([sys.executable, *words], cwd=checkout, env=environment, text=True).splitlines()


def convert(checkout: Path, source: Path, store: Path) -> None:
    """Convert a source with a checkout."""
    output_of(checkout, "-m", "tracestore.convert", str(source), str(store))


def measure(checkout: Path, what: str, folder: Path) -> tuple[float, float]:
    """Return the seconds of one measurement, and the processor time of its process."""
    store = folder / f"{'out' if what in SOURCES else 'read'}_{crc32(bytes(checkout))}.zarr"
    lines: list[str] = []

    def run() -> None:
        if what in SOURCES:
            convert(checkout, folder / what, store)
        else:
            code, *more = READING[what]
            lines.extend(output_of(checkout, "-c", code, str(store), *more))

    if what in READING and not store.exists():
        convert(checkout, folder / READ, store)

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = timed(run)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if what in SOURCES:
        shutil.rmtree(store)
    else:
        seconds = float(lines[-1])
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print a row for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("folder", type=Path, metavar="DIR")
    names = [*SOURCES, *READING]
    parser.add_argument("--what", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    args.folder.mkdir(exist_ok=True)
    checkouts = [args.other.resolve(), ROOT]
    for what in args.what:
        source = what if what in SOURCES else READ
        if not (args.folder / source).exists():
            write_sources(args.folder / source, *SOURCES[source])
            if source == READ:  # training needs labels
                scores = (f"q{k},{k % 2}\n" for k in range(SOURCES[READ][0]))
                (args.folder / READ / "scores.csv").write_text("question_id,score\n" + "".join(scores))
        rounds = []
        for number in range(-1, args.rounds):  # the first round fills caches
            pair = {c: measure(c, what, args.folder) for c in checkouts[:: 1 if number % 2 else -1]}
            rounds.append([*pair[checkouts[0]], *pair[checkouts[1]]])
        other, other_processor, this, this_processor = map(statistics.median, zip(*rounds[1:], strict=True))
        single = [row[2] / row[0] for row in rounds[1:]]
        print(
            f"{what:24}{other:.4f} s, {this:.4f} s, ratio {this / other:.3f}, processor time "
            f"{this_processor / other_processor:.3f}, rounds {min(single):.2f} to {max(single):.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
