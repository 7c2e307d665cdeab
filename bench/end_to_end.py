"""Compare the whole job, from pickles to detectors, with that of baseline_scripts.py.

Prints the seconds, the peak anonymous memory of the process tree and the test AUROC of each detector.

python bench/end_to_end.py TRACES_DIR WORK_DIR [--traces 200] [--epochs 3] [--traces-per-file 40]

TRACES_DIR holds pickles and one *scores*.csv, as `tracestore extract` writes them.
"""

import argparse
import csv
import json
import pickle
import shutil
import time
from pathlib import Path

import numpy as np
from benchmarks.common import ROOT, run

from tracestore.evaluation.metrics import auroc


def copy_traces(source: Path, folder: Path, count: int, per_file: int) -> Path:
    """Copy the first `count` traces to pickles of `per_file` traces. Return the path of their scores file."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    waiting: list[dict[str, object]] = []
    left, number = count, 0
    for path in sorted(source.glob("*.pkl")):
        with path.open("rb") as file:
            traces = pickle.load(file)[:left]  # trusted: written by tracestore extract on this machine
        left -= len(traces)
        waiting += traces
        while len(waiting) >= per_file or (waiting and left == 0):
            with (folder / f"traces_batch_{number:04}.pkl").open("wb") as file:
                pickle.dump(waiting[:per_file], file)
            del waiting[:per_file]
            number += 1
    (scores,) = source.glob("*scores*.csv")
    with scores.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    with (folder / "scores.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows[: count + 1])
    return folder / "scores.csv"


def measure(*command: object) -> tuple[float, int, str]:
    """Run a Python process. Return its seconds, peak anonymous bytes and standard output."""
    began = time.perf_counter()
    out, memory = run(*command, cwd=ROOT)
    return time.perf_counter() - began, memory, out


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--traces", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--traces-per-file", type=int, default=40)
    args = parser.parse_args()
    pickles, store, results = (args.work / name for name in ("traces_data", "store.zarr", "results"))
    scores = copy_traces(args.source, pickles, args.traces, args.traces_per_file)
    for old in (store, results, args.work / "preprocessed"):
        shutil.rmtree(old, ignore_errors=True)

    converting = measure("-m", "tracestore.convert", pickles, store)
    training = measure("tools/train.py", "--store", store, "--output-dir", results, "--epochs", args.epochs)
    ours = json.loads((results / "results.json").read_text())["models"]
    seconds, memory = converting[0] + training[0], max(converting[1], training[1])
    print(f"tracestore: {seconds:.1f} s (converting {converting[0]:.1f} s), {memory / 2**20:,.0f} MiB", flush=True)

    baseline = measure(
        "bench/baseline_scripts.py", pickles, args.work / "preprocessed", "--scores", scores, "--epochs", args.epochs
    )
    logits = json.loads(baseline[2].splitlines()[-1])
    print(f"baseline: {baseline[0]:.1f} s, {baseline[1] / 2**20:,.0f} MiB")
    print(f"{baseline[0] / seconds:.1f} times as fast, {memory / baseline[1]:.2f} of the memory")
    for name, entry in logits.items():
        y, logit = np.array(entry["label"]).astype(int), np.array(entry["logit"])
        test = ours[name]["test"]
        low, high = test["auroc_interval"]
        print(f"{name}: test AUROC {test['auroc']:.3f} ({low:.3f} to {high:.3f}), baseline {auroc(y, logit):.3f}")


if __name__ == "__main__":
    main()
