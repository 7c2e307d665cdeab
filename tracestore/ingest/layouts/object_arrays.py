"""Arrays of Python objects in .npy and .npz files: pickles, which the reader of untrusted pickles turns into data."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tracestore._core.pickle import ByteReader
from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.columns import Column, ObjectColumn, Unit
from tracestore.ingest.containers.grouping import units_of
from tracestore.ingest.files.limits import Limits
from tracestore.ingest.pickles.pickle_reader import load_objects
from tracestore.ingest.pickles.resolve import resolve


def read_objects(source: ByteReader, read_bytes: Callable[[], int], name: str) -> list[Any]:
    """Return the values of an array of objects: texts, arrays, and dicts and lists of them.

    Parameters
    ----------
    source : ByteReader
        The pickle that follows the header of the array.
    read_bytes : callable
        Return the number of bytes of the file that have been read, which limits the size of the values.
    name : str
        Name of the array in messages.

    Raises
    ------
    InvalidInputError
        If the pickle is refused, or holds objects that are not data.
    """
    objects = load_objects(source, name)
    limits = Limits(read_bytes)
    values = [resolve(value, limits) for value in objects]
    if limits.has_objects:
        raise InvalidInputError(
            "found objects of classes, expected arrays, numbers, texts, dicts and lists", field=name
        )
    return values


def units_of_objects(columns: dict[str, Any]) -> Iterator[Unit] | None:
    """Return the traces of an only array of dicts, of traces or of traces by id; None for other columns."""
    column = next(iter(columns.values())) if len(columns) == 1 else None
    if not isinstance(column, ObjectColumn) or not all(isinstance(value, dict) for value in column.values):
        return None
    return _units(column.values)


def _units(values: list[dict[Any, Any]]) -> Iterator[Unit]:
    for value in values:
        if len(values) == 1 and value and all(isinstance(inner, dict) for inner in value.values()):
            yield from _units([{"question_id": key} | inner for key, inner in value.items()])
        elif len(values) == 1:
            yield from units_of({str(k): Column(v) if isinstance(v, np.ndarray) else v for k, v in value.items()})
        else:
            yield from units_of({str(k): v for k, v in value.items()}, is_trace=True)
