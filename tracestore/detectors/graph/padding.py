"""Pad batches of graphs, so that batches of about the same size have tensors of the same shapes.

A CUDA graph repeats operations on tensors whose shapes cannot change. Rows behind the last graph pad x; they belong to
no graph, have no edges, and are read by no readout, so that they change neither the loss nor its gradient.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from tracestore.data.batches.buffers import copy_together
from tracestore.detectors.graph.gine_op import CHUNK_BYTES
from tracestore.detectors.graph.inputs import GraphInputs

# Normalizations of a row by itself: statistics of several rows would include those that pad.
_BY_ROW = ("layer", "none")
_LEAST, _LEAST_WEIGHTS = 256, 1 << 16


def padded_length(length: int) -> int:
    """Return a length rounded up by at most an eighth, and at least 256."""
    step = 1 << max(4, length.bit_length() - 4)
    return max(_LEAST, -(-length // step) * step)


def can_pad(inputs: GraphInputs) -> bool:
    """Return whether prepared inputs of a detector can be padded: packed edges, rows that do not mix."""
    index = inputs.index
    if index is None or inputs.edge_index is not None or index.config.normalization not in _BY_ROW:
        return False
    # The operators would split a larger batch at other graphs than the next batch.
    row_bytes = 4 * max(inputs.x.shape[1], index.config.gnn_hidden)
    return padded_length(len(inputs.x)) * row_bytes <= CHUNK_BYTES["cuda"]


def to_padded(
    inputs: GraphInputs, device: torch.device, more: Sequence[torch.Tensor] = ()
) -> tuple[GraphInputs, list[torch.Tensor]]:
    """Return a padded copy on a GPU of inputs that `can_pad`, in the memory of the host, and copies of more tensors."""
    index = inputs.index
    assert index is not None
    N, encoded = len(inputs.x), index.ptr[-1]
    num_x = padded_length(N)
    is_last = index.config.pooling == "last"  # the rows that are encoded or read are the result, one for each graph
    num_encoded = num_x if index.gathered is None else encoded if is_last else padded_length(encoded)

    def rows(values: torch.Tensor | None, among: int, length: int | None = None) -> torch.Tensor | None:
        """Return row numbers, followed by different ones, because equal ones make a gradient slow."""
        if values is None:
            return None
        length = min(_power_of_two(len(values)), among) if length is None else length
        return _concatenated(values, np.arange(length - len(values)) % among)

    def fill(values: torch.Tensor | None, length: int, value: int) -> torch.Tensor | None:
        return None if values is None else _concatenated(values, np.full(length - len(values), value))

    small = {
        "node_ptr": inputs.node_ptr,
        "weight_ptr": inputs.weight_ptr,
        "answer": inputs.answer,
        "in_degree": fill(inputs.in_degree, num_x, 1),
    }
    small_index = {
        "graph": fill(index.graph, num_encoded, len(index.ptr) - 2),
        "layer": fill(index.layer, num_encoded, inputs.held_layers[0]),
        "node_ptr": index.node_ptr,
        "sizes": index.sizes,
        "gathered": rows(index.gathered, N, num_encoded),
        "rows": index.rows if is_last else rows(index.rows, num_encoded),
        "counts": index.counts,
        "skip_rows": rows(index.skip_rows, num_x),
        "skip_counts": index.skip_counts,
    }
    given = [t for t in (*small.values(), *small_index.values()) if t is not None]
    moved = iter(copy_together([*given, *more], device, non_blocking=True))
    on_device, index_on_device = (
        {name: None if t is None else next(moved) for name, t in tensors.items()} for tensors in (small, small_index)
    )
    x = torch.empty(num_x, inputs.x.shape[1], dtype=inputs.x.dtype, device=device)
    x[:N].copy_(inputs.x, non_blocking=True)
    x[N:].zero_()
    # No kernel reads behind the last triangle.
    num_weights = max(_LEAST_WEIGHTS, _power_of_two(len(inputs.weight)))
    weight = torch.empty(num_weights, dtype=inputs.weight.dtype, device=device)
    weight[: len(inputs.weight)].copy_(inputs.weight, non_blocking=True)
    # What the host knows of the rows must not differ between batches of the same shapes.
    ptr = (0,) * (len(index.ptr) - 1) + (num_encoded,)
    padded = replace(index, ptr=ptr, **index_on_device)  # type: ignore[arg-type]
    return replace(inputs, x=x, weight=weight, index=padded, **on_device), list(moved)  # type: ignore[arg-type]


def _concatenated(values: torch.Tensor, more: np.ndarray) -> torch.Tensor:
    # torch.cat would start threads, which takes longer than the copy.
    known = values.numpy()
    return torch.from_numpy(np.concatenate([known, more.astype(known.dtype)]))


def _power_of_two(length: int) -> int:
    return max(_LEAST, 1 << max(0, length - 1).bit_length())
