"""Scores files: CSV with question_id and a score."""

import csv
import io
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tracestore.errors import InvalidInputError, UsageError
from tracestore.store.format.labels import CORRECT, HALLUCINATION, PREDICTION_COLUMNS
from tracestore.store.io.fsio import open_regular

if TYPE_CHECKING:
    from _csv import Reader as CsvReader

# What a high value of a column says of an answer. A bare "label" may say either.
SCORE_COLUMNS = {
    **dict.fromkeys(("bleurt_score", "score", "correctness", "is_correct", "correct"), CORRECT),
    **dict.fromkeys(("hallucination_score", "p_hallucination", "hallucination", "is_hallucination"), HALLUCINATION),
}
GROUP_COLUMN = "group"


@dataclass
class Scores:
    """(score, label, group) by question id, or by (question id, sample) where the file
    has a `sample` column. NaN and "" where missing."""

    path: Path
    column: str
    direction: str
    has_samples: bool
    values: dict[tuple[str, int], tuple[float, str]] = field(default_factory=dict)

    def of(self, question_id: str, sample: int = 0) -> tuple[float, str]:
        """Score (NaN where the file has none) and group of a trace."""
        return self.values.get((question_id, sample if self.has_samples else 0), (math.nan, ""))


def read_scores(
    path: Path, column: str | None = None, group_column: str | None = None, direction: str | None = None
) -> Scores:
    """Read a scores file.

    Parameters
    ----------
    path
        A CSV file with a header.
    column
        Of the score; by default the one of SCORE_COLUMNS that is there.
    group_column
        By default GROUP_COLUMN, where there is one.
    direction
        What a high score says, CORRECT or HALLUCINATION; by default what SCORE_COLUMNS says.

    Raises
    ------
    UsageError
        Where there is no such file, or several columns may be meant, or either direction.
    InvalidInputError
        Where it does not hold what it must, naming file, line and column.
    """
    name = path.name
    if not path.exists():
        raise UsageError(f"{path}: no such scores file")
    if not path.is_file():
        raise UsageError(f"{path}: not a file of scores")
    try:
        with io.TextIOWrapper(open_regular(path), "utf-8-sig", "surrogatepass", newline="") as file:
            rows = csv.reader(file, strict=True)
            header = [h.strip() for h in next(rows, [])]
            return _parse(path, rows, header, column, group_column, direction)
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidInputError(f"not a CSV file: {error}", source=name) from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def _parse(
    path: Path,
    rows: "CsvReader",
    header: list[str],
    column: str | None,
    group_column: str | None,
    direction: str | None,
) -> Scores:
    name = path.name
    found = ", ".join(header) or "an empty file"
    if "question_id" not in header:
        raise InvalidInputError(f"found columns {found}, expected question_id among them", source=name)
    chosen = _column(name, header, column)
    direction = direction or _direction(name, header, chosen)
    if group_column is not None and group_column not in header:
        raise InvalidInputError(f"found columns {found}, expected {group_column} among them", source=name)
    place = {h: k for k, h in enumerate(header)}
    group_at = place.get(group_column or GROUP_COLUMN)
    scores = Scores(path, chosen, direction, "sample" in place)
    for row in rows:
        if not row or not any(cell.strip() for cell in row):
            continue
        where = f"line {rows.line_num}"
        if len(row) != len(header):
            raise InvalidInputError(f"{where}: found {len(row)} cells, expected {len(header)}", source=name)
        question_id = row[place["question_id"]]
        text = row[place[chosen]].strip()
        try:
            score = float(text) if text else math.nan
            sample = int(row[place["sample"]]) if scores.has_samples else 0
        except ValueError:
            raise InvalidInputError(
                f"{where}: found {text[:40]!r} in {chosen}, expected a number", source=name
            ) from None
        if not 0 <= sample < 2**31:
            raise InvalidInputError(f"{where}: found sample {sample}, expected 0 or more, below 2^31", source=name)
        if math.isinf(score):
            raise InvalidInputError(f"{where}: found an infinite {chosen}", source=name)
        group = "" if group_at is None else row[group_at].strip()
        key = (question_id, sample)
        before = scores.values.get(key)
        if (
            before is not None
            and (before[0], before[1]) != (score, group)
            and not (math.isnan(before[0]) and math.isnan(score))
        ):
            second = f"{chosen} {score:g}", f"{before[0]:g}"
            if before[0] == score:
                second = f"{group_column or GROUP_COLUMN} {group!r}", repr(before[1])
            raise InvalidInputError(
                f"{where}: found a second {second[0]} for question {question_id!r}, expected {second[1]} as before",
                source=name,
            )
        scores.values[key] = (score, group)
    return scores


def _column(name: str, header: list[str], column: str | None) -> str:
    """The column of the scores."""
    found = ", ".join(header)
    if column is not None:
        if column not in header:
            raise InvalidInputError(f"found columns {found}, expected {column} among them", source=name)
        return column
    candidates = [c for c in SCORE_COLUMNS if c in header] or [c for c in ("label",) if c in header]
    if not candidates:
        raise InvalidInputError(f"found columns {found}, expected {' or '.join(SCORE_COLUMNS)} among them", source=name)
    if len(candidates) > 1:
        raise UsageError(f"{name}: found columns {' and '.join(candidates)}: choose one with --score-column")
    return candidates[0]


def _direction(name: str, header: list[str], column: str) -> str:
    """What a high value of the column says."""
    if column in SCORE_COLUMNS:
        return SCORE_COLUMNS[column]
    if column == "label" and tuple(header[: len(PREDICTION_COLUMNS)]) == PREDICTION_COLUMNS:
        return HALLUCINATION
    raise UsageError(
        f"{name}: a high {column} may say that an answer is right or that it is hallucinated: "
        "give --score-direction correct or hallucination"
    )
