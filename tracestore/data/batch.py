"""Batches built from a store: one gather a batch, tensors of the stored dtype."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Batch, Data

from tracestore._core import kernels
from tracestore.errors import UsageError
from tracestore.store import schema
from tracestore.store.reader import TraceStore
from tracestore.store.trace import PackedEdges, Trace

TORCH_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class GraphOptions:
    """How attention becomes edges: all pairs with weight > threshold (0 keeps what is
    positive), or, where top_k is given, that fraction of each layer's stored pairs with
    the largest weights. edges: "coo" (PyG's edge_index) or "packed" (causal triangles)."""

    attention_threshold: float = 0.0
    top_k: float | None = None
    edges: str = "coo"

    def __post_init__(self) -> None:
        if self.top_k is not None and not 0 < self.top_k <= 1:
            raise UsageError(f"found top_k {self.top_k}, expected a fraction above 0 and at most 1")
        if self.edges not in ("coo", "packed"):
            raise UsageError(f"found edges {self.edges!r}, expected 'coo' or 'packed'")


@dataclass
class SequenceBatch:
    """B last-token sequences. Also reads as a tuple (sequences, score, question_id) and
    by name, batch["sequences"]."""

    sequences: torch.Tensor  # (B, L, D)
    y: torch.Tensor  # (B,) float32, NaN without a label or score
    score: torch.Tensor  # (B,) float32, NaN where missing
    question_id: list[str]
    trace_index: torch.Tensor  # (B,) int64

    def __len__(self) -> int:
        return len(self.question_id)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.sequences, self.score, self.question_id))

    def __getitem__(self, key: str | int) -> Any:
        return getattr(self, key) if isinstance(key, str) else (self.sequences, self.score, self.question_id)[key]

    def keys(self) -> list[str]:
        return ["sequences", "y", "score", "question_id", "trace_index"]

    def _map(self, move: Any) -> "SequenceBatch":
        tensors = {name: move(getattr(self, name)) for name in ("sequences", "y", "score", "trace_index")}
        return replace(self, **tensors)

    def to(self, *args: Any, **kwargs: Any) -> "SequenceBatch":
        """The batch on a device."""
        return self._map(lambda t: t.to(*args, **kwargs))

    def pin_memory(self) -> "SequenceBatch":
        return self._map(torch.Tensor.pin_memory)


def _empty(shape: tuple[int, ...], name: str) -> tuple[torch.Tensor, np.ndarray]:
    """A new tensor of a dtype name and a numpy view of its bytes."""
    raw = torch.empty(shape, dtype=torch.float32 if name == "float32" else torch.int16)
    return raw if name == "float32" else raw.view(TORCH_DTYPES[name]), raw.numpy().reshape(-1).view("u1")


def as_tensor(array: np.ndarray, name: str) -> torch.Tensor:
    """A copy of a stored array as a tensor of its dtype."""
    tensor, out = _empty(array.shape, name)
    kernels.gather([np.ascontiguousarray(array).reshape(-1).view("u1")], out, 1)
    return tensor


def gather_sequences(
    store: TraceStore, indices: Sequence[int] | np.ndarray, targets: np.ndarray, num_threads: int = 1
) -> SequenceBatch:
    """The last tokens of some traces in every layer, (B, L, D)."""
    traces = [store[int(k)] for k in indices]
    tensor, out = _empty((len(traces), store.num_layers, store.hidden_dim), store.hidden_dtype)
    kernels.gather([np.ascontiguousarray(t.last_token).reshape(-1).view("u1") for t in traces], out, num_threads)
    return SequenceBatch(tensor, **_values(store, traces, targets))


def _values(store: TraceStore, traces: list[Trace], targets: np.ndarray) -> dict[str, Any]:
    index = np.array([t.index for t in traces], np.int64)
    return {
        "y": torch.from_numpy(targets[index].astype("f4")),
        "score": torch.from_numpy(np.asarray(store.scores)[index].astype("f4")),
        "question_id": [t.question_id for t in traces],
        "trace_index": torch.from_numpy(index),
    }


def _dense_weights(traces: list[Trace]) -> list[tuple[np.ndarray, int, bool]]:
    return [
        (
            np.ascontiguousarray(t.attention_mean).reshape(-1).view("u1"),
            t.num_tokens,
            t.attention_layout == "causal",
        )
        for t in traces
    ]


def _weight_dtype(store: TraceStore) -> str:
    return "float16" if store.attention == "heads" else store.attention_dtype


def _edges_of_dense(
    store: TraceStore, traces: list[Trace], options: GraphOptions, num_threads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    name = _weight_dtype(store)
    builder = kernels.EdgeBuilder(
        _dense_weights(traces),
        store.num_layers,
        schema.dtype_code(name),
        options.attention_threshold,
        options.top_k or 0.0,
        num_threads,
    )
    edge_index = torch.empty((2, builder.num_edges), dtype=torch.int64)
    weight, out = _empty((builder.num_edges,), name)
    ptr = torch.empty(len(traces) * store.num_layers + 1, dtype=torch.int64)
    builder.fill(edge_index.numpy(), out, ptr.numpy())
    return edge_index, weight, ptr


def _edges_of_sets(store: TraceStore, traces: list[Trace]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A store of edges gives all its edges."""
    if not traces:
        empty, _ = _empty((0,), store.attention_dtype)
        return torch.zeros((2, 0), dtype=torch.int64), empty, torch.zeros(1, dtype=torch.int64)
    indexes, weights, counts = [], [], []
    node = 0
    for trace in traces:
        packed = trace.attention_packed
        assert isinstance(packed, PackedEdges)
        per_layer = np.diff(packed.ptr)
        first = node + np.repeat(np.arange(store.num_layers), per_layer) * trace.num_tokens
        indexes.append(packed.edge_index.T.astype(np.int64) + first)
        weights.append(packed.weight)
        counts.append(per_layer)
        node += store.num_layers * trace.num_tokens
    ptr = np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64)
    edge_index = torch.from_numpy(np.ascontiguousarray(np.concatenate(indexes, axis=1)))
    return edge_index, as_tensor(np.concatenate(weights), store.attention_dtype), torch.from_numpy(ptr)


def _mask_top_k(values: np.ndarray, num_pairs: list[int], fraction: float, name: str) -> None:
    """Sets the pairs that top-k drops to NaN, which is above no threshold."""
    begin = 0
    for n in num_pairs:
        layer = values[begin : begin + n]
        wide = layer.astype("f4") if name != "bfloat16" else (layer.astype("<u4") << 16).view("<f4")
        keep = np.empty(n, "u1")
        kernels.select_pairs(wide, 0.0, fraction, keep)
        layer[keep == 0] = np.nan if name != "bfloat16" else 0x7FC0
        begin += n


def _packed(
    store: TraceStore, traces: list[Trace], options: GraphOptions, num_threads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    name = _weight_dtype(store)
    weights = _dense_weights(traces)
    if not all(causal for _, _, causal in weights):
        raise UsageError("packed edges need causal attention; use edges='coo'")
    pairs = np.repeat([s * (s + 1) // 2 for _, s, _ in weights], store.num_layers)
    ptr = np.concatenate([[0], np.cumsum(pairs)]).astype(np.int64)
    tensor, out = _empty((int(ptr[-1]),), name)
    kernels.gather([w for w, _, _ in weights], out, num_threads)
    if options.top_k is not None:
        values = out.view(schema.storage_dtype(name))
        _mask_top_k(values, pairs.tolist(), options.top_k, name)
    return tensor, torch.from_numpy(ptr)


def gather_graphs(
    store: TraceStore,
    indices: Sequence[int] | np.ndarray,
    targets: np.ndarray,
    options: GraphOptions,
    num_threads: int = 1,
) -> Batch:
    """One PyG Batch of B * L graphs, trace after trace and layer after layer.

    x (N, D); edge_index (2, E), source j to target i, and edge_attr (E, 1), or with
    edges="packed" attention (sum A,) and attention_ptr (B * L + 1,); batch (N,), ptr
    (B * L + 1,); y, score (B,), question_id, trace_index (B,), num_layers.
    """
    traces = [store[int(k)] for k in indices]
    tokens = np.repeat([t.num_tokens for t in traces], store.num_layers).astype(np.int64)
    ptr = torch.from_numpy(np.concatenate([[0], np.cumsum(tokens)]).astype(np.int64))
    x, out = _empty((int(ptr[-1]), store.hidden_dim), store.hidden_dtype)
    kernels.gather([t.hidden_states.reshape(-1).view("u1") for t in traces], out, num_threads)
    batch = Batch(_base_cls=Data, x=x)
    slices: dict[str, torch.Tensor] = {"x": ptr}
    incs: dict[str, torch.Tensor | None] = {"x": None}
    if options.edges == "packed":
        batch.attention, batch.attention_ptr = _packed(store, traces, options, num_threads)
    else:
        if store.attention_layout == "edges":
            edge_index, weight, edge_ptr = _edges_of_sets(store, traces)
        else:
            edge_index, weight, edge_ptr = _edges_of_dense(store, traces, options, num_threads)
        batch.edge_index, batch.edge_attr = edge_index, weight.unsqueeze(1)
        slices |= {"edge_index": edge_ptr, "edge_attr": edge_ptr}
        incs |= {"edge_index": ptr[:-1], "edge_attr": None}
    batch.batch = torch.repeat_interleave(torch.arange(len(tokens)), torch.from_numpy(tokens))
    batch.ptr = ptr
    for name, value in _values(store, traces, targets).items():
        batch[name] = value
    batch.num_layers = store.num_layers
    batch._num_graphs = len(tokens)
    batch._slice_dict, batch._inc_dict = slices, incs
    return batch
