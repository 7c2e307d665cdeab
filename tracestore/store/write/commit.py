"""Write the files of the next generation into a folder or object store (docs/format.md, "Commit")."""

import itertools
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tracestore._core.kernels import crc32c
from tracestore.errors import CorruptStoreError, UsageError
from tracestore.store.format import manifest as mf
from tracestore.store.format import paths, schema
from tracestore.store.format.entries import FileEntry
from tracestore.store.format.ragged import encode_strings
from tracestore.store.format.zarr_json import group_metadata
from tracestore.store.format.zip_group import pack_group
from tracestore.store.io.files import RemoteURL
from tracestore.store.io.folder_target import FolderTarget
from tracestore.store.io.writing_folder import CommitTarget
from tracestore.store.read.columns import join_columns, read_columns
from tracestore.store.read.generation import PinnedGeneration, open_generation
from tracestore.store.read.index import StoreIndex
from tracestore.store.write.pending import Pending
from tracestore.store.write.written import WrittenSegment


def root_metadata(attributes: schema.Attributes) -> bytes:
    """Return the bytes of the store's root zarr.json."""
    return group_metadata({"tracestore": attributes.to_json()})


def open_target(
    location: Path | RemoteURL, *, overwrite: bool, exist_ok: bool, keeps_replacement: bool
) -> CommitTarget:
    """Return the target for a location; see FolderTarget for the parameters."""
    if isinstance(location, Path):
        return FolderTarget(location, overwrite=overwrite, exist_ok=exist_ok, keeps_replacement=keeps_replacement)
    # Imported here because remote stores need an extra.
    from tracestore.store.remote.publish import RemoteTarget

    return RemoteTarget(location, overwrite=overwrite, exist_ok=exist_ok)


def load_generation(target: CommitTarget, number: int) -> PinnedGeneration:
    """Open the newest generation, which must survive a power failure before anything refers to it."""
    try:
        generation = open_generation(target.files, number)
    except CorruptStoreError as error:
        if isinstance(target.location, RemoteURL):
            raise CorruptStoreError(f"{target.location}: {error}") from None
        raise CorruptStoreError(f"{error}. Run: tracestore verify {shlex.quote(str(target.path))} --repair") from None
    target.sync_generations()
    return generation


def load_newest(target: CommitTarget, options: Mapping[str, str]) -> PinnedGeneration:
    """Open the newest generation, or that of a store with these options if there is none."""
    if number := target.newest():
        return load_generation(target, number)
    attributes = schema.Attributes(attention=options["attention"], options=dict(options))
    manifest = mf.Manifest(target.replaced_generation, attributes)
    return PinnedGeneration(manifest, StoreIndex(target.files, manifest), (), None)


def add_files(
    target: CommitTarget, base: PinnedGeneration, attributes: schema.Attributes, pending: Pending, *, are_open: bool
) -> mf.Manifest:
    """Add the files of the generation after `base`, and return its manifest, which the caller creates.

    With `are_open` the new sources are open.
    """
    old, segments = base.manifest, pending.all_segments
    attributes = replace(attributes, open_sources=_open_sources(old, pending, are_open=are_open))
    if pending.lens is not None:
        lens = pending.lens.place(old.num_segments + len(segments) - 1, pending.lens_provenance)
        attributes = replace(attributes, lens=lens)
    for segment in segments:
        if isinstance(segment, WrittenSegment):
            entries = {entry.path.removeprefix(f"{segment.reader.name}/"): entry for entry in segment.entries}
            target.take_segment(segment.source, entries, segment.folder, segment.name)
        target.add_segment(segment.folder, segment.name, segment.files)
    if segments:
        target.sync_segments()
    parts = _write_index(target, base.index, pending)
    columns, num_scored, num_labeled = _write_columns(target, old, attributes, pending)
    has_graph, num_tokens = (np.array(pending.rows.columns[name]) for name in ("graph_segment", "num_tokens"))
    tokens = int(num_tokens[has_graph >= 0].sum(dtype=np.int64))
    for (trace, group), patch in pending.patches.items():
        if group == mf.GROUP_GRAPH:
            before = base.index.row(trace)
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
        fields=tuple(sorted(set(old.fields).union(*(s.field_names for s in segments)))),
    )
    added = sum(size for s in segments for _, size, _ in s.files)
    added += sum(f.size for f in new.small_files()) - sum(f.size for f in old.small_files())
    new = replace(new, num_bytes=old.num_bytes + added)
    if old.generation == 0:
        target.write_root(root_metadata(attributes))
    return new


def _open_sources(old: mf.Manifest, pending: Pending, *, are_open: bool) -> tuple[tuple[int, int], ...]:
    numbers = [number for number in old.attributes.open_numbers() if number not in pending.closed_sources]
    if are_open:
        numbers += range(old.num_sources, old.num_sources + len(pending.sources))
    firsts = [k for k, number in enumerate(numbers) if k == 0 or number != numbers[k - 1] + 1]
    return tuple((numbers[a], numbers[b - 1] + 1) for a, b in itertools.pairwise([*firsts, len(numbers)]))


def _write_index(target: CommitTarget, index: StoreIndex, pending: Pending) -> tuple[mf.PartRef, ...]:
    """Add the index part of the next generation and return the references to all parts."""
    old, segments = index.manifest, pending.all_segments
    arrays: dict[str, np.ndarray] = {}
    for name, dtype in mf.TRACE_COLUMNS.items():
        arrays[name] = np.array(pending.rows.columns[name], dtype)
    patches = [pending.patches[place] for place in sorted(pending.patches)]
    for name, dtype in mf.PATCH_COLUMNS.items():
        arrays[name] = np.array([q[name] for q in patches], dtype)
    values = {
        "segment_traces": map(len, segments),
        "segment_tokens": (s.num_tokens for s in segments),
        "segment_size": (s.rows.size for s in segments),
        "segment_crc32c": (s.rows.crc32c for s in segments),
        "source_size": (s.size for s in pending.sources),
        "source_traces": (s.num_traces for s in pending.sources),
        "source_skipped": (s.num_skipped for s in pending.sources),
        "source_provenance": (s.provenance for s in pending.sources),
    }
    for name, column in values.items():
        arrays[name] = np.array(list(column), mf.PART_DTYPES[name])
    texts = {
        "id": pending.rows.ids,
        "segment_name": [s.name for s in segments],
        "source_path": [s.path for s in pending.sources],
        "source_fingerprint": [s.fingerprint for s in pending.sources],
    }
    for name, strings in texts.items():
        arrays[name], arrays[f"{name}_offsets"] = encode_strings(strings)
    parts = list(old.parts)
    first = {"trace": old.num_traces, "segment": old.num_segments, "source": old.num_sources}
    count = {"trace": len(pending.rows), "segment": len(segments), "source": len(pending.sources)}
    # Merge parts of similar size, like the carries of a binary counter: each trace is rewritten O(log N) times.
    while parts and parts[-1].num_traces + parts[-1].num_sources <= count["trace"] + count["source"]:
        last = parts[-1]
        if last.num_traces + count["trace"] > mf.MAX_PART_TRACES:
            break
        parts.pop()
        first = {"trace": last.first_trace, "segment": last.first_segment, "source": last.first_source}
        count = {k: count[k] + getattr(last, f"num_{k}s") for k in count}
        arrays = mf.merge_parts(index.part_arrays(len(parts)), arrays, first["trace"])
    entry = _add_group(target, "index", old.generation + 1, mf.with_key_table(arrays), {})
    ranges = {f"first_{k}": v for k, v in first.items()} | {f"num_{k}s": v for k, v in count.items()}
    return (*parts, mf.PartRef(entry.path, entry.size, entry.crc32c, **ranges))


def _add_group(
    target: CommitTarget, folder: str, generation: int, arrays: dict[str, np.ndarray], attributes: dict[str, Any]
) -> FileEntry:
    """Add a group of small arrays."""
    data = pack_group(arrays, attributes)
    crc = crc32c(data)
    path = paths.small_file(folder, generation, crc)
    target.add_file(path, data)
    return FileEntry(path, len(data), crc)


def _write_columns(
    target: CommitTarget, old: mf.Manifest, attributes: schema.Attributes, pending: Pending
) -> tuple[tuple[mf.ColumnsRef, ...], int, int]:
    """Add the columns of the next generation; return all references and the numbers of scores and labels."""
    refs = list(old.columns)
    new, name = pending.rows.to_columns(), attributes.default_score
    first, parts = old.num_traces, [new]
    is_rewritten = bool(pending.updates) or name != old.attributes.default_score
    while refs and (is_rewritten or refs[-1].num_traces <= sum(map(len, parts))):
        last = refs.pop()
        first = last.first_trace
        parts.insert(0, read_columns(target.files, old, [last]))
    joined = join_columns(parts)
    if is_rewritten:
        joined = joined.with_values(pending.updates)
        scored, labeled = joined.num_scored(name), joined.num_labeled
    else:
        scored, labeled = old.num_scored + new.num_scored(name), old.num_labeled + new.num_labeled
    if undefined := sorted(joined.scores.keys() - attributes.scores.keys()):  # no reader could open the store
        raise UsageError(f"the score {undefined[0]!r} is not defined")
    if len(joined) == 0:
        return tuple(refs), scored, labeled
    facts = {"tracestore": {"first_trace": first, "num_traces": len(joined)}}
    entry = _add_group(target, "columns", old.generation + 1, joined.arrays(), facts)
    refs.append(mf.ColumnsRef(entry.path, entry.size, entry.crc32c, first, len(joined)))
    return tuple(refs), scored, labeled
