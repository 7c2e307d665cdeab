"""Processes of this machine that write tasks. They are commands, so that scripts need no main guard."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tracestore.errors import DiskFullError, InvalidInputError, StoreLockedError, TracestoreError, UsageError
from tracestore.tasks.task_plan import Task

_ATTEMPTS = 3
_ERRORS: Mapping[int, type[TracestoreError]] = {
    2: UsageError,
    3: InvalidInputError,
    4: DiskFullError,
    5: StoreLockedError,
}


def write_in_processes(
    path: Path, tasks: Mapping[int, Task], num_lines: int, workers: int, budget: int, on_written: Callable[[Task], None]
) -> None:
    """Write tasks, each in a process of its own.

    Parameters
    ----------
    path : Path
        File with the tasks.
    tasks : Mapping
        The tasks to write, by their lines in the file.
    num_lines : int
        Number of lines in the file.
    workers : int
        Number of processes at a time.
    budget : int
        Bytes of memory for traces that wait, of all of them together.
    on_written : callable
        Called with each task that is written.

    Raises
    ------
    InvalidInputError
        If the process of a task was killed three times. The message names its sources.
    TracestoreError
        If a process fails, with its message and exit code.
    """

    def write(line: int, task: Task) -> Task:
        words = ("work", str(path), "--shard", f"{line}/{num_lines}", "--memory-budget", str(budget // workers))
        for _ in range(_ATTEMPTS):
            done = subprocess.run(
                [sys.executable, "-m", "tracestore", *words],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
            if done.returncode >= 0:
                break
        if done.returncode < 0:
            names = ", ".join(task.sources[:3]) + (", ..." if task.sources[3:] else "")
            raise InvalidInputError(
                f"the process that reads it was killed {_ATTEMPTS} times (signal {-done.returncode})", source=names
            )
        if done.returncode:
            text = done.stderr.strip().rpartition("\n")[2].removeprefix("tracestore work: ")
            error = _ERRORS.get(done.returncode, TracestoreError)(text or f"exit code {done.returncode}")
            raise error
        return task

    pool = ThreadPoolExecutor(workers)
    try:
        for future in as_completed([pool.submit(write, line, task) for line, task in tasks.items()]):
            on_written(future.result())
    finally:
        pool.shutdown(cancel_futures=True)
