"""Fixtures of the tests of detectors."""

from tests.train.conftest import labeled

__all__ = ["labeled"]
