"""The whole job from pickles, ours against today's way, each in processes of its own in one run:
seconds, peak anonymous memory of the process tree, and the test AUROC of the three detectors.

python bench/end_to_end.py TRACES_DIR WORK_DIR [--traces 200] [--epochs 3] [--traces-per-file 40]

TRACES_DIR: pickles and one *scores*.csv, as tracestore extract writes them.
"""

import argparse
import csv
import json
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from benchmarks.common import ROOT, Peak

from tracestore.evaluation.metrics import auroc


def cut(source: Path, folder: Path, count: int, per_file: int) -> Path:
    """The first `count` traces as pickles of `per_file`; -> their scores file."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    waiting: list[dict[str, object]] = []
    left, number = count, 0
    for path in sorted(source.glob("*.pkl")):
        with path.open("rb") as file:
            traces = pickle.load(file)[:left]  # made by tracestore extract on this machine
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


def watched(*command: object) -> tuple[float, int, str]:
    """-> seconds, peak anonymous bytes, standard output."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *map(str, command)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    peak = Peak(process.pid)
    out, _ = process.communicate()
    seconds = time.perf_counter() - began
    memory = peak.stop()
    if process.returncode:
        raise SystemExit(f"exit {process.returncode}: {' '.join(map(str, command))}")
    return seconds, memory, out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--traces", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--traces-per-file", type=int, default=40)
    args = parser.parse_args()
    pickles, store, results = (args.work / name for name in ("traces_data", "store.zarr", "results"))
    scores = cut(args.source, pickles, args.traces, args.traces_per_file)
    for old in (store, results, args.work / "preprocessed"):
        shutil.rmtree(old, ignore_errors=True)

    converting = watched("-m", "tracestore.convert", pickles, store)
    training = watched("tools/train.py", "--store", store, "--output-dir", results, "--epochs", args.epochs)
    ours = json.loads((results / "results.json").read_text())["models"]
    seconds, memory = converting[0] + training[0], max(converting[1], training[1])
    print(f"ours: {seconds:.1f} s (converting {converting[0]:.1f} s), {memory / 2**20:,.0f} MiB", flush=True)

    todays = watched(
        "bench/baseline_scripts.py", pickles, args.work / "preprocessed", "--scores", scores, "--epochs", args.epochs
    )
    theirs = json.loads(todays[2].splitlines()[-1])
    print(f"today's way: {todays[0]:.1f} s, {todays[1] / 2**20:,.0f} MiB")
    print(f"{todays[0] / seconds:.1f} times as fast, {memory / todays[1]:.2f} of the memory")
    for name, entry in theirs.items():
        y, logit = np.array(entry["label"]).astype(int), np.array(entry["logit"])
        mine = ours[name]["test"]
        mine_low, mine_high = mine["auroc_interval"]
        print(
            f"{name}: test AUROC {mine['auroc']:.3f} ({mine_low:.3f} to {mine_high:.3f}), "
            f"today's way {auroc(y, logit):.3f}"
        )


if __name__ == "__main__":
    main()
