"""Fixtures of the tests of whole training runs."""

from tests.train.conftest import driver, labelled

__all__ = ["driver", "labelled"]
