"""Headers of arrays in the format .npy, and arrays in bytes that hold such a file."""

import io
import math
import struct
import threading

import numpy as np

from tracestore._core.mapping import MappedFile
from tracestore.errors import InvalidInputError

# Kinds of dtypes that an array may have: bool, integers, floats, complex numbers, texts.
DTYPE_KINDS = "biufcSU"
NPY_MAGIC = b"\x93NUMPY"
_MAX_HEADER_BYTES = 10_000
NPY_HEAD_BYTES = _MAX_HEADER_BYTES + 16  # with what is before the header
_READ_HEADER = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,
}
ZIP_ENTRY = struct.Struct("<4s5H3I2H")  # what is before the name of an entry of an archive
_TWO_BYTES = np.dtype("V2")
# CPython 3.11 counts the depth of all expressions that threads parse together, and raises SystemError.
_PARSING = threading.RLock()


def is_npz(mapped: MappedFile) -> bool:
    """Return whether the first entry of a zip archive is an array of NumPy."""
    head = mapped.read(0, min(len(mapped), ZIP_ENTRY.size + 1024))
    if len(head) < ZIP_ENTRY.size:
        return False
    length = ZIP_ENTRY.unpack_from(head)[-2]
    return head[ZIP_ENTRY.size : ZIP_ENTRY.size + length].endswith(b".npy")


def check_dtype(name: str, dtype: np.dtype) -> None:
    """Raise InvalidInputError unless a dtype is that of numbers or texts, or of records of them."""
    is_record = dtype.names and all(dtype[n].base.kind in DTYPE_KINDS for n in dtype.names)
    if not is_record and (dtype.kind not in DTYPE_KINDS or dtype.subdtype is not None):
        raise InvalidInputError(f"found dtype {str(dtype)[:60]}, expected numbers or texts", field=name)


def check_array(name: str, shape: tuple[int, ...], dtype: np.dtype, num_bytes: int) -> np.dtype:
    """Return the dtype of an array with these bytes; raise InvalidInputError if they do not fit together.

    Two bytes without a type (`V2`), which NumPy writes for bfloat16 and for every other type of that size that it
    does not know, stay unchanged.
    """
    if dtype.hasobject:
        raise InvalidInputError("found Python objects in records; save numbers or texts", field=name)
    if dtype != _TWO_BYTES:
        check_dtype(name, dtype)
    if any(not 0 <= n < 1 << 48 for n in shape) or len(shape) > 8:
        raise InvalidInputError(f"found shape {str(shape)[:60]}", field=name)
    expected = math.prod(shape) * dtype.itemsize
    if expected != num_bytes:
        raise InvalidInputError(f"found {num_bytes:,} bytes, expected {expected:,} for shape {shape}", field=name)
    return dtype


def read_npy_header(data: bytes, name: str) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Return shape, whether the order is that of Fortran, dtype and where the values begin of an array in `.npy` bytes.

    `data` are its first NPY_HEAD_BYTES. Fields of records that hold records are refused by `check_array`.
    """
    head = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(head)
        if (read := _READ_HEADER.get(version)) is None:
            raise ValueError(f"version {version}")
        with _PARSING:
            shape, is_fortran, dtype = read(head, max_header_size=_MAX_HEADER_BYTES)
        return shape, is_fortran, dtype, head.tell()
    except Exception as error:  # also those of tokenize
        raise InvalidInputError(f"not an array of NumPy: {' '.join(str(error).split())[:120]}", field=name) from None
