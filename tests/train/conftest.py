"""Fixtures of the tests of training."""

import gc

import pytest


@pytest.fixture(scope="module")
def young_heap():
    """The guard collects garbage thousands of times here; what was there before need not be looked at."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
