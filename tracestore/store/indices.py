"""Numbers of traces, tokens or ids that a caller gives."""

from collections.abc import Sequence

import numpy as np

from tracestore.errors import UsageError


def checked_indices(values: Sequence[int] | np.ndarray, name: str = "indices") -> np.ndarray:
    """Return integers as a contiguous array (n,) int64.

    UsageError for other values, which numpy would convert: a mask is no list of zeros and ones.
    """
    found = np.asarray(values)
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise UsageError(f"found {name} of {found.dtype} and shape {found.shape}, expected a list of integers")
    return np.ascontiguousarray(found, np.int64)
