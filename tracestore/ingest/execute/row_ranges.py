"""The numbers and the ranges of rows.

Numbers and ids next to the values of the lines say no other order of items, and not that a trace is another one (rules 11
and 13). Ranges are the rows of each trace on an axis along which the tokens of all traces lie behind each other (rule 9).
"""

import itertools
import re
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError, escape_unprintable
from tracestore.ingest.execute.join import Column
from tracestore.ingest.execute.values import describe, number
from tracestore.ingest.layout.patterns import AXIS_NAMES
from tracestore.ingest.layout.places import Plan
from tracestore.ingest.readers.tree import Items, Value, as_array
from tracestore.store.vocabulary import SAYING, SYNONYMS, is_question_id

_ID_COLUMNS = re.compile(
    r"(?i)((question|q|trace|example|row|line|item|sample|prompt|data(set)?|orig(inal)?|global|array|tensor|vector"
    r"|hidden|states?|embedding|activation|doc(ument)?|record|entry|instance|problem|query|request|conversation"
    r"|custom)?_?)?(ids?|qid|u?uid|guid|idx|index|number|no|row)|position|pos|slot|order"
)
Bound = dict[str, Any]  # as in walk
_UNNAMED = ("", "Unnamed: 0")  # the index of a table, of which a program may have left out rows
_IN_ORDER = re.compile(r"\[([^\]]*= ?#[^\]]*)?\]/$")
_INNER = re.compile(r"\[(?:([KLSP])|[^\]]*\bsample ?= ?#[^\]]*)\]/$")
# What a name with {id} means as a whole.
_NAMED = re.compile(r"\{id[:}][^\[]*/$|\{id[:}][^\[]* : $")
_MAX_IDS = 10_000  # that are compared with each other
# What tells parts of one trace apart in an id: the number of a layer, and what is in front of the answer.
_PART_OF_ID = re.compile(r"(.*[^a-z])(?:(layers?[_-]?)\d+|(prompt|question|answer|response))([^a-z].*)?", re.I | re.S)
_PLACES = SAYING["numbers of rows"]
_NUMBERS = _PLACES | {"id", "num", "number", "no"}
_ANSWERS = SAYING["generated"] | {"sample", "attempt", "trial", "rollout", "run", "draw"}
_ANSWER = frozenset(["sample", "attempt", "trial", "rollout", "run", "draw", "generation", "gen", "k"])
# By what counts items: the name that binds their number, the words for such items, those that number them behind such a
# word, and those that number them alone.
_NUMBERED = {
    "#": ("sample", _ANSWERS, _NUMBERS, _ANSWER),
    "K": ("sample", _ANSWERS, _NUMBERS, _ANSWER | _PLACES),
    "L": ("layer", {"layer", "block"}, _NUMBERS, {"layer", "block"} | _PLACES),
    "S": ("token", {"token", "tok"}, _PLACES, _PLACES),
    "P": ("step", {"step", "pass", "token"}, _NUMBERS, {"step"} | _PLACES),
}
# What gives the rows of each trace.
RANGES = ("S.offsets", "S.starts", "S.owner", "S.ends", "S.lengths")
_NAMES = {name: field for field in ("S.offsets", "S.starts", "S.ends") for name in SYNONYMS[field]}
_MAX_DIGITS = 18
Spans = list[tuple[int, int]]


def key_words(key: str) -> list[str]:
    """Return the words of a key in lower case."""
    return re.split(r"[^a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", key).lower())


class RowNumbers:
    """Compare the numbers of rows and items with their order (rule 13).

    Parameters
    ----------
    is_stated : bool
        Whether a person states the layout.
    """

    def __init__(self, *, is_stated: bool) -> None:
        self._is_stated = is_stated
        self._lock = threading.Lock()
        self._rows: dict[tuple[Any, ...], int] = {}
        self._items: dict[tuple[Any, ...], tuple[Bound, int, int]] = {}  # what is bound, the place and the number
        self._first: dict[tuple[str, str], int] = {}  # the number of the first answer
        self._parts: dict[tuple[str, str | None], str] = {}  # the first id by what is around the name of a part
        self._of_parts: set[tuple[str, str | None]] = set()  # those with several parts
        self._ids: dict[str, tuple[dict[str, str], dict[str, str]]] = {}  # by path: the ids of names, and the reverse
        self._stems: dict[str, str] = {}  # the first id by what is in front of the number of its answer
        self._of_answers: tuple[str, ...] | None = ()  # two ids with one stem; None if an id ends with another number

    def check(self, prefix: str, key: str, value: Value, bound: Bound, *, is_of_states: bool, is_chunk: bool) -> None:
        """Refuse a value that no line names, if it says that items or rows which are taken in order have another one."""
        if "id" in bound and type(value) in (str, int) and _NAMED.search(prefix) and is_question_id(key.lstrip("@")):
            self._check_id(f"{prefix}{key}", str(bound["id"]), str(value).strip())
        inner = _INNER.search(prefix)
        if inner is not None and self._check_item(prefix, key, value, bound, inner[1] or "#"):
            return
        if _IN_ORDER.search(prefix) and not is_of_states:
            self._check_row(f"{prefix}{key}", key, value, bound, is_chunk=is_chunk)

    def check_parts(self, question_id: str, *, is_layer: bool) -> None:
        """Rule 11: ids do not tell the parts of several traces apart [`q0_layer0.npy`, of one layer; `q0_prompt.npy`]."""
        if (match := _PART_OF_ID.fullmatch(question_id)) is None or (match[2] and not is_layer):
            return
        rest = match[1], match[4]
        with self._lock:
            if len(self._parts) < _MAX_IDS:
                self._parts.setdefault(rest, question_id)
            if question_id != self._parts.get(rest, question_id):
                self._of_parts.add(rest)
            is_wrong = len(self._of_parts) > 1
        if is_wrong:
            of_layer = f"{match[2]}{{layer}} behind {{id}} binds the layer"
            way = of_layer if match[2] else "two addresses are prompt and answer"
            raise InvalidInputError(
                f"the ids {escape_unprintable(self._parts[rest], 60)!r} and {escape_unprintable(question_id, 60)!r} differ "
                f'in what names a part of a trace, as others do: {way}; question_id = "={{id}}" if each is a trace',
                field="question_id",
            )

    def add_answer(self, question_id: str, sample: int) -> None:
        """Keep how an id that a file of a built-in layout is named by ends with the number of the answer."""
        match = re.fullmatch(rf"(.*)(?<!\d)0*{sample}", question_id, re.S)
        with self._lock:
            if match is None or self._is_stated:
                self._of_answers = None
            elif self._of_answers is not None and len(self._stems) < _MAX_IDS:
                first = self._stems.setdefault(match[1], question_id)
                self._of_answers = self._of_answers if first == question_id else (first, question_id)

    def check_answers(self, files: str) -> None:
        """Rule 23: ids of names do not tell the answers to one question apart [`q1_0.pt` with the sample 0]."""
        if self._of_answers:
            shown = " and ".join(repr(escape_unprintable(name, 60)) for name in self._of_answers)
            raise InvalidInputError(
                f"the ids {shown} end with the numbers of their answers, and each has one: lines with "
                f"{files.replace('{id}', '{id}_{sample}')} give the answers to a question one id, lines without sample "
                "count none",
                field="sample",
            )

    def _check_id(self, path: str, own: str, other: str) -> None:
        """Rule 11: a trace that is named by a file or key does not hold the id of another one."""
        with self._lock:
            of_names, names = self._ids.setdefault(path, ({}, {}))
            if len(of_names) < _MAX_IDS:
                of_names.setdefault(own, other)
                names.setdefault(other, own)
            pair = (own, other) if other in of_names else (names.get(own, own), own)
        if pair[0] != pair[1]:
            raise InvalidInputError(
                f"{path}: the trace named {escape_unprintable(pair[0], 40)!r} has the id {escape_unprintable(pair[1], 40)!r}, "
                f'which names another one; a line question_id takes it, with {{n}} instead of {{id}} in names, ignore = ["{path}"] if it is none'
            )

    def _check_item(self, prefix: str, key: str, value: Value, bound: Bound, letter: str) -> bool:
        """Return whether a key numbers the items of a list; refuse a number that contradicts their order."""
        name, kinds, behind, alone = _NUMBERED[letter]
        text, words = str(value), key_words(key)
        is_pair = len(words) == 2 and words[0] in kinds and words[1] in behind
        if not (is_pair or (len(words) == 1 and words[0] in alone)) or isinstance(value, bool) or not text.isdecimal():
            return False
        number, place = int(text), bound["sample" if letter == "#" else letter]
        others = {n: v for n, v in bound.items() if n not in ("sample", letter)}
        # Rows of several questions may lie between each other, items of several lists only in files of other threads.
        group = tuple(others.items()) if letter == "#" else threading.get_ident()
        with self._lock:
            before = self._items.get((prefix, key, group), (None, 0, 0))
            self._items[prefix, key, group] = others, place, number
            step = number - before[2]
            if before[0] != others or step == 0:  # a number of all items
                return True
            is_same = step > 0 if letter == "L" else step == place - before[1]
            if is_same and name == "sample" and words[0] not in _PLACES:  # alike in all traces, from 0 or from 1 on
                is_same = number - place == self._first.setdefault((prefix, key), int(number > place))
        if not is_same:
            raise InvalidInputError(
                f"{prefix}{key}: the item {place} in order has the number {number}; [{name}={key}] in each line of the "
                f'list takes the numbers, ignore = ["{prefix}{key}"] if it numbers no items'
            )
        return True

    def _check_row(self, path: str, key: str, value: Value, bound: Bound, *, is_chunk: bool) -> None:
        """Refuse a column of ids that is left unused; one from 0 to N - 1 is fine."""
        if value is None or not (key in _UNNAMED or _ID_COLUMNS.fullmatch(key)):
            return
        text, is_index = str(value), key in _UNNAMED and str(value).isdecimal()
        # Rows run on over chunks alone.
        file = bound.get("file") if is_chunk or "chunk" not in bound else None
        rows = (path, file, *map(bound.get, AXIS_NAMES))
        with self._lock:
            # Chunks of states are read in any order, or alone: each begins with the same number in all of its layers.
            first = int(text) if is_chunk and text.isdecimal() else 0
            if rows not in self._rows and is_chunk:
                self._rows[rows] = self._rows.setdefault((path, bound["chunk"]), first)
            expected = self._rows.get(rows, 0)
            self._rows[rows] = (int(text) if is_index else expected) + 1
        if is_index and int(text) < expected:
            raise InvalidInputError(
                f'{path}: the row {text} is behind {expected - 1}: rows in another order? ignore = ["{path}"] if not'
            )
        if (key not in _UNNAMED or not self._is_stated) and text != str(expected):
            name = path.rpartition("[]/")[0]
            raise InvalidInputError(
                f"{path}: rows are joined in order, and this column of ids is left out; {name}[id={key}] in each line of "
                f"the table joins by it, [N={key}] by the place of the states, a line question_id takes it, "
                f'ignore = ["{path}"] if it numbers no rows'
            )


def rows_along_n(column: Column, environment: Mapping[str, Any]) -> np.ndarray:
    """Return the values of a column along N."""
    cells = column.cells(environment)
    if cells and (array := as_array(cells[0].value)) is not None:
        return array.read()
    if cells and column.place.name in ("S.offsets", "S.owner"):
        values = cells[0].value if isinstance(cells[0].value, Items) else [cells[0].value]
        other = next((value for value in values if not isinstance(value, int)), None)
        raise InvalidInputError(f"found {describe(other)}, expected integers", field=column.place.name)
    count = column.num_rows(environment) or 0
    values = [column.scalar({**environment, "N": n, "N*": n}, {"N": n}) for n in range(count)]
    if any(type(value) is str for value in values):  # a table of texts
        values = [number(value, "row") for value in values]
    return np.asarray(values)


class RowStarts:
    """Compare integers of rows that no line names with the rows that `S.lengths` alone give (rule 9).

    Parameters
    ----------
    plan : Plan
    tables : RowStarts, optional
        The rows of tables, which are compared next to those of one source.
    """

    def __init__(self, plan: Plan, tables: "RowStarts | None" = None) -> None:
        self._is_needed = plan.layout.addresses.keys() & set(RANGES) == {"S.lengths"}
        # By path and key: what joins the rows, and their values.
        self._columns: dict[tuple[str, str], tuple[list[str], dict[tuple[Any, ...], int]]] = {}
        self._tables = tables

    def add(self, prefix: str, key: str, value: Any, bound: Mapping[str, Any]) -> None:
        """Add a value of the next row of a list or table."""
        is_text = type(value) is str and value.isdecimal() and len(value) <= _MAX_DIGITS
        if self._is_needed and "N" in bound and (type(value) is int or is_text):
            names = [name for name in bound if name != "file" and name[0] != "*"]
            _, values = self._columns.setdefault((prefix, key), (names, {}))
            values[tuple(map(bound.get, names))] = int(value)

    def checked(self, spans: Spans, environment: Mapping[str, Any]) -> Spans:
        """Return the rows of each trace; refuse those that a column contradicts [rows in the order of workers].

        By its name, or because such rows cover the axis, too, it gives the first or the last row of each trace.
        """
        of_tables = {} if self._tables is None else self._tables._columns
        for (prefix, key), (names, values) in [*self._columns.items(), *of_tables.items()]:
            rows = [tuple(n if name == "N" else environment.get(name) for name in names) for n in range(len(spans))]
            pairs = [(values[row], span) for row, span in zip(rows, spans, strict=True) if row in values]
            wrong = [next((pair for pair in pairs if pair[0] != pair[1][at]), None) for at in (0, 1)]
            if wrong[0] is None or wrong[1] is None:
                continue
            starts = [(value, value + end - begin) for value, (begin, end) in pairs]
            ends = [(value - end + begin, value) for value, (begin, end) in pairs]
            field = _NAMES.get(" ".join(key_words(key)), "")
            field = "S.ends" if covers(ends) else "S.starts" if covers(starts) else field
            if field:
                value, (begin, end) = wrong[0]
                raise InvalidInputError(
                    f"{prefix}{key}: found {value} where S.lengths in the order of the rows give the rows {begin} to {end}; "
                    f'{field.replace("offsets", "starts")} = "{prefix}{key}" next to S.lengths if it gives the rows '
                    f'of each trace, ignore = ["{prefix}{key}"] if not',
                    field="S.lengths",
                )
        return spans


def covers(spans: Spans) -> bool:
    """Return whether ranges cover an axis in some order."""
    ordered = sorted(spans)
    return [begin for begin, _ in ordered] == [0, *(end for _, end in ordered)][: len(ordered)]


def ranges_of(known: dict[str, np.ndarray], total: int) -> Spans:
    """Return the tokens of each trace on an axis along which all lie behind each other (rule 9).

    Parameters
    ----------
    known : dict
        Arrays by their fields: S.offsets, S.lengths, S.owner, or two of S.starts, S.ends and S.lengths.
    total : int
        Extent of the axis.

    Raises
    ------
    InvalidInputError
        If the ranges do not cover the axis, or overlap.
    """
    name = next((name for name in RANGES if name in known), "")
    values: dict[str, Any] = {name: _integers(array, name) for name, array in known.items()}
    spans = _spans_of(name, values)
    _check_cover(spans, total, name)
    if "S.owner" in values:
        values["S.owner"] = _runs(values["S.owner"])
    for of, own in (
        ("S.lengths", [end - begin for begin, end in spans]),
        ("S.starts", [span[0] for span in spans]),
        ("S.ends", [span[1] for span in spans]),
        ("S.owner", spans),
    ):
        if values.get(of, own) != own:
            raise InvalidInputError(f"found other rows than {name}: rows in another order?", field=of)
    return spans


def _spans_of(name: str, values: Mapping[str, list[int]]) -> Spans:
    """Return the rows of each trace as a field gives them, S.starts and S.ends also next to S.lengths."""
    starts, ends, lengths = (values.get(of, []) for of in ("S.starts", "S.ends", "S.lengths"))
    if name == "S.starts" and "S.ends" not in values and len(lengths) == len(starts):
        ends = [*map(sum, zip(starts, lengths, strict=True))]
    if name == "S.ends" and len(lengths) == len(ends):
        starts = [end - length for end, length in zip(ends, lengths, strict=True)]
    if not name or (name in ("S.starts", "S.ends") and len(starts) != len(ends)):
        needed = "S.offsets, S.lengths, S.owner, or two of S.starts, S.ends and S.lengths, as many of each"
        raise InvalidInputError(f"traces behind each other need {needed}")
    if name == "S.offsets":
        return list(itertools.pairwise([0] * (values[name][:1] != [0]) + values[name]))
    if name == "S.lengths":
        return list(itertools.pairwise(itertools.accumulate(lengths, initial=0)))
    if name == "S.owner":
        if values[name] != sorted(values[name]):
            raise InvalidInputError("found owners that are not sorted", field=name)
        return _runs(values[name])
    return list(zip(starts, ends, strict=True))


def _runs(owners: list[int]) -> list[tuple[int, int]]:
    """Return the run of each owner, in the order of the owners."""
    runs: dict[int, tuple[int, int]] = {}
    begin = 0
    for owner, run in itertools.groupby(owners):
        if owner in runs:
            raise InvalidInputError("found rows of one trace in several places", field="S.owner")
        runs[owner] = begin, begin + len(list(run))
        begin = runs[owner][1]
    return [runs[owner] for owner in sorted(runs)]


def _check_cover(spans: Spans, total: int, name: str) -> None:
    """Rule 9: ranges are disjoint and cover the axis; each has a token."""
    position = 0
    for k, (begin, end) in enumerate(sorted(spans)):
        if begin != position:
            what = "overlap" if begin < position else "leave a gap"
            raise InvalidInputError(f"ranges {what} at row {min(begin, position):,}", field=name)
        if end <= begin:
            raise InvalidInputError(f"trace {k} has no tokens: {begin} to {end}", field=name)
        position = end
    if position != total:
        raise InvalidInputError(
            f"ranges end at {position:,}, expected {total:,} rows; cut rows behind the last trace", field=name
        )


def _integers(array: np.ndarray, name: str) -> list[int]:
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidInputError(f"found {array.dtype.name} {array.shape}, expected integers", field=name)
    return [int(value) for value in array.tolist()]
