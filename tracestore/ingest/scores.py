"""Read scores files (CSV with question_id and a column of scores), and update the scores of a store.

One module of over 400 lines: a table of scores, its meaning, and its way into a store.
"""

import csv
import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tracestore.errors import InvalidInputError, UsageError
from tracestore.ingest.score_files import (
    GROUP_COLUMN,
    ID_COLUMN,
    WORD_COLUMNS,
    ScoreTable,
    direction_of,
    id_column_of,
    normalized,
    read_table,
    score_columns_of,
)
from tracestore.store.format.labels import (
    CORRECT,
    DEFAULT_SCORE_NAME,
    HALLUCINATION,
    PREDICTION_COLUMNS,
    ScoreField,
    describe,
    unlabeled_note,
)
from tracestore.store.read.columns import TraceValues
from tracestore.store.read.store import open_store
from tracestore.store.vocabulary import score_of_word
from tracestore.store.write.writer import StoreWriter

_MIN_LABELS = 10  # fewer may be those of the answers with wrong scores


def score_name(column: str) -> str:
    """Return the name under which a store holds the scores of a column."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", column).strip("_.-")[:64] or DEFAULT_SCORE_NAME


@dataclass
class Scores:
    """Scores and groups of a file by (question id, sample).

    The sample is 0 if the file has no `sample` column. A missing score is NaN, a missing group "". `in_order` holds the
    scores of a file without ids, in the order of the traces. `labels` are those of a column next to the scores (1:
    hallucinated), by the same keys, or by row.
    """

    path: Path
    column: str
    direction: str
    has_samples: bool
    values: dict[tuple[str, int], tuple[float, str]] = dataclasses.field(default_factory=dict)
    in_order: list[float] = dataclasses.field(default_factory=list)
    id_column: str | None = ID_COLUMN
    group_column: str = GROUP_COLUMN
    is_direction_known: bool = True
    label_column: str | None = None
    labels: dict[tuple[str, int] | int, float] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name under which a store holds the scores, unless another is chosen: that of the column."""
        return score_name(self.column)

    @property
    def score_field(self) -> ScoreField:
        """Meaning and source of the scores."""
        return ScoreField(self.direction, f"{self.path.name}, column {self.column}"[:1024])

    def add(self, question_id: str, sample: int, score: float, group: str) -> None:
        """Add a score and a group; raise InvalidInputError if the question has others."""
        key = (question_id, sample)
        known_score, known_group = self.values.setdefault(key, (score, group))
        if math.isnan(known_score) and math.isnan(score):
            self.values[key] = (score, group)
        elif known_score != score or known_group != group:
            found, expected = f"{self.column} {score:g}", f"{known_score:g}"
            if known_score == score:
                found, expected = f"{self.group_column} {group!r}", repr(known_group)
            raise InvalidInputError(
                f"found a second {found} for question {question_id!r}, expected {expected} as before"
            )

    def add_label(self, key: tuple[str, int] | int, label: float) -> None:
        """Add a label, NaN for none; InvalidInputError if the question has another."""
        if not math.isnan(label) and self.labels.setdefault(key, label) != label:
            raise InvalidInputError(f"found a second label {label:g} for {key!r:.60}, expected {self.labels[key]:g}")

    def label_of(self, question_id: str, sample: int, position: int) -> float | None:
        """Return the label of a trace, at a position in the order of the traces; None without one."""
        return self.labels.get(position if self.in_order else (question_id, sample if self.has_samples else 0))

    def check_labels(self) -> None:
        """Raise UsageError if the labels contradict the scores, so that a label of 1 cannot mean a hallucinated answer."""
        found = {k: self.in_order[k] if isinstance(k, int) else self.values[k][0] for k in self.labels}
        groups = [[s for k, s in found.items() if self.labels[k] == label and s == s] for label in (0.0, 1.0)]
        if not all(groups) or sum(map(len, groups)) < _MIN_LABELS:
            return
        right, hallucinated = (sum(scores) / len(scores) for scores in groups)
        if (right < hallucinated) if self.direction == CORRECT else (right > hallucinated):
            raise UsageError(
                f"{self.path.name}: {self.label_column} and {self.column} contradict each other: of the answers with "
                f"label 1 (hallucinated) the mean is {hallucinated:g}, of those with 0 it is {right:g} (high: "
                f"{self.direction}); choose --score-column {self.column} or --score-column {self.label_column}"
            )

    def score_at(self, position: int) -> float:
        """Return the score at a position in the order of the traces; NaN beyond the last one."""
        return self.in_order[position] if position < len(self.in_order) else math.nan

    def count_text(self, count: int) -> str:
        """Return why scores in the order of the traces do not fit to that many."""
        return f"found {len(self.in_order):,} scores without ids, expected {count:,}, one per trace"

    def join(self, other: "Scores") -> None:
        """Add the scores of another file."""
        if (other.name, other.direction, other.has_samples) != (self.name, self.direction, self.has_samples):
            raise UsageError(
                f"{self.path} has {self.column} ({self.direction}), {other.path} {other.column} ({other.direction}); "
                "convert their folders one after the other with --scores"
            )
        if self.in_order or other.in_order:
            raise UsageError(f"{other.path} has no ids, expected {ID_COLUMN} in each of several scores files")
        for (question_id, sample), (score, group) in other.values.items():
            try:
                self.add(question_id, sample, score, group)
                self.add_label((question_id, sample), other.labels.get((question_id, sample), math.nan))
            except InvalidInputError as error:
                raise error.with_location(source=str(other.path)) from None

    def has_row(self, question_id: str, sample: int) -> bool:
        """Return whether a row of the file is that of a trace."""
        return (question_id, sample if self.has_samples else 0) in self.values

    def lookup(self, question_id: str, sample: int = 0) -> tuple[float, str]:
        """Return the score (NaN if missing) and group of a trace."""
        return self.values.get((question_id, sample if self.has_samples else 0), (math.nan, ""))


def read_scores(
    path: Path,
    score_column: str | None = None,
    group_column: str | None = None,
    score_direction: str | None = None,
    id_column: str | None = None,
) -> Scores:
    """Read a scores file.

    Parameters
    ----------
    path : Path
        A table: CSV, TSV, JSON, JSON Lines, Parquet, .npy or .npz.
    score_column : str, optional
        Column of the scores; by default the only one of `store.vocabulary.SCORES`, next to which `label` holds labels.
    group_column : str, optional
        Column of the groups; by default GROUP_COLUMN, if the file has it.
    score_direction : str, optional
        Meaning of a high score, CORRECT or HALLUCINATION; by default that of the column's
        name, or of its words.
    id_column : str, optional
        Column of the question ids; by default ID_COLUMN, or a usual other name.

    Returns
    -------
    Scores

    Raises
    ------
    UsageError
        If the file does not exist, or column or direction are ambiguous.
    InvalidInputError
        If the content is invalid; names file, line and column.
    """
    try:
        with read_table(path) as table:
            scores = _columns(path, table, score_column, group_column, score_direction, id_column)
            for number, (place, row) in enumerate(table.rows):
                try:
                    _add_row(scores, row, number)
                except InvalidInputError as error:
                    raise InvalidInputError(f"{place}: {error.reason}") from None
        scores.check_labels()
        return scores
    except FileNotFoundError:
        raise UsageError(f"{path}: no such scores file") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidInputError(f"not a CSV file: {error}", source=path.name) from None
    except InvalidInputError as error:
        raise error.with_location(source=path.name) from None


def _columns(
    path: Path,
    table: ScoreTable,
    score_column: str | None,
    group_column: str | None,
    score_direction: str | None,
    id_column: str | None,
) -> Scores:
    """Return the scores of a table that has these columns, without its rows."""
    header = table.header
    ids = id_column or (id_column_of(header) if table.has_ids else None)
    for name in (id_column, score_column, group_column):
        if name is not None and name not in header:
            raise InvalidInputError(f"found columns {_listed(header)}, expected {name} among them")
    if ids is None and table.has_ids:
        raise InvalidInputError(
            f"found columns {_listed(header)}, expected {ID_COLUMN} among them; "
            "name the column of the ids with --id-column"
        )
    column = score_column or _score_column(path.name, header)
    direction = score_direction or direction_of(column)
    if column == "label" and tuple(header[: len(PREDICTION_COLUMNS)]) == PREDICTION_COLUMNS:
        direction = HALLUCINATION
    scores = Scores(path, column, direction or CORRECT, "sample" in header, id_column=ids)
    scores.group_column, scores.is_direction_known = group_column or GROUP_COLUMN, direction is not None
    if score_column is None and column != "label" and "label" in header:
        scores.label_column = "label"
    if direction is None and normalized(column) not in WORD_COLUMNS:
        raise _ambiguous_direction(path, column)
    return scores


def _listed(header: list[str]) -> str:
    return ", ".join(header) or "an empty file"


def _ambiguous_direction(path: Path, column: str) -> UsageError:
    return UsageError(
        f"{path.name}: a high {column} may mean a correct or a hallucinated answer; "
        "choose --score-direction correct or --score-direction hallucination"
    )


def _number(scores: Scores, value: object) -> float:
    """Return the score in a cell: a number, or the word of a judge."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return math.nan
    if isinstance(value, str):
        word = score_of_word(value, scores.direction if scores.is_direction_known else None)
        if word is not None:
            return word
    try:
        number = float(value)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        if isinstance(value, str) and score_of_word(value, CORRECT) is not None:
            raise _ambiguous_direction(scores.path, scores.column) from None
        raise InvalidInputError(f"found {value!r:.42} in {scores.column}, expected a number") from None
    if not scores.is_direction_known and not math.isnan(number):
        raise _ambiguous_direction(scores.path, scores.column)
    return number


def _label(scores: Scores, row: dict[str, object]) -> float:
    """Return the label in a row next to its score: 0, 1 or the word of a judge; NaN without one."""
    value = None if scores.label_column is None else row.get(scores.label_column)
    if value is None or (isinstance(value, str) and not value.strip()):
        return math.nan
    try:
        word = score_of_word(value, HALLUCINATION) if isinstance(value, str) else None
        label = float(value) if word is None else word  # type: ignore[arg-type]
    except (ValueError, TypeError):
        label = -1.0
    if label not in (0.0, 1.0) and not math.isnan(label):
        raise InvalidInputError(
            f"found {value!r:.42} in {scores.label_column}, expected 1 (hallucinated) or 0; "
            f"--score-column {scores.column} uses the scores alone"
        )
    return label


def _add_row(scores: Scores, row: dict[str, object], number: int) -> None:
    """Add the score and the group in a row of the file."""
    score, text = _number(scores, row.get(scores.column)), row.get("sample", 0)
    try:
        sample = int(text)  # type: ignore[call-overload]
    except (ValueError, TypeError):
        raise InvalidInputError(f"found sample {text!r:.42}, expected a number") from None
    if not 0 <= sample < 2**31:
        raise InvalidInputError(f"found sample {sample}, expected 0 to 2^31 - 1")
    if math.isinf(score):
        raise InvalidInputError(f"found an infinite {scores.column}")
    label = _label(scores, row)
    if scores.id_column is None:
        scores.in_order.append(score)
        scores.add_label(number, label)
        return
    question = row.get(scores.id_column)
    if not isinstance(question, str | int) or isinstance(question, bool):
        raise InvalidInputError(f"found {question!r:.42} in {scores.id_column}, expected an id")
    group = row.get(scores.group_column)
    scores.add(str(question), sample, score, "" if group is None else str(group).strip())
    scores.add_label((str(question), sample), label)


def _score_column(name: str, header: list[str]) -> str:
    """Return the name of the only column of scores."""
    candidates = score_columns_of(header)
    if not candidates:
        expected = "a known name of scores, such as score, correct, accuracy, bleurt or hallucination, among them"
        raise InvalidInputError(f"found columns {_listed(header)}, expected {expected}; name it with --score-column")
    if len(candidates) > 1:
        choices = " or ".join(f"--score-column {column}" for column in candidates)
        raise UsageError(f"{name}: found columns {' and '.join(candidates)}; choose {choices}")
    return candidates[0]


@dataclass(frozen=True)
class ScoreReport:
    """Counts of an update; the JSON document of `tracestore score --json`."""

    store: str
    num_updated: int
    num_scored: int
    num_traces: int
    num_scores_without_trace: int
    generation: int
    score: str
    default_score: str | None
    score_direction: str
    labels: str
    num_labels_unused: int
    unlabeled: str | None


def update_scores(
    path: str | Path,
    scores: Scores,
    *,
    name: str | None = None,
    source: str | None = None,
    version: str | None = None,
    is_default: bool = False,
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

    Returns
    -------
    ScoreReport

    Raises
    ------
    UsageError
        If there is no store, or the name is not valid.
    """
    field = dataclasses.replace(scores.score_field, version=version)
    field = field if source is None else dataclasses.replace(field, source=source)
    # Open first: the writer would create a missing store.
    open_store(path).close()
    with StoreWriter(path) as writer:
        columns = writer.read_columns()
        name = name or writer.attributes.default_score or scores.name
        count = writer.manifest.num_traces
        if scores.in_order and len(scores.in_order) != count:
            raise InvalidInputError(scores.count_text(count), source=scores.path.name)
        updates = {k: TraceValues({name: v}) for k, v in enumerate(scores.in_order) if not math.isnan(v)}
        unknown = 0
        by_id: dict[str, list[int]] = {}
        if not scores.has_samples:
            for index in range(len(columns)):
                by_id.setdefault(writer.index.question_id(index), []).append(index)
        for (question_id, sample), (score, group) in scores.values.items():
            found = writer.index.find(question_id, sample)
            indices = by_id.get(question_id, []) if not scores.has_samples else [found] if found >= 0 else []
            unknown += not indices
            if group or not math.isnan(score):
                updates |= dict.fromkeys(indices, TraceValues({name: score}, group=group or None))
        replaced = {index for index, given in updates.items() if not math.isnan(given.scores[name])}
        if replaced:
            writer.define_score(name, field, is_default=is_default, replaced=replaced)
        writer.update_values(updates)
        writer.commit()
        columns = writer.read_columns()
        stored = columns.score(name)
        return ScoreReport(
            store=str(path),
            num_updated=len(updates),
            num_scored=int((~np.isnan(stored)).sum()),
            num_traces=writer.manifest.num_traces,
            num_scores_without_trace=unknown,
            generation=writer.manifest.generation,
            score=name,
            default_score=writer.attributes.default_score,
            score_direction=field.direction,
            labels=describe(stored, columns.labels, None, field.direction),
            unlabeled=unlabeled_note(columns.scores, columns.labels, writer.attributes.default_score),
            num_labels_unused=len(scores.labels),
        )
