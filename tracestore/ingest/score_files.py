"""Files of scores: their formats, the names of their columns, and which files next to the traces they are."""

import contextlib
import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracestore.errors import InvalidInputError, UsageError
from tracestore.ingest.containers.grouping import natural_key
from tracestore.ingest.containers.numpy_files import npy_column, npz_columns
from tracestore.ingest.containers.tables import MAX_BYTES, Table
from tracestore.ingest.discovery.tables_beside import NO_TABLES
from tracestore.ingest.exports.manifest import EXPORT_FILE
from tracestore.ingest.files.byte_source import map_file
from tracestore.ingest.roles.keys import (
    OTHER_NAMES,
    WORD_COLUMNS,
    known_name,
    normalized,
)
from tracestore.ingest.sources import SourceFile
from tracestore.store.format.labels import is_prediction
from tracestore.store.io.fsio import open_csv, open_regular
from tracestore.store.io.scratch import Scratch
from tracestore.store.vocabulary import PRIMARY_SCORES, SCORES

ID_COLUMN, GROUP_COLUMN = "question_id", "group"
SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".npy", ".npz")


def id_column_of(header: Sequence[str]) -> str | None:
    """Return the column of the question ids: question_id, or the first of its other names."""
    found = {normalized(name): name for name in reversed(header)}
    return next((found[name] for name in (ID_COLUMN, "question_ids", *OTHER_NAMES[ID_COLUMN]) if name in found), None)


def score_columns_of(header: Sequence[str]) -> list[str]:
    """Return the columns that may hold the scores; several are ambiguous."""
    found = {known_name(name): name for name in reversed(header)}
    known = [found[name] for name in SCORES if name in found]
    # Next to a column called score those of metrics are further scores, as in the files that extract writes.
    known = [name for name in known if known_name(name) in PRIMARY_SCORES] or known
    return known or [found[name] for name in WORD_COLUMNS if name in found][:1]


@dataclass
class ScoreTable:
    """The columns and rows of a file.

    Attributes
    ----------
    header : list of str
        Names of the columns.
    rows : iterator of (str, dict)
        Place of each row in the file, and its cells by the names of their columns.
    has_ids : bool
        False if the rows have no ids and are in the order of the traces.
    """

    header: list[str]
    rows: Iterator[tuple[str, dict[str, Any]]]
    has_ids: bool = True


@contextlib.contextmanager
def read_table(path: Path) -> Iterator[ScoreTable]:
    """Open the table of a file; its rows are read on request.

    Raises
    ------
    InvalidInputError
        If the file is not a table in the format of its suffix.
    """
    if path.suffix in (".npy", ".npz"):
        yield _arrays(path)
    elif path.suffix in (".json", ".jsonl", ".ndjson"):
        yield _json(path)
    else:
        with open_csv(open_regular(path), "utf-8-sig") as file:
            first = file.readline(MAX_BYTES)
            file.seek(0)
            rows = csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else _delimiter(first), strict=True)
            header = [name.strip() for name in next(rows, [])]
            yield ScoreTable(header, _cells(rows, header))


def _delimiter(header: str) -> str:
    return max(",;\t", key=header.count)


def _cells(rows: Any, header: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for cells in rows:
        if any(cell.strip() for cell in cells):
            if len(cells) != len(header):
                raise InvalidInputError(f"line {rows.line_num}: found {len(cells)} cells, expected {len(header)}")
            yield f"line {rows.line_num}", dict(zip(header, cells, strict=True))


def _json(path: Path) -> ScoreTable:
    """Return the rows of JSON Lines, of a list of objects, of a dict by id, or of a list of numbers in order."""
    if path.suffix == ".json":
        with open_regular(path) as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise InvalidInputError(f"found more than {MAX_BYTES:,} bytes")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"not JSON: {' '.join(str(error).split())[:100]}") from None
        items = list(value.values()) if isinstance(value, dict) else value
        if isinstance(items, list) and items and not any(isinstance(item, dict | list) for item in items):
            name, ids = _column_of_file(path), list(value) if isinstance(value, dict) else None
            return _columns({name: items} | ({} if ids is None else {ID_COLUMN: ids}))
    table = Table(path)
    header = list(dict.fromkeys(key for k in range(min(len(table), 100)) for key in table[k]))
    return ScoreTable(header, ((f"row {k}", table[k]) for k in range(len(table))))


def _arrays(path: Path) -> ScoreTable:
    """Return the arrays of NumPy as columns."""
    if path.suffix == ".npy":
        arrays = {_column_of_file(path): npy_column(path).whole()}
    else:
        arrays = {name: column.whole() for name, column in npz_columns(map_file(path), Scratch()).items()}
    vectors = {name: array.tolist() for name, array in arrays.items() if array.ndim == 1}
    if not vectors:
        raise InvalidInputError("found no array (N,) of scores")
    return _columns(vectors)


def _columns(columns: dict[str, list[Any]]) -> ScoreTable:
    counts = {len(values) for values in columns.values()}
    if len(counts) > 1:
        raise InvalidInputError(f"found columns of {', '.join(map(str, sorted(counts)))} rows, expected equally many")
    rows = zip(*columns.values(), strict=True)
    places = ((f"row {k}", dict(zip(columns, row, strict=True))) for k, row in enumerate(rows))
    return ScoreTable(list(columns), places, has_ids=id_column_of(list(columns)) is not None)


def _column_of_file(path: Path) -> str:
    """Return the name of the only column of a file: the name of a score at the end of its stem, else the stem."""
    stem = normalized(path.stem)
    names = sorted((*SCORES, *WORD_COLUMNS), key=len, reverse=True)
    return next((n for n in names if f"_{stem}".endswith((f"_{n}", f"_{n}s"))), path.stem)


def find_score_files(arguments: list[Path], sources: list[SourceFile]) -> list[Path]:
    """Return the scores files next to the traces: at most one in each folder.

    They are the only *scores*.csv directly in an argument; else those in the folders of the sources; else the other
    files that have ids and scores by the names of their columns, or a score in their own name. Files that train,
    predict and benchmark write are none: what a detector predicts is no ground truth. Exports bring their own scores.

    Raises
    ------
    UsageError
        If a folder has several.
    """
    sources = [source for source in sources if source.export is None]
    tops = [path for path in arguments if path.is_dir() and not (path / EXPORT_FILE).is_file()]
    below = sorted({source.path.parent for source in sources} - set(tops), key=lambda p: natural_key(str(p)))
    used = {path for source in sources for path in (source.path, *source.parts) if path.suffix != ".npy"}
    used |= {path for source in sources for path in source.parts}
    used |= {source.table.path for source in sources if source.table is not None}
    for folders in (tops, [f for f in below if any(f.is_relative_to(top) for top in tops)]):
        for is_by_name in (True, False):
            found = []
            for folder in folders:
                names = folder.glob("*scores*.csv") if is_by_name else folder.iterdir()
                files = sorted(p for p in names if p.is_file() and p not in used)
                found.append([p for p in files if (not _has_predictions(p) if is_by_name else _has_scores(p))])
            if any(found):
                several = [p for files in found if len(files) > 1 for p in files]
                several = several or ([p for files in found for p in files] if folders is tops else [])
                if len(several) > 1:
                    listing = " or ".join(f"--scores {path}" for path in several[:8])
                    raise UsageError(f"several scores files: {', '.join(map(str, several))}; choose {listing}")
                return [p for files in found for p in files]
    return []


def _has_scores(path: Path) -> bool:
    """Return whether a file has ids and scores by the names of its columns, or a score in its own name."""
    if path.suffix not in SUFFIXES or path.name in NO_TABLES or path.name.startswith("."):
        return False
    if path.suffix in (".npy", ".npz"):
        return _column_of_file(path) != path.stem or normalized(path.stem) in (*SCORES, *WORD_COLUMNS)
    try:
        with read_table(path) as table:
            has_ids = table.has_ids and id_column_of(table.header) is not None
            return has_ids and not is_prediction(table.header) and bool(score_columns_of(table.header))
    except (InvalidInputError, OSError, ValueError, csv.Error):
        return False


def _has_predictions(path: Path) -> bool:
    """Return whether a CSV file has the columns of a file of predictions."""
    try:
        with read_table(path) as table:
            return is_prediction(table.header)
    except (InvalidInputError, UsageError, OSError, ValueError, csv.Error):
        return False
