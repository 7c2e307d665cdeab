"""The commit protocol, which leads from one generation to the next (docs/format.md, "Commit")."""

import contextlib
import os
from pathlib import Path

import numpy as np

from tracestore._core.kernels import crc32c
from tracestore.errors import CorruptStoreError
from tracestore.store.format import manifest as mf
from tracestore.store.format import paths, schema
from tracestore.store.format.entries import FileEntry
from tracestore.store.format.mapped_arrays import pack_arrays
from tracestore.store.format.paths import TEMPORARY_PREFIX
from tracestore.store.format.ragged import encode_strings
from tracestore.store.format.zarr_json import group_metadata
from tracestore.store.io import fsio
from tracestore.store.io.files import LocalFiles
from tracestore.store.io.ownership import remove_own, require_removed
from tracestore.store.read.columns import Columns, join_columns, read_columns
from tracestore.store.read.index import StoreIndex
from tracestore.store.write.columns_writer import write_columns
from tracestore.store.write.pending import Pending


def root_metadata(attributes: schema.Attributes) -> bytes:
    """Return the bytes of the store's root zarr.json."""
    return group_metadata({"tracestore": attributes.to_json()})


def write_root(store: Path, attributes: schema.Attributes) -> None:
    """Write the root zarr.json unless it has these attributes already."""
    root, expected = store / "zarr.json", root_metadata(attributes)
    try:
        if root.read_bytes() == expected:
            return
    except FileNotFoundError:
        pass
    fsio.replace_file(root, expected)


def commit(store: Path, index: StoreIndex, attributes: schema.Attributes, pending: Pending) -> mf.Manifest:
    """Make the pending changes durable as the next generation.

    Until the manifest is renamed to its path, readers and the next writer see the old generation.
    remove_unreferenced() removes the files that an exception leaves behind.
    """
    old = index.manifest
    for name in paths.TOP_FOLDERS:
        fsio.makedirs(store / name)
    if old.generation == 0:
        # An earlier writer may have created the folders and stopped before synchronizing them.
        fsio.fsync_path(store)
        with contextlib.suppress(PermissionError):
            fsio.fsync_path(store.parent)
    pending.segments = [s for s in pending.segments if len(s)]
    files: list[tuple[int, FileEntry]] = []
    for segment in pending.segments:
        files += [(segment.number, entry) for entry in segment.finish()]
        fsio.retry_eintr(os.rename, segment.folder, store / paths.segment(segment.number))
    if pending.segments:
        fsio.fsync_path(store / "segments")
    parts, part_bytes = _write_index(store, index, pending, files)
    columns, num_scored, num_labeled = _write_columns(store, old, pending)
    added = sum(f.size for _, f in files) + part_bytes
    added += sum(f.size for r in columns if r not in old.columns for f in r.files)
    removed = sum(r.size for r in old.parts if r not in parts)
    removed += sum(f.size for r in old.columns if r not in columns for f in r.files)
    tokens = sum(r.values["num_tokens"] for r in pending.rows if r.values["graph_segment"] >= 0)
    for (trace, group), patch in pending.patches.items():
        if group == mf.GROUP_GRAPH:
            before = index.row(trace)
            tokens += patch["patch_num_tokens"] - (before.num_tokens if before.graph_segment >= 0 else 0)
    new = mf.Manifest(
        generation=old.generation + 1,
        attributes=attributes,
        parts=parts,
        columns=columns,
        num_traces=old.num_traces + len(pending.rows),
        num_tokens=old.num_tokens + tokens,
        num_scored=num_scored,
        num_labelled=num_labeled,
        num_bytes=old.num_bytes + added - removed,
        fields=tuple(sorted(set(old.fields).union(*(s.field_names for s in pending.segments)))),
    )
    if old.generation == 0:
        write_root(store, attributes)
    # The copy allows `verify --repair` to restore a damaged manifest.
    copy = store / paths.manifest_copy(new.generation)
    fsio.write_file(copy, new.to_bytes())
    fsio.fsync_path(copy.parent)
    fsio.replace_file(store / paths.manifest(new.generation), new.to_bytes())
    write_root(store, attributes)
    return new


def _write_index(
    store: Path, index: StoreIndex, pending: Pending, files: list[tuple[int, FileEntry]]
) -> tuple[tuple[mf.PartRef, ...], int]:
    """Write the index part of the next generation; return the references to all parts and the bytes written."""
    old, generation = index.manifest, index.manifest.generation + 1
    arrays = mf.empty_columns()
    for name, dtype in mf.TRACE_COLUMNS.items():
        arrays[name] = np.array([r.values[name] for r in pending.rows], dtype)
    patches = [pending.patches[place] for place in sorted(pending.patches)]
    for name, dtype in mf.PATCH_COLUMNS.items():
        arrays[name] = np.array([q[name] for q in patches], dtype)
    arrays["file_segment"] = np.array([n for n, _ in files], "<i4")
    arrays["file_size"] = np.array([f.size for _, f in files], "<i8")
    arrays["file_crc32c"] = np.array([f.crc32c for _, f in files], "<u4")
    arrays["segment_traces"] = np.array([len(s) for s in pending.segments], "<i4")
    arrays["segment_tokens"] = np.array([sum(r.num_tokens for r in s.rows) for s in pending.segments], "<i8")
    for name, attribute in (("size", "size"), ("traces", "num_traces"), ("skipped", "num_skipped")):
        arrays[f"source_{name}"] = np.array([getattr(s, attribute) for s in pending.sources], "<i8")
    texts = {
        "id": [r.question_id for r in pending.rows],
        "file_path": [f.path for _, f in files],
        "source_path": [s.path for s in pending.sources],
        "source_fingerprint": [s.fingerprint for s in pending.sources],
    }
    for name, strings in texts.items():
        arrays[name], arrays[f"{name}_offsets"] = encode_strings(strings)
    parts = list(old.parts)
    first = {"trace": old.num_traces, "segment": old.num_segments, "source": old.num_sources}
    count = {"trace": len(pending.rows), "segment": len(pending.segments), "source": len(pending.sources)}
    # Merge parts of similar size, like the carries of a binary counter: each trace is rewritten O(log N) times.
    while parts and parts[-1].num_traces + parts[-1].num_sources <= count["trace"] + count["source"]:
        last = parts.pop()
        first = {"trace": last.first_trace, "segment": last.first_segment, "source": last.first_source}
        count = {k: count[k] + getattr(last, f"num_{k}s") for k in count}
        arrays = mf.merge_parts(index.part_arrays(len(parts)), arrays, first["trace"])
    data = pack_arrays(mf.with_key_table(arrays))
    folder = store / paths.index(generation)
    require_removed(store, paths.index(generation))
    fsio.retry_eintr(os.mkdir, folder)
    fsio.write_file(folder / "part", data)
    fsio.fsync_path(folder)
    fsio.fsync_path(folder.parent)
    ref = mf.PartRef(
        f"{paths.index(generation)}/part",
        len(data),
        crc32c(data),
        **{f"first_{k}": v for k, v in first.items()},
        **{f"num_{k}s": v for k, v in count.items()},
    )
    return (*parts, ref), len(data)


def _write_columns(store: Path, old: mf.Manifest, pending: Pending) -> tuple[tuple[mf.ColumnsRef, ...], int, int]:
    """Write the columns of the next generation; return all references and the numbers of scores and labels."""
    refs = list(old.columns)
    new = Columns.from_values(
        [r.score for r in pending.rows], [r.label for r in pending.rows], [r.group for r in pending.rows]
    )
    first, parts = old.num_traces, [new]
    while refs and (pending.updates or refs[-1].num_traces <= sum(map(len, parts))):
        last = refs.pop()
        first = last.first_trace
        parts.insert(0, read_columns(LocalFiles(store), last))
    joined = join_columns(parts)
    if pending.updates:
        joined = joined.with_values(pending.updates)
        scored, labeled = joined.num_scored, joined.num_labeled
    else:
        scored, labeled = old.num_scored + new.num_scored, old.num_labelled + new.num_labeled
    if len(joined) == 0:
        return tuple(refs), scored, labeled
    refs.append(write_columns(store, old.generation + 1, first, joined))
    return tuple(refs), scored, labeled


def remove_unreferenced(store: Path, manifest: mf.Manifest) -> None:
    """Remove all files that no kept generation references.

    These are the files of unfinished commits, and those of generations before the predecessor of
    `manifest`, the latest one, unless a reader has pinned them.
    """
    referenced = {r.path for r in manifest.parts} | {r.path for r in manifest.columns}
    files = LocalFiles(store)
    for generation in files.generations():
        if generation >= manifest.generation:
            continue
        path = paths.manifest(generation)
        with fsio.try_exclusive(files.open(path)) as free:
            try:
                kept = files.load_manifest(generation)
            except CorruptStoreError:
                kept = None
            if free and (kept is None or generation < manifest.generation - 1):
                remove_own(store, path)
                continue
        if kept is None:
            return  # A reader has pinned this generation, whose files are unknown because its manifest is damaged.
        referenced |= {r.path for r in kept.parts} | {r.path for r in kept.columns}
    for folder in ("index", "columns"):
        for name in files.list_dir(folder):
            path = f"{folder}/{name}"
            if path not in referenced and f"{path}/part" not in referenced:
                remove_own(store, path)
    for name in files.list_dir("segments"):
        unfinished = name.startswith(TEMPORARY_PREFIX)
        if unfinished or (name.isdigit() and int(name) >= manifest.num_segments):
            remove_own(store, f"segments/{name}")
    for name in files.list_dir("manifest"):
        if name.startswith(TEMPORARY_PREFIX):
            remove_own(store, f"manifest/{name}")
    remove_own(store, f"{TEMPORARY_PREFIX}zarr.json")
