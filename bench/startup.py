"""Seconds until the first useful line: imports, and what a short training spends outside of its epochs.

python bench/startup.py STORE [--repeats 5] [--epochs 3]
python bench/startup.py --make STORE     # 100 traces of L=30, D=576, H=9, 30 to 70 tokens

Every figure is the median over processes of their own. Outside of its epochs: the process from its
start to its end, without the training epochs and their validation passes.
"""

import argparse
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
IMPORTS = {"torch": "import torch", "TraceLoader": "import tracestore; tracestore.TraceLoader"}
# Method or function of a module -> the phase that its time counts to.
PHASES = (
    ("tracestore.train.loop", "DetectorRun._train_epoch", "epochs"),
    ("tracestore.train.loop", "DetectorRun._validate", "epochs"),
    ("tracestore.train.loop", "DetectorRun._setup", "setup"),
    ("tracestore.train.loop", "DetectorRun._finish", "test part"),
    ("tracestore.train.loop", "DetectorRun._save_last", "checkpoints"),
    ("tracestore.train.run", "run_probe", "probe"),
    ("tracestore.train.run", "_complete", "comparisons"),
    ("tracestore.train.report", "write_plots", "plots"),
    ("tracestore.train.report", "write_page", "page"),
)


def make(path: Path, count: int = 100) -> None:
    """Converts `count` synthetic traces with scores."""
    rng = np.random.default_rng(0)
    layers, dim, heads = 30, 576, 9
    with tempfile.TemporaryDirectory() as folder:
        traces = []
        for k in range(count):
            n = int(rng.integers(30, 71))
            attention = np.tril(rng.random((layers, heads, n, n), np.float32)).astype("f2")
            traces.append(
                {
                    "hidden_states": list(rng.standard_normal((layers, n, dim), np.float32).astype("f2")),
                    "attentions": list(attention),
                    "tokens": rng.integers(0, 50_000, n),
                    "tokens_decoded": ["word"] * n,
                    "generated_answer_clean": "answer",
                    "question_id": f"q{k}",
                }
            )
        with (Path(folder) / "traces.pkl").open("wb") as file:
            pickle.dump(traces, file)
        scores = "".join(f"q{k},{score:.4f}\n" for k, score in enumerate(rng.random(count)))
        (Path(folder) / "scores.csv").write_text("question_id,score\n" + scores)
        subprocess.run([sys.executable, "-m", "tracestore.convert", folder, path], check=True, env=ENVIRONMENT)


def seconds(*command: object) -> float:
    """Of a process, from its start to its end."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *map(str, command)], check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    return time.perf_counter() - began


def train(phases_path: Path, arguments: list[str]) -> None:
    """Trains as tools/train.py does and writes the seconds of each phase: what runs in the measured process."""
    import importlib
    import runpy

    began = time.perf_counter()
    spent: dict[str, float] = {}
    running: list[float] = []

    def timed(function, phase):
        def run(*args, **kwargs):
            start = time.perf_counter()
            running.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                whole = time.perf_counter() - start
                # Of a phase within another one, once.
                spent[phase] = spent.get(phase, 0.0) + whole - running.pop()
                if running:
                    running[-1] += whole

        return run

    for module_name, path, phase in PHASES:
        owner = importlib.import_module(module_name)
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        setattr(owner, name, timed(getattr(owner, name), phase))
    spent["imports"] = time.perf_counter() - began
    sys.argv = ["train.py", *arguments]
    try:
        runpy.run_path(str(ROOT / "tools" / "train.py"), run_name="__main__")
    finally:
        phases_path.write_text(json.dumps(spent))


def training(store: Path, epochs: int) -> dict[str, float]:
    """Seconds of each phase of one training, `outside` of its epochs in all."""
    with tempfile.TemporaryDirectory() as folder:
        phases = Path(folder) / "phases.json"
        arguments = ["--store", store, "--output-dir", Path(folder) / "results", "--epochs", epochs]
        whole = seconds(__file__, "--phases", phases, *arguments)
        spent = json.loads(phases.read_text())
    rest = whole - sum(spent.values())
    return {**spent, "rest": rest, "outside": whole - spent["epochs"], "whole": whole}


def main() -> None:
    if sys.argv[1:2] == ["--phases"]:
        train(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--make", action="store_true", help="write the store and end")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    if args.make:
        make(args.store)
        return
    found = {name: [] for name in IMPORTS}
    for _ in range(args.repeats):
        for name, code in IMPORTS.items():
            found[name].append(seconds("-c", code))
    median = {name: statistics.median(values) for name, values in found.items()}
    print(
        f"import: torch {median['torch']:.2f} s, TraceLoader {median['TraceLoader']:.2f} s, "
        f"difference {median['TraceLoader'] - median['torch']:+.2f} s",
        flush=True,
    )
    runs = [training(args.store, args.epochs) for _ in range(args.repeats)]
    for phase in sorted(runs[0], key=lambda p: statistics.median(r[p] for r in runs)):
        print(f"{phase:12} {statistics.median(r[phase] for r in runs):6.2f} s")


if __name__ == "__main__":
    main()
