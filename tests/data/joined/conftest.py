"""Stores that are opened as one, and the store that `merge` makes of them."""

import shutil

import pytest

import tracestore
from tests.helpers import make_trace, write_store
from tracestore.store.maintain.merge import merge_stores


@pytest.fixture(scope="session")
def written_pair(tmp_path_factory):
    """Write two stores without a common key, of several segments each, and their merged store, into a folder."""
    folder, traces = tmp_path_factory.mktemp("pair"), [make_trace(k, tokens=1 + k * 5 % 9) for k in range(31)]
    first = write_store(folder / "a.zarr", traces[:12], score=lambda k: None if k == 3 else k / 12, commit_after=(4,))
    second = write_store(
        folder / "b.zarr", traces[12:], score=lambda k: k / 19, label=lambda k: k % 2, commit_after=(2, 9)
    )
    merge_stores([first, second], folder / "merged.zarr")
    return folder


@pytest.fixture
def pair(tmp_path, written_pair):
    """Paths of copies of the three stores."""
    shutil.copytree(written_pair, tmp_path, dirs_exist_ok=True)
    return tmp_path / "a.zarr", tmp_path / "b.zarr", tmp_path / "merged.zarr"


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
