"""Commit receipts of many tasks: seconds, and resident memory of the committing process above its imports.

python bench/receipts.py DIR [--tasks 1000] [--traces 1000]

DIR gets a file of tiny traces for each task, and the segments and receipts that `write_task` makes of it. The bound is
15 s and 512 MiB for a million traces of 1,000 receipts. `--keep` leaves what was written for another run.
"""

import argparse
import cProfile
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from tracestore.convert import cutting
from tracestore.convert.options import ConvertOptions
from tracestore.tasks import commit_tasks, plan_tasks, write_task
from tracestore.tasks.task_files import read_tasks, write_tasks

LAYERS, DIM = 2, 8


def write_source(path: Path, first: int, count: int) -> None:
    """Write a file of traces with labels, texts and tokens."""
    rng = np.random.default_rng(first)
    states = rng.standard_normal((count, LAYERS, 1, DIM)).astype("<f2")
    traces = [
        {
            "question_id": f"question-{first + k}",
            "hidden_states": list(states[k]),
            "tokens": np.array([k], "<i4"),
            "generated_answer_clean": f"answer {k}",
            "label": k % 2,
        }
        for k in range(count)
    ]
    path.write_bytes(pickle.dumps(traces))


def write_receipts(folder: Path, num_tasks: int, num_traces: int) -> None:
    """Write the sources, the plan, the segments and the receipts."""
    cutting.MAX_BYTES = 1  # a task of each source
    sources = folder / "sources"
    sources.mkdir(parents=True)
    for k in range(num_tasks):
        write_source(sources / f"{k:06d}.pkl", k * num_traces, num_traces)
    tasks = plan_tasks(sources, folder / "store.zarr", ConvertOptions(attention="none"))
    assert len(tasks) == num_tasks
    for task in tasks:
        write_task(task)
    write_tasks(folder / "tasks.json", tasks)


def resident_mib(name: str) -> float:
    """Return VmRSS or VmHWM of this process."""
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def commit(file: Path, profile: str | None) -> None:
    """Commit, and print what it took."""
    tasks, before = read_tasks(file), resident_mib("VmRSS")
    began, processor = time.perf_counter(), time.process_time()
    if profile is None:
        report = commit_tasks(tasks)
    else:
        with cProfile.Profile() as found:
            report = commit_tasks(tasks)
        found.dump_stats(profile)
    seconds, processor, peak = time.perf_counter() - began, time.process_time() - processor, resident_mib("VmHWM")
    print(
        f"{report.num_traces:,} traces of {len(tasks):,} receipts, {report.generation} commits: {seconds:.1f} s, "
        f"{processor:.1f} s of the processor; "
        f"resident {before:.0f} MiB after imports, at most {peak:.0f} MiB: {peak - before:.0f} MiB more"
    )


def main() -> None:
    """Write the receipts, and commit them in a process of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--traces", type=int, default=1000)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--profile")
    parser.add_argument("--commit", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.commit:
        commit(args.folder / "tasks.json", args.profile)
        return
    work = args.folder.absolute() / "receipts"
    if not work.exists():
        write_receipts(work, args.tasks, args.traces)
    store, saved = work / "store.zarr", work / "saved.zarr"
    if args.keep:
        shutil.copytree(store, saved, copy_function=os.link)
    try:
        words = [sys.executable, __file__, str(work), "--commit"]
        subprocess.run(words + (["--profile", args.profile] if args.profile else []), check=True)
    finally:
        shutil.rmtree(store if args.keep else work)
        if args.keep:
            saved.rename(store)


if __name__ == "__main__":
    main()
