"""Files with the tasks of a plan: a header and a line of JSON for each task."""

import json
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tracestore.console import Output
from tracestore.errors import UsageError
from tracestore.store.format import paths
from tracestore.store.io import fsio
from tracestore.store.io.destinations import check_output_file
from tracestore.store.io.files import parse_location
from tracestore.store.write.plan_files import open_plan_files
from tracestore.tasks.committing import read_plan, unwritten
from tracestore.tasks.task_plan import Task
from tracestore.words import plural

_SUFFIXES = (".json", ".jsonl")
_MAX_BYTES = 1 << 30
_POLL_S, _MAX_POLL_S = 0.2, 2.0


def check_tasks_file(path: Path, store: str, inputs: Sequence[Path]) -> None:
    """Raise UsageError unless the file of a plan of a store and inputs may be written; it may replace such a file."""
    location = parse_location(store)
    for folder in (location, *inputs) if isinstance(location, Path) else inputs:
        if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
            raise UsageError(f"cannot write {path}: {folder} holds sources or the store; choose a place outside of it")
    check_output_file(path, _SUFFIXES, overwrite=_is_replaceable(path), inputs=inputs)


def _is_replaceable(path: Path) -> bool:
    """Return whether a file is empty or has the tasks of a plan."""
    try:
        if path.stat().st_size:
            read_tasks(path)
    except (OSError, UsageError):
        return False
    return True


def write_tasks(path: Path, tasks: Sequence[Task]) -> None:
    """Write the file of a plan. It has no task if the store has all sources."""
    lines = [_header(tasks), *(task.to_json() for task in tasks)]
    fsio.replace_file(path, "".join(f"{line}\n" for line in lines).encode())


def _header(tasks: Sequence[Task]) -> str:
    plans = sorted({(task.store, task.plan) for task in tasks})
    return json.dumps({"format": "tracestore tasks", "plans": plans, "num_tasks": len(tasks)})


def report_tasks(path: Path, tasks: Sequence[Task], output: Output) -> None:
    """Print what to do with the file of a plan."""
    output.print_json({"tasks": len(tasks), "bytes": sum(task.num_bytes for task in tasks)})
    name = shlex.quote(str(path))
    output.info(
        f"{plural(len(tasks), 'task')} in {path}; next: tracestore work {name}, then tracestore commit {name}"
        if tasks
        else f"{path}: no task, because the store has all sources"
    )


def read_tasks(path: Path) -> list[Task]:
    """Return the tasks in a file; UsageError if it is none."""
    try:
        with fsio.open_regular(path) as file:
            header, *lines = file.read(_MAX_BYTES).decode().splitlines()
        tasks = list(map(Task.from_json, lines))
        if header != _header(tasks):
            raise ValueError("tasks are missing")
        return tasks
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (UsageError, ValueError):
        raise UsageError(f"{path}: not a plan that convert --plan has written") from None


def wait_for(tasks: Sequence[Task], wait_s: float) -> None:
    """Wait until all tasks are written, or for some seconds."""
    until, missing, pause_s = time.monotonic() + wait_s, unwritten(tasks), _POLL_S
    while missing and time.monotonic() < until:
        time.sleep(pause_s)
        missing, pause_s = unwritten(missing), min(2 * pause_s, _MAX_POLL_S)


@dataclass
class Status:
    """Counts of the tasks of a plan."""

    num_tasks: int
    num_written: int
    num_bytes: int
    bytes_written: int
    bytes_per_s: float | None
    seconds_left: float | None
    missing: list[int]


def status_of(tasks: Sequence[Task]) -> Status:
    """Return how many tasks are written, and the rate since the plan was made; the errors of `read_plan`."""
    if tasks:
        read_plan(tasks)
    missing = unwritten(tasks)
    done = [task for task in tasks if task not in missing]
    num_bytes, written = sum(task.num_bytes for task in tasks), sum(task.num_bytes for task in done)
    rate = None
    if done:
        times = open_plan_files(done[0].store).times()
        last = max(times.get(paths.receipt(task.hash), 0.0) for task in done)
        seconds = last - times.get(paths.plan(done[0].plan), last)
        rate = written / seconds if seconds > 0 else None
    left = (num_bytes - written) / rate if rate else None
    return Status(len(tasks), len(done), num_bytes, written, rate, left, [task.number for task in missing])
