"""Pack the traces of one source, and identify the source."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tracestore.errors import InvalidInputError, TruncatedFileError, error_location
from tracestore.ingest.byte_source import TRUNCATED_WHILE_READING
from tracestore.ingest.formats import read_traces
from tracestore.ingest.sources import Identity, SourceFile, source_fingerprint
from tracestore.store.io.scratch import Scratch
from tracestore.store.write.pack import PackedTrace, pack_record


@dataclass(frozen=True)
class PackOptions:
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
    """

    attention: str
    keep_dtype: bool
    max_memory: int = 32 << 20
    scratch: Path | None = None
    max_waiting: int = 64 << 20


def packed_traces(
    source: SourceFile,
    options: PackOptions,
    is_ahead: Callable[[], bool] = lambda: True,
    before_pack: Callable[[], bool] = lambda: False,
) -> Iterator[PackedTrace]:
    """Yield the traces of one source, packed.

    A thread inflates ahead while `is_ahead()` is true. `before_pack()` is called before each trace is packed.
    It returns whether the caller drops the trace before it requests the next one; the trace may then alias
    the memory of the reader. An InvalidInputError names file, position and field.
    """
    scratch = Scratch(options.scratch, max_memory=options.max_memory)
    need_attention = options.attention != "none"
    records = read_traces(
        source.path,
        source.name,
        need_attention=need_attention,
        scratch=scratch,
        is_ahead=is_ahead,
        parts=source.parts,
        table=source.table,
    )
    with closing(records):  # type: ignore[type-var]
        for record in records:
            with error_location(source.name, record.position):
                try:
                    yield pack_record(
                        record,
                        attention=options.attention,
                        keep_dtype=options.keep_dtype,
                        scratch=scratch,
                        can_alias=before_pack(),
                    )
                except TruncatedFileError:
                    raise InvalidInputError(TRUNCATED_WHILE_READING) from None
            del record


def identify(source: SourceFile) -> Identity:
    """Return the identity of a source; raise InvalidInputError if the file cannot be read."""
    for path in source.files:
        if not path.is_file():
            next(iter(read_traces(path, source.name)))  # raises with the reason
    try:
        modified_ns = max(os.stat(path).st_mtime_ns for path in source.files)
        return Identity(*source_fingerprint(source), modified_ns)
    except InvalidInputError as error:
        raise error.with_location(source=source.name) from None
    except OSError as error:
        raise InvalidInputError(f"cannot be opened: {error.strerror}", source=source.name) from None
