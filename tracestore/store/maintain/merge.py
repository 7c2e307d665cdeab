"""Copying traces of one or more stores to another store."""

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tracestore.errors import InvalidInputError, UsageError
from tracestore.store.format.labels import (
    CORRECT,
    DEFAULT_THRESHOLD,
    ScoreField,
    derive,
    is_in_unit_range,
    unlabeled_note,
    used_scores,
)
from tracestore.store.format.provenance import Provenance, require_compatible
from tracestore.store.io.files import is_same_location, parse_location
from tracestore.store.io.fsio import require_free_bytes
from tracestore.store.maintain.selection import by_source
from tracestore.store.maintain.transfer import Transfer
from tracestore.store.read.batch_sources import GRAPH_SEGMENT, SEQUENCE_SEGMENT
from tracestore.store.read.columns import TraceValues
from tracestore.store.read.index import SourceEntry
from tracestore.store.read.joined import joined_score_fields, require_same_options
from tracestore.store.read.store import TraceStore, open_store
from tracestore.store.write.writer import COMMIT_BYTES, StoreWriter
from tracestore.words import plural


@dataclass
class MergeReport:
    """Counts of a merge. `num_scores_differing` and `num_groups_differing` count duplicates of which another value is kept.

    `lens` is "none" if no source has a lens, "copied" if the destination holds the lens of the sources, and
    "different" if nothing was copied because the lenses of the sources differ from each other or from that of the
    destination.
    `labels_lost` and `labels_changed` count the traces of each source, and those that the destination had before, without
    a label, or with another one, in the destination: its default score is another, or a label counts.
    """

    num_traces_new: int = 0
    num_duplicates: int = 0
    num_scores_filled: int = 0
    num_scores_differing: int = 0
    num_groups_differing: int = 0
    lens: str = "none"
    default_score: str | None = None
    labels_lost: dict[str, int] = field(default_factory=dict)
    labels_changed: dict[str, int] = field(default_factory=dict)
    unlabeled: str | None = None


def merge_stores(
    sources: Sequence[str | os.PathLike[str]],
    destination: str | os.PathLike[str],
    *,
    chosen: Sequence[np.ndarray] | None = None,
    codec: str | None = None,
    overwrite: bool = False,
    allow_mixed_provenance: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> MergeReport:
    """Add traces of `sources`, in order, with scores and sources to the store `destination`.

    A new destination gets the options of the first source. A trace that the destination has with equal content is a
    duplicate; it adds the scores and the group that are not stored. An interrupted merge continues when it is run again. `progress`
    receives the number of traces done and the total.

    Parameters
    ----------
    sources : sequence of str or os.PathLike
    destination : str or os.PathLike
    chosen : sequence of np.ndarray, optional
        Of each source the indices of the traces to copy, int64. Their order does not matter. Default: all traces.
    codec : str, optional
    overwrite, allow_mixed_provenance : bool
    progress : callable, optional

    Raises
    ------
    InvalidInputError
        If two traces with one key differ in content.
    IndexError
        If a source lacks a chosen trace.
    UsageError
        If no trace of a source is chosen, or the provenance of two stores conflicts, unless `allow_mixed_provenance` is
        true. A store that is mixed already needs no permission.
    """
    opened = [open_store(s) for s in sources]
    if not opened:
        raise UsageError("found no store to merge")
    wanted = [np.arange(len(store)) for store in opened] if chosen is None else [np.unique(k) for k in chosen]
    copies = list(zip(opened, wanted, strict=True))
    options = opened[0].internals.attributes.options
    for store, indices in copies:
        if chosen is not None and len(indices) == 0:
            raise UsageError(f"{store.path}: no trace is chosen")
        _check_source(store, indices, destination)
    report = MergeReport()
    score_fields = _score_fields(opened)
    total, done = sum(map(len, wanted)), 0
    with StoreWriter(
        destination,
        attention=options["attention"],
        dtype=options["dtype"],
        codec=codec,
        overwrite=overwrite,
        allow_mixed_provenance=True,  # checked here store by store
    ) as writer:
        # Commits are decided here: none of them separates the rows of a segment that is taken over.
        writer.commit_bytes = sys.maxsize
        new = _new_traces(writer, copies)
        transfers = [Transfer(store, indices, writer) for store, indices in zip(opened, new, strict=True)]
        if writer.attributes.options["codec"] == "none" and isinstance(parse_location(destination), Path):
            needed = sum(transfer.needed_bytes() for transfer in transfers)
            require_free_bytes(writer.target.path, needed, f"a copy of {plural(total, 'trace')}")
        for name, field in score_fields.items():
            if name not in writer.attributes.scores or writer.attributes.scores[name].direction != field.direction:
                writer.define_score(name, field)
        before = _targets(writer)
        known = list(writer.attributes.provenance)
        for store, indices in copies:
            stated = _provenances(store, indices)
            for provenance in () if allow_mixed_provenance else stated:
                require_compatible(known, [provenance], str(store.path))
            known += stated
        _copy_lens(writer, opened, report)
        for (store, indices), transfer in zip(copies, transfers, strict=True):
            try:
                for number, added, is_whole in by_source(store, indices):
                    _merge_source(writer, store, number, added, is_whole, transfer, report)
                    if writer.pending_bytes >= COMMIT_BYTES and transfer.is_between_segments:
                        writer.commit()
                    done += len(added)
                    if progress is not None:
                        progress(done, total)
            except InvalidInputError as error:
                _commit_copied(writer)
                raise error.with_location(source=str(store.path)) from None
        writer.commit()
        for store, indices in copies:
            _list_newest_sources(writer, store, indices)
            _fill_scores(writer, store, indices, report)
        _compare_labels(writer, copies, {str(destination): before}, report)
        writer.replace_existing()
    return report


def _score_fields(opened: Sequence[TraceStore]) -> dict[str, ScoreField]:
    """Return the named scores of the stores; UsageError if their options or the directions of a score differ."""
    internals = [store.internals for store in opened]
    require_same_options(internals)
    return joined_score_fields(internals)


def _check_source(store: TraceStore, indices: np.ndarray, destination: str | os.PathLike[str]) -> None:
    """Raise an error unless the traces exist, and the store is not the destination."""
    if len(indices) and not 0 <= indices[0] <= indices[-1] < len(store):
        raise IndexError(f"traces {indices[0]} to {indices[-1]} of {len(store)}")
    if is_same_location(store.internals.files.location, parse_location(destination)):
        raise UsageError(f"{store.path}: is a source and the destination")


def _keys(store: TraceStore, indices: np.ndarray) -> list[tuple[str, int]]:
    """Return the question ids and samples of some traces."""
    samples = store.internals.index.read_column("sample")[indices].tolist()
    return list(zip(store.question_ids.take(indices), samples, strict=True))


def _new_traces(writer: StoreWriter, copies: Sequence[tuple[TraceStore, np.ndarray]]) -> list[np.ndarray]:
    """Return those of the chosen traces of each store whose key neither the destination nor an earlier store has."""
    seen: set[tuple[str, int]] = set()
    found = []
    for store, indices in copies:
        keys = _keys(store, indices)
        found.append(indices[np.array([key not in seen and writer.index.find(*key) < 0 for key in keys], bool)])
        seen.update(keys)
    return found


def _copy_lens(writer: StoreWriter, opened: Sequence[TraceStore], report: MergeReport) -> None:
    """Give the destination the lens of the stores, unless their lenses differ."""
    lenses = [(store, lens) for store in opened if (lens := store.lens) is not None]
    if not lenses:
        return
    store, lens = lenses[0]
    stored = writer.lens_digest()
    digests = {lens.arrays().digest() for _, lens in lenses} | ({stored} if stored is not None else set())
    if len(digests) > 1:
        report.lens = "different"
        return
    report.lens = "copied"
    if stored is None:
        try:
            writer.set_lens(lens.arrays(), lens.provenance)
        except InvalidInputError as error:
            raise error.with_location(source=str(store.path)) from None


def _provenances(store: TraceStore, wanted: np.ndarray) -> list[Provenance]:
    """Return the provenances of the lens and of the sources of some traces."""
    sources = list(store.internals.index.sources())
    numbers = np.unique(store.internals.index.read_column("source")[wanted])
    used = [sources[number].provenance for number in numbers]
    if (lens := store.lens) is not None:
        used.append(lens.provenance)
    return [provenance for provenance in store.provenance if provenance in used]


def _commit_copied(writer: StoreWriter) -> None:
    """Commit before an error the sources that were copied completely."""
    if not writer.replaces_at_commit:
        writer.commit()


def _merge_source(
    writer: StoreWriter,
    store: TraceStore,
    number: int,
    indices: np.ndarray,
    is_whole: bool,
    transfer: Transfer,
    report: MergeReport,
) -> None:
    source = store.internals.index.source(number)
    # The source of traces that a program appended has no fingerprint: its name does not identify it. A source
    # that is copied in part gets none either: its other traces may be added later.
    fingerprint = source.fingerprint if is_whole else ""
    if writer.has_source_named(source.path) and _has_rows(writer, store, indices):
        report.num_duplicates += len(indices)
        return
    added = duplicates = 0
    writer.begin_source(source.path, source.size, fingerprint, source.provenance)
    try:
        for index in indices.tolist():
            is_new = transfer.append(index)
            added += is_new
            duplicates += not is_new
    except BaseException:
        writer.abort_source()
        raise
    if not writer.source_has_changes and writer.has_source_named(source.path):
        writer.abort_source()  # A source of its name is listed already, maybe a newer one.
    else:
        writer.end_source()
    report.num_traces_new += added
    report.num_duplicates += duplicates


def _has_rows(writer: StoreWriter, store: TraceStore, indices: np.ndarray) -> bool:
    """Return whether the destination has these traces in equal segments, and with their labels."""
    found = np.array([writer.index.find(*key) for key in _keys(store, indices)], np.int64)
    labels = store.labels[indices]
    if (found < 0).any() or not (np.isnan(labels) | (labels == writer.read_columns().labels[found])).all():
        return False
    own, other = store.internals.index.locations(indices), writer.index.locations(found)
    segments = (GRAPH_SEGMENT, SEQUENCE_SEGMENT)
    pairs = np.unique(np.stack([own[:, segments], other[:, segments]], axis=2).reshape(-1, 2), axis=0)
    # The path of a segment has the hash of its rows, with their checksums.
    return np.array_equal(np.delete(own, segments, axis=1), np.delete(other, segments, axis=1)) and all(
        one == two if min(one, two) < 0 else store.internals.index.segment(one) == writer.index.segment(two)
        for one, two in pairs.tolist()
    )


def _list_newest_sources(writer: StoreWriter, store: TraceStore, indices: np.ndarray) -> None:
    """List the newest source of each path again behind earlier ones of a whole store, which may be listed behind it."""
    entries: dict[str, list[SourceEntry]] = defaultdict(list)
    for source in store.internals.index.sources() if len(indices) == len(store) else ():
        if source.fingerprint:
            entries[source.path].append(source)
    for path, found in entries.items():
        newest = found[-1]
        are_last = [writer.has_source(path, source.size, source.fingerprint) for source in found]
        if any(are_last) and not are_last[-1]:
            writer.begin_source(path, newest.size, newest.fingerprint, newest.provenance)
            writer.end_source()


def _fill_scores(writer: StoreWriter, store: TraceStore, wanted: np.ndarray, report: MergeReport) -> None:
    columns, updates = writer.read_columns(), {}
    has_values = bool(store.score_fields) or len(store.internals.columns.groups) > 0
    for trace in (store[index] for index in wanted.tolist()) if has_values else ():
        found = writer.index.find(trace.question_id, trace.sample)
        if found < 0:
            continue
        stored, group = columns.scores_of(found), columns.group(found)
        missing = {name: score for name, score in trace.scores.items() if name not in stored}
        if missing or (trace.group and not group):
            updates[found] = TraceValues(missing, group=group or trace.group)
        report.num_scores_filled += bool(missing)
        report.num_scores_differing += any(stored[name] != s for name, s in trace.scores.items() if name in stored)
        report.num_groups_differing += bool(group) and trace.group not in ("", group)
    writer.update_values(updates)
    writer.commit()


def _targets(writer: StoreWriter) -> np.ndarray:
    """Return the label (N,) of each committed trace, NaN for none."""
    columns, name = writer.read_columns(), writer.attributes.default_score
    direction = writer.attributes.scores[name].direction if name is not None else CORRECT
    return derive(columns.score(name), columns.labels, DEFAULT_THRESHOLD, direction)


def _compare_labels(
    writer: StoreWriter,
    copies: Sequence[tuple[TraceStore, np.ndarray]],
    labels: dict[str, np.ndarray],
    report: MergeReport,
) -> None:
    """Count the traces whose label is another in the destination: its default score is another, or a label counts.

    `labels` are those that the first traces of the destination had before, by its name.
    """
    columns, name, after = writer.read_columns(), writer.attributes.default_score, _targets(writer)
    report.default_score, report.unlabeled = name, unlabeled_note(columns.scores, columns.labels, name)
    places = {path: np.arange(len(before)) for path, before in labels.items()}
    # No threshold is known for other scores: what their labels are is not compared.
    without_threshold = {
        str(store.path) for store, _ in copies if not is_in_unit_range(used_scores(store.scores, store.labels))
    }
    if not is_in_unit_range(used_scores(columns.score(name), columns.labels)):
        without_threshold |= {*labels, *(str(store.path) for store, _ in copies)}
    has_labels = not np.isnan(columns.labels).all()
    for store, indices in copies:
        if has_labels or store.score_name not in (None, name):
            labels[str(store.path)] = store.targets(DEFAULT_THRESHOLD)[indices]
            places[str(store.path)] = np.array([writer.index.find(*key) for key in _keys(store, indices)], np.int64)
    for path, before in labels.items():
        known, now = ~np.isnan(before), after[places[path]]
        lost, changed = int((known & np.isnan(now)).sum()), int((known & ~np.isnan(now) & (before != now)).sum())
        report.labels_lost |= {path: lost} if lost else {}
        report.labels_changed |= {path: changed} if changed and path not in without_threshold else {}
