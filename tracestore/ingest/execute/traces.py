"""The traces of a source, and the values of their fields by what joins them."""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.execute.axes import MISSING, extent, numbers_of, read
from tracestore.ingest.execute.join import Column, RowTexts
from tracestore.ingest.execute.row_ranges import RANGES, RowStarts, ranges_of, rows_along_n
from tracestore.ingest.execute.table_accounts import SHARED, MissingRow
from tracestore.ingest.execute.values import is_missing, named, number_of
from tracestore.ingest.execute.walk import Cell
from tracestore.ingest.layout.places import Place, Plan
from tracestore.store.format import schema
from tracestore.store.write.field_values import field_error

FLAT_ANSWERS = ("NK", "KN")  # axes along which the answers to all questions lie; the first letter changes slowest


@dataclass
class TraceColumns:
    """The columns that one trace may use: of its unit, of its source and of the tables of the run.

    `missing` holds, by the place of a table, the traces without a row: their part of its files, and keys by names and made ids.
    """

    plan: Plan
    table_starts: RowStarts | None = None
    unit: dict[Place, Column] = field(default_factory=dict)
    source: dict[Place, Column] = field(default_factory=dict)
    tables: Mapping[Place, Column] = field(default_factory=dict)
    missing: dict[Place, set[MissingRow]] = field(default_factory=dict)
    num_answers: dict[str, int] = field(default_factory=dict)  # the last number of an answer by question
    skipped: list[int] | None = None  # the ids that T.skip leaves out

    def __post_init__(self) -> None:
        self.texts, self.starts = RowTexts(self.plan), RowStarts(self.plan, self.table_starts)

    def add(self, cell: Cell, source: str) -> None:
        """Add a value of a file of the source."""
        level = self.unit if cell.in_unit else self.source
        if (column := level.get(cell.place)) is None:
            column = level[cell.place] = Column(cell.place, self.plan.keys[cell.place])
        column.add(cell, source)

    def leave_out(self, environment: dict[str, Any], made_id: str | None) -> None:
        """Take the rows of a trace that is left out: they belong to no other one."""
        for level in (self.unit, self.source, self.tables):
            for column in level.values():
                column.leave_out(column.own_environment(environment, made_id))

    def of(self, name: str) -> Iterator[Column]:
        """Yield the columns of a field."""
        for place in self.plan.others:
            if place.name == name:
                yield from (level[place] for level in (self.unit, self.source, self.tables) if place in level)


@dataclass
class TraceCells:
    """A trace before its values are read: what it binds, the cells of its states, its position on their axes.

    `num_rows` is the extent of the axis (N S), (N K) or (K N), `num_first` the number of tokens of the first of two parts
    or of the prompt's pass, `prompt_length` what the line for it gives, else passes or parts, `num_first_values` the values
    of the first of two parts of the last array, `made_id` the id that the layout makes of another one, `answers` the rows
    of all answers to its question.
    """

    columns: TraceColumns
    environment: dict[str, Any]
    cells: dict[int, list[Cell]]
    fixed: dict[str, Any] = field(default_factory=dict)
    num_rows: int = 0
    num_first: int = 0
    prompt_length: Any = None
    num_first_values: int = 0
    made_id: str | None = None
    answers: range | None = None

    def __post_init__(self) -> None:
        self.plan, self.settings = self.columns.plan, self.columns.plan.layout.settings

    @property
    def is_row(self) -> bool:
        """Return whether it is one of several rows of equal shape, which may be padded."""
        return ("N" in self.environment or "K" in self.fixed) and "NS" not in self.fixed

    def fixed_of(self, place: Place) -> dict[str, Any]:
        """Return the position of the trace on the axes of a place."""
        fixed = dict(self.fixed)
        for name in {"N", "K"} & self.environment.keys():
            fixed[name] = self.environment["N*" if name == "N" and "N*" in self.plan.keys.get(place, ()) else name]
        return fixed

    def _use(self, column: Column, value: Any = None) -> int:
        """Return how many traces the row of this trace serves now; copies that are dropped are one trace."""
        is_dropped = self.settings.get("duplicates") == "drop"
        copy = (self.environment.get("id"), self.environment.get("sample")) if is_dropped else None
        return column.use(column.own_environment(self.environment, self.made_id), copy, value)

    def _count(self, column: Column, *, is_there: bool) -> None:
        """Count a trace for which a table has no row."""
        if not is_there and column.place in self.columns.tables:
            made = {"id": self.made_id} if self.made_id else {}
            file = tuple(self.environment.get(name) for name in self.plan.shared_names(column.place))
            texts = column.text_of(self.environment), column.text_of(self.environment | made)
            self.columns.missing.setdefault(column.place, set()).add((file, texts))

    def scalar(self, column: Column) -> Any:
        """Return the text or number of a column for the trace, None without one."""
        place = column.place
        value = column.scalar(column.own_environment(self.environment, self.made_id), self.fixed_of(place))
        self._count(column, is_there=value is not MISSING)
        if value is MISSING:
            return None
        self._check_rows(column)
        is_shared = self._is_shared(column)
        if self._use(column, value) > 1 and not is_shared:
            raise InvalidInputError(
                f"one row of {place.address} serves several traces; the field needs what tells them apart, or "
                f"share.{place.name} = {sorted(self._key().keys() - {'id'})}, or "
                'duplicates = "drop" for equal copies, not for parts of one trace',
                field=place.name,
            )
        return value

    def _key(self) -> dict[str, Any]:
        """Return what tells this trace apart: the names that its id is made of, and the number of the answer."""
        made = self.plan.layout.templates.get("question_id")
        own = {name: self.environment.get(name) for name in (("id",) if made is None else made.names)}
        return own | {"sample": self.environment.get("sample", self.environment.get("K"))}

    def _is_shared(self, column: Column) -> bool:
        """Return whether a row may serve this trace, too: those of a label differ by names alone that `share` states."""
        if column.place.rule.kind not in ("score", "text") or column.place.name in SHARED:
            return True
        if (names := self.settings.get(f"share.{column.place.name}")) is None:
            return False
        first = column.first_of(column.own_environment(self.environment, self.made_id), own := self._key())
        return all(name in names or value == first[name] for name, value in own.items())

    def items_of(self, name: str) -> Iterator[Cell]:
        """Yield the values of a field that may serve several traces."""
        for column in self.columns.of(name):
            cells = column.cells(column.own_environment(self.environment, self.made_id))
            self._count(column, is_there=bool(cells))
            self._use(column)
            yield from cells

    def cells_of(self, name: str) -> dict[int, list[Cell]]:
        """Return the values of a field by the part of the field that they are."""
        found: dict[int, list[Cell]] = {}
        for column in self.columns.of(name):
            place, environment = column.place, column.own_environment(self.environment, self.made_id)
            if not (all_cells := column.cells(environment)):
                column.check_list(environment)
            cells = [cell for cell in all_cells if not is_missing(cell.value)]
            self._count(column, is_there=bool(cells))
            if not cells:
                continue
            is_prompt = self.plan.of_answers and place.part < len(self.plan.layout.addresses.get(name, ())) - 1
            if self._use(column) > 1 and place.rule.kind != "known" and not is_prompt:
                raise InvalidInputError(f"one value of {place.address} serves several traces", field=name)
            self._check_rows(column)
            found.setdefault(place.part, cells)
        return found

    def _check_rows(self, column: Column) -> None:
        """Rule 9: values behind each other are as many as the states."""
        for axis in ("NS", *FLAT_ANSWERS):
            if axis in column.place.axes:
                cell = column.cells(column.own_environment(self.environment, self.made_id))[0]
                if (size := extent(cell.value, cell.axes, axis)) != self.num_rows:
                    found = f"{size} on the axis ({' '.join(axis)})"
                    raise field_error(column.place.name, found, f"{self.num_rows:,} as states")

    def array(self, name: str, letters: str) -> tuple[np.ndarray, str] | None:
        """Return the values of a field on one of the letters, its parts behind each other, and the letter."""
        found, arrays, letter = self.cells_of(name), list[np.ndarray](), letters[0]
        for part, cells_of_part in sorted(found.items()):
            num_before = sum(map(len, arrays)) + (name in self.plan.layout.templates)
            self.num_first_values = num_before if part else 0
            if part and self.num_first not in (0, num_before):
                found_first = f"found {num_before} values in the first part, and {self.num_first} states in theirs"
                raise InvalidInputError(found_first, field=name)
            fixed_of_part = self.fixed_of(cells_of_part[0].place)
            for cells, fixed in passes(cells_of_part, fixed_of_part, firsts=None if part else ()):
                axes = cells[0].axes
                letter = next((c for c in letters if c in axes), letters[0])
                letter = "S" if "NS" in axes else letter
                counted = next((n for n in ("token", *letters) if n in cells[0].bound), None)
                if counted is not None:
                    ordered = _one_per_token(cells, counted, name)
                    arrays.append(np.stack([read(cell.value, cell.axes, fixed, name)[0] for cell in ordered]))
                    continue
                copies = [np.atleast_1d(read(cell.value, cell.axes, fixed, name)[0]) for cell in cells]
                if not all(np.array_equal(copy, copies[0]) for copy in copies[1:]):
                    raise InvalidInputError("found different values for one trace", field=name)
                arrays.append(copies[0])
        return (self._joined(arrays, found[min(found)][0].place, letter), letter) if arrays else None

    def known(self, name: str, value: Any) -> Any:
        """Return what is known of an axis; InvalidInputError if the layout states it and the trace has none."""
        if value is None and name in self.plan.layout.addresses:
            raise InvalidInputError("the trace has no value where the layout says", field=name)
        return value

    def _joined(self, arrays: list[np.ndarray], place: Place, letter: str) -> np.ndarray:
        """Return the parts of a field behind each other, those of tokens from the first token with states on."""
        if (pattern := self.plan.layout.templates.get(place.name)) is not None:
            text = pattern.fill(self.environment)
            first = text if place.name == "tokens_decoded" else number_of(text, place.name)
            arrays = [np.asarray([first], object if first is text else None), *arrays]
        if len(arrays) > 1 and len({array.shape[1:] for array in arrays}) > 1:
            shapes = " and ".join(str(array.shape) for array in arrays)
            raise InvalidInputError(f"found parts of the shapes {shapes}, expected one width", field=place.name)
        values = arrays[0] if len(arrays) == 1 else np.concatenate(list(map(numbers_of, arrays)))
        is_of_answer, is_of_states = place.is_of_answer, letter in "STG" and self.plan.is_of_answer
        if is_of_answer == is_of_states:
            return values
        field, begin = schema.TOKEN_FIELDS.get(place.name), self.prompt_length
        if is_of_answer and field is None:
            raise InvalidInputError(
                "values from prompt_length on need those of the prompt: a list of two addresses", field=place.name
            )
        if type(begin) is not int or begin < 0:
            raise InvalidInputError(f"found {begin}, expected where the axis G begins", field="prompt_length")
        if field is None or is_of_states:
            return values[begin:]
        unknown = np.full((begin, *values.shape[1:]), field.fill, field.dtype)
        return np.concatenate([unknown, numbers_of(values)])

    def number_of_answer(self, question_id: str) -> int:
        """Return the number of an answer among the rows of its question, in the order of the rows that give the ids."""
        column = next(self.columns.of("question_id"))
        if column.place not in self.columns.unit:
            return column.number_among_equals(self.environment)
        if column.place.position_prefix is None:
            raise InvalidInputError(f"{column.place.address} has no rows in order, whose answers count", field="sample")
        numbers = self.columns.num_answers
        numbers[question_id] = numbers.get(question_id, -1) + 1
        return numbers[question_id]


def passes(
    cells: list[Cell], fixed: Mapping[str, Any], rows: list[int] | None = None, firsts: tuple[int, ...] | None = ()
) -> Iterator[tuple[list[Cell], Mapping[str, Any]]]:
    """Yield the cells of each pass of generation, or all of them, with what is fixed on the axes.

    `rows` are the positions of a beam, which begin to be negative behind its end. Steps are numbered from 0, 1 or
    one of `firsts`; from any number where `firsts` is None.
    """
    what = cells[0].place.name
    name = next((n for n in ("step", "P") if n in cells[0].bound), None)
    if name is not None:
        numbers = sorted({cell.bound[name] for cell in cells})
        if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            raise InvalidInputError(f"the steps {numbers!s:.60} have gaps", field=what)
        if firsts is not None and numbers[0] not in (0, 1, *firsts):
            expected = " or ".join(map(str, sorted({0, 1, *firsts})))
            raise InvalidInputError(f"the first step is {numbers[0]}, expected {expected}", field=what)
        for number in numbers:
            yield [cell for cell in cells if cell.bound[name] == number], fixed
    elif "P" in cells[0].axes:
        count = extent(cells[0].value, cells[0].axes, "P")
        if not count:
            raise InvalidInputError("found zero passes, expected at least one", field=what)
        if rows is None:
            yield from ((cells, {**fixed, "P": number}) for number in range(count))
            return
        kept = next((k for k, row in enumerate(rows) if row < 0), len(rows))
        if not 0 < kept <= count or any(row >= 0 for row in rows[kept:]):
            raise InvalidInputError(f"found {rows!s:.60} for {count} passes", field="P.rows")
        yield from ((cells, {**fixed, "P": number, "N": rows[number]}) for number in range(kept))
    else:
        yield cells, fixed


def _one_per_token(cells: Sequence[Cell], name: str, what: str) -> list[Cell]:
    """Return the cells of a trace in the order of its tokens; rows of one token, such as those of its layers, are equal."""
    found: dict[int, Cell] = {}
    for cell in cells:
        if found.setdefault(cell.bound[name], cell).value != cell.value:
            raise InvalidInputError(f"found two values of {name} {cell.bound[name]}", field=what)
    return [found[k] for k in sorted(found)]


def traces_of(cells: Sequence[Cell], columns: TraceColumns) -> Iterator[TraceCells]:
    """Yield the traces of cells of the states, an axis N or K unrolled."""
    plan = columns.plan
    names = (*sorted(plan.names), *sorted(plan.wild))
    groups: dict[tuple[Any, ...], TraceCells] = {}
    prompts: dict[tuple[Any, ...], list[Cell]] = {}  # that several answers have
    of_prompt = [name for name in names if name not in plan.of_answers]
    for cell in cells:
        if plan.of_answers and cell.place.part == 0:
            prompts.setdefault(tuple(cell.bound.get(name) for name in of_prompt), []).append(cell)
            continue
        key = tuple(cell.bound.get(name) for name in names)
        if (trace := groups.get(key)) is None:
            environment = {n: v for n, v in cell.bound.items() if n in names or n == "file"}
            trace = groups[key] = TraceCells(columns, environment, {})
        trace.cells.setdefault(cell.place.part, []).append(cell)
    _add_prompts(groups.values(), prompts, of_prompt)
    for trace in groups.values():
        if missing := [p.part for p in plan.states if p.part not in trace.cells]:
            where = named(trace.environment, trace.environment.values()) or "the trace"
            raise InvalidInputError(f"{where} has no part {missing[0]}", field=plan.layout.states)
        yield from _unrolled(trace)


def _add_prompts(
    traces: Collection[TraceCells], prompts: Mapping[tuple[Any, ...], list[Cell]], names: Sequence[str]
) -> None:
    """Give answers the prompt that binds the same; refuse one without an answer."""
    unused = set(prompts)
    for trace in traces if prompts else ():
        key = tuple(trace.environment.get(name) for name in names)
        if key in prompts:
            trace.cells[0] = prompts[key]
            unused.discard(key)
    if unused:
        where = named(names, min(unused, key=str)) or "the source"
        raise InvalidInputError(f"{where} has a prompt and no answer", field="hidden_states")


def _unrolled(trace: TraceCells) -> Iterator[TraceCells]:
    cell = trace.cells[min(trace.cells)][0]
    if not any("N" in axis or "K" in axis for cells in trace.cells.values() for axis in cells[0].axes):
        yield trace
        return
    if "NS" in cell.axes:
        size = extent(cell.value, cell.axes, "NS") or 0
        known = {n: rows_along_n(column, trace.environment) for n in RANGES for column in trace.columns.of(n)}
        for n, (begin, end) in enumerate(trace.columns.starts.checked(ranges_of(known, size), trace.environment)):
            yield _at(trace, {"N": n, "NS": slice(begin, end)}, {"N": n}, size)
        return
    counts = _counts(trace)
    for column in trace.columns.of("P.rows"):
        counts["N"] = column.num_rows(trace.environment) or 0  # beams that were returned, of those of each pass
    if flat := next((axis for axis in FLAT_ANSWERS if axis in counts), None):
        total = counts[flat]
        num_questions = _num_questions(trace, total, flat)
        num_answers = total // num_questions
        for n, k in itertools.product(range(num_questions), range(num_answers)):
            at, first = {"N": n, "K": k}, n * num_answers
            found = _at(trace, {**at, "NK": first + k, "KN": k * num_questions + n}, at, total)
            found.answers = range(n, total, num_questions) if flat == "KN" else range(first, first + num_answers)
            yield found
        return
    for at_all in itertools.product(*map(range, counts.values())):
        position = dict(zip(counts, at_all, strict=True))
        yield _at(trace, position, position)


def _at(trace: TraceCells, fixed: dict[str, Any], position: Mapping[str, int], size: int = 0) -> TraceCells:
    """Return the trace at a position on the axes of the states."""
    return TraceCells(trace.columns, {**trace.environment, **position}, trace.cells, fixed, size)


def _counts(trace: TraceCells) -> dict[str, int]:
    """Return the extents of the axes N and K of the states, which are equal in all of their cells."""
    counts: dict[str, int] = {}
    for letter in ("N", "K", *FLAT_ANSWERS):
        cells = [cell for part in trace.cells.values() for cell in part if letter in cell.axes]
        found = {extent(cell.value, cell.axes, letter) for cell in cells}
        if len(found) > 1 or None in found:
            shown = "no value with" if None in found else f"{sorted(map(str, found))!s:.80} on"
            raise field_error(trace.plan.layout.states, f"{shown} the axis {letter}", f"one number of {letter}")
        if found:
            counts[letter] = found.pop() or 0
    return counts


def _num_questions(trace: TraceCells, count: int, axis: str) -> int:
    """Return the N of an axis (N K) or (K N), which is that of another field."""
    stack = {n: v for n, v in trace.environment.items() if n not in ("N", "K")}
    levels = (trace.columns.unit, trace.columns.source, trace.columns.tables)
    columns = [column for level in levels for column in level.values() if "N" in column.names]
    rows = {column.num_rows(stack) for column in columns if "K" not in column.place.trace_names} - {None}
    if len(rows) != 1 or count % (total := rows.pop() or 1):
        raise InvalidInputError(
            f"found {count} on the axis ({' '.join(axis)}), and no field that says N", field=trace.plan.layout.states
        )
    return total
