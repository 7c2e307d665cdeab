"""Writing a store: sources go in whole, commits are atomic (docs/format.md, "Commit")."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tracestore._core.kernels import crc32c
from tracestore.errors import InputRefusedError, StoreDamagedError, UsageError
from tracestore.store import fsio, schema
from tracestore.store import manifest as mf
from tracestore.store.columns import Columns, join_columns, read_columns, write_columns
from tracestore.store.container import pack_arrays
from tracestore.store.index import StoreIndex
from tracestore.store.ragged import encode_strings
from tracestore.store.record import PackedTrace, TraceRecord, pack_record, record_from_dict
from tracestore.store.segment import FileEntry, SegmentWriter, segment_name
from tracestore.store.shard import group_metadata

NAN = math.nan


@dataclass
class _PendingRow:
    """An index row on its way; values by the names of manifest.TRACE_COLUMNS."""

    question_id: str
    values: dict[str, int]
    score: float = NAN
    label: float = NAN
    group: str = ""


@dataclass
class _Source:
    path: str
    size: int
    fingerprint: str
    num_traces: int = 0
    num_skipped: int = 0


@dataclass
class _Pending:
    """All that the next commit will add."""

    rows: list[_PendingRow] = field(default_factory=list)
    keys: dict[tuple[str, int], int] = field(default_factory=dict)
    patches: list[dict[str, int]] = field(default_factory=list)
    patched: set[tuple[int, int]] = field(default_factory=set)
    updates: dict[int, tuple[float, float, str | None]] = field(default_factory=dict)
    sources: list[_Source] = field(default_factory=list)
    segments: list[SegmentWriter] = field(default_factory=list)


def root_metadata(attributes: schema.Attributes) -> bytes:
    """The bytes of the store's root zarr.json."""
    return group_metadata({"tracestore": attributes.to_json()})


def is_store(path: Path) -> bool:
    return (path / "manifest").is_dir() or (path / "lock").is_file()


def newest_manifest(store: Path) -> mf.Manifest | None:
    """The committed state a writer continues from; None in a store without commits.
    StoreDamagedError where the newest manifest is not whole."""
    numbers = mf.generations(store)
    if not numbers:
        return None
    try:
        return mf.load_manifest(store, numbers[0])
    except StoreDamagedError as error:
        raise StoreDamagedError(f"{error}; run: tracestore verify {store} --repair") from None


class StoreWriter:
    """Holds the writer lock of a store from creation to close().

    A source is begun, its traces appended, and ended; end_source() commits when
    enough has gathered. abort_source() takes back everything of the source.
    The order of calls decides every byte of the store.
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
        close_bytes: int = schema.SEGMENT_CLOSE_BYTES,
        split_bytes: int = schema.SEGMENT_SPLIT_BYTES,
    ) -> None:
        self.path = Path(path)
        self._close_bytes, self._split_bytes = close_bytes, split_bytes
        self._lock: fsio.WriterLock | None = None
        self._created = not self.path.exists()
        with fsio.translated_errors(self.path):
            self._prepare_folder(overwrite, exist_ok)
            self._lock = fsio.WriterLock(self.path)
            try:
                if overwrite:
                    self._clear()
                self._load(attention, dtype, codec)
            except BaseException:
                self.close()
                raise

    def _prepare_folder(self, overwrite: bool, exist_ok: bool) -> None:
        if self.path.is_dir():
            if not is_store(self.path) and any(self.path.iterdir()):
                raise UsageError(f"{self.path}: the folder is not empty and not a store")
            if is_store(self.path) and not exist_ok and not overwrite:
                raise UsageError(f"{self.path}: the store exists (overwrite=True replaces it)")
        elif self.path.exists():
            raise UsageError(f"{self.path}: exists and is not a folder")
        else:
            try:
                self.path.mkdir()
            except FileNotFoundError:
                raise UsageError(f"{self.path}: the folder it should lie in does not exist") from None

    def _clear(self) -> None:
        # The manifests go first: what is left after a stop is an empty store.
        for name in ("manifest", "index", "columns", "segments", "zarr.json"):
            fsio.remove_tree(self.path / name)

    def _load(self, attention: str | None, dtype: str | None, codec: str | None) -> None:
        manifest = newest_manifest(self.path)
        asked = {"attention": attention, "dtype": dtype, "codec": codec}
        if manifest is None:
            options = {
                k: asked[k] or default
                for k, default in (("attention", "mean"), ("dtype", "float16"), ("codec", "none"))
            }
            attributes = schema.Attributes(attention=options["attention"], options=options)
            manifest = mf.Manifest(0, attributes)
        for name, value in asked.items():
            own = manifest.attributes.options[name]
            if value is not None and value != own:
                raise UsageError(f"{self.path} was made with --{name} {own}, not {value}")
        self.manifest = manifest
        self.attributes = manifest.attributes
        self.index = StoreIndex(self.path, manifest)
        self._sources = {(s.path, s.size, s.fingerprint) for s in self.index.sources()}
        self._pending = _Pending()
        self._undo: list[Callable[[], None]] | None = None
        self._columns: Columns | None = None
        self._clean(manifest)
        expected = root_metadata(self.attributes)
        root = self.path / "zarr.json"
        if manifest.generation > 0 and (not root.exists() or root.read_bytes() != expected):
            fsio.replace_file(root, expected)

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
        self._undo = []
        attributes, count = self.attributes, len(pending.segments)
        mark = pending.segments[-1].mark() if count else None

        def restore() -> None:
            self.attributes = attributes
            for segment in pending.segments[count:]:
                segment.suspend()
                fsio.remove_tree(segment.folder)
            del pending.segments[count:]
            if mark is not None:
                pending.segments[-1].rollback(mark)
            pending.sources.pop()

        self._undo.append(restore)
        pending.sources.append(_Source(path, size, fingerprint))

    def abort_source(self) -> None:
        """Takes back all that the open source has added."""
        if self._undo is not None:
            for step in reversed(self._undo):
                step()
            self._undo = None

    def end_source(self) -> bool:
        """Accepts the open source; True where that led to a commit."""
        assert self._undo is not None
        self._undo = None
        if sum(s.num_bytes for s in self._pending.segments) >= self._close_bytes:
            self.commit()
            return True
        return False

    @property
    def pending_bytes(self) -> int:
        return sum(s.num_bytes for s in self._pending.segments)

    # Traces

    def pack(self, record: TraceRecord) -> PackedTrace:
        """The part of append that may run ahead, in any thread."""
        options = self.attributes.options
        try:
            return pack_record(record, attention=options["attention"], keep_dtype=options["dtype"] == "keep")
        except InputRefusedError as error:
            raise error.at(position=record.position) from None

    def append_packed(self, trace: PackedTrace, *, score: float = NAN, group: str = "") -> bool:
        """Adds a trace to the open source; False where the store already has it with
        the same content. InputRefusedError where it does not fit the store."""
        assert self._undo is not None
        record, pending, source = trace.record, self._pending, self._pending.sources[-1]
        try:
            self.attributes = self._fitting_attributes(trace)
            wanted = self._new_places(trace)
        except InputRefusedError as error:
            raise error.at(position=record.position) from None
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
        self._add_places(record, places, wanted, score, label, group)
        return True

    def _fitting_attributes(self, trace: PackedTrace) -> schema.Attributes:
        a, record = self.attributes, trace.record
        found: dict[str, Any] = {
            "num_layers": record.num_layers,
            "hidden_dim": record.hidden_dim,
            "num_heads": trace.num_heads,
            "hidden_dtype": trace.hidden_dtype,
            "attention_dtype": trace.attention_dtype,
        }
        for name, value in found.items():
            own = getattr(a, name)
            if value is not None and own is not None and value != own:
                raise InputRefusedError(f"found {value}, expected {own} as in the rest of the store", field=name)
            found[name] = own if own is not None else value
        layout = schema.LAYOUT_NAMES.get(trace.layout)
        if (
            layout is not None
            and a.attention_layout is not None
            and (layout == "edges") != (a.attention_layout == "edges")
        ):
            raise InputRefusedError(
                f"found {layout} attention, expected {a.attention_layout} as in the rest of the store",
                field="attention",
            )
        if layout is None or a.attention_layout == "square":
            layout = a.attention_layout
        return a.with_values(**found, attention_layout=layout)

    def _new_places(self, trace: PackedTrace) -> set[int]:
        """Which of the two places the trace brings that its key does not have yet."""
        record = trace.record
        brings = {mf.GROUP_GRAPH: trace.graph_crc} if record.hidden is not None else {}
        if "last_token" in trace.arrays:
            brings[mf.GROUP_SEQUENCE] = trace.sequence_crc
        key = (record.question_id, record.sample)
        pending = self._pending.keys.get(key)
        if pending is not None:
            has = self._pending.rows[pending].values
        else:
            index = self.index.find(*key)
            if index < 0:
                return set(brings)
            has = vars(self.index.row(index)) | {}
            for patch in self._pending.patches:
                if patch["patch_trace"] == index:
                    name = "graph" if patch["patch_group"] == mf.GROUP_GRAPH else "sequence"
                    has |= {f"{name}_segment": patch["patch_segment"], f"{name}_crc32c": patch["patch_crc32c"]}
        wanted: set[int] = set()
        for group, crc in brings.items():
            name = "graph" if group == mf.GROUP_GRAPH else "sequence"
            if has[f"{name}_segment"] < 0:
                wanted.add(group)
            elif has[f"{name}_crc32c"] != crc:
                raise InputRefusedError(
                    f"found a second trace of question id {record.question_id!r} (sample {record.sample}) with other "
                    f"content, expected one a key"
                )
        return wanted

    def _segment_for(self, trace: PackedTrace) -> SegmentWriter:
        segments = self._pending.segments
        if segments and len(segments[-1]) and segments[-1].num_bytes + trace.num_bytes > self._split_bytes:
            segments[-1].suspend()
        elif segments:
            return segments[-1]
        number = self.manifest.num_segments + len(segments)
        folder = self.path / "segments" / f"{fsio.TEMPORARY_PREFIX}{segment_name(number)}"
        fsio.remove_tree(folder)
        segments.append(SegmentWriter(folder, number, self.attributes, self.attributes.options["codec"]))
        return segments[-1]

    def _add_places(
        self, record: TraceRecord, places: dict[str, int], wanted: set[int], score: float, label: float, group: str
    ) -> None:
        pending, key = self._pending, (record.question_id, record.sample)
        assert self._undo is not None
        undo = self._undo
        if key in pending.keys:
            row = pending.rows[pending.keys[key]]
            before = (dict(row.values), row.label)
            undo.append(lambda: row.__dict__.update(values=before[0], label=before[1]))
            for name in places:
                if self._group_of(name) in wanted:
                    row.values[name] = places[name]
            row.values["nonfinite"] |= places["nonfinite"]
            row.label = self._one_label(row.label, label)
            return
        index = self.index.find(*key)
        if index < 0:
            pending.keys[key] = len(pending.rows)
            pending.rows.append(_PendingRow(record.question_id, places, score, label, group))

            def forget() -> None:
                pending.rows.pop()
                del pending.keys[key]

            undo.append(forget)
            return
        for wanted_group in sorted(wanted):
            name = "graph" if wanted_group == mf.GROUP_GRAPH else "sequence"
            patch = {f"patch_{n}": places[n] for n in ("hidden_row", "attention_start", "num_tokens", "layout")}
            patch |= {f"patch_{n}": places[n] for n in ("last_token_row", "nonfinite")}
            patch |= {"patch_trace": index, "patch_group": wanted_group, "patch_segment": places[f"{name}_segment"]}
            patch |= {"patch_row": places[f"{name}_row"], "patch_crc32c": places[f"{name}_crc32c"]}
            pending.patches.append(patch)
            undo.append(lambda: pending.patches.__delitem__(-1))
        stored = float(self.read_columns().labels[index])
        if math.isnan(stored) and not math.isnan(label):
            pending.updates[index] = (NAN, label, None)
            undo.append(lambda: pending.updates.__delitem__(index))
        self._one_label(stored, label)

    @staticmethod
    def _group_of(name: str) -> int | None:
        if name.startswith("sequence") or name == "last_token_row":
            return mf.GROUP_SEQUENCE
        graph = ("graph", "hidden_row", "attention_start", "num_tokens", "layout")
        return mf.GROUP_GRAPH if name.startswith(graph) else None

    @staticmethod
    def _one_label(stored: float, label: float) -> float:
        if not math.isnan(stored) and not math.isnan(label) and stored != label:
            raise InputRefusedError(
                f"found label {label:g}, expected {stored:g} as stored for this key", field="labels"
            )
        return stored if math.isnan(label) else label

    # Columns

    def read_columns(self) -> Columns:
        """Scores, labels and groups of the committed traces."""
        if self._columns is None:
            self._columns = join_columns([read_columns(self.path, ref) for ref in self.manifest.columns])
        return self._columns

    def set_values(self, updates: Mapping[int, tuple[float, float, str | None]]) -> None:
        """Replaces (score, label, group) of committed traces with the next commit."""
        self._pending.updates.update(updates)

    # Commit

    def commit(self) -> None:
        """Makes everything pending durable, or raises and leaves the last generation as it was."""
        assert self._undo is None, "a source is open"
        p = self._pending
        if not (p.rows or p.patches or p.updates or p.sources):
            return
        with fsio.translated_errors(self.path, lambda: self.pending_bytes):
            self._commit()

    def _commit(self) -> None:
        old, p = self.manifest, self._pending
        generation = old.generation + 1
        for name in ("manifest", "segments", "index", "columns"):
            if not (self.path / name).exists():
                (self.path / name).mkdir()
                fsio.fsync_path(self.path)
        p.segments = [s for s in p.segments if len(s)]
        files: list[tuple[int, FileEntry]] = []
        for segment in p.segments:
            files += [(segment.number, entry) for entry in segment.finish()]
            segment.folder.chmod(0o755)
            segment.folder.rename(self.path / "segments" / segment_name(segment.number))
        if p.segments:
            fsio.fsync_path(self.path / "segments")
        parts, part_bytes = self._write_index(generation, files)
        columns = self._write_columns(generation)
        joined = [read_columns(self.path, ref) for ref in columns]
        fields = set(old.fields) | {
            name for s in p.segments for name in ("hidden_states", "attention", "last_token") if name in s._streams
        }
        fields |= {"edges"} if any(s._edge_layers for s in p.segments) else set()
        removed = sum(r.size for r in old.parts if r not in parts) + sum(
            f.size for r in old.columns if r not in columns for f in r.files
        )
        added = sum(f.size for _, f in files) + part_bytes
        added += sum(f.size for r in columns if r not in old.columns for f in r.files)
        tokens = sum(r.values["num_tokens"] for r in p.rows if r.values["graph_segment"] >= 0)
        tokens += sum(q["patch_num_tokens"] for q in p.patches if q["patch_group"] == mf.GROUP_GRAPH)
        new = mf.Manifest(
            generation=generation,
            attributes=self.attributes,
            parts=parts,
            columns=columns,
            num_traces=old.num_traces + len(p.rows),
            num_tokens=old.num_tokens + tokens,
            num_scored=sum(c.num_scored for c in joined),
            num_labelled=sum(c.num_labelled for c in joined),
            num_bytes=old.num_bytes + added - removed,
            fields=tuple(sorted(fields)),
        )
        root = root_metadata(self.attributes)
        if old.generation == 0:
            fsio.replace_file(self.path / "zarr.json", root)
        fsio.replace_file(mf.manifest_path(self.path, generation), new.to_bytes())
        if old.generation > 0 and new.attributes != old.attributes:
            fsio.replace_file(self.path / "zarr.json", root)
        self._sources |= {(s.path, s.size, s.fingerprint) for s in p.sources}
        self.manifest, self._pending, self._columns = new, _Pending(), None
        self.index = StoreIndex(self.path, new)
        self._clean(new)

    def _write_index(self, generation: int, files: list[tuple[int, FileEntry]]) -> tuple[tuple[mf.PartRef, ...], int]:
        old, p = self.manifest, self._pending
        arrays = mf.empty_columns()
        for name, dtype in mf.TRACE_COLUMNS.items():
            arrays[name] = np.array([r.values[name] for r in p.rows], dtype)
        patches = sorted(p.patches, key=lambda q: (q["patch_trace"], q["patch_group"]))
        for name, dtype in mf.PATCH_COLUMNS.items():
            arrays[name] = np.array([q[name] for q in patches], dtype)
        arrays["file_segment"] = np.array([n for n, _ in files], "<i4")
        arrays["file_size"] = np.array([f.size for _, f in files], "<i8")
        arrays["file_crc32c"] = np.array([f.crc32c for _, f in files], "<u4")
        arrays["segment_traces"] = np.array([len(s) for s in p.segments], "<i4")
        arrays["segment_tokens"] = np.array([sum(r.num_tokens for r in s.rows) for s in p.segments], "<i8")
        for name, attribute in (("size", "size"), ("traces", "num_traces"), ("skipped", "num_skipped")):
            arrays[f"source_{name}"] = np.array([getattr(s, attribute) for s in p.sources], "<i8")
        texts = {
            "id": [r.question_id for r in p.rows],
            "file_path": [f.path for _, f in files],
            "source_path": [s.path for s in p.sources],
            "source_fingerprint": [s.fingerprint for s in p.sources],
        }
        for name, strings in texts.items():
            arrays[name], arrays[f"{name}_offsets"] = encode_strings(strings)
        parts = list(old.parts)
        first = {"trace": old.num_traces, "segment": old.num_segments, "source": old.num_sources}
        count = {"trace": len(p.rows), "segment": len(p.segments), "source": len(p.sources)}
        # A binary counter: equal sizes carry, so each trace is rewritten O(log N) times.
        while parts and parts[-1].num_traces + parts[-1].num_sources <= count["trace"] + count["source"]:
            last = parts.pop()
            first = {"trace": last.first_trace, "segment": last.first_segment, "source": last.first_source}
            count = {k: count[k] + getattr(last, f"num_{k}s") for k in count}
            arrays = mf.merge_parts(self.index.part_arrays(len(parts)), arrays, first["trace"])
        data = pack_arrays(mf.with_key_table(arrays))
        folder = self.path / "index" / f"{generation:010d}"
        fsio.remove_tree(folder)
        folder.mkdir()
        fsio.write_file(folder / "part", data)
        fsio.fsync_path(folder)
        fsio.fsync_path(folder.parent)
        ref = mf.PartRef(
            f"index/{generation:010d}/part",
            len(data),
            crc32c(data),
            **{f"first_{k}": v for k, v in first.items()},
            **{f"num_{k}s": v for k, v in count.items()},
        )
        return (*parts, ref), len(data)

    def _write_columns(self, generation: int) -> tuple[mf.ColumnsRef, ...]:
        old, p = self.manifest, self._pending
        refs = list(old.columns)
        new = Columns.from_values([r.score for r in p.rows], [r.label for r in p.rows], [r.group for r in p.rows])
        first, pieces = old.num_traces, [new]
        while refs and (p.updates or refs[-1].num_traces <= sum(map(len, pieces))):
            last = refs.pop()
            first = last.first_trace
            pieces.insert(0, read_columns(self.path, last))
        joined = join_columns(pieces)
        if p.updates:
            joined = joined.with_values(p.updates)
        if len(joined) == 0:
            return tuple(refs)
        return (*refs, write_columns(self.path, generation, first, joined))

    def _clean(self, manifest: mf.Manifest) -> None:
        """Removes what no kept generation names: unfinished work and generations
        older than the predecessor. The newest manifest is whole when this runs."""
        keep = {manifest.generation, manifest.generation - 1}
        named = {r.path for r in manifest.parts} | {r.path for r in manifest.columns}
        if manifest.generation - 1 in mf.generations(self.path):
            try:
                previous = mf.load_manifest(self.path, manifest.generation - 1)
                named |= {r.path for r in previous.parts} | {r.path for r in previous.columns}
            except StoreDamagedError:
                keep.discard(manifest.generation - 1)
        for generation in mf.generations(self.path):
            if generation not in keep:
                mf.manifest_path(self.path, generation).unlink()
        for name in ("index", "columns"):
            for folder in (self.path / name).glob("*"):
                path = f"{name}/{folder.name}"
                if path not in named and f"{path}/part" not in named:
                    fsio.remove_tree(folder)
        for folder in (self.path / "segments").glob("*"):
            unfinished = folder.name.startswith(fsio.TEMPORARY_PREFIX)
            if unfinished or (folder.name.isdigit() and int(folder.name) >= manifest.num_segments):
                fsio.remove_tree(folder)
        for folder in (self.path, self.path / "manifest"):
            for leftover in folder.glob(f"{fsio.TEMPORARY_PREFIX}*"):
                fsio.remove_tree(leftover)

    def close(self) -> None:
        """Drops what is not committed and releases the lock; a store without a commit is removed."""
        pending: _Pending | None = getattr(self, "_pending", None)
        if pending is not None:
            for segment in pending.segments:
                segment.suspend()
                fsio.remove_tree(segment.folder)
            self._pending = _Pending()
        self._undo = None
        if self._lock is None:
            return
        if self._created and not mf.generations(self.path):
            for name in ("manifest", "segments", "index", "columns", "zarr.json", "lock"):
                fsio.remove_tree(self.path / name)
            if not any(self.path.iterdir()):
                self.path.rmdir()
        self._lock.release()
        self._lock = None

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TraceWriter:
    """Appends dicts of the pickle schema to a store of its own; see tracestore.create."""

    def __init__(self, writer: StoreWriter) -> None:
        self._writer = writer
        self._open = False
        self._count = 0

    def append(
        self,
        trace: Mapping[str, Any],
        *,
        score: float | None = None,
        label: float | None = None,
        group: str = "",
    ) -> None:
        """Adds one trace (numpy arrays or torch tensors). InputRefusedError where it
        is not of the schema; what was appended before stays."""
        writer = self._writer
        start = writer.manifest.num_traces + len(writer._pending.rows)
        name = f"append-{start:010d}"
        need = writer.attributes.options["attention"] != "none"
        record = record_from_dict(trace, source_name=name, position=0, need_attention=need)
        record.label = label
        writer.begin_source(name, 0, "")
        try:
            packed = writer.pack(record)
            writer.append_packed(packed, score=NAN if score is None else float(score), group=group)
        except BaseException:
            writer.abort_source()
            raise
        writer.end_source()

    def flush(self) -> None:
        """Commits what was appended so far."""
        self._writer.commit()

    def close(self) -> None:
        """Commits and releases the store."""
        try:
            self._writer.commit()
        finally:
            self._writer.close()

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, *_: object) -> None:
        # Also after an exception: the traces appended before it are whole.
        self.close()


def create(
    path: str | os.PathLike[str],
    *,
    attention: str = "mean",
    dtype: str = "float16",
    codec: str = "none",
    overwrite: bool = False,
    append: bool = False,
) -> TraceWriter:
    """A new store to append traces to, one dict of the pickle schema at a time.

    attention: "mean" stores the mean over the heads, "heads" every head, "none"
    nothing. dtype: "float16", or "keep" for the source's own. codec: "none",
    "blosc-zstd", "blosc-lz4" or "zstd". append=True continues an existing store.
    Raises UsageError where the path cannot be used, StoreLockedError where
    another writer holds it. Use as a context manager: leaving it commits.
    """
    for value, allowed in ((attention, schema.ATTENTION_MODES), (dtype, ("float16", "keep")), (codec, schema.CODECS)):
        if value not in allowed:
            raise UsageError(f"found {value!r}, expected one of {', '.join(allowed)}")
    return TraceWriter(
        StoreWriter(path, attention=attention, dtype=dtype, codec=codec, overwrite=overwrite, exist_ok=append)
    )
