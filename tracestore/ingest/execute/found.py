"""Find the traces of a source, and the columns that each of them may use."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.execute.axes import extent
from tracestore.ingest.execute.join import Column
from tracestore.ingest.execute.tokens import Span, ranges_of
from tracestore.ingest.execute.values import describe, number
from tracestore.ingest.execute.walk import Cell, cells_of
from tracestore.ingest.layout.places import Place, Plan
from tracestore.ingest.tree import Items, Value, as_array

_RANGES = ("S.offsets", "S.lengths", "S.owner", "S.starts", "S.ends")


@dataclass
class FoundTrace:
    """A trace before its values are read: what it binds, the cells of its states, its position on their axes.

    `num_rows` is the extent of the axis (N S), `num_first` the number of tokens of the first of two parts.
    """

    environment: dict[str, Any]
    cells: dict[int, list[Cell]]
    fixed: dict[str, Any] = field(default_factory=dict)
    num_rows: int = 0
    num_first: int = 0

    @property
    def is_row(self) -> bool:
        """Return whether it is one of several rows of equal shape, which may be padded."""
        return ("N" in self.environment or "K" in self.fixed) and "NS" not in self.fixed


@dataclass
class Columns:
    """The columns that one trace may use: of its unit, of its source and of the tables of the run."""

    plan: Plan
    unit: dict[Place, Column] = field(default_factory=dict)
    source: dict[Place, Column] = field(default_factory=dict)
    tables: Mapping[Place, Column] = field(default_factory=dict)
    _num_answers: dict[str, int] = field(default_factory=dict)  # the last number of an answer by question

    def add(self, cell: Cell, source: str) -> None:
        """Add a value of a file of the source."""
        level = self.unit if cell.in_unit else self.source
        if (column := level.get(cell.place)) is None:
            column = level[cell.place] = Column(cell.place, self.plan.keys[cell.place])
        column.add(cell, source)

    def number_of_answer(self, trace: FoundTrace, question_id: str) -> int:
        """Return the number of an answer among the rows of its question, in the order of the rows that give the ids."""
        place, column = next(self.of("question_id"))
        if place not in self.unit:
            return column.number_among_equals(trace.environment)
        if place.position_prefix is None:
            raise InvalidInputError(f"{place.address} has no rows in order, whose answers count", field="sample")
        self._num_answers[question_id] = self._num_answers.get(question_id, -1) + 1
        return self._num_answers[question_id]

    def of(self, name: str) -> Iterator[tuple[Place, Column]]:
        """Yield the columns of a field, with their places."""
        for place in self.plan.others:
            if place.name == name:
                for level in (self.unit, self.source, self.tables):
                    if place in level:
                        yield place, level[place]


def identity_of(trace: FoundTrace, settings: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Return what copies of a trace have in common if they are dropped, else None."""
    is_dropped = settings.get("duplicates") == "drop"
    return (trace.environment.get("id"), trace.environment.get("sample")) if is_dropped else None


def with_offset(cells: Iterator[Cell | None], plan: Plan, text: str, root: Value) -> Iterator[Cell | None]:
    """Yield the cells of a file; the numbers of layers count from the offset that the file states."""
    place = next((p for p in plan.others if p.name == "L.offset" and p.address.files.text == text), None)
    if place is None:
        yield from cells
        return
    found = [cell.value for cell in cells_of(place, root) if cell]
    if len(found) != 1 or found[0] is None:
        raise InvalidInputError(f"found {len(found)} values, expected one number of the file", field=place.name)
    offset, first = number(found[0], "layer"), math.inf
    for cell in cells:
        if cell is not None and "layer" in cell.bound:
            first = min(first, cell.bound["layer"])
            cell = cell._replace(bound={**cell.bound, "layer": cell.bound["layer"] + offset})
        if cell is None or cell.place is not place:
            yield cell
    if offset and not offset > first:
        raise InvalidInputError(
            f"found {offset}, and layers from {first:g}: do they count from it already?", field=place.name
        )


class TraceFinder:
    """Find the traces in cells of the states.

    Parameters
    ----------
    columns : Columns
        What the source and the tables hold.
    """

    def __init__(self, columns: Columns) -> None:
        self.columns, self.plan = columns, columns.plan

    def traces(self, cells: Sequence[Cell]) -> Iterator[FoundTrace]:
        """Yield the traces of cells of the states, an axis N or K unrolled."""
        names = (*sorted(self.plan.names), *sorted(self.plan.wild))
        groups: dict[tuple[Any, ...], FoundTrace] = {}
        for cell in cells:
            key = tuple(cell.bound.get(name) for name in names)
            environment = {n: v for n, v in cell.bound.items() if n in names or n == "file"}
            trace = groups.setdefault(key, FoundTrace(environment, {}))
            trace.cells.setdefault(cell.place.part, []).append(cell)
        for trace in groups.values():
            if missing := [p.part for p in self.plan.states if p.part not in trace.cells]:
                where = ", ".join(f"{n} {v}" for n, v in trace.environment.items() if not n.startswith("*"))
                raise InvalidInputError(
                    f"{where or 'the trace'} has no part {missing[0]}", field=self.plan.layout.states
                )
            yield from self._unrolled(trace)

    def _unrolled(self, trace: FoundTrace) -> Iterator[FoundTrace]:
        letters = {letter for cells in trace.cells.values() for axis in cells[0].axes for letter in axis}
        if not letters & {"N", "K"}:
            yield trace
            return
        cell = trace.cells[min(trace.cells)][0]
        if "NS" in cell.axes:
            size = extent(cell.value, cell.axes, "NS") or 0
            for n, (begin, end) in enumerate(self._ranges(size, trace.environment)):
                yield FoundTrace({**trace.environment, "N": n}, trace.cells, {"N": n, "NS": slice(begin, end)}, size)
            return
        counts = self._counts([cell for cells in trace.cells.values() for cell in cells])
        for _, column in self.columns.of("P.rows"):
            counts["N"] = column.num_rows(trace.environment) or 0  # beams that were returned, of those of each pass
        if "NK" in counts:
            yield from self._of_pairs(trace, counts["NK"])
            return
        for position in itertools.product(*map(range, counts.values())):
            fixed = dict(zip(counts, position, strict=True))
            yield FoundTrace({**trace.environment, **fixed}, trace.cells, fixed)

    def _counts(self, cells: Sequence[Cell]) -> dict[str, int]:
        """Return the extents of the axes N and K of cells, which are equal."""
        counts: dict[str, int] = {}
        for letter in ("N", "K", "NK"):
            found = {extent(cell.value, cell.axes, letter) for cell in cells if letter in cell.axes}
            if len(found) > 1 or None in found:
                raise InvalidInputError(
                    f"found {sorted(map(str, found))!s:.80} on the axis {letter}, expected one number",
                    field=self.plan.layout.states,
                )
            if found:
                counts[letter] = found.pop() or 0
        return counts

    def _of_pairs(self, trace: FoundTrace, count: int) -> Iterator[FoundTrace]:
        """Yield the answers of an axis (N K), whose N is that of another field."""
        stack = {n: v for n, v in trace.environment.items() if n not in ("N", "K")}
        rows = {column.num_rows(stack) for place, column in self._in_order() if "K" not in place.trace_names}
        rows.discard(None)
        if len(rows) != 1 or count % (total := rows.pop() or 1):
            raise InvalidInputError(
                f"found {count} on the axis (N K), and no field that says N", field=self.plan.layout.states
            )
        size = count // total
        for at in range(count):
            n, k = divmod(at, size)
            yield FoundTrace({**trace.environment, "N": n, "K": k}, trace.cells, {"N": n, "K": k, "NK": at})

    def _in_order(self) -> Iterator[tuple[Place, Column]]:
        for level in (self.columns.unit, self.columns.source, self.columns.tables):
            for place, column in level.items():
                if "N" in column.names:
                    yield place, column

    def _ranges(self, size: int, environment: Mapping[str, Any]) -> list[Span]:
        known = {}
        for name in _RANGES:
            for _, column in self.columns.of(name):
                known[name] = self._all_rows(column, environment)
        return ranges_of(known, size)

    def _all_rows(self, column: Column, environment: Mapping[str, Any]) -> np.ndarray:
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
