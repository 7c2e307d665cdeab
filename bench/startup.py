"""Measure the start: seconds of imports, and seconds of a short training outside of its epochs.

python bench/startup.py STORE [--repeats 5] [--epochs 3]
python bench/startup.py --make STORE     # 100 traces of L=30, D=576, 30 to 70 tokens

Prints wall time and processor time, each the median over separate processes. On a busy machine, read
the processor time. Time outside of the epochs is the time of the whole process without the training
epochs and their validation passes. A first training, which is not measured, lets Python cache
the libraries' bytecode, even where PYTHONDONTWRITEBYTECODE is set.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
ENVIRONMENT.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise every process compiles the libraries
IMPORTS = {"torch": "import torch", "TraceLoader": "import tracestore; tracestore.TraceLoader"}
# (module, function, phase that its time counts towards)
PHASES = (
    ("tracestore.train.trainer", "Trainer._train_epoch", "epochs"),
    ("tracestore.train.trainer", "Trainer._validate", "epochs"),
    ("tracestore.train.trainer", "Trainer._setup", "setup"),
    ("tracestore.train.trainer", "Trainer._finish", "test part"),
    ("tracestore.train.trainer", "Trainer._save_last", "checkpoints"),
    ("tracestore.experiment.training_run", "run_probe", "probe"),
    ("tracestore.experiment.training_run", "_Experiment._add_comparisons", "comparisons"),
    ("tracestore.experiment.training_run", "control_entries", "controls"),
    ("tracestore.experiment.training_run", "write_report", "report"),
)


def seconds(*command: object) -> np.ndarray:
    """Run a Python process. Return its wall time and processor time, (2,), in seconds."""
    began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *map(str, command)], check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_s = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    return np.array([time.perf_counter() - began, processor_s])


def train(phases_path: Path, arguments: list[str]) -> None:
    """Train like tools/train.py and write the seconds of each phase. Runs in the measured process."""
    import importlib
    import runpy

    def now() -> np.ndarray:
        return np.array([time.perf_counter(), time.process_time()])

    began = now()
    importlib.import_module("tracestore.process").configure_program()  # before torch is imported
    spent: dict[str, np.ndarray] = {}
    running: list[np.ndarray] = []

    def timed(function, phase):
        def run(*args, **kwargs):
            start = now()
            running.append(np.zeros(2))
            try:
                return function(*args, **kwargs)
            finally:
                whole = now() - start
                # Time in a nested phase counts once.
                spent[phase] = spent.get(phase, 0) + whole - running.pop()
                if running:
                    running[-1] += whole

        return run

    for module_name, path, phase in PHASES:
        owner = importlib.import_module(module_name)
        *outer, name = path.split(".")
        for attribute in outer:
            owner = getattr(owner, attribute)
        setattr(owner, name, timed(getattr(owner, name), phase))
    spent["imports"] = now() - began
    sys.argv = ["train.py", *arguments]
    try:
        runpy.run_path(str(ROOT / "tools" / "train.py"), run_name="__main__")
    finally:
        phases_path.write_text(json.dumps({phase: of.tolist() for phase, of in spent.items()}))


def training(store: Path, epochs: int) -> dict[str, np.ndarray]:
    """Train once. Return the seconds (2,) of each phase; `outside` is the total outside of the epochs."""
    with tempfile.TemporaryDirectory() as folder:
        phases = Path(folder) / "phases.json"
        arguments = ["--store", store, "--output-dir", Path(folder) / "results", "--epochs", epochs]
        whole = seconds(__file__, "--phases", phases, *arguments)
        spent = {phase: np.array(of) for phase, of in json.loads(phases.read_text()).items()}
    rest = whole - sum(spent.values())
    return {**spent, "rest": rest, "outside": whole - spent["epochs"], "whole": whole}


def report(name: str, values: list[np.ndarray]) -> None:
    """Print the medians of one row of the table."""
    wall, processor = np.median(values, axis=0)
    print(f"{name:22} {wall:6.2f}s {processor:11.2f}s", flush=True)


def main() -> None:
    """Run the program."""
    if sys.argv[1:2] == ["--phases"]:
        train(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--make", action="store_true", help="write the store and exit")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    if args.make:
        from benchmarks.common import make_store

        make_store(args.store, 30, 576, 100)
        return
    training(args.store, 1)
    found = {name: [] for name in IMPORTS}
    for _ in range(args.repeats):
        for name, code in IMPORTS.items():
            found[name].append(seconds("-c", code))
    print(f"{'':22} {'wall':>7} {'processor':>12}")
    found["difference"] = [own - torch for own, torch in zip(found["TraceLoader"], found["torch"], strict=True)]
    for name, values in found.items():
        report(f"import {name}", values)
    runs = [training(args.store, args.epochs) for _ in range(args.repeats)]
    for phase in runs[0]:
        report(phase, [run[phase] for run in runs])


if __name__ == "__main__":
    main()
