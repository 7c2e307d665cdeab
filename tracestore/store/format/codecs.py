"""Compress and decompress inner chunks.

The header of a chunk is validated against the array's metadata before a codec library sees the
bytes, and the output buffer has exactly the expected size. Decoding untrusted bytes therefore
never takes more memory than one chunk.
"""

import struct
from typing import Any

import numpy as np

ZSTD_LEVEL, BLOSC_LEVEL = 3, 5
# Blosc 1, README_CHUNK_FORMAT.rst: version, version of the codec, flags, item size, decoded size, block size,
# encoded size.
_BLOSC_HEADER = struct.Struct("<BBBBIII")
_BLOSC_SHUFFLED, _BLOSC_COPIED, _BLOSC_UNSPLIT = 1, 2, 16
_BLOSC_FORMATS = {"blosc-lz4": 1, "blosc-zstd": 4}
# RFC 8878, 3.1.1: the magic number, then the frame header.
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def _codec(name: str, itemsize: int) -> Any:
    from numcodecs import Blosc, Zstd, blosc

    blosc.use_threads = False  # Blosc's threads would make the compressed bytes depend on the machine.
    if name == "zstd":
        return Zstd(level=ZSTD_LEVEL)
    cname = name.removeprefix("blosc-")
    return Blosc(cname=cname, clevel=BLOSC_LEVEL, shuffle=Blosc.SHUFFLE, blocksize=0, typesize=itemsize)


class ChunkCodec:
    """Encoder and decoder of the codec `name` (a value of --codec) for items of `itemsize` bytes."""

    def __init__(self, name: str, itemsize: int) -> None:
        self.name, self.itemsize = name, itemsize
        self._codec = _codec(name, itemsize)

    def encode(self, data: Any) -> memoryview:
        """Return the compressed bytes of a buffer of whole items."""
        return memoryview(self._codec.encode(np.frombuffer(data, f"u{self.itemsize}"))).cast("B")

    def decode(self, data: bytes, num_bytes: int) -> np.ndarray:
        """Decompress a chunk.

        Parameters
        ----------
        data : bytes
            The stored bytes.
        num_bytes : int
            Expected size of the decompressed chunk in bytes.

        Returns
        -------
        np.ndarray
            Decompressed bytes: read-only uint8 array of shape ``(num_bytes,)``.

        Raises
        ------
        ValueError
            If the bytes are not a valid chunk of that size.
        """
        if self.name == "zstd":
            _check_zstd(data, num_bytes)
        else:
            _check_blosc(data, num_bytes, self.itemsize, _BLOSC_FORMATS[self.name])
        # Zero-filled, so that a damaged chunk that decodes to fewer bytes exposes no old memory.
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
        raise ValueError("blosc: the compressor or filter differs from the array's metadata")
    if size != num_bytes or encoded_size != len(data) or found_itemsize != itemsize:
        raise ValueError(
            f"blosc: found {size} bytes in items of {found_itemsize} bytes, expected {num_bytes} in items of {itemsize}"
        )
    if not 0 < block_size <= max(size, 1):
        raise ValueError(f"blosc: invalid block size {block_size}")
    if flags & _BLOSC_COPIED:
        if encoded_size != size + _BLOSC_HEADER.size:
            raise ValueError("blosc: the size differs from the header")
        return
    num_blocks = -(-size // block_size)
    first = _BLOSC_HEADER.size + 4 * num_blocks
    if first > len(data):
        raise ValueError("blosc: shorter than its block table")
    starts = np.frombuffer(data, "<u4", num_blocks, _BLOSC_HEADER.size)
    if num_blocks and (starts.min() < first or starts.max() > len(data) - 4):
        raise ValueError("blosc: a block lies outside the chunk")


def _check_zstd(data: bytes, num_bytes: int) -> None:
    if len(data) < 5 or data[:4] != _ZSTD_MAGIC:
        raise ValueError("zstd: not a frame")
    descriptor = data[4]
    is_single = bool(descriptor & 0x20)
    size_bytes = (1 if is_single else 0, 2, 4, 8)[descriptor >> 6]
    position = 5 + (not is_single) + (0, 1, 2, 4)[descriptor & 3]
    if descriptor & 0x08 or not size_bytes or len(data) < position + size_bytes:
        raise ValueError("zstd: the frame does not state its size")
    size = int.from_bytes(data[position : position + size_bytes], "little") + (256 if size_bytes == 2 else 0)
    if size != num_bytes:
        raise ValueError(f"zstd: found {size} bytes, expected {num_bytes}")
