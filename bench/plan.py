"""What `tracestore plan` estimates beside what real steps take: detectors and stores of many sizes.

python bench/plan.py WORK_DIR [--rounds 3] [--num-threads 2] [--fit]

Stores of random traces are made in WORK_DIR once. Each case is a process of its own, all cases in
turn, medians of the rounds. --fit: the factors of tracestore/train/estimate.py that fit best.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tracestore
from tests.helpers import ROOT, make_trace
from tracestore.train import estimate
from tracestore.train.config import TrainConfig
from tracestore.train.model_config import MODEL_NAMES

# Layers, hidden size, mean tokens and number of traces.
STORES = {
    "small": (4, 16, 6, 2000),
    "short": (30, 576, 48, 200),
    "long": (24, 1024, 200, 120),
    "few-layers": (12, 768, 120, 200),
    "wide": (32, 4096, 60, 100),
}
# Store, batch size, hidden sizes.
CASES = [
    ("short", 4, 128),
    ("short", 16, 128),
    ("short", 64, 128),
    ("short", 16, 32),
    ("short", 64, 256),
    ("few-layers", 16, 128),
    ("few-layers", 64, 128),
    ("wide", 16, 128),
    ("wide", 32, 256),
    ("small", 16, 128),
    ("small", 512, 64),
    ("long", 16, 128),
]


def make_stores(work: Path) -> None:
    for name, (layers, dim, tokens, count) in STORES.items():
        path = work / f"{name}.zarr"
        if path.exists():
            continue
        rng = np.random.default_rng(0)
        with tracestore.create(path) as writer:
            for k in range(count):
                length = max(2, round(tokens * rng.uniform(0.7, 1.3)))
                writer.append(make_trace(k, tokens=length, layers=layers, dim=dim), score=k % 2)


def hidden_sizes(hidden: int) -> dict[str, int]:
    return dict.fromkeys(("gnn_hidden", "latent_dim", "lstm_hidden"), hidden)


def measured(name: str, path: Path, batch_size: int, hidden: int, num_threads: int) -> dict[str, float]:
    """Anonymous memory and data segment above the libraries, and seconds, of steps on whole batches."""
    import torch

    import tracestore.train.run
    from tracestore.train.measure import Trial, timed
    from tracestore.train.memory import memory_use

    start = memory_use()
    torch.set_num_threads(num_threads)
    store = tracestore.open(path)
    config = TrainConfig(batch_size=batch_size, loader_threads=num_threads)
    trial = Trial(name, store, np.arange(len(store)), config, hidden_sizes(hidden))
    found = timed(trial, 0, batch_size)
    return {
        "libraries": start.anonymous,
        "memory": found.peak.anonymous - start.anonymous,
        "data": found.peak.data - start.data,
        "seconds": found.seconds,
        "cost": float(trial.costs(found.costliest).sum()),
    }


def terms(name: str, path: Path, batch_size: int, hidden: int, num_threads: int) -> dict[str, Any]:
    """What the factors are for."""
    with tracestore.open(path) as store:
        config = TrainConfig(batch_size=batch_size, loader_threads=num_threads)
        estimator = estimate.Estimator(store, config, hidden_sizes(hidden), num_threads)
        sizes = estimator.sizes(name)
        seconds = estimator.seconds(name, batch_size)
        # What is under way and the one at work, or as many as there are.
        epoch_batches = min(num_threads + 2, len(store) / batch_size)
        return {
            "model": sizes.memory_of_model(batch_size).tolist(),
            "trace": (batch_size * sizes.memory_of_trace()).tolist(),
            "loader": epoch_batches * batch_size * sizes.batch_bytes,
            "cost": batch_size * sizes.batch_bytes,
            "seconds": seconds.tolist(),
        }


def ask(what: str, *case: Any) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "-", f"--{what}", json.dumps(case)], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def non_negative(rows: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Factors of least squares, none below 0."""
    from scipy.optimize import nnls

    return nnls(rows, target)[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--out", type=Path, help="where what was found is kept as JSON")
    parser.add_argument("--measured", help=argparse.SUPPRESS)
    parser.add_argument("--terms", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for what in (measured, terms):
        if (case := getattr(args, what.__name__)) is not None:
            print(json.dumps(what(*json.loads(case))))
            return
    args.work.mkdir(parents=True, exist_ok=True)
    make_stores(args.work)
    cases = [(name, *case) for case in CASES for name in MODEL_NAMES]
    found: dict[tuple[Any, ...], list[tuple[dict[str, Any], dict[str, Any]]]] = {case: [] for case in cases}
    for _ in range(args.rounds):
        for name, store, batch_size, hidden in cases:
            case = name, str(args.work / f"{store}.zarr"), batch_size, hidden, args.num_threads
            before, steps, after = ask("terms", *case), ask("measured", *case), ask("terms", *case)
            # The machine is faster in one minute than in the next.
            before["seconds"] = [(a + b) / 2 for a, b in zip(before["seconds"], after["seconds"], strict=True)]
            found[name, store, batch_size, hidden].append((before, steps))
    if args.out:
        args.out.write_text(json.dumps([[case, pairs] for case, pairs in found.items()]))
    report(found, args.fit)


def report(found: dict[Any, list[tuple[dict[str, Any], dict[str, Any]]]], fits: bool) -> None:
    rows: dict[str, list[np.ndarray]] = {"memory": [], "data": [], "seconds": []}
    wanted: dict[str, list[float]] = {"memory": [], "data": [], "seconds": []}
    beside = []
    for pairs in found.values():
        parts, steps = [a for a, _ in pairs], [b for _, b in pairs]
        # The step of most tokens is the peak; the estimate is of a mean one.
        share = np.median([b["cost"] for b in steps]) / parts[0]["cost"]
        memory = np.array([*parts[0]["model"], *(share * np.array(parts[0]["trace"]))])
        for kind in ("memory", "data"):
            rows[kind].append(memory)
            wanted[kind].append(float(np.median([b[kind] for b in steps])))
        seconds = np.array([b["seconds"] for b in steps])
        ratios = np.array([a["seconds"] for a in parts]) / seconds[:, None]
        wanted["seconds"].append(float(np.median(seconds)))
        rows["seconds"].append(np.median(ratios, axis=0) * wanted["seconds"][-1])
        beside.append((share * parts[0]["loader"], np.median([b["libraries"] for b in steps])))
    loader, libraries = np.array(beside).T
    factors = {"memory": estimate.MEMORY, "data": estimate.DATA, "seconds": estimate.TIME}
    if fits:
        for kind in ("memory", "data"):
            # What counts is the error beside everything that the process has.
            weight = np.array(wanted[kind]) + libraries
            target = (np.array(wanted[kind]) - loader) / weight
            factors[kind] = non_negative(np.array(rows[kind]) / weight[:, None], target)
        # Of a time its own error counts, and that of detectors of the default size twice.
        weight = np.array([1.0 if hidden == 128 else 0.5 for *_, hidden in found])
        shares = np.array(rows["seconds"]) / np.array(wanted["seconds"])[:, None]
        factors["seconds"] = non_negative(shares * weight[:, None], weight)
        for kind, values in factors.items():
            print(kind, "[" + ", ".join(f"{v:.3g}" for v in values) + "]")
    print("libraries", f"{np.median(libraries) / 2**20:.0f} MiB")
    print(f"{'':48} memory            time")
    for k, (name, store, batch_size, hidden) in enumerate(found):
        memory = float(rows["memory"][k] @ factors["memory"]) + loader[k] + libraries[k]
        seconds = float(rows["seconds"][k] @ factors["seconds"])
        of_memory, of_time = memory / (wanted["memory"][k] + libraries[k]), seconds / wanted["seconds"][k]
        print(
            f"{name:13} {store:10} batch {batch_size:4} hidden {hidden:4}  {memory / 2**20:8,.0f} MiB {of_memory:5.2f}"
            f"  {1e3 * wanted['seconds'][k]:8.1f} ms {of_time:5.2f}"
        )


if __name__ == "__main__":
    main()
