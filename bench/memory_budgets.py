"""Train with --memory-budget at budgets from generous to tight and check how each run ends.

python bench/memory_budgets.py STORE WORK_DIR [--batch-size 64] [--num-threads 1]
    [--num-workers 0] [--models NAME ...] [--factors F ...] [--cgroup]

At or above the floor that `tracestore plan` prints, a run must finish, or exit with 75 and leave a
checkpoint that --resume completes. Below the floor it may also exit with 2. Any other outcome is
printed and gives exit code 1. With --cgroup, each run is repeated in a memory cgroup (version 1)
whose limit exceeds the budget and the libraries a little.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import ROOT

FACTORS = (4.0, 2.0, 1.5, 1.25, 1.1, 1.0, 0.9, 0.8, 0.6, 0.3)
MODELS = ("lstm_solo", "gnn_det_lstm", "gvae_lstm")
CGROUPS = Path("/sys/fs/cgroup/memory")
# Memory of a process that its budget does not count: libraries, reserve, page tables, pages of files.
UNCOUNTED_BYTES = 700 << 20


def process(*command: object, setup: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a Python process. `setup` runs in the child first."""
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, preexec_fn=setup
    )


def in_cgroup(limit: int) -> Callable[[], None]:
    """Create a cgroup and return a function that moves the calling process into it."""
    group = CGROUPS / f"tracestore-{os.getpid()}"
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(str(limit))

    def join() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    return join


def outcome(name: str, args: argparse.Namespace, budget: int, cgroup: bool) -> str:
    """Train a model with a budget. Return a description of how the run ended."""
    folder = args.work / "results"
    shutil.rmtree(folder, ignore_errors=True)
    train = ["tools/train.py", "--store", args.store, "--output-dir", folder, "--batch-size", args.batch_size]
    train += ["--epochs", 1, "--no-probe", "--num-threads", args.num_threads, "--num-workers", args.num_workers]
    train += ["--models", name]
    setup = in_cgroup(budget + UNCOUNTED_BYTES) if cgroup else None
    done = process(*train, "--memory-budget", budget, setup=setup)
    if done.returncode == 0:
        events = json.loads((folder / "results.json").read_text())["models"][name]["oom_events"]
        return f"finished, {len(events)} events"
    if done.stderr.count("\n") != 1:
        return f"WRONG: exit {done.returncode}, {done.stderr.count(chr(10))} lines: {done.stderr[-300:]!r}"
    if done.returncode != 75:
        return f"exit {done.returncode}: {done.stderr.strip()}"
    resumed = process(*train, "--resume")
    return (
        "exit 75, resumed"
        if resumed.returncode == 0
        else f"WRONG: not resumed: exit {resumed.returncode}: {resumed.stderr[-300:]!r}"
    )


def sweep(name: str, args: argparse.Namespace) -> int:
    """Run all budgets of one model. Return the number of wrong outcomes."""
    flags = ["--model", name, "--batch-size", args.batch_size, "--num-threads", args.num_threads, "--json"]
    (plan,) = json.loads(process("-m", "tracestore", "plan", args.store, *flags).stdout)["models"]
    floor, wrong = plan["floor_bytes"], 0
    print(f"{name}: floor {floor / 2**20:.0f} MiB, peak {plan['peak_memory_bytes'] / 2**20:.0f} MiB", flush=True)
    for factor in args.factors:
        for cgroup in (False, True) if args.cgroup else (False,):
            result = outcome(name, args, int(factor * floor), cgroup)
            refused = result.startswith("exit 2:") and factor < 1
            wrong += not (refused or result.startswith(("finished", "exit 75")))
            print(f"  {factor:4.2f}{' cgroup' if cgroup else ''}: {result}", flush=True)
    return wrong


def main() -> int:
    """Run the program and return its exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("store", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--cgroup", action="store_true")
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--factors", type=float, nargs="*", default=FACTORS, help="budgets as multiples of the floor")
    args = parser.parse_args()
    args.store, args.work = args.store.absolute(), args.work.absolute()
    try:
        wrong = sum(sweep(name, args) for name in args.models)
    finally:
        if (group := CGROUPS / f"tracestore-{os.getpid()}").exists():
            group.rmdir()
    print(f"{wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
