"""Columns of values by what they bind, their values for one trace, and checks of what was joined."""

import itertools
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from tracestore.errors import InvalidInputError, escape_unprintable
from tracestore.ingest.execute.axes import MISSING, descend, extent, read
from tracestore.ingest.execute.values import check_ids_exact, describe, is_missing, key_text, named, one_value, plain_of
from tracestore.ingest.execute.walk import Cell
from tracestore.ingest.layout.fields import KEY, STATES
from tracestore.ingest.layout.patterns import INNER_NAMES
from tracestore.ingest.layout.places import Place, Plan
from tracestore.ingest.readers.tree import Array, Items, NumpyArray, Value
from tracestore.store.format.schema import ANSWER_FIELDS
from tracestore.store.io.scratch import Scratch
from tracestore.store.write.field_values import field_error
from tracestore.store.write.record import TraceRecord
from tracestore.words import folded

# Keys that hold the text of a field.
_QUESTION = ("question",)
_ROW_TEXTS = {
    **dict.fromkeys(("question", "prompt"), _QUESTION),
    **dict.fromkeys((*ANSWER_FIELDS, "response", "completion", "generation"), ANSWER_FIELDS),
}
_MAX_CACHED = 1 << 20  # numbers of an array along N that are read at once
# Up to this many bytes of arrays wait for the rest of their traces without a copy: a trace for each row needs none.
_WAITING_BYTES = 16 << 20
_BLOCK_BYTES = 16 << 20


class Column:
    """The values of a place by what joins them to traces.

    Parameters
    ----------
    place : Place
    names : tuple of str
        The names that join it to a trace.

    Attributes
    ----------
    used : dict
        How many traces each row serves.
    ends : list of tuple
        The first and the last row in order that served a trace: its key, id and sample of the trace, and its value.
    """

    def __init__(self, place: Place, names: tuple[str, ...]) -> None:
        self.place, self.names = place, names
        self._cells: dict[tuple[Any, ...], list[Cell]] = {}
        self._own: tuple[str, ...] | None = None  # names that cells bind; N may be an axis of them instead
        self.used: dict[tuple[Any, ...], int] = {}
        self.ends: list[tuple[Any, ...]] = []
        self._cached: dict[int, list[Any]] = {}
        self._served: dict[tuple[Any, ...], Any] = {}  # the first trace of each row, where copies are dropped
        self._firsts: dict[tuple[Any, ...], dict[str, Any]] = {}  # what the first trace of each row binds
        self._numbers: dict[tuple[Any, ...], int] | None = None  # of rows among those of the same value
        self._lists: set[tuple[Any, ...]] | None = None  # the keys of lists of answers
        self.has_made_ids: bool | None = None  # or those of names; None if no row shows it
        self._files: dict[tuple[Any, ...], str] = {}  # by the key of a stack of rows

    def add(self, cell: Cell, source: str) -> None:
        """Add a value of a file; rule 12: no key twice, rule 13: rows in order lie in one file."""
        if cell.value is None and cell.axes:
            return  # a key that is missing
        if self._own is None:
            self._own = tuple(name for name in self.names if _bound_name(name) in cell.bound or name.startswith("*"))
        key = tuple(cell.bound.get(_bound_name(name)) for name in self._own)
        cells = self._cells.setdefault(key, [])
        if not INNER_NAMES.isdisjoint(cell.bound):
            cells.append(cell)
            return
        bound = dict(zip(self._own, key, strict=True))
        if "N" in self.place.trace_names:
            stack = tuple(v for n, v in bound.items() if n not in ("N", "N*"))
            if (other := self._files.setdefault(stack, source)) != source:
                raise InvalidInputError(f"rows in order lie in {other} and {source}", field=self.place.name)
        if not cells or cells[0].value is None:
            cells[:] = [cell]
        elif cell.value is not None and cells[0].value != cell.value:
            where = named(map(_bound_name, self._own), key)
            found = f"found two values of {where}" if where else "found two values that no name or [] tells apart"
            raise InvalidInputError(found, field=self.place.name)

    def own_environment(self, environment: dict[str, Any], made_id: str | None) -> dict[str, Any]:
        """Return what a trace binds, with the id that the layout makes where the rows have those ids.

        Raises
        ------
        InvalidInputError
            If the rows have the ids that names bind, too.
        """
        if made_id is None or "id" not in (self._own or ()):
            return environment
        both = (environment, environment | {"id": made_id})
        found = [is_made for is_made in (False, True) if self.cells(both[is_made])]
        if len({*found, self.has_made_ids} - {None}) > 1:
            known = f"{environment['id']} as in names and of {made_id} as question_id says"
            raise InvalidInputError(
                f"found rows of {known}: another name than id tells them apart", field=self.place.name
            )
        self.has_made_ids = found[0] if found else self.has_made_ids
        return both[self.has_made_ids is not False]

    def cells(self, environment: Mapping[str, Any]) -> list[Cell]:
        """Return the values that belong to a trace."""
        return self._cells.get(_key(self._own or (), environment), [])

    def number_among_equals(self, environment: Mapping[str, Any]) -> int:
        """Return the number of a row among those of the same value, in their order."""
        if self._numbers is None:
            seen: dict[Any, int] = {}
            self._numbers = {}
            for key in self.rows():
                at = dict(zip(self.names, key, strict=True))
                value = self.scalar(at, {name.rstrip("*"): k for name, k in at.items() if name in ("N", "N*", "K")})
                self._numbers[key] = seen[value] = seen.get(value, -1) + 1
        return self._numbers[_key(self.names, environment)]

    def all_cells(self) -> Iterator[Cell]:
        """Return every value."""
        return itertools.chain.from_iterable(self._cells.values())

    def use(self, environment: Mapping[str, Any], trace: Any = None, value: Any = None) -> int:
        """Count that a row serves a trace; return how many it serves now: a copy of `trace` is the same one."""
        key = _key(self.names, environment)
        if self.is_in_order:
            row = (key, *(environment.get(name) for name in ("id", "sample")), value)
            self.ends = [min(*self.ends, row, row, key=_number), max(*self.ends, row, row, key=_number)]
        if trace is None or self._served.setdefault(key, trace) != trace or key not in self.used:
            self.used[key] = self.used.get(key, 0) + 1
        return self.used[key]

    def first_of(self, environment: Mapping[str, Any], trace: dict[str, Any]) -> dict[str, Any]:
        """Return what the first trace of a row binds; `trace` is what this one binds."""
        return self._firsts.setdefault(_key(self.names, environment), trace)

    def leave_out(self, environment: Mapping[str, Any]) -> None:
        """Let a row belong to a trace that is left out, if it serves no other one."""
        self.used.setdefault(_key(self.names, environment), 0)

    def text_of(self, bound: Mapping[str, Any]) -> str:
        """Return the key of a row or trace as a text."""
        return ", ".join(str(bound.get(name, "")) for name in self.names if name[0] != "*")

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield the keys of all rows that hold a value, axes N and K unrolled."""
        for key, cells in self._cells.items():
            if all(is_missing(cell.value) for cell in cells):
                continue
            bound = dict(zip(self._own or (), key, strict=True))
            letters = [name for name in self.names if name not in bound and name in ("N", "N*", "K")]
            sizes = [extent(cells[0].value, cells[0].axes, letter[0]) or 0 for letter in letters]
            for position in itertools.product(*map(range, sizes)):
                at = bound | dict(zip(letters, position, strict=True))
                yield _key(self.names, at)

    def partial_answers(self, unused: list[tuple[Any, ...]]) -> str | None:
        """Return what is wrong with a list of answers of which only some belong to traces: its numbers may be others."""
        if (answer := self._answer) is None or not unused:
            return None
        at = self.names.index(answer)
        used = {key[:at] + key[at + 1 :] for key in self.used}
        if (partial := next((key for key in unused if key[:at] + key[at + 1 :] in used), None)) is None:
            return None
        return f"{named(self.names, partial)} belongs to no trace, others of the list do"

    @property
    def _answer(self) -> str | None:
        """The name by which the order of rows numbers the answers to a question, None without one."""
        return next((n for n in self.names if n == "K" or (n == "sample" and n in self.place.numbered)), None)

    @property
    def is_in_order(self) -> bool:
        """Return whether the order of its rows is a part of what joins them."""
        return bool(self.place.numbered) or not {"N", "N*", "K"}.isdisjoint(self.names)

    @property
    def joined_by(self) -> str:
        """The way its rows are joined: "in order", "by position", or "by" names."""
        names = ", ".join(name.rstrip("*") for name in self.names if not name.startswith("*")) or "source"
        if self.place.numbered - {"sample"}:
            return "by position"
        return "in order" if names == "N" else f"by {names}"

    def scalar(self, environment: Mapping[str, Any], fixed: Mapping[str, Any]) -> Any:
        """Return the text, number or None of a trace; MISSING without a row.

        Rows of one trace, such as those of its tokens or layers, say the same.
        """
        cells = self.cells(environment)
        value: Any = self._value(cells[0], fixed) if cells else MISSING
        if value is MISSING:
            self.check_list(environment)
            return value
        for cell in cells[1:]:
            if (other := self._value(cell, fixed)) != value:
                found = f"{describe(value)} and {describe(other)} in the rows of one trace"
                raise field_error(self.place.name, found, "one value")
        return value

    def check_list(self, environment: Mapping[str, Any]) -> None:
        """Rule 12: values in the order of answers are as many, None where one is missing."""
        if (answer := self._answer) is None:
            return
        if self._lists is None:
            at = [k for k, name in enumerate(self._own or ()) if name != answer]
            self._lists = {tuple(key[k] for k in at) for key in self._cells}
        if tuple(environment.get(name) for name in self._own or () if name != answer) in self._lists:
            raise InvalidInputError(f"the list has no value of the answer {environment[answer]}", field=self.place.name)

    def _value(self, cell: Cell, fixed: Mapping[str, Any]) -> Any:
        what = self.place.name
        if cell.axes == ("N",) and (values := self._along_n(cell)) is not None:
            return values[fixed["N"]] if fixed["N"] < len(values) else MISSING
        value, axes = descend(cell.value, cell.axes, fixed)
        if value is MISSING:
            return MISSING
        if not axes:
            return plain_of(value) if self.place.rule.kind == "json" else one_value(value, what)
        array, letters = read(value, axes, fixed, what)
        if letters == ("S",) and what.startswith(KEY) and (array == array[:1]).all():  # of all rows of the trace
            return array[0].item()
        if letters or array.ndim:
            raise InvalidInputError(f"found the shape {array.shape}, expected one value per trace", field=what)
        return array.item()

    def _along_n(self, cell: Cell) -> list[Any] | None:
        """Return the numbers of a small array along N, read once; None for another value."""
        if not isinstance(cell.value, Array) or cell.value.ndim != 1 or cell.value.shape[0] > _MAX_CACHED:
            return None
        if (values := self._cached.get(id(cell))) is None:
            if self.place.name == "question_id":
                check_ids_exact(cell.value)
            values = self._cached[id(cell)] = cell.value.read().tolist()
        return values

    def num_rows(self, stack: Mapping[str, Any]) -> int | None:
        """Return the number of rows along N of a stack, None if none is there."""
        assert self._own is not None
        names = [name for name in self._own if name not in ("N", "N*")]
        if len(names) == len(self._own):
            cells = self.cells(stack)
            return extent(cells[0].value, cells[0].axes, "N") if cells else None
        wanted = _key(names, stack)
        return sum(_key(names, dict(zip(self._own, key, strict=True))) == wanted for key in self._cells) or None


class _Texts(NamedTuple):
    """The texts of a column by what joins its rows, the fields that they may be, and all of them."""

    fields: tuple[str, ...]
    names: tuple[str, ...]
    rows: dict[tuple[Any, ...], str]
    found: set[str]


class RowTexts:
    """Questions and answers of rows that no line names: they show whether the rows are those of the traces."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._texts: dict[str, _Texts] = {}
        # The columns with the question of a trace, and what is wrong with the first two traces in other columns.
        self._agreeing: set[str] = set()
        self._differing: dict[str, list[str]] = {}
        self._hashes: dict[str, array[int]] = {}  # of the other texts of rows in order, by their columns

    def add(self, prefix: str, key: str, value: Value, bound: Mapping[str, Any]) -> None:
        """Add a text of the next row of a list or table; a text in the same row as the field proves nothing."""
        if key in _ROW_TEXTS and ("N" in bound or _ROW_TEXTS[key] == _QUESTION):
            path = f"{prefix}{key}"
            texts = self._texts.get(path) or self._texts.setdefault(path, self._new(prefix, key, bound))
            if texts.fields and isinstance(value, str) and value.strip():
                texts.rows[tuple(bound[name] for name in texts.names)] = value
                texts.found.add(folded(value))
        elif "N" in bound and (value is None or isinstance(value, str)):
            self._hashes.setdefault(f"{prefix}{key}", array("q")).append(hash(value and key_text(value)))

    def _new(self, prefix: str, key: str, bound: Mapping[str, Any]) -> _Texts:
        own = {place.name for place in self._plan.places if str(place.address).startswith(prefix)}
        is_told = "N" in bound or own.isdisjoint(STATES)
        names = tuple(name for name in bound if not (name == "file" or name[0] == "*" or name in INNER_NAMES))
        return _Texts(tuple(name for name in _ROW_TEXTS[key] if is_told and name not in own), names, {}, set())

    def check_ids(self, row: int, total: int, question_id: str) -> None:
        """Rule 13: a text of a row is not the id of another trace; a column that lacks an id holds other texts."""
        for path, hashes in list(self._hashes.items()):
            if len(hashes) == total and hashes[row] != (own := hash(question_id)):
                if not question_id.isdecimal() and own in hashes:
                    raise InvalidInputError(
                        f"row {row} of {path} has another id, and row {hashes.index(own)} has this one: rows in another "
                        f'order? ignore = ["{path}"] if not'
                    )
                self._hashes.pop(path, None)

    def check(self, environment: Mapping[str, Any], record: TraceRecord) -> None:
        """Rule 13b: texts that both sides hold are equal or contained, row by row.

        Of rows that names join, only the question of another row shows that the names mean other traces.
        """
        for path, (fields, names, rows, found) in self._texts.items():
            text = rows.get(_key(names, environment))
            own = [record.strings[name] for name in fields if record.strings.get(name)]
            if text is None or not own:
                continue
            if any(texts_agree(text, one) for one in own):
                self._agreeing.add(path)
                continue
            shown, expected = (escape_unprintable(part, 40) for part in (text, own[0]))
            where = named(["row" if name == "N" else name for name in names], _key(names, environment))
            message = (
                f"{where} of {path} is {shown!r}, and the trace has {expected!r}: rows "
                f'in another order? ignore = ["{path}"] if not'
            )
            if ("K" not in environment) if "N" in names else (folded(own[0]) in found):
                raise InvalidInputError(message)
            if "N" not in names and len(messages := self._differing.setdefault(path, [])) < 2:
                messages.append(message)

    def close(self) -> None:
        """Rule 13b: of several traces that names join to rows, one has the question of its row."""
        for path, messages in self._differing.items():
            if len(messages) > 1 and path not in self._agreeing:
                raise InvalidInputError(messages[0])


class Arena:
    """Keep the arrays of cells without the buffers of their reader.

    Parameters
    ----------
    scratch : Scratch
        Memory for the copies.
    """

    def __init__(self, scratch: Scratch) -> None:
        self._scratch, self._block, self._end, self._waiting_bytes = scratch, np.empty(0, "u1"), 0, 0

    def kept(self, cells: Iterable[Cell | None], root: Value) -> Iterator[Cell | None]:
        """Yield cells of a file; where its reader lends arrays, copies of them once many wait for their traces."""
        is_lent = isinstance(root, Items) and root.is_lent
        for cell in cells:
            if cell is None:
                self._block, self._end, self._waiting_bytes = np.empty(0, "u1"), 0, 0
            if cell is not None and is_lent and isinstance(cell.value, Array):
                cell = cell._replace(value=self._copied(cell.value))
            yield cell

    def _copied(self, value: Array) -> Array:
        array = value.read()
        self._waiting_bytes += array.nbytes
        if self._waiting_bytes <= _WAITING_BYTES:
            return value
        if self._end + array.nbytes > len(self._block):
            self._block, self._end = self._scratch.empty(max(_BLOCK_BYTES, array.nbytes), "u1"), 0
        begin, self._end = self._end, self._end + -(-array.nbytes // 16) * 16
        copy = self._block[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        return NumpyArray(copy)


def _number(row: tuple[Any, ...]) -> Any:
    """Return what sorts a row by its key, whose parts may be numbers, texts and None."""
    return [(type(part) is int, part if type(part) is int else 0, str(part)) for part in row[0]]


def _key(names: Iterable[str], bound: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(bound.get(name) for name in names)


def texts_agree(one: str, two: str) -> bool:
    """Return whether two texts are equal, or one is in the other; blanks, case and forms of a character are no difference."""
    one, two = folded(one), folded(two)
    return one in two or two in one


def _bound_name(name: str) -> str:
    """Return what a cell binds for a name that joins it: N for N*, the number over all chunks."""
    return name if name.startswith("*") else name.rstrip("*")
