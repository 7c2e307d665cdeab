r"""Container of named one-dimensional arrays in one mappable file: the format of an index part.

======  ====  =====================================================================
offset  size  content
======  ====  =====================================================================
0       8     magic ``b"TSPART\0\1"``
8       4     number of arrays
12      4     CRC-32C of the table
16      8     file size in bytes
24      ..    table with one row of 64 bytes per array: name (32, zero padded),
              numpy dtype string (8), offset (8), number of items (8), zeros (8)
..      ..    arrays, little-endian, each aligned to 64 bytes
======  ====  =====================================================================
"""

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from tracestore._core.kernels import crc32c
from tracestore._core.mapping import MappedFile
from tracestore.store.format.ragged import decode_string

MAGIC = b"TSPART\0\1"
_HEADER = struct.Struct("<8sIIQ")
_ROW = struct.Struct("<32s8sQQ8x")
_ALIGN = 64


def pack_arrays(arrays: dict[str, np.ndarray]) -> bytes:
    """Return the bytes of a file that holds the given one-dimensional arrays."""
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


class MappedArrays:
    """Arrays of a mapped file, with exactly the names and dtype strings of `dtypes`.

    `views` holds read-only zero-copy arrays for code of the core, which reads them under its SIGBUS
    guard. `read` and `strings` return copies and raise CorruptStoreError if the file was truncated
    after it was mapped. The header is validated here, the contents where they are used.

    Raises
    ------
    ValueError
        If the header is not valid.
    """

    def __init__(self, mapped: MappedFile, dtypes: Mapping[str, str]) -> None:
        self.mapped = mapped
        if len(mapped) < _HEADER.size:
            raise ValueError("shorter than its header")
        magic, count, crc, size = _HEADER.unpack(mapped.read(0, _HEADER.size))
        end = _HEADER.size + _ROW.size * count
        if magic != MAGIC or size != len(mapped) or end > size:
            raise ValueError("not an index part, or truncated")
        if count != len(dtypes):
            raise ValueError(f"found {count} arrays, expected {len(dtypes)}")
        view, head = memoryview(mapped), mapped.read(0, end)
        if crc32c(head[_HEADER.size :]) != crc:
            raise ValueError("the checksum of the table does not match")
        self.views: dict[str, np.ndarray[Any, Any]] = {}
        self._offsets: dict[str, int] = {}
        for k in range(count):
            padded, dtype_text, offset, items = _ROW.unpack_from(head, _HEADER.size + k * _ROW.size)
            name = padded.rstrip(b"\0").decode("ascii", "replace")
            if name in self.views or dtypes.get(name, "").encode() != dtype_text.rstrip(b"\0"):
                raise ValueError(f"unexpected array {name!r} with dtype {dtype_text!r}")
            dtype = np.dtype(dtypes[name])
            if offset % _ALIGN or offset < end or offset + items * dtype.itemsize > size:
                raise ValueError(f"array {name!r} extends beyond the file")
            self.views[name], self._offsets[name] = np.frombuffer(view, dtype, items, offset), offset

    def __contains__(self, name: str) -> bool:
        return name in self.views

    def num_items(self, name: str) -> int:
        """Return the number of items of an array."""
        return len(self.views[name])

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray[Any, Any]:
        """Return a copy of the items `begin` to `end` of an array; raise ValueError if they are out of bounds."""
        view, offset = self.views[name], self._offsets[name]
        end = len(view) if end is None else end
        if not 0 <= begin <= end <= len(view):
            raise ValueError(f"{name}: items {begin} to {end} are outside an array of {len(view)}")
        size = view.itemsize
        return np.frombuffer(self.mapped.read(offset + begin * size, offset + end * size), view.dtype)

    def strings(self, name: str, begin: int, end: int) -> list[str]:
        """Return the strings `begin` to `end` of a ragged array; raise ValueError if they are invalid."""
        offsets = self.read(f"{name}_offsets", begin, end + 1)
        first, last = int(offsets[0]), int(offsets[-1])
        if not 0 <= first <= last <= self.num_items(name):
            raise ValueError("string offsets out of bounds")
        data = self.read(name, first, last)
        return [decode_string(data, offsets - first, k) for k in range(end - begin)]
