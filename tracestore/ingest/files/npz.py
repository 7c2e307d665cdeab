"""Arrays of .npy files and .npz archives: byte ranges of the mapped file, or streams that are inflated."""

import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, cast

import numpy as np

from tracestore._core.mapping import MappedFile
from tracestore._core.pickle import BufferReader, ByteReader
from tracestore.errors import InvalidInputError
from tracestore.ingest.files.byte_source import MappedStream, value_reader
from tracestore.ingest.files.limits import APPENDED, max_inflated
from tracestore.ingest.files.npy import NPY_HEAD_BYTES, NPY_MAGIC, ZIP_ENTRY, check_array, read_npy_header
from tracestore.store.format import schema
from tracestore.store.io.scratch import Scratch

_CHUNK_BYTES = 2 << 20
_MAX_MEMBERS = 1_000_000
DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, RuntimeError)


@dataclass
class StoredArray:
    """An array whose bytes are in a file or an archive.

    Attributes
    ----------
    name : str
        Name of the array in messages.
    shape : tuple of int
        Extents of its axes.
    is_fortran : bool
        Whether the first axis varies fastest.
    dtype : numpy.dtype
        Type of the values; object for an array whose bytes are a pickle.
    num_bytes : int
        Bytes of the values.
    data : memoryview or None
        The bytes in the mapped file; None if they are compressed.
    open_values : callable or None
        Return a stream of the inflated bytes.
    compressed_bytes : int
        Bytes of the compressed array.
    """

    name: str
    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype
    num_bytes: int
    data: memoryview | None = None
    open_values: Callable[[], IO[bytes]] | None = None
    compressed_bytes: int = 0

    def __post_init__(self) -> None:
        if self.dtype.kind != "O":
            self.dtype = check_array(self.name, self.shape, self.dtype, self.num_bytes)

    def view(self) -> np.ndarray:
        """Return the values of an array that is not compressed as a view of the mapped file."""
        assert self.data is not None
        array = np.frombuffer(self.data, "u1").view(self.dtype) if len(self.data) else np.empty(0, self.dtype)
        return array.reshape(self.shape[::-1]).T if self.is_fortran else array.reshape(self.shape)

    def stream(self) -> IO[bytes]:
        """Return a stream of the values of an array that is compressed."""
        assert self.open_values is not None
        return self.open_values()

    def pickle(self, scratch: Scratch) -> ByteReader:
        """Return the pickle of an array of objects."""
        if self.data is not None:
            return BufferReader(self.data)
        stream = self.stream()
        return value_reader(lambda: stream.read(_CHUNK_BYTES), self.compressed_bytes, scratch)


def stored_npy(mapped: MappedFile, begin: int, end: int, name: str) -> StoredArray:
    """Return the array of a .npy file that is a range of a mapped file."""
    shape, is_fortran, dtype, size = read_npy_header(mapped.read(begin, min(end, begin + NPY_HEAD_BYTES)), name)
    begin += size
    return StoredArray(name, shape, is_fortran, dtype, end - begin, memoryview(mapped)[begin:end])


def array_in_bytes(value: Any) -> np.ndarray | None:
    """Return the array of numbers in the content of a .npy file, a view of its bytes; None for every other value."""
    if not isinstance(value, bytes | bytearray | memoryview) or bytes(value[: len(NPY_MAGIC)]) != NPY_MAGIC:
        return None
    view = memoryview(value).cast("B")
    try:
        shape, is_fortran, dtype, size = read_npy_header(bytes(view[:NPY_HEAD_BYTES]), "array")
        data = view[size:]
        array = StoredArray("array", shape, is_fortran, dtype, len(data), data).view()
    except InvalidInputError:
        return None
    return array if dtype.kind in "biuf" or dtype in (schema.BFLOAT16, np.dtype("V2")) else None


def stored_arrays(mapped: MappedFile, file_bytes: int) -> dict[str, StoredArray]:
    """Return the arrays of an archive by name; the archive may be an inflated file of `file_bytes`.

    Raises
    ------
    InvalidInputError
        If the archive is damaged, or inflates to too many bytes.
    """
    try:
        archive = zipfile.ZipFile(cast(IO[bytes], MappedStream(mapped)))
        infos = archive.infolist()
        if len(infos) > _MAX_MEMBERS:
            raise InvalidInputError(f"found {len(infos):,} arrays, expected at most {_MAX_MEMBERS:,}")
        names = [info.filename.removesuffix(".npy") for info in infos]
        if min((info.header_offset for info in infos), default=0) > 0:
            raise InvalidInputError(APPENDED)
        if len(set(names)) != len(names):
            raise InvalidInputError("found two arrays of one name")
        inflated = sum(info.file_size for info in infos)
        if inflated > max_inflated(file_bytes):
            raise InvalidInputError(f"inflates to {inflated:,} bytes, too many for a file of {file_bytes:,}")
        return {name: _member(mapped, archive, info, name) for name, info in zip(names, infos, strict=True)}
    except DAMAGE as error:
        raise damaged(error) from None


def damaged(error: Exception) -> InvalidInputError:
    """Return the refusal of an archive that raised one of DAMAGE."""
    return InvalidInputError(f"truncated or damaged .npz archive: {' '.join(str(error).split())[:120]}")


def _member(mapped: MappedFile, archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> StoredArray:
    name = name[:60]
    if not info.filename.endswith(".npy"):
        raise InvalidInputError(f"entry {info.filename[:60]!r} is not an array of NumPy: unpack the archive")
    with archive.open(info) as head:  # compares the two headers
        shape, is_fortran, dtype, header_bytes = read_npy_header(head.read(NPY_HEAD_BYTES), name)
    if info.compress_type == zipfile.ZIP_STORED:
        begin = info.header_offset + ZIP_ENTRY.size
        begin += sum(ZIP_ENTRY.unpack(mapped.read(info.header_offset, begin))[-2:])
        if begin + info.file_size > len(mapped) or info.compress_size != info.file_size:
            raise InvalidInputError("truncated or damaged .npz archive: an entry ends beyond the file")
        return stored_npy(mapped, begin, begin + info.file_size, name)
    if info.compress_type != zipfile.ZIP_DEFLATED:
        raise InvalidInputError("compressed by another method than NumPy's", field=name)
    open_values = partial(_open_values, archive, info, header_bytes)
    num_bytes = info.file_size - header_bytes
    return StoredArray(name, shape, is_fortran, dtype, num_bytes, None, open_values, info.compress_size)


def _open_values(archive: zipfile.ZipFile, info: zipfile.ZipInfo, header_bytes: int) -> IO[bytes]:
    stream = archive.open(info)
    stream.read(header_bytes)
    return stream
