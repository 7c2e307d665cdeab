"""Functions that a fuzzer calls with an input: read it, pack and touch every array."""

import os
from pathlib import Path

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.files import byte_source
from tracestore.ingest.formats import ReadOptions, read_traces
from tracestore.ingest.sources import SourceFile
from tracestore.store.write.pack import pack_record
from tracestore.store.write.record import TraceRecord

# Small chunks: files of kilobytes then span several chunks as large files do, and the sanitizer
# need not clear megabytes for each file.
byte_source._CHUNK_BYTES = 1 << 10


def _touch(record: TraceRecord) -> None:
    arrays = [*(record.hidden or ()), *(record.attention or ())]
    for index, weight in record.edges or ():
        arrays += [index, weight]
    arrays += [a for a in (record.last_token, record.tokens) if a is not None]
    for array in arrays:
        # A copy walks the strides of the array.
        np.ascontiguousarray(array).view("u1").sum() if array.ndim else None


def read(path: Path) -> bool:
    """Return whether the file is accepted. Raise unless a refusal is one line.

    The file is read twice, with and without inflating ahead.
    """
    for need_attention, mode, keep in ((True, "heads", True), (False, "mean", False)):
        try:
            options, source = ReadOptions(need_attention), SourceFile(path, "fuzzed")
            for record in read_traces(source, options, is_ahead=lambda n=need_attention: n):
                _touch(record)
                pack_record(record, attention=mode if need_attention else "none", keep_dtype=keep)
        except InvalidInputError as error:
            text = str(error)
            if "\n" in text or not text or len(text) > 600:
                raise RuntimeError(f"a refusal that is not one line: {text!r}") from None
            if need_attention:
                continue
            return False
    return True


def _read_bytes(data: bytes) -> bool:
    """Read a file that exists in memory only."""
    descriptor = os.memfd_create("fuzzed")
    try:
        os.write(descriptor, data)
        return read(Path(f"/proc/self/fd/{descriptor}"))
    finally:
        os.close(descriptor)


def _read_store(data: bytes) -> bool:
    from tests.fuzz.stores import read_store  # needs PyTorch, unlike the readers of files

    return read_store(data)


# Function of each mode; it returns whether the input is accepted.
TARGETS = {"pickle": _read_bytes, "zip": _read_bytes, "gzip": _read_bytes, "store": _read_store}
