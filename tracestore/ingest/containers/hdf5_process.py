"""Read HDF5 files in a process of their own: the process answers with the units of a file, one at a time."""

import importlib.util
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.extras import needs
from tracestore.ingest.containers.columns import Column, Input, Unit
from tracestore.ingest.containers.grouping import units_of
from tracestore.ingest.readers.hdf5_process import CRASHED, Answer, HDF5Process, Idle, serve
from tracestore.store.io.scratch import Scratch

_MAX_VALUES_BYTES = 256 << 20  # of an array whose shape the file does not state
_DTYPE = re.compile(r"[<>|](?:[biufc](?:1|2|4|8|16)|[SU]\d{1,7})")


_idle = Idle("tracestore.ingest.containers.hdf5_process")


class _RemoteColumn(Column):
    """An array that the process reads."""

    def __init__(self, process: HDF5Process, name: str, entry: dict[str, Any], scratch: Scratch) -> None:
        self._process, self._name, self._scratch = process, name, scratch
        self.shape = tuple(map(int, entry["shape"]))
        self.dtype = np.dtype(object) if entry["dtype"] is None else _dtype(entry["dtype"])

    def whole(self) -> np.ndarray:
        """Read the array."""
        return self._read([], self.shape)

    def row(self, k: int) -> np.ndarray:
        """Read row `k`."""
        return self._read([k], self.shape[1:])

    def part(self, axis: int, begin: int, end: int) -> np.ndarray:
        """Read the values from `begin` to `end` of an axis."""
        shape = (*self.shape[:axis], end - begin, *self.shape[axis + 1 :])
        return self._read([*[[0, n] for n in self.shape[:axis]], [begin, end]], shape)

    def _read(self, selection: list[Any], shape: tuple[int, ...]) -> np.ndarray:
        answer = self._process.request(read=self._name, selection=selection)
        if "texts" in answer:
            return np.array(answer["texts"], dtype=str)
        found, dtype = tuple(map(int, answer["shape"])), _dtype(answer["dtype"])
        if self.dtype.kind != "O" and (found, dtype) != (shape, self.dtype):
            raise InvalidInputError(CRASHED, field=self._name[:60])
        if self.dtype.kind == "O" and math.prod(found) * dtype.itemsize > _MAX_VALUES_BYTES:
            raise InvalidInputError(f"found more than {_MAX_VALUES_BYTES:,} bytes in a row", field=self._name[:60])
        out = self._scratch.empty(found, dtype)
        self._process.receive_into(memoryview(out.reshape(-1).view("u1").data))
        return out


def _dtype(text: Any) -> np.dtype:
    if not isinstance(text, str) or not _DTYPE.fullmatch(text):
        raise InvalidInputError(CRASHED)
    return np.dtype(text)


def read_hdf5(source: Input) -> Iterator[Unit]:
    """Yield the traces of a file: groups with the fields of one trace each, or arrays with stacked ones."""
    with needs("inputs"):
        if importlib.util.find_spec("h5py") is None:
            raise ModuleNotFoundError("No module named 'h5py'", name="h5py")
    process = _idle.take()
    is_whole = False
    try:
        process.request(open=os.path.abspath(source.path))
        while not (answer := process.request(next=True)).get("end"):
            fields = {
                name: _RemoteColumn(process, name, entry, source.scratch) for name, entry in answer["columns"].items()
            }
            for unit in units_of(fields | answer["values"], is_stack=bool(answer["is_stack"])):
                unit.trace = "/".join(filter(None, (str(answer["trace"]), unit.trace)))
                yield unit
        is_whole = True
    finally:
        if is_whole:
            _idle.put(process)
        else:
            process.end()


class _Server:
    """The other side: answers requests about one file at a time."""

    def __init__(self) -> None:
        self._units: Iterator[Unit] = iter(())
        self._columns: dict[str, Any] = {}

    def answer(self, request: dict[str, Any]) -> Answer:
        """Return the answer to a request, and the arrays whose bytes follow it."""
        if "open" in request:
            from tracestore.ingest.containers.hdf5_file import groups_of_file

            self._units = groups_of_file(Path(request["open"]))
            return {}, iter(())
        if "next" in request:
            unit = next(self._units, None)
            return ({"end": True} if unit is None else self._describe(unit)), iter(())
        column = self._columns[request["read"]]
        selection = tuple(slice(*k) if isinstance(k, list) else k for k in request["selection"])
        if column.dtype.kind != "O":
            return {"shape": column.shape_of(selection), "dtype": column.dtype.str}, column.parts(selection)
        array = column.objects(selection)
        if array.dtype.kind == "U":
            return {"texts": array.tolist()}, iter(())
        return {"shape": array.shape, "dtype": array.dtype.str}, iter((array,))

    def _describe(self, unit: Unit) -> dict[str, Any]:
        self._columns, values = {}, {}
        for name, value in unit.fields.items():
            if isinstance(value, Column):
                self._columns[name] = value
            else:
                values[name] = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
        columns = {
            name: {"shape": c.shape, "dtype": None if c.dtype.kind == "O" else c.dtype.str}
            for name, c in self._columns.items()
        }
        return {"trace": unit.trace, "columns": columns, "values": values, "is_stack": unit.is_stack}


if __name__ == "__main__":
    serve(_Server().answer)
