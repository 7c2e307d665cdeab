"""Read Arrow and Parquet files with pyarrow, one row per trace: data sets of Hugging Face, activations of SAELens."""

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from tracestore._core.mapping import MappedFile
from tracestore.errors import InvalidInputError
from tracestore.extras import needs
from tracestore.ingest.byte_source import INFLATE_ALLOWANCE_BYTES, MAX_INFLATE_RATIO, check_regular, map_file
from tracestore.ingest.containers.columns import Input, Unit
from tracestore.ingest.layouts.rows import units_of_rows

FILE_MAGIC, STREAM_MAGIC, PARQUET_MAGIC = b"ARROW1\0\0", b"\xff\xff\xff\xff", b"PAR1"
# Rows of Parquet that are decoded together.
_BATCH_BYTES = 16 << 20
# A compressed batch of Arrow is inflated as a whole.
_MAX_BATCH_BYTES = 256 << 20
_MAX_RAGGED_VALUES = 1_000_000
_RECORD_BATCH, _DICTIONARY_BATCH = 3, 2


def read_arrow(source: Input) -> Iterator[Unit]:
    """Yield the traces of an Arrow file or stream, or of the files of a saved data set."""
    yield from units_of_rows(_arrow_rows(source))


def read_parquet(source: Input) -> Iterator[Unit]:
    """Yield the traces of a Parquet file."""
    yield from units_of_rows(_parquet_rows(source))


def _arrow_rows(source: Input) -> Iterator[dict[str, Any]]:
    for path in source.parts or (source.path,):
        check_regular(path)
        mapped = map_file(path)
        begin = len(FILE_MAGIC) if mapped.read(0, min(8, len(mapped))) == FILE_MAGIC else 0
        try:
            yield from _stream(mapped, begin)
        except InvalidInputError as error:
            raise error if path is source.path else InvalidInputError(f"{path.name}: {error}") from None


def _stream(mapped: MappedFile, begin: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a stream. A file is a stream between two marks."""
    with needs("inputs"):
        import pyarrow as pa
    view = memoryview(mapped)[begin:]
    if not len(view):
        raise InvalidInputError("truncated: no schema")
    try:
        for message in pa.ipc.MessageReader.open_stream(pa.py_buffer(view)):
            _check_message(message)
        for batch in pa.ipc.open_stream(pa.py_buffer(view)):
            batch.validate(full=True)  # otherwise offsets could point outside the file
            yield from _rows(pa, batch)
    except (pa.ArrowException, struct.error) as error:
        raise InvalidInputError(f"truncated or damaged Arrow file: {_line(error)}") from None


def _parquet_rows(source: Input) -> Iterator[dict[str, Any]]:
    with needs("inputs"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    mapped = map_file(source.path)
    try:
        file = pq.ParquetFile(pa.BufferReader(pa.py_buffer(mapped)), pre_buffer=False)
        for k in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(k)
            size = group.total_byte_size  # group.column(k) of a damaged file ends the process
            if size > len(mapped) * MAX_INFLATE_RATIO + INFLATE_ALLOWANCE_BYTES:
                raise InvalidInputError(f"row group {k} inflates to {size:,} bytes, too many for the file")
            rows = max(1, _BATCH_BYTES // max(1, size // max(1, group.num_rows)))
            for batch in file.iter_batches(rows, row_groups=[k], use_threads=False):
                batch.validate(full=True)
                yield from _rows(pa, batch)
    except pa.ArrowException as error:
        raise InvalidInputError(f"truncated or damaged Parquet file: {_line(error)}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _check_message(message: Any) -> None:
    """Check the size to which the buffers of a compressed message inflate; each begins with it."""
    table = _Table(message.metadata, struct.unpack_from("<I", message.metadata)[0])
    header_type, header = table.scalar(1, "<B"), table.table(2)
    if header is None or header_type not in (_RECORD_BATCH, _DICTIONARY_BATCH):
        return
    batch = header if header_type == _RECORD_BATCH else header.table(1)
    if batch is None or batch.table(3) is None:
        return
    sizes = 0
    for offset, length in batch.pairs(2):
        if length >= 8 and 0 <= offset <= message.body.size - 8:
            sizes += max(0, struct.unpack_from("<q", message.body, offset)[0])
    if sizes > min(_MAX_BATCH_BYTES, message.body.size * MAX_INFLATE_RATIO + INFLATE_ALLOWANCE_BYTES):
        raise InvalidInputError(
            f"a compressed batch inflates to {sizes:,} bytes, expected at most {_MAX_BATCH_BYTES >> 20} MiB; "
            "write it without compression, or in smaller batches"
        )


class _Table:
    """A table of a flatbuffer, the format of Arrow's message headers."""

    def __init__(self, data: Any, position: int) -> None:
        self._data, self._position = data, position

    def _field(self, number: int) -> int:
        """Return the position of a field; 0 if it is missing."""
        vtable = self._position - struct.unpack_from("<i", self._data, self._position)[0]
        if vtable < 0 or 4 + 2 * number >= struct.unpack_from("<H", self._data, vtable)[0]:
            return 0
        offset = struct.unpack_from("<H", self._data, vtable + 4 + 2 * number)[0]
        return self._position + offset if offset else 0

    def scalar(self, number: int, form: str) -> int:
        """Return a number; 0 if it is missing."""
        position = self._field(number)
        return int(struct.unpack_from(form, self._data, position)[0]) if position else 0

    def table(self, number: int) -> "_Table | None":
        """Return a table; None if it is missing."""
        position = self._field(number)
        return _Table(self._data, position + self.scalar(number, "<I")) if position else None

    def pairs(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield the items of a vector of two 64-bit integers each."""
        position = self._field(number)
        if position:
            position += self.scalar(number, "<I")
            for k in range(struct.unpack_from("<I", self._data, position)[0]):
                yield struct.unpack_from("<qq", self._data, position + 4 + 16 * k)


def _rows(pa: Any, batch: Any) -> Iterator[dict[str, Any]]:
    names = batch.schema.names
    if len(set(names)) != len(names):
        raise InvalidInputError("found two columns of one name")
    columns = [_storage(pa, batch.column(k)) for k in range(len(names))]
    for row in range(batch.num_rows):
        fields = {}
        for name, (column, shape) in zip(names, columns, strict=True):
            value = _value(pa, column, row, shape, name)
            if value is not None:
                fields[name] = value
        yield fields


def _storage(pa: Any, column: Any) -> tuple[Any, tuple[int, ...] | None]:
    """Return the values of a column without its extension type, and the shape of each if the type gives it."""
    shape = None
    while isinstance(column.type, pa.BaseExtensionType):
        if isinstance(column.type, pa.FixedShapeTensorType):
            shape = tuple(column.type.shape)
            if list(column.type.permutation or range(len(shape))) != list(range(len(shape))):
                raise InvalidInputError("found tensors with permuted axes, expected C order")
        column = column.storage
    return column, shape


def _value(pa: Any, column: Any, row: int, shape: tuple[int, ...] | None, name: str) -> Any:
    """Return one value: an array for nested lists of numbers, else a Python value."""
    if column.is_null()[row].as_py():
        return None
    if pa.types.is_struct(column.type):
        names = [column.type.field(k).name for k in range(column.type.num_fields)]
        parts = {n: _storage(pa, part) for n, part in zip(names, column.flatten(), strict=True)}
        return {n: _value(pa, part, row, inner, name) for n, (part, inner) in parts.items()}
    if not _is_list(pa, column.type):
        value = column[row].as_py()
        return value if not hasattr(value, "isoformat") else value.isoformat()
    begin, end, inner, sizes = row, row + 1, column, []
    while _is_list(pa, inner.type):
        if inner.slice(begin, end - begin).null_count:
            return _ragged(column, row, name)
        if pa.types.is_fixed_size_list(inner.type):
            size = inner.type.list_size
            begin, end = (inner.offset + begin) * size, (inner.offset + end) * size
        else:
            offsets = inner.offsets.slice(begin, end - begin + 1).to_numpy()
            lengths = np.diff(offsets)
            size = int(lengths[0]) if len(lengths) else 0
            if (lengths != size).any():
                return _ragged(column, row, name)
            begin, end = int(offsets[0]), int(offsets[-1])
        sizes.append(size)
        inner, inner_shape = _storage(pa, inner.values)
        shape = shape or inner_shape
    leaf = inner.slice(begin, end - begin)
    if leaf.null_count or not (
        pa.types.is_integer(leaf.type) or pa.types.is_floating(leaf.type) or pa.types.is_boolean(leaf.type)
    ):
        return _ragged(column, row, name)
    values = leaf.to_numpy(zero_copy_only=False)
    return values.reshape(shape or tuple(sizes))


def _is_list(pa: Any, kind: Any) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _ragged(column: Any, row: int, name: str) -> Any:
    """Return a list of texts or other values, or lists of different lengths, as Python objects."""
    value = column[row]
    pending, count = [value.values], 0
    while pending:
        array = pending.pop()
        count += len(array) if array is not None else 0
        if count > _MAX_RAGGED_VALUES:
            raise InvalidInputError(
                f"found lists of different lengths with more than {_MAX_RAGGED_VALUES:,} values", field=name[:60]
            )
        if array is not None and hasattr(array, "flatten") and _has_lists(array):
            pending.append(array.flatten())
    return value.as_py()


def _has_lists(array: Any) -> bool:
    return hasattr(array, "value_lengths") or hasattr(array.type, "list_size")
