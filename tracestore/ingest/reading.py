"""Sources read and packed side by side in threads, handed over in one order.

What costs time runs outside the interpreter's lock: inflating, checksums, packing.
Each source has a thread while it is read, and all of them a bound on what waits to be taken.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from tracestore.errors import InvalidInputError, TruncatedFileError
from tracestore.ingest.forecast import SegmentPredictor
from tracestore.ingest.formats import read_traces
from tracestore.ingest.sources import Identity, SourceFile, fingerprint
from tracestore.platform_support import num_processors
from tracestore.store.io.fsio import try_remove_tree
from tracestore.store.io.scratch import Scratch
from tracestore.store.io.spool_files import SpoolArrays
from tracestore.store.write.pack import PackedTrace, pack_record

TRUNCATED_WHILE_READING = "cut short while it was read"
# How often a wait for the next trace lets the caller look at Ctrl-C.
_PATIENCE_S = 0.2
# Free space that a source needs to be written ahead, in sizes of its file: what is copied
# after all takes it twice.
_ROOM_AHEAD = 2
_NUM_PROCESSORS = num_processors()


AnyStream = TypeVar("AnyStream", bound="Stream")


@dataclass(frozen=True)
class PackOptions:
    """How traces are packed, the same for every source of a store."""

    attention: str
    keep_dtype: bool
    # Of one trace, in each of its forms; beyond that it goes through files in `scratch`.
    max_memory: int = 32 << 20
    scratch: Path | None = None
    # Of the packed traces of all sources that wait to be taken.
    max_waiting: int = 64 << 20


@dataclass(frozen=True)
class AheadOptions:
    """Where the rows of sources that will begin a segment are written before their turn; when the
    writer closes and splits segments, and how much it has in the present one between sources."""

    folder: Path
    close_bytes: int
    split_bytes: int
    pending_bytes: Callable[[], int]


def packed_traces(
    source: SourceFile,
    options: PackOptions,
    is_ahead: Callable[[], bool] = lambda: True,
    can_alias: Callable[[], bool] = lambda: False,
) -> Iterator[PackedTrace]:
    """The traces of one source, packed; inflated ahead while `is_ahead()`. can_alias() is
    asked before each: whether it goes before the next one is asked for. InvalidInputError
    names file, position and field."""
    scratch = Scratch(options.scratch, max_memory=options.max_memory)
    need_attention = options.attention != "none"
    records = read_traces(source.path, source.name, need_attention=need_attention, scratch=scratch, is_ahead=is_ahead)
    with closing(records):  # type: ignore[type-var]
        for record in records:
            try:
                yield pack_record(
                    record,
                    attention=options.attention,
                    keep_dtype=options.keep_dtype,
                    scratch=scratch,
                    can_alias=can_alias(),
                )
            except InvalidInputError as error:
                raise error.with_location(source=source.name, position=record.position) from None
            except TruncatedFileError:
                raise InvalidInputError(TRUNCATED_WHILE_READING, source=source.name, position=record.position) from None
            del record


def identified(source: SourceFile) -> Identity:
    """InvalidInputError where it is no file that can be read."""
    if not source.path.is_file():
        next(iter(read_traces(source.path, source.name)))  # refuses it with the reason
    try:
        modified_ns = os.stat(source.path).st_mtime_ns
        return Identity(*fingerprint(source.path), modified_ns)
    except OSError as error:
        raise InvalidInputError(f"cannot be opened: {error.strerror}", source=source.name) from None


class Cancelled(Exception):
    """Ends a reading thread whose traces nobody takes any more."""


class MemoryGate:
    """Counts the packed traces that wait to be taken, of all sources together, and the threads
    that read. A quarter of the room is for the source whose turn it is, so that those behind
    it never stop it."""

    def __init__(self, max_bytes: int) -> None:
        self.changed = threading.Condition()
        self._max_bytes, self._max_behind = max_bytes, max_bytes - max_bytes // 4
        self._held = 0
        self.num_reading = 0  # but for those that wait for room
        self.reserved_on_disk = 0  # by sources that are written ahead
        self.is_closed = False  # nobody takes traces any more; set without the lock

    def has(self, num_bytes: int, *, in_turn: bool) -> bool:
        return self._held + num_bytes <= (self._max_bytes if in_turn else self._max_behind)

    def add(self, num_bytes: int, *, is_news: bool = True) -> None:
        self._held += num_bytes
        if is_news:
            self.changed.notify_all()

    def is_idle(self) -> bool:
        """Whether the reading threads leave a processor to one that inflates for them."""
        return self.num_reading < _NUM_PROCESSORS


class SourceStream:
    """The packed traces of one source on their way from its thread.

    identity() waits for what the source is known by; iterating then gives the traces, unless
    `is_known` was true of them. Both raise what reading the source has raised. Where `ahead`
    is given, a source that is to begin a segment is written there; the lock of `room` guards
    `forecast` too.
    """

    def __init__(
        self,
        source: SourceFile,
        room: MemoryGate,
        on_wait: Callable[[], None],
        forecast: SegmentPredictor,
        ahead: SpoolArrays | None,
    ) -> None:
        self.source = source
        self._room, self._on_wait = room, on_wait
        self._changed = room.changed
        with self._changed:
            self._forecast, self._extent = forecast, forecast.add()
        self._ahead = ahead
        self._may_write, self._is_writing, self._reserved = ahead is not None, False, 0
        self._identity: Identity | None = None
        self._waiting: deque[PackedTrace] = deque()
        self._error: BaseException | None = None
        self._in_turn = self._is_begun = self._is_moving = self._ended = self._cancelled = self._is_done_with = False

    def fill(self, options: PackOptions, is_known: Callable[[str, int, str], bool]) -> None:
        """Reads the source; runs in the thread."""
        try:
            with self._changed:
                self._room.num_reading += 1
            identity = identified(self.source)
            with self._changed:
                self._identity, self._extent.file_bytes = identity, identity.size
                self._changed.notify_all()
            if not self._is_cancelled and not is_known(self.source.name, identity.size, identity.fingerprint):
                try:
                    self._read(options)
                finally:
                    if self._ahead is not None:
                        self._ahead.end()
        except Cancelled:
            return
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._room.num_reading -= 1
                self._forecast.end(self._extent, is_refused=self._error is not None)
                self._ended = True
                self._changed.notify_all()
                is_done_with = self._is_done_with
            if is_done_with and self._ahead is not None:
                self._ahead.remove()

    def _read(self, options: PackOptions) -> None:
        traces = packed_traces(self.source, options, self._room.is_idle, self._begin_to_write)
        with closing(traces):  # type: ignore[type-var]
            for trace in traces:
                if self._is_writing:
                    self._write(trace)
                self._put(trace)
                del trace

    def _begin_to_write(self) -> bool:
        """Whether the next trace goes into files. Once one does, all of the source do: those that
        wait are written first, where none of them has been taken."""
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
        if not self._may_write or self._is_writing or self._is_begun or not self._forecast.begins_segment(self._extent):
            return False
        assert self._ahead is not None
        needed = _ROOM_AHEAD * self._extent.file_bytes
        self._may_write = self._ahead.has_room(self._room.reserved_on_disk + needed)
        if self._may_write:
            self._room.reserved_on_disk += needed - self._reserved
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
                # From here on in memory: the writer refuses the trace, or meets the same in its turn.
                self._may_write = self._is_writing = False
                return
            trace.arrays = written
            if self._is_moving:
                self._room.add(-num_bytes)

    def _put(self, trace: PackedTrace) -> None:
        while True:
            with self._changed:
                size = trace.memory_bytes
                if not self._has_room(size):
                    self._changed.notify_all()  # who takes traces may not know of those that are written
                while not (self._is_cancelled or self._has_room(size) or self._may_begin_to_write()):
                    self._room.num_reading -= 1
                    self._changed.wait(_PATIENCE_S)
                    self._room.num_reading += 1
                if self._is_cancelled:
                    raise Cancelled
                if self._has_room(size):
                    self._extent.packed_bytes += trace.segment_bytes
                    self._waiting.append(trace)
                    # Nobody is woken for one that is written: it may wait for those behind it.
                    self._room.add(size, is_news=not self._is_writing)
                    return
            if self._begin_to_write():
                self._write(trace)

    @property
    def _is_cancelled(self) -> bool:
        return self._cancelled or self._room.is_closed

    def _has_room(self, size: int) -> bool:
        # A trace larger than the room comes in alone, when it is the next one.
        return (self._in_turn and not self._waiting) or self._room.has(size, in_turn=self._in_turn)

    def _wait(self, is_there: Callable[[], bool]) -> None:
        while True:
            with self._changed:
                if not (is_there() or self._ended):
                    self._changed.wait(_PATIENCE_S)
                if is_there() or self._ended:
                    return
            self._on_wait()

    def identity(self) -> Identity:
        self._wait(lambda: self._identity is not None)
        if self._identity is None:
            assert self._error is not None
            raise self._error
        return self._identity

    def __iter__(self) -> Iterator[PackedTrace]:
        with self._changed:
            self._forecast.begin(self._extent)
            self._in_turn = True
            self._changed.notify_all()
        while True:
            self._wait(lambda: bool(self._waiting) and not self._is_moving)
            with self._changed:
                if self._is_moving:
                    continue
                if not self._waiting:
                    if self._ended:
                        break
                    continue
                trace = self._waiting.popleft()
                self._is_begun = True
                self._room.add(-trace.memory_bytes)
            yield trace
            del trace
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Lets the thread end; what it has read is dropped."""
        with self._changed:
            self._cancelled = True
            self._room.add(-sum(trace.memory_bytes for trace in self._waiting))
            self._waiting.clear()

    def discard(self) -> None:
        """After cancel(): gives back the room of what no segment has taken over."""
        with self._changed:
            self._is_done_with, is_ended = True, self._ended
            self._room.reserved_on_disk -= self._reserved
            self._reserved = 0
        if is_ended and self._ahead is not None:
            self._ahead.remove()


class Stream(Protocol):
    """The traces of one source on their way."""

    def cancel(self) -> None: ...

    def discard(self) -> None: ...


def in_order(started: Iterator[AnyStream], wanted: Callable[[], int]) -> Iterator[AnyStream]:
    """The streams one by one, each discarded when it has been had; `wanted()` of them are
    started ahead. Closing the iterator discards all."""
    ahead: deque[AnyStream] = deque()
    try:
        while True:
            count = wanted()
            while len(ahead) < count and (stream := next(started, None)) is not None:
                ahead.append(stream)
            if not ahead:
                return
            yield ahead[0]
            ahead[0].cancel()
            ahead.popleft().discard()
    finally:
        # All are told before anything takes its time, in which Ctrl-C may come again.
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
    """A stream a source, in order; `workers` sources are read at the same time, at most
    options.max_waiting bytes ahead. on_wait() is called now and then while the
    caller waits, and may raise. Closing the iterator ends the threads."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="tracestore-read")
    room = MemoryGate(options.max_waiting)
    forecast = (
        SegmentPredictor(1, lambda: 0) if ahead is None else SegmentPredictor(ahead.close_bytes, ahead.pending_bytes)
    )

    def started() -> Iterator[SourceStream]:
        for number, source in enumerate(sources):
            arrays = None if ahead is None else SpoolArrays(ahead.folder / f"{number:08d}", ahead.split_bytes)
            stream = SourceStream(source, room, on_wait, forecast, arrays)
            pool.submit(stream.fill, options, is_known)
            yield stream

    try:
        with closing(in_order(started(), lambda: 2 * workers)) as streams:  # type: ignore[type-var]
            yield from streams
    finally:
        room.is_closed = True
        pool.shutdown(cancel_futures=True)
        if ahead is not None:
            try_remove_tree(ahead.folder)
