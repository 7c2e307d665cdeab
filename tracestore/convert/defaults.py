"""The default of --attention, which the first traces of the sources decide."""

from collections.abc import Callable
from contextlib import closing
from functools import cache
from itertools import islice

from tracestore.errors import InvalidInputError
from tracestore.ingest.source_reading import read_traces
from tracestore.ingest.sources import SourceFile

WITHOUT_ATTENTION = "no attention in the source: stored without edges; detectors that need graphs cannot train on it"
LEFT_OUT = "the store has no attention: that of the source was left out"
# How much is read to decide. If that is without attention, a later trace with attention is refused.
MAX_TRACES = 3  # of each file
_MAX_FILES = 64


class DefaultAttention:
    """The attention of a conversion without `--attention`.

    Parameters
    ----------
    find : callable
        Return whether the traces have attention, as `has_attention` does; called once.
    """

    def __init__(self, find: Callable[[], bool | None]) -> None:
        self._has_attention = cache(find)

    def of_new_store(self) -> str:
        """Return "none" if the first traces have hidden states without attention, "mean" in every other case."""
        return "none" if self._has_attention() is False else "mean"

    def is_refused(self, stored: str) -> bool:
        """Return whether a store with the option `stored` refuses traces with attention, so that none is lost."""
        return stored == "none" and not self._has_attention()

    def note(self, stored: str) -> str | None:
        """Return what the user must know about a store with the option `stored`."""
        notes = {False: WITHOUT_ATTENTION, True: LEFT_OUT, None: None}
        return notes[self._has_attention()] if stored == "none" else None


def has_attention(sources: list[SourceFile], before_file: Callable[[], None] = lambda: None) -> bool | None:
    """Return whether one of the first traces has attention; None if none of them has hidden states of all tokens.

    The result depends on the sources alone. At most 64 files, evenly spaced, are read; the conversion reports what is
    refused.

    Parameters
    ----------
    sources : list of SourceFile
        The sources in their order, at least one.
    before_file : callable
        Called before each file; may raise.
    """
    is_without = False
    for source in sources[:: max(1, -(-len(sources) // _MAX_FILES))]:
        before_file()
        records = read_traces(source, None, on_refused=lambda _: None)
        try:
            with closing(records):  # type: ignore[type-var]
                for record in islice(records, MAX_TRACES):
                    if record.attention is not None or record.edges is not None:
                        return True
                    is_without |= record.hidden is not None
        except InvalidInputError:
            continue
    return False if is_without else None
