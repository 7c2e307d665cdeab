"""Scores files: CSV with question_id and a score."""

import csv
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tracestore.errors import InputRefusedError, UsageError

if TYPE_CHECKING:
    from _csv import Reader as CsvReader

SCORE_COLUMNS = ("bleurt_score", "score", "hallucination_score")
GROUP_COLUMN = "group"


@dataclass
class Scores:
    """(score, label, group) by question id, or by (question id, sample) where the file
    has a `sample` column. NaN and "" where missing."""

    path: Path
    column: str
    has_samples: bool
    values: dict[tuple[str, int], tuple[float, str]] = field(default_factory=dict)

    def of(self, question_id: str, sample: int = 0) -> tuple[float, str]:
        """Score (NaN where the file has none) and group of a trace."""
        return self.values.get((question_id, sample if self.has_samples else 0), (math.nan, ""))


def read_scores(path: Path, column: str | None = None, group_column: str | None = None) -> Scores:
    """Reads a scores file: the score from `column`, by default the first of SCORE_COLUMNS, the group
    from `group_column`, by default GROUP_COLUMN where there is one. UsageError where there is none, InputRefusedError where it
    does not hold what it must, naming file, line and column."""
    name = path.name
    if not path.exists():
        raise UsageError(f"{path}: no such scores file")
    if not path.is_file():
        raise UsageError(f"{path}: not a file of scores")
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="surrogatepass") as file:
            rows = csv.reader(file, strict=True)
            header = [h.strip() for h in next(rows, [])]
            return _parse(path, rows, header, column, group_column)
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputRefusedError(f"not a CSV file: {error}", source=name) from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def _parse(path: Path, rows: "CsvReader", header: list[str], column: str | None, group_column: str | None) -> Scores:
    name = path.name
    found = ", ".join(header) or "an empty file"
    if "question_id" not in header:
        raise InputRefusedError(f"found columns {found}, expected question_id among them", source=name)
    wanted = (column,) if column is not None else SCORE_COLUMNS
    chosen = next((c for c in wanted if c in header), None)
    if chosen is None:
        raise InputRefusedError(f"found columns {found}, expected {' or '.join(wanted)} among them", source=name)
    if group_column is not None and group_column not in header:
        raise InputRefusedError(f"found columns {found}, expected {group_column} among them", source=name)
    place = {h: k for k, h in enumerate(header)}
    group_at = place.get(group_column or GROUP_COLUMN)
    scores = Scores(path, chosen, "sample" in place)
    for row in rows:
        if not row or not any(cell.strip() for cell in row):
            continue
        where = f"line {rows.line_num}"
        if len(row) != len(header):
            raise InputRefusedError(f"{where}: found {len(row)} cells, expected {len(header)}", source=name)
        question_id = row[place["question_id"]]
        text = row[place[chosen]].strip()
        try:
            score = float(text) if text else math.nan
            sample = int(row[place["sample"]]) if scores.has_samples else 0
        except ValueError:
            raise InputRefusedError(
                f"{where}: found {text[:40]!r} in {chosen}, expected a number", source=name
            ) from None
        if not 0 <= sample < 2**31:
            raise InputRefusedError(f"{where}: found sample {sample}, expected 0 or more, below 2^31", source=name)
        if math.isinf(score):
            raise InputRefusedError(f"{where}: found an infinite {chosen}", source=name)
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
            raise InputRefusedError(
                f"{where}: found a second {second[0]} for question {question_id!r}, expected {second[1]} as before",
                source=name,
            )
        scores.values[key] = (score, group)
    return scores
