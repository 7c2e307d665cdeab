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
from tracestore.ingest.containers.columns import Input, Unit
from tracestore.ingest.containers.tables import TableReference
from tracestore.ingest.files.npy import NPY_MAGIC
from tracestore.ingest.files.npz import is_npz
from tracestore.ingest.files.safetensors import is_safetensors
from tracestore.ingest.layouts import text_rows
from tracestore.ingest.readers import arrow
from tracestore.ingest.readers.hdf5_process import HDF5_MAGIC
from tracestore.ingest.roles.keys import KeyOptions

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
_READERS: dict[bytes, Reader] = {
    NPY_MAGIC: numpy_files.read_npy,
    HDF5_MAGIC: hdf5_process.read_hdf5,
    arrow.PARQUET_MAGIC: arrow_files.read_parquet,
    arrow.FILE_MAGIC: arrow_files.read_arrow,
    arrow.STREAM_MAGIC: arrow_files.read_arrow,
}
_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)


def reader_of(mapped: MappedFile, path: Path) -> Reader | None:
    """Return the reader of a file by its first bytes, and of text and compressed files by its name; None for others."""
    if path.name.endswith(text_rows.SUFFIXES):
        return text_rows.read_text_rows
    if path.name.endswith(safetensors_file.COMPRESSED_SUFFIXES):
        return safetensors_file.read_safetensors
    head = mapped.read(0, min(len(mapped), 16))
    if head.startswith(b"PK\x03\x04"):
        return numpy_files.read_npz if is_npz(mapped) else None
    found = next((reader for magic, reader in _READERS.items() if head.startswith(magic)), None)
    if found is None and is_safetensors(head, len(mapped)):
        return safetensors_file.read_safetensors
    return found


def folder_reader(parts: tuple[Path, ...]) -> Reader:
    """Return the reader of the files of a data set of Arrow, or of arrays of NumPy in one folder."""
    return arrow_files.read_arrow if parts[0].suffix == ".arrow" else numpy_files.read_npy_folder


def read_container(
    reader: Reader, source: Input, keys: KeyOptions, table: TableReference | None
) -> Iterator[tuple[dict[str, Any] | InvalidInputError, bool]]:
    """Yield the traces of a source; see `traces_of`.

    Parameters
    ----------
    reader : Reader
        Reader of the container.
    source : Input
        The files.
    keys : KeyOptions
        Names of the fields, and axes of the hidden states.
    table : TableReference, optional
        Rows of a table next to the source, one per trace.

    Raises
    ------
    InvalidInputError
        If the container is refused.
    """
    rows, path = None if table is None else table.load(), source.path
    try:
        # The name of a folder with the arrays of one trace has a number.
        is_alone = (
            re.search(r"\d", path.name) is None
            if source.parts
            else not any(p.suffix == path.suffix and p != path for p in path.parent.iterdir())
        )
        yield from traces_of(source, reader(source), rows, keys, is_alone=is_alone)
    except _ERRORS as error:
        raise InvalidInputError(_reason(error)) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or not hasattr(error, "errno"):
            raise
        raise InvalidInputError(_reason(error)) from None


def _reason(error: Exception) -> str:
    return f"truncated or damaged: {' '.join(str(error).split())[:200] or type(error).__name__}"
