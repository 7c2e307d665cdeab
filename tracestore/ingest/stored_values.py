"""Replace scores, labels and groups of stored traces by those that sources or a scores file have now."""

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError, UsageError, escape_unprintable
from tracestore.ingest.score_files import ScoreRow
from tracestore.ingest.scores import Scores
from tracestore.store.format.labels import CORRECT, describe, unlabeled_note
from tracestore.store.read.columns import Columns, TraceValues
from tracestore.store.read.index import StoreIndex
from tracestore.store.vocabulary import JUDGMENTS
from tracestore.store.write.field_values import check_agreement
from tracestore.store.write.keys import OnConflict
from tracestore.store.write.writer import StoreWriter
from tracestore.words import plural


class ChangedValues:
    """Scores, labels and groups that replace those of stored traces.

    What the sources no longer have is a conflict: `on_conflict` removes it ("keep-last"), keeps it or refuses it.

    Attributes
    ----------
    columns : Columns
        The stored values.
    num_replaced : int
        Traces with another stored value before.
    num_removed : int
        Those of them of which a value is removed.
    """

    def __init__(self, writer: StoreWriter, on_conflict: OnConflict) -> None:
        self._writer, self.columns, self._on_conflict = writer, writer.read_columns(), on_conflict
        self._updates: dict[int, TraceValues] = {}
        self.lost: list[int] = []
        self.num_replaced = 0

    @property
    def num_removed(self) -> int:
        """See the class."""
        return len(self.lost) if self._on_conflict == "keep-last" else 0

    def __len__(self) -> int:
        return len(self._updates)

    def set(self, index: int, scores: Mapping[str, float], label: float | None, group: str | None) -> None:
        """Set the values of a trace: NaN and "" where the sources have none, None where they say nothing."""
        before = stored_values(self.columns, index, scores)
        after: list[Any] = [*scores.values(), label, group]
        if any(is_none(new) and not is_none(old) for old, new in zip(before, after, strict=True) if new is not None):
            self.lost.append(index)
            if self._on_conflict == "keep-first":
                after = [None if is_none(value) else value for value in after]
        known = {name: value for name, value in zip(scores, after, strict=False) if value is not None}
        if not known.keys().isdisjoint(JUDGMENTS):
            *judged, stored_label, _ = stored_values(self.columns, index, JUDGMENTS)
            found = {**dict(zip(JUDGMENTS, judged, strict=True)), **known}
            found["label"] = stored_label if after[-2] is None else after[-2]
            check_agreement(found, self._writer.index.question_id(index))
        pairs = [(old, new) for old, new in zip(before, after, strict=True) if new is not None and old != new]
        changed = [old for old, new in pairs if not (is_none(old) and is_none(new))]
        if changed:
            self._updates[index] = TraceValues(known, *after[-2:])
            self.num_replaced += not all(map(is_none, changed))

    def check_questions(self, file: Scores) -> None:
        """Rule 13b: the question of each trace with another value now is that of its row in a scores file."""
        index = self._writer.index
        for k in self._updates if file.questions else ():
            file.check_question(index.question_id(k), index.row(k).sample, self._writer.keys.question_of(k))

    def commit(self, closed: Collection[int] = ()) -> None:
        """Store the values; the sources of these numbers have all of theirs then."""
        if self.lost and self._on_conflict == "error":
            shown = escape_unprintable(self._writer.index.question_id(self.lost[0]), 60)
            raise InvalidInputError(
                f"{plural(len(self.lost), 'stored trace')} such as {shown} have a score, label or group that the sources "
                "no longer have; --on-conflict keep-last removes it, keep-first keeps it"
            )
        self._writer.update_values(self._updates, closed=closed)
        self._writer.commit()

    def lines(self) -> Iterator[str]:
        """Yield how many stored traces have changed, and of how many a value is kept that the sources no longer have."""
        if self.num_replaced:
            removed = f"; a value of {plural(self.num_removed, 'trace')} was removed" if self.num_removed else ""
            yield (
                f"scores, labels or groups of {plural(self.num_replaced, 'stored trace')} have changed and were "
                f"replaced{removed}"
            )
        if kept := len(self.lost) - self.num_removed:
            yield f"{plural(kept, 'stored trace')} with a score, label or group that the sources no longer have: it stays"


def stored_values(columns: Columns, index: int, scores: Iterable[str]) -> list[Any]:
    """Return some scores, the label and the group of a committed trace."""
    found = [float(columns.score(name)[index]) for name in scores]
    return [*found, float(columns.labels[index]), columns.group(index)]


def keys_of(index: StoreIndex, traces: np.ndarray | None = None) -> Iterator[tuple[str, int]]:
    """Yield question id and sample of some committed traces, of all by default."""
    samples = index.read_column("sample")
    traces = np.arange(len(samples)) if traces is None else traces
    return zip(index.question_ids(traces), samples[traces].tolist(), strict=True)


def is_none(value: float | str | None) -> bool:
    """Return whether a value is missing: NaN or an empty text."""
    return value == "" or value != value


def without_row_note(count: int, file: str, name: str) -> Iterator[str]:
    """Yield a line about traces without a row in a scores file that have the score."""
    if count:
        yield f"{plural(count, 'stored trace')} without a row in {file}: the score {name} stays unchanged"


@dataclass(frozen=True)
class ScoreReport:
    """Counts of an update; the JSON document of `tracestore score --json`."""

    store: str
    num_updated: int
    num_removed: int
    num_scored: int
    num_traces: int
    num_traces_without_row: int
    num_scores_without_trace: int
    generation: int
    score: str
    default_score: str | None
    score_direction: str
    labels: str
    num_labels_unused: int
    unlabeled: str | None
    notes: list[str]


def update_scores(
    path: str | Path,
    scores: Scores,
    *,
    name: str | None = None,
    source: str | None = None,
    version: str | None = None,
    is_default: bool = False,
    on_conflict: OnConflict = "error",
) -> ScoreReport:
    """Set a named score and the groups of the traces of a store, and commit.

    Parameters
    ----------
    path : str or Path
        The store: a folder or a URL of an object store.
    scores : Scores
        If it has no samples, a score applies to every sample of its question.
    name : str, optional
        Name of the score. Default: the default score of the store, or the column's name if it has none.
    source, version : str, optional
        Where the values come from. Default: file and column.
    is_default : bool
        Make it the default score. The first score of a store is in any case.
    on_conflict : {"error", "keep-first", "keep-last"}
        See ChangedValues: a stored score or group, and an empty cell.

    Returns
    -------
    ScoreReport

    Raises
    ------
    UsageError
        If there is no store, the name is not valid, or the scores would be mixed with those of another column.
    InvalidInputError
        If the ids are not those of traces, a cell of a stored value is empty, or no trace has a value.
    """
    field = dataclasses.replace(scores.score_field, version=version)
    field = field if source is None else dataclasses.replace(field, source=source)
    from tracestore.store.read.store import open_store  # a conversion reads no store

    open_store(path).close()  # first: the writer would create a missing store
    with StoreWriter(path) as writer:
        values, before = ChangedValues(writer, on_conflict), writer.attributes
        is_named, name = name is not None, name or before.default_score or scores.name
        rows, num_unused = _rows_of_traces(writer, scores)
        has_groups = scores.has_groups
        for k, row in rows.items():
            values.set(k, {name: row.score}, None, row.group if has_groups else None)
        values.check_questions(scores)
        scored = {k: TraceValues({name: row.score}) for k, row in rows.items() if not math.isnan(row.score)}
        if not scored and (is_default or not (values.lost or has_groups)):
            raise InvalidInputError(f"no row of a trace has a {scores.column}", source=scores.path.name)
        num_kept = _num_kept(values.columns.score(name), rows, scores, None if is_named else name)
        if scored:
            writer.define_score(name, field, is_default=is_default, replaced=rows if values.num_removed else scored)
            writer.update_values(scored)  # also those that are equal: the definition of the score may be another one
        values.commit()
        columns = writer.read_columns()
        stored = columns.score(name)
        notes = [*values.lines(), *without_row_note(num_kept, scores.path.name, name)]
        notes += columns.describe_groups() if has_groups else ()
        if scored and before.scores.get(name, field).direction != field.direction:
            meaning = "correct" if field.direction == CORRECT else "hallucinated"
            notes.append(f"a high {name} means a {meaning} answer now, and meant the opposite before")
        return ScoreReport(
            store=str(path),
            num_updated=len(values),
            num_removed=values.num_removed,
            num_scored=int((~np.isnan(stored)).sum()),
            num_traces=writer.manifest.num_traces,
            num_traces_without_row=writer.manifest.num_traces - len(rows),
            num_scores_without_trace=num_unused,
            generation=writer.manifest.generation,
            score=name,
            default_score=writer.attributes.default_score,
            score_direction=(direction := writer.attributes.scores.get(name, field).direction),
            labels=describe(stored, columns.labels, None, direction),
            unlabeled=unlabeled_note(columns.scores, columns.labels, writer.attributes.default_score),
            num_labels_unused=sum(not math.isnan(row.label) for row in scores.rows.values()),
            notes=notes,
        )


def _num_kept(stored: np.ndarray, rows: Mapping[int, ScoreRow], scores: Scores, unstated: str | None) -> int:
    """Return how many traces with a score have no row; UsageError if `unstated` is its name, and that of another column."""
    has_score = ~np.isnan(stored)
    if has_score.any() and unstated not in (None, scores.name):
        raise UsageError(
            f"{scores.path.name}: the column {scores.column} would replace the score {unstated}; --name {scores.name} adds "
            f"it as another score, --name {unstated} replaces"
        )
    return int(has_score.sum() - has_score[[*rows]].sum())


def _rows_of_traces(writer: StoreWriter, scores: Scores) -> tuple[dict[int, ScoreRow], int]:
    """Return the rows by the store indices of their traces, and the number of rows without a trace."""
    keys = list(keys_of(writer.index))
    rows = {k: row for k, key in enumerate(keys) if (row := scores.row_of(*key)) is not None}
    used = {scores.key_of(*keys[k]) for k in rows}
    missing = [key for k, key in enumerate(keys) if k not in rows]
    if (message := scores.check_ids(used, missing, is_whole=True)) is not None:
        raise InvalidInputError(message, source=scores.path.name)
    return rows, len(scores.rows) - len(used)
