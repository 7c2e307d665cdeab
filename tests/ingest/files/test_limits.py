"""Test what the values of a file may decode to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracestore.errors import InvalidInputError
from tracestore.ingest.files.limits import Limits, max_inflated


@given(st.integers(0, 1 << 40), st.integers(1, 200))
def test_arrays_of_a_compressed_file_are_limited_by_its_bytes_on_disk(disk_bytes, ratio):
    """A file inside that is compressed again does not multiply the two ratios."""
    inflated_bytes = min(disk_bytes * ratio, max_inflated(disk_bytes))
    limits = Limits(lambda: inflated_bytes, disk_bytes)
    limits.charge(0, inflated_bytes)
    with pytest.raises(InvalidInputError, match="exceed the file many times"):
        limits.charge(0, 4 * max_inflated(disk_bytes))


@given(st.integers(0, 1 << 40))
def test_arrays_of_another_file_may_be_named_for_each_layer(file_bytes):
    Limits(lambda: file_bytes).charge(0, 100 * file_bytes)
