"""Read and pack sources in parallel threads, and deliver them in order.

The expensive work (inflating, checksums, packing) releases the interpreter's lock. Each source
has a thread while it is read; a limit applies to all packed traces that wait.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from tracestore.errors import InvalidInputError
from tracestore.ingest.forecast import SegmentPredictor
from tracestore.ingest.packing import PackOptions, identify, packed_traces
from tracestore.ingest.sources import Identity, SourceFile
from tracestore.store.io.fsio import try_remove_tree
from tracestore.store.io.spool_files import SpoolArrays
from tracestore.store.write.pack import PackedTrace

# Interval at which a wait for the next trace lets the caller check for Ctrl-C.
_POLL_INTERVAL_S = 0.2
# Free disk space that writing a source ahead needs, as a multiple of its file size: rows that
# must be copied in the end take the space twice.
_DISK_SPACE_RATIO = 2
# The consumer takes so many bytes at once. Switching between threads for each small trace took longer than its work.
_SMALL_BYTES, _SMALL_TRACES = 64 << 10, 32

AnyStream = TypeVar("AnyStream", bound="Stream")


@dataclass(frozen=True)
class AheadOptions:
    """Folder and limits for sources that are written to files before the writer reaches them.

    `commit_bytes`, `split_bytes` and `pending_bytes` are those of the StoreWriter.
    """

    folder: Path
    commit_bytes: int
    split_bytes: int
    pending_bytes: Callable[[], int]


class Cancelled(Exception):
    """Ends the thread of a source that was cancelled."""


class MemoryGate:
    """Limits the memory of packed traces that wait, over all sources, and counts reading threads.

    A quarter of the memory is reserved for the source that is being written, so that later
    sources cannot block it. Callers hold the lock of `changed`.
    """

    def __init__(self, max_bytes: int) -> None:
        self.changed = threading.Condition()
        self._max_bytes, self._max_bytes_of_later = max_bytes, max_bytes - max_bytes // 4
        self.used_bytes = 0
        self.num_reading = 0  # without the threads that wait for memory
        self.reserved_on_disk = 0  # bytes reserved by sources that are written ahead
        self.is_closed = False  # set without the lock when no trace is consumed any more

    def has_room(self, num_bytes: int, *, in_turn: bool) -> bool:
        """Return whether that many more bytes may wait."""
        return self.used_bytes + num_bytes <= (self._max_bytes if in_turn else self._max_bytes_of_later)

    def add(self, num_bytes: int, *, notify: bool = True) -> None:
        """Change the number of waiting bytes."""
        self.used_bytes += num_bytes
        if notify:
            self.changed.notify_all()


class SourceStream:
    """The packed traces of one source, read by a thread.

    identity() waits for the identity of the source. Iterating then yields the traces, none if
    `is_known` was true for the identity. Both raise the error of the thread. With `ahead`, a
    source that will begin a segment is written to files before its turn; the lock of `gate`
    guards `forecast` too.
    """

    def __init__(
        self,
        source: SourceFile,
        gate: MemoryGate,
        on_wait: Callable[[], None],
        forecast: SegmentPredictor,
        ahead: SpoolArrays | None,
    ) -> None:
        self.source = source
        self._gate, self._on_wait = gate, on_wait
        self._changed = gate.changed
        with self._changed:
            self._forecast, self._size = forecast, forecast.add()
        self._ahead = ahead
        self._may_write, self._is_writing, self._reserved = ahead is not None, False, 0
        self._identity: Identity | None = None
        self._waiting: deque[PackedTrace] = deque()
        self._error: BaseException | None = None
        self.refused: list[InvalidInputError] = []  # traces, complete at the end of the iteration
        self._in_turn = self._is_begun = self._is_moving = False
        self._is_ended = self._cancel_requested = self._is_discarded = False

    def read_into_queue(self, options: PackOptions, is_known: Callable[[str, int, str], bool]) -> None:
        """Read the source; runs in its thread."""
        try:
            with self._changed:
                self._gate.num_reading += 1
            identity = identify(self.source)
            with self._changed:
                self._identity, self._size.file_bytes = identity, identity.size
                self._changed.notify_all()
            if not self._is_cancelled and not is_known(self.source.name, identity.size, identity.fingerprint):
                try:
                    self._read(options)
                finally:
                    if self._ahead is not None:
                        self._ahead.finish()
        except Cancelled:
            return
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._gate.num_reading -= 1
                self._forecast.end(self._size, is_refused=self._error is not None)
                self._is_ended = True
                self._changed.notify_all()
                is_discarded = self._is_discarded
            if is_discarded and self._ahead is not None:
                self._ahead.remove()

    def _read(self, options: PackOptions) -> None:
        traces = packed_traces(self.source, options, self._begin_to_write, self.refused)
        with closing(traces):  # type: ignore[type-var]
            for trace in traces:
                if self._is_writing:
                    self._write(trace)
                self._enqueue(trace)
                del trace

    def _begin_to_write(self) -> bool:
        """Return whether the next trace is written to files.

        Once one trace of a source does, all of them do, so the waiting traces are written
        first. That is possible only before one of them has been consumed.
        """
        with self._changed:
            if not self._may_begin_to_write():
                return self._is_writing
            self._is_moving = self._is_writing = True
            waiting = list(self._waiting)
        try:
            for trace in waiting:
                if self._is_writing:
                    self._write(trace)
        finally:
            with self._changed:
                self._is_moving = False
                self._changed.notify_all()
        return self._is_writing

    def _may_begin_to_write(self) -> bool:
        if not self._may_write or self._is_writing or self._is_begun or not self._forecast.begins_segment(self._size):
            return False
        assert self._ahead is not None
        needed = _DISK_SPACE_RATIO * self._size.file_bytes
        self._may_write = self._ahead.has_space(self._gate.reserved_on_disk + needed)
        if self._may_write:
            self._gate.reserved_on_disk += needed - self._reserved
            self._reserved = needed
        return self._may_write

    def _write(self, trace: PackedTrace) -> None:
        assert self._ahead is not None
        num_bytes = trace.num_bytes
        written = self._ahead.write(trace.in_memory_arrays, num_bytes, num_bytes + trace.metadata_bytes)
        with self._changed:
            if self._is_cancelled:
                raise Cancelled
            if written is None:
                # Continue in memory. The writer will refuse the trace or meet the same error itself.
                self._may_write = self._is_writing = False
                return
            trace.arrays = written
            if self._is_moving:
                self._gate.add(-num_bytes)

    def _enqueue(self, trace: PackedTrace) -> None:
        while True:
            with self._changed:
                size = trace.memory_bytes
                if not self._has_room(size):
                    self._changed.notify_all()  # enqueued written traces did not notify the consumer
                while not (self._is_cancelled or self._has_room(size) or self._may_begin_to_write()):
                    self._gate.num_reading -= 1
                    self._changed.wait(_POLL_INTERVAL_S)
                    self._gate.num_reading += 1
                if self._is_cancelled:
                    raise Cancelled
                if self._has_room(size):
                    self._size.packed_bytes += trace.segment_bytes
                    self._waiting.append(trace)
                    # Do not wake the consumer for a written or a small trace: it can take several at once.
                    is_worth = size >= _SMALL_BYTES or len(self._waiting) >= _SMALL_TRACES
                    self._gate.add(size, notify=is_worth and not self._is_writing)
                    return
            if self._begin_to_write():
                self._write(trace)

    @property
    def _is_cancelled(self) -> bool:
        return self._cancel_requested or self._gate.is_closed

    def _has_room(self, size: int) -> bool:
        # A trace larger than the limit is accepted alone, if its source is being written.
        return (self._in_turn and not self._waiting) or self._gate.has_room(size, in_turn=self._in_turn)

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        """Wait until `is_ready()` or the end of the thread."""
        while True:
            with self._changed:
                if not (is_ready() or self._is_ended):
                    self._changed.wait(_POLL_INTERVAL_S)
                if is_ready() or self._is_ended:
                    return
            self._on_wait()

    def identity(self) -> Identity:
        """Wait for the identity of the source and return it."""
        self._wait(lambda: self._identity is not None)
        if self._identity is None:
            assert self._error is not None
            raise self._error
        return self._identity

    def __iter__(self) -> Iterator[PackedTrace]:
        with self._changed:
            self._forecast.begin(self._size)
            self._in_turn = True
            self._changed.notify_all()
        while True:
            self._wait(lambda: bool(self._waiting) and not self._is_moving)
            with self._changed:
                if self._is_moving:
                    continue
                if not self._waiting:
                    if self._is_ended:
                        break
                    continue
                taken = self._take()
                self._is_begun = True
            while taken:
                yield taken.popleft()
        if self._error is not None:
            raise self._error

    def _take(self) -> deque[PackedTrace]:
        """Take the next trace, or several small ones."""
        taken, num_bytes = deque[PackedTrace](), 0
        while self._waiting and (not taken or num_bytes + self._waiting[0].memory_bytes <= _SMALL_BYTES):
            taken.append(self._waiting.popleft())
            num_bytes += taken[-1].memory_bytes
        self._gate.add(-num_bytes)
        return taken

    def cancel(self) -> None:
        """End the thread and drop the traces it has read."""
        with self._changed:
            self._cancel_requested = True
            self._gate.add(-sum(trace.memory_bytes for trace in self._waiting))
            self._waiting.clear()

    def discard(self) -> None:
        """Release the disk space of files that no segment has taken over; call cancel() first."""
        with self._changed:
            self._is_discarded, is_ended = True, self._is_ended
            self._gate.reserved_on_disk -= self._reserved
            self._reserved = 0
        if is_ended and self._ahead is not None:
            self._ahead.remove()


class Stream(Protocol):
    """The traces of one source, in the making."""

    def cancel(self) -> None:
        """Stop the work on the source."""

    def discard(self) -> None:
        """Release the files of the source; call cancel() first."""


class TraceStream(Protocol):
    """The packed traces of one source.

    Attributes
    ----------
    source : SourceFile
    refused : list of InvalidInputError
        Its traces that were refused, complete at the end of the iteration.
    """

    source: SourceFile
    refused: list[InvalidInputError]

    def identity(self) -> Identity:
        """Return the identity of the source; raise the error of reading it."""

    def __iter__(self) -> Iterator[PackedTrace]:
        """Yield the traces; raise the error of reading them."""


def ordered_prefetch(started: Iterator[AnyStream], depth: Callable[[], int]) -> Iterator[AnyStream]:
    """Yield the streams in order, with `depth()` of them started.

    Each stream is discarded when the next one is requested. Closing the iterator discards all.
    """
    ahead: deque[AnyStream] = deque()
    try:
        while True:
            count = depth()
            while len(ahead) < count and (stream := next(started, None)) is not None:
                ahead.append(stream)
            if not ahead:
                return
            yield ahead[0]
            ahead[0].cancel()
            ahead.popleft().discard()
    finally:
        # Cancel all of them first: discarding takes time, and Ctrl-C may interrupt it.
        for stream in ahead:
            stream.cancel()
        for stream in ahead:
            stream.discard()


def read_sources(
    sources: list[SourceFile],
    options: PackOptions,
    *,
    workers: int,
    is_known: Callable[[str, int, str], bool],
    on_wait: Callable[[], None],
    ahead: AheadOptions | None = None,
) -> Iterator[SourceStream]:
    """Read sources in parallel.

    Parameters
    ----------
    sources : list of SourceFile
        The sources in their order.
    options : PackOptions
        Options of all sources.
    workers : int
        Number of sources that are read at the same time.
    is_known : callable
        Return for (name, size, fingerprint) whether the source is in the store already.
    on_wait : callable
        Called from time to time while the consumer waits; may raise.
    ahead : AheadOptions, optional
        Write sources that will begin a segment ahead of their turn.

    Yields
    ------
    SourceStream
        One per source, in order. Closing the iterator ends the threads.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix="tracestore-read")
    gate = MemoryGate(options.max_waiting)
    forecast = (
        SegmentPredictor(1, lambda: 0) if ahead is None else SegmentPredictor(ahead.commit_bytes, ahead.pending_bytes)
    )

    def started() -> Iterator[SourceStream]:
        for number, source in enumerate(sources):
            arrays = None if ahead is None else SpoolArrays(ahead.folder / f"{number:08d}", ahead.split_bytes)
            stream = SourceStream(source, gate, on_wait, forecast, arrays)
            pool.submit(stream.read_into_queue, options, is_known)
            yield stream

    try:
        with closing(ordered_prefetch(started(), lambda: 2 * workers)) as streams:  # type: ignore[type-var]
            yield from streams
    finally:
        gate.is_closed = True
        pool.shutdown(cancel_futures=True)
        if ahead is not None:
            try_remove_tree(ahead.folder)
