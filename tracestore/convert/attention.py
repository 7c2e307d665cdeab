"""Choose the attention of a store if the user has not: "none" if the traces have none."""

from collections.abc import Callable
from contextlib import closing
from functools import cache, partial
from itertools import islice
from typing import Any

from tracestore.errors import InvalidInputError
from tracestore.ingest.formats import ReadOptions, read_traces
from tracestore.ingest.roles.keys import KeyOptions
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
    sources, keys, before_file
        As for `has_attention`.
    """

    def __init__(self, *args: Any) -> None:
        self._has_attention = cache(partial(has_attention, *args))

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


def has_attention(
    sources: list[SourceFile], keys: KeyOptions, before_file: Callable[[], None] = lambda: None
) -> bool | None:
    """Return whether one of the first traces has attention; None if none of them has hidden states of all tokens.

    The result depends on the sources alone. At most 64 files, evenly spaced, are read.

    Parameters
    ----------
    sources : list of SourceFile
        The sources in their order, at least one.
    keys : KeyOptions
        Names of the fields of a trace in the files.
    before_file : callable
        Called before each file; may raise.
    """
    is_without = False
    step = -(-len(sources) // _MAX_FILES)
    for source in sources[::step]:
        before_file()
        # The conversion reports what is refused.
        options = ReadOptions(None, keys, on_refused=lambda _: None)
        traces = read_traces(source.path, source.name, options=options, parts=source.parts, table=source.table)
        try:
            with closing(traces):  # type: ignore[type-var]
                for record in islice(traces, MAX_TRACES):
                    if record.attention is not None or record.edges is not None:
                        return True
                    is_without |= record.hidden is not None
        except InvalidInputError:
            continue
    return False if is_without else None
