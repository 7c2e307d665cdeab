"""The containers: how each is recognized, and which module reads it."""

import errno
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tracestore._core.mapping import MappedFile
from tracestore.errors import InvalidInputError
from tracestore.ingest.containers import arrow_files, hdf5_process, numpy_files, safetensors_file
from tracestore.ingest.containers.assemble import traces_of
from tracestore.ingest.containers.columns import NPY_MAGIC, Input, Unit
from tracestore.ingest.containers.tables import TableReference
from tracestore.ingest.layouts import text_rows
from tracestore.store.io.scratch import Scratch

Reader = Callable[[Input], Iterator[Unit]]

SUFFIXES = (
    ".safetensors",
    *safetensors_file.COMPRESSED_SUFFIXES,
    ".npz",
    ".npy",
    ".h5",
    ".hdf5",
    ".nc",
    ".arrow",
    ".feather",
    ".parquet",
)
_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)


def reader_of(mapped: MappedFile, path: Path) -> Reader | None:
    """Return the reader of a file by its first bytes, and of text and compressed files by its name; None for others."""
    if path.name.endswith(text_rows.SUFFIXES):
        return text_rows.read_text_rows
    if path.name.endswith(safetensors_file.COMPRESSED_SUFFIXES):
        return safetensors_file.read_safetensors
    head = mapped.read(0, min(len(mapped), 16))
    if head.startswith(NPY_MAGIC):
        return numpy_files.read_npy
    if head.startswith(b"PK\x03\x04") and numpy_files.is_npz(mapped):
        return numpy_files.read_npz
    if head.startswith(hdf5_process.HDF5_MAGIC):
        return hdf5_process.read_hdf5
    if head.startswith(arrow_files.PARQUET_MAGIC):
        return arrow_files.read_parquet
    if head.startswith((arrow_files.FILE_MAGIC, arrow_files.STREAM_MAGIC)):
        return arrow_files.read_arrow
    if safetensors_file.is_safetensors(head, len(mapped)):
        return safetensors_file.read_safetensors
    return None


def folder_reader(parts: tuple[Path, ...]) -> Reader:
    """Return the reader of the files of a data set of Arrow, or of arrays of NumPy in one folder."""
    return arrow_files.read_arrow if parts[0].suffix == ".arrow" else numpy_files.read_npy_folder


def is_being_written(path: Path) -> bool:
    """Return whether a file is shorter than it states, or a program that writes it holds its lock."""
    return path.suffix == ".safetensors" and safetensors_file.is_unfinished(path)


def read_container(
    reader: Reader,
    path: Path,
    name: str,
    *,
    scratch: Scratch,
    renamed: tuple[tuple[str, str], ...] = (),
    axes: str | None = None,
    parts: tuple[Path, ...] = (),
    table: TableReference | None = None,
) -> Iterator[tuple[dict[str, Any] | InvalidInputError, bool]]:
    """Yield the traces of a source; see `traces_of`.

    Parameters
    ----------
    reader : Reader
        Reader of the container.
    path : Path
        The file, or the folder of `parts`.
    name : str
        Name of the source.
    scratch : Scratch
        Memory for large arrays.
    renamed : tuple of (str, str)
        Pairs of a field and its name in the container; see `KeyOptions`.
    axes : str, optional
        Axes of the hidden states; see `KeyOptions`.
    parts : tuple of Path
        Files of a source that consists of several.
    table : TableReference, optional
        Rows of a table next to the source, one per trace.

    Raises
    ------
    InvalidInputError
        If the container is refused.
    """
    rows = None if table is None else table.load()
    source = Input(path, name, parts, scratch)
    try:
        # The name of a folder with the arrays of one trace has a number.
        is_alone = (
            re.search(r"\d", path.name) is None
            if parts
            else not any(p.suffix == path.suffix and p != path for p in path.parent.iterdir())
        )
        yield from traces_of(reader(source), name, rows, renamed, scratch, is_alone=is_alone, axes=axes)
    except _ERRORS as error:
        raise InvalidInputError(_reason(error)) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or not hasattr(error, "errno"):
            raise
        raise InvalidInputError(_reason(error)) from None


def _reason(error: Exception) -> str:
    return f"truncated or damaged: {' '.join(str(error).split())[:200] or type(error).__name__}"
