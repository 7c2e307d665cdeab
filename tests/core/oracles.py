"""Helpers of the tests of the core: element types, raw bytes and numpy oracles."""

import numpy as np

from tracestore._core import kernels

CODES = {"f2": kernels.F16, "f4": kernels.F32, "f8": kernels.F64}


def raw(array):
    """Return the bytes of an array as uint8."""
    return np.ascontiguousarray(array).reshape(-1).view("u1")


def oracle_edges(square, causal, threshold, top_k):
    """Return source, target and weight of the edges of one layer, row by row."""
    tokens = len(square)
    target, source = np.tril_indices(tokens) if causal else (i.reshape(-1) for i in np.indices(square.shape))
    weight = square[target, source]
    if top_k:
        k = min(max(1, int(np.ceil(top_k * len(weight) - 1e-9))), len(weight))
        keep = np.zeros(len(weight), bool)
        keep[np.argsort(-weight.astype("f8"), kind="stable")[:k]] = True
        keep &= ~np.isnan(weight)  # NaN is never an edge
    else:
        keep = weight.astype("f8") > threshold
    return source[keep], target[keep], weight[keep]
