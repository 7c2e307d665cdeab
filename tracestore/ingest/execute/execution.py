"""The reading of all sources of a layout, and the accounts of the run.

One module of over 400 lines: every step of a run uses the state of the one object that reads it.
"""

import contextlib
import hashlib
import math
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError, error_location, escape_unprintable
from tracestore.ingest.execute.accounts import SourceAccount, check_totals, check_unclaimed
from tracestore.ingest.execute.axes import extent
from tracestore.ingest.execute.claims import FileGroup, FoundFile, claim_files, group_files
from tracestore.ingest.execute.direct import DirectReader, direct_step
from tracestore.ingest.execute.found import Columns, FoundTrace, TraceFinder
from tracestore.ingest.execute.join import Column, check_remainders
from tracestore.ingest.execute.records import TraceBuilder
from tracestore.ingest.execute.tokens import numbers_of
from tracestore.ingest.execute.walk import Cell, Node, Walk, items_of, tree_of
from tracestore.ingest.layout.language import Layout
from tracestore.ingest.layout.places import RECORDS, Place, plan_of
from tracestore.ingest.readers.opening import open_tree
from tracestore.ingest.tree import Array, Items, Value
from tracestore.store.io.scratch import Scratch
from tracestore.store.write.record import TraceRecord

_MAX_SHOWN = 6  # paths that the summary names
_MAX_NORMS = 8  # about as many tokens of a trace give its median norm
_ID_COLUMNS = re.compile(r"(question_?|trace_?|example_?|row_?)?(ids?|qid|idx|index|number)", re.IGNORECASE)
_IN_ORDER = re.compile(r"\[\]/$")


class Execution:
    """The reading of all sources that a layout describes.

    Parameters
    ----------
    layout : Layout
    files : Mapping
        Paths by their names below SRC.
    owned : tuple of Path
        The files that are read for another purpose.
    check : callable, optional
        Called with the FILES of a line, the name of a file and its root when it is opened; returns the root. Files of
        a built-in layout have one.
    has_scores_file : bool
        Whether a scores file replaces the labels and scores in the items of traces, which then become extras.

    Attributes
    ----------
    groups : list of FileGroup
        The sources in their order.
    """

    def __init__(
        self,
        layout: Layout,
        files: Mapping[str, Path],
        owned: tuple[Path, ...] = (),
        check: Callable[[str, str, Value], Value] | None = None,
        *,
        has_scores_file: bool = False,
    ) -> None:
        self.layout, self.plan, self._has_scores_file = layout, plan_of(layout), has_scores_file
        self._check = check or _unchanged
        # The writer tells repeated ids of built-in layouts apart, as those of all other files (--on-conflict).
        self._allows_repeats = check is not None
        self._claimed = claim_files(self.plan, files, owned)
        self.groups, self._table_files = group_files(self.plan, self._claimed)
        self._trees = {
            text: tree_of(text, self.plan.places, self.plan.ignored, self.plan.states) for text in self.plan.files
        }
        self._step = direct_step(self.plan)
        self._numbers = {group.name: k for k, group in enumerate(self.groups)}
        self._lock = threading.RLock()
        self._resources = contextlib.ExitStack()
        self._tables: dict[Place, Column] | None = None
        # Held while a trace is read, if tables hold arrays: their readers serve one thread at a time.
        self._guard: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._base_names = self._file_keys()
        # A row may name a file without its folders, or without its suffix.
        self._by_stem: dict[str, list[str]] = defaultdict(list)
        for name, key in self._base_names.items():
            base = name.rpartition("/")[2]
            for text in {base, base.partition(".")[0]}:
                self._by_stem[text].append(key)
        self._offsets: dict[str, int] | None = None
        self._missing: dict[Place, set[str]] = {}
        self._is_whole = True
        self._row_numbers: dict[str, int] = {}
        # The states lie under the same items.
        self._prefixes = {f"{p.position_prefix}[]/" for p in self.plan.states if p.position_prefix is not None}
        self.left_out: set[str] = set()
        self._first: tuple[int, str] | None = None  # the first trace of the first source that was read

    # Files

    def _file_keys(self) -> dict[str, str]:
        """Return the files of the states by base name, by path below SRC where base names repeat."""
        names = [
            file.name for group in self.groups for p in self.plan.states for file in group.files[p.address.files.text]
        ]
        bases = [name.rpartition("/")[2] for name in names]
        is_unique = len(set(bases)) == len(set(names))
        return dict(zip(names, bases if is_unique else names, strict=True))

    def fingerprint(self) -> bytes:
        """Return a digest of the layout and of the tables, on which every source depends."""
        digest = hashlib.blake2b(self.layout.to_toml().encode(), digest_size=16)
        for text in sorted(self._table_files):
            for file in self._claimed[text]:
                with open(file.path, "rb") as opened:
                    digest.update(hashlib.file_digest(opened, "blake2b").digest())
        return digest.digest()

    def scores_of_tables(self) -> set[str]:
        """Return the fields of labels and scores that tables give."""
        return {
            p.name for p in self.plan.others if p.rule.kind == "score" and p.address.files.text in self._table_files
        }

    # Reading

    def read(
        self,
        group: FileGroup,
        need_attention: bool | None,
        scratch: Scratch,
        on_refused: Callable[[InvalidInputError], None] | None = None,
    ) -> Iterator[TraceRecord]:
        """Yield the records of a source; raise InvalidInputError if an account does not close.

        Parameters
        ----------
        need_attention : bool or None
            As for `record_from_dict`.
        scratch : Scratch
            Files for what does not fit into memory.
        on_refused : callable, optional
            Called with the error of each trace that is refused. By default it is raised.
        """
        if self._step is not False:
            yield from self._read_items(group, need_attention, scratch, on_refused)
            return
        tables = self._load_tables(scratch)
        columns = Columns(self.plan, tables=tables)
        finder, builder = TraceFinder(columns), TraceBuilder(columns, group.name, need_attention)
        account = SourceAccount(self.plan, columns)
        position = 0
        with contextlib.ExitStack() as resources:
            for cells in self._units(group, columns, resources, scratch):
                for trace in self._found(finder, cells, account, group):
                    try:
                        with self._guard:
                            record = builder.record(trace, position)
                    except InvalidInputError as error:
                        self._refuse(error, group, position, account, on_refused)
                        position += 1
                        continue
                    if not self._allows_repeats:
                        account.add_key(record)
                    if account.num_traces == 1:
                        self._keep_first(group, record)
                    position += 1
                    yield record
                    del record
                account.close_unit()
                columns.unit = {}
            account.close()
        self._close_source(builder)

    def _refuse(
        self,
        error: InvalidInputError,
        group: FileGroup,
        position: int,
        account: SourceAccount,
        on_refused: Callable[[InvalidInputError], None] | None,
    ) -> None:
        """Raise the error of a trace, or report it."""
        error = error.with_traceback(None).with_location(source=group.name, position=position)
        if on_refused is None:
            raise error from None
        self._is_whole = False
        account.num_refused += 1
        on_refused(error)

    def _read_items(
        self,
        group: FileGroup,
        need_attention: bool | None,
        scratch: Scratch,
        on_refused: Callable[[InvalidInputError], None] | None,
    ) -> Iterator[TraceRecord]:
        """Yield the records of a source whose items hold all fields of their traces, as `read`."""
        (text,) = group.files
        step, node = self._step, self._trees[text]
        assert not isinstance(step, bool)
        node = node if step is None else node.child(step)
        reader = DirectReader(
            self.plan,
            node,
            group.name,
            need_attention,
            self._refuse_unclaimed,
            has_scores_file=self._has_scores_file,
        )
        account = SourceAccount(self.plan, Columns(self.plan))
        position = 0
        for file in group.files[text]:
            with self._open(file, scratch) as opened, error_location(file.name):
                root = self._check(text, file.name, opened)
                for item, bound in items_of(root, step, {**file.bound, "file": file.name}, file.name):
                    try:
                        record = reader.record(item, bound, position)
                        if not self._allows_repeats:
                            account.add_key(record)
                    except InvalidInputError as error:
                        self._refuse(error, group, position, account, on_refused)
                        position += 1
                        continue
                    finally:
                        item = None
                    if position == 0:
                        self._keep_first(group, record)
                    position += 1
                    yield record
                    del record

    def _found(
        self, finder: TraceFinder, cells: list[Cell], account: SourceAccount, group: FileGroup
    ) -> Iterator[FoundTrace]:
        for trace in finder.traces(cells):
            if "N" in trace.environment:
                trace.environment["N*"] = self._offset(group) + account.count_row(trace.environment)
            if "file" in trace.environment:
                trace.environment["file"] = self._base_names.get(trace.environment["file"], trace.environment["file"])
            account.num_traces += 1
            yield trace

    def _units(
        self, group: FileGroup, columns: Columns, resources: contextlib.ExitStack, scratch: Scratch
    ) -> Iterator[list[Cell]]:
        """Yield the cells of the states of whole traces: of one item, or of the whole source."""
        states = [place.address.files.text for place in self.plan.states]
        others = [text for text in group.files if text not in states]
        pending: list[Cell] = []
        for text in (*others, *dict.fromkeys(states)):
            for file in group.files[text]:
                root = self._check(text, file.name, resources.enter_context(self._open(file, scratch)))
                walk = Walk(file.name, self._refuse_unclaimed)
                bound = {**file.bound, "file": file.name}
                with error_location(file.name):
                    for cell in walk.cells(self._trees[text], root, bound):
                        if cell is None:
                            if pending:
                                yield pending
                            pending = []
                        elif cell.place in self.plan.states:
                            if cell.value is not None:
                                pending.append(cell)
                        else:
                            columns.add(cell, file.name)
        if pending:
            yield pending

    def _open(self, file: FoundFile, scratch: Scratch) -> contextlib.AbstractContextManager[Value]:
        return open_tree(file.path, scratch=scratch)

    def _load_tables(self, scratch: Scratch) -> dict[Place, Column]:
        """Return the columns of the tables, which are read once and stay open to the end of the run."""
        with self._lock:
            if self._tables is None:
                tables: dict[Place, Column] = {}
                for text in sorted(self._table_files):
                    for file in self._claimed[text]:
                        root = self._resources.enter_context(self._open(file, scratch))
                        walk = Walk(file.name, self._refuse_unclaimed)
                        with error_location(file.name):
                            for cell in walk.cells(self._trees[text], root, dict(file.bound)):
                                if cell is not None:
                                    self._add_to_table(tables, cell, file)
                for place in tables:
                    self._check_in_order(place)
                if any(isinstance(c.value, Array | Items) for column in tables.values() for c in column.all_cells()):
                    self._guard = self._lock
                self._tables = tables
            return self._tables

    def _add_to_table(self, tables: dict[Place, Column], cell: Cell, file: FoundFile) -> None:
        if "file" in cell.bound and "file" in self.plan.keys[cell.place]:
            cell.bound["file"] = self._file_of(cell.bound["file"], file)
        if (column := tables.get(cell.place)) is None:
            column = tables[cell.place] = Column(cell.place, self.plan.keys[cell.place])
        column.add(cell, file.name)

    def _file_of(self, text: str, table: FoundFile) -> str:
        """Return the file that a row of a table names: by its path below SRC or the table, else by its base name."""
        folder = table.name.rpartition("/")[0]
        path = text.replace("\\", "/").removeprefix("./")
        for name in (path, f"{folder}/{path}"):
            if name in self._base_names:
                return self._base_names[name]
        found = self._by_stem.get(path.rpartition("/")[2], ())
        return found[0] if len(found) == 1 else path

    def _check_in_order(self, place: Place) -> None:
        """Rule 13: rows are joined in order to one stack, or to chunks."""
        names = self.plan.keys[place]
        is_in_order = (
            any(name in ("N", "N*") for name in names) and len([n for n in names if n not in ("N", "N*")]) == 0
        )
        if is_in_order and not self.plan.is_global and len(self.groups) > 1:
            raise InvalidInputError(
                f"{place.address.files.text}: rows in order belong to one file, found {len(self.groups)}; "
                "{chunk} in the names of the files says their order, or a column of ids joins them",
                field=place.name,
            )

    def _offset(self, group: FileGroup) -> int:
        """Return the number of rows in the chunks before a source (rule 13)."""
        if not self.plan.is_global or "chunk" not in self.plan.states[0].address.files.names:
            return 0
        with self._lock:
            if self._offsets is None:
                self._offsets = self._count_chunks()
            return self._offsets[group.name]

    def _count_chunks(self) -> dict[str, int]:
        place = self.plan.states[0]
        text = place.address.files.text
        chunks = sorted(self.groups, key=lambda g: g.files[text][0].bound["chunk"])
        numbers = [group.files[text][0].bound["chunk"] for group in chunks]
        ends = [group.files[text][0].bound.get("chunk.end") for group in chunks]
        offsets, total = {}, 0
        for k, group in enumerate(chunks):
            if ends[k] is None and numbers[k] != k:
                raise InvalidInputError(
                    f"found chunk {numbers[k]}, expected {k}: chunks are numbered from 0 without gaps",
                    source=group.name,
                )
            if ends[k] is not None and numbers[k] != total:
                raise InvalidInputError(f"rows begin at {numbers[k]}, expected {total}", source=group.name)
            offsets[group.name] = total
            total += self._num_rows(group.files[text][0], place)
        check_totals(self._tables or {}, total)
        return offsets

    def _num_rows(self, file: FoundFile, place: Place) -> int:
        tree = tree_of(place.address.files.text, [place], [], self.plan.states)
        count = 0
        with self._open(file, Scratch()) as root:
            for cell in Walk(file.name, lambda *_: None).cells(tree, root, dict(file.bound)):
                if cell is not None:
                    count += extent(cell.value, cell.axes, "N") or 1
        return count

    # Accounts

    def _refuse_unclaimed(self, node: Node, key: str, value: Value) -> None:
        """Rule 8: every array has a line or is ignored. Rule 8a: so has what may be a label or a score."""
        if _IN_ORDER.search(node.prefix) and node.prefix not in self._prefixes:
            self._check_row_number(f"{node.prefix}{key}", str(key), value)
        if not node.has_records or not isinstance(value, str | int | float):
            self.left_out.add(f"{node.prefix}{key}")
        check_unclaimed(f"{node.prefix}{key}", key, value, in_records=node.has_records)

    def _check_row_number(self, path: str, key: str, value: Value) -> None:
        """Rule 13: rows are joined in order only if no column of ids is left unused; one from 0 to N - 1 is fine."""
        if not _ID_COLUMNS.fullmatch(key) or value is None:
            return
        with self._lock:
            expected = self._row_numbers.get(path, 0)
            self._row_numbers[path] = expected + 1
        if str(value) != str(expected):
            name = path.rpartition("[]/")[0]
            raise InvalidInputError(
                f"{path}: rows are joined in order, and this column of ids is left out; {name}[id={key}] joins by it, a "
                "line question_id takes it"
            )

    def _close_source(self, builder: TraceBuilder) -> None:
        with self._lock:
            for place, keys in builder.arrays.missing.items():
                self._missing.setdefault(place, set()).update(keys)

    def close(self, has_id: Callable[[str], bool] = lambda _: False) -> Iterator[str]:
        """Close the accounts of the run, and yield a line for each table.

        Parameters
        ----------
        has_id : callable
            Return whether the store has a trace of an id, for rows that earlier runs used.

        Raises
        ------
        InvalidInputError
            Rules 12b and 12c: rows and traces that are left over would match by another spelling, or nothing matches.
        """
        if self._first is not None:
            yield self._first[1]
        for place, column in (self._tables or {}).items():
            # Rule 9 closes the accounts of what is known of an axis.
            if not place.is_optional and place.name != RECORDS and place.rule.kind != "known":
                source = self._claimed[place.address.files.text][0].name
                with error_location(source):
                    yield self._close_table(column, source, has_id)
        if self.left_out:
            shown = sorted(self.left_out)
            more = f" and {len(shown) - _MAX_SHOWN} more" if len(shown) > _MAX_SHOWN else ""
            paths = ", ".join(escape_unprintable(path, 60) for path in shown[:_MAX_SHOWN])
            yield f"not named by the layout and left out: {paths}{more}"
        self._resources.close()

    def _close_table(self, column: Column, source: str, has_id: Callable[[str], bool]) -> str:
        """Return how the rows of a table were joined; InvalidInputError if they do not fit."""
        name, rows = column.place.name, list(dict.fromkeys(column.rows()))
        used = {key for key in rows if key in column.used}
        unused = [key for key in rows if key not in used and not (column.names == ("id",) and has_id(str(key[0])))]
        missing = sorted(self._missing.get(column.place, ()))
        names = ", ".join(name for name in column.names if not name.startswith("*")) or "source"
        by = "in order" if names in ("N", "N*") else f"by {names}"
        if by == "in order" and (unused or missing) and self._is_whole:
            found = f"{len(rows):,} rows in order belong to {len(used) + len(missing):,} traces"
            raise InvalidInputError(found, field=name)
        if rows and len(unused) == len(rows):
            first = escape_unprintable(str(rows[0][0]) if rows[0] else "", 40)
            raise InvalidInputError(f"no {names} of it is that of a trace: its first is {first!r}", field=name)
        first_keys, left_over = ([key[0] for key in keys if key] for keys in (rows, unused))
        check_remainders(name, first_keys, left_over, missing)
        rest = f", {len(unused):,} without a trace" if unused else ""
        rest += f", {len(missing):,} traces without a row" if missing else ""
        return f"{name}: {len(used):,} rows of {source} joined {by}{rest}"

    def _keep_first(self, group: FileGroup, record: TraceRecord) -> None:
        number = self._numbers[group.name]
        with self._lock:
            if self._first is None or number < self._first[0]:
                self._first = (number, self._described(record))

    def _described(self, record: TraceRecord) -> str:
        """Return a trace in a line: what a reader compares with the source."""
        layers, width = record.num_layers, record.hidden_dim
        states = record.hidden if record.hidden is not None else list(record.last_token[:, None])  # type: ignore[index]
        step = max(1, len(states[0]) // _MAX_NORMS)
        norms = np.concatenate([np.linalg.norm(numbers_of(layer[::step]).astype("f4"), axis=-1) for layer in states])
        labels = {**record.scores, **record.deferred_scores}
        if record.label is not None:
            labels["label"] = record.label
        shown = ", ".join(f"{name} {value:g}" for name, value in labels.items() if not math.isnan(value)) or "no label"
        tokens = f"S {record.num_tokens}" if record.hidden is not None else "last token"
        return (
            f"first trace: {escape_unprintable(record.question_id, 60)}, {shown}, L {layers}, {tokens}, D {width}, "
            f"median norm {float(np.sort(norms)[len(norms) // 2]):.3g}"
        )


def _unchanged(_text: str, _name: str, root: Value) -> Value:
    return root
