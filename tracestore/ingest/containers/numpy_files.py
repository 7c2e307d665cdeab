"""Read .npy and .npz files: arrays that are mapped or inflated piece by piece, and pickled ones."""

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from tracestore._core.mapping import MappedFile
from tracestore._core.pickle import BufferReader, ByteReader
from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.columns import (
    MAX_NPY_HEADER_BYTES,
    Column,
    Input,
    ObjectColumn,
    StreamColumn,
    Unit,
    check_array,
    read_npy_header,
)
from tracestore.ingest.containers.grouping import units_of
from tracestore.ingest.containers.keys import column_name, parse_key
from tracestore.ingest.files.byte_source import (
    INFLATE_ALLOWANCE_BYTES,
    MAX_INFLATE_RATIO,
    check_regular,
    map_file,
    value_reader,
)
from tracestore.ingest.layouts.object_arrays import read_objects, units_of_objects
from tracestore.ingest.torch_file import MappedStream
from tracestore.store.format import schema
from tracestore.store.io.scratch import Scratch

_CHUNK_BYTES = 2 << 20
_MAX_MEMBERS = 1_000_000
_LOCAL = struct.Struct("<4s5H3I2H")
_ERRORS = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, RuntimeError)


def read_npy(source: Input) -> Iterator[Unit]:
    """Yield the only array of a file as hidden states."""
    column = npy_column(source.path)
    if (units := units_of_objects({"": column})) is not None:
        yield from units
        return
    key = parse_key(source.path.stem)
    is_layer = key is not None and (key.number is None or column.ndim < 3)
    is_named = key is not None and key.field != "tokens" and not key.trace and is_layer
    yield from units_of(_by_name({source.path.stem if is_named else "hidden_states": column}))


def read_npy_folder(source: Input) -> Iterator[Unit]:
    """Yield the arrays of several files, each named like its field; those of other folders are values per trace."""
    names = [part.stem if part.parent == source.parts[0].parent else column_name(part.stem) for part in source.parts]
    keys = [parse_key(str(name)) for name in names]
    if not any(key and key.field != "tokens" for key in keys):
        others = [k for k, name in enumerate(names) if keys[k] is None and column_name(str(name)) is None]
        names = ["hidden_states" if others == [k] else name for k, name in enumerate(names)]
    yield from units_of(_by_name({str(n): npy_column(part) for n, part in zip(names, source.parts, strict=True)}))


def npy_column(path: Path) -> Column:
    """Return the array of a .npy file as a view of the mapped file."""
    check_regular(path)
    mapped = map_file(path)
    return _mapped_column(mapped, 0, len(mapped), path.name)


def _mapped_column(mapped: MappedFile, begin: int, end: int, name: str) -> Column:
    head = io.BytesIO(mapped.read(begin, min(end, begin + MAX_NPY_HEADER_BYTES + 16)))
    shape, is_fortran, dtype = read_npy_header(head, name)
    begin += head.tell()
    if dtype.kind == "O":
        return _object_column(BufferReader(mapped, begin, end), lambda: end - begin, shape, name)
    dtype = check_array(name, shape, dtype, end - begin)
    array = np.frombuffer(memoryview(mapped)[begin:end], "u1").view(dtype) if end > begin else np.empty(0, dtype)
    return Column(array.reshape(shape[::-1]).T if is_fortran else array.reshape(shape))


def _object_column(source: ByteReader, read_bytes: Callable[[], int], shape: tuple[int, ...], name: str) -> Column:
    """Return an array of Python objects, which a pickle holds."""
    values = read_objects(source, read_bytes, name)
    if len(values) != math.prod(shape):
        raise InvalidInputError(f"found {len(values)} objects, expected those of shape {shape}", field=name)
    return ObjectColumn(values, shape)


def _by_name(columns: dict[str, Column]) -> dict[str, Column]:
    """Return columns in which the fields of records are columns of their own."""
    fields: dict[str, Column] = {}
    for name, column in columns.items():
        if column.dtype.names and column.dtype != schema.BFLOAT16:
            records = column.whole()
            fields |= {key: Column(records[key]) for key in column.dtype.names}
        else:
            fields[name] = column
    return fields


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
    columns = _by_name(npz_columns(mapped, source.scratch))
    units = units_of_objects(columns)
    yield from units_of(columns) if units is None else units


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
    except InvalidInputError:
        raise
    except _ERRORS as error:
        raise InvalidInputError(f"truncated or damaged .npz archive: {str(error)[:120]}") from None


def _member(mapped: MappedFile, archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str, scratch: Scratch) -> Column:
    name = name[:60]
    if not info.filename.endswith(".npy"):
        raise InvalidInputError(f"entry {info.filename[:60]!r} is not an array of NumPy")
    with archive.open(info) as head:  # compares the two headers
        shape, is_fortran, dtype = read_npy_header(head, name)
        header_bytes = head.tell()
    if info.compress_type == zipfile.ZIP_STORED:
        begin = info.header_offset + _LOCAL.size
        begin += sum(_LOCAL.unpack(mapped.read(info.header_offset, begin))[-2:])
        if begin + info.file_size > len(mapped) or info.compress_size != info.file_size:
            raise InvalidInputError("truncated or damaged .npz archive: an entry ends beyond the file")
        return _mapped_column(mapped, begin, begin + info.file_size, name)
    if info.compress_type != zipfile.ZIP_DEFLATED:
        raise InvalidInputError("compressed by another method than NumPy's", field=name)
    if dtype.kind == "O":
        with _open_values(archive, info, header_bytes) as stream:
            chunks = value_reader(lambda: stream.read(_CHUNK_BYTES), info.compress_size, scratch)
            return _object_column(chunks, lambda: info.file_size, shape, name)
    dtype = check_array(name, shape, dtype, info.file_size - header_bytes)
    column = StreamColumn(
        partial(_open_values, archive, info, header_bytes), shape[::-1] if is_fortran else shape, dtype, scratch
    )
    return Column(column.whole().T) if is_fortran else column


def _open_values(archive: zipfile.ZipFile, info: zipfile.ZipInfo, header_bytes: int) -> IO[bytes]:
    stream = archive.open(info)
    stream.read(header_bytes)
    return stream
