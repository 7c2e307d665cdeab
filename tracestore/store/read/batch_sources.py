"""Looking up the stored bytes that a batch of traces is gathered from."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tracestore.errors import MissingFieldError
from tracestore.store.format import schema
from tracestore.store.format.entries import FileEntry
from tracestore.store.read.chunk_cache import ChunkKey
from tracestore.store.read.internals import StoreInternals

(GRAPH_SEGMENT, GRAPH_ROW, NUM_TOKENS, LAYOUT, SEQUENCE_SEGMENT, SEQUENCE_ROW) = range(6)


class GraphBatchSources(NamedTuple):
    """Sources of a gather for B graphs.

    `hidden` concatenates to (L, S, D) of every trace. `attention` holds B sources of (L, H or 1, A) as stored. In a
    store of edges `attention` holds the weights (E,), and `edges` the ptr and edge_index of PackedEdges.
    """

    num_tokens: np.ndarray  # (B,) int64
    layout: np.ndarray  # (B,) int64, schema.LAYOUT_*
    hidden: list[Any]
    attention: list[Any]
    edges: list[tuple[np.ndarray, Any]] | None


def _refuse(store: StoreInternals, indices: np.ndarray, missing: np.ndarray, what: str) -> None:
    if missing.any():
        index = int(indices[int(np.flatnonzero(missing)[0])])
        raise MissingFieldError(f"trace {index} ({store.index.question_id(index)}) has no {what}")


def graph_sources(store: StoreInternals, indices: np.ndarray) -> GraphBatchSources:
    """Return hidden states and attention of some traces: views of the maps if uncompressed.

    MissingFieldError names the first trace that lacks them.
    """
    locations = store.index.locations(indices)
    _refuse(
        store,
        indices,
        locations[:, GRAPH_SEGMENT] < 0,
        "hidden states of all tokens: its source holds last tokens only",
    )
    _refuse(store, indices, locations[:, LAYOUT] == schema.LAYOUT_NONE, "attention: it was not stored")
    num_layers, heads = store.num_layers, store.num_stored_heads
    hidden: list[Any] = []
    attention: list[Any] = []
    edges: list[tuple[np.ndarray, Any]] = []
    for number, row, tokens, layout, _, _ in locations.tolist():
        segment = store.segment(number)
        begin = segment.begin("hidden_states", row)
        hidden += segment.array("hidden_states").copy_sources(begin, begin + num_layers * tokens)
        if layout == schema.LAYOUT_EDGES:
            ptr, edge_index, weight = segment.edge_sources(segment.begin("edges", row), num_layers)
            edges.append((ptr, edge_index))
            attention.append(weight)
            continue
        size = num_layers * heads * schema.num_pairs(tokens, layout)
        begin = segment.begin("attention", row)
        found = segment.array("attention").copy_sources(begin, begin + size)
        # The gather needs the weights of a graph in one piece.
        attention.append(found[0] if len(found) == 1 else np.concatenate(found))
    return GraphBatchSources(locations[:, NUM_TOKENS].copy(), locations[:, LAYOUT], hidden, attention, edges or None)


def sequence_sources(store: StoreInternals, indices: np.ndarray) -> list[Any]:
    """Return sources of a gather that concatenate to the last tokens (L, D) of every trace."""
    pieces: list[Any] = []
    num_layers = store.num_layers
    for graph, row, tokens, _, sequence, sequence_row in store.index.locations(indices).tolist():
        if sequence >= 0:
            segment = store.segment(sequence)
            at = segment.begin("last_token", sequence_row)
            pieces += segment.array("last_token").copy_sources(at, at + 1)
            continue
        segment = store.segment(graph)
        hidden, begin = segment.array("hidden_states"), segment.begin("hidden_states", row)
        for layer in range(num_layers):
            at = begin + (layer + 1) * tokens - 1
            pieces += hidden.copy_sources(at, at + 1)
    return pieces


def chunk_keys(store: StoreInternals, indices: np.ndarray, view: str) -> list[ChunkKey]:
    """Return the inner chunks that a batch of some traces is decoded from, each once."""
    keys: list[ChunkKey] = []
    num_layers, heads = store.num_layers, store.num_stored_heads
    for graph, row, tokens, layout, sequence, sequence_row in store.index.locations(indices).tolist():
        if view == "sequence" and sequence >= 0:
            segment = store.segment(sequence)
            at = segment.begin("last_token", sequence_row)
            keys += segment.array("last_token").chunk_keys(at, at + 1)
            continue
        segment = store.segment(graph)
        begin = segment.begin("hidden_states", row)
        keys += segment.array("hidden_states").chunk_keys(begin, begin + num_layers * tokens)
        if view == "graph" and layout != schema.LAYOUT_EDGES:
            size = num_layers * heads * schema.num_pairs(tokens, layout)
            begin = segment.begin("attention", row)
            keys += segment.array("attention").chunk_keys(begin, begin + size)
    return list(dict.fromkeys(keys))


def batch_files(store: StoreInternals, indices: np.ndarray, view: str) -> Iterator[FileEntry]:
    """Yield the files that a batch of some traces is gathered from, some of them repeatedly."""
    columns = (GRAPH_SEGMENT, SEQUENCE_SEGMENT, LAYOUT)
    for graph, sequence, layout in np.unique(store.index.locations(indices)[:, columns], axis=0).tolist():
        is_sequence = view == "sequence" and sequence >= 0
        segment = store.segment(sequence if is_sequence else graph)
        names = ["last_token"] if is_sequence else ["hidden_states"]
        if view == "graph":
            names += ["edge_index", "edge_weight"] if layout == schema.LAYOUT_EDGES else ["attention"]
        yield segment.rows
        for name in names:
            yield from segment.array_files(name)
