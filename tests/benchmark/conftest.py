"""Fixtures of the tests of the benchmark."""

from tests.detectors.published.conftest import own_cache, published_store, store
from tests.evaluation.conftest import sampled

__all__ = ["own_cache", "published_store", "sampled", "store"]
