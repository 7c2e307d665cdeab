"""Pack the traces of one source, and identify the source."""

from collections.abc import Iterator
from contextlib import closing
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tracestore._core.mapping import MappedFile
from tracestore.errors import InvalidInputError, TruncatedFileError, error_location
from tracestore.ingest.files.byte_source import check_regular
from tracestore.ingest.readers.content import refusal
from tracestore.ingest.sources import SourceFile, SourceIdentity, read_traces, source_fingerprint
from tracestore.store.io.scratch import Scratch
from tracestore.store.write.pack import PackedTrace, pack_record
from tracestore.store.write.record import TraceRecord


class PackOptions(NamedTuple):
    """Options for packing traces; the same for every source of a store.

    Parameters
    ----------
    attention : str
        "mean", "heads" or "none".
    keep_dtype : bool
        Keep float32 and bfloat16 instead of converting to float16.
    max_memory : int
        Bytes of memory for one trace, in each of its forms. The rest goes through files.
    scratch : Path, optional
        Folder of these files.
    max_waiting : int
        Bytes of packed traces of all sources that may wait.
    skip_bad : bool
        Continue after a trace that is refused.
    refuse_attention : bool
        Refuse a trace with attention, because the user has not chosen a store without it.
    """

    attention: str
    keep_dtype: bool
    max_memory: int = 32 << 20
    scratch: Path | None = None
    max_waiting: int = 64 << 20
    skip_bad: bool = False
    refuse_attention: bool = False


def packed_traces(source: SourceFile, options: PackOptions, refused: list[InvalidInputError]) -> Iterator[PackedTrace]:
    """Yield the traces of one source, packed.

    An InvalidInputError names file, position and field. With `skip_bad`, refused traces are appended to `refused`, and
    so is an error that ends a source after its first trace.
    """
    on_refused = refused.append if options.skip_bad else None
    scratch = Scratch(options.scratch, max_memory=options.max_memory)
    # Where attention is read, `check_attention` tells which traces must have it.
    need_attention = False if options.attention == "none" and not options.refuse_attention else None
    records = read_traces(source, need_attention, scratch=scratch, on_refused=on_refused)
    num_packed = 0
    with closing(records):  # type: ignore[type-var]
        while True:
            try:
                record = next(records, None)
            except InvalidInputError as error:
                if on_refused is None or error.is_whole_source or not (num_packed or refused):
                    raise
                on_refused(error.with_location(position=num_packed + len(refused)))
                return
            if record is None:
                return
            hidden_bytes = sum(layer.nbytes for layer in record.hidden or ())
            # Views of a reader's memory.
            record.is_borrowed |= any(_is_view(layer, hidden_bytes) for layer in record.hidden or ())
            source_bytes = hidden_bytes + sum(array.nbytes for array in record.attention or ())
            try:
                with error_location(source.name, record.position):
                    check_attention(record, options)
                    packed = pack_record(
                        record, attention=options.attention, keep_dtype=options.keep_dtype, scratch=scratch
                    )
            except TruncatedFileError as error:
                raise refusal(error).with_location(source=source.name, position=record.position) from None
            except InvalidInputError as error:
                if on_refused is None:
                    raise
                on_refused(error)
                continue
            del record
            num_packed += 1
            packed.source_bytes = source_bytes
            yield packed
            del packed


def check_attention(record: TraceRecord, options: PackOptions) -> None:
    """Raise InvalidInputError if the record lacks attention, or has some that the user has not chosen to leave out.

    A record is checked after it was read, so that what else is wrong with a trace without attention is reported first.
    """
    has_attention = record.attention is not None or record.edges is not None
    if options.attention != "none" and record.hidden is not None and not has_attention:
        found = "missing key, and others of the store have attention: these need another store, or all of them --attention none"
        raise InvalidInputError(found, field="attentions")
    if options.refuse_attention and has_attention:
        raise InvalidInputError(
            "found attention, expected none as in the rest of the store; --attention none leaves it out",
            field="attentions",
        )


def _is_view(layer: np.ndarray, total_bytes: int) -> bool:
    """Return whether a layer of a trace is a view of more memory than that of the trace, and of no mapped file."""
    owner = layer
    while isinstance(base := owner.base, np.ndarray):
        owner = base
    if base is None:
        return owner.nbytes > 2 * total_bytes
    if isinstance(base, bytes):
        return len(base) > layer.nbytes
    return not isinstance(base.obj if isinstance(base, memoryview) else base, MappedFile | mmap)


def identify(source: SourceFile) -> SourceIdentity:
    """Return the identity of a source; raise InvalidInputError if the file cannot be read."""
    with error_location(source.name):
        try:
            modified_ns = max(check_regular(path).st_mtime_ns for path in source.files)
            return SourceIdentity(*source_fingerprint(source), modified_ns)
        except OSError as error:
            raise InvalidInputError(f"cannot be opened: {error.strerror}") from None
