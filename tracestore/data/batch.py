"""Batches: what they look like, and how their tensors lie in one piece of memory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Batch, Data

from tracestore.data.memory import Piece
from tracestore.store.reader import TraceStore


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


# What Batch(_base_cls=Data) makes an instance of; that call looks at signatures every time.
GRAPH_BATCH: Any = type(Batch(_base_cls=Data))


@dataclass(frozen=True)
class Values:
    """What a batch says of its B traces beside their arrays; y and score NaN where missing."""

    y: np.ndarray  # (B,) float32
    score: np.ndarray  # (B,) float32
    question_id: list[str]
    trace_index: np.ndarray  # (B,) int64

    @classmethod
    def of(cls, store: TraceStore, indices: np.ndarray, targets: np.ndarray) -> "Values":
        y, score = targets[indices].astype("f4"), store.scores[indices].astype("f4")
        return cls(y, score, store.question_ids.at(indices), indices.copy())

    def tensors(self) -> dict[str, Any]:
        y, score, index = (torch.from_numpy(a) for a in (self.y, self.score, self.trace_index))
        return {"y": y, "score": score, "question_id": self.question_id, "trace_index": index}


@dataclass(frozen=True)
class SequenceLayout:
    """A SequenceBatch in a piece of memory."""

    shape: tuple[int, int, int]
    dtype: str

    def batch(self, piece: Piece, values: Values) -> SequenceBatch:
        return SequenceBatch(piece.tensor(0, self.shape, self.dtype), **values.tensors())


@dataclass(frozen=True)
class GraphLayout:
    """A graph Batch in a piece of memory. offsets: where x, edge_index, edge weights,
    batch, ptr and the edges' ptr begin, in bytes."""

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

    def batch(self, piece: Piece, values: Values) -> Batch:
        """See jobs.gather_batch; the slices of to_data_list are the ptr tensors themselves."""
        at_x, at_edges, at_weight, at_owner, at_ptr, at_edge_ptr = self.offsets
        ptr, edge_ptr = (piece.tensor(at, (self.num_graphs + 1,), "int64") for at in (at_ptr, at_edge_ptr))
        x = piece.tensor(at_x, (self.num_nodes, self.hidden_dim), self.dtype)
        fields: dict[str, Any] = {"x": x}
        slices: dict[str, torch.Tensor] = {"x": ptr}
        incs: dict[str, torch.Tensor | None] = {"x": None}
        if self.packed:
            fields["attention"] = piece.tensor(at_weight, (self.num_edges,), self.weight_dtype)
            fields["attention_ptr"] = edge_ptr
            fields["num_heads"] = self.num_heads
        else:
            fields["edge_index"] = piece.tensor(at_edges, (2, self.num_edges), "int64")
            fields["edge_attr"] = piece.tensor(at_weight, (self.num_edges, 1), self.weight_dtype)
            slices["edge_index"] = slices["edge_attr"] = edge_ptr
            incs["edge_index"], incs["edge_attr"] = ptr[:-1], None
        fields["batch"], fields["ptr"] = piece.tensor(at_owner, (self.num_nodes,), "int64"), ptr
        fields.update(values.tensors())
        fields["num_layers"] = self.num_layers
        batch = GRAPH_BATCH.__new__(GRAPH_BATCH)
        Data.__init__(batch)
        batch._store._mapping.update(fields)
        batch._num_graphs = self.num_graphs
        batch._slice_dict, batch._inc_dict = slices, incs
        return batch


Layout = SequenceLayout | GraphLayout
