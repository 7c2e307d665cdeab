"""Read and pack sources in parallel threads, and deliver them in order.

The expensive work (inflating, checksums, packing) releases the interpreter's lock. Some threads
read a source each; a limit applies to all packed traces that wait.
"""

import errno
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from queue import SimpleQueue
from typing import Protocol

from tracestore.errors import InvalidInputError, TruncatedFileError
from tracestore.ingest.files.byte_source import TRUNCATED_WHILE_READING
from tracestore.ingest.files.decompress import compression_of
from tracestore.ingest.packing import PackOptions, identify, packed_traces
from tracestore.ingest.sources import SourceFile, SourceIdentity
from tracestore.store.write.pack import PackedTrace
from tracestore.store.write.pending import SegmentsAhead

# Interval at which a wait for the next trace lets the caller check for Ctrl-C.
_POLL_INTERVAL_S = 0.2
# The consumer takes so many bytes at once. Switching between threads for each small trace took longer than its work.
_SMALL_BYTES, _SMALL_TRACES = 64 << 10, 32
# What the reader of a compressed pickle holds at most: objects of finished traces, a trace, chunks. Traces compress by
# less than the ratio, so that the readers of small files hold less.
_READER_BYTES, _MOST_COMPRESSION = 64 << 20, 16


class Cancelled(Exception):
    """Ends the thread of a source that was cancelled."""


class MemoryGate:
    """Limits the memory of packed traces that wait, over all sources, and as much memory of the readers of files.

    A quarter of the memory is reserved for the source that is being written, so that later
    sources cannot block it. Callers hold the lock of `changed`.
    """

    def __init__(self, max_bytes: int) -> None:
        self.changed = threading.Condition()
        self.max_bytes, self.max_bytes_of_later = max_bytes, max_bytes - max_bytes // 4
        self.used_bytes = self.reader_bytes = 0
        self.is_closed = False  # set without the lock when no trace is consumed any more

    def add(self, num_bytes: int, *, notify: bool = True) -> None:
        """Change the number of waiting bytes."""
        self.used_bytes += num_bytes
        if notify:
            self.changed.notify_all()


class SourceStream:
    """The packed traces of one source, read by a thread.

    identity() waits for the identity of the source. Iterating then yields the traces, none if
    `is_known` was true for the identity. Both raise the error of the thread. With `segments`, the thread writes the
    traces, too, until they are consumed; from then on the consumer does, while the thread reads.
    """

    def __init__(
        self, source: SourceFile, gate: MemoryGate, on_wait: Callable[[], None], segments: SegmentsAhead | None
    ) -> None:
        self.source = source
        self._gate, self._on_wait, self._segments = gate, on_wait, segments
        self._changed = gate.changed
        self._identity: SourceIdentity | None = None
        self._waiting: deque[PackedTrace] = deque()
        self._error: BaseException | None = None
        self.refused: list[InvalidInputError] = []  # traces, complete at the end of the iteration
        self._in_turn = self._is_ended = self._cancel_requested = False

    def read_into_queue(self, options: PackOptions, is_known: Callable[[str, int, str], bool]) -> None:
        """Read the source; runs in its thread."""
        try:
            identity = identify(self.source)
            with self._changed:
                self._identity = identity
                self._changed.notify_all()
            if not self._is_cancelled and not is_known(self.source.name, identity.size, identity.fingerprint):
                self._read(options)
        except Cancelled:
            return
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._is_ended = True
                self._changed.notify_all()

    def _read(self, options: PackOptions) -> None:
        held = _reader_bytes(self.source)
        with self._changed:
            self._wait_for_room(lambda: self._in_turn or self._gate.reader_bytes + held <= self._gate.max_bytes)
            self._gate.reader_bytes += held
        try:
            with closing(packed_traces(self.source, options, self.refused)) as traces:  # type: ignore[type-var]
                for trace in traces:
                    if self._segments is not None and not self._in_turn:
                        self._segments.append(trace)
                    self._enqueue(trace)
                    del trace
            if self._segments is not None and not self._in_turn:
                self._segments.pending.flush()
        finally:
            with self._changed:
                self._gate.reader_bytes -= held
                self._changed.notify_all()

    def _wait_for_room(self, has_room: Callable[[], bool]) -> None:
        """Wait until there is room, and release the lock meanwhile; raise Cancelled if the source is cancelled."""
        while not (self._is_cancelled or has_room()):
            self._changed.wait(_POLL_INTERVAL_S)
        if self._is_cancelled:
            raise Cancelled

    def _enqueue(self, trace: PackedTrace) -> None:
        size = trace.memory_bytes
        with self._changed:
            if not self._has_room(size):
                self._changed.notify_all()  # enqueued small traces did not notify the consumer
            self._wait_for_room(lambda: self._has_room(size))
            self._waiting.append(trace)
            # Do not wake the consumer for a small trace: it can take several at once.
            self._gate.add(size, notify=size >= _SMALL_BYTES or len(self._waiting) >= _SMALL_TRACES)

    @property
    def _is_cancelled(self) -> bool:
        return self._cancel_requested or self._gate.is_closed

    def _has_room(self, size: int) -> bool:
        # A trace larger than the limit is accepted alone, if its source is being written.
        most = self._gate.max_bytes if self._in_turn else self._gate.max_bytes_of_later
        return (self._in_turn and not self._waiting) or self._gate.used_bytes + size <= most

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        """Wait until `is_ready()` or the end of the thread."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: is_ready() or self._is_ended, _POLL_INTERVAL_S):
                    return
            self._on_wait()

    def identity(self) -> SourceIdentity:
        """Wait for the identity of the source and return it."""
        self._wait(lambda: self._identity is not None)
        if self._identity is None:
            assert self._error is not None
            raise self._error
        return self._identity

    def __iter__(self) -> Iterator[PackedTrace]:
        with self._changed:
            self._in_turn = True
            self._changed.notify_all()
        while True:
            self._wait(lambda: bool(self._waiting))
            with self._changed:
                if not self._waiting:
                    break
                taken, num_bytes = deque[PackedTrace](), 0  # the next trace, or several small ones
                while self._waiting and (not taken or num_bytes + self._waiting[0].memory_bytes <= _SMALL_BYTES):
                    taken.append(self._waiting.popleft())
                    num_bytes += taken[-1].memory_bytes
                self._gate.add(-num_bytes)
            while taken:
                if self._segments is not None and taken[0].segment is None:
                    self._segments.append(taken[0])
                yield taken.popleft()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """End the thread and drop the traces it has read."""
        with self._changed:
            self._cancel_requested = True
            self._gate.add(-sum(trace.memory_bytes for trace in self._waiting))
            self._waiting.clear()

    def stop(self) -> None:
        """Cancel the source, and wait until nothing more is written."""
        self.cancel()
        if self._segments is not None:
            with self._changed:
                self._changed.wait_for(lambda: self._is_ended)

    def discard(self) -> None:
        """Remove the segments that the writer has not taken over; nothing more is written to them."""
        if self._segments is not None:
            self._segments.discard()


def _reader_bytes(source: SourceFile) -> int:
    """Return about how much memory the reader of a source holds: nothing if its files are mapped."""
    num_bytes = 0
    for path in source.files:
        try:
            with open(path, "rb") as file:
                num_bytes += path.stat().st_size * (compression_of(file.read(8)) is not None)
        except OSError:
            return 0  # the reader reports it
    return min(_READER_BYTES, _MOST_COMPRESSION * num_bytes)


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

    def identity(self) -> SourceIdentity:
        """Return the identity of the source; raise the error of reading it."""

    def __iter__(self) -> Iterator[PackedTrace]:
        """Yield the traces; raise the error of reading them."""

    def stop(self) -> None:
        """Let nothing more be written."""


@contextmanager
def reading_whole(stream: TraceStream, identity: SourceIdentity) -> Iterator[None]:
    """Let the block read and write all traces of a source; InvalidInputError if its files change meanwhile."""
    try:
        yield
    except OSError as error:
        # write(2) fails with EFAULT if the mapped bytes of the source are gone.
        if isinstance(error, TruncatedFileError) or error.errno == errno.EFAULT:
            raise InvalidInputError(TRUNCATED_WHILE_READING) from None
        raise
    if not identity.matches(stream.source):
        raise InvalidInputError("another program modified the file while it was read")


def read_sources(
    sources: list[SourceFile],
    options: PackOptions,
    *,
    workers: int,
    is_known: Callable[[str, int, str], bool],
    on_wait: Callable[[], None],
    segments_of: Callable[[SourceFile], SegmentsAhead | None] = lambda _: None,
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
    segments_of : callable
        Return segments of a source, which its thread writes; None if the consumer does.

    Yields
    ------
    SourceStream
        One per source, in order. Closing the iterator ends the threads.
    """
    gate = MemoryGate(options.max_waiting)
    started, later = deque[SourceStream](), iter(sources)
    tasks: SimpleQueue[SourceStream | None] = SimpleQueue()

    def read_tasks() -> None:
        while (stream := tasks.get()) is not None and not gate.is_closed:
            stream.read_into_queue(options, is_known)

    # Importing concurrent.futures, and logging with it, takes longer than reading a small file.
    names = (f"tracestore-read-{k}" for k in range(min(workers, len(sources))))
    threads = [threading.Thread(target=read_tasks, name=name, daemon=True) for name in names]
    try:
        for thread in threads:
            thread.start()
        while True:
            for source in islice(later, 2 * workers - len(started)):
                started.append(SourceStream(source, gate, on_wait, segments_of(source)))
                tasks.put(started[-1])
            if not started:
                return
            yield started[0]
            started[0].stop()
            started.popleft().discard()
    finally:
        for stream in started:
            stream.cancel()
        gate.is_closed = True
        for _ in threads:
            tasks.put(None)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        for stream in started:
            stream.discard()
