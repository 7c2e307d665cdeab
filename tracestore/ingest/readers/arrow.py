"""The tree of Arrow files and streams and of Parquet files: rows, whose values are decoded when they are used."""

import struct
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from tracestore._core.mapping import MappedFile
from tracestore.errors import InvalidInputError
from tracestore.extras import needs
from tracestore.ingest.files.limits import Limits, max_inflated
from tracestore.ingest.readers.content import ARROW_MAGIC, FAULTS, Content, bytes_value, group_value, refusal, refusals
from tracestore.ingest.readers.parquet_pages import row_groups
from tracestore.ingest.tree import Group, ListItems, MappingGroup, NumpyArray, StreamItems, Value

# Rows of Parquet that are decoded together.
_BATCH_BYTES = 16 << 20
_MAX_BATCH_ROWS = 1 << 16
# A compressed batch of Arrow is inflated as a whole.
_MAX_BATCH_BYTES = 128 << 20
_RECORD_BATCH, _DICTIONARY_BATCH = 3, 2
# Cells of a table repeat more than values of a pickle: so many count as one value.
_CELLS = 64
_MAX_RANK = 8
# What types are, and the functions of pyarrow.types that tell it.
_KINDS = (
    ("struct", ("is_struct",)),
    ("map", ("is_map",)),
    ("list", ("is_list", "is_large_list", "is_fixed_size_list")),
    ("view", ("is_list_view", "is_large_list_view")),
    ("dictionary", ("is_dictionary",)),
    ("run_end", ("is_run_end_encoded",)),
    ("union", ("is_union",)),
    ("bytes", ("is_binary", "is_large_binary", "is_fixed_size_binary", "is_binary_view")),
    ("number", ("is_integer", "is_floating", "is_boolean")),
)


def read_arrow(content: Content) -> Value:
    """Return the rows of an Arrow file or stream."""
    return _rows(arrow_batches(content.mapped, content.limits), content.limits)


def read_parquet(content: Content) -> Value:
    """Return the rows of a Parquet file."""
    return _rows(parquet_batches(content.mapped, content.limits), content.limits)


def _rows(batches: Iterator[Any], limits: Limits) -> Value:
    first = next(batches, None)
    if first is None:
        return ListItems([], lambda value: value)
    opener = RowOpener(limits)
    metadata = {_text(key): _text(value) for key, value in (first.schema.metadata or {}).items()}
    rows = StreamItems((row for batch in chain((first,), batches) for row in opener.rows(batch)), None, metadata)
    rows.is_lent = True
    return rows


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def stream_of(mapped: MappedFile) -> memoryview:
    """Return the stream of a file, which may be between two marks."""
    is_file = mapped.read(0, min(len(ARROW_MAGIC), len(mapped))) == ARROW_MAGIC
    return memoryview(mapped)[len(ARROW_MAGIC) if is_file else 0 :]


def arrow_batches(mapped: MappedFile, limits: Limits) -> Iterator[Any]:
    """Yield the record batches of a file or stream as views of it; compressed ones are inflated."""
    with needs("inputs"):
        import pyarrow as pa
    view = stream_of(mapped)
    if not len(view):
        raise InvalidInputError("truncated: no schema")
    try:
        for message in pa.ipc.MessageReader.open_stream(pa.py_buffer(view)):
            limits.charge(0, _inflated_bytes(message), 0)
        for batch in pa.ipc.open_stream(pa.py_buffer(view)):
            batch.validate(full=True)  # otherwise offsets could point outside the file
            yield batch
    except (pa.ArrowException, *FAULTS, OSError) as error:
        raise InvalidInputError(f"truncated or damaged Arrow file: {_line(error)}") from None


def parquet_batches(mapped: MappedFile, limits: Limits, columns: list[str] | None = None) -> Iterator[Any]:
    """Yield record batches of a Parquet file; columns of texts with a dictionary keep it."""
    with needs("inputs"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    groups = list(row_groups(mapped))
    names = sorted(set().union(*(group.dictionary_columns for group in groups)))
    try:
        source = pa.BufferReader(pa.py_buffer(mapped))
        file = pq.ParquetFile(source, pre_buffer=False, read_dictionary=names)
        for k, group in enumerate(groups):
            if group.num_rows == 0:
                continue
            limits.charge(0, group.decoded_bytes, 0)
            rows = _BATCH_BYTES // max(1, group.decoded_bytes // group.num_rows)
            rows = max(1, min(rows, _MAX_BATCH_ROWS))
            for batch in file.iter_batches(rows, row_groups=[k], columns=columns, use_threads=False):
                batch.validate(full=True)
                yield batch
    except (pa.ArrowException, *FAULTS, OSError) as error:
        raise InvalidInputError(f"truncated or damaged Parquet file: {_line(error)}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _inflated_bytes(message: Any) -> int:
    """Return the size to which the buffers of a compressed message inflate; each begins with it."""
    table = _Table(message.metadata, struct.unpack_from("<I", message.metadata)[0])
    header_type, header = table.scalar(1, "<B"), table.table(2)
    if header is None or header_type not in (_RECORD_BATCH, _DICTIONARY_BATCH):
        return 0
    batch = header if header_type == _RECORD_BATCH else header.table(1)
    if batch is None or batch.table(3) is None:
        return 0
    sizes = 0
    for offset, length in batch.pairs(2):
        if length >= 8 and 0 <= offset <= message.body.size - 8:
            sizes += max(0, struct.unpack_from("<q", message.body, offset)[0])
    if sizes > min(_MAX_BATCH_BYTES, max_inflated(message.body.size)):
        raise InvalidInputError(
            f"a compressed batch inflates to {sizes:,} bytes, expected at most {_MAX_BATCH_BYTES >> 20} MiB; "
            "write it without compression, or in smaller batches"
        )
    return sizes


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


class RowOpener:
    """Open the values of record batches, each charged when it is decoded.

    Parameters
    ----------
    limits : Limits
        Limits of the file.
    """

    def __init__(self, limits: Limits) -> None:
        import pyarrow

        self._pa, self._limits, self._cells = pyarrow, limits, 0

    def charge(self, text_bytes: int = 0, array_bytes: int = 0, count: int = 1) -> None:
        """Count cells and their bytes. Texts count like arrays: those of a dictionary are often named many times."""
        self._cells += count
        if self._cells >= _CELLS or text_bytes or array_bytes:
            values, self._cells = divmod(self._cells, _CELLS)
            self._limits.charge(0, text_bytes + array_bytes, values)

    def rows(self, batch: Any) -> Iterator[Group]:
        """Yield the rows of a batch as groups."""
        with refusals():
            names = batch.schema.names
            if len(set(names)) != len(names):
                raise InvalidInputError("found two columns of one name")
            columns = {name: _Column(self._pa, batch.column(k)) for k, name in enumerate(names)}
        for row in range(batch.num_rows):
            self.charge()
            yield MappingGroup(_Cells(columns, dict.fromkeys(columns, row)), self._cell)

    def _cell(self, cell: "tuple[_Column, int]") -> Value:
        try:
            return self.value(*cell)
        except FAULTS as error:
            raise refusal(error) from None

    def value(self, column: "_Column", k: int) -> Value:
        """Return one value of a column."""
        array, kind = column.array, column.kind
        self.charge()
        if not column.is_valid(k):
            return None
        if kind == "dictionary":
            return self.value(column.inner(array.dictionary), int(column.indices[k]))
        if kind == "run_end":
            return self.value(column.inner(array.values), int(np.searchsorted(column.ends, array.offset + k, "right")))
        if kind == "struct":
            return group_value(_Cells(column.fields, dict.fromkeys(column.fields, k)), self._cell, self.charge)
        if kind == "map":
            return self._map(column, k)
        if kind in ("list", "view"):
            return self._list(column, k)
        scalar = array[k]
        if kind == "bytes":
            data = scalar.as_buffer()
            self.charge(0, data.size)
            return bytes_value(memoryview(data), self.charge)
        found = scalar.as_py()
        if isinstance(found, str):
            self.charge(len(found))
            return found
        if found is None or type(found) in (int, float, bool):
            return found  # type: ignore[no-any-return]
        if isinstance(found, np.generic):
            return found.item()  # type: ignore[no-any-return]
        return found.isoformat() if hasattr(found, "isoformat") else str(found)

    def _map(self, column: "_Column", k: int) -> Value:
        begin, end = column.bounds(k)
        keys, items = column.fields["key"], column.fields["value"]
        places: dict[Any, int] = {}
        for place in range(begin, end):
            key = self.value(keys, place)
            if key in places or not isinstance(key, str | int | float | bool):
                raise InvalidInputError("found a map with a key twice, or with keys that are no names")
            places[key] = place
        return group_value(_Cells(dict.fromkeys(places, items), places), self._cell, self.charge)

    def _list(self, column: "_Column", k: int) -> Value:
        begin, end = column.bounds(k)
        inner, sizes = column.fields["item"], [end - begin]
        while inner.kind == "list" and len(sizes) < _MAX_RANK and begin < end:
            size = inner.common_size(begin, end)
            if size is None:
                break
            begin, end = inner.bounds(begin)[0], inner.bounds(end - 1)[1]
            sizes.append(size)
            inner = inner.fields["item"]
        if inner.kind == "number" and not inner.has_null(begin, end):
            shape = column.shape if column.shape is not None and len(sizes) == 1 else tuple(sizes)
            values = inner.array.slice(begin, end - begin).to_numpy(zero_copy_only=False)
            return NumpyArray(values.reshape(shape), self.charge)
        first, last = column.bounds(k)
        items = column.fields["item"]
        return ListItems(range(first, last), lambda place: self._cell((items, place)), self.charge)


class _Cells(dict[Any, Any]):
    """The cells of a row by name: pairs of a column and a place in it, which are made when they are used."""

    def __init__(self, columns: dict[Any, "_Column"], places: dict[Any, int]) -> None:
        super().__init__(places)
        self._columns = columns

    def __getitem__(self, key: Any) -> Any:
        return self._columns[key], super().__getitem__(key)


def _storage(pa: Any, array: Any) -> tuple[Any, tuple[int, ...] | None]:
    """Return an array without its extension types, and the shape of each value if a type gives it."""
    shape = None
    while isinstance(array.type, pa.BaseExtensionType):
        if isinstance(array.type, pa.FixedShapeTensorType):
            shape = tuple(array.type.shape)
            if list(array.type.permutation or range(len(shape))) != list(range(len(shape))):
                raise InvalidInputError("found tensors with permuted axes, expected C order")
        array = array.storage
    return array, shape


def _kind_of(types: Any, kind: Any) -> str:
    """Return the name of what a type is, as in _KINDS, or "scalar"."""
    return next((name for name, tests in _KINDS if any(getattr(types, test)(kind) for test in tests)), "scalar")


class _Column:
    """A column of a batch without extension types, with what its values need."""

    def __init__(self, pa: Any, array: Any) -> None:
        self._pa = pa
        array, self.shape = _storage(pa, array)
        self.array, self.kind = array, _kind_of(pa.types, array.type)
        self.fields: dict[str, _Column] = {}
        self._valid: np.ndarray | None = None
        self._inner: tuple[Any, _Column] | None = None
        if self.kind == "struct":
            names = [array.type.field(k).name for k in range(array.type.num_fields)]
            if len(set(names)) != len(names):
                raise InvalidInputError("found two fields of one name")
            self.fields = {name: _Column(pa, array.field(k)) for k, name in enumerate(names)}
        elif self.kind == "map":
            self.fields = {"key": _Column(pa, array.keys), "value": _Column(pa, array.items)}
            self._set_offsets()
        elif self.kind in ("list", "view"):
            self.fields = {"item": _Column(pa, array.values)}
            self._set_offsets()
        elif self.kind == "dictionary":
            self.indices = array.indices.fill_null(0).to_numpy(zero_copy_only=False)
        elif self.kind == "run_end":
            self.ends = array.run_ends.to_numpy()
        elif self.kind == "union":
            raise InvalidInputError("found a column of a union type, expected one type for each column")

    def inner(self, array: Any) -> "_Column":
        """Return the column of the values of a dictionary or of runs."""
        if self._inner is None:
            self._inner = array, _Column(self._pa, array)
        return self._inner[1]

    def is_valid(self, k: int) -> bool:
        """Return whether a value is not missing."""
        if self.array.null_count == 0 or self.kind == "run_end":
            return True
        if self._valid is None:
            self._valid = self.array.is_valid().to_numpy(zero_copy_only=False)
        return bool(self._valid[k])

    def has_null(self, begin: int, end: int) -> bool:
        """Return whether one of some values is missing."""
        return bool(self.array.null_count and self.array.slice(begin, end - begin).null_count)

    def _set_offsets(self) -> None:
        size = getattr(self.array.type, "list_size", None)
        if size is not None:
            begin = self.array.offset * size
            offsets = np.arange(begin, begin + (len(self.array) + 1) * size, max(1, size), dtype="<i8")
            self._begins = offsets[:-1] if size else np.zeros(len(self.array), "<i8")
            self._ends = self._begins + size
            return
        offsets = self.array.offsets.to_numpy()
        if self.kind == "view":
            self._begins, self._ends = offsets, offsets + self.array.sizes.to_numpy()
        else:
            self._begins, self._ends = offsets[:-1], offsets[1:]

    def bounds(self, k: int) -> tuple[int, int]:
        """Return the places in the values of the items of a list."""
        return int(self._begins[k]), int(self._ends[k])

    def common_size(self, begin: int, end: int) -> int | None:
        """Return the number of items of each of some lists; None if it differs, or one is missing."""
        sizes = self._ends[begin:end] - self._begins[begin:end]
        is_regular = bool((sizes == sizes[0]).all()) and not self.has_null(begin, end)
        return int(sizes[0]) if is_regular else None
