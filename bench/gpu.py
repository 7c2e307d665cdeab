"""The detectors on a GPU: a step fused and by PyG one layer at a time, its memory, and what an
epoch waits for data. Prints a line each, the device's name first.

python bench/gpu.py STORE WORK_DIR [--device cuda|cpu] [--steps 20] [--shapes N]

STORE: traces with scores. --device cpu: where there is no GPU, to see that it runs.
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

from tracestore.detectors.registry import DETECTORS


def clocked(step: Step, count: int, device: torch.device) -> tuple[float, int]:
    """Median seconds of a step, and on a GPU the most bytes it had above what was there before."""
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
    """Fused against PyG, the LSTM alone."""
    kinds = ("fused", "pyg") if model in GRAPH_MODELS else ("fused",)
    found = [clocked(Step(model, shape, kind, device), count, device) for kind in kinds]
    said = f"{model}, {shape}, batch of {STEP_SHAPES[shape][0]}: " + ", ".join(
        f"{kind} {seconds * 1e3:.1f} ms and {memory / 2**20:,.0f} MiB"
        for kind, (seconds, memory) in zip(kinds, found, strict=True)
    )
    if len(found) == 2:
        said += f"; {found[1][0] / found[0][0]:.1f} times as fast"
    return said


def waits(store: str, folder: Path, device: str) -> list[str]:
    """The share of an epoch's training part that waits for batches, after the first epoch."""
    words = ["--store", store, "--output-dir", folder, "--device", device, "--epochs", 3, "--no-probe", "--json"]
    command = [sys.executable, "tools/train.py", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    models = json.loads(done.stdout)["models"]
    return [
        f"{name}: waits for data {statistics.median(models[name]['history']['data_wait_share'][1:]):.1%} of an epoch, "
        f"{statistics.median(models[name]['history']['traces_per_s'][1:]):,.0f} traces/s"
        for name in DETECTORS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("work", type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--shapes", type=int, default=len(STEP_SHAPES), help="only the first N")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device; --device cpu shows that it runs")
    print(torch.cuda.get_device_name() if args.device == "cuda" else "the CPU")
    for shape in list(STEP_SHAPES)[: args.shapes]:
        for model in DETECTORS:
            print(compare(model, shape, args.steps, torch.device(args.device)), flush=True)
    for said in waits(args.store, args.work, args.device):
        print(said)


if __name__ == "__main__":
    main()
