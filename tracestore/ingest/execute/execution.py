"""The reading of all sources of a layout, and the accounts of the run."""

import contextlib
import hashlib
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

from tracestore.errors import InvalidInputError, OnRefused, error_location
from tracestore.ingest.execute.accounts import RunAccount, SourceAccount
from tracestore.ingest.execute.axes import extent
from tracestore.ingest.execute.claims import FileGroup, FileKeys, FoundFile, claim_files, group_files
from tracestore.ingest.execute.direct import DirectReader, direct_step
from tracestore.ingest.execute.join import Arena, Column
from tracestore.ingest.execute.records import RecordMaker, TraceBuilder
from tracestore.ingest.execute.table_accounts import OnUnused, check_totals
from tracestore.ingest.execute.traces import TraceCells, TraceColumns, traces_of
from tracestore.ingest.execute.walk import Cell, Cells, Walk, tree_of
from tracestore.ingest.layout.effects import check_effects
from tracestore.ingest.layout.places import Place, Plan
from tracestore.ingest.readers.looks import FirstLooks
from tracestore.ingest.readers.opening import open_tree
from tracestore.ingest.readers.tree import Array, Items, Value
from tracestore.store.io.scratch import Scratch
from tracestore.store.write.record import TraceRecord

_NUMBERED = frozenset(("layer", "token", "step"))  # the numbers of a trace are those of all traces

# Each makes the record of a trace from its position; None for a trace that is left out.
Makers = Iterator[Callable[[int], TraceRecord | None]]


class Execution:
    """The reading of all sources that a layout describes.

    Parameters
    ----------
    plan : Plan
        Of the layout.
    files : Mapping
        Paths by their names below SRC.
    owned : tuple of Path
        The files that are read for another purpose.
    check : callable, optional
        Called with the FILES of a line, the name of a file and its root when it is opened; returns the root. Files of
        a built-in layout have one.
    has_scores_file : bool
        Whether a scores file replaces the labels and scores in the items of traces, which then become extras.
    known : collection of str
        The names of the settings, and of the fields of a built-in layout, that a user states.
    looks : FirstLooks, optional
        Files that are still open because they were looked at.

    Attributes
    ----------
    groups : list of FileGroup
        The sources in their order.
    tables : list of str
        The FILES of tables whose rows sources share, so that one process must read these sources.
    """

    def __init__(
        self,
        plan: Plan,
        files: Mapping[str, Path],
        owned: tuple[Path, ...] = (),
        check: Callable[[str, str, Value], Value] | None = None,
        *,
        has_scores_file: bool = False,
        known: Collection[str] = (),
        looks: FirstLooks | None = None,
    ) -> None:
        self.layout, self.plan, self._known = plan.layout, plan, known
        self._check = check or (lambda _text, _name, root: root)
        # Lines of a built-in layout may find nothing. The writer tells its repeated ids apart, as those of all other
        # files (--on-conflict).
        self._is_stated = check is None
        if self._is_stated:
            check_effects(self.plan)
        self._claimed = claim_files(self.plan, files, owned, is_stated=self._is_stated)
        self.groups, self.tables = group_files(self.plan, self._claimed)
        self._step = direct_step(self.plan)
        is_of_schema = self._step is not False and not self._is_stated
        self._maker = partial(
            RecordMaker, plan, has_scores_file=has_scores_file, is_of_schema=is_of_schema, stated=known
        )
        self._numbers = {group.name: k for k, group in enumerate(self.groups)}
        self._file_keys = FileKeys(self.plan, self.groups)
        self._looks = looks or FirstLooks()
        self._open: Callable[[Path, Scratch], contextlib.AbstractContextManager[Value]] = self._looks.take
        self._begin()

    def _begin(self) -> None:
        """Set what changes while files are read."""
        self._lock = threading.RLock()
        self._resources = ExitStack()
        self._tables: dict[Place, Column] | None = None
        # Held while a trace is read, if tables hold arrays: their readers serve one thread at a time.
        self._guard: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._offsets: dict[str, int] | None = None
        plan = self.plan
        self._trees = {text: tree_of(text, plan.places, plan.left_out, plan.states) for text in plan.files}
        self.account = RunAccount(self.plan, self._trees, len(self.groups), is_stated=self._is_stated)
        self._of_tables = TraceColumns(self.plan)

    def probe(self) -> "Execution":
        """Return an execution with accounts of its own, for a look at the first traces of files that are read later."""
        probe = copy(self)
        probe._open = lambda path, _: self._looks.look(path)
        probe._begin()
        return probe

    def look_back(self, names: Collection[str]) -> TraceRecord | None:
        """Return the first trace of the first of some sources that are not read, if others must have its numbers."""
        bound = {name for place in self.plan.states for name in place.address.bound}
        group = next((group for group in self.groups if group.name in names), None)
        if group is None or not (bound & _NUMBERED or "L.ids" in self.layout.addresses):
            return None
        probe, record = self.probe(), None
        records: Any = probe.read(group, False, Scratch())
        with probe._resources, contextlib.suppress(InvalidInputError), contextlib.closing(records):
            record = next(records, None)
            self.account.follow(probe.account)
        return record

    # Files

    def fingerprint(self) -> bytes:
        """Return a digest of the layout and of the tables, on which every source depends."""
        digest = hashlib.blake2b(self.layout.to_toml().encode(), digest_size=16)
        for text in self.tables:
            for file in self._claimed[text]:
                with open(file.path, "rb") as opened:
                    digest.update(hashlib.file_digest(opened, "blake2b").digest())
        return digest.digest()

    def scores_of_tables(self) -> set[str]:
        """Return the fields of labels and scores that tables give."""
        return {p.name for p in self.plan.others if p.rule.kind == "score" and p.address.files.text in self.tables}

    # Reading

    def read(
        self, group: FileGroup, need_attention: bool | None, scratch: Scratch, on_refused: OnRefused = None
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
        account = SourceAccount(self.plan)
        read = self._joined if self._step is False else self._direct
        names = {file.bound.get("id") for files in group.files.values() for file in files}
        for position, make in enumerate(read(group, account, self._maker(group.name, need_attention), scratch)):
            try:
                record = make(position)
                if record is None:
                    continue
                if self._is_stated:
                    account.add_key(record)
                self.account.lengths.add(record)
            except InvalidInputError as error:
                error = error.with_traceback(None).with_location(source=group.name, position=position)
                if on_refused is None:
                    raise error from None
                self.account.is_whole = False
                account.num_refused += 1
                on_refused(error)
                continue
            finally:
                del make
            self.account.shown.add(self._numbers[group.name], record, account.answers)
            if "question_id" not in self.layout.templates:
                self.account.numbers.check_parts(record.question_id, is_layer=record.num_layers == 1)
            if record.question_id in names:
                self.account.numbers.add_answer(record.question_id, record.sample)
            yield record
            del record

    def _joined(self, group: FileGroup, account: SourceAccount, maker: RecordMaker, scratch: Scratch) -> Makers:
        """Yield what makes each record of a source whose fields are joined; close the accounts of its columns."""
        columns = TraceColumns(self.plan, tables=self._load_tables(scratch), table_starts=self._of_tables.starts)
        builder = TraceBuilder(maker, self.account.kept)

        def made(trace: TraceCells, position: int) -> TraceRecord | None:
            with self._guard:
                record = builder.record(trace, position)
            if record is None:
                return None
            account.answers = trace.answers
            self._check_texts(trace, record)
            for part, cells in trace.cells.items():
                self.account.check_numbers(part, cells)
            return record

        with ExitStack() as resources:
            for cells in self._units(group, columns, resources, scratch):
                for trace in traces_of(cells, columns):
                    self._number(trace, account, group)
                    yield partial(made, trace)
                with _of_whole_source():
                    account.close_unit(columns)
                columns.unit = {}
            with _of_whole_source():
                account.close(columns)
                builder.padding.close()
        self.account.add_source(self._numbers[group.name], columns, account)

    def _direct(self, group: FileGroup, account: SourceAccount, maker: RecordMaker, scratch: Scratch) -> Makers:
        """Yield what makes each record of a source whose items hold all fields of their traces."""
        assert not isinstance(self._step, bool)
        (text,) = group.files
        root, step = self._trees[text], self._step
        columns = TraceColumns(self.plan)
        on_unclaimed = partial(self.account.refuse_unclaimed, columns)
        for file in group.files[text]:
            with error_location(file.name), self._open(file.path, scratch) as opened:
                value = self._check(text, file.name, opened)
                walk = Walk(file.name, on_unclaimed)
                reader = DirectReader(maker, root if step is None else root.child(step), walk, self._known)
                for item, bound in walk.items(root, step, value, {**file.bound, "file": file.name}):
                    yield partial(reader.record, item, bound)
                    del item
        self.account.add_source(self._numbers[group.name], columns, account)

    def _check_texts(self, trace: TraceCells, record: TraceRecord) -> None:
        """Rule 13b: questions and answers of rows are those of the traces."""
        bound = trace.environment
        trace.columns.texts.check(bound, record)
        in_order = [column for place, column in (self._tables or {}).items() if "N" in place.trace_names]
        rows = {column.num_rows({}) for column in in_order if column.names in (("N",), ("N*",))}
        number = bound.get("N*" if self.plan.is_global else "N")
        row = number if len(rows) == 1 and "K" not in bound else None
        self._of_tables.texts.check({**bound, "N": row if rows else number}, record)
        if row is not None:
            self._of_tables.texts.check_ids(row, rows.pop() or 0, record.question_id)

    def _number(self, trace: TraceCells, account: SourceAccount, group: FileGroup) -> None:
        """Count a trace, and let it bind its number over all chunks and the key of its file."""
        environment = trace.environment
        if "N" in environment:
            environment["N*"] = self._offset(group) + account.count_row(environment)
        environment["file"] = self._file_keys.keys.get(environment["file"], environment["file"])

    def _cells(self, text: str, file: FoundFile, root: Value, columns: TraceColumns) -> Cells:
        """Yield the values of a file; `columns` takes texts and numbers of rows that no line names."""
        keeps = self.account.kept.has_row if text in self.tables else self.account.kept.has
        walk = Walk(file.name, partial(self.account.refuse_unclaimed, columns), keeps)
        return walk.cells(self._trees[text], root, {**file.bound, "file": file.name})

    def _units(
        self, group: FileGroup, columns: TraceColumns, opened: ExitStack, scratch: Scratch
    ) -> Iterator[list[Cell]]:
        """Yield the cells of the states of whole traces: of one item, or of the whole source."""
        states = dict.fromkeys(place.address.files.text for place in self.plan.states)
        pending, arena = list[Cell](), Arena(scratch)
        for text in (*(text for text in group.files if text not in states), *states):
            for file in group.files[text]:
                with error_location(file.name):
                    root = self._check(text, file.name, opened.enter_context(self._open(file.path, scratch)))
                    for cell in arena.kept(self._cells(text, file, root, columns), root):
                        if cell is None:
                            if pending:
                                yield pending
                            pending = []
                        elif cell.place not in self.plan.states:
                            columns.add(cell, file.name)
                        elif cell.value is not None:
                            pending.append(cell)
        if pending:
            yield pending

    def _load_tables(self, scratch: Scratch) -> dict[Place, Column]:
        """Return the columns of the tables, which are read once and stay open to the end of the run."""
        with self._lock:
            if self._tables is None:
                columns = self._of_tables = TraceColumns(self.plan)
                for text, file in ((t, file) for t in self.tables for file in self._claimed[t]):
                    with error_location(file.name):
                        root = self._resources.enter_context(open_tree(file.path, scratch=scratch))
                        for cell in filter(None, self._cells(text, file, root, columns)):
                            if "file" in self.plan.keys[cell.place]:
                                cell.bound["file"] = self._file_keys.of_row(cell.bound["file"], file)
                            columns.add(cell, file.name)
                self._tables = columns.source
                for place in self._tables:
                    self._check_in_order(place)
                cells = (cell for column in self._tables.values() for cell in column.all_cells())
                if any(isinstance(cell.value, Array | Items) for cell in cells):
                    self._guard = self._lock
            return self._tables

    def _check_in_order(self, place: Place) -> None:
        """Rule 13: rows are joined in order to one stack, or to chunks."""
        names = self.plan.keys[place]
        is_in_order = bool(names) and {*names} <= {"N", "N*"}
        if is_in_order and not self.plan.is_global and len(self.groups) > 1:
            is_of_ranks = "rank" in self.plan.states[0].address.files.names
            way = "ranks may take turns: " if is_of_ranks else "{chunk} in the names of the files says their order, or "
            raise InvalidInputError(
                f"{place.address.files.text}: rows in order belong to one file, found {len(self.groups)}; "
                f"{way}a column of ids joins them",
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
        """Return where the rows of each chunk begin, among those whose tables are the same files."""
        text, tables = self.plan.states[0].address.files.text, self._tables or {}
        shared = [{*self.plan.shared_names(place)} for place in tables if "N*" in self.plan.keys[place]]
        names = sorted(set.intersection(*shared)) if shared else []
        runs: dict[tuple[Any, ...], list[FileGroup]] = {}
        for group in sorted(self.groups, key=lambda group: group.files[text][0].bound["chunk"]):
            runs.setdefault(tuple(map(group.files[text][0].bound.get, names)), []).append(group)
        return {name: start for chunks in runs.values() for name, start in self._count_run(chunks).items()}

    def _count_run(self, chunks: list[FileGroup]) -> dict[str, int]:
        """Rule 13: rows that run on over chunks are those of one file, and as many."""
        place = self.plan.states[0]
        text = place.address.files.text
        bound = [group.files[text][0].bound for group in chunks]
        numbers = [found["chunk"] for found in bound]
        if twice := next((k for k, (one, two) in enumerate(itertools.pairwise(numbers), 1) if one == two), 0):
            found = f"found the chunk {numbers[twice]} also as {chunks[twice - 1].name}: convert one after the other"
            raise InvalidInputError(found, source=chunks[twice].name)
        *starts, total = itertools.accumulate((self._num_rows(g.files[text][0], place) for g in chunks), initial=0)
        # The first chunk whose number is not that of its first row, and the first one that is not counted from 0.
        is_counted = all(found.get("chunk.end") is None for found in bound)
        by_row = next((k for k, n in enumerate(numbers) if n != starts[k]), -1)
        by_count = next((k for k, n in enumerate(numbers) if n != k), -1) if is_counted else by_row
        if min(by_row, by_count) >= 0:
            k = max(by_row, by_count)
            also = f"{k}: chunks are numbered from 0 without gaps, or by their first row, here " * is_counted
            found = f"found chunk {numbers[k]}, expected {also}{starts[k]:,}"
            raise InvalidInputError(found, source=chunks[k].name)
        tables = self._tables or {}
        for place in tables:
            shared = self.plan.shared_names(place)
            if "N*" in self.plan.keys[place] and len({tuple(found[name] for name in shared) for found in bound}) > 1:
                raise InvalidInputError(
                    f"{place.address}: rows in order run on over all chunks, found several files of them; convert one "
                    "after the other, or join by a column of ids",
                    field=place.name,
                )
        check_totals(tables, total, bound[0])
        return dict(zip((group.name for group in chunks), starts, strict=True))

    def _num_rows(self, file: FoundFile, place: Place) -> int:
        with error_location(file.name), open_tree(file.path, scratch=Scratch()) as root:
            node = tree_of(place.address.files.text, [place], [], self.plan.states)
            cells = Walk(file.name, lambda *_: None).cells(node, root, {})
            return sum(extent(cell.value, cell.axes, "N") or 1 for cell in cells if cell is not None)

    # Accounts

    def close(self, on_unused: OnUnused = lambda *_: None) -> Iterator[str]:
        """Close the accounts of the run, and yield a line for each table; see `RunAccount.close`."""
        self.finish()
        yield from self.account.close(on_unused)

    def finish(self) -> None:
        """Take the tables into the account, when all sources are read, and close them."""
        self.account.add_tables(self._tables or {}, self._claimed)
        self._tables = None
        self.release()
        self._of_tables.texts.close()

    def release(self) -> None:
        """Close the tables, and the files that were looked at alone; `close` does so, too."""
        self._resources.close()
        self._looks.close()


@contextlib.contextmanager
def _of_whole_source() -> Iterator[None]:
    """Mark an error as one of all traces of a source, of which none is stored."""
    try:
        yield
    except InvalidInputError as error:
        error.is_whole_source = True
        raise
