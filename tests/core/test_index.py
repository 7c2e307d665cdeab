"""Validation of the tables of an index part."""

import numpy as np
import pytest

from tracestore._core.index import KeyTable, build_key_table, find_key


def test_key_table_rejects_inconsistent_arrays():
    ids = np.frombuffer(b"abc", "u1")
    samples = np.zeros(2, "i4")
    with pytest.raises(ValueError, match="match"):
        KeyTable(np.zeros(4, "u4"), np.array([0, 1]), ids, samples)
    for offsets in ([0, 4, 3], [0, 1, 9], [-1, 1, 3]):
        with pytest.raises(ValueError, match="out of bounds"):
            build_key_table(np.zeros(4, "u4"), np.array(offsets), ids, samples)
        with pytest.raises(ValueError, match="corrupt"):
            find_key([KeyTable(np.full(4, 1 if offsets[0] else 2, "u4"), np.array(offsets), ids, samples)], b"x", 0)
    with pytest.raises(ValueError, match="size"):
        KeyTable(np.zeros(3, "u4"), np.array([0, 1, 3]), ids, samples)
    with pytest.raises(ValueError, match="size"):
        build_key_table(np.zeros(2, "u4"), np.array([0, 1, 3]), ids, samples)
