"""Write tasks in processes of this machine, which are commands so that scripts need no main guard, or in workers of Dask."""

import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

from tracestore.errors import DiskFullError, InvalidInputError, StoreLockedError, TracestoreError, UsageError
from tracestore.extras import needs
from tracestore.tasks.task_plan import Task
from tracestore.tasks.task_writing import write_task

_ATTEMPTS = 3
_ERRORS = {error.exit_code: error for error in (UsageError, InvalidInputError, DiskFullError, StoreLockedError)}
_CONNECT_TIMEOUT_S = 10


class LocalWorkers:
    """Write tasks, one after the other in each process. Leaving the context ends the processes.

    Parameters
    ----------
    workers : int
        Number of processes at a time.
    memory_budget : int
        Bytes of memory for traces that wait, of all of them together.
    """

    def __init__(self, workers: int, memory_budget: int) -> None:
        self._budget = memory_budget // workers
        self._pool = ThreadPoolExecutor(workers)
        self._lock, self._is_closed = threading.Lock(), False
        self._running: set[subprocess.Popen[str]] = set()
        self._idle: list[subprocess.Popen[str]] = []

    def submit(self, task: Task) -> "Future[Task]":
        """Write a task; the result is the task.

        Raises
        ------
        InvalidInputError
            By the future, if the process of the task was killed three times. The message names its sources.
        TracestoreError
            By the future, if the process fails, with its message and exit code.
        """
        return self._pool.submit(self._write, task)

    def _write(self, task: Task) -> Task:
        for _ in range(_ATTEMPTS):
            code, errors = self._run(task)
            if code >= 0:
                break
        if code < 0:
            names = ", ".join(task.sources[:3]) + (", ..." if task.sources[3:] else "")
            raise InvalidInputError(
                f"the process that reads it was killed {_ATTEMPTS} times (signal {-code})", source=names
            )
        if code:
            text = errors.strip().rpartition("\n")[2].removeprefix("tracestore work: ")
            raise _ERRORS.get(code, TracestoreError)(text or f"exit code {code}")
        return task

    def _run(self, task: Task) -> tuple[int, str]:
        """Let a process write a task; return 0, or its exit code and messages if it ends."""
        with self._lock:
            if self._is_closed:
                return 1, ""
            process = self._idle.pop() if self._idle else self._start()
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(f"{task.to_json()}\n")
            process.stdin.flush()
        errors = ""
        for line in process.stdout:
            if line == f"{task.hash}\n":
                self._idle.append(process)
                return 0, ""
            errors += line
        process.communicate()
        with self._lock:
            self._running.discard(process)
        return process.returncode, errors

    def _start(self) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-m", "tracestore", "work", "-", "--memory-budget", str(self._budget)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,  # Ctrl-C reaches this process alone, which ends the others.
        )
        self._running.add(process)
        return process

    def __enter__(self) -> "LocalWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_closed = True
            for process in self._running:
                process.kill()
        self._pool.shutdown(cancel_futures=True)
        for process in self._idle:
            process.communicate()


class DaskWorkers:
    """Write tasks on a cluster whose workers find the sources and the store under the same paths.

    Parameters
    ----------
    address : str
        Address of a scheduler, or "local" for processes on this machine.
    workers : int
        Number of these processes.
    memory_budget : int
        Bytes of memory for traces that wait, of a worker or of all processes on this machine together.

    Raises
    ------
    UsageError
        If there is no scheduler at the address.
    """

    def __init__(self, address: str, workers: int, memory_budget: int) -> None:
        with needs("dask"):
            from distributed import Client, LocalCluster
        is_local = address == "local"
        self._budget = memory_budget // workers if is_local else memory_budget
        with ExitStack() as stack:
            if is_local:
                cluster = LocalCluster(n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None)
                stack.callback(cluster.close)
            try:
                self._client = Client(
                    cluster if is_local else address, timeout=_CONNECT_TIMEOUT_S, set_as_default=False
                )
            except (OSError, ValueError, TimeoutError) as error:
                raise UsageError(f"no Dask scheduler at {address}: {' '.join(str(error).split())[:200]}") from None
            stack.enter_context(self._client)
            self._stack = stack.pop_all()

    def submit(self, task: Task) -> Any:
        """Write a task, and return its future."""
        return self._client.submit(write_task, task, memory_budget=self._budget, pure=False)

    def __enter__(self) -> "DaskWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
