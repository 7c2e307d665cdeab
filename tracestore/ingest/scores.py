"""Read scores files (CSV with question_id and a column of scores), and update the scores of a store."""

import csv
import dataclasses
import io
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tracestore.errors import InvalidInputError, UsageError
from tracestore.ingest.roles.keys import normalized
from tracestore.store.format.labels import (
    CORRECT,
    DEFAULT_SCORE_NAME,
    DEFAULT_THRESHOLD,
    HALLUCINATION,
    PREDICTION_COLUMNS,
    ScoreField,
    describe,
)
from tracestore.store.io.fsio import open_regular
from tracestore.store.read.columns import TraceValues
from tracestore.store.read.store import open_store
from tracestore.store.write.writer import StoreWriter

# The meaning of a high value, by column name. A column named "label" may mean either.
SCORE_COLUMNS = {
    **dict.fromkeys(("bleurt_score", "score", "correctness", "is_correct", "correct"), CORRECT),
    **dict.fromkeys(("hallucination_score", "p_hallucination", "hallucination", "is_hallucination"), HALLUCINATION),
    **dict.fromkeys(("hallucinated", "is_hallucinated", "has_hallucination"), HALLUCINATION),
    **dict.fromkeys(
        ("accuracy", "acc", "exact_match", "em", "f1", "f1_score", "bleurt", "bleu", "bleu_score"), CORRECT
    ),
    **dict.fromkeys(("rouge", "rouge_1", "rouge1", "rouge_2", "rouge2", "rouge_l", "rougel", "rouge_lsum"), CORRECT),
    **dict.fromkeys(("rouge_score", "rouge_l_score", "meteor", "bert_score", "bertscore"), CORRECT),
    **dict.fromkeys(("truthful", "is_truthful", "truthfulness", "factual", "faithful", "faithfulness"), CORRECT),
}
# Columns with the words of a judge. "yes" may have either meaning in them.
JUDGE_COLUMNS = ("verdict", "judgment", "judge", "judge_label")
ID_COLUMN, GROUP_COLUMN = "question_id", "group"
# Words of judges: whether the answer is correct; and those whose meaning is that of the column.
_WORDS = {
    **dict.fromkeys(("correct", "right", "accurate", "truthful", "factual", "faithful", "supported"), True),
    **dict.fromkeys(("incorrect", "wrong", "inaccurate", "untruthful", "unfaithful", "unsupported"), False),
    **dict.fromkeys(("hallucination", "hallucinated"), False),
}
_YES_OR_NO = {**dict.fromkeys(("yes", "true", "y", "t"), 1.0), **dict.fromkeys(("no", "false", "n", "f"), 0.0)}


def direction_of(column: str) -> str | None:
    """Return what a high value of a column or key of this name means; None if that is not known."""
    return SCORE_COLUMNS.get(normalized(column))


def score_of_word(text: str, direction: str | None) -> float | None:
    """Return 1 or 0 for a word of a judge, in the direction of its column; None for other texts.

    Examples
    --------
    >>> score_of_word("INCORRECT", "correct"), score_of_word("incorrect", "hallucination")
    (0.0, 1.0)
    """
    word = text.strip().strip(".!").lower()
    if word in _WORDS:
        return float(_WORDS[word] == (direction != HALLUCINATION))
    return None if direction is None else _YES_OR_NO.get(word)


def score_name(column: str) -> str:
    """Return the name under which a store holds the scores of a column."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", column).strip("_.-")[:64] or DEFAULT_SCORE_NAME


@dataclass
class Scores:
    """Scores and groups of a file by (question id, sample).

    The sample is 0 if the file has no `sample` column. A missing score is NaN, a missing
    group "".
    """

    path: Path
    column: str
    direction: str
    has_samples: bool
    values: dict[tuple[str, int], tuple[float, str]] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name under which a store holds the scores, unless another is chosen: that of the column."""
        return score_name(self.column)

    @property
    def score_field(self) -> ScoreField:
        """Meaning and source of the scores."""
        return ScoreField(self.direction, f"{self.path.name}, column {self.column}"[:1024])

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
        A CSV file with a header.
    score_column : str, optional
        Column of the scores; by default the only one of SCORE_COLUMNS in the file.
    group_column : str, optional
        Column of the groups; by default GROUP_COLUMN, if the file has it.
    score_direction : str, optional
        Meaning of a high score, CORRECT or HALLUCINATION; by default that of the column's
        name in SCORE_COLUMNS.
    id_column : str, optional
        Column of the question ids; by default ID_COLUMN.

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
        with io.TextIOWrapper(open_regular(path), "utf-8-sig", "surrogatepass", newline="") as file:
            rows = csv.reader(file, strict=True)
            header = [h.strip() for h in next(rows, [])]
            for name in (id_column or ID_COLUMN, score_column, group_column):
                if name is not None and name not in header:
                    found = ", ".join(header) or "an empty file"
                    advice = "; name the column of the ids with --id-column" if name == ID_COLUMN else ""
                    raise InvalidInputError(f"found columns {found}, expected {name} among them{advice}")
            column = score_column or _score_column(path.name, header)
            direction = score_direction or _direction(path.name, header, column)
            scores = Scores(path, column, direction, "sample" in header)
            for cells in rows:
                if any(cell.strip() for cell in cells):
                    try:
                        _add_row(scores, header, cells, id_column or ID_COLUMN, group_column or GROUP_COLUMN)
                    except InvalidInputError as error:
                        raise InvalidInputError(f"line {rows.line_num}: {error.reason}") from None
            return scores
    except FileNotFoundError:
        raise UsageError(f"{path}: no such scores file") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidInputError(f"not a CSV file: {error}", source=path.name) from None
    except InvalidInputError as error:
        raise error.with_location(source=path.name) from None


def _add_row(scores: Scores, header: list[str], cells: list[str], id_column: str, group_column: str) -> None:
    """Add the score and the group in a row of the file."""
    if len(cells) != len(header):
        raise InvalidInputError(f"found {len(cells)} cells, expected {len(header)}")
    row = dict(zip(header, cells, strict=True))
    text = row[scores.column].strip()
    try:
        score, sample = float(text or "nan"), int(row.get("sample", 0))
    except ValueError:
        raise InvalidInputError(f"found {text[:40]!r} in {scores.column}, expected a number") from None
    if not 0 <= sample < 2**31:
        raise InvalidInputError(f"found sample {sample}, expected 0 to 2^31 - 1")
    if math.isinf(score):
        raise InvalidInputError(f"found an infinite {scores.column}")
    group, key = row.get(group_column, "").strip(), (row[id_column], sample)
    known_score, known_group = scores.values.setdefault(key, (score, group))
    if math.isnan(known_score) and math.isnan(score):
        scores.values[key] = (score, group)
    elif known_score != score or known_group != group:
        found, expected = f"{scores.column} {score:g}", f"{known_score:g}"
        if known_score == score:
            found, expected = f"{group_column} {group!r}", repr(known_group)
        raise InvalidInputError(f"found a second {found} for question {key[0]!r}, expected {expected} as before")


def _score_column(name: str, header: list[str]) -> str:
    """Return the name of the only column of scores."""
    candidates = [c for c in SCORE_COLUMNS if c in header] or [c for c in ("label",) if c in header]
    if not candidates:
        found, expected = ", ".join(header), " or ".join(SCORE_COLUMNS)
        raise InvalidInputError(f"found columns {found}, expected {expected} among them")
    if len(candidates) > 1:
        raise UsageError(f"{name}: found columns {' and '.join(candidates)}; choose one with --score-column")
    return candidates[0]


def _direction(name: str, header: list[str], column: str) -> str:
    """Return the meaning of a high value of the column."""
    if column in SCORE_COLUMNS:
        return SCORE_COLUMNS[column]
    if column == "label" and tuple(header[: len(PREDICTION_COLUMNS)]) == PREDICTION_COLUMNS:
        return HALLUCINATION
    raise UsageError(
        f"{name}: a high {column} may mean a correct or a hallucinated answer; "
        "choose with --score-direction correct or hallucination"
    )


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
        updates: dict[int, TraceValues] = {}
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
        stored = writer.read_columns().score(name)
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
            labels=describe(stored, DEFAULT_THRESHOLD, field.direction),
        )
