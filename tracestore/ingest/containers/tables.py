"""Tables next to containers: JSON, JSON Lines or CSV files with the texts and numbers of traces."""

import contextlib
import csv
import hashlib
import io
import itertools
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from tracestore.errors import InvalidInputError
from tracestore.ingest.containers import arrow_files
from tracestore.ingest.containers.keys import ID_KEYS, SAMPLE_NAMES, split_sample
from tracestore.ingest.files.byte_source import check_regular, map_file
from tracestore.ingest.layouts.records import rows_of_json, with_texts
from tracestore.ingest.layouts.rows import id_column
from tracestore.ingest.roles.keys import OTHER_NAMES, QUESTIONS_AND_ANSWERS
from tracestore.store.format import schema
from tracestore.store.io.fsio import MAX_FIELD_BYTES

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
# A table that is parsed as a whole; of JSON Lines, only one line at a time is.
MAX_BYTES = MAX_LINE_BYTES = 64 << 20
# Columns that name the file of a trace.
_FILE_KEYS: tuple[str, ...] = ("file", "filename", "file_name", "path", "file_path", "filepath")
_FILE_KEYS += ("npz", "npy", "hidden_states_path", "shard")
# Columns that number the traces of one file.
_ROWS = ("row", "row_index", "row_idx", "row_id", "index_in_file", "index_in_shard", "position")
_ROW_KEYS = (*_ROWS, "index", "idx")
_VECTOR = re.compile(r"\[?(?:\s*-?\d+\.\d*(?:e[-+]?\d+)?(?=[\s\]]|$)){3,}\s*\]?")
_NUMBER = re.compile(r"-?\d+(?:\.\d*)?(?:e[-+]?\d+)?", re.IGNORECASE)
_MIN_NUMBERS = 8
# Names of columns of numbers in files with one value per line.
_NUMBERS = re.compile(r"label|score|correct|halluc|truth|len", re.IGNORECASE)
_HASH = re.compile(r"(?=.*[a-z])(?=.*\d)\S{6,}", re.IGNORECASE)
# Arrays that `numpy.savez` got without names.
_UNNAMED = re.compile(r"arr_(\d{1,9})")
_TEXTS = frozenset((*schema.STRING_FIELDS, *ID_KEYS, *_FILE_KEYS, "answer", "prompt"))


class Table:
    """The rows of a table, parsed on request.

    Parameters
    ----------
    path : Path
        File with one of SUFFIXES.

    Raises
    ------
    InvalidInputError
        If the file is not a table. The message names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: list[dict[str, Any]] = []
        self._begins = array("q")
        check_regular(path)
        self._mapped = map_file(path)
        if path.suffix in (".jsonl", ".ndjson"):
            self._find_lines()
        elif path.name.endswith(arrow_files.SUFFIXES):
            self._rows = arrow_files.rows_of_table(path, MAX_BYTES)
        elif len(self._mapped) > MAX_BYTES:
            raise InvalidInputError(f"found {len(self._mapped):,} bytes, expected at most {MAX_BYTES:,}")
        else:
            self._rows = parse(self._mapped.read(0, len(self._mapped)), path.name)

    def _find_lines(self) -> None:
        """Record where each line that is not blank begins and ends."""
        begin, size = 0, len(self._mapped)
        with open(self.path, "rb") as file:
            while begin < size and (line := file.readline(min(MAX_LINE_BYTES + 1, size - begin))):
                if len(line) > MAX_LINE_BYTES:
                    raise InvalidInputError(f"{self.path.name}: found a line of more than {MAX_LINE_BYTES:,} bytes")
                if line.strip():
                    self._begins.extend((begin, begin + len(line)))
                begin += len(line)

    def __len__(self) -> int:
        return len(self._rows) or len(self._begins) // 2

    def __getitem__(self, k: int) -> dict[str, Any]:
        row = with_texts(self._row(k))
        return row if self._sample_key is None else {"sample": row.get(self._sample_key)} | row

    def _row(self, k: int) -> dict[str, Any]:
        if self._rows:
            return self._rows[k]
        try:
            row = load_json(self._mapped.read(*self._begins[2 * k : 2 * k + 2]))
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"{self.path.name}, row {k}: not JSON: {str(error)[:100]}") from None
        if not isinstance(row, dict):
            raise InvalidInputError(f"{self.path.name}, row {k}: found {type(row).__name__}, expected an object")
        return row

    @cached_property
    def has_texts(self) -> bool:
        """Return whether the rows have ids and texts of questions or answers, and not scores alone."""
        return bool(self.by_id) and not QUESTIONS_AND_ANSWERS.isdisjoint(self[0])

    @cached_property
    def by_file(self) -> dict[str, list[int]]:
        """Rows by the file that they name: its path, and its name alone."""
        found: dict[str, list[int]] = {}
        for k, value in self._values(_FILE_KEYS):
            path = PurePosixPath(value.replace("\\", "/"))
            for name in {path.as_posix(), path.name}:
                found.setdefault(name, []).append(k)
        return {name: self._in_order(rows, _ROW_KEYS) for name, rows in found.items()}

    @cached_property
    def order(self) -> list[int]:
        """All rows in the order of a column such as row_index, which numbers the rows of an array, if there is one."""
        return self._in_order(list(range(len(self))), _ROWS)

    def _in_order(self, rows: list[int], keys: Sequence[str]) -> list[int]:
        """Return the rows of a file in the order of a column that numbers them from 0, if there is one."""
        for key in keys if rows else ():
            order = {self[k].get(key): k for k in rows} if key in self[rows[0]] else {}
            if len(order) == len(rows) and all(type(n) is int for n in order) and set(order) == set(range(len(rows))):
                return [order[n] for n in range(len(rows))]
        return rows

    def rows_of(self, *names: str) -> list[int] | None:
        """Return the rows that name a file by one of its names, or by the only number in the name of a shard; else None."""
        found = next((self.by_file[name] for name in names if name in self.by_file), None)
        if found is not None or not self.by_file or not all(map(str.isdecimal, self.by_file)):
            return found
        numbers = re.findall(r"\d+", re.sub(r"-of-\d+", "", PurePosixPath(names[0]).name.partition(".")[0]))
        return self.by_file.get(str(int(numbers[0]))) if len(numbers) == 1 else None

    @cached_property
    def _sample_key(self) -> str | None:
        """Column of the number of an answer to a question, if several rows have its id; None without one."""
        key = next((name for name in SAMPLE_NAMES if len(self) and name in self._row(0)), None)
        if key is None:
            return None
        rows = [
            (next((row[n] for n in ID_KEYS if n in row), None), row.get(key))
            for row in map(self._row, range(len(self)))
        ]
        is_numbered = all(type(number) is int and name is not None for name, number in rows)
        return key if is_numbered and len({name for name, _ in rows}) < len(rows) == len(set(rows)) else None

    @cached_property
    def by_id(self) -> dict[str, int]:
        """Row by id, or by id and number of the answer (q1/0); an id that several rows have is left out."""
        key = self._sample_key
        return _of_one((name if key is None else f"{name}/{self[k][key]}", k) for k, name in self._values(ID_KEYS))

    @cached_property
    def by_question(self) -> dict[str, int]:
        """Row by the text of its question; a text that several rows have is left out."""
        return _of_one((text, k) for k, text in self._values(("question", *OTHER_NAMES["question"])))

    def named(self, name: str) -> int | None:
        """Return the row of an id, or of a name that states id and number of an answer; None without one."""
        if name not in self.by_id and self._sample_key is not None and (found := split_sample(name)) is not None:
            name = f"{found[0].rpartition('/')[2]}/{found[1]}"
        return self.by_id.get(name)

    @cached_property
    def _by_cell(self) -> dict[str, int]:
        """Row by a text without spaces in any column that no other row has, such as a hash."""
        rows = (list(self[k].values()) for k in range(len(self)))
        return _of_one((v, k) for k, row in enumerate(rows) for v in row if isinstance(v, str) and " " not in v)

    def row_of(self, *names: str) -> int | None:
        """Return the row that has one of the names of a file as its id, or in another column; None without one."""
        found = next((row for name in names if (row := self.named(name)) is not None), None)
        return self._by_cell.get(names[0]) if found is None and _HASH.fullmatch(names[0]) else found

    @cached_property
    def id_of(self) -> dict[int, str]:
        """Id of each row that alone has it."""
        return {k: name for name, k in self.by_id.items()}

    def _values(self, keys: Sequence[str]) -> Iterator[tuple[int, str]]:
        """Yield the number of each row that has one of some keys, and the value of the first of them."""
        for k in range(len(self)):
            row = self[k]
            value = next((row[key] for key in keys if isinstance(row.get(key), str | int)), None)
            if value is None and keys is ID_KEYS:
                value = row.get(id_column(row) or "")
            if value is not None and not isinstance(value, bool):
                yield k, str(value)


def _of_one(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return a dict of pairs without the keys that several of them have."""
    found: dict[str, int] = {}
    several = {key for key, k in pairs if found.setdefault(key, k) != k}
    return {key: k for key, k in found.items() if key not in several}


def load_json(data: bytes | str) -> Any:
    """Return a value of JSON, in which arrays as json_tricks writes them are nested lists."""
    return json.loads(data, object_hook=lambda v: v["__ndarray__"] if isinstance(v.get("__ndarray__"), list) else v)


def parse(data: bytes, name: str) -> list[dict[str, Any]]:
    """Return the rows of the content of a JSON, CSV, TSV or text file; InvalidInputError with its name if it is none.

    A list of plain values, or a text with one per line, is a column of the name of the file.
    """
    path = PurePosixPath(name)
    try:
        text = data.decode("utf-8-sig")
        if path.suffix == ".txt":
            is_number = _NUMBERS.search(path.stem) is not None
            return [{path.stem: _csv_value("", s) if is_number else s} for s in text.splitlines() if s]
        return rows_of_json(load_json(text), path.stem) if path.suffix == ".json" else _from_csv(text, path.suffix)
    except (UnicodeDecodeError, ValueError, RecursionError, csv.Error) as error:
        raise InvalidInputError(f"{name} is not a table: {' '.join(str(error).split())[:200]}") from None


def _from_csv(text: str, suffix: str) -> list[dict[str, Any]]:
    csv.field_size_limit(MAX_FIELD_BYTES)
    reader: Iterator[list[str]] = csv.reader(
        io.StringIO(text, newline=""), delimiter="\t" if suffix == ".tsv" else ",", strict=True
    )
    header = next(reader, [])
    is_numbered = header == [str(k) for k in range(len(header))]  # by pandas, for columns without names
    if len(header) >= _MIN_NUMBERS and is_numbered:
        header = [f"dim_{name}" for name in header]
    elif len(header) >= _MIN_NUMBERS and all(map(_NUMBER.fullmatch, header)):  # vectors without names
        reader, header = itertools.chain([header], reader), [f"dim_{k}" for k in range(len(header))]
    if not header or len(set(header)) != len(header):
        raise ValueError("expected a header with different names")
    rows = []
    for number, values in enumerate(filter(None, reader)):
        if len(values) != len(header):
            raise ValueError(f"row {number} has {len(values)} values, the header {len(header)}")
        row = {name: _csv_value(name, value) for name, value in zip(header, values, strict=True)}
        rows.append({name: value for name, value in row.items() if name and value is not None})
    return rows


def _csv_value(name: str, text: str) -> Any:
    """Return a number or JSON list of a cell as such, other cells as text, and None for an empty one."""
    if name in _TEXTS:
        return text or None
    if _VECTOR.fullmatch(text):  # as str() of an array
        return [float(number) for number in text.strip("[] \n").split()]
    if text[:1] in ("[", "{") or (text[:1] in "+-.0123456789" and len(text) < 40):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text)
    return text or None


@lru_cache(maxsize=4)
def _load(path: Path, size: int, modified_ns: int) -> Table:
    return Table(path)


def load_table(path: Path) -> Table:
    """Return a table; several sources share the one of a file."""
    status = check_regular(path)
    return _load(path, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class TableReference:
    """A table next to a source, and the rows that belong to the source; None for all of them."""

    path: Path
    rows: tuple[int, ...] | None = None
    is_by_id: bool = False  # traces are found in it by their ids alone
    others: tuple[Path, ...] = ()  # more tables with ids
    are_columns: bool = False  # the others have one column each, and the same rows
    is_in_turn: bool = False  # each file of the source has the next rows
    is_apart: bool = False  # the tables are in another folder, and may belong to something else

    def absolute(self) -> "TableReference":
        """Return the reference with absolute paths."""
        return replace(self, path=self.path.absolute(), others=tuple(path.absolute() for path in self.others))

    def load(self) -> "TableRows":
        """Return the rows."""
        table, others = load_table(self.path), tuple(map(load_table, self.others))
        rows = table.order if self.rows is None else self.rows
        return TableRows(table, rows, self.is_by_id, others, self.are_columns)


@dataclass(eq=False)
class TableRows:
    """The rows of a table that belong to one source; the fields are those of TableReference."""

    table: Table
    rows: Sequence[int]
    is_by_id: bool = False
    others: tuple[Table, ...] = ()
    are_columns: bool = False
    is_chunk: bool = False  # of the rows of a source

    @property
    def path(self) -> Path:
        """The file of the table."""
        return self.table.path

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, k: int) -> dict[str, Any]:
        return self._merged(self.rows[k])

    def group(self, trace: str) -> "TableRows | None":
        """Return the rows of the table with the name of a group of arrays, among tables by id; None without one."""
        tables = (self.table, *self.others) if self.is_by_id and trace else ()
        return next((TableRows(t, range(len(t))) for t in tables if t.path.stem == trace), None)

    def at(self, numbers: Sequence[int]) -> "TableRows":
        """Return some of the rows."""
        if numbers and max(numbers) >= len(self.rows):
            raise InvalidInputError(
                f"found row {max(numbers)} in the name of a file, and {len(self)} rows in {self.path.name}"
            )
        return replace(self, rows=[self.rows[k] for k in numbers], is_chunk=True)

    def _merged(self, k: int) -> dict[str, Any]:
        """Return a row together with the rows of the other tables that have its id."""
        if self.are_columns:
            return {field: value for table in (*self.others, self.table) for field, value in table[k].items()}
        key = self.table.id_of.get(k) if self.others else None
        found = [t[t.by_id[key]] for t in self.others if key in t.by_id]
        return {field: value for row in (*reversed(found), self.table[k]) for field, value in row.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[k] for k in range(len(self)))

    @cached_property
    def by_id(self) -> dict[str, dict[str, Any]]:
        """The rows by their ids."""
        return self._own(self.table.by_id)

    @cached_property
    def by_question(self) -> dict[str, dict[str, Any]]:
        """The rows by the texts of their questions."""
        return self._own(self.table.by_question)

    def _own(self, numbers: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        own = set(self.rows)
        return {name: self._merged(k) for name, k in numbers.items() if k in own}

    def of(self, trace: str, position: int, key: Any = None) -> dict[str, Any] | None:
        """Return the row of a trace by its id `key`, by its name in the container, or by its position; None without one."""
        ids = [str(name) for name in (key, trace) if name not in (None, "")]
        for name in ids:
            if self.are_columns and (k := self.table.named(name)) is not None:
                return self._merged(k)
            if rows := [t[k] for t in (self.table, *self.others) if (k := t.named(name)) is not None]:
                return {field: value for row in reversed(rows) for field, value in row.items()}
        if (number := self.number_of(trace, key)) is not None:
            return dict(self.table[number])
        # The order decides for traces without ids, and for rows that belong to the file by its name.
        is_whole = 1 < len(self.rows) == len(self.table) and not self.table.by_file
        if self.is_by_id or ((trace or (ids and is_whole)) and self.table.by_id):
            return None
        return dict(self._merged(self.rows[position])) if position < len(self.rows) else None

    def number_of(self, trace: str, key: Any) -> int | None:
        """Return the number of the row that an array without a name, such as arr_3, or an integer states; else None.

        Raises
        ------
        InvalidInputError
            If the table has no row of this number.
        """
        if self.others or len(self.rows) != len(self.table):
            return None
        if trace and (match := _UNNAMED.fullmatch(trace)):
            number = int(match[1])
        elif type(key) is int and self.table.by_id and not any(map(str.isdecimal, self.table.by_id)):
            number = key
        else:
            return None
        if not 0 <= number < len(self.table):
            raise InvalidInputError(
                f"found number {number}, and {len(self.table)} rows in {self.path.name}, counted from 0; give each row "
                "a column question_id with the ids of the traces"
            )
        return number

    def update_digest(self, digest: "hashlib.blake2b") -> None:
        """Add the content of the rows to a digest."""
        for table, rows in ((self.table, self.rows), *((table, range(len(table))) for table in self.others)):
            for k in rows:
                digest.update(json.dumps(table[k], sort_keys=True, default=str).encode())
