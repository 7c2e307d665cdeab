"""Writing a store: sources go in whole, commits are atomic (docs/format.md, "Commit").

One module of over 400 lines until several writers can share a store, which replaces it.
"""

import contextlib
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tracestore.errors import CorruptStoreError, InvalidInputError, UsageError
from tracestore.store.format import labels, paths, schema
from tracestore.store.format import manifest as mf
from tracestore.store.io import fsio
from tracestore.store.io.files import LocalFiles, RemoteURL, StoreFiles, parse_location
from tracestore.store.io.ownership import FolderKind, classify_folder, remove_contents, remove_own, require_removed
from tracestore.store.io.replacement import Replacement, open_replacement
from tracestore.store.read.columns import Columns, join_columns, read_columns
from tracestore.store.read.index import SourceEntry, StoreIndex
from tracestore.store.write.commit import commit, remove_unreferenced, write_root
from tracestore.store.write.keys import KeyResolver
from tracestore.store.write.pack import PackedTrace, pack_record
from tracestore.store.write.pending import NAN, Pending, PendingSource
from tracestore.store.write.record import TraceRecord
from tracestore.store.write.segment_writer import SegmentWriter

_MEANING = {labels.CORRECT: "right answers", labels.HALLUCINATION: "hallucinated ones"}


def load_latest_manifest(store: Path) -> mf.Manifest | None:
    """The committed state a writer continues from; None in a store without commits.
    CorruptStoreError where the newest manifest is not whole."""
    files = LocalFiles(store)
    numbers = files.generations()
    if not numbers:
        return None
    try:
        return files.load_manifest(numbers[0])
    except CorruptStoreError as error:
        raise CorruptStoreError(f"{error}; run: tracestore verify {store} --repair") from None


def _destination(address: RemoteURL, overwrite: bool, exist_ok: bool) -> Any:
    # Imported here: most stores are local, and what writes others is an extra.
    from tracestore.store.remote.publish import RemotePublisher

    return RemotePublisher(address, overwrite=overwrite, exist_ok=exist_ok)


class StoreWriter:
    """Holds the writer lock of a store from creation to close().

    A source is begun, its traces appended, and ended; end_source() commits when
    enough has gathered. abort_source() takes back everything of the source.
    The order of calls decides every byte of the store. on_conflict says what becomes of
    a trace whose key is there with other content: "error" refuses it, "keep-first" leaves
    it out, "keep-last" puts it in the place of the first, whose bytes stay in their
    segment and belong to no trace. overwrite makes a store beside the one that is there, which
    replace_existing() gives its name; what a stopped writer had committed of it is kept if `continues`
    is true of all its sources. expected_bytes: what the caller means to add, said where there
    is no room even to begin. A store of another machine (s3://, gs://) is worked on in a folder
    of this one, `path`; `place` is what the caller named.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        attention: str | None = None,
        dtype: str | None = None,
        codec: str | None = None,
        overwrite: bool = False,
        exist_ok: bool = True,
        on_conflict: str = "error",
        can_resume: Callable[[SourceEntry], bool] | None = None,
        expected_bytes: int | None = None,
        close_bytes: int = schema.SEGMENT_CLOSE_BYTES,
        split_bytes: int = schema.SEGMENT_SPLIT_BYTES,
    ) -> None:
        self.place = parse_location(path)
        self._elsewhere = None if isinstance(self.place, Path) else _destination(self.place, overwrite, exist_ok)
        self.path = Path(path) if self._elsewhere is None else self._elsewhere.folder
        self._files: StoreFiles = LocalFiles(self.path) if self._elsewhere is None else self._elsewhere.files
        self._is_published = True
        self.close_bytes, self.split_bytes = close_bytes, split_bytes
        self._on_conflict = on_conflict
        self._lock: fsio.WriterLock | None = None
        self._replacement: Replacement | None = None
        self._can_resume = can_resume
        with fsio.map_os_errors(self.path, None if expected_bytes is None else lambda: expected_bytes):
            try:
                if overwrite and self._elsewhere is None:
                    self._replacement = open_replacement(self.path)
                    if self._replacement is not None:
                        self.path = self._replacement.folder
                        self._files = LocalFiles(self.path)
                self._created = self._prepare_folder(exist_ok or overwrite)
                self._lock = fsio.WriterLock(self.path)
                if classify_folder(self.path) is not FolderKind.STORE:
                    # Until the first commit these two say whose folder this is: they must outlive a
                    # crash that anything beside them outlives.
                    fsio.fsync_path(self.path)
                remove_own(self.path, paths.SPOOL_FOLDER)  # a conversion was killed
                asked = {"attention": attention, "dtype": dtype, "codec": codec}
                if self._replacement is not None and self._replacement.begin(self._lock):
                    self._load_replacement(asked)
                else:
                    self._load(asked)
            except BaseException:
                self.close()
                raise

    def _prepare_folder(self, exist_ok: bool) -> bool:
        """-> whether the folder was made. Other writers may make and remove it meanwhile."""
        with contextlib.suppress(FileExistsError):
            try:
                fsio.retry_eintr(os.mkdir, self.path)
                return True
            except FileNotFoundError:
                raise UsageError(f"{self.path}: the folder it should lie in does not exist") from None
        if classify_folder(self.path) is FolderKind.STORE and not exist_ok:
            raise UsageError(f"{self.path}: the store exists (overwrite=True replaces it)")
        return False

    def _load_replacement(self, asked: dict[str, str | None]) -> None:
        """What a stopped writer has left of it, or nothing where that is of other sources or options."""
        try:
            self._load(asked)
            if self._can_resume is not None and all(map(self._can_resume, self.index.sources())):
                return
        except (UsageError, CorruptStoreError):
            pass
        remove_contents(self.path, keep_lock=True)
        self._load(asked)

    def _load(self, asked: dict[str, str | None]) -> None:
        manifest = load_latest_manifest(self.path)
        if manifest is None:
            options = {
                k: asked[k] or default
                for k, default in (("attention", "mean"), ("dtype", "float16"), ("codec", "none"))
            }
            attributes = schema.Attributes(attention=options["attention"], options=options)
            manifest = mf.Manifest(0, attributes)
        else:
            # Its writer may have been killed between the rename and the sync: what this
            # one finds committed, and builds upon, must not go with the power.
            fsio.fsync_path(self.path / "manifest")
        for name, value in asked.items():
            own = manifest.attributes.options[name]
            if value is not None and value != own:
                raise UsageError(f"{self.place} was made with --{name} {own}, not {value}")
        self.manifest = manifest
        self.attributes = manifest.attributes
        try:
            self.index = StoreIndex(LocalFiles(self.path), manifest)
            self._columns: Columns | None = join_columns(
                [read_columns(LocalFiles(self.path), ref) for ref in manifest.columns]
            )
        except FileNotFoundError as error:
            raise CorruptStoreError(f"{error.filename or error}: missing") from None
        self._sources = {(s.path, s.size, s.fingerprint) for s in self.index.sources()}
        self._reset_pending()
        self._undo: list[Callable[[], None]] | None = None
        write_root(self.path, self.attributes)
        remove_unreferenced(self.path, manifest)

    def _reset_pending(self) -> None:
        """Nothing is pending upon the generation."""
        self._pending = Pending()
        self._keys = KeyResolver(
            self._files, self.index, self._pending, self._on_conflict, lambda: self.read_columns().labels
        )

    # Sources

    def has_source(self, path: str, size: int, fingerprint: str) -> bool:
        """Whether this very file is committed already."""
        return (path, size, fingerprint) in self._sources

    def has_source_named(self, path: str) -> bool:
        """Whether a file of this name is committed, whatever was in it."""
        return any(name == path for name, _, _ in self._sources)

    def begin_source(self, path: str, size: int, fingerprint: str) -> None:
        assert self._undo is None, "a source is open"
        pending = self._pending
        attributes, count = self.attributes, len(pending.segments)
        mark = pending.segments[-1].savepoint() if count else None
        self._keys.undo = self._undo = []
        self._keys.num_conflicts = 0

        def restore() -> None:
            self.attributes = attributes
            for segment in pending.segments[count:]:
                segment.close_fd()
                fsio.remove_tree(segment.folder)
            del pending.segments[count:]
            if mark is not None:
                pending.segments[-1].rollback(mark)
            pending.sources.pop()

        self._undo.append(restore)
        pending.sources.append(PendingSource(path, size, fingerprint))

    def abort_source(self) -> None:
        """Takes back all that the open source has added."""
        undo, self._undo = self._undo, None
        try:
            for step in reversed(undo or ()):
                step()
        except BaseException:
            # Half taken back: none of it may be committed.
            self.attributes = self.manifest.attributes
            self._drop_pending()
            raise

    def flush_source(self) -> None:
        """Writes what waits of the open source; nothing of it is read any more after that."""
        for segment in self._pending.segments[-1:]:
            segment.flush()

    def end_source(self) -> bool:
        """Accepts the open source; True where that led to a commit."""
        assert self._undo is not None
        self.flush_source()
        self._undo = None
        if self.pending_bytes >= self.close_bytes:
            self.commit()
            return True
        return False

    @property
    def num_pending(self) -> int:
        """Traces that the next commit adds."""
        return len(self._pending.rows)

    @property
    def pending_bytes(self) -> int:
        return sum(s.num_bytes for s in self._pending.segments)

    @property
    def source_has_changes(self) -> bool:
        """Whether the open source has added or filled in anything yet."""
        return self._undo is not None and len(self._undo) > 1  # the first takes back the source itself

    @property
    def num_source_conflicts(self) -> int:
        """Traces of the open source whose key was there with other content."""
        return self._keys.num_conflicts

    # Traces

    def pack(self, record: TraceRecord) -> PackedTrace:
        """The part of append that may run ahead, in any thread; takes the record's arrays."""
        options = self.attributes.options
        try:
            return pack_record(record, attention=options["attention"], keep_dtype=options["dtype"] == "keep")
        except InvalidInputError as error:
            raise error.with_location(position=record.position) from None

    def append_packed(self, trace: PackedTrace, *, score: float = NAN, group: str = "") -> bool:
        """Adds a trace to the open source; False where the store already has it with
        the same content. InvalidInputError where it does not fit the store."""
        assert self._undo is not None
        record, pending, source = trace.record, self._pending, self._pending.sources[-1]
        try:
            self.attributes = self._fitting_attributes(trace)
            wanted = self._keys.resolve_new(trace)
            if not wanted:
                self._keys.add_label(record)
        except InvalidInputError as error:
            raise error.with_location(position=record.position) from None
        if not wanted:
            source.num_skipped += 1
            return False
        row = self._segment_for(trace).append(trace, self.attributes)
        segment, number = pending.segments[-1], len(pending.segments[-1]) - 1
        places = {
            "graph_segment": segment.number if mf.GROUP_GRAPH in wanted else -1,
            "graph_row": number,
            "hidden_row": row.hidden_row,
            "attention_start": row.attention_start,
            "num_tokens": row.num_tokens,
            "layout": row.layout,
            "sequence_segment": segment.number if mf.GROUP_SEQUENCE in wanted else -1,
            "sequence_row": number,
            "last_token_row": row.last_token_row,
            "nonfinite": int(trace.num_nonfinite > 0),
            "sample": record.sample,
            "source": self.manifest.num_sources + len(pending.sources) - 1,
            "source_position": record.position,
            "graph_crc32c": trace.graph_crc,
            "sequence_crc32c": trace.sequence_crc,
        }
        source.num_traces += 1
        label = NAN if record.label is None else record.label
        self._keys.add_places(record, places, wanted, score, label, group)
        return True

    def _fitting_attributes(self, trace: PackedTrace) -> schema.Attributes:
        a = self.attributes
        found: dict[str, Any] = {
            "num_layers": trace.num_layers,
            "hidden_dim": trace.hidden_dim,
            "num_heads": trace.num_heads,
            "hidden_dtype": trace.hidden_dtype,
            "attention_dtype": trace.attention_dtype,
        }
        for name, value in found.items():
            own = getattr(a, name)
            if value is not None and own is not None and value != own:
                raise InvalidInputError(f"found {value}, expected {own} as in the rest of the store", field=name)
            found[name] = own if own is not None else value
        layout = schema.LAYOUT_NAMES.get(trace.layout)
        if (
            layout is not None
            and a.attention_layout is not None
            and (layout == "edges") != (a.attention_layout == "edges")
        ):
            raise InvalidInputError(
                f"found {layout} attention, expected {a.attention_layout} as in the rest of the store",
                field="attention",
            )
        if layout is None or a.attention_layout == "square":
            layout = a.attention_layout
        return replace(a, **found, attention_layout=layout)

    def _segment_for(self, trace: PackedTrace) -> SegmentWriter:
        segments = self._pending.segments
        if segments and len(segments[-1]) and segments[-1].num_bytes + trace.num_bytes > self.split_bytes:
            segments[-1].close_fd()
        elif segments:
            return segments[-1]
        number = self.manifest.num_segments + len(segments)
        path = paths.temporary(paths.segment(number))
        require_removed(self.path, path)
        segments.append(SegmentWriter(self.path / path, number, self.attributes, self.attributes.options["codec"]))
        return segments[-1]

    # Columns

    def read_columns(self) -> Columns:
        """Scores, labels and groups of the committed traces."""
        if self._columns is None:
            self._columns = join_columns([read_columns(LocalFiles(self.path), ref) for ref in self.manifest.columns])
        return self._columns

    def set_score_direction(self, direction: str, replaced: Collection[int] = ()) -> None:
        """Says what the scores mean that are added from now on, one of labels.DIRECTIONS. UsageError where
        the store has scores of the other meaning, other than those of the traces `replaced`."""
        own = self.attributes.score_direction
        if own not in (None, direction):
            scored = np.flatnonzero(~np.isnan(self.read_columns().scores))
            if not np.isin(scored, np.fromiter(replaced, np.int64)).all():
                raise UsageError(
                    f"{self.place}: its scores are high for {_MEANING[str(own)]}, these for {_MEANING[direction]}: "
                    "scores of both kinds cannot be in one store (tracestore score replaces all of them)"
                )
        self.attributes = replace(self.attributes, score_direction=direction)

    def update_values(self, updates: Mapping[int, tuple[float, float, str | None]]) -> None:
        """Replaces (score, label, group) of committed traces with the next commit."""
        self._pending.updates.update(updates)

    # Commit

    def commit(self) -> None:
        """Makes everything pending durable, or raises and leaves the last generation as it was."""
        assert self._undo is None, "a source is open"
        p = self._pending
        if not (p.rows or p.patches or p.updates or p.sources):
            self._publish()
            return
        with fsio.map_os_errors(self.path, lambda: self.pending_bytes):
            try:
                self.manifest = commit(self.path, self.index, self.attributes, p)
            except BaseException:
                self._after_failed_commit(p)
                raise
            self._is_published = False
            self._start_next_generation(p)
            self._publish()

    def _publish(self) -> None:
        """Where the store lies elsewhere, the commit is one when it is there."""
        if self._elsewhere is not None and not self._is_published:
            self._elsewhere.publish(self.manifest)
            self._is_published = True

    def _start_next_generation(self, committed: Pending) -> None:
        self._sources |= {(s.path, s.size, s.fingerprint) for s in committed.sources}
        self._columns = None
        self.index = StoreIndex(LocalFiles(self.path), self.manifest)
        self._reset_pending()
        remove_unreferenced(self.path, self.manifest)

    def _after_failed_commit(self, p: Pending) -> None:
        number = self.manifest.generation + 1
        if (self.path / paths.manifest(number)).exists():
            # It failed after the rename: readers may have the generation open, and it
            # may be on disk. Nothing it names can be taken back.
            self.manifest = LocalFiles(self.path).load_manifest(number)
            self._start_next_generation(p)
            return
        # Its streams are closed half-way: nothing of it may be committed later.
        self.attributes = self.manifest.attributes
        self._drop_pending()
        with contextlib.suppress(OSError):  # the next writer removes what stays
            remove_unreferenced(self.path, self.manifest)

    def replace_existing(self) -> None:
        """With overwrite: what was committed becomes the store, and the one before is removed. To be
        called once, when all that the store shall hold was accepted; without it the old one stays."""
        if self._replacement is None or self.manifest.generation == 0:
            return
        assert self._lock is not None
        with fsio.map_os_errors(self.path):
            self._replacement.swap(self._lock)
        self.path, self._replacement = self._replacement.target, None
        self._files = LocalFiles(self.path)
        self.index = StoreIndex(LocalFiles(self.path), self.manifest)
        self._reset_pending()

    def _drop_pending(self) -> None:
        pending = self._pending
        self._reset_pending()
        for segment in pending.segments:
            segment.close_fd()
            with contextlib.suppress(OSError):
                fsio.remove_tree(segment.folder)

    def close(self) -> None:
        """Drops what is not committed and releases the lock; a store without a commit is removed."""
        self._undo = None
        if hasattr(self, "_pending"):
            self._drop_pending()
        try:
            self._close_folder()
        finally:
            if self._replacement is not None:
                self._replacement.close()
            if self._elsewhere is not None:
                self._elsewhere.close()

    def _close_folder(self) -> None:
        if self._lock is None:
            return
        try:
            is_empty = not LocalFiles(self.path).generations()
            # What nobody continues, nobody is to find beside the store that stays.
            is_dropped = self._replacement is not None and (is_empty or self._can_resume is None)
            if (self._created and is_empty) or is_dropped:
                remove_contents(self.path)
                if not any(self.path.iterdir()):
                    fsio.retry_eintr(os.rmdir, self.path)
        except OSError:
            pass  # an empty store stays, which the next writer takes
        finally:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
