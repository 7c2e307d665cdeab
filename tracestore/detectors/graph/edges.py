"""The edges of the graphs of a batch, as the fused operators take them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch


class Edges(NamedTuple):
    """The edge arguments of the operators in gine_op, in their order; gine_op describes them."""

    node_ptr: torch.Tensor
    weight: torch.Tensor
    weight_ptr: torch.Tensor
    source: torch.Tensor | None
    target: torch.Tensor | None
    threshold: float
    degree: torch.Tensor | None = None
    graph: torch.Tensor | None = None
    ptr: Sequence[int] | None = None

    def check(self, num_rows: int, channels: int, *, lists: bool) -> None:
        """Raise ValueError where pointers do not fit `num_rows` rows of x or, with `lists`, edges leave their graphs.

        A GPU finishes its work first, and the host waits for it. Edges with `ptr` have been checked.
        """
        pairs = self._check_tensors(channels)
        node_ptr, weight, weight_ptr, source, *_ = self
        if self.ptr is not None:
            return
        nodes, weights = (pointers.cpu().numpy() for pointers in (node_ptr, weight_ptr))
        sizes, room = np.diff(nodes), np.diff(weights)
        needed = channels * (sizes * (sizes + 1) // 2) if source is None else 0 * sizes
        fits = nodes[0] >= 0 and weights[0] >= 0 and (sizes >= 0).all() and (room >= needed).all()
        if not fits or nodes[-1] - nodes[0] != num_rows or weights[-1] > len(weight):
            raise ValueError("node_ptr or weight_ptr does not fit x and the weights")
        if pairs and lists:
            begin, end = int(weights[0]), int(weights[-1])
            graph = torch.repeat_interleave(weight_ptr.diff(), output_size=end - begin)
            low, high = node_ptr[:-1][graph], node_ptr[1:][graph]
            inside = [((t[begin:end] >= low) & (t[begin:end] < high)).all() for t in pairs]
            if not bool(inside[0] & inside[1]):
                raise ValueError("an edge leaves its graph")

    def _check_tensors(self, channels: int) -> list[torch.Tensor]:
        """Check dtypes and shapes, and return source and target if there are edge lists."""
        node_ptr, weight, weight_ptr, source, target, *_ = self
        if (source is None) != (target is None):
            raise ValueError("source and target must be given together")
        if source is not None and channels > 1:
            raise ValueError("edge lists have one weight per edge")
        pairs = [t for t in (source, target) if t is not None]
        if any(t.dtype != torch.int64 for t in (node_ptr, weight_ptr, *pairs)) or not weight.is_floating_point():
            raise ValueError("pointers and edges must be int64, weights floating point")
        if node_ptr.ndim != 1 or len(node_ptr) < 1 or node_ptr.shape != weight_ptr.shape or weight.ndim != 1:
            raise ValueError("node_ptr and weight_ptr must be (G + 1,)")
        if any(t.shape != weight.shape for t in pairs):
            raise ValueError("source, target and weights must have one entry per edge")
        return pairs
