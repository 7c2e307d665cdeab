"""Helpers of the tests of the core: element types, raw bytes and numpy oracles."""

import numpy as np

from tracestore._core import kernels

CODES = {"f2": kernels.F16, "f4": kernels.F32, "f8": kernels.F64}


def raw(array):
    """Return the bytes of an array as uint8."""
    return np.ascontiguousarray(array).reshape(-1).view("u1")


def largest(weights, fraction):
    """Return flags of the weights that a top-k rule keeps. NaN is never kept."""
    k = min(max(1, int(np.ceil(fraction * len(weights) - 1e-9))), len(weights))
    keep = np.zeros(len(weights), bool)
    keep[np.argsort(-weights.astype("f8"), kind="stable")[:k]] = True
    return keep & ~np.isnan(weights)


def oracle_edges(square, causal, threshold, top_k):
    """Return source, target and weight of the edges of one layer, row by row."""
    tokens = len(square)
    target, source = np.tril_indices(tokens) if causal else (i.reshape(-1) for i in np.indices(square.shape))
    weight = square[target, source]
    if top_k:
        keep = largest(weight, top_k)
    else:
        keep = weight.astype("f8") > threshold
    return source[keep], target[keep], weight[keep]
