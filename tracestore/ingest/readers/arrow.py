"""The tree of Arrow files and streams and of Parquet files: rows, whose values are decoded when they are used."""

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from tracestore._core.mapping import MappedFile
from tracestore.errors import InvalidInputError
from tracestore.extras import needs
from tracestore.ingest.files.limits import APPENDED, Limits, max_inflated
from tracestore.ingest.files.parquet_pages import row_groups
from tracestore.ingest.readers.content import ARROW_MAGIC, FAULTS, Content, bytes_value, refusal, refusals
from tracestore.ingest.readers.tree import Group, ListItems, MappingGroup, NumpyArray, StreamItems, Value

# Rows of Parquet that are decoded together.
_BATCH_BYTES = 16 << 20
_MAX_BATCH_ROWS = 1 << 16
# A compressed batch of Arrow is inflated as a whole.
_MAX_BATCH_BYTES = 128 << 20
_RECORD_BATCH, _DICTIONARY_BATCH = 3, 2
_MARK_BYTES = 6  # of ARROW1, at the end of a file
# Cells of a table repeat more than values of a pickle: so many count as one value.
_CELLS = 64
_MAX_RANK = 8


def read_arrow(content: Content) -> Value:
    """Return the rows of an Arrow file or stream."""
    return _rows("Arrow", arrow_batches(content.mapped, content.limits), content.limits)


def read_parquet(content: Content) -> Value:
    """Return the rows of a Parquet file."""
    return _rows("Parquet", parquet_batches(content.mapped, content.limits), content.limits)


def _rows(kind: str, found: Iterator[Any], limits: Limits) -> Value:
    batches = _validated(kind, found)
    first = next(batches, None)
    if first is None:
        return ListItems([], lambda value: value)
    opener = RowOpener(limits, _class_names(first.schema))
    metadata = {_text(key): _text(value) for key, value in (first.schema.metadata or {}).items()}
    rows = (row for batch in chain((first,), batches) for row in opener.rows(batch))
    return StreamItems(rows, metadata, is_lent=True)


def _validated(kind: str, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield record batches whose offsets do not point outside of their buffers; refuse what the library cannot read."""
    with needs("inputs"):
        import pyarrow as pa
    try:
        for batch in batches:
            batch.validate(full=True)
            yield batch
    except (pa.ArrowException, *FAULTS, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InvalidInputError(f"truncated or damaged {kind} file: {reason}") from None


def _class_names(schema: Any) -> dict[str, list[str]]:
    """Return the names of the classes of each column of labels, as the library `datasets` describes it."""
    try:
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"].items()
        labels = [(name, kind) for name, kind in features if isinstance(kind, dict) and name in schema.names]
        return {name: list(map(str, kind["names"])) for name, kind in labels if kind.get("_type") == "ClassLabel"}
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        return {}


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def arrow_batches(mapped: MappedFile, limits: Limits) -> Iterator[Any]:
    """Yield the record batches of a file or stream as views of it; compressed ones are inflated."""
    import pyarrow as pa

    is_file = mapped.read(0, min(len(ARROW_MAGIC), len(mapped))) == ARROW_MAGIC
    view = memoryview(mapped)[len(ARROW_MAGIC) if is_file else 0 :]
    if not len(view):
        raise InvalidInputError("truncated: no schema")
    source = pa.BufferReader(pa.py_buffer(view))
    for message in pa.ipc.MessageReader.open_stream(source):
        limits.charge(0, _inflated_bytes(message), 0)
    _check_end(view[source.tell() :], is_file=is_file)
    yield from pa.ipc.open_stream(pa.py_buffer(view))


def _check_end(rest: memoryview, *, is_file: bool) -> None:
    """Refuse other bytes behind a stream than the footer of a file, its size and the mark at its end."""
    size = int.from_bytes(rest[-_MARK_BYTES - 4 : -_MARK_BYTES], "little") + 4 + _MARK_BYTES if is_file else 0
    if len(rest) != size:
        raise InvalidInputError(APPENDED if len(rest) > size else "truncated: no footer")


def parquet_batches(mapped: MappedFile, limits: Limits) -> Iterator[Any]:
    """Yield record batches of a Parquet file; columns of texts with a dictionary keep it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    groups = list(row_groups(mapped))
    names = sorted(set().union(*(group.dictionary_columns for group in groups)))
    source = pa.BufferReader(pa.py_buffer(mapped))
    file = pq.ParquetFile(source, pre_buffer=False, read_dictionary=names)
    for k, group in enumerate(groups):
        if group.num_rows == 0:
            continue
        limits.charge(0, group.decoded_bytes, 0)
        rows = _BATCH_BYTES // max(1, group.decoded_bytes // group.num_rows)
        rows = max(1, min(rows, _MAX_BATCH_ROWS))
        yield from file.iter_batches(rows, row_groups=[k], use_threads=False)


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
    class_names : Mapping
        For columns of numbers of classes: the name of each.
    """

    def __init__(self, limits: Limits, class_names: Mapping[str, list[str]]) -> None:
        import pyarrow as pa

        self._types, self._limits, self._cells, self._class_names = pa.types, limits, 0, class_names
        self._lists = pa.ListType, pa.LargeListType, pa.FixedSizeListType
        # By classes of scalars, from which others are derived.
        self._readers: dict[type, Callable[[Any], Value]] = {
            pa.Scalar: self._plain,
            pa.BinaryScalar: self._bytes,
            pa.StructScalar: self._struct,
            pa.MapScalar: self._map,
            pa.ListScalar: lambda scalar: self._list(scalar.values),
            pa.FixedShapeTensorScalar: self._tensor,
            pa.UnionScalar: self._union,
            **dict.fromkeys((pa.StringScalar, pa.StringViewScalar), self._text),
            **dict.fromkeys(
                (pa.DictionaryScalar, pa.RunEndEncodedScalar, pa.ExtensionScalar),
                lambda scalar: self._read(scalar.value),
            ),
        }

    def charge(self, text_bytes: int = 0, array_bytes: int = 0, count: int = 1) -> None:
        """Count cells and their bytes. Texts count like arrays: those of a dictionary are often named many times."""
        self._cells += count
        if self._cells >= _CELLS or text_bytes or array_bytes:
            values, self._cells = divmod(self._cells, _CELLS)
            self._limits.charge(0, text_bytes + array_bytes, values)

    def rows(self, batch: Any) -> Iterator[Group]:
        """Yield the rows of a batch as groups."""
        with refusals():
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        if len(columns) < batch.num_columns:
            raise InvalidInputError("found two columns of one name")
        columns |= {name: (columns[name], names) for name, names in self._class_names.items()}
        for row in range(batch.num_rows):
            self.charge()
            yield MappingGroup(columns, partial(self._cell, row))

    def _cell(self, row: int, column: Any) -> Value:
        if not isinstance(column, tuple):
            return self.value(column[row])
        numbers, names = column
        with refusals():
            number = numbers[row].as_py()
            # A negative number stands for no class.
            name = None if number is None or number < 0 else names[number]
        self.charge(len(name or ""))
        return name

    def value(self, scalar: Any) -> Value:
        """Return a scalar of pyarrow as a value of the tree."""
        try:
            return self._read(scalar)
        except FAULTS as error:
            raise refusal(error) from None

    def _read(self, scalar: Any) -> Value:
        self.charge()
        if not scalar.is_valid:
            return None
        kind = type(scalar)
        reader = self._readers.get(kind)
        if reader is None:
            reader = self._readers[kind] = next(self._readers[base] for base in kind.__mro__ if base in self._readers)
        return reader(scalar)

    def _plain(self, scalar: Any) -> Value:
        found = scalar.as_py()
        if found is None or type(found) in (int, float, bool):
            return found  # type: ignore[no-any-return]
        if isinstance(found, np.generic):
            return found.item()  # type: ignore[no-any-return]
        return found.isoformat() if hasattr(found, "isoformat") else str(found)

    def _text(self, scalar: Any) -> str:
        found = str(scalar.as_py())
        self.charge(len(found))
        return found

    def _bytes(self, scalar: Any) -> Value:
        data = scalar.as_buffer()
        self.charge(0, data.size)
        return bytes_value(memoryview(data), self.charge)

    def _struct(self, scalar: Any) -> Value:
        names = [field.name for field in scalar.type]
        if len(set(names)) < len(names):
            raise InvalidInputError("found two fields of one name")
        return MappingGroup(dict(scalar), self.value)

    def _map(self, scalar: Any) -> Value:
        pairs = scalar.values
        keys = [self._read(key) for key in pairs.field(0)]
        if len(set(keys)) < len(keys) or not all(isinstance(key, str | int | float | bool) for key in keys):
            raise InvalidInputError("found a map with a key twice, or with keys that are no names")
        return MappingGroup(dict(zip(keys, pairs.field(1), strict=True)), self.value)

    def _union(self, scalar: Any) -> Value:
        raise InvalidInputError("found a column of a union type, expected one type for each column")

    def _tensor(self, scalar: Any) -> Value:
        kind = scalar.type
        if list(kind.permutation or range(len(kind.shape))) != list(range(len(kind.shape))):
            raise InvalidInputError("found tensors with permuted axes, expected C order")
        return self._list(scalar.value.values, tuple(kind.shape))

    def _list(self, values: Any, shape: tuple[int, ...] = ()) -> Value:
        """Return the values of a list as an array if they are numbers, or lists of equally many; else as items."""
        inner, sizes = values, [len(values)]
        while isinstance(inner.type, self._lists) and len(sizes) < _MAX_RANK and len(inner) and not inner.null_count:
            # value_lengths() would import pyarrow.compute, a tenth of a second.
            size = getattr(inner.type, "list_size", None)
            counts = set(np.diff(inner.offsets.to_numpy()).tolist()) if size is None else {size}
            if len(counts) > 1:
                break
            sizes += counts
            inner = inner.flatten()
        types = self._types
        is_number = types.is_integer(inner.type) or types.is_floating(inner.type) or types.is_boolean(inner.type)
        if is_number and not inner.null_count:
            return NumpyArray(inner.to_numpy(zero_copy_only=False).reshape(shape or sizes), self.charge)
        return ListItems(values, self.value, self.charge)
