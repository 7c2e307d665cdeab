"""Collate functions for torch.utils.data.DataLoader over TraceDataset."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tracestore.data.batch import SequenceBatch
from tracestore.extras import needs

if TYPE_CHECKING:
    from torch_geometric.data import Batch, Data


class SequenceItem(tuple[torch.Tensor, float, str]):
    """(sequence (L, D), score, question_id), with `y` and `trace_index` beside."""

    y: float
    trace_index: int

    @classmethod
    def make(cls, sequence: torch.Tensor, score: float, question_id: str, y: float, index: int) -> "SequenceItem":
        item = cls((sequence, score, question_id))
        item.y, item.trace_index = y, index
        return item


class GraphItem(list["Data"]):
    """List of L PyG Data, with `score`, `y`, `question_id` and `trace_index` beside."""

    score: float
    y: float
    question_id: str
    trace_index: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _graph_item, (list(self), dict(self.__dict__))


def _graph_item(layers: "list[Data]", values: dict[str, Any]) -> GraphItem:
    item = GraphItem(layers)
    item.__dict__.update(values)
    return item


def collate_sequences(items: Sequence[Any], score_threshold: float = 0.5) -> SequenceBatch:
    """Items of view "sequence" -> SequenceBatch. Items that are plain tuples get y from
    their score (1 where score < score_threshold) and trace_index -1."""
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
    """Items of view "graph" -> one PyG Batch of B * L graphs with y, score (B,),
    question_id, trace_index (B,) and num_layers (see data.jobs.gather_batch)."""
    with needs("train"):
        from torch_geometric.data import Batch

    batch = Batch.from_data_list([layer for item in items for layer in item])
    batch.num_layers = len(items[0])
    batch.y = torch.tensor([float(getattr(item, "y", math.nan)) for item in items])
    batch.score = torch.tensor([float(getattr(item, "score", math.nan)) for item in items])
    batch.question_id = [getattr(item, "question_id", "") for item in items]
    batch.trace_index = torch.tensor([getattr(item, "trace_index", -1) for item in items])
    return batch
