"""Read scores files (CSV with question_id and a column of scores), and update the scores of a store."""

import csv
import io
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tracestore.errors import InvalidInputError, UsageError
from tracestore.store.format.labels import CORRECT, DEFAULT_THRESHOLD, HALLUCINATION, PREDICTION_COLUMNS, describe
from tracestore.store.io.fsio import open_regular
from tracestore.store.read.store import open_store
from tracestore.store.write.writer import StoreWriter

if TYPE_CHECKING:
    from _csv import Reader as CsvReader

# The meaning of a high value, by column name. A column named "label" may mean either.
SCORE_COLUMNS = {
    **dict.fromkeys(("bleurt_score", "score", "correctness", "is_correct", "correct"), CORRECT),
    **dict.fromkeys(("hallucination_score", "p_hallucination", "hallucination", "is_hallucination"), HALLUCINATION),
}
GROUP_COLUMN = "group"


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
    values: dict[tuple[str, int], tuple[float, str]] = field(default_factory=dict)

    def lookup(self, question_id: str, sample: int = 0) -> tuple[float, str]:
        """Return the score (NaN if missing) and group of a trace."""
        return self.values.get((question_id, sample if self.has_samples else 0), (math.nan, ""))


def read_scores(
    path: Path, column: str | None = None, group_column: str | None = None, direction: str | None = None
) -> Scores:
    """Read a scores file.

    Parameters
    ----------
    path : Path
        A CSV file with a header.
    column : str, optional
        Column of the scores; by default the only one of SCORE_COLUMNS in the file.
    group_column : str, optional
        Column of the groups; by default GROUP_COLUMN, if the file has it.
    direction : str, optional
        Meaning of a high score, CORRECT or HALLUCINATION; by default that of the column's
        name in SCORE_COLUMNS.

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
    name = path.name
    if not path.exists():
        raise UsageError(f"{path}: no such scores file")
    if not path.is_file():
        raise UsageError(f"{path}: not a regular file")
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
    positions = {h: k for k, h in enumerate(header)}
    group_name = group_column or GROUP_COLUMN
    scores = Scores(path, chosen, direction, "sample" in positions)
    for row in rows:
        if not any(cell.strip() for cell in row):
            continue
        where = f"line {rows.line_num}"
        if len(row) != len(header):
            raise InvalidInputError(f"{where}: found {len(row)} cells, expected {len(header)}", source=name)
        question_id = row[positions["question_id"]]
        text = row[positions[chosen]].strip()
        try:
            score = float(text) if text else math.nan
            sample = int(row[positions["sample"]]) if scores.has_samples else 0
        except ValueError:
            raise InvalidInputError(
                f"{where}: found {text[:40]!r} in {chosen}, expected a number", source=name
            ) from None
        if not 0 <= sample < 2**31:
            raise InvalidInputError(f"{where}: found sample {sample}, expected 0 to 2^31 - 1", source=name)
        if math.isinf(score):
            raise InvalidInputError(f"{where}: found an infinite {chosen}", source=name)
        group = row[positions[group_name]].strip() if group_name in positions else ""
        known = scores.values.get((question_id, sample))
        if known is not None and known != (score, group) and not (math.isnan(known[0]) and math.isnan(score)):
            found, expected = f"{chosen} {score:g}", f"{known[0]:g}"
            if known[0] == score:
                found, expected = f"{group_name} {group!r}", repr(known[1])
            raise InvalidInputError(
                f"{where}: found a second {found} for question {question_id!r}, expected {expected} as before",
                source=name,
            )
        scores.values[question_id, sample] = (score, group)
    return scores


def _column(name: str, header: list[str], column: str | None) -> str:
    """Return the name of the column of the scores."""
    found = ", ".join(header)
    if column is not None:
        if column not in header:
            raise InvalidInputError(f"found columns {found}, expected {column} among them", source=name)
        return column
    candidates = [c for c in SCORE_COLUMNS if c in header] or [c for c in ("label",) if c in header]
    if not candidates:
        raise InvalidInputError(f"found columns {found}, expected {' or '.join(SCORE_COLUMNS)} among them", source=name)
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
    score_direction: str
    labels: str


def update_scores(path: str | Path, scores: Scores) -> ScoreReport:
    """Set the scores and groups of the traces of a store, and commit.

    Parameters
    ----------
    path : str or Path
        The store: a folder or a URL of an object store.
    scores : Scores
        If it has no samples, a score applies to every sample of its question.

    Returns
    -------
    ScoreReport

    Raises
    ------
    UsageError
        If there is no store.
    """
    # Open first: the writer would create a missing store.
    open_store(path).close()
    with StoreWriter(path) as writer:
        columns = writer.read_columns()
        updates, unknown = {}, 0
        by_id: dict[str, list[int]] = {}
        if not scores.has_samples:
            for index in range(len(columns)):
                by_id.setdefault(writer.index.question_id(index), []).append(index)
        for (question_id, sample), (score, group) in scores.values.items():
            found = writer.index.find(question_id, sample)
            indices = by_id.get(question_id, []) if not scores.has_samples else [found] if found >= 0 else []
            unknown += not indices
            for index in indices:
                if not (math.isnan(score) and not group):
                    updates[index] = (score, math.nan, group or None)
        replaced = {index for index, (score, _, _) in updates.items() if not math.isnan(score)}
        if replaced:
            writer.set_score_direction(scores.direction, replaced)
        writer.update_values(updates)
        writer.commit()
        stored, direction = writer.read_columns().scores, writer.attributes.score_direction or CORRECT
        return ScoreReport(
            store=str(path),
            num_updated=len(updates),
            num_scored=writer.manifest.num_scored,
            num_traces=writer.manifest.num_traces,
            num_scores_without_trace=unknown,
            generation=writer.manifest.generation,
            score_direction=direction,
            labels=describe(stored, DEFAULT_THRESHOLD, direction),
        )
