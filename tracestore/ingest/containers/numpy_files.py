"""Read .npy and .npz files: arrays without Python objects, mapped or inflated piece by piece."""

import ast
import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from tracestore._core.mapping import MappedFile
from tracestore.errors import InvalidInputError
from tracestore.ingest.byte_source import INFLATE_ALLOWANCE_BYTES, MAX_INFLATE_RATIO, check_regular, map_file
from tracestore.ingest.containers.columns import Column, Input, StreamColumn, Unit, check_array
from tracestore.ingest.containers.grouping import units_of
from tracestore.ingest.containers.keys import parse_key
from tracestore.ingest.torch_file import MappedStream
from tracestore.store.io.scratch import Scratch

NPY_MAGIC = b"\x93NUMPY"
_MAX_HEADER_BYTES = 10_000
_MAX_MEMBERS = 1_000_000
_LOCAL = struct.Struct("<4s5H3I2H")
_ERRORS = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, RuntimeError)


def read_npy(source: Input) -> Iterator[Unit]:
    """Yield the only array of a file as hidden states."""
    yield from units_of({_field_of(source.path): npy_column(source.path)})


def read_npy_folder(source: Input) -> Iterator[Unit]:
    """Yield the arrays of several files, each named like its field."""
    yield from units_of({part.stem: npy_column(part) for part in source.parts})


def _field_of(path: Path) -> str:
    """Return the name of the field in a file: that of the file if it says one, else hidden_states."""
    key = parse_key(path.stem)
    return path.stem if key is not None and key.field != "tokens" and not key.trace else "hidden_states"


def npy_column(path: Path) -> Column:
    """Return the array of a .npy file as a view of the mapped file."""
    check_regular(path)
    mapped = map_file(path)
    return Column(_mapped_array(mapped, 0, len(mapped), path.name))


def _mapped_array(mapped: MappedFile, begin: int, end: int, name: str) -> np.ndarray:
    head = io.BytesIO(mapped.read(begin, min(end, begin + _MAX_HEADER_BYTES + 16)))
    shape, is_fortran, dtype = _read_header(head, name)
    begin += head.tell()
    dtype = check_array(name, shape, dtype, end - begin)
    array = np.frombuffer(memoryview(mapped)[begin:end], "u1").view(dtype) if end > begin else np.empty(0, dtype)
    return array.reshape(shape[::-1]).T if is_fortran else array.reshape(shape)


def _read_header(head: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return shape, whether the order is that of Fortran, and dtype of the array that follows in a stream."""
    try:
        version = np.lib.format.read_magic(head)
        length = struct.unpack("<H" if version == (1, 0) else "<I", head.read(2 if version == (1, 0) else 4))[0]
        if version not in ((1, 0), (2, 0), (3, 0)) or length > _MAX_HEADER_BYTES:
            raise ValueError(f"version {version}, header of {length:,} bytes")
        header = ast.literal_eval(head.read(length).decode("latin1").strip())
        shape, order, description = header["shape"], header["fortran_order"], header["descr"]
        if not isinstance(description, str) or type(order) is not bool or not isinstance(shape, tuple):
            raise ValueError("a dtype with fields" if not isinstance(description, str) else "a wrong header")
        if not all(type(n) is int for n in shape):
            raise ValueError("a wrong shape")
        return shape, order, np.dtype(description)
    except (ValueError, TypeError, KeyError, SyntaxError, struct.error, MemoryError, RecursionError) as error:
        raise InvalidInputError(f"not an array of NumPy: {' '.join(str(error).split())[:120]}", field=name) from None


def is_npz(mapped: MappedFile) -> bool:
    """Return whether the first entry of a zip archive is an array of NumPy."""
    head = mapped.read(0, min(len(mapped), _LOCAL.size + 1024))
    if len(head) < _LOCAL.size:
        return False
    length = _LOCAL.unpack_from(head)[-2]
    return head[_LOCAL.size : _LOCAL.size + length].endswith(b".npy")


def read_npz(source: Input) -> Iterator[Unit]:
    """Yield the traces of an archive of arrays."""
    mapped = map_file(source.path)
    yield from units_of(npz_columns(mapped, source.scratch))


def npz_columns(mapped: MappedFile, scratch: Scratch) -> dict[str, Any]:
    """Return the arrays of an archive by name; stored ones are views of the mapped file.

    Raises
    ------
    InvalidInputError
        If the archive is damaged, or an array holds Python objects.
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
        if inflated > len(mapped) * MAX_INFLATE_RATIO + INFLATE_ALLOWANCE_BYTES:
            raise InvalidInputError(f"inflates to {inflated:,} bytes, too many for a file of {len(mapped):,}")
        return {name: _member(mapped, archive, info, name, scratch) for name, info in zip(names, infos, strict=True)}
    except _ERRORS as error:
        raise InvalidInputError(f"truncated or damaged .npz archive: {str(error)[:120]}") from None


def _member(mapped: MappedFile, archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str, scratch: Scratch) -> Column:
    name = name[:60]
    if not info.filename.endswith(".npy"):
        raise InvalidInputError(f"entry {info.filename[:60]!r} is not an array of NumPy")
    with archive.open(info) as head:  # compares the two headers
        shape, is_fortran, dtype = _read_header(head, name)
        header_bytes = head.tell()
    if info.compress_type == zipfile.ZIP_STORED:
        begin = info.header_offset + _LOCAL.size
        begin += sum(_LOCAL.unpack(mapped.read(info.header_offset, begin))[-2:])
        if begin + info.file_size > len(mapped) or info.compress_size != info.file_size:
            raise InvalidInputError("truncated or damaged .npz archive: an entry ends beyond the file")
        return Column(_mapped_array(mapped, begin, begin + info.file_size, name))
    if info.compress_type != zipfile.ZIP_DEFLATED:
        raise InvalidInputError("compressed by another method than NumPy's", field=name)
    dtype = check_array(name, shape, dtype, info.file_size - header_bytes)
    column = StreamColumn(
        partial(_open_values, archive, info, header_bytes), shape[::-1] if is_fortran else shape, dtype, scratch
    )
    return Column(column.whole().T) if is_fortran else column


def _open_values(archive: zipfile.ZipFile, info: zipfile.ZipInfo, header_bytes: int) -> IO[bytes]:
    stream = archive.open(info)
    stream.read(header_bytes)
    return stream
