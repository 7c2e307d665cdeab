"""Commit what tasks have written. Only metadata is read and written."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from tracestore.console import Output
from tracestore.convert.cutting import commits_after
from tracestore.convert.runner import Conversion
from tracestore.convert.summary import ConvertReport
from tracestore.errors import ClusterError, CorruptStoreError, InvalidInputError, TracestoreError, UsageError
from tracestore.ingest.packing import PackOptions, identify
from tracestore.ingest.source_streams import TraceStream
from tracestore.ingest.sources import SourceFile
from tracestore.store.format import paths
from tracestore.store.io import fsio
from tracestore.store.io.local_folders import local_dir
from tracestore.store.io.writing_folder import remove_abandoned
from tracestore.store.read.store import open_store
from tracestore.store.write.pack import PackedTrace
from tracestore.store.write.plan_files import PlanFiles, open_plan_files
from tracestore.store.write.writer import StoreWriter
from tracestore.store.write.written import TraceBlock
from tracestore.tasks.receipt import FoundReceipt, WrittenSource, listed, read_receipt, usable_receipt
from tracestore.tasks.task_plan import Quiet, Task, TaskPlan, kept_plans

_POLL_S = 0.02
_VISIBLE_S = 60  # NFS shows a new file after at most that time, unless it is configured otherwise.


def unwritten(tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks without a receipt whose segments exist."""
    if not tasks:
        return []
    files = open_plan_files(tasks[0].store)
    found = files.times()
    return [t for t in tasks if paths.receipt(t.hash) not in found or not _is_written(files, t)]


def _is_written(files: PlanFiles, task: Task) -> bool:
    if (found := listed(files, task)) is None:
        return False
    rows = set(map(paths.segment_rows, found[0]))
    return rows <= files.sizes(rows).keys()


def whole_tasks(plan: TaskPlan, sources: Sequence[SourceFile]) -> list[Task]:
    """Return the tasks that are written and of which nothing was refused."""
    found = ((task, usable_receipt(plan, task, sources)) for task in plan.tasks())
    return [task for task, r in found if r is not None and not any(source.refused for source in r.sources)]


def files_of_plans(store: str | PathLike[str]) -> set[str]:
    """Return the paths of the plans that a store keeps, of their receipts, and of the segments of these."""
    found, files = set[str](), open_plan_files(store)
    for plan in kept_plans(files, files.times()):
        tasks = plan.tasks()
        found |= {paths.plan(plan.digest), *(paths.receipt(task.hash) for task in tasks)}
        of_tasks = (listed(files, task) for task in tasks)
        found.update(path for one in of_tasks if one is not None for path in one[0])
    return found


def read_plan(tasks: Sequence[Task]) -> TaskPlan:
    """Return the plan of tasks; the errors of `TaskPlan.read`. That of a missing plan tells if it is committed."""
    try:
        return TaskPlan.read(tasks[0])
    except UsageError:
        if not _has_sources(tasks):
            raise
    store = tasks[0].store
    raise UsageError(f"{store}: has no such plan: it is committed, and the store has all sources of its tasks")


def _has_sources(tasks: Sequence[Task]) -> bool:
    """Return whether the store has all sources of the receipts, with all labels."""
    files = open_plan_files(tasks[0].store)
    with suppress(FileNotFoundError, NotADirectoryError, TracestoreError):
        found = [listed(files, task) for task in tasks]
        if None not in found:
            with open_store(tasks[0].store) as store:
                stored = {(s.path, s.size, s.fingerprint) for s in store.internals.index.sources()}
            return all(one is not None and one[1] <= stored for one in found)
    return False


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
    plan, tasks = read_plan(tasks), sorted(set(tasks), key=lambda task: task.number)
    if tasks != plan.tasks():
        raise UsageError(f"{plan.store}: expected the {len(plan.tasks()):,} tasks of one plan, found {len(tasks):,}")
    if tasks[1:]:  # That of a single one is read at once.
        plan.require_written(tasks)
    return commit_plan(plan, output or Quiet())


class Future(Protocol):
    """A task that is being written, as in `concurrent.futures`."""

    def done(self) -> bool:
        """Return whether the task is written, or has failed."""

    def result(self) -> object:
        """Return what the task has returned, or raise its error."""


class Workers(Protocol):
    """Write tasks, until the context is left."""

    def submit(self, task: Task) -> Future:
        """Write a task."""

    def __enter__(self) -> object: ...

    def __exit__(self, *_: object) -> None: ...


def commit_plan(
    plan: TaskPlan,
    output: Output,
    workers: Workers | None = None,
    *,
    num_workers: int = 1,
    known: Mapping[str, Any] | None = None,
) -> ConvertReport:
    """Add what the tasks of a plan have written to the store, and remove the plan.

    Parameters
    ----------
    plan : TaskPlan
    output : Output
        Receives notes, and progress if `workers` are given.
    workers : Workers, optional
        Write the tasks that are not written. By default all of them are.
    num_workers : int
        Their number, for the notes.
    known : Mapping, optional
        What the conversion that was planned knows; by default it is read from the plan.

    Raises
    ------
    InvalidInputError
        If a source is refused; the sources before it are committed, and the plan is removed.
    ClusterError
        If a worker fails otherwise than by an error of tracestore.
    """
    with fsio.map_os_errors(local_dir(plan.store)):
        commit = _Commit(plan, output, workers, num_workers, plan.known() if known is None else known)
        try:
            with workers or nullcontext():
                report = commit.run()
        except InvalidInputError:
            plan.remove(whole_tasks(plan, commit.sources))
            raise
        finally:
            if isinstance(plan.store, Path):
                with suppress(FileNotFoundError):
                    remove_abandoned(plan.store)  # of workers that were killed
    return report


class _Commit(Conversion):
    """A conversion whose traces other processes write or have written."""

    def __init__(
        self, plan: TaskPlan, output: Output, workers: Workers | None, num_workers: int, known: Mapping[str, Any]
    ) -> None:
        stored = plan.facts["store_options"]  # that the segments were written with
        attention = plan.options.attention or stored["attention"]
        options = replace(
            plan.options, attention=attention, dtype=stored["dtype"], codec=stored["codec"], workers=num_workers
        )
        super().__init__(plan.arguments, str(plan.store), options, output, **known)
        self._at_end = self._remove_plan
        self._plan, self._tasks, self._workers = plan, plan.tasks(), workers
        self._futures: dict[Task, Future] = {}

    def _again(self) -> Conversion:
        described, provenances = self._plan.described(), self.provenances
        sources, store, options, output, whole = self._arguments
        options = replace(options, attention=self._plan.options.attention)  # that of the tasks is resolved
        return Conversion(
            sources, store, options, output, whole, described=described, provenances=provenances, reads_all=True
        )

    def _remove_plan(self, writer: StoreWriter, report: ConvertReport) -> None:
        if self._workers is not None or report.num_sources_skipped or report.num_traces_refused:
            writer.target.remove_files(self._plan.with_receipts())  # No later plan must find what was refused.
        else:
            # Another coordinator of the plan may still read the receipts, which the next plan removes.
            writer.target.remove_files([paths.plan(self._plan.digest)])

    def has_attention(self) -> bool | None:
        """Return what the plan has found."""
        found: bool | None = self._plan.facts["has_attention"]
        return found

    def report_plan(self) -> None:
        """Print the sizes, unless the plan has printed them, and let the workers write all tasks without a usable receipt.

        Until a store is replaced, they write into it.
        """
        if self._workers is not None:
            super().report_plan()
            found = self._plan.files.times()
            for task in self._tasks:
                if paths.receipt(task.hash) not in found or usable_receipt(self._plan, task, self.sources) is None:
                    self._futures[task] = self._workers.submit(task)
        for task, future in self._futures.items() if self._options.overwrite else ():
            self._wait(task, future)

    def _ends(self, writer: StoreWriter) -> dict[str, bool]:
        """Return where tasks end, and whether a commit follows: positions that depend on the plan alone."""
        count = len(self._tasks)
        planned = Counter(name for task in self._tasks for name in task.sources)
        self._unread = list((self._num_named - planned).elements())
        return {task.sources[-1]: commits_after(task.number, count) for task in self._tasks[:-1]}

    def _streams(self, writer: StoreWriter, pack_options: PackOptions) -> Iterator[TraceStream]:
        """Yield the sources of the tasks."""
        for known in self._plan.facts["known"]:
            if not self.is_known(writer, *known):
                raise InvalidInputError(
                    "the store has it no longer, or other content of its name; plan again", source=known[0]
                )
        planned = {position for found in self._plan.facts["tasks"] for position, *_ in found}
        left_out = [source for k, source in enumerate(self.sources) if k not in planned]
        self.report.num_sources_skipped_existing += len(left_out)
        self.report.bytes_in += sum(source.file_bytes() for source in left_out)
        for task in self._tasks:
            if task in self._futures:
                self._wait(task, self._futures[task])
            found = self._read(task)
            found.add_accounts(self.described.parts)
            for source in found.sources:
                self._check_order(writer, source)
                yield source

    def _traces_to_store(self, stream: TraceStream) -> Iterator[PackedTrace | TraceBlock]:
        """Yield the blocks of a source, whose ids its task has chosen."""
        assert isinstance(stream, WrittenSource)
        return stream.written_blocks()

    def _wait(self, task: Task, future: Future) -> None:
        """Wait until a task is written; between two looks, Ctrl-C is noticed."""
        while not future.done():
            self._check_interrupt()
            time.sleep(_POLL_S)
        try:
            future.result()
        except (TracestoreError, KeyboardInterrupt):
            raise
        except Exception as error:
            # Several workers died with this task, or they lack this package.
            raise ClusterError(f"{task.sources[0]}: a worker failed: {type(error).__name__}: {error}") from None

    def _check_order(self, writer: StoreWriter, written: WrittenSource) -> None:
        """Refuse a source of which another conversion may have committed newer content since the plan."""
        name, expected = written.source.name, (written.size, written.fingerprint)
        if self.is_known(writer, name, *expected) or not writer.has_source_named(name):
            return
        try:
            if identify(written.source)[:2] != expected:
                raise InvalidInputError("has changed since the plan; plan again", is_whole_source=True)
        except InvalidInputError as error:
            written.blocks, written.refused, written.error = (), [], error

    def _read(self, task: Task) -> FoundReceipt:
        """Return the receipt of a task. A shared file system may show late what a worker of another machine has written."""
        until = time.monotonic() + (_VISIBLE_S if task in self._futures else 0)
        while True:
            try:
                return read_receipt(self._plan, task, self.sources)
            except (FileNotFoundError, CorruptStoreError) as error:
                is_late = time.monotonic() >= until
                self._plan.require_written([task] if is_late else [])
                if is_late and isinstance(error, CorruptStoreError):
                    raise
            self._check_interrupt()
            time.sleep(_POLL_S)
