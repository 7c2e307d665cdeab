"""Read HDF5 files in a process of their own, because a damaged one can crash the C library of HDF5.

The process answers requests on its standard input, one JSON object per line, by a JSON object on a line and, for an
array, its bytes. It is started once and reads one file after the other.
"""

import atexit
import contextlib
import importlib.util
import json
import math
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.extras import needs
from tracestore.ingest.containers.columns import Column, Input, Unit
from tracestore.ingest.containers.grouping import units_of
from tracestore.store.io.scratch import Scratch

HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
# The library loops forever on some damaged files.
TIMEOUT_S = 60.0
_MAX_ADDRESS_SPACE = 8 << 30
_MAX_LINE_BYTES = 64 << 20
_MAX_VALUES_BYTES = 256 << 20  # of an array whose shape the file does not state
_DTYPE = re.compile(r"[<>|](?:[biufc](?:1|2|4|8|16)|[SU]\d{1,7})")
_CRASHED = "the HDF5 library fails on this file: truncated or damaged"


class HDF5Process:
    """A process that reads HDF5 files for this one, one at a time."""

    def __init__(self) -> None:
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for this process
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._buffer = bytearray()

    @property
    def is_alive(self) -> bool:
        """True while the process can answer."""
        return self._process.poll() is None

    def request(self, **message: Any) -> dict[str, Any]:
        """Send a request and return the answer; raise InvalidInputError for an error or if the process has ended."""
        try:
            self._input.write(json.dumps(message).encode() + b"\n")
            while (end := self._buffer.find(b"\n")) < 0:
                if len(self._buffer) > _MAX_LINE_BYTES:
                    raise InvalidInputError(_CRASHED)
                self._buffer += self._receive(1 << 16)
            answer = json.loads(self._buffer[:end])
            del self._buffer[: end + 1]
        except (OSError, ValueError):
            raise InvalidInputError(_CRASHED) from None
        if "error" in answer:
            raise InvalidInputError(str(answer["error"]), field=answer.get("field"))
        return dict(answer)

    def _receive(self, count: int) -> bytes:
        if not select.select([self._output], [], [], TIMEOUT_S)[0]:
            raise InvalidInputError(f"the HDF5 library did not read this file within {TIMEOUT_S:g} s: damaged")
        data = os.read(self._output.fileno(), count)
        if not data:
            raise InvalidInputError(_CRASHED)
        return data

    def receive_into(self, view: memoryview) -> None:
        """Receive the bytes that follow an answer."""
        begin = min(len(view), len(self._buffer))
        view[:begin] = self._buffer[:begin]
        del self._buffer[:begin]
        while begin < len(view):
            data = self._receive(min(len(view) - begin, 1 << 20))
            view[begin : begin + len(data)] = data
            begin += len(data)

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._input.close()
        self._output.close()


class _Idle:
    """Processes that have no file open."""

    def __init__(self) -> None:
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._processes: list[HDF5Process] = []
        atexit.register(self._end)

    def take(self) -> HDF5Process:
        """Return a process that no other thread uses."""
        with self._lock:
            while self._pid == os.getpid() and self._processes:
                process = self._processes.pop()
                if process.is_alive:
                    return process
                process.end()
        return HDF5Process()

    def put(self, process: HDF5Process) -> None:
        """Keep a process for the next file."""
        with self._lock:
            self._processes.append(process)

    def _end(self) -> None:
        if self._pid == os.getpid():
            for process in self._processes:
                process.end()


_idle = _Idle()


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
            raise InvalidInputError(_CRASHED, field=self._name[:60])
        if self.dtype.kind == "O" and math.prod(found) * dtype.itemsize > _MAX_VALUES_BYTES:
            raise InvalidInputError(f"found more than {_MAX_VALUES_BYTES:,} bytes in a row", field=self._name[:60])
        out = self._scratch.empty(found, dtype)
        self._process.receive_into(memoryview(out.reshape(-1).view("u1").data))
        return out


def _dtype(text: Any) -> np.dtype:
    if not isinstance(text, str) or not _DTYPE.fullmatch(text):
        raise InvalidInputError(_CRASHED)
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

    def answer(self, request: dict[str, Any]) -> tuple[dict[str, Any], Iterator[np.ndarray]]:
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


def serve() -> None:
    """Answer requests until standard input is closed."""
    for limit, value in (
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, _MAX_ADDRESS_SPACE),
    ):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (value, value))
    output, server = sys.stdout.buffer, _Server()
    for line in sys.stdin:
        # SIGPROF ends the process after this processor time, also if the one that asked was killed meanwhile.
        signal.setitimer(signal.ITIMER_PROF, 2 * TIMEOUT_S)
        arrays: Iterator[np.ndarray] = iter(())
        try:
            answer, arrays = server.answer(json.loads(line))
        except InvalidInputError as error:
            answer = {"error": error.reason, "field": error.field}
        except (Exception, MemoryError) as error:
            answer = {"error": f"truncated or damaged: {' '.join(str(error).split())[:200] or type(error).__name__}"}
        output.write(json.dumps(answer).encode() + b"\n")
        for array in arrays:  # an error here ends the process
            output.write(np.asarray(array, order="C").reshape(-1).view("u1").data)
        output.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve()
