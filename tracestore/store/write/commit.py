"""The commit protocol, which leads from one generation to the next (docs/format.md, "Commit")."""

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tracestore._core.kernels import crc32c
from tracestore.errors import CorruptStoreError
from tracestore.store.format import manifest as mf
from tracestore.store.format import paths, schema
from tracestore.store.format.entries import FileEntry
from tracestore.store.format.paths import TEMPORARY_PREFIX
from tracestore.store.format.ragged import encode_strings
from tracestore.store.format.zarr_json import group_metadata
from tracestore.store.format.zip_group import pack_group
from tracestore.store.io import fsio
from tracestore.store.io.files import LocalFiles
from tracestore.store.io.ownership import remove_own, require_removed
from tracestore.store.read.columns import Columns, join_columns, read_columns
from tracestore.store.read.index import StoreIndex
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
    if pending.lens is not None:
        attributes = replace(attributes, lens=pending.lens.place(old.num_segments + len(pending.segments)))
        pending.segments.append(pending.lens.segment)
    rows, added = [], 0
    for segment in pending.segments:
        entry, num_bytes = segment.finish()
        fsio.retry_eintr(os.rename, segment.folder, store / paths.segment(segment.number))
        rows.append(entry)
        added += num_bytes
    if pending.segments:
        fsio.fsync_path(store / "segments")
    parts = _write_index(store, index, pending, rows)
    columns, num_scored, num_labeled = _write_columns(store, old, attributes, pending)
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
        num_labeled=num_labeled,
        fields=tuple(sorted(set(old.fields).union(*(s.field_names for s in pending.segments)))),
    )
    added += sum(f.size for f in new.small_files()) - sum(f.size for f in old.small_files())
    new = replace(new, num_bytes=old.num_bytes + added)
    if old.generation == 0:
        write_root(store, attributes)
    # The copy allows `verify --repair` to restore a damaged manifest.
    fsio.replace_file(store / paths.manifest_copy(new.generation), new.to_bytes())
    fsio.replace_file(store / paths.manifest(new.generation), new.to_bytes())
    write_root(store, attributes)
    return new


def _write_index(store: Path, index: StoreIndex, pending: Pending, segments: list[FileEntry]) -> tuple[mf.PartRef, ...]:
    """Write the index part of the next generation and return the references to all parts.

    `segments` has the rows.zip of each pending segment.
    """
    old, generation = index.manifest, index.manifest.generation + 1
    arrays: dict[str, np.ndarray] = {}
    for name, dtype in mf.TRACE_COLUMNS.items():
        arrays[name] = np.array([r.values[name] for r in pending.rows], dtype)
    patches = [pending.patches[place] for place in sorted(pending.patches)]
    for name, dtype in mf.PATCH_COLUMNS.items():
        arrays[name] = np.array([q[name] for q in patches], dtype)
    values = {
        "segment_traces": map(len, pending.segments),
        "segment_tokens": (s.num_tokens for s in pending.segments),
        "segment_size": (entry.size for entry in segments),
        "segment_crc32c": (entry.crc32c for entry in segments),
        "source_size": (s.size for s in pending.sources),
        "source_traces": (s.num_traces for s in pending.sources),
        "source_skipped": (s.num_skipped for s in pending.sources),
        "source_provenance": (s.provenance for s in pending.sources),
    }
    for name, column in values.items():
        arrays[name] = np.array(list(column), mf.PART_DTYPES[name])
    texts = {
        "id": [r.question_id for r in pending.rows],
        "segment_name": [entry.path.split("/")[1] for entry in segments],
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
        last = parts[-1]
        if last.num_traces + count["trace"] > mf.MAX_PART_TRACES:
            break
        parts.pop()
        first = {"trace": last.first_trace, "segment": last.first_segment, "source": last.first_source}
        count = {k: count[k] + getattr(last, f"num_{k}s") for k in count}
        arrays = mf.merge_parts(index.part_arrays(len(parts)), arrays, first["trace"])
    entry = _write_group(store, paths.index(generation), mf.with_key_table(arrays), {})
    ranges = {f"first_{k}": v for k, v in first.items()} | {f"num_{k}s": v for k, v in count.items()}
    return (*parts, mf.PartRef(entry.path, entry.size, entry.crc32c, **ranges))


def _write_group(store: Path, path: str, arrays: dict[str, np.ndarray], attributes: dict[str, Any]) -> FileEntry:
    """Write a group of small arrays atomically."""
    require_removed(store, path)
    data = pack_group(arrays, attributes)
    fsio.replace_file(store / path, data)
    return FileEntry(path, len(data), crc32c(data))


def _write_columns(
    store: Path, old: mf.Manifest, attributes: schema.Attributes, pending: Pending
) -> tuple[tuple[mf.ColumnsRef, ...], int, int]:
    """Write the columns of the next generation; return all references and the numbers of scores and labels."""
    refs = list(old.columns)
    new, name = Columns.from_values([r.given for r in pending.rows]), attributes.default_score
    first, parts = old.num_traces, [new]
    is_rewritten = bool(pending.updates) or name != old.attributes.default_score
    while refs and (is_rewritten or refs[-1].num_traces <= sum(map(len, parts))):
        last = refs.pop()
        first = last.first_trace
        parts.insert(0, read_columns(LocalFiles(store), old, [last]))
    joined = join_columns(parts)
    if is_rewritten:
        joined = joined.with_values(pending.updates)
        scored, labeled = joined.num_scored(name), joined.num_labeled
    else:
        scored, labeled = old.num_scored + new.num_scored(name), old.num_labeled + new.num_labeled
    if len(joined) == 0:
        return tuple(refs), scored, labeled
    facts = {"tracestore": {"first_trace": first, "num_traces": len(joined)}}
    entry = _write_group(store, paths.columns(old.generation + 1), joined.arrays(), facts)
    refs.append(mf.ColumnsRef(entry.path, entry.size, entry.crc32c, first, len(joined)))
    return tuple(refs), scored, labeled


def remove_unreferenced(store: Path, index: StoreIndex) -> None:
    """Remove all files that no kept generation references.

    These are the files of unfinished commits, and those of generations before the predecessor of
    the latest one, which `index` belongs to, unless a reader has pinned them.
    """
    manifest = index.manifest
    files = LocalFiles(store)
    referenced = {paths.manifest_copy(manifest.generation), *(file.path for file in manifest.small_files())}
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
        referenced |= {file.path for file in kept.small_files()}
        referenced.add(paths.manifest_copy(generation))
    for folder in ("index", "columns"):
        for name in files.list_dir(folder):
            if f"{folder}/{name}" not in referenced:
                remove_own(store, f"{folder}/{name}")
    unknown = {name for name in files.list_dir("segments") if not name.isdigit() or int(name) >= manifest.num_segments}
    unknown -= {entry.path.split("/")[1] for entry in index.segments()} if unknown else set()
    for name in unknown:
        remove_own(store, f"segments/{name}")
    for name in files.list_dir("manifest"):
        if name.startswith(TEMPORARY_PREFIX):
            remove_own(store, f"manifest/{name}")
    remove_own(store, f"{TEMPORARY_PREFIX}zarr.json")
