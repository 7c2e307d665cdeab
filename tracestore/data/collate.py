"""Items of TraceDataset, a sampler of their indices, and collate functions that make batches of them."""

import math
from collections.abc import Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Sampler
from torch.utils.data._utils.collate import default_collate_fn_map

from tracestore.data.batches.batch import SequenceBatch, layer_graph_class, pyg_classes
from tracestore.data.epoch import rank_and_world_size
from tracestore.data.order import EpochOrder, whole_number
from tracestore.extras import needs

if TYPE_CHECKING:
    from torch_geometric.data import Batch, Data


class SequenceItem(tuple[torch.Tensor, float, str]):
    """The tuple (sequence (L, D), score, question_id) with the attributes `y` and `trace_index`."""

    y: float
    trace_index: int


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

    batch = Batch.from_data_list([_without_trace(layer) for item in items for layer in item])
    batch.num_layers = len(items[0])
    batch.y = torch.tensor([float(getattr(item, "y", math.nan)) for item in items])
    batch.score = torch.tensor([float(getattr(item, "score", math.nan)) for item in items])
    batch.question_id = [getattr(item, "question_id", "") for item in items]
    batch.trace_index = torch.tensor([getattr(item, "trace_index", -1) for item in items])
    return batch


def _without_trace(graph: "Data") -> "Data":
    """Return a graph of an item without the values of its trace, which a batch has once per trace."""
    _, data_class = pyg_classes()
    if not isinstance(graph, layer_graph_class()):
        return graph
    names = ("y", "score", "question_id", "trace_index")
    plain: Data = data_class.from_dict({k: v for k, v in graph.to_dict().items() if k not in names})
    return plain


# torch's default_collate looks the type of an item up here, so that a DataLoader needs no collate_fn.
default_collate_fn_map[SequenceItem] = lambda items, *, collate_fn_map=None: collate_sequences(items)
default_collate_fn_map[GraphItem] = lambda items, *, collate_fn_map=None: collate_graphs(items)


class ShuffleBufferSampler(Sampler[int]):
    """Sampler of indices in the order of a shuffle buffer.

    Indices enter a window of `buffer_size` in store order, and a random one leaves it at each step.
    An epoch has each index once, split exactly over the ranks. The memory is O(buffer_size)
    indices; no trace is held.

    Parameters
    ----------
    n : int or sized object
        Number of indices, or the dataset, store or subset that has this length.
    buffer_size : int
        Indices of the window.
    seed : int
        Seed of the order.
    rank, world_size : int, optional
        This rank and the number of ranks. By default from torch.distributed if it is initialized,
        else from the environment variables RANK and WORLD_SIZE.

    Raises
    ------
    UsageError
        For a number outside its range.

    Examples
    --------
    >>> import tracestore
    >>> sampler = tracestore.ShuffleBufferSampler(5, buffer_size=2, seed=1)
    >>> sorted(sampler)
    [0, 1, 2, 3, 4]
    >>> sampler.set_epoch(1)  # another order
    """

    def __init__(
        self,
        n: int | Sized,
        buffer_size: int = 1000,
        seed: int = 0,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        n = len(n) if isinstance(n, Sized) else n
        self.n, self.buffer_size = whole_number("n", n, 0), whole_number("buffer_size", buffer_size, 1)
        self.seed, self.epoch = whole_number("seed", seed), 0
        self.rank, self.world_size = rank_and_world_size(rank, world_size)

    def __repr__(self) -> str:
        return f"ShuffleBufferSampler({self.n} indices, buffer_size={self.buffer_size}, seed={self.seed})"

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which selects the order.

        Parameters
        ----------
        epoch : int
        """
        self.epoch = whole_number("epoch", epoch)

    def __len__(self) -> int:
        return len(range(self.rank, self.n, self.world_size))

    def __iter__(self) -> Iterator[int]:
        epoch = EpochOrder(self.n, self.seed, self.epoch, "buffer", self.buffer_size)
        return iter(epoch.ids_at(np.arange(self.rank, self.n, self.world_size)).tolist())
