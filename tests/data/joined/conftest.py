"""Stores that are opened as one, and the store that `merge` makes of them."""

import pytest

import tracestore
from tests.helpers import make_trace, write_store
from tracestore.store.maintain.merge import merge_stores


@pytest.fixture
def pair(tmp_path):
    """Paths of two stores without a common key, of several segments each, and of their merged store."""
    traces = [make_trace(k, tokens=1 + k * 5 % 9) for k in range(31)]
    first = write_store(tmp_path / "a.zarr", traces[:12], score=lambda k: None if k == 3 else k / 12, commit_after=(4,))
    second = write_store(
        tmp_path / "b.zarr", traces[12:], score=lambda k: k / 19, label=lambda k: k % 2, commit_after=(2, 9)
    )
    merge_stores([first, second], tmp_path / "merged.zarr")
    return first, second, tmp_path / "merged.zarr"


@pytest.fixture
def joined(pair):
    """The two stores as one, and the merged one, both open."""
    with tracestore.open(pair[:2]) as one, tracestore.open(pair[2]) as merged:
        yield one, merged


@pytest.fixture(scope="module")
def joined_paths(tmp_path_factory):
    """Paths of two stores, for property tests."""
    folder, traces = tmp_path_factory.mktemp("joined"), [make_trace(k) for k in range(31)]
    return [write_store(folder / "a", traces[:12]), write_store(folder / "b", traces[12:], commit_after=(3,))]
