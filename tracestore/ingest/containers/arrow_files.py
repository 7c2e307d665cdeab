"""Read Arrow and Parquet files with pyarrow, one row per trace: data sets of Hugging Face, activations of SAELens."""

import importlib.util
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tracestore._core.mapping import MappedFile
from tracestore.errors import InvalidInputError
from tracestore.extras import needs
from tracestore.ingest.containers.columns import Arena, Input, Unit
from tracestore.ingest.containers.keys import is_state_name
from tracestore.ingest.files.byte_source import INFLATE_ALLOWANCE_BYTES, MAX_INFLATE_RATIO, check_regular, map_file
from tracestore.ingest.layouts.array_names import MIN_DIMENSIONS
from tracestore.ingest.layouts.parts import is_same
from tracestore.ingest.layouts.records import traces_of_record
from tracestore.ingest.layouts.rows import has_dimension, units_of_rows
from tracestore.store.io.scratch import Scratch

SUFFIXES = (".parquet", ".arrow", ".feather")
FILE_MAGIC, STREAM_MAGIC, PARQUET_MAGIC = b"ARROW1\0\0", b"\xff\xff\xff\xff", b"PAR1"
# Rows of Parquet that are decoded together.
_BATCH_BYTES = 16 << 20
# A compressed batch of Arrow is inflated as a whole.
_MAX_BATCH_BYTES = 256 << 20
_MAX_RAGGED_VALUES = 1_000_000
_RECORD_BATCH, _DICTIONARY_BATCH = 3, 2


def read_arrow(source: Input) -> Iterator[Unit]:
    """Yield the traces of an Arrow file or stream, or of the files of a saved data set."""
    folders: dict[Path, list[Path]] = {}
    for path in source.parts:
        folders.setdefault(path.parent, []).append(path)
    if len(folders) < 2:
        yield from _units(source, partial(_arrow_rows, source))
        return
    inputs = [replace(source, path=folder, parts=tuple(parts)) for folder, parts in folders.items()]
    # The arrays of rows that are joined are read once each.
    yield from _units(source, lambda names=None: _rows_of_layers(inputs))


def _rows_of_layers(sources: list[Input]) -> Iterator[dict[str, Any]]:
    """Yield the rows of data sets that hold a layer of the same traces each, joined.

    Raises
    ------
    InvalidInputError
        If they have different numbers of rows, or different values of other columns.
    """
    rows = [_arrow_rows(source) for source in sources]
    for k, found in enumerate(zip_longest(*rows)):
        joined: dict[str, Any] = {}
        for source, row in zip(sources, found, strict=True):
            if row is None:
                raise InvalidInputError(f"{source.path.name} has {k} rows, and other layers more")
            states = [name for name in row if is_state_name(name)]
            for name, value in row.items():
                key = source.path.name if len(states) == 1 and name in states else name
                if key in joined and not is_same(joined[key], value):
                    raise InvalidInputError(f"row {k}: {name} differs between the folders of layers", field=name)
                joined[key] = value
        yield joined


def read_parquet(source: Input) -> Iterator[Unit]:
    """Yield the traces of a Parquet file."""
    yield from _units(source, partial(_parquet_rows, source))


def is_table(path: Path) -> bool:
    """Return whether a file of Arrow or Parquet has columns of numbers and texts alone; False for a damaged one."""
    if not path.name.endswith(SUFFIXES) or importlib.util.find_spec("pyarrow") is None:
        return False
    status = path.stat()
    return _is_table(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1 << 12)
def _is_table(path: Path, size: int, modified_ns: int) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        mapped = map_file(path)
        if path.name.endswith(".parquet"):
            schema = pq.read_schema(pa.BufferReader(pa.py_buffer(mapped)))
        else:
            schema = pa.ipc.open_stream(pa.py_buffer(_stream_of(mapped))).schema
        kinds = [field.type for field in schema]
    except (InvalidInputError, OSError, ValueError, TypeError, pa.ArrowException):
        return False
    types = pa.types
    is_plain = all(not types.is_nested(k) and not types.is_binary(k) and not types.is_large_binary(k) for k in kinds)
    has_extension = any(isinstance(kind, pa.BaseExtensionType) for kind in kinds)
    return (
        is_plain
        and not has_extension
        and sum(map(types.is_floating, kinds)) < MIN_DIMENSIONS
        and not has_dimension(schema.names)
    )


def rows_of_table(path: Path, max_bytes: int) -> list[dict[str, Any]]:
    """Return the rows of a table that belongs to other files.

    Raises
    ------
    InvalidInputError
        If the file is damaged, or its values may exceed `max_bytes`.
    """
    source = Input(path, path.name, (), Scratch())
    rows, size = [], 0
    for row in _parquet_rows(source) if path.name.endswith(".parquet") else _arrow_rows(source):
        size += sum(len(value) if isinstance(value, str) else 8 for value in row.values())
        if size > max_bytes:
            raise InvalidInputError(f"found more than {max_bytes:,} bytes, expected a smaller table")
        rows.append(row)
    return rows


def _units(source: Input, read: Callable[..., Iterator[dict[str, Any]]]) -> Iterator[Unit]:
    def records(names: list[str] | None = None) -> Iterator[dict[str, Any]]:
        return (trace for row in read(names and [*names, "sample"]) for trace in traces_of_record(row))

    yield from units_of_rows(records(), records, Arena(source.scratch))


def _arrow_rows(source: Input, names: list[str] | None = None) -> Iterator[dict[str, Any]]:
    for path in source.parts or (source.path,):
        check_regular(path)
        try:
            yield from _rows_of_stream(_stream_of(map_file(path)), names)
        except InvalidInputError as error:
            raise error if path is source.path else InvalidInputError(f"{path.name}: {error}") from None


def _stream_of(mapped: MappedFile) -> memoryview:
    """Return the stream of a file, which may be between two marks."""
    is_file = mapped.read(0, min(len(FILE_MAGIC), len(mapped))) == FILE_MAGIC
    return memoryview(mapped)[len(FILE_MAGIC) if is_file else 0 :]


def _rows_of_stream(view: memoryview, names: list[str] | None) -> Iterator[dict[str, Any]]:
    with needs("inputs"):
        import pyarrow as pa
    if not len(view):
        raise InvalidInputError("truncated: no schema")
    try:
        for message in pa.ipc.MessageReader.open_stream(pa.py_buffer(view)):
            _check_message(message)
        for batch in pa.ipc.open_stream(pa.py_buffer(view)):
            batch.validate(full=True)  # otherwise offsets could point outside the file
            yield from _rows(pa, batch, names)
    except (pa.ArrowException, struct.error) as error:
        raise InvalidInputError(f"truncated or damaged Arrow file: {_line(error)}") from None


def _parquet_rows(source: Input, names: list[str] | None = None) -> Iterator[dict[str, Any]]:
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
            for batch in file.iter_batches(rows, row_groups=[k], columns=names, use_threads=False):
                batch.validate(full=True)
                yield from _rows(pa, batch, names)
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


def _rows(pa: Any, batch: Any, chosen: list[str] | None) -> Iterator[dict[str, Any]]:
    names = batch.schema.names
    if len(set(names)) != len(names):
        raise InvalidInputError("found two columns of one name")
    names = [name for name in names if chosen is None or name in chosen]
    columns = [_storage(pa, batch.column(name)) for name in names]
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
    types = pa.types
    if column.is_null()[row].as_py():
        return None
    if types.is_struct(column.type):
        names = [column.type.field(k).name for k in range(column.type.num_fields)]
        parts = {n: _storage(pa, part) for n, part in zip(names, column.flatten(), strict=True)}
        return {n: _value(pa, part, row, inner, name) for n, (part, inner) in parts.items()}
    if types.is_map(column.type):
        places = range(column.offsets[row].as_py(), column.offsets[row + 1].as_py())
        items = _storage(pa, column.items)
        return {column.keys[k].as_py(): _value(pa, items[0], k, items[1], name) for k in places}
    if _is_list(pa, column.type) and any(
        is_kind(column.type.value_type) for is_kind in (types.is_struct, types.is_map)
    ):
        items, shape = _storage(pa, column[row].values)
        if len(items) > _MAX_RAGGED_VALUES:
            raise InvalidInputError(
                f"found a list of {len(items):,} objects, expected at most {_MAX_RAGGED_VALUES:,}", field=name
            )
        return [_value(pa, items, k, shape, name) for k in range(len(items))]
    if not _is_list(pa, column.type):
        value = column[row].as_py()
        return value if not hasattr(value, "isoformat") else value.isoformat()
    inner, sizes = column.slice(row, 1), []
    while _is_list(pa, inner.type):
        lengths = inner.value_lengths()
        sizes.append(lengths[0].as_py() if len(lengths) else 0)
        if inner.null_count or (lengths.to_numpy() != sizes[-1]).any():
            return _ragged(column, row, name)
        inner, inner_shape = _storage(pa, inner.flatten())
        shape = shape or inner_shape
    is_number = types.is_integer(inner.type) or types.is_floating(inner.type) or types.is_boolean(inner.type)
    if inner.null_count or not is_number:
        return _ragged(column, row, name)
    return inner.to_numpy(zero_copy_only=False).reshape(shape or tuple(sizes))


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
