"""Read the traces of a source: each error names the source and the position of the trace."""

import struct
from collections.abc import Iterator

from tracestore.errors import InvalidInputError, OnRefused
from tracestore.ingest.exports.exported_records import read_exported
from tracestore.ingest.readers.content import READING, refusal
from tracestore.ingest.sources import SourceFile
from tracestore.store.io.scratch import Scratch
from tracestore.store.write.record import TraceRecord

# A fault that the checks missed must end as a refusal too, never as a traceback.
_FAULTS: tuple[type[Exception], ...] = (ValueError, TypeError, OverflowError, IndexError, KeyError, struct.error)
_FAULTS += READING


def read_traces(
    source: SourceFile,
    need_attention: bool | None = True,
    *,
    scratch: Scratch | None = None,
    on_refused: OnRefused = None,
) -> Iterator[TraceRecord]:
    """Read the traces of one source in order.

    Parameters
    ----------
    source : SourceFile
        A file of an export, or files that a layout describes.
    need_attention : bool or None
        Whether a trace without attention is refused; None accepts both.
    scratch : Scratch, optional
        Files for what exceeds some MiB of a trace of a compressed file. By default they are in the system's temporary
        folder.
    on_refused : callable, optional
        Called with the error of each trace that is refused, after which reading continues. By default it is raised.

    Yields
    ------
    TraceRecord
        If the file is not compressed, the arrays are views of the mapped file.

    Raises
    ------
    InvalidInputError
        Names file, position and field. Unless `on_refused` is given, the caller must discard the traces it got before.
    """
    count = num_refused = 0

    def refuse(error: InvalidInputError) -> None:
        nonlocal num_refused
        assert on_refused is not None
        num_refused += 1
        on_refused(error)

    scratch = scratch or Scratch()
    try:
        if source.export is not None:
            records = read_exported(source.export, source.name, scratch, need_attention=need_attention)
        else:
            assert source.described is not None
            records = source.described.read(need_attention, scratch, None if on_refused is None else refuse)
        for record in records:
            count += 1
            yield record
            del record
    except InvalidInputError as error:
        # The trace behind those that were read, unless the source as a whole is refused.
        position = count + num_refused if error.position is None and count and source.export is not None else None
        raise error.with_location(source=source.name, position=position) from None
    except _FAULTS as error:
        raise refusal(error).with_location(source=source.name, position=count + num_refused) from None
    if not (count + num_refused or source.may_be_empty):
        raise InvalidInputError("found no trace", source=source.name)
