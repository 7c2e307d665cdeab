"""Looking up the stored bytes that a batch of traces is gathered from."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tracestore.errors import MissingFieldError, UsageError
from tracestore.store.format import schema
from tracestore.store.format.entries import FileEntry, FilePart, Layers
from tracestore.store.read.chunk_cache import ChunkKey
from tracestore.store.read.internals import StoreInternals
from tracestore.store.read.segment import SegmentReader

# Segments of a remote store that file_bytes looks up.
_MOST_LOOKED_UP = 64

(GRAPH_SEGMENT, GRAPH_ROW, NUM_TOKENS, LAYOUT, SEQUENCE_SEGMENT, SEQUENCE_ROW) = range(6)


def primary_locations(locations: np.ndarray) -> np.ndarray:
    """Return segment and row of the texts of traces, (n, 2) int64, from those of StoreIndex.locations()."""
    return np.where(locations[:, [GRAPH_SEGMENT]] >= 0, locations[:, :NUM_TOKENS], locations[:, SEQUENCE_SEGMENT:])


class GraphBatchSources(NamedTuple):
    """Sources of a gather for the graphs of some traces, of P parts.

    A part is consecutive layers of a trace, as many in every part: all chosen ones, or one. `hidden` concatenates to
    (layers, S, D) of every part. `attention` holds P sources of (layers, H or 1, A) as stored. In a store of edges `attention` holds the
    weights (E,), and `edges` the ptr and edge_index of PackedEdges.
    """

    num_tokens: np.ndarray  # (P,) int64
    layout: np.ndarray  # (P,) int64, schema.LAYOUT_*
    hidden: list[Any]
    attention: list[Any]
    edges: list[tuple[np.ndarray, Any]] | None
    layers_per_part: int


def _parts(num_layers: int, layers: Sequence[int] | None) -> list[tuple[int, int]]:
    """Return the first layer and the number of layers of each part of a trace."""
    if layers is None:
        return [(0, num_layers)]
    is_range = list(layers) == list(range(layers[0], layers[0] + len(layers)))
    return [(layers[0], len(layers))] if is_range else [(layer, 1) for layer in layers]


_NO_HIDDEN_STATES = "hidden states of all tokens: its source holds last tokens only"


def describe(store: StoreInternals, index: int) -> str:
    """Return the number and the question id of a trace, for messages."""
    return f"trace {index} ({store.index.question_id(index)})"


def _refuse(store: StoreInternals, indices: np.ndarray, missing: np.ndarray, what: str) -> None:
    if missing.any():
        index = int(indices[int(np.flatnonzero(missing)[0])])
        raise MissingFieldError(f"{describe(store, index)} has no {what}")


def graph_sources(store: StoreInternals, indices: np.ndarray, layers: Sequence[int] | None = None) -> GraphBatchSources:
    """Return hidden states and attention of some traces, or of some of their layers: views of the maps if uncompressed.

    MissingFieldError names the first trace that lacks them.
    """
    locations = store.index.locations(indices)
    _refuse(store, indices, locations[:, GRAPH_SEGMENT] < 0, _NO_HIDDEN_STATES)
    _refuse(store, indices, locations[:, LAYOUT] == schema.LAYOUT_NONE, "attention: it was not stored")
    parts, heads = _parts(store.num_layers, layers), store.num_stored_heads
    hidden: list[Any] = []
    attention: list[Any] = []
    edges: list[tuple[np.ndarray, Any]] = []
    segments: dict[int, SegmentReader] = {}
    for number, row, tokens, layout, _, _ in locations.tolist():
        segment = segments.get(number) or segments.setdefault(number, store.segment(number))
        begin = segment.begin("hidden_states", row)
        values = heads * schema.num_pairs(tokens, layout)
        for first, count in parts:
            at = begin + first * tokens
            hidden += segment.array("hidden_states").copy_sources(at, at + count * tokens)
            if layout == schema.LAYOUT_EDGES:
                ptr, edge_index, weight = segment.edge_sources(segment.begin("edges", row) + first, count)
                edges.append((ptr, edge_index))
                attention.append(weight)
                continue
            at = segment.begin("attention", row) + first * values
            found = segment.array("attention").copy_sources(at, at + count * values)
            # The gather needs the weights of a graph in one piece.
            attention.append(found[0] if len(found) == 1 else np.concatenate(found))
    num_tokens, layout = (np.repeat(locations[:, column], len(parts)) for column in (NUM_TOKENS, LAYOUT))
    return GraphBatchSources(num_tokens, layout, hidden, attention, edges or None, parts[0][1])


def sequence_sources(
    store: StoreInternals, indices: np.ndarray, layers: Sequence[int] | None = None, position: int = -1
) -> list[Any]:
    """Return sources of a gather that concatenate to one token (L, D) of every trace, or to some of its layers.

    A negative position counts from the end. UsageError names the first trace that does not reach to the position.
    """
    pieces: list[Any] = []
    num_layers = store.num_layers
    locations = store.index.locations(indices)
    if position != -1:
        _refuse(store, indices, locations[:, GRAPH_SEGMENT] < 0, _NO_HIDDEN_STATES)
    segments: dict[int, SegmentReader] = {}
    for k, (graph, row, tokens, _, sequence, sequence_row) in enumerate(locations.tolist()):
        if sequence >= 0 and position == -1:
            segment = segments.get(sequence) or segments.setdefault(sequence, store.segment(sequence))
            last, at = segment.array("last_token"), segment.begin("last_token", sequence_row)
            found = last.copy_sources(at, at + 1)
            size = last.row_items * last.dtype.itemsize // num_layers
            pieces += found if layers is None else [found[0][n * size : (n + 1) * size] for n in layers]
            continue
        segment = segments.get(graph) or segments.setdefault(graph, store.segment(graph))
        hidden, begin = segment.array("hidden_states"), segment.begin("hidden_states", row)
        at = position + tokens if position < 0 else position
        if not 0 <= at < tokens:
            raise UsageError(f"{describe(store, int(indices[k]))} has {tokens} tokens and none at position {position}")
        for layer in range(num_layers) if layers is None else layers:
            pieces += hidden.copy_sources(begin + layer * tokens + at, begin + layer * tokens + at + 1)
    return pieces


def chunk_keys(
    store: StoreInternals, indices: np.ndarray, view: str, layers: Sequence[int] | None = None
) -> list[ChunkKey]:
    """Return the inner chunks that a batch of some traces is decoded from, each once."""
    keys: list[ChunkKey] = []
    parts, heads = _parts(store.num_layers, layers), store.num_stored_heads
    for graph, row, tokens, layout, sequence, sequence_row in store.index.locations(indices).tolist():
        if view == "sequence" and sequence >= 0:
            segment = store.segment(sequence)
            at = segment.begin("last_token", sequence_row)
            keys += segment.array("last_token").chunk_keys(at, at + 1)
            continue
        segment = store.segment(graph)
        sizes = {"hidden_states": tokens}
        if view == "graph" and layout != schema.LAYOUT_EDGES:
            sizes["attention"] = heads * schema.num_pairs(tokens, layout)
        for name, size in sizes.items():
            begin = segment.begin(name, row)
            for first, count in parts:
                keys += segment.array(name).chunk_keys(begin + first * size, begin + (first + count) * size)
    return list(dict.fromkeys(keys))


def batch_files(
    store: StoreInternals, indices: np.ndarray, view: str, layers: Sequence[int] | None = None
) -> Iterator[FileEntry | FilePart]:
    """Yield the files, or parts of them, that a batch of some traces is gathered from, some of them repeatedly.

    View "tokens" reads hidden states only.
    """
    rows_of: dict[tuple[int, int, int], list[int]] = {}
    for graph, row, _, layout, sequence, _ in store.index.locations(indices).tolist():
        rows_of.setdefault((graph, sequence, layout), []).append(row)
    for (graph, sequence, layout), rows in rows_of.items():
        is_sequence = view == "sequence" and sequence >= 0
        segment = store.segment(sequence if is_sequence else graph)
        names = ["last_token"] if is_sequence else ["hidden_states"]
        if view == "graph":
            names += ["edge_index", "edge_weight"] if layout == schema.LAYOUT_EDGES else ["attention"]
        yield segment.rows
        for name in names:
            found = segment.fetched_layers(name)
            if found is None:
                yield from segment.array_files[name]
            else:
                yield _part(segment, name, np.array(rows), found, _parts(store.num_layers, layers))


def file_bytes(
    store: StoreInternals, view: str, layers: Sequence[int] | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return about what batches fetch of remote stores: the bytes a token of some segments of each, times the tokens.

    Returns
    -------
    ndarray of int64, shape (N,)
        The segment that each trace is read from; -1 for a trace that lacks what the view reads.
    ndarray of float64, shape (segments,)
        Bytes of its files that are fetched whole.
    ndarray of float64, shape (N,)
        Bytes of the layers of each trace that are fetched one by one.
    """
    locations = store.index.locations(np.arange(store.manifest.num_traces))
    graph, sequence, tokens = (locations[:, k] for k in (GRAPH_SEGMENT, SEQUENCE_SEGMENT, NUM_TOKENS))
    segments = np.where((sequence >= 0) & (view == "sequence"), sequence, graph)
    tokens = np.where(segments >= 0, tokens + 1, 0)
    sums = np.bincount(np.maximum(segments, 0), tokens, store.manifest.num_segments)
    whole, parts = np.zeros(len(sums)), np.zeros(len(sums))
    first_segment = first_trace = 0
    for member in store.members:
        here = slice(first_segment, first_segment + member.manifest.num_segments)
        used = np.flatnonzero(sums[here])
        if member.files.cache_bytes is not None and len(used):
            seen = used[np.unique(np.linspace(0, len(used) - 1, _MOST_LOOKED_UP).astype(int))]
            member.files.fetch(member.index.segment(number).rows for number in seen.tolist())
            traces = np.flatnonzero(np.isin(segments, first_segment + seen)) - first_trace
            found, rates = set(batch_files(member, traces, view, layers)), sums[here] / sums[here][seen].sum()
            whole[here] = rates * sum(item.size for item in found if isinstance(item, FileEntry))
            parts[here] = rates * sum(item.num_bytes for item in found if isinstance(item, FilePart))
        first_segment, first_trace = here.stop, first_trace + member.manifest.num_traces
    return segments, whole, parts[segments] * tokens / np.maximum(sums[segments], 1)


def _part(segment: SegmentReader, name: str, rows: np.ndarray, found: Layers, parts: list[tuple[int, int]]) -> FilePart:
    """Return the layers of some rows that a batch needs of a large array."""
    # The number of the first layer of each row.
    edges = name.startswith("edge")
    first = segment.begins("edges", rows) if edges else np.searchsorted(found.ends, segment.begins(name, rows))
    ranges = sorted((int(found.ends[k + a]), int(found.ends[k + a + n])) for k in first for a, n in parts)
    entry = max(segment.array_files[name], key=lambda e: e.size)
    item_bytes = entry.size // max(1, int(found.ends[-1]))

    def fetch(check: Callable[[], None]) -> None:
        segment.array(name).fetch(ranges, check)

    return FilePart(entry, sum(end - begin for begin, end in ranges) * item_bytes, fetch)
