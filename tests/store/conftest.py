"""Fixtures of the tests of stores."""

import os

import pytest

from tests.helpers import make_traces, write_pickle


@pytest.fixture
def single_generation(store_path):
    """A store with one generation, so that a reader has no predecessor to fall back to."""
    for name in sorted(os.listdir(store_path / "manifest"))[:-1]:
        (store_path / "manifest" / name).unlink()
    return store_path


@pytest.fixture
def source(tmp_path):
    """A file with one trace that the store lacks."""
    return write_pickle(tmp_path / "more.pkl", [t | {"question_id": "new"} for t in make_traces(1)])
