"""Batches: what they look like, and how their tensors lie in one buffer of memory."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from tracestore.data.buffers import BatchBuffer
from tracestore.extras import needs
from tracestore.store.read.store import TraceStore


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


@dataclass
class GraphBatch:
    """The graphs of B traces x L layers, trace after trace and layer after layer, with the names of
    the PyG Batch that as_pyg makes of it; itself it needs no PyG. N nodes, E edges in all."""

    x: torch.Tensor  # (N, D)
    batch: torch.Tensor  # (N,) int64, the graph of each node
    ptr: torch.Tensor  # (B * L + 1,) int64, where the nodes of each graph begin
    edge_ptr: torch.Tensor  # (B * L + 1,) int64, where the edges or packed weights of each graph begin
    num_layers: int
    y: torch.Tensor  # (B,) float32, NaN without a label or score
    score: torch.Tensor  # (B,) float32, NaN where missing
    question_id: list[str]
    trace_index: torch.Tensor  # (B,) int64
    edge_index: torch.Tensor | None = None  # (2, E) int64, source j to target i; of edges "coo", as edge_attr
    edge_attr: torch.Tensor | None = None  # (E, 1)
    attention: torch.Tensor | None = None  # (sum A,) or (sum H A,); of edges "packed" and "heads", as num_heads
    num_heads: int | None = None

    def __len__(self) -> int:
        return len(self.question_id)

    def to(self, *args: Any, **kwargs: Any) -> "GraphBatch":
        """The batch on a device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {
            name: v.to(*args, **kwargs) for name, v in values.items() if isinstance(v, torch.Tensor)
        }
        return replace(self, **moved)

    def as_pyg(self) -> Any:
        """The PyG Batch of the same tensors; its slices are the ptr tensors themselves."""
        values: dict[str, Any] = {"x": self.x}
        slices: dict[str, torch.Tensor] = {"x": self.ptr}
        incs: dict[str, torch.Tensor | None] = {"x": None}
        if self.edge_index is None:
            values |= {"attention": self.attention, "attention_ptr": self.edge_ptr, "num_heads": self.num_heads}
        else:
            values |= {"edge_index": self.edge_index, "edge_attr": self.edge_attr}
            slices["edge_index"] = slices["edge_attr"] = self.edge_ptr
            incs["edge_index"], incs["edge_attr"] = self.ptr[:-1], None
        for name in ("batch", "ptr", "y", "score", "question_id", "trace_index", "num_layers"):
            values[name] = getattr(self, name)
        kind, base = pyg_classes()
        made = kind.__new__(kind)
        base.__init__(made)
        made._store._mapping.update(values)
        made._num_graphs = len(self.ptr) - 1
        made._slice_dict, made._inc_dict = slices, incs
        return made


@cache
def pyg_classes() -> tuple[Any, Any]:
    """Return the class of PyG's batches of graphs, which Batch(_base_cls=Data) makes anew at every call,
    and Data. The first call imports PyG, which takes seconds. MissingExtraError where it is not installed."""
    with needs("train"):
        from torch_geometric.data import Batch, Data
    return type(Batch(_base_cls=Data)), Data


@dataclass(frozen=True)
class BatchMetadata:
    """What a batch says of its B traces beside their arrays; y and score NaN where missing."""

    y: np.ndarray  # (B,) float32
    score: np.ndarray  # (B,) float32
    question_id: list[str]
    trace_index: np.ndarray  # (B,) int64

    @classmethod
    def of(cls, store: TraceStore, indices: np.ndarray, targets: np.ndarray) -> "BatchMetadata":
        y, score = targets[indices].astype("f4"), store.scores[indices].astype("f4")
        return cls(y, score, store.question_ids.at(indices), indices.copy())

    def tensors(self) -> dict[str, Any]:
        y, score, index = (torch.from_numpy(a) for a in (self.y, self.score, self.trace_index))
        return {"y": y, "score": score, "question_id": self.question_id, "trace_index": index}


@dataclass(frozen=True)
class SequenceLayout:
    """A SequenceBatch in a buffer of memory."""

    shape: tuple[int, int, int]
    dtype: str

    def batch(self, buffer: BatchBuffer, values: BatchMetadata) -> SequenceBatch:
        return SequenceBatch(buffer.tensor(0, self.shape, self.dtype), **values.tensors())


@dataclass(frozen=True)
class GraphLayout:
    """A GraphBatch in a buffer of memory, or with as_pyg a PyG Batch. offsets: where x, edge_index,
    edge weights, batch, ptr and the edges' ptr begin, in bytes."""

    offsets: tuple[int, ...]
    num_layers: int
    num_graphs: int
    num_nodes: int
    num_edges: int
    hidden_dim: int
    dtype: str
    weight_dtype: str
    packed: bool
    num_heads: int
    as_pyg: bool

    def batch(self, buffer: BatchBuffer, values: BatchMetadata) -> Any:
        """See jobs.gather_batch."""
        at_x, at_edges, at_weight, at_owner, at_ptr, at_edge_ptr = self.offsets
        ptr, edge_ptr = (buffer.tensor(at, (self.num_graphs + 1,), "int64") for at in (at_ptr, at_edge_ptr))
        x = buffer.tensor(at_x, (self.num_nodes, self.hidden_dim), self.dtype)
        if self.packed:
            weights = buffer.tensor(at_weight, (self.num_edges,), self.weight_dtype)
            edges: dict[str, Any] = {"attention": weights, "num_heads": self.num_heads}
        else:
            index = buffer.tensor(at_edges, (2, self.num_edges), "int64")
            edges = {"edge_index": index, "edge_attr": buffer.tensor(at_weight, (self.num_edges, 1), self.weight_dtype)}
        owner = buffer.tensor(at_owner, (self.num_nodes,), "int64")
        batch = GraphBatch(x, owner, ptr, edge_ptr, self.num_layers, **values.tensors(), **edges)
        return batch.as_pyg() if self.as_pyg else batch


Layout = SequenceLayout | GraphLayout
