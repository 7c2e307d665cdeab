"""Fixtures of the tests of whole training runs."""

from tests.evaluation.conftest import sampled
from tests.train.conftest import driver, labeled

__all__ = ["driver", "labeled", "sampled"]
