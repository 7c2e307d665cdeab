"""Files of packed traces, which carry traces from one machine to the writer on another.

Each trace is stored as a length, a JSON header and the bytes of its arrays. The files are written by
processes of the same user in the folder of the store; a truncated file is reported as damaged.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from tracestore._core.mapping import MappedFile
from tracestore.errors import CorruptStoreError
from tracestore.store.io.fsio import pwritev_all, with_filename
from tracestore.store.write.pack import PackedTrace
from tracestore.store.write.record import TraceRecord

_LENGTH = struct.Struct("<QQ")  # sizes of the header and of the arrays
_ARRAY = "$array"  # in the header the key of [dtype, shape], instead of an array


def _values(instance: PackedTrace | TraceRecord) -> dict[str, Any]:
    return {f.name: getattr(instance, f.name) for f in fields(instance)}


def _pieces(trace: PackedTrace) -> list[memoryview]:
    """Return the bytes of a trace."""
    arrays: list[np.ndarray] = []

    def describe(array: np.ndarray) -> dict[str, Any]:
        arrays.append(np.ascontiguousarray(array))
        return {_ARRAY: [array.dtype.str, array.shape]}

    header = json.dumps(_values(trace) | {"record": _values(trace.record)}, default=describe).encode()
    lengths = _LENGTH.pack(len(header), sum(a.nbytes for a in arrays))
    return [memoryview(lengths + header), *(a.reshape(-1).view("u1").data for a in arrays if a.nbytes)]


def write_spool(path: Path, traces: Iterable[PackedTrace]) -> int:
    """Create a file with the given traces and return their number."""
    count = position = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with with_filename(path):
            for trace in traces:
                pieces = _pieces(trace)
                pwritev_all(fd, pieces, position)
                position += sum(map(len, pieces))
                count += 1
    finally:
        os.close(fd)
    return count


def read_spool(path: Path) -> Iterator[PackedTrace]:
    """Yield the traces of a file, whose arrays are views of it; raise CorruptStoreError if it is truncated."""
    try:
        view = memoryview(MappedFile(path))
    except OSError as error:
        raise CorruptStoreError(f"{path.name}: {error.strerror}") from None
    position = 0
    while position < len(view):
        if position + _LENGTH.size > len(view):
            raise CorruptStoreError(f"{path.name}: truncated")
        header_bytes, num_bytes = _LENGTH.unpack_from(view, position)
        begin = position + _LENGTH.size
        position = begin + header_bytes + num_bytes
        if position > len(view):
            raise CorruptStoreError(f"{path.name}: truncated")
        yield _trace(bytes(view[begin : begin + header_bytes]), view[begin + header_bytes : position])


def _trace(header: bytes, data: memoryview) -> PackedTrace:
    begin = 0

    def restore(item: dict[str, Any]) -> Any:
        nonlocal begin
        if item.keys() != {_ARRAY}:
            return item
        dtype, shape = item[_ARRAY]
        count = int(np.prod(shape, dtype=np.int64))
        # A trace without edges has empty arrays.
        array = np.frombuffer(data, dtype, count, begin) if count else np.empty(0, dtype)
        begin += array.nbytes
        return array.reshape(shape)

    values = json.loads(header, object_hook=restore)
    record = TraceRecord(**values.pop("record"))
    record.optional = {n: tuple(v) if isinstance(v, list) else v for n, v in record.optional.items()}
    record.extra_names = tuple(record.extra_names)
    record.layer_ids = None if record.layer_ids is None else tuple(record.layer_ids)
    return PackedTrace(record, **values)
