"""StoreWriter: complete sources and atomic commits (docs/format.md, "Commit")."""

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from tracestore.errors import CorruptStoreError, InvalidInputError, UsageError
from tracestore.store.format import labels, paths, schema
from tracestore.store.format.provenance import Provenance, require_compatible
from tracestore.store.io import fsio
from tracestore.store.io.files import LocalFiles
from tracestore.store.io.ownership import require_removed
from tracestore.store.lens import LensArrays
from tracestore.store.read.columns import Columns, TraceValues, read_columns
from tracestore.store.read.index import SourceEntry, StoreIndex
from tracestore.store.read.segment import read_lens
from tracestore.store.write.commit import commit, remove_unreferenced, write_root
from tracestore.store.write.keys import KeyResolver, OnConflict
from tracestore.store.write.pack import PackedTrace, fit_attributes, fit_lens, pack_lens, pack_record
from tracestore.store.write.pending import Pending, PendingLens, PendingSource, location_of
from tracestore.store.write.record import TraceRecord
from tracestore.store.write.segment_writer import SegmentWriter
from tracestore.store.write.working_folder import Options, WorkingFolder

COMMIT_BYTES = 128 << 20  # of pending data trigger a commit; no reader depends on it


class StoreWriter:
    """Writer of a store, which holds the store's writer lock until close().

    begin_source() begins a source, its traces are appended, and end_source() accepts it; abort_source() reverts all
    of its changes. The order of calls determines every byte.

    Parameters
    ----------
    path : str or os.PathLike
        Path or URL of the store. A remote store is written in a local working folder.
    attention, dtype, codec : str, optional
        Options of a new store, or functions that return them; an existing store must have been created with the same.
    overwrite : bool
        Write a new store next to the existing one; replace_existing() replaces the existing one.
    exist_ok : bool
        Whether the store may exist.
    on_conflict : {"error", "keep-first", "keep-last"}
        What to do with a trace whose key exists with different content: refuse it, ignore it, or let
        it replace the first one, whose bytes remain unreferenced in their segment.
    can_resume : callable, optional
        With `overwrite`, what an interrupted writer has committed to the new store is kept if this
        returns True for each of its sources.
    allow_mixed_provenance : bool
        Accept sources whose provenance conflicts.
    expected_bytes : int, optional
        Estimate of the data to be added, for the error message if the file system is full.
    commit_bytes, split_bytes : int
        Size of all pending segments that triggers a commit at the end of a source; maximum size of a segment.

    Raises
    ------
    UsageError
        If the path cannot be used or the options differ from the store's.
    StoreLockedError
        If another writer holds the store.
    CorruptStoreError
        If the existing store is damaged.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        attention: str | Callable[[], str] | None = None,
        dtype: str | None = None,
        codec: str | None = None,
        overwrite: bool = False,
        exist_ok: bool = True,
        on_conflict: OnConflict = "error",
        can_resume: Callable[[SourceEntry], bool] | None = None,
        allow_mixed_provenance: bool = False,
        expected_bytes: int | None = None,
        commit_bytes: int = COMMIT_BYTES,
        split_bytes: int = schema.SEGMENT_SPLIT_BYTES,
    ) -> None:
        self._folder = WorkingFolder(path, overwrite=overwrite, exist_ok=exist_ok, can_resume=can_resume)
        self.commit_bytes, self.split_bytes = commit_bytes, split_bytes
        self._on_conflict: OnConflict = on_conflict
        self._allow_mixed_provenance = allow_mixed_provenance
        options: Options = {"attention": attention, "dtype": dtype, "codec": codec}
        with fsio.map_os_errors(self.path, None if expected_bytes is None else lambda: expected_bytes):
            try:
                if not (self._folder.open() and self._resume(options, can_resume)):
                    self._load(options)
            except BaseException:
                self.close()
                raise

    @property
    def path(self) -> Path:
        """The local folder in which the writer works."""
        return self._folder.path

    def _resume(self, options: Options, can_resume: Callable[[SourceEntry], bool] | None) -> bool:
        """Load a replacement that was begun; remove it if its sources or options differ from the caller's."""
        with contextlib.suppress(UsageError, CorruptStoreError):
            self._load(options)
            if can_resume is not None and all(map(can_resume, self.index.sources())):
                return True
        self._folder.remove_contents()
        return False

    def _load(self, options: Options) -> None:
        self.manifest = self._folder.load_manifest(options)
        self.attributes = self.manifest.attributes
        self._columns: Columns | None = None
        self.index = StoreIndex(LocalFiles(self.path), self.manifest)
        self.read_columns()
        self._sources = {(s.path, s.size, s.fingerprint) for s in self.index.sources()}
        self._reset_pending()
        self._undo: list[Callable[[], None]] | None = None
        write_root(self.path, self.attributes)
        remove_unreferenced(self.path, self.index)

    def _reset_pending(self) -> None:
        self._pending = Pending()
        self._keys = KeyResolver(
            self._folder.files, self.index, self._pending, self._on_conflict, lambda: self.read_columns().labels
        )

    def has_source(self, path: str, size: int, fingerprint: str) -> bool:
        """Return whether exactly this file is committed already."""
        return (path, size, fingerprint) in self._sources

    def has_source_named(self, path: str) -> bool:
        """Return whether a file of this name is committed, whatever its contents."""
        return any(name == path for name, _, _ in self._sources)

    def check_provenance(self, provenances: Iterable[Provenance]) -> None:
        """Raise UsageError if sources with these provenances conflict with each other or with the store."""
        if not self._allow_mixed_provenance:
            require_compatible(self.attributes.provenance, provenances, str(self._folder.location))

    def begin_source(self, path: str, size: int, fingerprint: str, provenance: Provenance | None = None) -> None:
        """Begin a source, identified by its path, size in bytes and fingerprint; UsageError as check_provenance()."""
        assert self._undo is None, "a source is open"
        self.check_provenance([] if provenance is None else [provenance])
        pending, attributes = self._pending, self.attributes
        roll_back = pending.savepoint()
        self.attributes, number = attributes.with_provenance(provenance)
        self._undo = []
        self._keys.begin_source(self._undo)

        def restore() -> None:
            self.attributes = attributes
            roll_back()
            pending.sources.pop()

        self._undo.append(restore)
        pending.sources.append(PendingSource(path, size, fingerprint, number))

    def abort_source(self) -> None:
        """Revert all changes of the open source."""
        undo, self._undo = self._undo, None
        try:
            for step in reversed(undo or ()):
                step()
        except BaseException:  # The source is reverted only in part, so nothing pending may be committed.
            self.attributes = self.manifest.attributes
            self._drop_pending()
            raise

    def flush_source(self) -> None:
        """Write the buffered arrays of the open source, so that their memory can be released."""
        for segment in self._pending.segments[-1:]:
            segment.flush()

    def end_source(self, fingerprint: str | None = None) -> bool:
        """Accept the open source, with another fingerprint if given; return whether that triggered a commit."""
        assert self._undo is not None
        source = self._pending.sources[-1]
        source.fingerprint = fingerprint or source.fingerprint
        self.flush_source()
        self._undo = None
        is_due = self.pending_bytes >= self.commit_bytes
        if is_due:
            self.commit()
        return is_due

    @property
    def num_pending(self) -> int:
        """Number of traces that the next commit adds."""
        return len(self._pending.rows)

    @property
    def pending_bytes(self) -> int:
        """Size of the segments that the next commit adds, in bytes."""
        return self._pending.num_bytes

    @property
    def source_has_changes(self) -> bool:
        """True if the open source has added or completed a trace."""
        return self._undo is not None and len(self._undo) > 1  # The first step reverts begin_source().

    @property
    def num_source_conflicts(self) -> int:
        """Number of traces of the open source whose key existed with different content."""
        return self._keys.num_conflicts

    def pack(self, record: TraceRecord) -> PackedTrace:
        """Pack a record for append_packed(), and remove its arrays from it. Any thread may call this method."""
        options = self.attributes.options
        try:
            return pack_record(record, attention=options["attention"], keep_dtype=options["dtype"] == "keep")
        except InvalidInputError as error:
            raise error.with_location(position=record.position) from None

    def append_packed(self, trace: PackedTrace, *, scores: Mapping[str, float] = {}, group: str = "") -> bool:
        """Add a trace to the open source, and return False if the store has it already.

        `scores` are values of named scores; each name was given to define_score() before. InvalidInputError if the
        trace does not fit the store.
        """
        assert self._undo is not None
        record, pending, source = trace.record, self._pending, self._pending.sources[-1]
        try:
            attributes = fit_attributes(self.attributes, trace)
            groups = self._keys.resolve_new(trace)
            label = self._keys.resolve_label(record)
            self.attributes = attributes
        except InvalidInputError as error:
            raise error.with_location(position=record.position) from None
        if not groups:
            self._keys.set_label(record, label)
            source.num_skipped += 1
            return False
        segment = self._segment_for(trace)
        source_number = self.manifest.num_sources + len(pending.sources) - 1
        location = location_of(trace, groups, segment.number, len(segment), source_number)
        segment.append(trace, self.attributes)
        source.num_traces += 1
        self._keys.add_location(record, location, groups, TraceValues(scores, label, group))
        return True

    def _segment_for(self, trace: PackedTrace) -> SegmentWriter:
        segments = self._pending.segments
        if segments and len(segments[-1]) and segments[-1].num_bytes + trace.num_bytes > self.split_bytes:
            segments[-1].close_fd()
        elif segments:
            return segments[-1]
        number = self.manifest.num_segments + len(segments)
        path = paths.temporary(paths.segment(number))
        require_removed(self.path, path)
        segments.append(SegmentWriter(self.path / path, number, self.attributes))
        return segments[-1]

    def choose_attention(self, attention: str) -> None:
        """Set the option `attention` of a store that has no commit, and no hidden states of all tokens."""
        options = self.attributes.options | {"attention": attention}
        self.attributes = replace(self.attributes, attention=attention, options=options)
        self.manifest = replace(self.manifest, attributes=self.attributes)
        write_root(self.path, self.attributes)

    def read_columns(self) -> Columns:
        """Return the scores, labels and groups of the committed traces."""
        if self._columns is None:
            self._columns = read_columns(LocalFiles(self.path), self.manifest)
        return self._columns

    def define_score(
        self, name: str, field: labels.ScoreField, *, is_default: bool = False, replaced: Collection[int] = ()
    ) -> None:
        """Define a named score, or replace its definition.

        Parameters
        ----------
        name : str
        field : ScoreField
        is_default : bool
            Make it the default score, as the first score of a store is in any case.
        replaced : collection of int
            Traces whose scores of this name the caller replaces.

        Raises
        ------
        UsageError
            If the name is not valid, or other traces have scores of this name with the opposite direction.
        """
        stored = self.attributes.scores.get(name, field)
        if stored.direction != field.direction:
            scored = np.flatnonzero(~np.isnan(self.read_columns().score(name)))
            if not np.isin(scored, np.fromiter(replaced, np.int64)).all():
                raise UsageError(
                    f"{self._folder.location}: a high {name} means {stored.direction!r} in the store, {field.direction!r} in "
                    "what is added. Use another name, or replace all values of this one (tracestore score)."
                )
        self.attributes = self.attributes.with_score(name, field, is_default=is_default)

    def keep_layout(self, text: str) -> None:
        """Keep the layout that the next sources are read by, from the next commit on."""
        self.attributes = self.attributes.with_layout(text)

    def update_values(self, updates: Mapping[int, TraceValues]) -> None:
        """Replace values of committed traces with the next commit. Missing ones (NaN, None) keep what is stored."""
        self._pending.updates.update(updates)

    def lens_digest(self) -> bytes | None:
        """Return the digest of the lens, committed or pending, that the store has; None if it has none."""
        if self._pending.lens is not None:
            return self._pending.lens.digest
        lens = read_lens(self._folder.files, self.index, self.attributes)
        return None if lens is None else lens.arrays().digest()

    def set_lens(self, lens: LensArrays, provenance: Provenance | None = None) -> None:
        """Store a final norm and an unembedding matrix with the next commit. No-op if the store has equal ones.

        UsageError if it has others, or as check_provenance(); InvalidInputError if the matrix does not fit the store.
        """
        self.check_provenance([] if provenance is None else [provenance])
        lens = pack_lens(lens, keep_dtype=self.attributes.options["dtype"] == "keep")
        attributes, number = fit_lens(self.attributes, lens, provenance)
        stored = self.lens_digest()
        if stored is None:
            with fsio.map_os_errors(self.path):
                self._pending.lens = PendingLens(self.path, attributes, lens, number)
            self.attributes = attributes
        elif stored != lens.digest():
            raise UsageError(f"{self._folder.location}: holds another lens; write this one to another store")

    # Commit

    def commit(self) -> None:
        """Make all pending changes durable; after an exception the last generation is unchanged."""
        assert self._undo is None, "a source is open"
        pending = self._pending
        if pending.is_empty:
            self._folder.publish(self.manifest)
            return
        with fsio.map_os_errors(self.path, lambda: self.pending_bytes):
            try:
                self.manifest = commit(self.path, self.index, self.attributes, pending)
            except BaseException:
                self._after_failed_commit(pending)
                raise
            self._start_next_generation(pending)
            self._folder.publish(self.manifest)

    def _start_next_generation(self, committed: Pending) -> None:
        self._folder.is_published = False
        self._sources |= {(s.path, s.size, s.fingerprint) for s in committed.sources}
        self._columns, self.attributes = None, self.manifest.attributes
        self.index = StoreIndex(LocalFiles(self.path), self.manifest)
        self._reset_pending()
        remove_unreferenced(self.path, self.index)

    def _after_failed_commit(self, pending: Pending) -> None:
        number = self.manifest.generation + 1
        if (self.path / paths.manifest(number)).exists():
            # The commit failed after the rename. Readers may have opened the generation, and it may
            # be on disk, so it cannot be reverted.
            self.manifest = LocalFiles(self.path).load_manifest(number)
            self._start_next_generation(pending)
            return
        # Some segments are closed already, so nothing pending can be committed later.
        self.attributes = self.manifest.attributes
        self._drop_pending()
        with contextlib.suppress(OSError):  # The next writer removes what is left.
            remove_unreferenced(self.path, self.index)

    def replace_existing(self) -> None:
        """Move the new store to the path of the existing one, which is removed. No-op without `overwrite`.

        Call it once, after the last commit. Without it close() keeps the existing store.
        """
        if self.manifest.generation and self._folder.replace_existing():
            self.index = StoreIndex(LocalFiles(self.path), self.manifest)
            self._reset_pending()

    def _drop_pending(self) -> None:
        pending = self._pending
        self._reset_pending()
        with contextlib.suppress(OSError):  # The next writer removes what is left.
            pending.discard()

    def close(self) -> None:
        """Drop uncommitted changes and release the lock; a store without any commit is removed."""
        self._undo = None
        if hasattr(self, "_pending"):
            self._drop_pending()
        self._folder.close()

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
