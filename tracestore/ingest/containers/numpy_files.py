"""Read .npy and .npz files: arrays that are mapped or inflated piece by piece, and pickled ones."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tracestore._core.mapping import MappedFile
from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.columns import Column, Input, ObjectColumn, StreamColumn, Unit
from tracestore.ingest.containers.grouping import units_of
from tracestore.ingest.containers.keys import column_name, parse_key
from tracestore.ingest.files.byte_source import check_regular, map_file
from tracestore.ingest.files.npy import guessed_dtype
from tracestore.ingest.files.npz import StoredArray, stored_arrays, stored_npy
from tracestore.ingest.layouts.object_arrays import read_objects, units_of_objects
from tracestore.store.format import schema
from tracestore.store.io.scratch import Scratch


def read_npy(source: Input) -> Iterator[Unit]:
    """Yield the only array of a file as hidden states."""
    column = npy_column(source.path)
    if (units := units_of_objects({"": column})) is not None:
        yield from units
        return
    key = parse_key(source.path.stem)
    is_layer = key is not None and (key.number is None or column.ndim < 3)
    is_named = key is not None and key.field != "tokens" and not key.trace and is_layer
    yield from units_of(_by_name({source.path.stem if is_named else "hidden_states": column}))


def read_npy_folder(source: Input) -> Iterator[Unit]:
    """Yield the arrays of several files, each named like its field; those of other folders are values per trace."""
    names = [part.stem if part.parent == source.parts[0].parent else column_name(part.stem) for part in source.parts]
    keys = [parse_key(str(name)) for name in names]
    if not any(key and key.field != "tokens" for key in keys):
        others = [k for k, name in enumerate(names) if keys[k] is None and column_name(str(name)) is None]
        names = ["hidden_states" if others == [k] else name for k, name in enumerate(names)]
    yield from units_of(_by_name({str(n): npy_column(part) for n, part in zip(names, source.parts, strict=True)}))


def npy_column(path: Path) -> Column:
    """Return the array of a .npy file as a view of the mapped file."""
    check_regular(path)
    mapped = map_file(path)
    return _column(stored_npy(mapped, 0, len(mapped), path.name), Scratch())


def _column(array: StoredArray, scratch: Scratch) -> Column:
    array.dtype = guessed_dtype(array.dtype)
    if array.dtype.kind == "O":
        values = read_objects(array.pickle(scratch), lambda: array.num_bytes, array.name)
        if len(values) != math.prod(array.shape):
            raise InvalidInputError(
                f"found {len(values)} objects, expected those of shape {array.shape}", field=array.name
            )
        return ObjectColumn(values, array.shape)
    if array.data is not None:
        return Column(array.view())
    rows = array.rows(scratch)
    return Column(rows.whole().T) if array.is_fortran else StreamColumn(rows)


def _by_name(columns: dict[str, Column]) -> dict[str, Column]:
    """Return columns in which the fields of records are columns of their own."""
    fields: dict[str, Column] = {}
    for name, column in columns.items():
        if column.dtype.names and column.dtype != schema.BFLOAT16:
            records = column.whole()
            fields |= {key: Column(records[key]) for key in column.dtype.names}
        else:
            fields[name] = column
    return fields


def read_npz(source: Input) -> Iterator[Unit]:
    """Yield the traces of an archive of arrays."""
    mapped = map_file(source.path)
    columns = _by_name(npz_columns(mapped, source.scratch))
    units = units_of_objects(columns)
    yield from units_of(columns) if units is None else units


def npz_columns(mapped: MappedFile, scratch: Scratch) -> dict[str, Any]:
    """Return the arrays of an archive by name; stored ones are views of the mapped file.

    Raises
    ------
    InvalidInputError
        If the archive is damaged, or an array holds Python objects.
    """
    return {name: _column(array, scratch) for name, array in stored_arrays(mapped).items()}
