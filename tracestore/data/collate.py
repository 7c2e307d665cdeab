"""Items of TraceDataset, and collate functions that make batches of them."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from tracestore.data.batch import SequenceBatch
from tracestore.extras import needs

if TYPE_CHECKING:
    from torch_geometric.data import Batch, Data


class SequenceItem(tuple[torch.Tensor, float, str]):
    """The tuple (sequence (L, D), score, question_id) with the attributes `y` and `trace_index`."""

    y: float
    trace_index: int

    @classmethod
    def make(cls, sequence: torch.Tensor, score: float, question_id: str, y: float, index: int) -> "SequenceItem":
        """Return the item of one trace."""
        item = cls((sequence, score, question_id))
        item.y, item.trace_index = y, index
        return item


class GraphItem(list["Data"]):
    """List of L PyG Data with the attributes `score`, `y`, `question_id` and `trace_index`."""

    score: float
    y: float
    question_id: str
    trace_index: int


def collate_sequences(items: Sequence[Any], score_threshold: float = 0.5) -> SequenceBatch:
    """Collate items of view "sequence" into a batch.

    Parameters
    ----------
    items : sequence of (Tensor (L, D), float, str)
        B items of a `TraceDataset`, or plain tuples (sequence, score, question_id).
    score_threshold : float
        Makes `y` of plain tuples: 1 where the score is below. Their `trace_index` is -1.

    Returns
    -------
    SequenceBatch
        The batch, with sequences (B, L, D).

    Examples
    --------
    >>> import torch, tracestore
    >>> batch = tracestore.collate_sequences([(torch.zeros(3, 8), 0.2, "q0"), (torch.zeros(3, 8), 0.9, "q1")])
    >>> batch.sequences.shape, batch.y
    (torch.Size([2, 3, 8]), tensor([1., 0.]))
    """
    scores = [float(item[1]) for item in items]
    derived = [math.nan if math.isnan(s) else float(s < score_threshold) for s in scores]
    return SequenceBatch(
        sequences=torch.stack([item[0] for item in items]),
        y=torch.tensor([getattr(item, "y", y) for item, y in zip(items, derived, strict=True)]),
        score=torch.tensor(scores),
        question_id=[item[2] for item in items],
        trace_index=torch.tensor([getattr(item, "trace_index", -1) for item in items]),
    )


def collate_graphs(items: "Sequence[Sequence[Data]]") -> "Batch":
    """Collate items of view "graph" into a batch.

    Parameters
    ----------
    items : sequence of list of torch_geometric.data.Data
        B items of a `TraceDataset`, each with one Data per layer.

    Returns
    -------
    torch_geometric.data.Batch
        B * L graphs, trace after trace and layer after layer, with `y` and `score` (B,), the list
        `question_id`, `trace_index` (B,) and `num_layers`.

    Raises
    ------
    MissingExtraError
        If PyG is not installed.

    Examples
    --------
    >>> import tracestore
    >>> from torch.utils.data import DataLoader
    >>> dataset = tracestore.TraceDataset("store.zarr", view="graph")
    >>> batch = next(iter(DataLoader(dataset, batch_size=4, collate_fn=tracestore.collate_graphs)))
    >>> batch.num_graphs == 4 * batch.num_layers
    True
    """
    with needs("train"):
        from torch_geometric.data import Batch

    batch = Batch.from_data_list([layer for item in items for layer in item])
    batch.num_layers = len(items[0])
    batch.y = torch.tensor([float(getattr(item, "y", math.nan)) for item in items])
    batch.score = torch.tensor([float(getattr(item, "score", math.nan)) for item in items])
    batch.question_id = [getattr(item, "question_id", "") for item in items]
    batch.trace_index = torch.tensor([getattr(item, "trace_index", -1) for item in items])
    return batch


def _collate_sequence_items(items: Sequence[SequenceItem], *, collate_fn_map: Any = None) -> SequenceBatch:
    return collate_sequences(items)


def _collate_graph_items(items: Sequence[GraphItem], *, collate_fn_map: Any = None) -> "Batch":
    return collate_graphs(items)


# torch's default_collate looks the type of an item up here, so that a DataLoader needs no collate_fn.
default_collate_fn_map[SequenceItem] = _collate_sequence_items
default_collate_fn_map[GraphItem] = _collate_graph_items
