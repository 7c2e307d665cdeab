"""Accounts of rows: their order and number, what is left over, and what the entries `keep.NAME` leave out."""

import re
import threading
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tracestore.errors import InvalidInputError, error_location, escape_unprintable, some_of
from tracestore.ingest.execute.claims import FoundFile
from tracestore.ingest.execute.join import Column
from tracestore.ingest.execute.values import group_text, key_text, verdict_value
from tracestore.ingest.layout.fields import KEEP, KEY, score_of
from tracestore.ingest.layout.places import RECORDS, Place, Plan, given_name
from tracestore.words import plural

_MAX_VALUES = 64  # that differ, of which the message about an unknown one chooses
_NUM_SHOWN = 40  # characters of a key
_IN_ORDER = ("in order", "by position")
# Fields of which a row may serve several traces (rule 12a).
SHARED = frozenset(("question", "question_id", "group", RECORDS))
MissingRow = tuple[tuple[Any, ...], tuple[str, str]]  # of a trace, see `TraceColumns`
Numbers = set[tuple[str, int]]  # of keys, with the rest of them
# Takes the id and the sample of a row, None for all, "label", "group" or the name of a score, and the value of the row,
# None for none. Returns whether the store has its trace, but the files do not; None if the store has none.
OnUnused = Callable[[str, int | None, str, Any], bool | None]


def end_text(row: tuple[Any, ...]) -> str:
    """Return a row that was joined in order, as a person compares it with the files: its value and its trace."""
    key, trace, sample, value = row
    owner = f"row {key[0]}" if trace is None else trace if sample is None else f"{trace}, sample {sample}"
    return escape_unprintable(owner if value is None else f"{value} of {owner}", 60)


def check_num_rows(column: Column, stack: Mapping[str, Any], total: int) -> None:
    """Rule 13: a stack has as many rows in order as traces."""
    rows = column.num_rows(stack)
    if rows is not None and rows != total:
        found = f"{column.place.address}: {rows:,} rows belong to {total:,} traces"
        raise InvalidInputError(found, field=column.place.name)


def check_totals(tables: Mapping[Place, Column], total: int, stack: Mapping[str, Any]) -> None:
    """Rule 13: tables that run on over all chunks have as many rows as the chunks traces; `stack` is what all bind."""
    for place, column in tables.items():
        if "N*" in column.names and place.rule.kind != "known":
            check_num_rows(column, stack, total)


def loose_key(value: Any) -> str:
    """Return a key without leading zeros, `.0`, sign, blanks, case and marks, or as a number with an exponent: what rule 12b compares."""
    text = re.sub(r"\s+", "", unicodedata.normalize("NFKC", str(value))).casefold().replace("_", "-").removeprefix("+")
    if re.fullmatch(r"\d(\.\d+)?e\+?\d\d?", text):
        return _in_short(text)
    text = re.sub(r"\.0+(?=$|,)", "", text)
    return re.sub(r"(?<![0-9])0+(?=[0-9])", "", text)


def _in_short(number: Any) -> str:
    """Return a number as a spreadsheet shows one of many digits."""
    return f"{float(number):.5e}"


def check_remainders(name: str, rows: list[Any], unused: list[Any], missing: list[Any]) -> None:
    """Rule 12b: rows without a trace and traces without a row are refused if they would match in another spelling.

    They are refused, too, if one side begins at 0 and the other at 1: also if only the trace 0 has no row, because there
    is a row too few.
    """
    if not missing:
        return
    loose = {_in_short(key): key for key in missing if str(key).isdecimal()} | {loose_key(key): key for key in missing}
    for key in unused:
        if (other := loose.get(loose_key(key))) is not None:
            shown, expected = _different(str(key), str(other))
            raise InvalidInputError(
                f"the row {shown} and the trace {expected} differ in spelling only; correct one of them"
                + "; {NAME:d} instead of {NAME} is a number without zeros in front" * str(other).isdecimal(),
                field=name,
            )
    left = set(unused)
    if _are_shifted(rows, [*(key for key in rows if key not in left), *missing]):
        found = f"the row {_short(unused[0])} and the trace" if unused else "only the trace"
        raise InvalidInputError(
            f"{found} {_short(missing[0])} {'are' if unused else 'is'} left over: numbered from 0 and from 1, it seems; "
            "a row with an empty value says that there is none",
            field=name,
        )


def _are_shifted(rows: list[Any], own: list[Any]) -> bool:
    """Return whether a number of rows runs by one before or behind that of traces, with the same gaps."""
    row_parts, own_parts = ([re.split(r"(\d+)", str(key)) for key in keys] for keys in (rows, own))
    for at in range(-2, -max(map(len, row_parts), default=0), -2):
        numbers, own_numbers = _numbered(row_parts, at), _numbered(own_parts, at)
        both = dict(numbers).keys() & dict(own_numbers)
        numbers, own_numbers = ({pair for pair in pairs if pair[0] in both} for pairs in (numbers, own_numbers))
        first_own, has_left = _firsts(own_numbers), bool(numbers - own_numbers)
        for step in (-1, 1):
            moved = {(text, number + step) for text, number in numbers}
            first = _firsts(moved)
            if len(first) == len(dict(first)) == len(first_own):  # without gaps
                is_shifted = first == first_own and (has_left or not any(number for _, number in first))
            else:
                is_shifted = has_left and moved <= own_numbers and first <= first_own
            if is_shifted and moved & (own_numbers - numbers):  # some moved row is that of a trace without one
                return True
    return False


def _numbered(parts: list[list[str]], at: int) -> Numbers:
    """Return a number of each key, with the rest of the key."""
    return {("".join([*key[:at], "#", *key[at + 1 :]]), int(key[at])) for key in parts if len(key) >= -at}


def _firsts(numbers: Numbers) -> Numbers:
    """Return where each run of numbers begins."""
    return {(text, number) for text, number in numbers if (text, number - 1) not in numbers}


def _different(*texts: str) -> Iterator[str]:
    """Yield two texts in quotes from shortly before their difference on, which may be blanks or forms of a character."""
    same = next((k for k, pair in enumerate(zip(*texts, strict=False)) if len({*pair}) > 1), 0)
    begin = max(0, same - _NUM_SHOWN // 2)
    quoted = ascii if len({unicodedata.normalize("NFKC", text) for text in texts}) == 1 else repr
    for text in texts:
        yield "..." * (begin > 0) + quoted(text[begin : begin + _NUM_SHOWN])


def _short(key: Any) -> str:
    return repr(escape_unprintable(str(key), _NUM_SHOWN))


@dataclass
class TableAccount:
    """Tell how the rows of a file of a table were joined to the traces of a run.

    Attributes
    ----------
    field, address : str
        The field that the table gives, and its place.
    source : str
        The name of the file; empty for traces to which no file belongs.
    joined_by : str
        See `Column.joined_by`.
    rows, unused : list of str
        The keys of all rows, and of those without a trace.
    missing : list of str
        The keys of the traces without a row.
    partial : str or None
        A list of answers of which only some belong to traces.
    ends : str
        The first and the last row, where their order is a part of what joins them.
    num_left_out : int
        The number of rows of traces that are left out.
    not_kept : dict
        The keys of rows that an entry `keep.NAME` leaves out, with its NAME.
    is_of_all : bool
        Whether it takes all traces to tell how the rows are joined: they have an order, or one may serve several traces.
    values : dict
        The labels, scores or groups of rows without a trace, by their keys.
    """

    field: str
    address: str
    source: str
    joined_by: str
    rows: list[str]
    unused: list[str]
    missing: list[str]
    partial: str | None
    ends: str
    num_left_out: int
    not_kept: dict[str, str]
    is_of_all: bool
    values: dict[str, float | str]

    def close(self, on_unused: OnUnused, *, is_whole: bool) -> tuple[int, int, int, int, int]:
        """Return how many rows serve traces, those that are left out, stored ones, and none; and traces without a row.

        Raises
        ------
        InvalidInputError
            If the rows do not fit.
        """
        missing, name, is_gone = self.missing, score_of(self.field), dict[str, bool | None]()
        for text in self.unused:
            if self.joined_by == "by id":
                is_gone[text] = on_unused(text, None, name, self.values.get(text))
            elif self.joined_by == "by id, sample" and (parts := text.rpartition(", "))[2].isdecimal():
                is_gone[text] = on_unused(parts[0], int(parts[2]), name, self.values.get(text))
        unused, num_gone = [text for text in self.unused if is_gone.get(text) is None], sum(map(bool, is_gone.values()))
        num_rows, num_used = len(self.rows), len(self.rows) - len(self.unused) - self.num_left_out
        if self.source and self.joined_by in _IN_ORDER and (unused or missing) and is_whole:
            found = f"{num_rows:,} rows in order belong to {num_used + len(missing):,} traces"
            found += "; a column of numbers joins some of the rows" if self.joined_by == "by position" else ""
            raise InvalidInputError(found, field=self.field)
        if (key := next((key for key in missing if key in self.not_kept), None)) is not None:
            name = self.not_kept[key]
            way = f"instead of {name} in [], a line {KEY}{name} that joins by the other names leaves out the trace, too"
            raise InvalidInputError(f"all rows of the trace {_short(key)} are left out; {way}", field=f"{KEEP}{name}")
        check_remainders(self.field, self.rows, unused, missing)
        if num_rows and len(unused) == num_rows:
            first = escape_unprintable(self.rows[0], 40)
            raise InvalidInputError(
                f"no {self.joined_by[3:]} of it is that of a trace: its first is {first!r}", field=self.field
            )
        if self.partial is not None:
            raise InvalidInputError(self.partial, field=self.field)
        return num_used, self.num_left_out, num_gone, len(unused), len(missing)


def close_table(files: list[TableAccount], on_unused: OnUnused, *, is_whole: bool) -> str:
    """Return how the rows of the files of a table were joined; see `TableAccount.close`."""
    counts = []
    for file in files:
        with error_location(file.source):
            counts.append(file.close(on_unused, is_whole=is_whole))
    num_used, num_left_out, num_gone, num_unused, num_missing = map(sum, zip(*counts, strict=True))
    rest = f", {num_left_out:,} of traces that are left out" if num_left_out else ""
    rest += f", {num_gone:,} of stored traces that the files lack" if num_gone else ""
    rest += f", {num_unused:,} without a trace" if num_unused else ""
    rest += f", {plural(num_missing, 'trace')} without a row" if num_missing else ""
    table = files[0]
    source = table.source if len(files) == 1 else table.address
    return f"{table.field}: {plural(num_used, 'row')} of {source} joined {table.joined_by}{rest}{table.ends}"


def _may_serve_several(column: Column, plan: Plan) -> bool:
    """Return whether traces may differ by names that no row has, and no entry `share` states (rule 12a)."""
    place, made = column.place, plan.layout.templates.get("question_id")
    if place.rule.kind not in ("score", "text") or place.name in SHARED:
        return False
    of_id = {"id"} if made is None else {*made.names}
    own = of_id | ({"K", "sample"} & {*plan.names, *plan.layout.addresses, *plan.layout.settings})
    joined = {*column.names, *(of_id if column.has_made_ids else ())}
    joined |= {"K", "sample"} if {"K", "sample"} & joined else set()
    shared = set(plan.layout.settings.get(f"share.{place.name}", ()))
    return not own <= joined | shared | ({"K"} if "sample" in shared else set())


def table_accounts(
    column: Column, files: Iterable[FoundFile], missing: Iterable[MissingRow], kept: "KeptValues", plan: Plan
) -> Iterator[TableAccount]:
    """Yield the account of each file of a table; files that no name of the states tells apart have one."""
    # The rows of an axis that lengths cut are those of tokens.
    is_cut = any(len(axis) > 1 and "N" in axis for axis in column.place.axes)
    shared, made = plan.shared_names(column.place), column.has_made_ids is not False
    sources: dict[tuple[Any, ...], str] = {}
    rows: dict[tuple[Any, ...], list[tuple[Any, ...]]] = defaultdict(list)
    lacking: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for file in files:
        sources.setdefault(tuple(file.bound.get(name) for name in shared), file.name)
    for key in dict.fromkeys(column.used if is_cut else column.rows()):
        rows[tuple(dict(zip(column.names, key, strict=True))[name] for name in shared)].append(key)
    for part, texts in missing:
        lacking[part].add(texts[made])
    not_kept, may_serve_several = kept.left_out(column), _may_serve_several(column, plan)
    for part in {**sources, **lacking}:
        unused = [key for key in rows[part] if key not in column.used]
        partial, joined_by = column.partial_answers(unused), column.joined_by
        yield TableAccount(
            field=column.place.name,
            address=str(column.place.address),
            source=sources.get(part, ""),
            joined_by=joined_by,
            rows=[column.text_of(dict(zip(column.names, key, strict=True))) for key in rows[part]],
            unused=[column.text_of(dict(zip(column.names, key, strict=True))) for key in unused],
            missing=sorted(lacking[part]),
            partial=partial,
            ends=f": the first {end_text(column.ends[0])}, the last {end_text(column.ends[1])}" if column.ends else "",
            num_left_out=sum(column.used.get(key) == 0 for key in rows[part]),
            not_kept=not_kept,
            is_of_all=joined_by in _IN_ORDER or partial is not None or may_serve_several,
            values=_values(column, unused, plan) if joined_by.startswith("by id") else {},
        )


def _values(column: Column, unused: list[tuple[Any, ...]], plan: Plan) -> dict[str, float | str]:
    """Return the labels, scores or groups of rows without a trace, by their keys; without what is none."""
    name, found, words = column.place.name, dict[str, float | str](), plan.layout.words
    is_score = column.place.rule.kind == "score"
    for key in unused if is_score or name == "group" else ():
        bound = dict(zip(column.names, key, strict=True))
        with suppress(InvalidInputError):
            raw, direction = column.scalar(bound, {}), column.place.rule.direction or ""
            value = verdict_value(raw, name, direction, words) if is_score else group_text(raw)
            if value == value and value != "":
                found[column.text_of(bound)] = value
    return found


class KeptValues:
    """Tell the rows and traces that are kept, and count the others.

    Parameters
    ----------
    plan : Plan
    """

    def __init__(self, plan: Plan) -> None:
        entries = {name.removeprefix(KEEP): v for name, v in plan.layout.settings.items() if name.startswith(KEEP)}
        self._wanted = {
            name: {key_text(v) for v in (found if isinstance(found, list) else [found])}
            for name, found in entries.items()
        }
        self._of_traces = {name for place in plan.others if (name := given_name(place)) in entries and name is not None}
        self._lock = threading.Lock()
        self._found: dict[str, set[str]] = defaultdict(set)
        self._num_left_out = Counter[tuple[str, str]]()
        self._rows: dict[str, list[tuple[Mapping[str, Any], str]]] = defaultdict(list)  # of tables, "" if kept

    def has_row(self, bound: Mapping[str, Any], where: str) -> bool:
        """Return whether a row of a table is kept, as `has` does; keep what it binds for `left_out`."""
        is_kept = self.has(bound, where)
        if names := self._wanted.keys() & bound.keys():
            lost = next((n for n in names if key_text(bound[n]) not in self._wanted[n]), "")
            self._rows[where].append((bound, lost))
        return is_kept

    def has(self, bound: Mapping[str, Any], where: str) -> bool:
        """Return whether a row is kept that binds values; count it if not, by the place where it lies."""
        for name in self._wanted.keys() & bound.keys():
            text = key_text(bound[name])
            is_kept = text in self._wanted[name]
            with self._lock:
                if is_kept or len(self._found[name]) < _MAX_VALUES:
                    self._found[name].add(text)
                self._num_left_out[name, where] += not is_kept
            if not is_kept:
                return False
        return True

    def left_out(self, column: Column) -> dict[str, str]:
        """Return the keys of the rows of a table that are left out, with the name whose value leaves them out."""
        address = str(column.place.address)
        tables = (found for where, found in self._rows.items() if address.startswith(f"{where}/"))
        rows = [(column.text_of(bound), name) for found in tables for bound, name in found]
        kept = {text for text, name in rows if not name}
        return {text: name for text, name in rows if name and text not in kept}

    def has_trace(self, environment: Mapping[str, Any]) -> bool:
        """Return whether a trace is kept; refuse one that lacks a value which a line gives to traces."""
        if missing := sorted(self._of_traces - environment.keys()):
            raise InvalidInputError(f"the trace has no {missing[0]}, which decides whether it is kept", field="keep")
        return self.has(environment, "traces")

    def not_found(self) -> InvalidInputError | None:
        """Return the error of a value that no row and no trace has: it may be misspelled."""
        for name, wanted in self._wanted.items():
            if missing := sorted(wanted - self._found[name]):
                others = some_of([escape_unprintable(text, 40) for text in sorted(self._found[name])])
                text = f"{escape_unprintable(missing[0], 40)!r} occurs nowhere, found {others or 'no value'}"
                return InvalidInputError(text, field=f"{KEEP}{name}")
        return None

    def lines(self) -> Iterator[str]:
        """Yield how many rows and traces were left out."""
        for (name, where), count in sorted(self._num_left_out.items()):
            if count:
                what = "traces" if where == "traces" else f"rows of {where}"
                yield f"{KEEP}{name}: {count:,} {what} left out"

    def to_json(self) -> dict[str, Any]:
        """Return what the sources of a task have added."""
        counts = [[*key, count] for key, count in self._num_left_out.items()]
        return {"found": {name: sorted(texts) for name, texts in self._found.items()}, "num_left_out": counts}

    def add_json(self, found: Mapping[str, Any]) -> None:
        """Add what a task has found."""
        for name, texts in found["found"].items():
            self._found[str(name)].update(map(str, texts))
        for name, where, count in found["num_left_out"]:
            self._num_left_out[str(name), str(where)] += int(count)
