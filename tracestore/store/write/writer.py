"""StoreWriter: complete sources and atomic commits (docs/format.md, "Commit")."""

import contextlib
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import numpy as np

from tracestore.errors import CorruptStoreError, InvalidInputError, LateConflictError, RemoteError, UsageError
from tracestore.store.format import labels, schema
from tracestore.store.format.provenance import Provenance
from tracestore.store.io import fsio
from tracestore.store.io.files import parse_location
from tracestore.store.lens import LensArrays
from tracestore.store.read.columns import TraceValues
from tracestore.store.read.segment import read_lens
from tracestore.store.write.changes import Changes
from tracestore.store.write.commit import add_files, load_generation, load_newest, open_target, root_metadata
from tracestore.store.write.keys import OnConflict
from tracestore.store.write.pack import PackedTrace, fit_lens, pack_lens, pack_record
from tracestore.store.write.pending import Entry, Key, PendingLens, PendingSource, SegmentsAhead
from tracestore.store.write.record import TraceRecord

COMMIT_BYTES = 128 << 20  # of pending data trigger a commit; no reader depends on it
# Options by name. None: the default; a function returns the option of a new store.
Options = Mapping[str, str | Callable[[], str] | None]
_DEFAULTS = {"attention": "mean", "dtype": "float16", "codec": "none"}  # options of a new store


class StoreWriter(Changes):
    """Writer of a store. Several may add to one store at the same time.

    begin_source() begins a source, its traces are appended, and end_source() accepts it; abort_source() reverts all
    of its changes. Without other writers the order of calls determines every byte. A commit that follows one of
    another writer resolves the keys of all pending traces again.

    Parameters
    ----------
    path : str or os.PathLike
        Path or URL of the store.
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
        returns True for the writer that has loaded it.
    allow_mixed_provenance : bool
        Accept sources whose provenance conflicts.
    commit_bytes, split_bytes : int
        Size of all pending segments that triggers a commit at the end of a source; maximum size of a segment.

    Raises
    ------
    UsageError
        If the path cannot be used or the options differ from the store's.
    StoreLockedError
        If another process replaces the store, or holds its lock for 30 s; with `overwrite`, if a writer has it open.
    CorruptStoreError
        If the existing store is damaged.
    """

    _open_target = staticmethod(open_target)

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
        can_resume: "Callable[[StoreWriter], bool] | None" = None,
        allow_mixed_provenance: bool = False,
        commit_bytes: int = COMMIT_BYTES,
        split_bytes: int = schema.SEGMENT_SPLIT_BYTES,
    ) -> None:
        location = parse_location(path)
        target = self._open_target(
            location, overwrite=overwrite, exist_ok=exist_ok, keeps_replacement=can_resume is not None
        )
        super().__init__(target, on_conflict, allow_mixed_provenance)
        self.commit_bytes, self.split_bytes = commit_bytes, split_bytes
        options: Options = {"attention": attention, "dtype": dtype, "codec": codec}
        self._is_open, self._directions = True, dict[str, str]()  # of the scores that this writer has defined
        with fsio.map_os_errors(target.path):
            try:
                with target.opened():
                    if not (target.is_begun and self._resume(options, can_resume)):
                        self._load(options)
            except BaseException:
                target.close()
                raise

    def _resume(self, options: Options, can_resume: "Callable[[StoreWriter], bool] | None") -> bool:
        """Load a replacement that was begun; remove it if its sources, values or options differ from the caller's."""
        with contextlib.suppress(UsageError, CorruptStoreError):
            self._load(options)
            if can_resume is not None and can_resume(self):
                return True
            self._generation.close()
        self.target.clear()
        return False

    def _load(self, options: Options) -> None:
        given = {k: v() if callable(v) and self.target.newest() == 0 else v for k, v in options.items()}
        fallback = {name: str(given[name] or default) for name, default in _DEFAULTS.items()}
        generation = load_newest(self.target, fallback)
        for name, value in given.items():
            stored = generation.manifest.attributes.options[name]
            if isinstance(value, str) and value != stored:
                raise UsageError(f"{self.target.location} was created with --{name} {stored}, not {value}")
        self._start(generation)
        self.read_columns()
        self.target.begin(generation.manifest, root_metadata(generation.manifest.attributes))

    def begin_source(
        self, path: str | None, size: int = 0, fingerprint: str = "", provenance: Provenance | None = None
    ) -> None:
        """Begin a source, identified by its path, size in bytes and fingerprint; UsageError as check_provenance().

        The path None is for a trace of a program: the source is named by the number of the trace.
        """
        source = PendingSource(path or "", size, fingerprint, stated=provenance, is_numbered=path is None)
        self._begin(source)
        self._roll_back = self._pending.savepoint()

    def abort_source(self) -> None:
        """Revert all changes of the open source."""
        try:
            self._abort()
            self._roll_back()
        except BaseException:  # The source is reverted only in part, so nothing pending may be committed.
            self._drop_pending()
            raise

    def flush_source(self) -> None:
        """Write the buffered arrays of the open source, so that their memory can be released."""
        self._pending.flush()

    def end_source(self, fingerprint: str | None = None) -> None:
        """Accept the open source, with another fingerprint if given, and commit if enough is pending."""
        self.flush_source()
        self._end(fingerprint)
        if self.pending_bytes >= self.commit_bytes:
            self.commit()

    @property
    def num_pending(self) -> int:
        """Number of traces that the next commit adds."""
        return len(self._pending.rows)

    @property
    def replaces_at_commit(self) -> bool:
        """Return whether the next commit replaces a store that readers see: with `overwrite` the first one to an object store."""
        return 0 < self.target.replaced_generation == self.manifest.generation

    @property
    def pending_bytes(self) -> int:
        """Size of the segments that the next commit adds, in bytes."""
        return self._pending.num_bytes

    def pack(self, record: TraceRecord) -> PackedTrace:
        """Pack a record for append_packed(), and remove its arrays from it. Any thread may call this method."""
        options = self.attributes.options
        try:
            return pack_record(record, attention=options["attention"], keep_dtype=options["dtype"] == "keep")
        except InvalidInputError as error:
            raise error.with_location(position=record.position) from None

    def append_packed(self, trace: PackedTrace, *, scores: Mapping[str, float] = {}, group: str = "") -> bool:
        """Add a trace to the open source, and return False if the store has it already.

        `scores` are values of named scores; each name was given to define_score() before. The trace may be in a row of
        a segment of segments_ahead() or of another store. InvalidInputError if it does not fit the store.
        """
        assert self._undo is not None, "no source is open"
        record, given = trace.record, TraceValues(scores, group=group)
        groups, label = self._resolve(record, trace)
        if groups:
            segment, row = self._append(trace, self.split_bytes)
            entry = Entry(record, given, trace, segment, row)
        else:
            entry = Entry(Key(record.question_id, record.sample, record.position, label), given)
        self._pending.sources[-1].entries.append(entry)
        self._accept(entry, groups, label)
        return bool(groups)

    def segments_ahead(self) -> SegmentsAhead | None:
        """Return segments that another thread may write; the writer takes them over with their traces. None: it may not."""
        return SegmentsAhead(self.attributes.options, self.target.new_folder, self.split_bytes)

    def define_score(
        self,
        name: str,
        field: labels.ScoreField,
        *,
        is_default: bool = False,
        replaced: Collection[int] = (),
        is_alone: bool = False,
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
        is_alone : bool
            Commit the definition also without values.

        Raises
        ------
        UsageError
            If the name is not valid, or this writer has defined it with the opposite direction, or other traces have
            scores of this name with that direction.
        """

        def define() -> None:
            stored = self.attributes.scores.get(name, field)
            if stored.direction != field.direction:
                scored = np.flatnonzero(~np.isnan(self.read_columns().score(name)))
                has_others = not np.isin(scored, np.fromiter(replaced, np.int64)).all()
                is_defined = self._directions.get(name, field.direction) != field.direction
                if has_others or is_defined or self._pending.has_score(name):
                    raise UsageError(
                        f"{self.target.location}: a high {name} means {stored.direction!r} in the store, "
                        f"{field.direction!r} in what is added. Use another name, state the other direction, "
                        "or replace all values of this one (tracestore score)."
                    )
            known, self.attributes = self.attributes, self.attributes.with_score(name, field, is_default=is_default)
            self._pending.has_attributes |= is_alone and self.manifest.num_traces > 0 and self.attributes != known

        self._do(define)
        self._directions[name] = field.direction

    def keep_layout(self, text: str) -> None:
        """Keep the layout of sources as the newest, from the next commit on."""

        def keep() -> None:
            known, self.attributes = self.attributes.layouts, self.attributes.with_layout(text)
            self._pending.has_attributes |= self.manifest.num_traces > 0 and self.attributes.layouts != known

        self._do(keep)

    def update_values(self, updates: Mapping[int, TraceValues], *, closed: Collection[int] = ()) -> None:
        """Replace values of committed traces with the next commit. Those that are None keep what is stored.

        The sources of the numbers `closed` have all of their values then: they are no longer open.
        """
        self._do(lambda: self._pending.updates.update(updates))
        self._do(lambda: self._pending.closed_sources.update(closed))

    def choose_attention(self, attention: str) -> None:
        """Set the option `attention` of a store that has no commit, and no hidden states of all tokens."""
        options = self.attributes.options | {"attention": attention}
        self.attributes = replace(self.attributes, attention=attention, options=options)
        self._generation = replace(self._generation, manifest=replace(self.manifest, attributes=self.attributes))

    def lens_digest(self) -> bytes | None:
        """Return the digest of the lens, committed or pending, that the store has; None if it has none."""
        if self._pending.lens is not None:
            return self._pending.lens.digest
        lens = read_lens(self.target.files, self.index, self.attributes)
        return None if lens is None else lens.arrays().digest()

    def set_lens(self, lens: LensArrays, provenance: Provenance | None = None) -> None:
        """Store a final norm and an unembedding matrix with the next commit. No-op if the store has equal ones.

        UsageError if it has others, or as check_provenance(); InvalidInputError if the matrix does not fit the store.
        """
        packed = pack_lens(lens, keep_dtype=self.attributes.options["dtype"] == "keep")
        written: list[PendingLens] = []

        def place() -> None:
            self.check_provenance([] if provenance is None else [provenance])
            attributes, number = fit_lens(self.attributes, packed, provenance)
            stored = self.lens_digest()
            if stored is not None:
                if stored != (written[0].digest if written else packed.digest()):
                    raise UsageError(f"{self.target.location}: holds another lens; write this one to another store")
                return
            if not written:
                with fsio.map_os_errors(self.target.path):
                    written.append(PendingLens(self.target.new_folder(), attributes, packed))
            self._pending.lens, self._pending.lens_provenance = written[0], number
            self.attributes = attributes

        self._do(place)

    def end_segments(self) -> None:
        """Let the next trace begin a segment."""
        for segment in self._pending.all_segments:
            segment.finish(self.target.sync_tree)

    def commit(self, *, are_open: bool = False) -> None:
        """Make all pending changes durable; after an exception the last generation is unchanged.

        New sources that `are_open` are read again by a conversion, until update_values() closes them.
        After a RemoteError the call can be repeated. StoreLockedError if another writer has replaced the store.
        LateConflictError if sources conflict with what another writer has committed since they were appended: they are
        left out, and all other sources are committed.
        """
        assert self._undo is None, "a source is open"
        if self._pending.is_empty:
            return
        refused: list[InvalidInputError] = []
        with fsio.map_os_errors(self.target.path):
            try:
                self.end_segments()
                with self.target.lock():
                    self._commit(refused, are_open)
            except BaseException as error:
                if not isinstance(error, RemoteError):
                    self._drop_pending()
                raise
        if refused:
            first, more = refused[0], f" ({len(refused) - 1:,} more refused)" if refused[1:] else ""
            raise LateConflictError(
                first.reason + more, source=first.source, position=first.position, field=first.field
            )

    def _commit(self, refused: list[InvalidInputError], are_open: bool) -> None:
        target, is_done = self.target, False
        while not is_done:
            if target.has_changed(self.manifest):
                refused += self._rebase(load_newest(target, self.attributes.options))
            if self._pending.is_empty:
                return
            new = add_files(target, self._generation, self.attributes, self._pending, are_open=are_open)
            try:
                is_done = target.create_manifest(new)
            except BaseException:
                if target.has_manifest(new):
                    # After the link readers may have opened the generation: it cannot be reverted.
                    self._advance(load_generation(target, new.generation))
                raise
        self._advance(load_generation(target, new.generation))
        target.settle(new, root_metadata(new.attributes))

    def replace_existing(self) -> None:
        """Move the new store to the path of the existing one, which is removed. No-op without `overwrite`.

        Call it once, after the last commit. Without it close() keeps the existing store.
        """
        if self.manifest.generation and self.target.replace_existing():
            self._generation.close()
            self._start(load_generation(self.target, self.manifest.generation))

    def _drop_pending(self) -> None:
        pending = self._pending
        self._drop()
        with contextlib.suppress(OSError):  # close() removes what is left.
            pending.discard()

    def close(self) -> None:
        """Drop uncommitted changes and release the store; a store without any commit is removed."""
        if self._is_open:
            self._is_open = False
            self._drop_pending()
            self._generation.close()
            self.target.close()

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
