"""Batches, and how their tensors lie in one buffer of memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from tracestore.data.batches.buffers import BatchBuffer
from tracestore.extras import needs

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    BatchT = TypeVar("BatchT", default=Any)
else:
    from typing import TypeVar

    BatchT = TypeVar("BatchT")


@dataclass
class TensorBatch:
    """Base of batches whose fields are tensors, lists and numbers."""

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the batch with `torch.Tensor.to` applied to each tensor; a floating-point dtype leaves integers unchanged."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            found = tensor.to(*args, **kwargs)
            return tensor.to(found.device) if found.is_floating_point() > tensor.is_floating_point() else found

        return self._map(moved)

    def pin_memory(self) -> Self:
        """Return the batch in pinned memory. A DataLoader with ``pin_memory=True`` calls this."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return replace(self, **{name: function(v) for name, v in values if isinstance(v, torch.Tensor)})


@dataclass
class SequenceBatch(TensorBatch):
    """Last-token sequences of B traces.

    A batch also unpacks as the tuple ``(sequences, score, question_id)`` and reads by name,
    ``batch["sequences"]``.

    Attributes
    ----------
    sequences : Tensor, shape (B, L, D)
        Hidden state of the last token in each layer, in the stored or the requested dtype.
    y : Tensor of float32, shape (B,)
        Labels, 1 for a hallucination; NaN without a label or score.
    score : Tensor of float32, shape (B,)
        Scores; NaN where missing.
    question_id : list of str
        Question ids, length B.
    trace_index : Tensor of int64, shape (B,)
        Store indices.
    """

    sequences: torch.Tensor
    y: torch.Tensor
    score: torch.Tensor
    question_id: list[str]
    trace_index: torch.Tensor

    def __len__(self) -> int:
        return len(self.question_id)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.sequences, self.score, self.question_id))

    def __getitem__(self, key: str | int) -> Any:
        return getattr(self, key) if isinstance(key, str) else (self.sequences, self.score, self.question_id)[key]

    def keys(self) -> list[str]:
        """Return the names of the fields."""
        return [field.name for field in fields(self)]


@dataclass
class GraphBatch(TensorBatch):
    """Graphs of B traces and L layers, trace after trace and layer after layer. Needs no PyG.

    N counts the nodes and E the edges of all B * L graphs. The names are those of the PyG Batch
    that `as_pyg` returns, which has `edge_ptr` as `attention_ptr`, and only next to `attention`.

    Attributes
    ----------
    x : Tensor, shape (N, D)
        Hidden states, in the stored or the requested dtype.
    batch : Tensor of int64, shape (N,)
        The graph of each node.
    ptr : Tensor of int64, shape (B * L + 1,)
        The first node of each graph.
    edge_ptr : Tensor of int64, shape (B * L + 1,)
        The first edge, or the first value of `attention`, of each graph.
    num_layers : int
        L.
    y, score : Tensor of float32, shape (B,)
        Labels and scores; NaN where missing.
    question_id : list of str
        Question ids, length B.
    trace_index : Tensor of int64, shape (B,)
        Store indices.
    edge_index : Tensor of int64, shape (2, E), optional
        Source j and target i of each edge. Only with edge format "coo".
    edge_attr : Tensor, shape (E, 1), optional
        Edge weights. Only with edge format "coo".
    attention : Tensor, shape (sum A,) or (sum H * A,), optional
        Causal triangles of A = S (S + 1) / 2 weights. Only with edge formats "packed" and "heads",
        the latter head after head within a graph.
    num_heads : int, optional
        Triangles of a graph. Only together with `attention`.
    in_degree : Tensor of int32, shape (N,), optional
        Edges into each node, at least 1. Only with the loader's option `edge_masks`.
    """

    x: torch.Tensor
    batch: torch.Tensor
    ptr: torch.Tensor
    edge_ptr: torch.Tensor
    num_layers: int
    y: torch.Tensor
    score: torch.Tensor
    question_id: list[str]
    trace_index: torch.Tensor
    edge_index: torch.Tensor | None = None
    edge_attr: torch.Tensor | None = None
    attention: torch.Tensor | None = None
    num_heads: int | None = None
    in_degree: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.question_id)

    def as_pyg(self) -> Any:
        """Return a PyG Batch of the same tensors, without a copy."""
        values: dict[str, Any] = {"x": self.x}
        slices: dict[str, torch.Tensor] = {"x": self.ptr}
        increments: dict[str, torch.Tensor | None] = {"x": None}
        if self.edge_index is None:
            values |= {"attention": self.attention, "attention_ptr": self.edge_ptr, "num_heads": self.num_heads}
        else:
            values |= {"edge_index": self.edge_index, "edge_attr": self.edge_attr}
            slices["edge_index"] = slices["edge_attr"] = self.edge_ptr
            increments["edge_index"], increments["edge_attr"] = self.ptr[:-1], None
        for name in ("batch", "ptr", "y", "score", "question_id", "trace_index", "num_layers"):
            values[name] = getattr(self, name)
        # Batch.from_data_list would copy all tensors. The fields below are what it sets.
        batch_class, data_class = pyg_classes()
        batch = batch_class.__new__(batch_class)
        data_class.__init__(batch)
        batch._store._mapping.update(values)
        batch._num_graphs = len(self.ptr) - 1
        batch._slice_dict, batch._inc_dict = slices, increments
        return batch


@dataclass
class TokenBatch(TensorBatch):
    """Hidden states of B tokens from any traces.

    Attributes
    ----------
    hidden_states : Tensor, shape (B, D) or (B, K, D)
        Hidden states in one layer, or in K > 1 layers, in the stored or the requested dtype.
    y, score : Tensor of float32, shape (B,)
        Label and score of each token's trace; NaN where missing.
    trace_index : Tensor of int64, shape (B,)
        Store index of each token's trace.
    position : Tensor of int64, shape (B,)
        Position of each token in its trace, from 0.
    layers : list of int
        The K layers, counted from the first stored one.
    """

    hidden_states: torch.Tensor
    y: torch.Tensor
    score: torch.Tensor
    trace_index: torch.Tensor
    position: torch.Tensor
    layers: list[int]

    def __len__(self) -> int:
        return len(self.trace_index)


@cache
def pyg_classes() -> tuple[Any, Any]:
    """Return PyG's class of batches of Data, and Data.

    The first call imports PyG, which takes seconds. The result is cached because
    ``Batch(_base_cls=Data)`` makes a new class at every call.

    Raises
    ------
    MissingExtraError
        If PyG is not installed.
    """
    with needs("train"):
        from torch_geometric.data import Batch, Data
    return type(Batch(_base_cls=Data)), Data


@cache
def layer_graph_class() -> type[Any]:
    """Return the class of the graphs of an item: Data whose `trace_index` PyG does not shift when it collates them."""
    _, data_class = pyg_classes()

    class LayerGraph(data_class):  # type: ignore[misc,valid-type]
        """One layer of a trace, with the `y`, `score`, `question_id` and `trace_index` of the trace."""

        def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
            # PyG adds the number of nodes before a graph to each value whose name contains "index".
            return 0 if key == "trace_index" else super().__inc__(key, value, *args, **kwargs)

    # Pickles of worker processes find the class by its name in this module, see __getattr__.
    LayerGraph.__qualname__ = LayerGraph.__name__
    return LayerGraph


def __getattr__(name: str) -> Any:
    if name == "LayerGraph":
        return layer_graph_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(slots=True)
class BatchLayout:
    """Positions of the tensors of a batch in a buffer.

    Parameters
    ----------
    batch_class : type
        SequenceBatch, GraphBatch or TokenBatch.
    tensors : dict
        For each of its tensors the offset in bytes, the shape and the dtype.
    values : dict
        Its fields that are numbers.
    as_pyg : bool
        Make a PyG Batch of a GraphBatch.
    """

    batch_class: type[Any]
    tensors: dict[str, tuple[int, tuple[int, ...], str]]
    values: dict[str, int]
    as_pyg: bool = False

    def batch(self, buffer: BatchBuffer, metadata: dict[str, Any]) -> Any:
        """Return the batch that lies in the buffer; `metadata` holds the other fields, arrays as numpy's."""
        fields: dict[str, Any] = self.values.copy()
        for name, where in self.tensors.items():
            fields[name] = buffer.tensor(*where)
        for name, value in metadata.items():
            fields[name] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        batch = self.batch_class(**fields)
        return batch.as_pyg() if self.as_pyg else batch
