"""Tables and scores files next to the traces whose ids are those of no trace."""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from tracestore.console import plural
from tracestore.errors import escape_unprintable
from tracestore.ingest.containers.tables import TableReference, load_table
from tracestore.ingest.score_files import read_table, score_columns_of
from tracestore.ingest.scores import Scores
from tracestore.store.write.pack import PackedTrace
from tracestore.store.write.writer import StoreWriter

_MAX_ROWS = _MAX_TRACES = 100  # from which a message names a column or a key


@dataclass
class FileOfIds:
    """A table or scores file.

    Attributes
    ----------
    path : Path
        The file.
    ids : collection of str
        Its ids; empty once one of them has been met as that of a trace.
    rows : list of dict
        Its first rows.
    is_scores_file : bool
        Whether it is a scores file.
    ids_of_traces, keys : dict[str, None]
        The first ids of traces, and the keys of these traces whose values are ids of the file, in order.
    """

    path: Path
    ids: Collection[str]
    rows: list[dict[str, Any]]
    is_scores_file: bool = False
    ids_of_traces: dict[str, None] = field(default_factory=dict)
    keys: dict[str, None] = field(default_factory=dict)

    def add(self, trace: PackedTrace) -> None:
        """Compare the id of a trace with those of the file, and keep what a message needs."""
        if trace.record.question_id in self.ids:
            self.ids = ()
        elif self.ids and len(self.ids_of_traces) < _MAX_TRACES:
            self.ids_of_traces[trace.record.question_id] = None
            extras = json.loads(trace.extras or "{}")
            self.keys |= {k: None for k, v in extras.items() if type(v) in (str, int) and str(v) in self.ids}

    @property
    def has_scores(self) -> bool:
        """Return whether the file has scores or labels."""
        return self.is_scores_file or bool(score_columns_of(list(dict.fromkeys(k for row in self.rows for k in row))))

    def reason(self, traces: str = "the traces") -> str:
        """Return an example of both sides, and the flag to use. `traces` are those that were read, in words."""
        own, other = (escape_unprintable(next(iter(ids)), 40) for ids in (self.ids, self.ids_of_traces))
        names = dict.fromkeys(k for row in self.rows for k, v in row.items() if str(v) in self.ids_of_traces)
        if self.keys:
            advice = f"--map question_id={next(iter(self.keys))} takes the ids from that key of the traces"
        elif names and self.has_scores:
            option = "" if self.is_scores_file else f"--scores {self.path} "
            advice = f"its column {next(iter(names))} has them: {option}--id-column {next(iter(names))}"
        elif names:
            advice = f"its column {next(iter(names))} has them: rename it to question_id"
        else:
            advice = "write the ids of the traces into it, or name another key of the traces with --map question_id=KEY"
            advice += "; without its labels, convert after moving it elsewhere" if self.has_scores else ""
        return (
            f"found {plural(len(self.ids), 'id')} such as {own!r}, and none of them in {traces}, which have ids such as "
            f"{other!r}; {advice}"
        )


class TableIds:
    """The scores file of a conversion and the tables that are joined by ids, until a trace has one of their ids.

    Parameters
    ----------
    scores : Scores or None
        The scores file.
    """

    def __init__(self, scores: Scores | None) -> None:
        self._files: dict[Path, FileOfIds] = {}
        if scores is not None and not scores.in_order:
            with read_table(scores.path) as table:
                rows = [row for _, row in islice(table.rows, _MAX_ROWS)]
            self._files[scores.path] = FileOfIds(scores.path, dict.fromkeys(q for q, _ in scores.values), rows, True)
        self._scores = list(self._files.values())
        self._current = self._scores

    def begin(self, reference: TableReference | None) -> None:
        """Begin a source with a table, or without one."""
        is_whole = reference is not None and reference.rows is None and not reference.is_apart
        paths = [reference.path, *reference.others] if reference is not None and is_whole else []
        for path in paths:
            if path not in self._files:
                table = load_table(path)
                is_joined = len(table) > 1 and bool(table.by_id) and not table.by_file
                rows = [table[k] for k in range(min(len(table), _MAX_ROWS))] if is_joined else []
                self._files[path] = FileOfIds(path, table.by_id if is_joined else (), rows)
        self._current = [*self._scores, *(self._files[path] for path in paths)]

    def add(self, trace: PackedTrace) -> None:
        """Add a trace of the source."""
        for file in self._current:
            file.add(trace)

    def unmatched(self, writer: StoreWriter | None) -> Iterator[FileOfIds]:
        """Yield the files of which no id is that of a trace, neither of one that was read nor of one in the store."""
        for file in self._files.values():
            is_stored = writer is not None and any(writer.index.find(key) >= 0 for key in file.ids)
            if file.ids and file.ids_of_traces and not is_stored:
                yield file
