"""What a fuzzer calls with a file: read as the border reads it, every array packed and touched."""

import os
from pathlib import Path

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest import byte_source
from tracestore.ingest.formats import read_traces
from tracestore.store.write.pack import pack_record
from tracestore.store.write.record import TraceRecord

# gzip in small pieces: files of kilobytes then cross their borders as large files do, and the
# sanitizer has no megabytes to clear for each file.
byte_source._CHUNK_BYTES = 1 << 10


def _touch(record: TraceRecord) -> None:
    arrays = [*(record.hidden or ()), *(record.attention or ())]
    for index, weight in record.edges or ():
        arrays += [index, weight]
    arrays += [a for a in (record.last_token, record.tokens) if a is not None]
    for array in arrays:
        # Through a copy, so that strides are walked as they are.
        np.ascontiguousarray(array).view("u1").sum() if array.ndim else None


def read(path: Path) -> bool:
    """Whether the file is accepted, inflated ahead and not. Anything but a refusal in one line is raised."""
    for need_attention, mode, keep in ((True, "heads", True), (False, "mean", False)):
        try:
            for record in read_traces(
                path, "fuzzed", need_attention=need_attention, is_ahead=lambda n=need_attention: n
            ):
                _touch(record)
                pack_record(record, attention=mode if need_attention else "none", keep_dtype=keep)
        except InvalidInputError as error:
            text = str(error)
            if "\n" in text or not text or len(text) > 600:
                raise RuntimeError(f"a refusal that is no line: {text!r}") from None
            if need_attention:
                continue
            return False
    return True


def _read_bytes(data: bytes) -> bool:
    """Read a file that lies in memory only."""
    descriptor = os.memfd_create("fuzzed")
    try:
        os.write(descriptor, data)
        return read(Path(f"/proc/self/fd/{descriptor}"))
    finally:
        os.close(descriptor)


def _read_store(data: bytes) -> bool:
    from tests.fuzz.stores import read_store  # needs PyTorch, which the readers of files do without

    return read_store(data)


# Mode -> what is called with an input. It returns whether the input is accepted.
TARGETS = {"pickle": _read_bytes, "zip": _read_bytes, "gzip": _read_bytes, "store": _read_store}
