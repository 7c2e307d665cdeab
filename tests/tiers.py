"""Test tiers: `make test` excludes the tests with the mark "long"."""

import pytest


def long(*values):
    """Return parameters of `parametrize` whose tests have the mark "long"."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]
