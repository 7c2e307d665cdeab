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
_RECORD_VALUES = (
    "question_id",
    "sample",
    "position",
    "tokens_decoded",
    "strings",
    "prompt_length",
    "label",
    "has_own_id",
    "is_without_embeddings",
    "layer_ids",
    "scores",
    "dropped",
)
_TRACE_VALUES = tuple(f.name for f in fields(PackedTrace) if f.name not in ("record", "arrays", "edge_counts"))


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view("u1").data


def write_spool(path: Path, traces: Iterable[PackedTrace]) -> int:
    """Create a file with the given traces and return their number."""
    count = position = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with with_filename(path):
            for trace in traces:
                arrays: list[tuple[str, np.ndarray]] = [
                    (n, a) for n, pieces in trace.in_memory_arrays.items() for a in pieces
                ]
                optional = trace.record.optional
                arrays += [(n, v) for n, v in optional.items() if isinstance(v, np.ndarray)]
                if trace.record.tokens is not None:
                    arrays.append(("tokens", trace.record.tokens))
                if trace.edge_counts is not None:
                    arrays.append(("edge_counts", trace.edge_counts))
                header = json.dumps(
                    {
                        "record": {name: getattr(trace.record, name) for name in _RECORD_VALUES},
                        "optional": {n: v for n, v in optional.items() if not isinstance(v, np.ndarray)},
                        "trace": {name: getattr(trace, name) for name in _TRACE_VALUES},
                        "names": list(trace.arrays),
                        "arrays": [(name, a.dtype.str, a.shape) for name, a in arrays],
                    }
                ).encode()
                num_bytes = sum(a.nbytes for _, a in arrays)
                pieces = [memoryview(_LENGTH.pack(len(header), num_bytes) + header)]
                pieces += [_bytes_of(a) for _, a in arrays if a.nbytes]
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
        header = json.loads(bytes(view[begin : begin + header_bytes]))
        yield _trace(header, view[begin + header_bytes : position])


def _trace(header: dict[str, Any], data: memoryview) -> PackedTrace:
    arrays: dict[str, list[np.ndarray]] = {name: [] for name in header["names"]}
    others: dict[str, np.ndarray] = {}
    begin = 0
    for name, dtype, shape in header["arrays"]:
        count = int(np.prod(shape, dtype=np.int64))
        # A trace without edges has empty arrays.
        array = np.frombuffer(data, dtype, count, begin) if count else np.empty(0, dtype)
        begin += array.nbytes
        array = array.reshape(shape)
        if name in arrays:
            arrays[name].append(array)
        else:
            others[name] = array
    tokens, edge_counts = others.pop("tokens", None), others.pop("edge_counts", None)
    optional = others | {n: tuple(v) if isinstance(v, list) else v for n, v in header["optional"].items()}
    values = header["record"]
    ids = values.pop("layer_ids")
    record = TraceRecord(**values, layer_ids=None if ids is None else tuple(ids), tokens=tokens, optional=optional)
    return PackedTrace(record=record, arrays=arrays, edge_counts=edge_counts, **header["trace"])
