"""Compare training, predict and benchmark beside a busy process with the same on an idle machine.

python bench/busy_processor.py STORE [--what NAME ...] [--rounds 9] [--baseline CHECKOUT]

Runs alternate. The other process computes in one thread and is not pinned. `bench/startup.py --make STORE` writes a
store. For training, the time is the median of the epochs after the first one; for predict, the median of repeated
calls in one process; for benchmark, that of the whole command. With --baseline, each round also runs another checkout
alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import ROOT

MODELS = {
    "lstm_solo": "lstm",
    "gnn_det_lstm": "gnn-det",
    "gnn_det_lstm_no_edges": "gnn-det-no-edges",
    "gvae_lstm": "gvae",
    "gvae_lstm_no_edges": "gvae-no-edges",
}
EPOCHS = 3
PREDICT = """
import statistics, sys, time
from tracestore import process
process.configure_program()
from tracestore.cli import main
times = []
for _ in range(5):
    began = time.perf_counter()
    assert main(sys.argv[1:]) == 0
    times.append(time.perf_counter() - began)
print(statistics.median(times[1:]), file=sys.stderr)
"""


def run(checkout: Path, *command: object) -> str:
    """Run Python with the package of a checkout. Return what it prints on standard error."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=checkout, env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    return done.stderr


def train(checkout: Path, store: Path, folder: Path, model: str) -> float:
    """Train one model and return the median of the seconds of its epochs after the first."""
    flags = [f"--{'' if name == model else 'no-'}run-{flag}" for name, flag in MODELS.items()]
    words = ["--store", store, "--output-dir", folder, "--epochs", EPOCHS, "--no-probe", "--overwrite", *flags]
    run(checkout, "-m", "tracestore", "train", *words)
    entry = json.loads((folder / "results.json").read_text())["models"][model]
    return statistics.median(entry["seconds_per_epoch"][1:])


def measure(what: str, checkout: Path, store: Path, folder: Path) -> float:
    """Return the seconds of a measurement with the package of a checkout."""
    if what in MODELS:
        return train(checkout, store, folder / what, what)
    if what == "predict":
        checkpoint, output = folder / "gnn_det_lstm/gnn_det_lstm/best.pt", folder / "predictions.csv"
        words = ["predict", "--checkpoint", checkpoint, "--store", store, "--output", output]
        return float(run(checkout, "-c", PREDICT, *words).splitlines()[-1])
    words = [
        "--detectors",
        "lstm_solo,gnn_det_lstm",
        "--folds",
        "2",
        "--output-dir",
        folder / "benchmark",
        "--overwrite",
    ]
    began = time.perf_counter()
    run(checkout, "-m", "tracestore", "benchmark", store, *words)
    return time.perf_counter() - began


def main() -> None:
    """Print a row for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    names = [*MODELS, "predict", "benchmark"]
    parser.add_argument("--what", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--baseline", type=Path, help="another checkout, whose package is measured alone")
    args = parser.parse_args()
    store, states = args.store.resolve(), ["alone", "beside"] + ["baseline"] * (args.baseline is not None)
    heads = "".join(f"{state:>12} s" for state in states)
    print(f"{'':24}{heads}   beside/alone" + "  alone/baseline" * (len(states) > 2))
    with tempfile.TemporaryDirectory() as work:
        if "predict" in args.what:
            train(ROOT, store, Path(work) / "gnn_det_lstm", "gnn_det_lstm")
        for what in args.what:
            times: dict[str, list[float]] = {state: [] for state in states}
            for number in range(args.rounds):
                for state in states if number % 2 else reversed(states):
                    checkout = args.baseline.resolve() if state == "baseline" else ROOT
                    busy = [sys.executable, "-c", "while True: pass" if state == "beside" else ""]
                    with subprocess.Popen(busy) as other:
                        times[state].append(measure(what, checkout, store, Path(work)))
                        other.kill()
            medians = {state: statistics.median(seconds) for state, seconds in times.items()}
            row = f"{what:24}{''.join(f'{medians[state]:13.3f}' for state in states)}"
            row += f"{medians['beside'] / medians['alone']:14.2f}"
            if "baseline" in medians:
                row += f"{medians['alone'] / medians['baseline']:16.3f}"
            print(row, flush=True)


if __name__ == "__main__":
    main()
