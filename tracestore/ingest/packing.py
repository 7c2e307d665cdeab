"""Pack the traces of one source, and identify the source."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tracestore.errors import InvalidInputError, TruncatedFileError, error_location
from tracestore.ingest.byte_source import TRUNCATED_WHILE_READING
from tracestore.ingest.formats import ReadOptions, read_traces
from tracestore.ingest.roles.keys import DEFAULT_KEYS, KeyOptions
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
    keys : KeyOptions
        Names of the fields of a trace in the files.
    skip_bad : bool
        Continue after a trace that is refused.
    """

    attention: str
    keep_dtype: bool
    max_memory: int = 32 << 20
    scratch: Path | None = None
    max_waiting: int = 64 << 20
    keys: KeyOptions = DEFAULT_KEYS
    skip_bad: bool = False


def packed_traces(
    source: SourceFile,
    options: PackOptions,
    is_ahead: Callable[[], bool] = lambda: True,
    before_pack: Callable[[], bool] = lambda: False,
    refused: list[InvalidInputError] | None = None,
) -> Iterator[PackedTrace]:
    """Yield the traces of one source, packed.

    A thread inflates ahead while `is_ahead()` is true. `before_pack()` is called before each trace is packed.
    It returns whether the caller drops the trace before it requests the next one; the trace may then alias
    the memory of the reader. An InvalidInputError names file, position and field. With `skip_bad`, refused traces are
    appended to `refused`, and so is an error that ends a source after its first trace.
    """
    on_refused = refused.append if options.skip_bad and refused is not None else None
    scratch = Scratch(options.scratch, max_memory=options.max_memory)
    read_options = ReadOptions(options.attention != "none", options.keys, on_refused)
    records = read_traces(
        source.path,
        source.name,
        scratch=scratch,
        is_ahead=is_ahead,
        options=read_options,
        parts=source.parts,
        table=source.table,
    )
    num_read = 0
    with closing(records):  # type: ignore[type-var]
        while True:
            try:
                record = next(records, None)
            except InvalidInputError as error:
                if on_refused is None or error.is_whole_source or not (num_read or refused):
                    raise
                on_refused(error)
                return
            if record is None:
                return
            num_read += 1
            try:
                with error_location(source.name, record.position):
                    packed = pack_record(
                        record,
                        attention=options.attention,
                        keep_dtype=options.keep_dtype,
                        scratch=scratch,
                        can_alias=before_pack(),
                    )
            except TruncatedFileError:
                raise InvalidInputError(
                    TRUNCATED_WHILE_READING, source=source.name, position=record.position, is_whole_source=True
                ) from None
            except InvalidInputError as error:
                if on_refused is None:
                    raise
                on_refused(error)
                continue
            del record
            yield packed
            del packed


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
