"""Arrays of .npy files and .npz archives: byte ranges of the mapped file, or streams that are inflated."""

import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import IO, cast

import numpy as np

from tracestore._core.mapping import MappedFile
from tracestore._core.pickle import BufferReader, ByteReader
from tracestore.errors import InvalidInputError
from tracestore.ingest.files.byte_source import MappedStream, value_reader
from tracestore.ingest.files.limits import max_inflated
from tracestore.ingest.files.npy import MAX_NPY_HEADER_BYTES, ZIP_ENTRY, check_array, read_npy_header
from tracestore.store.io.scratch import Scratch

_CHUNK_BYTES = 2 << 20
_ROW_CHUNK_BYTES = 4 << 20
_MAX_MEMBERS = 1_000_000
_ERRORS = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, RuntimeError)


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

    def rows(self, scratch: Scratch) -> "RowStream":
        """Return a compressed array as rows; of one in Fortran order the transposed array."""
        assert self.open_values is not None
        return RowStream(self.open_values, self.shape[::-1] if self.is_fortran else self.shape, self.dtype, scratch)

    def pickle(self, scratch: Scratch) -> ByteReader:
        """Return the pickle of an array of objects."""
        if self.data is not None:
            return BufferReader(self.data)
        assert self.open_values is not None
        stream = self.open_values()
        return value_reader(lambda: stream.read(_CHUNK_BYTES), self.compressed_bytes, scratch)


class RowStream:
    """A C-contiguous array that is inflated from front to back.

    Parameters
    ----------
    open_values : callable
        Return a stream at the first value.
    shape : tuple of int
        Extents of the axes.
    dtype : numpy.dtype
        Type of the values.
    scratch : Scratch
        Memory for the rows.
    """

    def __init__(
        self, open_values: Callable[[], IO[bytes]], shape: tuple[int, ...], dtype: np.dtype, scratch: Scratch
    ) -> None:
        self._open, self._scratch = open_values, scratch
        self.shape, self.dtype = shape, dtype
        self._stream: IO[bytes] | None = None
        self._next = 0
        self._whole: np.ndarray | None = None

    def _read(self, stream: IO[bytes], shape: tuple[int, ...]) -> np.ndarray:
        out = self._scratch.empty(shape, self.dtype)
        view, begin = memoryview(out.reshape(-1).view("u1").data), 0
        try:
            while begin < len(view):
                chunk = stream.read(min(_ROW_CHUNK_BYTES, len(view) - begin))
                if not chunk:
                    raise InvalidInputError("truncated: an array ends early")
                view[begin : begin + len(chunk)] = chunk
                begin += len(chunk)
        except _ERRORS as error:
            raise _damaged(error) from None
        return out

    def whole(self) -> np.ndarray:
        """Inflate the array."""
        with self._open() as stream:
            array = self._read(stream, self.shape)
            if stream.read(1):
                raise InvalidInputError("trailing bytes after an array")
        return array

    def kept(self) -> np.ndarray:
        """Return the whole array, which is inflated once."""
        self._whole = self.whole() if self._whole is None else self._whole
        return self._whole

    def part(self, begin: int, end: int) -> np.ndarray:
        """Inflate rows, from the beginning if a later one was read before."""
        if self._stream is None or self._next > begin:
            self._stream, self._next = self._open(), 0
        while self._next < begin:
            self._read(self._stream, self.shape[1:])
            self._next += 1
        self._next = end
        return self._read(self._stream, (end - begin, *self.shape[1:]))


def stored_npy(mapped: MappedFile, begin: int, end: int, name: str) -> StoredArray:
    """Return the array of a .npy file that is a range of a mapped file."""
    head = io.BytesIO(mapped.read(begin, min(end, begin + MAX_NPY_HEADER_BYTES + 16)))
    shape, is_fortran, dtype = read_npy_header(head, name)
    begin += head.tell()
    return StoredArray(name, shape, is_fortran, dtype, end - begin, memoryview(mapped)[begin:end])


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
        if len(set(names)) != len(names):
            raise InvalidInputError("found two arrays of one name")
        inflated = sum(info.file_size for info in infos)
        if inflated > max_inflated(file_bytes):
            raise InvalidInputError(f"inflates to {inflated:,} bytes, too many for a file of {file_bytes:,}")
        return {name: _member(mapped, archive, info, name) for name, info in zip(names, infos, strict=True)}
    except InvalidInputError:
        raise
    except _ERRORS as error:
        raise _damaged(error) from None


def _damaged(error: Exception) -> InvalidInputError:
    return InvalidInputError(f"truncated or damaged .npz archive: {' '.join(str(error).split())[:120]}")


def _member(mapped: MappedFile, archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> StoredArray:
    name = name[:60]
    if not info.filename.endswith(".npy"):
        raise InvalidInputError(f"entry {info.filename[:60]!r} is not an array of NumPy")
    with archive.open(info) as head:  # compares the two headers
        shape, is_fortran, dtype = read_npy_header(head, name)
        header_bytes = head.tell()
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
