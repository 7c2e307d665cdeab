"""Fixtures of the tests of detectors."""

from tests.train.conftest import labelled

__all__ = ["labelled"]
