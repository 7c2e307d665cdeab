"""Files of scores: their formats, the names of their columns, and which files next to the traces they are."""

import contextlib
import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from tracestore.errors import InvalidInputError, UsageError
from tracestore.ingest.execute.values import key_text
from tracestore.ingest.exports import EXPORT_FILE
from tracestore.ingest.readers.opening import open_tree
from tracestore.ingest.readers.tree import Array, Group, Items, Value
from tracestore.store.format import labels
from tracestore.store.io.fsio import open_regular
from tracestore.store.vocabulary import PRIMARY_SCORES, SCORES, SYNONYMS
from tracestore.store.vocabulary import direction_of as direction_of_name

ID_COLUMN, GROUP_COLUMN = "question_id", "group"
# Options of commands that choose columns.
COLUMN_OPTIONS = ("id_column", "score_column", "score_direction", "group_column")
# Columns of the question ids, by their normalized names; the first one of a table counts.
_ID_COLUMNS = (ID_COLUMN, *(name.replace(" ", "_") for name in SYNONYMS[ID_COLUMN]))
_QUESTION_IDS = (ID_COLUMN, "question_ids", "question_idx", "qid", "qids")
_OF_IDS = ("_id", "_ids", "_idx", "_index", "_uid")
# Columns whose words have a meaning, and whose numbers do not. They count if there is none of SCORES.
WORD_COLUMNS = ("verdict", "judgment", "judge", "judge_label", "label", "labels")
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[\s\-]+")
_JUDGMENT = re.compile(r"^is_|^has_|hallucinate[sd]$|_correct$|^correct_prediction$")
# Words in front of the name of a score in that of a file: those that leave the meaning of "score", as semantic_entropy does
# not, and those that change the meaning of other names.
_OF_SCORE = frozenset(("my", "all", "eval", "evaluation", "test", "train", "val", "dev", "answer", "truth", "ground"))
_CHANGING = frozenset(
    ("not", "no", "non", "un", "in", "anti", "counter", "without", "wrong", "false", "error", "num", "number", "count")
)
_TABLES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson")
_MAX_HEADER_ROWS = 100  # whose keys are the columns of a table


@lru_cache(maxsize=1 << 14)
def normalized(name: str) -> str:
    """Return a name in lower case, with underscores between its words.

    Examples
    --------
    >>> normalized("hiddenStates"), normalized("QUESTION_ID"), normalized("Exact Match")
    ('hidden_states', 'question_id', 'exact_match')
    """
    return _WORD.sub("_", name.strip()).lower()


def score_name(column: str) -> str:
    """Return the name under which a store holds the scores of a column."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", column).strip("_.-")[:64] or labels.DEFAULT_SCORE_NAME


def direction_of(column: str) -> str | None:
    """Return what a high value of a column or key of this name means; None if that is not known."""
    return direction_of_name(normalized(column))


def ambiguous_direction(column: str, where: str = "") -> UsageError:
    """Return the error for a column or key whose name does not tell the direction; the message begins with `where`."""
    return UsageError(
        f"{where}a high {column} may mean a correct or a hallucinated answer; "
        "choose --score-direction correct or --score-direction hallucination"
    )


def _by_name(header: Sequence[str]) -> dict[str, str]:
    """Return the columns by their normalized names; one that is spelled so counts before one that is not."""
    return {normalized(name): name for name in reversed(header)} | {name: name for name in header}


def column_of(header: Sequence[str], *names: str) -> str | None:
    """Return the column with the first of some normalized names that one has."""
    found = _by_name(header)
    return next((found[name] for name in names if name in found), None)


def id_column_of(header: Sequence[str]) -> str | None:
    """Return the column of the question ids: question_id, or the first of its other names."""
    return column_of(header, *_ID_COLUMNS)


def other_id_columns(header: Sequence[str], id_column: str) -> list[str]:
    """Return the columns that may be those of the ids as well as a column; the ends of names tell less than question_id."""
    names = {name: normalized(name) for name in header if name != id_column}
    ends = () if normalized(id_column) in _QUESTION_IDS else _OF_IDS
    return [name for name, text in names.items() if text in _ID_COLUMNS or text.endswith(ends)]


def sample_column_of(header: Sequence[str], id_column: str | None) -> str | None:
    """Return the column of the numbers of answers, next to that of the question ids."""
    # Other names, such as sample_idx and answer_idx, are also those of rows and of choices.
    return column_of([name for name in header if name != id_column], "sample")


def tested_columns_of(header: Sequence[str]) -> list[str]:
    """Return the labels and the probabilities of a hallucination in a table of predictions that train writes."""
    if tuple(header[: len(labels.PREDICTION_COLUMNS)]) != labels.PREDICTION_COLUMNS:
        return []
    return [name for name in header[labels.PREDICTION_COLUMNS.index("label") :] if name != labels.STORE_COLUMN]


def score_columns_of(header: Sequence[str], name: str | None = None) -> list[str]:
    """Return the columns that may hold the scores, one that is called `name` included; several are ambiguous."""
    found = _by_name(header)
    known = [found[name] for name in SCORES if name in found]
    known += [column for name, column in found.items() if name not in SCORES and direction_of_name(name)]
    # Next to a column called score those of metrics are further scores, as in the files that extract writes.
    # A judgment is none of them.
    if any(normalized(name) in PRIMARY_SCORES for name in known):
        known = [name for name in known if normalized(name) in PRIMARY_SCORES or _JUDGMENT.search(normalized(name))]
    known = known or tested_columns_of(header) or [found[name] for name in WORD_COLUMNS if name in found][:1]
    named = {normalized(score_name(column)): column for column in reversed(found.values())}.get(normalized(name or ""))
    return [*dict.fromkeys(filter(None, (*known, named)))]


class ScoreRow(NamedTuple):
    """The score, group and label (1: hallucinated) of a trace; NaN or "" if they are missing."""

    score: float = math.nan
    group: str = ""
    label: float = math.nan


class ScoreTable(NamedTuple):
    """The columns and rows of a file.

    Attributes
    ----------
    header : list of str
        Names of the columns.
    rows : iterator of dict
        The cells of each row by the names of their columns.
    """

    header: list[str]
    rows: Iterator[dict[str, Any]]


@contextlib.contextmanager
def read_table(path: Path) -> Iterator[ScoreTable]:
    """Open the table of a file; its rows are read on request.

    Raises
    ------
    InvalidInputError
        If the file is not a table in the format of its suffix.
    """
    open_regular(path).close()  # raises what the operating system says about the file
    with open_tree(path) as root:
        if not isinstance(root, Group | Items):
            raise InvalidInputError(f"found values without ids; write a table with the columns {ID_COLUMN} and score")
        yield _table(root, path)


def _table(root: Group | Items, path: Path) -> ScoreTable:
    """Return the rows of a tree: rows of objects, objects by id, values by id, or columns."""
    if isinstance(root, Items):
        return _rows(root)
    values = dict(root)
    rows = {key: value for key, value in values.items() if isinstance(value, Group)}
    if rows and len(rows) == len(values):
        return _rows({ID_COLUMN: key} | dict(row) for key, row in rows.items())
    kinds = {type(value) for value in values.values()}
    if values and kinds <= {str, int, float, bool, type(None)}:
        return _columns({_column_of_file(path): list(values.values()), ID_COLUMN: list(values)})
    lists = [value for value in values.values() if isinstance(value, Items) and not value.is_stream]
    if len(lists) == 1 and all(isinstance(row, Group) for row in lists[0]):
        return _rows(lists[0])
    found = {key: column for key, value in values.items() if (column := _column(value)) is not None}
    if not found:
        raise InvalidInputError("found no array (N,) of scores")
    return _columns(found)


def _rows(rows: Iterable[Any]) -> ScoreTable:
    """Return a table of rows with names of columns; those of the first rows are its header."""

    def checked() -> Iterator[dict[str, Any]]:
        for k, row in enumerate(rows):
            if not isinstance(row, Group | dict):
                raise InvalidInputError(f"row {k}: found {type(row).__name__}, expected an object")
            yield {str(name).strip(): value for name, value in row.items()}

    found = checked()
    first = list(islice(found, _MAX_HEADER_ROWS))
    return ScoreTable(list(dict.fromkeys(name for row in first for name in row)), chain(first, found))


def _column(value: Value) -> list[Any] | None:
    """Return the values of an array (N,) or of a list of texts and numbers; None for every other value."""
    if isinstance(value, Array):
        return value.read().tolist() if value.ndim == 1 else None
    if isinstance(value, Items) and not value.is_stream:
        found = list(value)
        return found if not any(isinstance(item, Group | Items | Array) for item in found) else None
    return None


def _columns(columns: dict[str, list[Any]]) -> ScoreTable:
    counts = {len(values) for values in columns.values()}
    if len(counts) > 1:
        raise InvalidInputError(f"found columns of {', '.join(map(str, sorted(counts)))} rows, expected equally many")
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    return ScoreTable(list(columns), rows)


def _column_of_file(path: Path) -> str:
    """Return the name of the only column of a file: the name of a score at the end of its stem, else the stem.

    The stem also counts if words in front may change what a high score means.
    """
    for name in sorted((*SCORES, *WORD_COLUMNS), key=len, reverse=True):
        if found := re.fullmatch(rf"(|.*[_.]){name}s?", normalized(path.stem)):
            words = set(re.findall("[a-z]+", found[1]))
            return path.stem if (words - _OF_SCORE if name == "score" else words & _CHANGING) else name
    return path.stem


class FoundFiles(NamedTuple):
    """The scores files among the files of a conversion.

    Attributes
    ----------
    scores : list of Path
        Those that are read.
    unread : list of Path
        Other files of such a name, and predictions of detectors, which are no ground truth.
    """

    scores: list[Path]
    unread: list[Path]


def is_named_scores(path: PurePath) -> bool:
    """Return whether the name of a file is that of scores: *scores*.csv or *scores*.tsv."""
    return path.match("*scores*.csv") or path.match("*scores*.tsv")


def find_score_files(arguments: list[Path], files: Sequence[Path], named: str | None = None) -> FoundFiles:
    """Return the scores files among some files: at most one in each folder.

    They are the only *scores*.csv or .tsv directly in an argument; else those in the folders below. Files that train, predict
    and benchmark write are none: what a detector predicts is no ground truth. Exports bring their own scores.

    Parameters
    ----------
    arguments : list of Path
        The files and folders that the user named.
    files : sequence of Path
        The files in them.
    named : str, optional
        The scores file that the user named, instead of those.

    Raises
    ------
    UsageError
        If a folder has several.
    """
    unread = [p for p in files if p.suffix in (".csv", ".tsv") and _has_predictions(p)]
    found = [p for p in files if is_named_scores(p) and p not in unread and not (p.parent / EXPORT_FILE).is_file()]
    if named is not None:
        return FoundFiles([Path(named)], [p for p in (*found, *unread) if p != Path(named)])
    chosen = _chosen(found, arguments)
    return FoundFiles(chosen, [*(p for p in found if p not in chosen), *unread])


def _chosen(found: list[Path], arguments: list[Path]) -> list[Path]:
    """Return the scores files directly in the folders that the user named, else all; UsageError for several."""
    tops = {*arguments}
    at_top = [path for path in found if path.parent in tops]
    chosen = at_top or found
    folders = [path.parent for path in chosen]
    if several := at_top[:8] if len(at_top) > 1 else [p for p in chosen if folders.count(p.parent) > 1][:8]:
        listing = " or ".join(f"--scores {path}" for path in several)
        raise UsageError(f"several scores files: {', '.join(map(str, several))}; choose {listing}")
    return chosen


def direction_in(header: Sequence[str], column: str, stated: str | None) -> str | None:
    """Return what a high value of a column means: of predictions a hallucination, else what is stated or its name says."""
    if column not in tested_columns_of(header):
        return stated or direction_of(column)
    if stated == labels.CORRECT:
        raise UsageError(f"{column} of predictions is high for hallucinations, not for correct answers")
    return labels.HALLUCINATION


def scores_advice(path: Path, ids: Callable[[], Container[str]]) -> str | None:
    """Return the flags that take the scores of a table with a column of scores, and of ids of traces; None for others."""
    if path.suffix not in _TABLES:
        return None
    columns: list[str] = []
    with contextlib.suppress(InvalidInputError, OSError), read_table(path) as table:
        own = id_column_of(table.header)
        found = [] if own is None else score_columns_of(table.header)
        known = ids() if found else ()
        columns = found if any(key_text(row.get(own or "")) in known for row in table.rows) else []
    if not columns:
        return None
    column = f" --score-column {columns[0]}" if len(columns) > 1 else ""
    direction = " --score-direction correct or hallucination" * (normalized(columns[0]) in ("label", "labels"))
    return f"--scores {path}{column}{direction}"


def _has_predictions(path: Path) -> bool:
    """Return whether a CSV file has the columns of a file of predictions."""
    with contextlib.suppress(InvalidInputError, UsageError, OSError), read_table(path) as table:
        return labels.is_prediction(table.header)
    return False
