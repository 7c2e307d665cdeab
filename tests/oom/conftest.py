"""Fixtures of the tests of out-of-memory recovery."""

import gc

import pytest


@pytest.fixture(scope="module")
def young_heap():
    """Freeze the objects that exist already: the guard collects garbage thousands of times here."""
    gc.collect()
    gc.freeze()
