"""Write the sources of a task into segments, and its receipt."""

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path

from tracestore.convert.runner import Conversion
from tracestore.errors import InvalidInputError
from tracestore.ingest.packing import PackOptions
from tracestore.ingest.source_streams import TraceStream, read_sources, reading_whole
from tracestore.store.format import paths, schema
from tracestore.store.io import fsio
from tracestore.store.io.local_folders import budget_beside
from tracestore.store.io.writing_folder import CommitTarget
from tracestore.store.write.commit import open_target
from tracestore.store.write.pack import PackedTrace
from tracestore.store.write.pending import SegmentsAhead
from tracestore.store.write.segment_writer import SegmentWriter
from tracestore.store.write.written import WrittenSegment
from tracestore.tasks.receipt import Receipt, WrittenSource, pack_receipt, usable_receipt
from tracestore.tasks.task_plan import Quiet, Task, TaskPlan


def write_task(task: Task, *, memory_budget: int | None = None) -> Receipt:
    """Read the sources of a task, and write their traces into segments of the store, which no generation names yet.

    Any process may call this, more than once and at the same time: segments are named by their content, and the first
    receipt stays. A receipt with a refused source, or one whose segments are missing, is replaced.

    Parameters
    ----------
    task : Task
    memory_budget : int, optional
        Bytes of memory for traces that wait; by default that of the options.

    Returns
    -------
    Receipt
        Of this run or of an earlier one. Refused sources are in the receipt; commit_tasks reports them.

    Raises
    ------
    UsageError
        If the store does not keep the plan, or other versions of tracestore or its codecs have made it.
    InvalidInputError
        If a scores file has changed since the plan.
    """
    plan = TaskPlan.read(task)
    conversion = Conversion(plan.arguments, task.store, plan.options, Quiet(), **plan.known())
    sources = conversion.sources
    if (found := usable_receipt(plan, task, sources)) is not None:
        return found.summary(task)
    target = open_target(plan.store, overwrite=False, exist_ok=True, keeps_replacement=False)
    with fsio.map_os_errors(target.path, lambda: task.num_bytes):
        try:
            with target.opened():
                pass
            budget = memory_budget or plan.options.memory_budget
            if not isinstance(plan.store, Path):
                # One segment is written while another one is uploaded.
                budget = budget_beside(target.scratch, budget, min(task.num_bytes, 2 * schema.SEGMENT_SPLIT_BYTES))
            stored = plan.facts["store_options"]
            options = PackOptions(
                attention=stored["attention"],
                keep_dtype=stored["dtype"] == "keep",
                max_memory=budget // 16,
                scratch=target.scratch,
                max_waiting=budget // 8,
                skip_bad=plan.options.skip_bad,
                refuse_attention=plan.facts["refuse_attention"],
            )
            writing = _TaskWriting(plan, conversion, options, target)
            writing.write([WrittenSource(sources[k], k, *found) for k, _, *found in plan.facts["tasks"][task.number]])
            path, data = paths.receipt(task.hash), writing.receipt(task)
            plan.require_written()
            if not target.create_file(path, data):
                if (found := usable_receipt(plan, task, sources)) is not None:
                    return found.summary(task)
                target.keep_file(path, data)
            return writing.summary(task)
        finally:
            target.close()


class _TaskWriting:
    """The segments of a task while they are written. A complete one gets its name while others are written."""

    def __init__(self, plan: TaskPlan, conversion: Conversion, options: PackOptions, target: CommitTarget) -> None:
        self._conversion, self._target, self._options = conversion, target, options
        self._segments = SegmentsAhead(plan.facts["store_options"], target.new_folder, schema.SEGMENT_SPLIT_BYTES)
        self._pending = self._segments.pending
        self._written: list[WrittenSource] = []
        self._naming = ThreadPoolExecutor(1)
        self._named: dict[SegmentWriter | WrittenSegment, Future[None]] = {}

    def write(self, sources: list[WrittenSource]) -> None:
        """Write the traces of the sources, and give the segments their names."""
        self._written = sources
        files = [written.source for written in sources]
        streams = read_sources(files, self._options, workers=1, is_known=lambda *_: False, on_wait=lambda: None)
        with self._naming, closing(streams):  # type: ignore[type-var]
            for written, stream in zip(sources, streams, strict=True):
                try:
                    written.packed = self._write_one(stream, written)
                except InvalidInputError as error:
                    written.error = error.with_location(source=stream.source.name)
                written.refused += stream.refused
                self._name(self._pending.all_segments[:-1])
            self._name(self._pending.all_segments)
            for segment in self._pending.all_segments:
                self._named[segment].result()
        if self._pending.all_segments:
            self._target.sync_segments()

    def _name(self, complete: Sequence[SegmentWriter | WrittenSegment]) -> None:
        """Give complete segments their names. At most one waits for that, so that scratch is small."""
        for segment in complete:
            if segment not in self._named:
                wait(self._named.values())
                self._named[segment] = self._naming.submit(self._add, segment)

    def _add(self, segment: SegmentWriter | WrittenSegment) -> None:
        segment.finish(self._target.sync_tree)
        self._target.add_segment(segment.folder, segment.name, segment.files)

    def _write_one(self, stream: TraceStream, written: WrittenSource) -> list[PackedTrace]:
        """Write the traces of a source; InvalidInputError if it is refused, and then none is left."""
        identity = stream.identity()
        if identity[:2] != (written.size, written.fingerprint):
            raise InvalidInputError("has changed since the plan; plan again", is_whole_source=True)
        roll_back, packed, first = self._pending.savepoint(), list[PackedTrace](), len(self._pending.segments)
        self._conversion.scoring.begin_source(stream.source)
        try:
            with reading_whole(stream, identity):
                for trace in stream:
                    label = trace.record.label
                    with contextlib.suppress(
                        InvalidInputError
                    ):  # The commit refuses the trace, and sets the label again.
                        self._conversion.scoring.set_label(trace)
                    self._segments.append(trace)
                    self._name(self._pending.segments[first:-1])
                    trace.record.label = label
                    packed.append(trace)
                    del trace
                self._pending.flush()
            if not packed and not stream.source.may_be_empty:
                raise stream.refused[0] if stream.refused else InvalidInputError("found no trace")
        except BaseException:
            wait(self._named.values())
            roll_back()
            raise
        return packed

    def summary(self, task: Task) -> Receipt:
        """Return the counts of the receipt."""
        num_bytes = sum(size for segment in self._pending.all_segments for _, size, _ in segment.files)
        return Receipt(task.hash, len(self._written), sum(len(source.packed) for source in self._written), num_bytes)

    def receipt(self, task: Task) -> bytes:
        """Return the bytes of the receipt."""
        segments = [segment for segment in self._pending.all_segments if isinstance(segment, SegmentWriter)]
        executions = [part.execution for part in self._conversion.described.parts]
        for execution in filter(None, executions):
            execution.finish()
        accounts = [None if execution is None else execution.account.to_json() for execution in executions]
        return pack_receipt(task, self._written, segments, accounts)
