"""Derive positions of rows and graphs from the lengths and layers of a batch, once for each batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tracestore.data.batches.batch import TensorBatch
from tracestore.detectors.layers.model_config import ModelConfig, Pooling


def _expand(begin: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return the integers of the ranges begin[k] .. begin[k] + count[k], one range after the other."""
    ends = count.cumsum()
    expanded: np.ndarray = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(begin - (ends - count), count)
    return expanded


def readout(ptr: np.ndarray, answer: np.ndarray | None, pooling: Pooling) -> tuple[np.ndarray | None, np.ndarray]:
    """Return the rows of x that a readout reads, graph after graph, and their number in each graph.

    Parameters
    ----------
    ptr : numpy.ndarray
        ``(G + 1,)`` int64, the rows of each graph, from 0.
    answer : numpy.ndarray, optional
        ``(G, 2)`` int64, first token of the answer of each graph and the one after its last.
    pooling : {"answer", "all", "last"}
        "answer" is "all" without `answer`.

    Returns
    -------
    rows : numpy.ndarray or None
        ``(R,)`` int64; None for all rows.
    counts : numpy.ndarray
        ``(G,)`` int64.
    """
    if pooling == "last":
        return ptr[1:] - 1, np.ones(len(ptr) - 1, np.int64)
    if pooling == "all" or answer is None:
        return None, np.diff(ptr)
    begin, end = answer.T
    return _expand(ptr[:-1] + begin, end - begin), end - begin


@dataclass
class GraphIndex(TensorBatch):
    """Positions of the rows and graphs of a batch, for one detector.

    Parameters
    ----------
    config : ModelConfig
        Of the detector.
    ptr : tuple of int
        G + 1 numbers: the rows of each graph among the N that the encoder computes, from 0.
    graph, layer : torch.Tensor
        ``(N,)`` int64, the graph of each row, and the layer of the language model.
    node_ptr : torch.Tensor
        ``(G + 1,)`` int64, `ptr` as a tensor.
    sizes : torch.Tensor
        ``(G,)`` int64, the rows of each graph.
    gathered : torch.Tensor or None
        ``(N,)`` int64, the rows of x that the encoder computes. None: all.
    rows : torch.Tensor or None
        ``(R,)`` int64, the rows that the readout reads. None: all.
    counts : torch.Tensor
        ``(G,)`` int64, the rows that the readout reads of each graph.
    skip_rows, skip_counts : torch.Tensor or None
        The same for the rows of x that ``config.skip`` averages.
    """

    config: ModelConfig
    ptr: tuple[int, ...]
    graph: torch.Tensor
    layer: torch.Tensor
    node_ptr: torch.Tensor
    sizes: torch.Tensor
    gathered: torch.Tensor | None
    rows: torch.Tensor | None
    counts: torch.Tensor
    skip_rows: torch.Tensor | None = None
    skip_counts: torch.Tensor | None = None

    @classmethod
    def build(
        cls, config: ModelConfig, ptr: np.ndarray, answer: np.ndarray | None, layers: Sequence[int]
    ) -> "GraphIndex":
        """Return the index of a batch in the memory of the host.

        Parameters
        ----------
        config : ModelConfig
        ptr : numpy.ndarray
            ``(G + 1,)`` int64, the rows of each graph, from 0.
        answer : numpy.ndarray, optional
            ``(B, 2)`` int64, see `readout`.
        layers : sequence of int
            The layers that the graphs of each trace belong to.
        """
        if answer is not None:
            answer = np.repeat(answer, len(layers), axis=0)
        gathered = None
        rows, counts = readout(ptr, answer, config.pooling)
        skip: tuple[np.ndarray | None, np.ndarray | None] = (None, None)
        if config.skip != "none":
            skip = (rows, counts) if config.skip == config.pooling else readout(ptr, answer, config.skip)
        if not config.edges and config.normalization in ("layer", "none"):
            # Each token is computed by itself: the others have no effect on the readout.
            gathered, rows = rows, None
            ptr = np.concatenate([[0], counts.cumsum()])
        graphs = np.arange(len(ptr) - 1)
        graph_layers = np.tile(np.array(layers, np.int64), (len(ptr) - 1) // len(layers))
        sizes = np.diff(ptr)
        arrays = np.repeat(graphs, sizes), np.repeat(graph_layers, sizes), ptr, sizes, gathered, rows, counts, *skip
        tensors = [None if a is None else torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]
        return cls(config, tuple(ptr.tolist()), *tensors)  # type: ignore[arg-type]
