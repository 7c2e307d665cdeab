"""Read Arrow and Parquet files with pyarrow, one row per trace: data sets of Hugging Face, activations of SAELens."""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.columns import Arena, Input, Unit
from tracestore.ingest.containers.keys import is_state_name
from tracestore.ingest.files.byte_source import check_regular, map_file
from tracestore.ingest.files.limits import Limits
from tracestore.ingest.layouts.array_names import MIN_DIMENSIONS
from tracestore.ingest.layouts.parts import is_same
from tracestore.ingest.layouts.records import traces_of_record
from tracestore.ingest.layouts.rows import has_dimension, units_of_rows
from tracestore.ingest.readers.arrow import RowOpener, arrow_batches, parquet_batches, stream_of
from tracestore.ingest.tree import Array, BytesArray, Group, Items, Value
from tracestore.store.io.scratch import Scratch

SUFFIXES = (".parquet", ".arrow", ".feather")
_MAX_RAGGED_VALUES = 1_000_000


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
    yield from _units(source, partial(parquet_rows, source))


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
            schema = pa.ipc.open_stream(pa.py_buffer(stream_of(mapped))).schema
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
    for row in parquet_rows(source) if path.name.endswith(".parquet") else _arrow_rows(source):
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
        mapped = map_file(path)
        limits = Limits(mapped.__len__)
        try:
            yield from _rows(arrow_batches(mapped, limits), limits, names)
        except InvalidInputError as error:
            raise error if path is source.path else InvalidInputError(f"{path.name}: {error}") from None


def parquet_rows(source: Input, names: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file, without missing values; nested lists of numbers are arrays."""
    mapped = map_file(source.path)
    limits = Limits(mapped.__len__)
    yield from _rows(parquet_batches(mapped, limits, names), limits, names)


def _rows(batches: Iterator[Any], limits: Limits, names: list[str] | None) -> Iterator[dict[str, Any]]:
    opener = RowOpener(limits)
    for batch in batches:
        if names is not None:
            batch = batch.select([name for name in batch.schema.names if name in names])
        for row in opener.rows(batch):
            yield {name: _plain(value) for name, value in row.items() if value is not None}


def _plain(value: Value) -> Any:
    """Return a value as an array, a dict, a list or a Python value."""
    if isinstance(value, BytesArray):
        return value.read().tobytes()
    if isinstance(value, Array):
        return value.read()
    if isinstance(value, Group):
        return {key: _plain(item) for key, item in value.items()}
    if not isinstance(value, Items):
        return value
    if value.length is not None and value.length > _MAX_RAGGED_VALUES:
        raise InvalidInputError(
            f"found a list of {value.length:,} values of different lengths, expected at most {_MAX_RAGGED_VALUES:,}"
        )
    items = map(_plain, value)
    return [item.tolist() if isinstance(item, np.ndarray) else item for item in items]
