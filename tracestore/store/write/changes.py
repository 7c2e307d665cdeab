"""The changes that a writer has collected on one generation, which another one may follow before they are committed."""

import math
from collections.abc import Callable, Iterable

from tracestore.errors import InvalidInputError, StoreLockedError, UsageError
from tracestore.store.format import schema
from tracestore.store.format.entries import Fingerprint
from tracestore.store.format.manifest import Manifest
from tracestore.store.format.provenance import Provenance, require_compatible
from tracestore.store.io.writing_folder import CommitTarget
from tracestore.store.read.columns import Columns, TraceValues
from tracestore.store.read.generation import PinnedGeneration
from tracestore.store.read.index import SourceEntry, StoreIndex
from tracestore.store.write.compared import ComparedTrace, Samples
from tracestore.store.write.keys import KeyResolver, OnConflict, groups_of
from tracestore.store.write.pack import PackedTrace, fit_attributes
from tracestore.store.write.pending import (
    Entry,
    Key,
    Pending,
    PendingSource,
    WrittenPlace,
    location_of,
)
from tracestore.store.write.record import TraceRecord
from tracestore.store.write.segment_writer import SegmentWriter
from tracestore.store.write.written import TraceBlock


class Changes:
    """Pending changes of a writer, and the steps that repeat them on a newer generation.

    Parameters
    ----------
    target : CommitTarget
        The store.
    on_conflict, allow_mixed_provenance
        See StoreWriter.

    Attributes
    ----------
    target : CommitTarget
        The store.
    keys : KeyResolver
        The keys of the generation and of the pending changes.
    attributes : schema.Attributes
        Those of the store after the next commit.
    num_added : int
        Number of traces that the commits of this writer have added.
    moved : dict of str
        The new paths of sources that have been moved, by their old ones. The caller fills it.
    joined : dict of TraceValues
        Scores and groups of added traces that another writer had committed meanwhile, by their keys. They are not stored.
    """

    _segment_type = SegmentWriter
    _generation: PinnedGeneration
    _num_steps: int  # before the open source
    attributes: schema.Attributes

    def __init__(self, target: CommitTarget, on_conflict: OnConflict, allow_mixed_provenance: bool) -> None:
        self.target = target
        self._on_conflict: OnConflict = on_conflict
        self._allow_mixed_provenance = allow_mixed_provenance
        self.num_added = 0
        self.joined: dict[tuple[str, int], TraceValues] = {}
        self._sources: dict[str, list[SourceEntry]] = {}  # those of each path that differ, the newest one last
        self._paths: list[str] = []  # of all sources
        self._samples = Samples()
        self.moved: dict[str, str] = {}
        # The first content and values of committed traces that others have replaced.
        self._past: dict[int, tuple[ComparedTrace, TraceValues]] = {}

    def _start(self, generation: PinnedGeneration, num_known: int = 0) -> None:
        """Begin without changes on a generation; the keys of its first sources are known."""
        self._generation = generation
        if num_known == 0:
            self._sources, self._paths, self._samples = {}, [], Samples()
        for source in generation.index.sources(num_known):
            known = [s for s in self._sources.get(source.path, ()) if source.fingerprint not in ("", s.fingerprint)]
            self._sources[source.path] = [*known, source]
            self._paths.append(source.path)
        self._drop()

    def _drop(self) -> None:
        """Forget all pending changes; their files are the caller's."""
        self.attributes = self.manifest.attributes
        self._undo: list[Callable[[], None]] | None = None
        self._pending = Pending()
        self.keys = KeyResolver(
            self.target.files,
            self.index,
            self._paths,
            self._pending,
            self._on_conflict,
            self.read_columns,
            self._past,
            self._samples,
        )
        self.keys.moved = self.moved

    @property
    def manifest(self) -> Manifest:
        """The manifest of the generation that the pending changes are made to."""
        return self._generation.manifest

    @property
    def index(self) -> StoreIndex:
        """The committed traces and sources."""
        return self._generation.index

    def read_columns(self) -> Columns:
        """Return the scores, labels and groups of the committed traces."""
        return self._generation.columns

    def _advance(self, generation: PinnedGeneration) -> None:
        """Continue without changes from the generation that they have become."""
        num_known = self.manifest.num_sources
        self._past = self.keys.past | self._past
        self.num_added += len(self._pending.rows)
        self._generation.close()
        self._start(generation, num_known)

    def _rebase(self, generation: PinnedGeneration) -> list[InvalidInputError]:
        """Repeat the changes on a generation that another writer has committed.

        Returns
        -------
        list of InvalidInputError
            One for each source that does not fit the newer generation. Its changes are left out.

        Raises
        ------
        StoreLockedError
            If the store was replaced.
        UsageError
            If the other changes do not fit.
        """
        pending, known = self._pending, self._generation
        if not _continues(known, generation):
            # Sources were left out because the replaced store had them.
            raise StoreLockedError(f"{self.target.location}: another writer has replaced the store; repeat the command")
        options = self.attributes.options
        if generation.manifest.attributes.options != options:
            stored = generation.manifest.attributes.options
            name = next(name for name in options if options[name] != stored.get(name))
            raise UsageError(
                f"{self.target.location}: another writer has created the store with --{name} {stored[name]}, "
                f"not {options[name]}"
            )
        known.close()
        refused, num_known, steps = list[InvalidInputError](), known.manifest.num_sources, pending.steps
        while True:
            self._start(generation, num_known)
            num_known = generation.manifest.num_sources
            self._pending.segments = pending.segments
            for k, segment in enumerate(pending.segments):
                segment.number = self.manifest.num_segments + k
            for step in steps:
                try:
                    step()
                except InvalidInputError as error:
                    refused.append(error)
                else:
                    self._pending.steps.append(step)
            if pending.lens is not None and self._pending.lens is None:
                pending.lens.remove()  # Another writer has stored an equal one.
            if self._has_all_segments(pending):
                return refused
            steps = self._pending.steps

    def _has_all_segments(self, pending: Pending) -> bool:
        """Remove the segments without a referenced row, and return whether there is none."""
        columns = self._pending.rows.columns
        used = {*columns["graph_segment"], *columns["sequence_segment"]}
        used.update(patch["patch_segment"] for patch in self._pending.patches.values())
        kept = [segment for segment in pending.segments if segment.number in used]
        if len(kept) == len(pending.segments):
            return True
        for segment in pending.segments:
            if segment not in kept:
                segment.remove()
        pending.segments = kept
        return False

    def has_source(self, path: str, size: int, fingerprint: str, among: int = 1) -> bool:
        """Return whether exactly this file is among the last committed ones of its path."""
        found = self._sources.get(path, ())
        return any((source.size, source.fingerprint) == (size, fingerprint) for source in found[-among:])

    def has_files(self, path: str, size: int, fingerprint: str) -> bool:
        """Return whether the last source of a path has these files, whatever it depends on besides."""
        files, last = Fingerprint.parse(fingerprint).files, self._sources.get(path, ())[-1:]
        return any((source.size, Fingerprint.parse(source.fingerprint).files) == (size, files) for source in last)

    def has_source_named(self, path: str) -> bool:
        """Return whether a file of this name is committed, whatever its contents."""
        return path in self._sources

    def is_pending(self, key: tuple[str, int]) -> bool:
        """Return whether the next commit adds a trace of the key."""
        return key in self._pending.keys

    def forget_source(self, path: str) -> None:
        """Let no file of this path be known any more."""
        if any(source.fingerprint for source in self._sources.get(path, ())):
            self._begin(PendingSource(path, 0, ""))
            self._end(None)

    def sharing_sources(self) -> set[str]:
        """Return the paths of the committed sources of which another source has added a trace."""
        return {path for path, sources in self._sources.items() if any(s.num_skipped for s in sources)}

    def source_of(self, index: int) -> str:
        """Return the path of the source that has added a committed trace."""
        return self._paths[int(self.index.read_column("source")[index])]

    def last_source(self, path: str) -> SourceEntry:
        """Return the last committed source of a path."""
        return self._sources[path][-1]

    def check_provenance(self, provenances: Iterable[Provenance]) -> None:
        """Raise UsageError if sources with these provenances conflict with each other or with the store."""
        if not self._allow_mixed_provenance:
            require_compatible(self.attributes.provenance, provenances, str(self.target.location))

    @property
    def source_has_changes(self) -> bool:
        """True if the open source has added or completed a trace."""
        # The first step reverts begin_source(), and new rows.
        return self._undo is not None and (len(self._undo) > 1 or self._pending.sources[-1].num_traces > 0)

    def _begin(self, source: PendingSource) -> None:
        """Begin a source."""
        assert self._undo is None, "a source is open"
        stated = source.stated
        self.check_provenance([] if stated is None else [stated])
        pending, attributes = self._pending, self.attributes
        num_steps, num_rows = len(pending.steps), len(pending.rows)
        if source.is_numbered:
            source.path = f"append-{self.manifest.num_traces + len(pending.rows):010d}"
        self.attributes, source.provenance = attributes.with_provenance(stated)
        source.num_traces = source.num_skipped = 0
        self._undo, self._num_steps = [], num_steps
        self.keys.begin_source(self._undo)

        def restore() -> None:
            self.attributes = attributes
            del pending.steps[num_steps:]
            pending.sources.pop()
            pending.rows.remove(num_rows)
            while len(pending.keys) > num_rows:
                pending.keys.popitem()

        self._undo.append(restore)
        pending.sources.append(source)

    def _abort(self) -> None:
        """Revert all changes of the open source."""
        undo, self._undo = self._undo, None
        for step in reversed(undo or ()):
            step()

    def _end(self, fingerprint: str | None) -> None:
        """Accept the open source, with another fingerprint if given."""
        assert self._undo is not None
        source = self._pending.sources[-1]
        source.fingerprint = fingerprint or source.fingerprint
        if self._list():
            self._pending.steps.append(lambda: self._repeat(source))

    def _list(self) -> bool:
        """End the open source; if it changes nothing and its file is known, leave it out and return False."""
        source = self._pending.sources[-1]
        is_listed = bool(source.fingerprint) and self.has_source(source.path, source.size, source.fingerprint)
        if is_listed and not self.source_has_changes and len(self._pending.steps) == self._num_steps:
            self._abort()
            return False
        self._undo = None
        return True

    def _repeat(self, source: PendingSource) -> None:
        """Resolve the keys of a source again, whose rows are in the pending segments."""
        self._begin(source)
        try:
            for entry in source.entries:
                if isinstance(entry, Entry):
                    self._repeat_entry(entry)
                elif self.fits(entry):
                    self._add_block(entry)
                else:
                    for single in map(Entry.of, entry):
                        self._repeat_entry(single)
        except InvalidInputError as error:
            self._abort()
            raise error.with_location(source=source.path) from None
        except BaseException:
            self._abort()
            raise
        self._list()  # Another writer may have added it.

    def _repeat_entry(self, entry: Entry) -> None:
        """Resolve the key of a trace again, which another writer may have added meanwhile."""
        num_conflicts, key = self.keys.num_conflicts, (entry.record.question_id, entry.record.sample)
        self._accept(entry, *self._resolve(entry.record, entry.trace))
        if entry.trace is not None and self.keys.num_conflicts == num_conflicts and self.index.find(*key) >= 0:
            self.joined[key] = entry.given._replace(group=entry.given.group or None)

    def _resolve(self, record: TraceRecord | Key, trace: PackedTrace | None) -> tuple[set[int], float]:
        """Return the field groups and the label that the key of a trace gets from it.

        Parameters
        ----------
        record : TraceRecord or Key
        trace : PackedTrace or None
            None if another trace of the key was pending or committed before.

        Raises
        ------
        InvalidInputError
            If the trace does not fit the store.
        """
        num_conflicts = self.keys.num_conflicts
        try:
            attributes = self.attributes if trace is None else fit_attributes(self.attributes, trace)
            groups = self.keys.resolve_known(record) if trace is None else self.keys.resolve_new(trace)
            is_rejected = not groups and self.keys.num_conflicts > num_conflicts
            label = math.nan if is_rejected else self.keys.resolve_label(record)
            self.keys.num_conflicts = min(self.keys.num_conflicts, num_conflicts + 1)  # a trace is one
            self.attributes = attributes
        except InvalidInputError as error:
            raise error.with_location(position=record.position) from None
        return groups, label

    def _append(self, trace: PackedTrace, split_bytes: int) -> WrittenPlace:
        """Append a trace to the last segment, or to a new one if that has `split_bytes` with it, and return its place."""
        if trace.segment is not None:
            self._pending.place(trace.segment, self.manifest.num_segments, self.target.new_folder)
            return trace.segment, trace.row
        segments = self._pending.segments
        segment = next(iter(segments[-1:]), None)
        if segment is not None and len(segment) and segment.num_bytes + trace.num_bytes > split_bytes:
            segment.close_fd()
            segment = None
        if not isinstance(segment, SegmentWriter) or segment.name:
            number = self.manifest.num_segments + len(segments)
            segments.append(segment := self._segment_type(self.target.new_folder(), number, self.attributes))
        segment.append(trace, self.attributes)
        return segment, len(segment) - 1

    def _accept(self, entry: Entry, groups: set[int], label: float) -> None:
        """Add a trace to the open source; `groups` and `label` are those of resolve()."""
        source = self._pending.sources[-1]
        source.num_skipped += self.keys.path_of(entry.record) not in (None, source.path)
        if not groups:
            self.keys.set_label(entry.record, label)
            return
        assert entry.trace is not None
        assert entry.segment is not None
        number = self.manifest.num_sources + len(self._pending.sources) - 1
        location = location_of(
            entry.trace, groups & groups_of(entry.trace).keys(), entry.segment.number, entry.row, number
        )
        source.num_traces += 1
        self.keys.add_location(entry.trace.record, location, groups, entry.given._replace(label=label))

    def fits(self, block: TraceBlock) -> bool:
        """Return whether all traces of a block fit the store and have keys that it does not know."""
        try:
            block.fit_attributes(self.attributes)
        except InvalidInputError:
            return False
        return self.keys.are_new(block)

    def append_block(self, block: TraceBlock) -> None:
        """Add a block for which fits() is true to the open source, with its scores, labels and groups."""
        self._pending.place(block.segment, self.manifest.num_segments, self.target.new_folder)
        self._pending.sources[-1].entries.append(block)
        self._add_block(block)

    def _add_block(self, block: TraceBlock) -> None:
        self.attributes = block.fit_attributes(self.attributes)
        self.keys.add_new(block, self.manifest.num_sources + len(self._pending.sources) - 1)
        self._pending.sources[-1].num_traces += len(block)

    def _do(self, step: Callable[[], None]) -> None:
        """Take a step, and repeat it on a newer generation."""
        step()
        self._pending.steps.append(step)


def _continues(old: PinnedGeneration, new: PinnedGeneration) -> bool:
    """Return whether a generation has all traces of another one, with their numbers."""
    before, after = old.manifest, new.manifest
    if before.num_segments == 0 or before.num_traces == 0:
        return before.num_traces == 0
    is_larger = after.num_segments >= before.num_segments and after.num_traces >= before.num_traces
    last = before.num_segments - 1
    return is_larger and old.index.segment(last) == new.index.segment(last)
