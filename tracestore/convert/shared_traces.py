"""Traces that a source has in common with sources that a conversion does not read, because they have not changed."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from tracestore.convert.described import without_copy_mark
from tracestore.store.format.entries import Fingerprint
from tracestore.store.read.batch_sources import NUM_TOKENS
from tracestore.store.read.index import grouped
from tracestore.store.write.pack import PackedTrace
from tracestore.store.write.writer import StoreWriter
from tracestore.store.write.written import TraceBlock

_NONE = np.empty(0, np.int64)


class UnreadSourceError(Exception):
    """A source that is not read may decide what is stored: all sources have to be read."""


class SharedTraces:
    """The committed traces that other sources than the one that is read may have.

    Parameters
    ----------
    writer : StoreWriter
    present : sequence of str
        The names of all sources of the conversion, in their order.
    unread : sequence of str
        Those that the conversion does not read.
    """

    def __init__(self, writer: StoreWriter, present: Sequence[str], unread: Sequence[str]) -> None:
        self._writer, self._num_traces = writer, writer.manifest.num_traces
        last = {name: k for k, name in enumerate(present)}
        self._order = {name: k for k, name in reversed([*enumerate(present)])}  # the first source of each name
        self._unread = {name: last[name] for name in unread}
        sharing = writer.sharing_sources()
        self._last_sharing = max((self._unread[name] for name in sharing & self._unread.keys()), default=-1)
        self._absent = sharing - self._order.keys()
        self._waiting = _moved_sources(writer, self._order)
        self._source = ""
        self._outdated: set[str] = set()  # the absent sources of traces that the open source has changed
        self._forgotten: set[str] = set()
        self._is_unchanged = False
        self._by_source: tuple[object, dict[str, np.ndarray]] = None, {}  # traces of the sources of a path, of an index

    def begin_source(self, name: str, size: int, fingerprint: str, *, is_unchanged: bool) -> None:
        """Begin a source; `is_unchanged`: the store has its files, whose layout or tables may differ."""
        self._writer.moved.update(dict.fromkeys(self._waiting.pop(_files(size, fingerprint), ()), name))
        self._source, self._is_unchanged = name, is_unchanged
        self._outdated.clear()

    def has_under_another_id(self, packed: PackedTrace) -> bool:
        """Return whether the store has a trace with a new id from the same position of the same files."""
        if not self._is_unchanged:
            return False
        index = self._writer.index
        if self._by_source[0] is not index:
            of_source, of_path = dict(grouped(np.asarray(index.read_column("source")))), defaultdict(list)
            for number, source in enumerate(index.sources()):
                of_path[source.path].append(of_source.get(number, _NONE))
            self._by_source = index, {path: np.concatenate(found) for path, found in of_path.items()}
        own = self._by_source[1].get(self._source, _NONE)
        positions = index.read_column("source_position")[own]
        same = own[positions == packed.record.position].tolist()
        return any(self._writer.keys.has_arrays_of(k, packed) for k in same)

    def end_source(self) -> None:
        """Let absent sources of changed traces be read if they return: the newest one of their names is unknown."""
        for path in sorted(self._outdated - self._forgotten):
            self._writer.forget_source(path)
        self._forgotten |= self._outdated

    def check(self, index: int, *, is_changed: bool = True, is_last: bool = False) -> None:
        """Account for a committed trace of the open source; `is_changed`: it gets other values than other sources may have.

        Raises
        ------
        UnreadSourceError
            If a source that is not read may have the trace, too; with `is_last` one behind the open source, unless that
            had another content, which may have replaced the one that it has now.
        """
        owner, had_other = self._writer.source_of(index), is_changed and self._writer.has_source_named(self._source)
        first = self._order[self._source] if is_last and not had_other else -1
        if max(self._last_sharing, self._unread.get(owner, -1)) > first:
            raise UnreadSourceError
        if is_changed:
            self._outdated |= self._absent if owner in self._order else {owner, *self._absent}

    def has_absent(self, index: int) -> bool:
        """Return whether a source that is not there, under no other name either, has a committed trace, or may have it."""
        there = self._order.keys() | self._writer.moved.keys()
        return not (self._absent <= there and self._writer.source_of(index) in there)

    def check_copy(self, packed: PackedTrace) -> None:
        """Account for a trace that may be a copy of a committed one with another id (rule 10b); see check()."""
        index, question_id = self._writer.index, packed.record.question_id
        for other in self._copies(question_id) if "hidden_states" in packed.crcs else ():
            has_length = index.locations(np.array([other]))[0, NUM_TOKENS] == packed.num_tokens
            if has_length and index.question_id(other) != question_id:
                self.check(other)

    def fits(self, block: TraceBlock) -> bool:
        """Return whether check_copy() and has_under_another_id() find nothing for the traces of a block."""
        has_copies = self._num_traces and any(next(self._copies(name), None) is not None for name in block.ids)
        return not (self._is_unchanged or has_copies)

    def _copies(self, question_id: str) -> Iterator[int]:
        """Yield the committed traces whose ids differ from an id by a mark of copies."""
        name, index = without_copy_mark(question_id), self._writer.index
        yield from self._marked.get(name, ())
        if name != question_id:
            found = (index.find(name, sample) for sample in itertools.count())
            yield from itertools.takewhile(lambda k: k >= 0, found)

    @cached_property
    def _marked(self) -> dict[str, list[int]]:
        """The traces of before whose ids have a mark of copies, by the ids without it."""
        found: dict[str, list[int]] = defaultdict(list)
        for k, question_id in enumerate(self._writer.index.question_ids(np.arange(self._num_traces))):
            if (name := without_copy_mark(question_id)) != question_id:
                found[name].append(k)
        return found


def _files(size: int, fingerprint: str) -> tuple[int, str]:
    """Return what stands for the files of a source."""
    return size, Fingerprint.parse(fingerprint).files


def _moved_sources(writer: StoreWriter, present: Mapping[str, int]) -> dict[tuple[int, str], list[str]]:
    """Let a writer know which sources have been moved: their last files are, or were, under another path that is present.

    Return those that are not there, by these files, under which a new path may follow.
    """
    last, heirs = dict[str, tuple[int, str]](), dict[tuple[int, str], str]()
    sources = list(writer.index.sources())
    for source in sources if any(source.path not in present for source in sources) else ():
        if source.fingerprint:
            last[source.path] = files = _files(source.size, source.fingerprint)
            if source.path in present or heirs.get(files, "") not in present:
                heirs[files] = source.path
    waiting = defaultdict[tuple[int, str], list[str]](list)
    for path in last.keys() - present.keys():
        new = path
        while new not in present and heirs[last[new]] != new:  # each one is committed later than the one before
            new = heirs[last[new]]
        if new in present:
            writer.moved[path] = new
        else:
            waiting[last[new]].append(path)
    return waiting
