"""Named arrays in one mappable file: the form of an index part.

0   8   magic b"TSPART\\0\\1"
8   4   number of arrays
12  4   crc32c of the table
16  8   size of the file in bytes
24  ..  table: a row of 64 bytes an array:
        name (32, zero padded), numpy dtype string (8), offset (8), count (8), zeros (8)
..  ..  the arrays, little-endian, each at a multiple of 64
"""

import struct
from typing import Any

import numpy as np

from tracestore._core.kernels import crc32c
from tracestore._core.mapping import MappedFile

MAGIC = b"TSPART\0\1"
_HEADER = struct.Struct("<8sIIQ")
_ROW = struct.Struct("<32s8sQQ8x")
_ALIGN = 64


def pack_arrays(arrays: dict[str, np.ndarray]) -> bytes:
    """One-dimensional little-endian arrays -> the bytes of a part file."""
    offset = -(-(_HEADER.size + _ROW.size * len(arrays)) // _ALIGN) * _ALIGN
    table, pieces = [], []
    for name, array in arrays.items():
        if array.ndim != 1:
            raise ValueError(f"{name}: one-dimensional arrays only")
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        table.append(_ROW.pack(name.encode(), array.dtype.str.encode(), offset, array.size))
        padding = -array.nbytes % _ALIGN
        pieces += [array.tobytes(), bytes(padding)]
        offset += array.nbytes + padding
    rows = b"".join(table)
    head = _HEADER.pack(MAGIC, len(arrays), crc32c(rows), offset) + rows
    return b"".join([head, bytes(-len(head) % _ALIGN), *pieces])


def map_arrays(mapped: MappedFile) -> dict[str, np.ndarray[Any, Any]]:
    """Read-only zero-copy views of the arrays, which keep the map alive.
    ValueError where the header is not sound; the contents are checked by verify."""
    view = memoryview(mapped)
    if len(view) < _HEADER.size:
        raise ValueError("shorter than its header")
    magic, count, crc, size = _HEADER.unpack_from(view)
    end = _HEADER.size + _ROW.size * count
    if magic != MAGIC or size != len(view) or end > size:
        raise ValueError("not an index part, or cut short")
    if crc32c(view[_HEADER.size : end]) != crc:
        raise ValueError("damaged table")
    arrays = {}
    for k in range(count):
        name, dtype_text, offset, items = _ROW.unpack_from(view, _HEADER.size + k * _ROW.size)
        dtype = np.dtype(dtype_text.rstrip(b"\0").decode())
        if offset % _ALIGN or offset + items * dtype.itemsize > size:
            raise ValueError("an array reaches outside the file")
        arrays[name.rstrip(b"\0").decode()] = np.frombuffer(view, dtype, items, offset)
    return arrays
