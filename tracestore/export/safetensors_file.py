"""Write arrays as a .safetensors file, without a copy of them.

The library's writer for NumPy has no bfloat16.
"""

import json
from collections.abc import Iterator, Mapping
from typing import BinaryIO

import numpy as np

from tracestore.export.trace_values import arrays_of
from tracestore.store.read.store import TraceStore
from tracestore.store.read.trace import Trace

_DTYPES = {
    "float16": "F16", "float32": "F32", "bfloat16": "BF16",
    "int8": "I8", "uint8": "U8", "int32": "I32", "int64": "I64",
}  # fmt: skip


def write_safetensors(
    file: BinaryIO, arrays: Mapping[str, tuple[np.ndarray, str]], metadata: Mapping[str, str]
) -> None:
    """Write arrays, each with the name of its dtype, and texts about them.

    Wide dtypes come first, as in files of the library, so that every array begins at a multiple of its item size.
    """
    names = sorted(arrays, key=lambda name: (-arrays[name][0].itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        array, dtype = arrays[name]
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        file.write(np.ascontiguousarray(arrays[name][0]).reshape(-1).view("u1").data)


def write_traces(store: TraceStore, traces: Iterator[Trace], file: BinaryIO) -> None:
    """Write one trace, with its key as metadata."""
    [trace] = traces
    # The header is UTF-8, which has no lone surrogates; the id is in the table too.
    question_id = trace.question_id.encode("utf-8", "backslashreplace").decode()
    metadata = {"format": "pt", "question_id": question_id, "sample": str(trace.sample)}
    write_safetensors(file, arrays_of(store, trace), metadata)
