"""The open file that a reader gets, and values that several containers write alike."""

import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracestore._core.mapping import MappedFile
from tracestore.errors import InvalidInputError, TruncatedFileError
from tracestore.ingest.files.byte_source import TRUNCATED_WHILE_READING
from tracestore.ingest.files.limits import Limits
from tracestore.ingest.files.npz import array_in_bytes
from tracestore.ingest.readers.tree import Charge, NumpyArray, Value, array_value
from tracestore.store.io.scratch import Scratch

ARROW_MAGIC = b"ARROW1\0\0"  # of a file of Arrow, before its stream
# What damaged bytes raise where the checks of a reader missed them: a refusal too, never a traceback.
FAULTS: tuple[type[Exception], ...] = (ValueError, TypeError, OverflowError, IndexError, KeyError, AttributeError)
FAULTS += (MemoryError, EOFError, NotImplementedError, struct.error, zipfile.BadZipFile, zlib.error)
# What a user of a tree may meet in it: a file that shrinks, and endless nesting.
READING: tuple[type[Exception], ...] = (TruncatedFileError, RecursionError)


@dataclass
class Content:
    """The bytes of an open file.

    Attributes
    ----------
    path : Path
        The file.
    name : str
        Name of the file without the suffix of its compression.
    mapped : MappedFile
        The bytes; those of a compressed file are inflated to an unnamed file.
    scratch : Scratch
        Memory for large arrays.
    limits : Limits
        What the values of the file may decode to.
    resources : ExitStack
        What is closed with the tree.
    is_inflated : bool
        Whether `mapped` is an inflated copy.
    """

    path: Path
    name: str
    mapped: MappedFile
    scratch: Scratch
    limits: Limits
    resources: ExitStack
    is_inflated: bool = False


@contextmanager
def refusals(faults: tuple[type[Exception], ...] = (*FAULTS, *READING)) -> Iterator[None]:
    """Turn whatever damaged or malicious bytes raise in a reader, or READING alone, into InvalidInputError."""
    try:
        yield
    except faults as error:
        raise refusal(error) from None


def refusal(error: Exception) -> InvalidInputError:
    """Return the refusal of a file that raised one of FAULTS or of READING."""
    if isinstance(error, TruncatedFileError):
        return InvalidInputError(TRUNCATED_WHILE_READING, is_whole_source=True)
    if isinstance(error, RecursionError):
        return InvalidInputError("nested deeper than a trace file")
    reason = " ".join(str(error).split())[:200]
    return InvalidInputError(f"not a trace file: {type(error).__name__}: {reason}")


def bytes_value(data: Any, charge: Charge) -> Value:
    """Return bytes as the array of a .npy file that they hold, else as an array of uint8."""
    array = array_in_bytes(data)
    if array is None:
        return NumpyArray(np.frombuffer(data, "u1") if len(data) else np.empty(0, "u1"), charge)
    return array_value(array, charge)
