"""Accounts of sources and runs: keys, rows, and what no line of a layout names."""

import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from tracestore.errors import InvalidInputError, escape_unprintable, nearest, some_of
from tracestore.ingest.execute.claims import Claimed
from tracestore.ingest.execute.join import Column
from tracestore.ingest.execute.row_ranges import RowNumbers, key_words
from tracestore.ingest.execute.shown_traces import EqualLengths, ShownTraces
from tracestore.ingest.execute.table_accounts import (
    KeptValues,
    MissingRow,
    OnUnused,
    TableAccount,
    check_num_rows,
    check_totals,
    close_table,
    end_text,
    table_accounts,
)
from tracestore.ingest.execute.traces import TraceColumns
from tracestore.ingest.execute.values import describe, holds_array, named
from tracestore.ingest.execute.walk import Bound, Cell, Node
from tracestore.ingest.layout.language import ignore_line
from tracestore.ingest.layout.patterns import AXIS_NAMES, literal_key
from tracestore.ingest.layout.places import Place, Plan
from tracestore.ingest.readers.tree import Group, Items, Value, as_array
from tracestore.store.vocabulary import is_named_as_verdict, is_verdict
from tracestore.store.write.record import TraceRecord

# Words of keys that may be labels, scores or reference answers, besides those of `is_named_as_verdict` (rules 8a, 22a).
_LABEL_WORDS = frozenset(["y", "ok", "target", "targets", "truth", "bleurt", "rouge"])
# `records` does not take them for an extra; `create` has a meaning for the last ones.
OWN_LINES = frozenset(["answer", "answers", "sample", "samples", "attention_mask", "lengths", "edges"])
_OF_TOKENS = frozenset(["prompt_length", "tokens", "tokens_decoded"])
_COUNTED = frozenset(("token", "step"))
_MAX_SHOWN = 6  # paths that the summary names
_LAYER_NUMBERS = re.compile(r"(?i)layers?([_-]?(ids?|idx|ind(ex|ices)|num(ber)?s?|list))?")


class SourceAccount:
    """The accounts of one source: keys that occur once, and rows in order of which none is left over."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.num_refused = 0
        self.answers: range | None = None  # the rows of the states of all answers to the question of the last trace
        self.unused: list[tuple[str, int, str]] = []  # line, values without a trace, names of the first one
        self._keys: set[tuple[str, int]] = set()
        self._rows: dict[tuple[Any, ...], int] = {}
        self._stacks: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._open_stacks: set[tuple[Any, ...]] = set()  # of the unit
        self._total = 0

    def count_row(self, environment: dict[str, Any]) -> int:
        """Count a trace in its stack; return its number in the source."""
        stack = {n: v for n, v in environment.items() if n not in ("N", "N*", "K", "file")}
        key = tuple(stack.values())
        self._stacks[key] = stack
        self._open_stacks.add(key)
        before = self._rows.get(key, 0)
        self._rows[key] = max(before, environment["N"] + 1)
        self._total += self._rows[key] - before
        return self._total - 1

    def add_key(self, record: TraceRecord) -> None:
        """Rule 10: each (id, sample) once."""
        key = (record.question_id, record.sample)  # the store refuses copies that differ
        if key in self._keys and self._plan.layout.settings.get("duplicates") != "drop":
            numbering = 'sample = "#" numbers the answers to a question in the order of their rows'
            if "question_id" not in self._plan.layout.addresses:
                numbering = "K instead of N, or [K] of [], are the answers to a question"
            raise InvalidInputError(
                f"the id {escape_unprintable(key[0], 60)!r}, sample {key[1]}, occurs twice: {numbering}, a line for "
                'sample states numbers, and duplicates = "drop" counts copies once',
                position=record.position,
                field="question_id",
            )
        self._keys.add(key)

    def close_unit(self, columns: TraceColumns) -> None:
        """Close the accounts of the rows of a unit."""
        self._check(columns.unit, self._open_stacks)
        self._check_unused(columns.unit)
        self._open_stacks = set()

    def close(self, columns: TraceColumns) -> None:
        """Close the accounts of the source."""
        self._check(columns.source, self._stacks)
        self._check_unused(columns.source)
        self._check(columns.tables, self._stacks)
        if self._plan.is_global and "chunk" not in self._plan.states[0].address.files.names:
            check_totals(columns.tables, self._total, next(iter(self._stacks.values()), {}))

    def _check_unused(self, level: Mapping[Place, Column]) -> None:
        """Rule 11: the arrays of a source have the ids of its states; something of every other field has them (12c)."""
        for place, column in level.items():
            is_counted = not (self._is_uncounted(place) or self.num_refused)
            unused = [key for key in column.rows() if key not in column.used] if is_counted else []
            if not unused:
                continue
            where = named(column.names, unused[0]) or "a value"
            if place.rule.kind in ("array", "texts") or "K" in column.names or not column.used:
                raise InvalidInputError(f"{where} of {place.address} belongs to no trace", field=place.name)
            self.unused.append((f"{place.name} = {place.address}", len(unused), escape_unprintable(where, 60)))

    def _is_uncounted(self, place: Place) -> bool:
        """Return whether rows of a field may serve no trace, as those of beams, or rule 9 has counted them."""
        is_of_beams = place.name == "attentions" and "P.rows" in self._plan.layout.addresses
        return is_of_beams or place.is_optional or place.rule.kind == "known"

    def _check(self, level: Mapping[Place, Column], stacks: Iterable[tuple[Any, ...]]) -> None:
        """Rule 13: as many rows in order as traces."""
        for place, column in level.items():
            prefix = place.position_prefix
            is_same_item = prefix is not None and any(p.position_prefix == prefix for p in self._plan.states)
            if "N" in column.names and not (is_same_item or self._is_uncounted(place)):
                for key in stacks:
                    check_num_rows(column, self._stacks[key], self._rows[key])


class RunAccount:
    """The accounts of a run: what no line names, the rows of its tables, and what its summary shows of the traces.

    Parameters
    ----------
    plan : Plan
    trees : Mapping
        The root of the paths of the layout by FILES.
    num_sources : int
    is_stated : bool
        Whether the files hold everything that the layout names.

    Attributes
    ----------
    is_whole : bool
        Whether no trace was refused.
    left_out : set of str
        Paths of the values that no line names.
    """

    def __init__(self, plan: Plan, trees: Mapping[str, Node], num_sources: int, *, is_stated: bool) -> None:
        self._plan, self._trees, self._num_sources, self._is_stated = plan, trees, num_sources, is_stated
        self.num_read = 0  # sources that were read to their end
        self._lock = threading.Lock()
        self._missing: dict[Place, set[MissingRow]] = {}
        self.tables: list[TableAccount] = []
        # By field and FILES: how many rows of the sources' own files are joined in order, and with the number of their
        # source the first and the last one.
        self._in_order: dict[tuple[str, str], tuple[int, tuple[int, str], tuple[int, str]]] = {}
        # By line: how many values of the sources' own files belong to no trace, and the first one.
        self._unused: dict[str, tuple[int, str]] = {}
        self.is_whole = True
        self._needs_tokens = is_stated and plan.layout.addresses.keys() & _OF_TOKENS == {"prompt_length"}
        self.numbers = RowNumbers(is_stated=is_stated)
        self._first_numbers: dict[tuple[str, int], int] = {}
        # The names of files that are the ids of the traces.
        files = {place.address.files.text: place.address.files for place in plan.states}
        is_made = "question_id" in {*plan.layout.addresses, *plan.layout.templates}
        self._named = [] if is_made else [pattern for pattern in files.values() if "id" in pattern.names]
        # The states lie under the same items.
        self._prefixes = {p.position_prefix for p in plan.states if p.position_prefix is not None}
        self.left_out: set[str] = set()
        self.kept = KeptValues(plan)
        self.shown = ShownTraces(plan)
        self.lengths = EqualLengths(plan, is_stated=is_stated)

    def refuse_unclaimed(self, columns: TraceColumns, node: Node, key: str, value: Value, bound: Bound) -> None:
        """Rule 8: every array has a line or is ignored. Rule 8a: so has what may be a label or a score."""
        if node.prefix.endswith(("]/", "}/")):
            columns.texts.add(node.prefix, str(key), value, bound)
        is_of_states = node.prefix.removesuffix("[]/") in self._prefixes and AXIS_NAMES.keys().isdisjoint(bound)
        is_chunk = "chunk" in bound and any("chunk" in p.address.bound for p in self._plan.states)
        self.numbers.check(node.prefix, str(key), value, bound, is_of_states=is_of_states, is_chunk=is_chunk)
        columns.starts.add(node.prefix, str(key), value, bound)
        path = node.prefix + (key if str(key).startswith("@") else literal_key(str(key)))  # @ of attributes
        if "id" in bound and isinstance(value, str) and node.prefix.endswith("]/"):
            self._check_file_name(path, str(key), value, bound)
        if self._holds_layer_numbers(path, str(key), value):
            return
        if not node.has_records or not isinstance(value, str | int | float):
            self.left_out.add(path)
        of_tokens = self._needs_tokens and isinstance(value, Items) and not value.is_stream and value.length != 1
        check_unclaimed(path, key, value, in_records=node.has_records, may_be_of_tokens=of_tokens)

    def _check_file_name(self, path: str, key: str, value: str, bound: Bound) -> None:
        """Rule 13b: a row that joins by id names no file of another trace."""
        for pattern in self._named:
            name = "/".join(value.split("/")[-1 - pattern.text.count("/") :])
            if (match := pattern.match(name)) is not None and str(match.bound["id"]) != str(bound["id"]):
                raise InvalidInputError(
                    f"{path}: the row of {escape_unprintable(str(bound['id']), 40)!r} names the file "
                    f"{escape_unprintable(value, 60)!r} of another trace; [file={key}] joins by it, "
                    f"{ignore_line(path)} if it is none"
                )

    def _holds_layer_numbers(self, path: str, key: str, value: Value) -> bool:
        """Return whether a value is the list that the layout states as `L.ids`; refuse another one."""
        stated = self._plan.layout.settings.get("L.ids")
        may_hold = stated is not None and "layer" in key.lower() and not looks_like_label(key)
        array = as_array(value) if may_hold else None
        if array is None or array.ndim != 1:
            return False
        numbers: list[Any] = array.read().tolist()
        if numbers != stated and all(type(number) is int for number in numbers):
            raise InvalidInputError(
                f"{path} holds {numbers!s:.60}, and L.ids is {stated!s:.60}; {ignore_line(path)} if it numbers no layers"
            )
        return bool(numbers == stated)

    @property
    def is_read(self) -> bool:
        """Return whether every source was read to its end in this run."""
        return self.num_read == self._num_sources

    @property
    def needs_all(self) -> bool:
        """Return whether a table was joined to a part of the sources, and the others may be a part of its account."""
        return not self.is_read and any(table.is_of_all for table in self.tables)

    def add_source(self, number: int, columns: TraceColumns, account: SourceAccount) -> None:
        """Add what a source lacks in tables, its columns that are in order, and its values without a trace."""
        with self._lock:
            self.num_read += 1
            for place, column in columns.source.items() if self._is_stated else ():
                if column.ends and place.position_prefix not in self._prefixes and place.rule.kind != "known":
                    first, last = ((number, end_text(row)) for row in column.ends)
                    self._add_in_order((place.name, place.address.files.text), len(column.used), first, last)
            for line, count, first_name in account.unused:
                self._add_unused(line, count, first_name)
            for place, keys in columns.missing.items():
                self._missing.setdefault(place, set()).update(keys)

    def _add_unused(self, line: str, count: int, first: str) -> None:
        before, earlier = self._unused.get(line, (0, first))
        self._unused[line] = before + count, min(first, earlier)

    def _add_in_order(self, key: tuple[str, str], count: int, first: tuple[int, str], last: tuple[int, str]) -> None:
        before = self._in_order.get(key, (0, first, last))
        self._in_order[key] = (before[0] + count, min(before[1], first), max(before[2], last))

    def check_numbers(self, part: int, cells: Sequence[Cell]) -> None:
        """Rule 4: tokens and steps that names number begin alike in every trace: at 0, at 1, or behind the part before."""
        for name in _COUNTED & cells[0].bound.keys():
            first = min(cell.bound[name] for cell in cells)
            kind = first if part == 0 else min(first, 2)
            self._check_first_number(name, part, kind, first)

    def _check_first_number(self, name: str, part: int, kind: int, first: int) -> None:
        with self._lock:
            expected = self._first_numbers.setdefault((name, part), kind)
        if kind != expected:
            raise InvalidInputError(
                f"the first {name} is {first}, expected {expected} as in an earlier trace: one of them lacks a {name}",
                field=self._plan.layout.states,
            )

    def follow(self, earlier: "RunAccount") -> None:
        """Let tokens and steps begin as in an earlier run."""
        self._first_numbers.update(earlier._first_numbers)

    def add_tables(self, tables: Mapping[Place, Column], files: Claimed) -> None:
        """Keep how the rows of the tables were joined, when all sources are read.

        Parameters
        ----------
        tables : Mapping
            The columns of the tables.
        files : dict
            The files by their FILES.
        """
        for place, column in tables.items():
            # Rule 9 closes the accounts of what is known of an axis.
            if not place.is_optional and place.rule.kind != "known":
                found, missing = files[place.address.files.text], self._missing.get(place, ())
                self.tables += table_accounts(column, found, missing, self.kept, self._plan)

    def close(self, on_unused: OnUnused) -> Iterator[str]:
        """Close the accounts of the run, and yield a line for each table.

        Parameters
        ----------
        on_unused : callable
            Called with rows without a trace; see `OnUnused`.

        Raises
        ------
        InvalidInputError
            Rules 12b and 12c: rows and traces that are left over would match by another spelling, or nothing matches.
        """
        yield from self.shown.lines(is_stated=self._is_stated)
        if self.is_read and (error := self.not_found()) is not None:
            raise error
        self.lengths.close()
        self.numbers.check_answers(self._plan.states[0].address.files.text)
        if not self._is_stated:  # by a person, who knows what the lines leave out
            ignored = [a for a in self._plan.left_out if a.path and self._trees[a.files.text].at(a.path).is_found]
            self.left_out.update(map(str, ignored))
        for _, tables in groupby(self.tables, lambda table: (table.field, table.address)):
            yield close_table(list(tables), on_unused, is_whole=self.is_whole)
        is_numbered = "L.ids" in {*self._plan.layout.addresses, *self._plan.layout.settings}
        for address in self._plan.left_out if self._is_stated and not is_numbered else ():
            if address.path and _LAYER_NUMBERS.fullmatch(address.path[-1].text):
                yield f"{address} is ignored: the layers are stored in the order of the arrays, without numbers"
        for (name, files), (count, first, last) in self._in_order.items():
            yield f"{name}: {f'{count:,} ' * (count > 0)}rows of {files} joined in order: the first {first[1]}, the last {last[1]}"
        for line, (count, where) in self._unused.items():
            yield f"{line}: {count:,} without a trace, such as {where}"
        yield from self.kept.lines()
        if self.left_out:
            yield f"not named by the layout and left out: {some_of(sorted(self.left_out), _MAX_SHOWN)}"

    def not_found(self) -> InvalidInputError | None:
        """Return the error of a line or an entry of `ignore` at whose path no file has a value: it may be misspelled."""
        error = self.kept.not_found() if self._is_stated else None
        if error is not None or not self._is_stated:
            return error
        for found, name, entry in (
            *(([p.address], p.name, None) for p in self._plan.others if not p.is_optional),
            *((found, "ignore", entry) for entry, found in self._plan.ignored.items() if entry.path),
        ):
            if not any(self._trees[address.files.text].at(address.path).is_found for address in found):
                near = nearest(str(entry or found[0]), self.left_out)
                way = f"; {near} is near" if near else "; remove the entry" if entry else ""
                return InvalidInputError(f"{entry or found[0]}: the files hold no such value{way}", field=name)
        return None

    def to_json(self) -> dict[str, Any]:
        """Return what the sources of a task have added, for the process that closes the accounts of the run."""
        return {
            "num_read": self.num_read,
            "is_whole": self.is_whole,
            "left_out": sorted(self.left_out),
            "kept": self.kept.to_json(),
            "shown": self.shown.to_json(),
            "first_numbers": [[*key, kind] for key, kind in self._first_numbers.items()],
            "found": [node.is_found for node in self._nodes()],
            "tables": [asdict(table) for table in self.tables],
            "unused": [[line, *found] for line, found in self._unused.items()],
            "in_order": [[*key, *found] for key, found in self._in_order.items()],
        }

    def add_json(self, found: Mapping[str, Any]) -> None:
        """Add what a task has found; ValueError or TypeError if it is not what to_json() returns."""
        self.num_read += int(found["num_read"])
        self.is_whole &= found["is_whole"] is True
        self.left_out.update(map(str, found["left_out"]))
        self.kept.add_json(found["kept"])
        self.shown.add_json(found["shown"])
        for name, part, kind in found["first_numbers"]:
            self._check_first_number(str(name), int(part), int(kind), int(kind))
        for node, is_found in zip(self._nodes(), found["found"], strict=True):
            node.is_found |= is_found is True
        self.tables += [TableAccount(**table) for table in found["tables"]]
        for line, count, where in found["unused"]:
            self._add_unused(str(line), int(count), str(where))
        for name, files, count, (first, first_text), (last, last_text) in found["in_order"]:
            ends = (int(first), str(first_text)), (int(last), str(last_text))
            self._add_in_order((str(name), str(files)), int(count), *ends)

    def _nodes(self) -> Iterator[Node]:
        """Yield all nodes, in an order that depends on the layout alone."""
        pending = [self._trees[text] for text in sorted(self._trees, reverse=True)]
        while pending:
            yield (node := pending.pop())
            pending += [child for _, child in node.children]


def check_unclaimed(path: str, key: Any, value: Value, *, in_records: bool, may_be_of_tokens: bool) -> None:
    """Refuse a key that no line names, if it may be a label or an answer (rule 8a), holds an array or texts of tokens (8)."""
    is_own = looks_like_label(str(key)) or (in_records and str(key).lower() in OWN_LINES)
    is_own &= not isinstance(value, Group) and value is not None
    # The text of a reference answer is no label.
    may_be_reference = isinstance(value, str) and "truth" in str(key).lower()
    is_own &= not may_be_reference or is_verdict(value) or is_named_as_verdict(key)
    is_text = may_be_of_tokens and any(isinstance(text, str) for text in value)  # type: ignore[union-attr]
    if is_own or is_text or holds_array(value):
        what = "texts that may be the tokens that prompt_length counts" if is_text else f"numbers ({describe(value)})"
        what = "what may be a label, a score, an answer or padding" if is_own else what
        raise InvalidInputError(f"{path}: no line of the layout names {what}; add a line, or {ignore_line(path)}")


def looks_like_label(key: str) -> bool:
    """Return whether a key may be that of a label or a score."""
    return is_named_as_verdict(key) or any(word in _LABEL_WORDS for word in key_words(key))
