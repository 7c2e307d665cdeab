"""Measure the detectors on a GPU: time and memory of a step, fused and with PyG, and the wait for data.

python bench/gpu.py STORE WORK_DIR [--device cuda|cpu] [--steps 20] [--shapes N]

STORE must have scores. `--device cpu` only checks that the script runs.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from benchmarks.common import GRAPH_MODELS, ROOT, STEP_SHAPES
from benchmarks.training import Step


def time_steps(step: Step, count: int, device: torch.device) -> tuple[float, int]:
    """Return the median seconds of a step and, on a GPU, its peak of allocated bytes above the start."""
    on_gpu = device.type == "cuda"
    step()
    before = 0
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), torch.cuda.max_memory_allocated() - before if on_gpu else 0


def compare(model: str, shape: str, count: int, device: torch.device) -> str:
    """Return a line that compares the fused step with PyG; lstm_solo has no PyG variant."""
    kinds = ("fused", "pyg") if model in GRAPH_MODELS else ("fused",)
    found = [time_steps(Step(model, shape, kind, device), count, device) for kind in kinds]
    line = f"{model}, {shape}, batch of {STEP_SHAPES[shape][0]}: " + ", ".join(
        f"{kind} {seconds * 1e3:.1f} ms and {memory / 2**20:,.0f} MiB"
        for kind, (seconds, memory) in zip(kinds, found, strict=True)
    )
    if len(found) == 2:
        line += f"; {found[1][0] / found[0][0]:.1f} times as fast"
    return line


def data_waits(store: str, folder: Path, device: str) -> list[str]:
    """Train and return a line per model: the share of an epoch that waits for batches, without the first."""
    words = ["--store", store, "--output-dir", folder, "--device", device, "--epochs", 3, "--no-probe", "--json"]
    command = [sys.executable, "tools/train.py", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    models = json.loads(done.stdout)["models"]
    return [
        f"{name}: data wait {statistics.median(models[name]['history']['data_wait_share'][1:]):.1%} of an epoch, "
        f"{statistics.median(models[name]['history']['traces_per_s'][1:]):,.0f} traces/s"
        for name in models
    ]


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("work", type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--shapes", type=int, default=len(STEP_SHAPES), help="run the first N shapes only")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device; --device cpu checks that the script runs")
    print(torch.cuda.get_device_name() if args.device == "cuda" else "the CPU")
    for shape in list(STEP_SHAPES)[: args.shapes]:
        for model in ("lstm_solo", *GRAPH_MODELS):
            print(compare(model, shape, args.steps, torch.device(args.device)), flush=True)
    for line in data_waits(args.store, args.work, args.device):
        print(line)


if __name__ == "__main__":
    main()
