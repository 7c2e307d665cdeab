"""Commit what tasks have written. Only metadata is read and written."""

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tracestore.console import Output
from tracestore.convert.runner import Conversion
from tracestore.convert.summary import ConvertReport
from tracestore.errors import InvalidInputError, UsageError
from tracestore.ingest.packing import PackOptions
from tracestore.ingest.reading import TraceStream
from tracestore.store.format import paths
from tracestore.store.io import fsio
from tracestore.store.write.writer import StoreWriter
from tracestore.tasks.receipt import FoundReceipt, WrittenSource, add_to_account, listed_segments, read_receipt
from tracestore.tasks.task_plan import Plan, Quiet, Task, identity_of, kept_plans

_MAX_COMMITS = 256  # of a plan


def unwritten(tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks without a receipt whose segments exist."""
    return [task for task in tasks if not _is_written(task)]


def _is_written(task: Task) -> bool:
    segments = listed_segments(task)
    return segments is not None and all((Path(task.store) / path).is_dir() for path in segments)


def files_of_plans(store: Path) -> set[str]:
    """Return the paths of the plans that a store keeps, of their receipts, and of the segments of these."""
    found: set[str] = set()
    for plan in kept_plans(store):
        tasks = plan.tasks()
        found |= {paths.plan(plan.digest), *(paths.receipt(task.hash) for task in tasks)}
        found.update(path for task in tasks for path in listed_segments(task) or ())
    return found


def commit_tasks(tasks: Sequence[Task], *, output: Output | None = None) -> ConvertReport | None:
    """Add what the tasks of a plan have written to the store. Call it again after an interruption.

    Parameters
    ----------
    tasks : sequence of Task
        All tasks of a plan, in any order.
    output : Output, optional
        Receives notes. By default none are printed.

    Returns
    -------
    ConvertReport or None
        The counts that `tracestore convert --json` prints; None without tasks.

    Raises
    ------
    UsageError
        If a task is missing or not written yet, or the store does not keep the plan.
    InvalidInputError
        If a source is refused; the sources before it are committed, and the plan is removed.
    CorruptStoreError
        If a receipt or a segment is damaged.
    """
    if not tasks:
        return None
    plan, tasks = Plan.read(tasks[0]), sorted(set(tasks), key=lambda task: task.number)
    if tasks != plan.tasks():
        raise UsageError(f"{plan.store}: expected the {len(plan.tasks()):,} tasks of one plan, found {len(tasks):,}")
    if missing := [task for task in tasks if not (plan.store / paths.receipt(task.hash)).exists()]:
        raise UsageError(
            f"{plan.store}: {len(missing):,} of {len(tasks):,} tasks are not written, such as that of "
            f"{missing[0].sources[0]}"
        )
    with fsio.map_os_errors(plan.store):
        try:
            report = _Commit(plan, tasks, output or Quiet()).run()
        except InvalidInputError:
            plan.remove()
            raise
        # Another coordinator of the plan may still read them, but no later plan must find what was refused.
        plan.remove(keep_receipts=not report.num_sources_skipped)
    return report


class _Commit(Conversion):
    """A conversion whose traces other processes have written."""

    def __init__(self, plan: Plan, tasks: Sequence[Task], output: Output) -> None:
        options = plan.commit_options()
        super().__init__(plan.arguments, str(plan.store), options, output, **plan.known())
        self._plan, self._tasks = plan, tasks

    def has_attention(self) -> bool | None:
        """Return what the plan has found."""
        found: bool | None = self._plan.facts["has_attention"]
        return found

    def report_plan(self) -> None:
        """Print nothing: the plan has printed it."""

    def _streams(self, writer: StoreWriter, pack_options: PackOptions) -> Iterator[TraceStream]:
        """Yield the sources of the tasks, and commit at positions that depend on the plan alone."""
        writer.commit_bytes = sys.maxsize
        step = math.ceil(len(self._tasks) / _MAX_COMMITS)
        for task in self._tasks:
            found = self._read(task)
            for source in found.sources:
                self._check_order(writer, source)
                yield source
            if (task.number + 1) % step == 0 and task != self._tasks[-1]:
                writer.commit()
            for part, account in zip(self.described.parts, found.accounts, strict=True):
                if part.execution is not None:
                    add_to_account(part.execution.account, account)

    def _check_order(self, writer: StoreWriter, written: WrittenSource) -> None:
        """Refuse a source of which another conversion may have committed newer content since the plan."""
        name, expected = written.source.name, (written.size, written.fingerprint)
        if writer.has_source(name, *expected) or not writer.has_source_named(name):
            return
        try:
            if identity_of(written.source) != expected:
                raise InvalidInputError("has changed since the plan; plan again", is_whole_source=True)
        except InvalidInputError as error:
            written.packed, written.refused, written.error = (), [], error

    def _read(self, task: Task) -> FoundReceipt:
        try:
            return read_receipt(self._plan, task, self.sources)
        except FileNotFoundError as error:
            raise UsageError(f"{error.filename}: is gone: another process has committed or removed the plan") from None
