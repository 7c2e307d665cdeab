"""A process of its own for HDF5 files, because a damaged one can crash the C library of HDF5, or make it loop forever.

The process answers requests, JSON objects that a connection of multiprocessing carries, by a JSON object and, for an
array, its bytes. It is started once and reads one file after the other. It ends with the process that started it.
"""

import atexit
import contextlib
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.platform_support import memory_use

# Time for one answer, or for one part of an array. The library loops forever on some damaged files.
TIMEOUT_S = 60.0
# Memory of the process beyond that of its libraries. Texts of variable length may share their bytes in the file.
_MAX_DATA_BYTES = 192 << 20
_MAX_MESSAGE_BYTES = 64 << 20
_PART_BYTES = 1 << 20  # of an array, in a message
_POLL_S = 1.0
_SERVER = "tracestore.ingest.readers.hdf5_server"  # the module that the process runs: it calls `serve`
CRASHED = "the HDF5 library fails on this file: truncated or damaged"

Answer = tuple[dict[str, Any], Iterator[np.ndarray]]


class HDF5Process:
    """A process that reads HDF5 files for this one, one at a time."""

    def __init__(self) -> None:
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        read_end, write_end = os.pipe()
        self._life = os.fdopen(write_end, "wb")  # closed when this process ends
        self._connection, other = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", _SERVER, str(read_end), str(other.fileno())],
            pass_fds=(read_end, other.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for this process
        )
        os.close(read_end)
        other.close()

    @property
    def is_alive(self) -> bool:
        """True while the process can answer."""
        return self._process.poll() is None

    def ask(self, **message: Any) -> dict[str, Any]:
        """Send a request and return the answer or its error; raise InvalidInputError if the process has ended."""
        try:
            self._connection.send_bytes(json.dumps(message).encode())
            return dict(json.loads(self._received()))
        except (OSError, ValueError):
            raise InvalidInputError(CRASHED) from None

    def receive_into(self, view: memoryview) -> None:
        """Receive the bytes that follow an answer."""
        begin = 0
        while begin < len(view):
            data = self._received()
            if not 0 < len(data) <= len(view) - begin:
                raise InvalidInputError(CRASHED)
            view[begin : begin + len(data)] = data
            begin += len(data)

    def _received(self) -> bytes:
        if not self._connection.poll(TIMEOUT_S):
            raise InvalidInputError(f"the HDF5 library did not read this file within {TIMEOUT_S:g} s: damaged")
        try:
            return self._connection.recv_bytes(_MAX_MESSAGE_BYTES)
        except (OSError, EOFError):
            raise InvalidInputError(CRASHED) from None

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._connection.close()
        self._life.close()


class Idle:
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


def serve(answer: Callable[[dict[str, Any]], Answer]) -> None:
    """Answer requests until the connection is closed or the process that asked has ended.

    Parameters
    ----------
    answer : callable
        Return the answer to a request, and the arrays whose bytes follow it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGALRM, signal.SIGIO):
        signal.signal(number, signal.SIG_DFL)
    parent, connection = os.getppid(), Connection(int(sys.argv[2]))
    _end_with_parent()
    _limit_memory()
    for request in _requests(connection, parent):
        # The kernel ends this process if an answer takes too long, also in a call of the library that does not return.
        signal.setitimer(signal.ITIMER_REAL, TIMEOUT_S)
        arrays: Iterator[np.ndarray] = iter(())
        try:
            found, arrays = answer(json.loads(request))
        except InvalidInputError as error:
            found = {"error": error.reason, "field": error.field}
        except (Exception, MemoryError) as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            found = {"error": f"truncated or damaged: {reason}"}
        connection.send_bytes(json.dumps(found).encode())
        for array in arrays:  # an error here ends the process
            data = np.asarray(array, order="C").reshape(-1).view("u1").data
            for begin in range(0, len(data), _PART_BYTES):
                connection.send_bytes(data[begin : begin + _PART_BYTES])
            signal.setitimer(signal.ITIMER_REAL, TIMEOUT_S)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _requests(connection: Connection, parent: int) -> Iterator[bytes]:
    """Yield the requests of the process `parent` while it runs."""
    while os.getppid() == parent:
        if connection.poll(_POLL_S):
            try:
                yield connection.recv_bytes()
            except (OSError, EOFError):
                return


def _end_with_parent() -> None:
    """Have the kernel end this process when the other end of the pipe in the first argument closes."""
    pipe = int(sys.argv[1])
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def _limit_memory() -> None:
    """Limit files, core dumps and memory."""
    import h5py  # noqa: F401 - its memory is not counted

    data = memory_use().data + _MAX_DATA_BYTES
    for limit, value in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_DATA, data)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (value, value))
