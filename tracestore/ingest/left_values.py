"""Values of single traces: those that copies give, and stored ones that stay although the files do not give them."""

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Container, Iterator, Set
from functools import cached_property
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError, escape_unprintable, some_of
from tracestore.ingest.stored_values import is_none, keys_of, stored_values
from tracestore.store.format.entries import Fingerprint
from tracestore.store.format.labels import ScoreField
from tracestore.store.read.columns import Columns, TraceValues
from tracestore.store.write.keys import OnConflict
from tracestore.store.write.record import TraceRecord
from tracestore.store.write.writer import StoreWriter
from tracestore.words import plural

LABEL, GROUP = "label", "group"
_MAX_NAMES = 8
_OF_LAYOUT = " of the layout"


def origin_of(name: str) -> str:
    """Return where the values of a score come from, as the store keeps it."""
    return f"{name[: 1024 - len(_OF_LAYOUT)]}{_OF_LAYOUT}"


def kind_of(value: float) -> str:
    """Return what a label or score is counted as."""
    return str(int(value)) if value in (0, 1) else "missing" if math.isnan(value) else "other"


def is_of_layout(field: ScoreField) -> bool:
    """Return whether the values of a score may be those of a line of a layout."""
    return field.source is None or field.source.endswith(_OF_LAYOUT)


def merged(known: dict[str, float], found: dict[str, float], record: TraceRecord) -> dict[str, float]:
    """Return the labels of a trace with those of an earlier copy; rule 14: these agree."""
    known = {name: value for name, value in known.items() if not math.isnan(value)}
    for name, value in known.items():
        if not math.isnan(other := found.get(name, math.nan)) and other != value:
            raise InvalidInputError(
                f"found {value:g} and {other:g} for {escape_unprintable(record.question_id, 60)}, sample "
                f"{record.sample}: copies of a trace have one label",
                position=record.position,
                field=name,
            )
    return found | known


class LeftValues:
    """The stored values of committed traces that the files lack, and that earlier ones may have given.

    Attributes
    ----------
    traces : set of int
        The store indices of those traces.
    """

    def __init__(self) -> None:
        self._lacking: dict[tuple[str, int], tuple[set[str], bool]] = {}
        self.traces: set[int] = set()

    def add(self, key: tuple[str, int], scores: set[str], *, may_have_group: bool) -> None:
        """Add a trace with the names of the scores that its file lacks, "label" included."""
        self._lacking[key] = scores, may_have_group

    def count(self, key: tuple[str, int], given: TraceValues, columns: Columns, index: int) -> None:
        """Count a trace if the values that it is given leave one that its file lacks."""
        if key not in self._lacking:
            return
        (names, may_have_group), (scores, label, group) = self._lacking[key], given
        *stored, own_label, own_group = stored_values(columns, index, names & columns.scores.keys() - scores.keys())
        stored += [own_label] * (LABEL in names and label is None) + [own_group] * (may_have_group and group is None)
        if not all(map(is_none, stored)):
            self.traces.add(index)

    def lines(self) -> Iterator[str]:
        """Yield a line about the counted traces."""
        if self.traces:
            yield (
                f"{plural(len(self.traces), 'stored trace')} with a score, label, group or text that the files lack, and that "
                "earlier ones may have given: it stays; --overwrite begins without it"
            )


def earlier_note(
    writer: StoreWriter, own: np.ndarray, given: Collection[str], with_group: Container[tuple[str, int]] | None
) -> Iterator[str]:
    """Yield a line about stored values that no line or scores file of a conversion gives.

    Parameters
    ----------
    writer : StoreWriter
    own : np.ndarray
        Whether a source of the conversion has each committed trace.
    given : collection of str
        The scores that the conversion gives, and "label".
    with_group : container or None
        The keys of traces with a group; None if the conversion gives all groups.
    """
    columns, fields = writer.read_columns(), writer.attributes.scores
    known = own & (np.arange(len(own)) < len(own) - writer.num_added)
    left = {
        f"{name} ({escape_unprintable(fields[name].source or 'unknown', 60)})": int((known & ~np.isnan(values)).sum())
        for name, values in columns.scores.items()
        if name not in given
    }
    left[LABEL] = 0 if LABEL in given else int((known & ~np.isnan(columns.labels)).sum())
    if with_group is not None and len(columns.groups):
        has_group = np.flatnonzero(known & (np.diff(columns.groups_offsets) > 0))
        left[GROUP] = sum(key not in with_group for key in keys_of(writer.index, has_group))
    shown = [f"{name} of {plural(count, 'trace')}" for name, count in left.items() if count]
    if shown:
        yield f"stored values that may be of earlier files stay: {some_of(shown, _MAX_NAMES)}; --overwrite begins without them"


class GoneTraces:
    """The stored traces that the files of a conversion do not have, and what tables give to them.

    Parameters
    ----------
    writer : StoreWriter
    present, read : set of str
        The names of all sources, and of those that were read.
    seen : set of int
        The store indices of the traces that were read although the store had them.

    Attributes
    ----------
    given, groups : dict
        The labels and scores, and the groups, to store of these traces, by keys.
    """

    def __init__(self, writer: StoreWriter, present: Set[str], read: Set[str], seen: Set[int]) -> None:
        self._writer, self._present, self._read, self._seen = writer, present, read, seen
        self.given: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
        self.groups: dict[tuple[str, int], str] = {}

    @cached_property
    def _is_gone(self) -> Any:  # bool, (traces of before,)
        writer, count = self._writer, self._writer.manifest.num_traces - self._writer.num_added
        paths = [writer.moved.get(source.path, source.path) for source in writer.index.sources()]
        may_be_gone = np.array([path in self._read or path not in self._present for path in paths], bool)
        if not (count and may_be_gone.any()):
            return np.zeros(count, bool)
        is_gone = may_be_gone[writer.index.read_column("source")[:count]]
        is_gone[[index for index in self._seen if index < count]] = False
        return is_gone

    def take_row(
        self, on_conflict: OnConflict, layout: str, question_id: str, sample: int | None, name: str, value: Any
    ) -> bool | None:
        """Take a row whose trace the files lack, by the digest of its layout; see `OnUnused`."""
        samples = itertools.count() if sample is None else [sample]
        keys = itertools.takewhile(lambda key: self._writer.index.find(*key) >= 0, ((question_id, k) for k in samples))
        found = {key: self._writer.index.find(*key) for key in keys}
        gone = {key: index for key, index in found.items() if self._is_gone_of(index, layout)}
        for key, index in gone.items() if value is not None else ():
            score, label, group = stored_values(self._writer.read_columns(), index, [name])
            stored: Any = group if isinstance(value, str) else label if name == LABEL else score
            if stored != value and not is_none(stored) and on_conflict == "error":
                new, old = (f"{v!r:.42}" if isinstance(v, str) else f"{v:g}" for v in (value, stored))
                raise InvalidInputError(
                    f"the row of {escape_unprintable(question_id, 60)} has {new}, and the store has {old} for its trace, "
                    "which the files lack; --on-conflict keep-last replaces it, keep-first keeps it",
                    field=name,
                )
            if is_none(stored) or on_conflict == "keep-last":
                self.given[key] |= {} if isinstance(value, str) else {name: value}
                self.groups |= {key: value} if isinstance(value, str) else {}
        return bool(gone) if found else None

    def _is_gone_of(self, index: int, layout: str) -> bool:
        """Return whether the files lack a trace of a layout; for others a row may mean something else."""
        if not layout or index >= len(self._is_gone) or not self._is_gone[index]:
            return False
        path = self._writer.source_of(index)
        return path in self._read or Fingerprint.parse(self._writer.last_source(path).fingerprint).layout == layout

    def lines(self) -> Iterator[str]:
        """Yield a line about their number."""
        if num_gone := int(self._is_gone.sum()):
            stored = plural(num_gone, "trace")
            yield f"stored, but not from the present files: {stored}; --overwrite begins without them"
