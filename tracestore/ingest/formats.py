"""Read pickles and files of torch.save as records, one at a time; other containers through `containers`."""

import contextlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from tracestore._core.pickle import BufferReader, ByteReader, ChunkReader
from tracestore.errors import InvalidInputError, NoTracesError, TruncatedFileError
from tracestore.ingest.containers.columns import Input
from tracestore.ingest.containers.keys import id_of_name
from tracestore.ingest.containers.registry import Reader, folder_reader, read_container, reader_of
from tracestore.ingest.containers.tables import TableReference
from tracestore.ingest.exports.records import read_exported
from tracestore.ingest.files.byte_source import TRUNCATED_WHILE_READING, InflatedChunks, check_regular
from tracestore.ingest.files.limits import Limits
from tracestore.ingest.layouts.joined_files import is_joined, read_joined
from tracestore.ingest.layouts.neighbors import with_predictions
from tracestore.ingest.layouts.partial import is_part, join_records
from tracestore.ingest.pickles import torch_file
from tracestore.ingest.pickles.pickle_reader import pickle_reader
from tracestore.ingest.pickles.pickled_objects import PickledObject
from tracestore.ingest.pickles.resolve import resolve
from tracestore.ingest.preprocessed import read_preprocessed
from tracestore.ingest.roles.assemble import records_of_trace
from tracestore.ingest.roles.batches import SampleNumbers
from tracestore.ingest.roles.candidates import with_advice
from tracestore.ingest.roles.columns import has_id, is_header, is_settings
from tracestore.ingest.roles.keys import DEFAULT_KEYS, INPUTS_PAGE, KeyOptions
from tracestore.ingest.roles.layout import layout, opened
from tracestore.ingest.roles.structures import Structures
from tracestore.ingest.sources import SourceFile
from tracestore.store.io.scratch import Scratch
from tracestore.store.write.record import TraceRecord

_PROTO, _GZIP_RESERVED = 0x80, 0xE0
_MAX_HEADERS, _MAX_UNNAMED = 16, 1 << 17


@dataclass
class ReadOptions:
    """Options of reading a source.

    Attributes
    ----------
    need_attention : bool or None
        Whether a trace without attention is refused; None accepts both.
    keys : KeyOptions
        Names of the fields of a trace in the files.
    on_refused : callable, optional
        Called with the error of each trace that is refused, after which reading continues. By default it is raised.
    on_trace : callable, optional
        Called with the position and the values of each trace, or of the whole file if it is not a list of traces.
    """

    need_attention: bool | None = True
    keys: KeyOptions = DEFAULT_KEYS
    on_refused: Callable[[InvalidInputError], None] | None = None
    on_trace: Callable[[int, Any], None] | None = None


def read_traces(
    source: SourceFile,
    options: ReadOptions,
    *,
    scratch: Scratch | None = None,
    is_ahead: Callable[[], bool] = lambda: True,
) -> Iterator[TraceRecord]:
    """Read the traces of one source in order.

    Parameters
    ----------
    source : SourceFile
        A regular file in one of the formats of docs/ingest.md and docs/containers.md, or several of them.
    options : ReadOptions
        Names of the fields, and what is refused.
    scratch : Scratch, optional
        Files for what exceeds some MiB of a trace of a compressed file. By default they are
        in the system's temporary folder.
    is_ahead : callable, optional
        Return whether a thread inflates ahead; called before each chunk.

    Yields
    ------
    TraceRecord
        If the file is not compressed, the arrays are views of the mapped file.

    Raises
    ------
    InvalidInputError
        Names file, position and field. Unless `on_refused` is given, the caller must discard the traces it got before.
    """
    if source.described is not None:
        try:
            yield from source.described.read(options.need_attention, scratch or Scratch(), options.on_refused)
        except InvalidInputError as error:
            raise error.with_location(source=source.name) from None
        except _FAULTS as error:
            raise _fault(error).with_location(source=source.name) from None
        return
    name, table = source.name, source.table
    context = _Context(name, options, source.path)
    files = Input(source.path, name, source.parts, scratch or Scratch())
    try:
        if source.export is not None:
            for record in read_exported(source.export, name, files.scratch, need_attention=options.need_attention):
                context.position += 1
                yield record
                del record
        elif not files.parts:
            yield from _records(files, context, table, is_ahead)
        elif is_joined(files.parts) or (table is not None and table.is_in_turn):
            yield from _joined(files, context, table, source.is_trace)
        else:
            yield from context.container(folder_reader(files.parts), files, table)
        if context.position == 0:
            raise InvalidInputError(f"found no trace; see {INPUTS_PAGE}#files")
    except InvalidInputError as error:
        raise error.with_location(source=name, position=context.position or None) from None
    except TruncatedFileError:
        raise InvalidInputError(
            TRUNCATED_WHILE_READING, source=name, position=context.position, is_whole_source=True
        ) from None
    except RecursionError:
        raise InvalidInputError("nested deeper than a trace file", source=name) from None
    except _FAULTS as error:
        raise _fault(error).with_location(source=name, position=context.position) from None


# A fault that the checks missed must end as a refusal too, never as a traceback.
_FAULTS = (ValueError, TypeError, OverflowError, IndexError, KeyError, struct.error)


def _fault(error: Exception) -> InvalidInputError:
    return InvalidInputError(f"not a trace file: {type(error).__name__}: {error}")


class _Context:
    """The state of reading one file.

    `position` is that of the next trace. A batch of B answers in one dict is B traces.
    """

    def __init__(self, name: str, options: ReadOptions, file: Path) -> None:
        self.name, self.options, self.position, self.path = name, options, 0, file
        self.limits = Limits(lambda: 0)
        path = PurePosixPath(name).with_suffix("")  # another suffix may be before that of the compression
        path = path.with_suffix("") if path.suffix in (".pkl", ".pickle", ".p", ".joblib") else path
        self.structures = Structures(options.keys, str(path))
        self._numbers = SampleNumbers()
        self._headers: list[Any] = []  # dicts before the first trace
        self._unnamed: list[Any] = []  # items of the top-level list that are no dicts
        self._parts: list[Any] = []  # records that may be a part of a trace each

    def items(self, item: Any, *, is_whole: bool = False) -> Iterator[TraceRecord]:
        """Yield the traces of an item of a top-level list, or of an object among several behind each other."""
        value = opened(item)
        is_dict = isinstance(value, dict)
        is_record = is_dict and not is_whole and is_part(value)
        if is_record or (not is_dict and isinstance(value, list | tuple | np.ndarray | np.generic | str | int | float)):
            pending = self._parts if is_record else self._unnamed
            pending.append(value if is_record else item)
            if len(pending) > _MAX_UNNAMED:
                raise InvalidInputError(f"found more than {_MAX_UNNAMED:,} parts of traces; save a dict for each trace")
            return
        traces = self._found(item, value) if is_dict else [item]
        del item, value
        while traces:
            yield from self.traces(traces.pop(0))

    def _found(self, item: Any, fields: dict[Any, Any]) -> list[Any]:
        """Return the traces in an item of a top-level list; none if it may be a header, or is refused."""
        try:
            if not self._headers and self.structures.rows is None and self.structures.is_trace(fields):
                return [item]
            found = self.structures.find(item, is_item=True)
        except (InvalidInputError, *_FAULTS) as error:
            self.refuse(error if isinstance(error, InvalidInputError) else _fault(error))
            return []
        if found is None and self.position == 0 and is_settings(item):
            self._headers.append(item)
            if len(self._headers) > _MAX_HEADERS:
                raise InvalidInputError("found many dicts without arrays, expected traces")
            return []
        traces = [item] if found is None else found.traces
        headers, self._headers = self._headers, []
        return [*(header for header in headers if not is_header(header, traces[0])), *traces]

    def rest(self) -> Iterator[TraceRecord]:
        """Yield the traces of the items without names, which are understood together."""
        if not self._unnamed:
            return
        found = None if self.position else self.structures.find(self._unnamed)
        for trace in self._unnamed[:1] if found is None else found.traces:
            yield from self.traces(trace)
        self._unnamed = []

    @property
    def is_pending(self) -> bool:
        """Return whether settings were read and no trace after them, or parts of traces."""
        return bool(self._headers or self._parts)

    def unnamed_alone(self) -> list[Any]:
        """Return the items without names, if there are no others."""
        if self.position or self._headers or self._parts or not self._unnamed:
            raise InvalidInputError("the list of traces is inside another object; save the list alone")
        items, self._unnamed = self._unnamed, []
        return items

    def end(self) -> Iterator[TraceRecord]:
        """Yield the traces of their parts, and refuse a file that held settings only."""
        parts, self._parts = self._parts, []
        for item in join_records(parts) or parts:
            yield from self.items(item, is_whole=True)
        if self._headers and self.position == 0:
            yield from self.traces(self._headers[0], is_settings=True)

    def traces(
        self, item: Any, *, is_resolved: bool = False, is_settings: bool = False, is_alone: bool = False
    ) -> Iterator[TraceRecord]:
        """Yield the traces of one dict.

        `is_resolved`: it holds arrays and plain values only. `is_settings`: it is no trace, which is another error.
        `is_alone`: the name of the file is the id of a trace without one.
        """
        values: Any = item if is_resolved else None
        try:
            if not is_resolved:
                values = resolve(item.fields if isinstance(item, PickledObject) else item, self.limits)
            del item
            if self.options.on_trace is not None:
                self.options.on_trace(self.position, values)
            records = records_of_trace(
                values,
                source_name=self.name,
                position=self.position,
                need_attention=self.options.need_attention,
                options=self.options.keys,
                has_objects=self.limits.has_objects,
            )
            for record in records:
                self._numbers.set_sample(record, "" if record.position else self.structures.name)
        except (InvalidInputError, *_FAULTS) as error:
            known = with_advice(error, values) if isinstance(error, InvalidInputError) else _fault(error)
            self.refuse(NoTracesError(known.reason, field=known.field) if is_settings else known)
            return
        if is_alone and len(records) == 1 and records[0].question_id == f"{self.name}:{self.position}":
            records[0].question_id = self.structures.name
        del values
        while records:
            self.position += 1
            yield records.pop(0)

    def counted(self, root: Any, records: Iterator[TraceRecord]) -> Iterator[TraceRecord]:
        """Yield the records of a whole file."""
        if self.options.on_trace is not None:
            self.options.on_trace(0, root)
        for record in records:
            self.position += 1
            yield record

    def container(self, reader: Reader, source: Input, table: TableReference | None) -> Iterator[TraceRecord]:
        """Yield the records of a container."""
        for item, is_borrowed in read_container(reader, source, self.options.keys, table):
            if isinstance(item, InvalidInputError):
                self.refuse(with_advice(item, None))
                continue
            records = self.traces(item, is_resolved=True)
            item = {}
            for record in records:
                record.is_borrowed = is_borrowed
                yield record
                del record

    def refuse(self, error: InvalidInputError) -> None:
        """Report the trace at the position as refused, or raise the error."""
        # A traceback keeps the arrays of the trace.
        error = error.with_traceback(None).with_location(source=self.name, position=self.position)
        if self.options.on_refused is None:
            raise error from None
        self.options.on_refused(error)
        self.position += 1


def _joined(source: Input, context: _Context, table: TableReference | None, is_trace: bool) -> Iterator[TraceRecord]:
    """Yield the records of files that hold parts of the same traces."""
    context.limits = Limits(lambda: sum(part.stat().st_size for part in source.parts))
    rows = None if table is None else table.load()
    context.structures.rows = None if is_trace and rows is not None and len(rows) == 1 else rows
    with contextlib.ExitStack() as resources:
        is_in_turn = table is not None and table.is_in_turn
        for values, numbers in read_joined(source, resources, is_in_turn=is_in_turn):
            if numbers is not None and rows is not None:
                context.structures.rows = rows.at(numbers)
            elif numbers is not None:
                values.setdefault("index", list(numbers))
            if is_trace:
                values = values if rows is None or len(rows) > 1 else rows[0] | values
                values = values if has_id(values) else id_of_name(context.structures.name) | values
            yield from _from_object(context, values)


def _records(
    source: Input, context: _Context, table: TableReference | None, is_ahead: Callable[[], bool]
) -> Iterator[TraceRecord]:
    path = source.path
    if check_regular(path).st_size == 0:
        raise InvalidInputError("the file is empty")
    mapped, compression = torch_file.map_content(path, source.scratch)
    view = memoryview(mapped)
    context.limits = Limits(lambda: len(mapped))
    if (reader := reader_of(mapped, path)) is not None:
        yield from context.container(reader, source, table)
        return
    if table is not None:
        context.structures.rows = table.load()
    if compression is not None:
        if compression == "gzip" and len(view) > 3 and view[3] & _GZIP_RESERVED:
            raise InvalidInputError("damaged gzip: reserved flags are set")
        with contextlib.closing(InflatedChunks(path, is_ahead, compression)) as chunks:
            context.limits = Limits(lambda: chunks.inflated_bytes)
            yield from _from_pickle(context, chunks.reader(source.scratch))
    elif bytes(view[:4]) == b"PK\x03\x04":
        yield from _from_object(context, torch_file.read_zip(mapped))
    elif torch_file.is_legacy(view):
        yield from _from_object(context, torch_file.read_legacy(view))
    else:
        yield from _from_pickle(context, BufferReader(mapped))


def _from_pickle(context: _Context, source: ByteReader) -> Iterator[TraceRecord]:
    is_borrowed = isinstance(source, ChunkReader)
    begin = 0
    while True:
        reader = pickle_reader(source, load_bytes=torch_file.load_bytes)
        for item in reader:
            records = context.items(item)
            item = None
            for record in records:
                record.is_borrowed = is_borrowed
                yield record
                del record
        is_whole = source.is_eof()
        if not is_whole and source.peek() != _PROTO:
            raise InvalidInputError("trailing bytes after the pickle")
        is_list = reader.num_yielded > 0
        if is_list and reader.root is not None and reader.result is not reader.root:
            # The first of parallel lists.
            reader.root.extend(context.unnamed_alone())
            is_list = False
        for record in (
            context.rest()
            if is_list
            else _from_object(context, reader.result, is_only=is_whole and not begin and not context.is_pending)
        ):
            record.is_borrowed = is_borrowed
            yield record
            del record
        if context.position == begin and not context.is_pending and (begin or not is_whole):
            # Several pickles may be behind each other, if each of them holds a trace; the first may be a header.
            raise InvalidInputError("trailing bytes after the pickle")
        if is_whole:
            yield from context.end()
            return
        begin = context.position
        del reader


def _from_object(context: _Context, root: Any, *, is_only: bool = True) -> Iterator[TraceRecord]:
    """Yield the traces of an object; `is_only`: there is no other in the file."""
    fields = with_predictions(opened(root))
    if isinstance(root, PickledObject) and not fields:
        raise InvalidInputError(f"found an object of {root.name}, expected traces; see {INPUTS_PAGE}#files")
    if isinstance(fields, dict) and fields.get("hidden_states") is None:
        if "graphs" in fields:
            yield from context.counted(fields, read_preprocessed(context.path, Scratch(), context.refuse))
            return
        shape = layout(fields.get("sequences"))
        if "sequences" in fields and (shape is None or shape.kind == "f"):
            yield from context.counted(fields, read_preprocessed(context.path, Scratch()))
            return
    if isinstance(fields, dict) and not is_only:
        yield from context.items(fields)
        return
    found = context.structures.find(fields)
    if found is None and fields != []:
        item = fields[0] if isinstance(fields, list) else fields
        yield from context.traces(item, is_settings=is_settings(fields))
    traces = [] if found is None else found.traces
    for trace in traces:
        yield from context.traces(trace, is_alone=is_only and len(traces) == 1)
