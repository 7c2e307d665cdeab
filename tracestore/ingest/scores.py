"""Read scores files: CSV with question_id and a column of scores, and others."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Collection, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracestore.errors import InvalidInputError, UsageError, error_location, escape_unprintable
from tracestore.ingest.execute.join import texts_agree
from tracestore.ingest.execute.table_accounts import check_remainders
from tracestore.ingest.execute.values import group_text, label_value, number, one_value, score_value
from tracestore.ingest.score_files import (
    GROUP_COLUMN,
    ID_COLUMN,
    WORD_COLUMNS,
    ScoreRow,
    ScoreTable,
    ambiguous_direction,
    column_of,
    direction_in,
    id_column_of,
    normalized,
    other_id_columns,
    read_table,
    sample_column_of,
    score_columns_of,
    score_name,
)
from tracestore.store.format.labels import CORRECT, HALLUCINATION, ScoreField
from tracestore.store.vocabulary import SYNONYMS, is_hallucination, score_of_word
from tracestore.words import plural

_MIN_LABELS = 10  # fewer may be those of the answers with wrong scores
# Scores of a detector, and metrics of the words of an answer: 0 and 1 are grades there.
_METRIC = re.compile(r"(^|_)(em|f1|bleu|bleurt|rouge|meteor|bert|exact|scores?$)|^p_")
_OF_MISTAKES = frozenset(("risk", "uncertainty", "error", "errors", "wrong"))
_MAX_SAMPLE = 2**31
# A cell that says nothing, or a number.
_NO_QUESTION = re.compile(r"[-+.\d]*|\W|nan|none|null|n/?a|missing", re.IGNORECASE)
_MAX_ROWS = 100  # in which the message names a column with the ids of the traces
Key = tuple[str, int]  # the question id and sample of a trace


def _folded(text: str) -> str:
    return " ".join(text.split()).casefold()


@dataclass
class Scores:
    """The rows of a file by the keys of traces: samples are 0 if the file has no column of samples.

    Labels are those of a column next to the scores.
    """

    path: Path
    column: str
    direction: str
    sample_column: str | None
    rows: dict[Key, ScoreRow] = dataclasses.field(default_factory=dict)
    id_column: str = ID_COLUMN
    group_column: str = GROUP_COLUMN
    has_groups: bool = False  # an empty cell is no group then
    is_direction_known: bool = True
    label_column: str | None = None
    question_column: str | None = None
    questions: dict[Key, list[str]] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name under which a store holds the scores, unless another is chosen: that of the column."""
        return score_name(self.column)

    @property
    def score_field(self) -> ScoreField:
        """Meaning and source of the scores."""
        return ScoreField(self.direction, f"{self.path.name}, column {self.column}"[:1024])

    def add(self, key: Key, row: ScoreRow) -> None:
        """Add a row; raise InvalidInputError if its key has another one."""
        self.has_groups |= row.group != ""
        known = self.rows.setdefault(key, row)
        columns = self.column, self.group_column, self.label_column
        for column, found, expected in zip(columns, row, known, strict=True):
            if found is not expected and found != expected:
                raise InvalidInputError(
                    f"found a second {column} {found!r} for question {key[0]!r}, expected {expected!r} as before"
                )

    def key_of(self, question_id: str, sample: int) -> tuple[str, int]:
        """Return the key of the row of a trace."""
        return question_id, 0 if self.sample_column is None else sample

    def row_of(self, question_id: str, sample: int = 0) -> ScoreRow | None:
        """Return the row of a trace."""
        return self.rows.get(self.key_of(question_id, sample))

    def check_question(self, question_id: str, sample: int, question: str | None) -> None:
        """Rule 13b: the question of a trace is that of its row, unless the user has named the column of the ids."""
        texts = self.questions.get(self.key_of(question_id, sample), ())
        if not texts or not question or any(texts_agree(text, question) for text in texts):
            return
        # A prompt may be another text than the question, but not the question of another row.
        if normalized(self.question_column or "") == "question" or _folded(question) in self._folded_questions:
            shown, expected, name = (escape_unprintable(part, 40) for part in (texts[0], question, self.id_column))
            raise InvalidInputError(
                f"{self.path.name}: the question of {escape_unprintable(question_id, 60)} is {shown!r}, and the trace has "
                f"{expected!r}: ids of other questions? --id-column {name} if not"
            )

    @functools.cached_property
    def _folded_questions(self) -> frozenset[str]:
        return frozenset(_folded(text) for texts in self.questions.values() for text in texts)

    def check_ids(self, matched: Container[Key], missing: Collection[tuple[str, int]], *, is_whole: bool) -> str | None:
        """Check rules 12b and 12c: some rows are those of traces, and the others differ by more than spelling.

        Parameters
        ----------
        matched : container of Key
            The keys of rows that traces have.
        missing : collection of (str, int)
            Question ids and samples of the traces without a row.
        is_whole : bool
            False if more traces may follow: rule 12b is not checked.

        Returns
        -------
        str or None
            What is wrong if no row is that of a trace.

        Raises
        ------
        InvalidInputError
            If ids or samples of rows without a trace and of traces without a row differ by spelling, or by one.
        """
        if not missing:
            return None
        keys, without_row = list(self.rows), dict.fromkeys(question_id for question_id, _ in missing)
        ids, unused = dict.fromkeys(question_id for question_id, _ in keys), [key for key in keys if key not in matched]
        if is_whole:
            with_trace = {*without_row, *(question_id for question_id, _ in {*keys}.difference(unused))}
            unknown = [q for q in dict.fromkeys(q for q, _ in unused) if q not in with_trace]
            with error_location(self.path.name):
                left = [question_id for question_id in without_row if question_id not in ids]
                if unknown or len(left) == 1:  # any other part of the traces may have rows
                    check_remainders(ID_COLUMN, list(ids), unknown, left)
                self._check_samples({s for _, s in unused}, {s for q, s in missing if q in ids})
        return self._no_match(next(iter(keys)), missing) if len(unused) == len(keys) > 0 else None

    def _check_samples(self, unused: set[int], missing: set[int]) -> None:
        if self.sample_column is not None and unused - missing:
            rows = sorted({sample for _, sample in self.rows})
            check_remainders("sample", rows, sorted(unused - missing), sorted(missing - unused))

    def _no_match(self, own: tuple[str, int], missing: Collection[tuple[str, int]]) -> str:
        """Return an example of both sides, and the flag to use."""
        ids = {question_id for question_id, _ in missing}
        with read_table(self.path) as table:
            rows = list(itertools.islice(table.rows, _MAX_ROWS))
        columns = dict.fromkeys(name for row in rows for name, value in row.items() if str(value) in ids)
        advice = "write the ids of the traces into it, or name another key of the traces with a line for question_id"
        if columns and self.id_column not in columns:
            name = escape_unprintable(next(iter(columns)), 60)
            advice = f"its column {name} has them: --id-column {name}"
        shown, other = (
            f"{escape_unprintable(question_id, 40)!r}" + f", sample {sample}" * (own[0] in ids)
            for question_id, sample in (own, next(iter(missing)))
        )
        return (
            f"found {plural(len({q for q, _ in self.rows}), 'id')} such as {shown}, and none of them in the traces, which "
            f"have ids such as {other}; {advice}"
        )

    @property
    def is_claim(self) -> bool:
        """Return whether the name reads as a claim, which is true or false of an answer."""
        name = normalized(self.column)
        return name.startswith(("is_", "has_")) or name in ("correct", "hallucinated")

    def check_labels(self) -> None:
        """Rule 14: a label of 1, a hallucinated answer, agrees with the judgment next to it, and on average with a grade."""
        both = {key: row for key, row in self.rows.items() if row.score == row.score and row.label == row.label}
        choice = f"choose --score-column {self.column} or --score-column {self.label_column}"
        is_binary = {row.score for row in both.values()} <= {0, 1} and not _METRIC.search(normalized(self.column))
        for (question_id, _), row in both.items() if self.is_claim or is_binary else ():
            if row.score == (row.label if self.direction == CORRECT else 1 - row.label):
                raise InvalidInputError(
                    f"found {self.column} {row.score:g} and {self.label_column} {row.label:g} (1: hallucinated) for "
                    f"{escape_unprintable(question_id, 60)}, expected that they agree; {choice}"
                )
        found = [[row.score for row in both.values() if row.label == label] for label in (0, 1)]
        if not all(found) or len(both) < _MIN_LABELS:
            return
        right, hallucinated = (sum(scores) / len(scores) for scores in found)
        if (right < hallucinated) if self.direction == CORRECT else (right > hallucinated):
            raise UsageError(
                f"{self.path.name}: {self.label_column} and {self.column} contradict each other: of the answers with "
                f"label 1 (hallucinated) the mean is {hallucinated:g}, of those with 0 it is {right:g} (high: "
                f"{self.direction}); {choice}"
            )

    def join(self, other: "Scores") -> None:
        """Add the rows of another file."""
        facts = ((one.name, one.direction, one.sample_column is None) for one in (self, other))
        if len({*facts}) > 1:
            raise UsageError(
                f"{self.path} has {self.column} ({self.direction}), {other.path} {other.column} ({other.direction}); "
                "convert their folders one after the other with --scores"
            )
        for key, texts in other.questions.items():
            self.questions.setdefault(key, []).extend(texts)
        for key, row in other.rows.items():
            try:
                self.add(key, row)
            except InvalidInputError as error:
                raise error.with_location(source=str(other.path)) from None


def read_scores(path: Path, **chosen: str | None) -> Scores:
    """Read a scores file.

    Parameters
    ----------
    path : Path
        A table: CSV, TSV, JSON, JSON Lines, Parquet, .npy or .npz.
    **chosen : str or None
        `score_column`: by default the only one of `store.vocabulary.SCORES`, next to which `label` holds labels.
        `group_column`: by default GROUP_COLUMN, if the file has it.
        `score_direction`: meaning of a high score, CORRECT or HALLUCINATION; by default that of the column's name, or
        of its words.
        `id_column`: of the question ids; by default ID_COLUMN, or a usual other name.
        `name`: of the score in the store; a column of this name may be meant.

    Returns
    -------
    Scores

    Raises
    ------
    UsageError
        If the file does not exist, or column or direction are ambiguous.
    InvalidInputError
        If the content is invalid; names file, row and column.
    """
    try:
        with read_table(path) as table:
            scores = _columns(path, table, **chosen)
            header = {*table.header}
            others: dict[str, dict[str, str]] = {name: {} for name in other_id_columns(table.header, scores.id_column)}
            for position, row in enumerate(table.rows):
                try:
                    _check_late_columns(scores, row.keys() - header)
                    key, values = _row(scores, row)
                    scores.add(key, values)
                    for name, ids in list(others.items()):
                        if ids.setdefault(key[0], str(row.get(name))) != str(row.get(name)):
                            del others[name]  # it tells the answers to a question apart
                    text = row.get(scores.question_column) if scores.question_column is not None else None
                    if isinstance(text, str) and not _NO_QUESTION.fullmatch(text.strip()):
                        scores.questions.setdefault(key, []).append(text)
                except InvalidInputError as error:
                    raise InvalidInputError(f"row {position}: {error.reason}", field=error.field) from None
        if chosen.get("id_column") is None:
            _check_other_ids(scores, others)
        if len(scores.rows) > 1 and len({text for texts in scores.questions.values() for text in texts}) == 1:
            scores.questions.clear()  # the name of a task, or an instruction
        scores.check_labels()
        return scores
    except FileNotFoundError:
        raise UsageError(f"{path}: no such scores file") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except InvalidInputError as error:
        raise error.with_location(source=path.name) from None


def _columns(
    path: Path,
    table: ScoreTable,
    score_column: str | None = None,
    group_column: str | None = None,
    score_direction: str | None = None,
    id_column: str | None = None,
    name: str | None = None,
) -> Scores:
    """Return the scores of a table that has these columns, without its rows."""
    header = table.header
    found = f"found columns {', '.join(header)}" if header else "found no rows"
    ids = id_column or id_column_of(header)
    for given in filter(None, (id_column, score_column, group_column)):
        if given not in header:
            raise InvalidInputError(f"{found}, expected {given} among them")
    if ids is None:
        raise InvalidInputError(f"{found}, expected {ID_COLUMN} among them; --id-column names that of the ids")
    candidates = [score_column] if score_column else score_columns_of(header, name)
    if not candidates:
        expected = "a known name of scores, such as score, correct, accuracy, bleurt or hallucination, among them"
        flags = "--score-column names it" + ", --score-direction what a high value means" * (score_direction is None)
        raise InvalidInputError(f"{found}, expected {expected}; {flags}")
    if len(candidates) > 1:
        choices = " or ".join(f"--score-column {column}" for column in candidates)
        raise UsageError(f"{path.name}: found columns {' and '.join(candidates)}; choose {choices}")
    column, samples = candidates[0], sample_column_of(header, ids)
    direction = direction_in(header, column, score_direction)
    scores = Scores(path, column, direction or CORRECT, samples, id_column=ids)
    scores.group_column = group_column or column_of(header, GROUP_COLUMN) or GROUP_COLUMN
    scores.has_groups, scores.is_direction_known = scores.group_column in header, direction is not None
    if id_column is None:
        others = sorted({*header} - {ids, samples, column, group_column})
        scores.question_column = column_of(others, "question", *SYNONYMS["question"])
    if score_column is None and normalized(column) != "label":
        scores.label_column = column_of(header, "label")
    is_unknown = direction is None and normalized(column) not in WORD_COLUMNS
    if is_unknown or (score_direction is None and normalized(column) == "score" and _is_of_mistakes(path)):
        raise ambiguous_direction(column, f"{path.name}: ")
    return scores


def _is_of_mistakes(path: Path) -> bool:
    """Return whether the name of a file may make a high `score` that of a mistake: hallucination_scores.csv."""
    words = normalized(path.stem).split("_")
    return any(map(is_hallucination, words)) or not _OF_MISTAKES.isdisjoint(words)


def _check_other_ids(scores: Scores, others: dict[str, dict[str, str]]) -> None:
    """Refuse a second column of ids that gives the ids of the first one to other rows: only one of both is that of traces."""
    for name, ids in others.items():
        swapped = [(own, other) for own, other in ids.items() if other != own and other in ids]
        if swapped and len({*ids.values()}) == len(ids):
            own, other = swapped[0]
            raise UsageError(
                f"{scores.path.name}: a row has {scores.id_column} {own!r:.40} and {name} {other!r:.40}, which is another "
                f"row's {scores.id_column}; choose --id-column {scores.id_column} or --id-column {name}"
            )


def _check_late_columns(scores: Scores, names: set[str]) -> None:
    """Refuse columns that count and that the first rows, which are the header, do not have."""
    known = "label", "sample", normalized(scores.column), normalized(scores.group_column)
    names = {name for name in names - {scores.group_column} if normalized(name) in known}
    if names:
        raise InvalidInputError(f"found {min(names)}, which the first rows do not have; write it into the first row")


def _score(scores: Scores, value: Any) -> float:
    """Return the score in a cell: a number, or the word of a judge."""
    word = score_of_word(value, scores.direction if scores.is_direction_known else None) if type(value) is str else None
    if word is not None:
        return word
    score = score_value(value, scores.column)
    if not scores.is_direction_known and not math.isnan(score):
        raise ambiguous_direction(scores.column, f"{scores.path.name}: ")
    if scores.is_claim and not (math.isnan(score) or 0 <= score <= 1):
        raise InvalidInputError(f"found {score:g}, expected 0 to 1, or an empty cell", field=scores.column)
    return score


def _label(scores: Scores, value: Any) -> float:
    """Return the label next to a score: 0, 1 or the word of a judge; NaN without one."""
    try:
        return label_value(value.strip(" .!") if type(value) is str else value, "", HALLUCINATION, {})
    except InvalidInputError:
        raise InvalidInputError(
            f"found {value!r:.42} in {scores.label_column}, expected 1 (hallucinated) or 0; "
            f"--score-column {scores.column} uses the scores alone"
        ) from None


def _row(scores: Scores, row: dict[str, Any]) -> tuple[Key, ScoreRow]:
    """Return the key and the values of a row of the file."""
    group = group_text(one_value(row.get(scores.group_column), scores.group_column))
    score = _score(scores, one_value(row.get(scores.column), scores.column))
    label = math.nan if scores.label_column is None else _label(scores, row.get(scores.label_column))
    question = row.get(scores.id_column)
    sample = 0 if scores.sample_column is None else number(row.get(scores.sample_column), "sample")
    if not isinstance(question, str | int) or isinstance(question, bool):
        raise InvalidInputError(f"found {question!r:.42} in {scores.id_column}, expected an id")
    if not 0 <= sample < _MAX_SAMPLE:
        raise InvalidInputError(f"found sample {sample}, expected 0 to 2^31 - 1")
    return (str(question), sample), ScoreRow(score, group, label)
