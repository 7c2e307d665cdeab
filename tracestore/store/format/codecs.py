"""Compressing and decompressing inner chunks.

The headers of a chunk are compared with what the array's metadata says before a library sees
the bytes, and what comes out is written to a buffer of exactly that size: whatever the bytes say,
decoding takes the memory of one chunk.
"""

import struct
from typing import Any

import numpy as np

_ZSTD_LEVEL, _BLOSC_LEVEL = 3, 5
# Blosc 1, README_CHUNK_FORMAT.rst: versions, flags, item size, bytes, bytes of a block, bytes encoded.
_BLOSC_HEADER = struct.Struct("<BBBBIII")
_BLOSC_SHUFFLED, _BLOSC_COPIED, _BLOSC_UNSPLIT = 1, 2, 16
_BLOSC_FORMATS = {"blosc-lz4": 1, "blosc-zstd": 4}
# RFC 8878, 3.1.1: the magic number, then the frame header.
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def _codec(name: str, itemsize: int) -> Any:
    from numcodecs import Blosc, Zstd, blosc

    blosc.use_threads = False  # also makes the compressed bytes independent of the machine
    if name == "zstd":
        return Zstd(level=_ZSTD_LEVEL)
    cname = name.removeprefix("blosc-")
    return Blosc(cname=cname, clevel=_BLOSC_LEVEL, shuffle=Blosc.SHUFFLE, blocksize=0, typesize=itemsize)


class ChunkCodec:
    """The codec behind --codec `name`, for items of itemsize bytes."""

    def __init__(self, name: str, itemsize: int) -> None:
        self.name, self.itemsize = name, itemsize
        self._codec = _codec(name, itemsize)

    def encode(self, data: Any) -> memoryview:
        """Compress a buffer of whole items."""
        return memoryview(self._codec.encode(np.frombuffer(data, f"u{self.itemsize}"))).cast("B")

    def decode(self, data: bytes, num_bytes: int) -> np.ndarray:
        """Decompress a chunk.

        Parameters
        ----------
        data
            The bytes as stored.
        num_bytes
            Of the chunk when it is decompressed.

        Returns
        -------
        np.ndarray
            (num_bytes,) uint8, read-only.

        Raises
        ------
        ValueError
            Where the bytes are not a chunk of that size.
        """
        if self.name == "zstd":
            _check_zstd(data, num_bytes)
        else:
            _check_blosc(data, num_bytes, self.itemsize, _BLOSC_FORMATS[self.name])
        # Zeros: what a damaged chunk does not write is not what lay there before.
        out = np.zeros(num_bytes, "u1")
        try:
            self._codec.decode(data, out=out)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{self.name}: {error}") from None
        out.flags.writeable = False
        return out


def _check_blosc(data: bytes, num_bytes: int, itemsize: int, format_number: int) -> None:
    if len(data) < _BLOSC_HEADER.size:
        raise ValueError("blosc: shorter than its header")
    version, _, flags, found_itemsize, size, block_size, encoded_size = _BLOSC_HEADER.unpack_from(data)
    if version != 2 or flags & ~(_BLOSC_COPIED | _BLOSC_UNSPLIT) != format_number << 5 | _BLOSC_SHUFFLED:
        raise ValueError("blosc: another compressor or filter than the metadata says")
    if size != num_bytes or encoded_size != len(data) or found_itemsize != itemsize:
        raise ValueError(f"blosc: {size} bytes of items of {found_itemsize}, expected {num_bytes} of {itemsize}")
    if not 0 < block_size <= max(size, 1):
        raise ValueError(f"blosc: blocks of {block_size} bytes")
    if flags & _BLOSC_COPIED:
        if encoded_size != size + _BLOSC_HEADER.size:
            raise ValueError("blosc: another size than the header says")
        return
    num_blocks = -(-size // block_size)
    first = _BLOSC_HEADER.size + 4 * num_blocks
    if first > len(data):
        raise ValueError("blosc: shorter than its list of blocks")
    starts = np.frombuffer(data, "<u4", num_blocks, _BLOSC_HEADER.size)
    if num_blocks and (starts.min() < first or starts.max() > len(data) - 4):
        raise ValueError("blosc: a block lies outside of the chunk")


def _check_zstd(data: bytes, num_bytes: int) -> None:
    if len(data) < 5 or data[:4] != _ZSTD_MAGIC:
        raise ValueError("zstd: not a frame")
    descriptor = data[4]
    is_single = bool(descriptor & 0x20)
    size_bytes = (1 if is_single else 0, 2, 4, 8)[descriptor >> 6]
    at = 5 + (not is_single) + (0, 1, 2, 4)[descriptor & 3]
    if descriptor & 0x08 or not size_bytes or len(data) < at + size_bytes:
        raise ValueError("zstd: a frame that does not give its size")
    size = int.from_bytes(data[at : at + size_bytes], "little") + (256 if size_bytes == 2 else 0)
    if size != num_bytes:
        raise ValueError(f"zstd: {size} bytes, expected {num_bytes}")
