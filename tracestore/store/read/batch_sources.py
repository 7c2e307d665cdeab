"""What a batch is gathered from: the stored bytes of some traces, looked up together."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tracestore.errors import MissingFieldError
from tracestore.store.format import schema
from tracestore.store.read.chunk_cache import ChunkKey

if TYPE_CHECKING:
    from tracestore.store.read.store import TraceStore

(GRAPH_SEGMENT, HIDDEN_ROW, ATTENTION_START, NUM_TOKENS, LAYOUT, SEQUENCE_SEGMENT, LAST_TOKEN_ROW) = range(7)


class GraphBatchSources(NamedTuple):
    """Of B traces, as sources of a gather: `hidden`, which one behind the other are every
    trace's (L, S, D); `attention`, B of (L, H or 1, A) as stored; or, where only edges
    are, `attention` of their weights (E,) and `edges` (ptr, edge_index) as PackedEdges."""

    num_tokens: np.ndarray  # (B,) int64
    layout: np.ndarray  # (B,) int64, schema.LAYOUT_*
    hidden: list[Any]
    attention: list[Any]
    edges: list[tuple[np.ndarray, Any]] | None


def _refuse(store: "TraceStore", indices: np.ndarray, missing: np.ndarray, what: str) -> None:
    if missing.any():
        index = int(indices[int(np.flatnonzero(missing)[0])])
        raise MissingFieldError(f"trace {index} ({store.question_ids[index]}) has no {what}")


def graph_sources(store: "TraceStore", indices: np.ndarray) -> GraphBatchSources:
    """Hidden states and attention of some traces, views of the maps where uncompressed."""
    places = store._index.places(indices)
    _refuse(
        store, indices, places[:, GRAPH_SEGMENT] < 0, "hidden states of all tokens: its source holds last tokens only"
    )
    _refuse(store, indices, places[:, LAYOUT] == schema.LAYOUT_NONE, "attention: it was not stored")
    num_layers, heads = store.num_layers, store.num_stored_heads
    hidden: list[Any] = []
    attention: list[Any] = []
    edges: list[tuple[np.ndarray, Any]] = []
    for number, row, start, tokens, layout, _, _ in places.tolist():
        segment = store._segment(number)
        hidden += segment.array("hidden_states").sources(row, row + num_layers * tokens)
        if layout == schema.LAYOUT_EDGES:
            ptr, edge_index, weight = segment.edge_sources(start, num_layers)
            edges.append((ptr, edge_index))
            attention.append(weight)
            continue
        size = num_layers * heads * schema.num_pairs(tokens, layout)
        found = segment.array("attention").sources(start, start + size)
        # A graph's weights must lie together; only those of compressed chunks do not.
        attention.append(found[0] if len(found) == 1 else np.concatenate(found))
    return GraphBatchSources(places[:, NUM_TOKENS].copy(), places[:, LAYOUT], hidden, attention, edges or None)


def sequence_sources(store: "TraceStore", indices: np.ndarray) -> list[Any]:
    """Sources of a gather that one behind the other are every trace's last tokens, (L, D)."""
    pieces: list[Any] = []
    num_layers = store.num_layers
    for graph, row, _, tokens, _, sequence, last in store._index.places(indices).tolist():
        if sequence >= 0:
            pieces += store._segment(sequence).array("last_token").sources(last, last + 1)
            continue
        hidden = store._segment(graph).array("hidden_states")
        for layer in range(num_layers):
            at = row + (layer + 1) * tokens - 1
            pieces += hidden.sources(at, at + 1)
    return pieces


def chunk_keys(store: "TraceStore", indices: np.ndarray, view: str) -> list[ChunkKey]:
    """The inner chunks that a batch of some traces is decoded from."""
    keys: list[ChunkKey] = []
    num_layers, heads = store.num_layers, store.num_stored_heads
    for graph, row, start, tokens, layout, sequence, last in store._index.places(indices).tolist():
        if view == "sequence" and sequence >= 0:
            keys += store._segment(sequence).array("last_token").chunk_keys(last, last + 1)
            continue
        segment = store._segment(graph)
        keys += segment.array("hidden_states").chunk_keys(row, row + num_layers * tokens)
        if view == "graph" and layout != schema.LAYOUT_EDGES:
            size = num_layers * heads * schema.num_pairs(tokens, layout)
            keys += segment.array("attention").chunk_keys(start, start + size)
    return list(dict.fromkeys(keys))
