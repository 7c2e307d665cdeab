"""Fixtures of the tests of the benchmark."""

from tests.detectors.published.conftest import own_cache
from tests.evaluation.conftest import sampled

__all__ = ["own_cache", "sampled"]
