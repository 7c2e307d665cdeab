"""Workers of a Dask cluster that write tasks."""

from contextlib import ExitStack
from typing import Any

from tracestore.errors import UsageError
from tracestore.extras import needs
from tracestore.tasks.task_plan import Task
from tracestore.tasks.task_writing import write_task

_CONNECT_TIMEOUT_S = 10


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
