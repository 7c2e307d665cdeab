"""Validation of the tables of an index part."""

import numpy as np
import pytest

from tracestore._core.index import LocationTable, build_key_table
from tracestore.store.format.manifest import PART_DTYPES


def location_table(table, offsets, ids, samples):
    """Return the table of one part, whose traces have no locations."""
    arrays = {name: np.zeros(0 if name.startswith("patch_") else len(samples), d) for name, d in PART_DTYPES.items()}
    arrays |= {"key_table": table, "id_offsets": np.array(offsets), "id": ids, "sample": samples}
    return LocationTable([(0, arrays, None, 0, 0, 0, 1)])


def test_key_table_rejects_inconsistent_arrays():
    ids = np.frombuffer(b"abc", "u1")
    samples = np.zeros(2, "i4")
    with pytest.raises(ValueError, match="size"):
        location_table(np.zeros(4, "u4"), [0, 1], ids, samples)
    for offsets in ([0, 4, 3], [0, 1, 9], [-1, 1, 3]):
        with pytest.raises(ValueError, match="out of bounds"):
            build_key_table(np.zeros(4, "u4"), np.array(offsets), ids, samples)
        with pytest.raises(ValueError, match="corrupt"):
            location_table(np.full(4, 1 if offsets[0] else 2, "u4"), offsets, ids, samples).find(b"x", 0)
    with pytest.raises(ValueError, match="size"):
        location_table(np.zeros(3, "u4"), [0, 1, 3], ids, samples)
    for table, offsets in ((np.zeros(2, "u4"), [0, 1, 3]), (np.zeros(4, "u4"), [0, 1])):
        with pytest.raises(ValueError, match="size"):
            build_key_table(table, np.array(offsets), ids, samples)
