"""Everything that a GPU can show, in at most six minutes: `make gpu`.

python bench/gpu.py [--device cuda|cpu] [--work DIR] [--only SECTION ...]

Sections: the tests marked gpu, each function in a process of its own with one thread; steps of the detectors, compared
with PyG and a plain nn.LSTM; steps under torch.compile; training epochs; training with little memory of the
GPU; the kernels under compute-sanitizer, if it is installed. A section is a process that ends at its time limit. What
they print appears as it comes, and DIR/gpu.json holds the results. `--device cpu` shows that everything runs.

Torch, Triton, numpy and Python are those of the interpreter. tracestore is that of the checkout if it is built there,
else the installed one. Nothing is downloaded.
"""

import argparse
import gc
import importlib.util
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Seconds of a section and of all, and of the tests of a function.
LIMITS = {"tests": 150, "steps": 100, "compile": 60, "training": 90, "limits": 60, "sanitizer": 60}
ALL_SECONDS, TEST_SECONDS = 350, 100
MODELS = ("lstm_solo", "gnn_det_lstm", "gvae_lstm")
BATCH_SIZES = (16, 64)
# Shares of the memory of a GPU.
FRACTIONS = (1.0, 0.004, 0.002, 0.0016)


def versions(device: str) -> dict[str, Any]:
    """Return the device and the versions of what runs on it."""
    import numpy
    import torch

    has_triton = importlib.util.find_spec("triton") is not None
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu",
        "processors": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": __import__("triton").__version__ if has_triton else None,
        "numpy": numpy.__version__,
    }


def run_tests(device: str, work: Path) -> dict[str, Any]:
    """Run the tests marked gpu. Return the outcome of each function."""
    if importlib.util.find_spec("pytest") is None:
        return {"skipped": "pytest is not installed"}
    root = ROOT
    if not list((ROOT / "tracestore/_core").glob("_native*.so")):
        # The tests of the checkout with the installed package, which a folder next to them would hide.
        root = work / "checkout"
        for name in ("tests", "tools"):
            shutil.copytree(ROOT / name, root / name, dirs_exist_ok=True)
        shutil.copy(ROOT / "pyproject.toml", root)
    search = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": search}
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-o", "addopts=-q", "-p", "no:cacheprovider"]
    files = [
        str(path.relative_to(root)) for path in sorted((root / "tests").rglob("test_*.py")) if "gpu" in path.read_text()
    ]
    listed = subprocess.run(
        [*command, "--collect-only", *files],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    functions = dict.fromkeys(line.partition("[")[0] for line in listed.stdout.splitlines() if "::" in line)
    if not functions:
        return {"error": f"pytest found no tests: {listed.stdout[-300:]}{listed.stderr[-300:]}"}

    def run(function: str) -> tuple[str, str]:
        began = time.perf_counter()
        try:
            words = [*command, "-rs", function]
            done = subprocess.run(
                words, cwd=root, env=environment, capture_output=True, text=True, timeout=TEST_SECONDS, check=False
            )
            outcome = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else f"exit {done.returncode}"
            outcome = ("passed: " if done.returncode == 0 else "FAILED: ") + outcome
        except subprocess.TimeoutExpired:
            outcome = f"FAILED: more than {TEST_SECONDS} s"
        print(f"{function}: {outcome} ({time.perf_counter() - began:.0f} s)", flush=True)
        return function, outcome

    with ThreadPoolExecutor(max(1, min(12, len(os.sched_getaffinity(0))))) as pool:
        return dict(pool.map(run, functions))


def measure(step: Any, count: int, device: str) -> dict[str, Any]:
    """Return the median time of a step and, on a GPU, what it starts, how long the GPU is busy, and its peak memory."""
    import torch

    on_gpu = device == "cuda"
    for _ in range(3 if on_gpu else 1):
        step()
    seconds, before = [], 0
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    for _ in range(count):
        began = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    found: dict[str, Any] = {"ms": statistics.median(seconds) * 1e3}
    if on_gpu:
        found["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        found |= profile(lambda: deque((step() for _ in range(count)), maxlen=0), count)
    return found


def profile(work: Any, count: int) -> dict[str, float]:
    """Return the share of the time in which the GPU computes, launches and synchronizations, the latter per step."""
    import torch
    from torch.profiler import ProfilerActivity

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    names = [event.name for event in profiler.events()]
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy = end = 0.0
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return {
        "busy_share": busy * 1e-6 / seconds,
        "busy_ms": busy * 1e-3 / count,
        "launches": sum("LaunchKernel" in name for name in names) / count,
        "synchronizations": sum("Synchronize" in name for name in names) / count,
        "graphs": sum("GraphLaunch" in name for name in names) / count,
    }


def report(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Print results and return them."""
    words = {
        "ms": "{:.2f} ms",
        "peak_mib": "{:,.0f} MiB",
        "busy_share": "GPU busy {:.0%}",
        "busy_ms": "GPU {:.2f} ms",
        "launches": "{:.0f} launches",
        "graphs": "{:.1f} graphs",
    }
    words |= {"synchronizations": "{:.1f} synchronizations", "traces_per_s": "{:,.0f} traces/s"}
    words |= {"data_wait_share": "data wait {:.1%}", "recoveries": "{} recoveries", "train_loss": "train loss {:.6f}"}
    known = [words[key].format(value) for key, value in found.items() if key in words]
    print(f"{name}: {', '.join(known) or found}", flush=True)
    return found


def shapes(device: str) -> list[str]:
    """Return the shapes of the steps."""
    from benchmarks.common import STEP_SHAPES

    return list(STEP_SHAPES)[: 2 if device == "cuda" else 1]


def run_steps(device: str, work: Path) -> dict[str, Any]:
    """Measure steps of the detectors, of PyG layer by layer and of a plain LSTM."""
    from benchmarks.common import GRAPH_MODELS
    from benchmarks.training import PlainLSTM, Step

    results, count = {}, 20 if device == "cuda" else 2
    for shape in shapes(device):
        for model in MODELS:
            name = f"{model}, {shape}"
            step = Step(model, shape, "fused", device)
            if device == "cuda":
                plain = report(f"{name}, operation by operation", measure(step, count, device))
                results[f"{name}, operation by operation"] = plain
                step.record()
            results[name] = report(name, measure(step, count, device))
            if model in GRAPH_MODELS:
                pyg = measure(Step(model, shape, "pyg", device), max(1, count // 4), device)
                results[f"{name}, PyG"] = report(f"{name}, PyG", pyg)
                print(f"  {pyg['ms'] / results[name]['ms']:.1f} times as fast as PyG", flush=True)
        results[f"nn.LSTM, {shape}"] = report(f"nn.LSTM, {shape}", measure(PlainLSTM(shape, device), count, device))
    return results


def run_compile(device: str, work: Path) -> dict[str, Any]:
    """Measure steps of models that torch.compile has compiled."""
    import torch
    from benchmarks.training import Step

    results: dict[str, Any] = {}
    shape = shapes(device)[0]
    for model in MODELS if device == "cuda" else MODELS[:1]:
        step = Step(model, shape, "fused", device)
        step.masks = None  # those of the package are drawn outside of the graph
        plain = measure(step, 5, device)
        step.model = torch.compile(step.model)  # type: ignore[assignment]
        try:
            results[model] = report(f"{model}, torch.compile", measure(step, 5, device)) | {"plain": plain}
            print(f"  {plain['ms'] / results[model]['ms']:.2f} times as fast as without", flush=True)
        except Exception as error:
            results[model] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            print(f"{model}, torch.compile: {results[model]['error']}", flush=True)
    return results


def make_trainer(model: str, device: str, work: Path, batch_size: int, repeats: int = 1) -> Any:
    """Return a trainer of synthetic traces of the small shape, each read so often in an epoch, after its setup."""
    import numpy as np
    from benchmarks.common import SMALL, make_store

    import tracestore
    from tracestore.detectors.layers.model_config import ModelConfig
    from tracestore.evaluation.store_split import Split
    from tracestore.train.config import TrainConfig
    from tracestore.train.trainer import Trainer

    path = work / "store.zarr"
    if not path.exists():
        make_store(path, SMALL["layers"], SMALL["dim"], 512 if device == "cuda" else 32)
    store = tracestore.open(path)
    indices = np.tile(np.arange(len(store)), repeats)
    split = Split(dict.fromkeys(("train", "val", "test"), indices), {})
    config = TrainConfig(device=device, batch_size=batch_size, loader_threads=min(8, len(os.sched_getaffinity(0))))
    options = ModelConfig.from_store(store)
    trainer = Trainer(model, store, split, np.arange(len(store)) % 2, options, config, work / model, lambda _: None)
    trainer._setup()
    return trainer


def train_epoch(trainer: Any, epoch: int) -> dict[str, Any]:
    """Train one epoch and return its measurements."""
    from tracestore.train.config import TrainState

    state = TrainState(epoch=epoch)
    trainer._train_epoch(state)
    return {"traces_per_s": state.traces_per_s, "data_wait_share": state.data_wait_share, "train_loss": state.loss}


def profile_steps(trainer: Any, count: int) -> dict[str, float]:
    """Return `profile` of some steps in an epoch."""
    from tracestore.train.config import TrainState

    state = TrainState()
    trainer.feed.seek(0, 0)
    for _ in range(8):
        trainer._step(state)
    found = profile(lambda: deque((trainer._step(state) for _ in range(count)), maxlen=0), count)
    trainer._read_loss(state)
    trainer.feed.close()
    return found


def run_training(device: str, work: Path) -> dict[str, Any]:
    """Measure training epochs after those that record the steps of most shapes."""
    results = {}
    for model in MODELS:
        for batch_size in BATCH_SIZES if device == "cuda" else (16,):
            # 8,192 traces on a GPU: the start of an epoch counts as it does in a data set.
            trainer = make_trainer(model, device, work, batch_size, 16 if device == "cuda" else 1)
            for epoch in range(3):
                began = time.perf_counter()
                found = train_epoch(trainer, epoch)
                seconds = time.perf_counter() - began
            if device == "cuda":
                # The profiler slows an epoch down: it measures some steps of another one.
                found |= profile_steps(trainer, 64)
                found["busy_share"] = found["busy_ms"] * 1e-3 * len(trainer.feed) / seconds
                # An upper bound counts waits that ended while the GPU computed; it cannot wait longer than it is idle.
                found["data_wait_share"] = min(found["data_wait_share"], max(0.0, 1 - found["busy_share"]))
            name = f"{model}, batches of {batch_size}"
            results[name] = report(f"training {name}", found)
    return results


def run_limits(device: str, work: Path) -> dict[str, Any]:
    """Train an epoch with shares of the memory of the GPU."""
    import torch

    from tracestore.errors import InsufficientMemoryError

    if device != "cuda":
        return {"skipped": "shares of the memory need a GPU"}
    results: dict[str, Any] = {}
    for fraction in FRACTIONS:
        torch.cuda.set_per_process_memory_fraction(fraction)
        name = f"{fraction:.2%} of the memory"
        try:
            trainer = make_trainer("gnn_det_lstm", device, work, 16)
            results[name] = train_epoch(trainer, 0) | {"recoveries": len(trainer.guard.events)}
        except (InsufficientMemoryError, torch.OutOfMemoryError) as error:
            results[name] = {"error": str(error)[:200]}
        report(name, results[name])
        trainer = None
        gc.collect()
        torch.cuda.empty_cache()
    return results


def run_sanitizer(device: str, work: Path) -> dict[str, Any]:
    """Run the kernels on small graphs under compute-sanitizer."""
    program = shutil.which("compute-sanitizer")
    if device != "cuda" or program is None:
        return {"skipped": "compute-sanitizer is not installed" if device == "cuda" else "kernels need a GPU"}
    check = "import torch; from tracestore.detectors.graph.gine import fused_kernels_work as f; "
    words = [program, "--error-exitcode", "3", sys.executable, "-c", check + "assert f(torch.device('cuda', 0))"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=work)
    summary = (done.stdout.strip().splitlines() or [done.stderr[-200:]])[-1]
    print(summary, flush=True)
    return {"error": f"exit {done.returncode}: {summary}"} if done.returncode else {"summary": summary}


RUN = {"tests": run_tests, "steps": run_steps, "compile": run_compile, "training": run_training}
RUN |= {"limits": run_limits, "sanitizer": run_sanitizer}


def run_section(name: str, device: str, work: Path, seconds: float) -> dict[str, Any]:
    """Run a section in a process of its own. Return its results, or why it has none."""
    result = work / f"{name}.json"
    command = [sys.executable, __file__, "--device", device, "--work", str(work), "--section", name]
    environment = os.environ.copy()
    if list((ROOT / "tracestore/_core").glob("_native*.so")):
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return {"error": f"more than {seconds:.0f} s"}
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return json.loads(result.read_text()) if process.returncode == 0 else {"error": f"exit {process.returncode}"}


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--work", type=Path, default=ROOT / "build/gpu", metavar="DIR")
    parser.add_argument("--only", nargs="+", choices=LIMITS, default=list(LIMITS), metavar="SECTION")
    parser.add_argument("--section", choices=LIMITS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.section:
        found = RUN[args.section](args.device, args.work)
        (args.work / f"{args.section}.json").write_text(json.dumps(found))
        return
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("found no CUDA device; --device cpu shows that everything runs (make gpu DEVICE=cpu)")
    # The end of this process ends that of a section.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    results: dict[str, Any] = {"machine": versions(args.device)}
    print(", ".join(f"{key} {value}" for key, value in results["machine"].items()), flush=True)
    for name in args.only:
        left = ALL_SECONDS - (time.monotonic() - began)
        print(f"\n{name}: at most {min(LIMITS[name], left):.0f} s", flush=True)
        results[name] = run_section(name, args.device, args.work, max(1.0, min(LIMITS[name], left)))
        if reason := results[name].get("skipped") or results[name].get("error"):
            print(f"{name}: {reason}", flush=True)
    results["seconds"] = time.monotonic() - began
    path = args.work / "gpu.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    outcomes = results.get("tests", {}).values()
    failed = [name for name in args.only if "error" in results[name]] + [o for o in outcomes if o.startswith("FAILED")]
    print(
        f"\n{results['seconds']:.0f} s; results in {path}" + (f"; {len(failed)} failures" if failed else ""), flush=True
    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
