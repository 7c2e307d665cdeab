"""The tiers of the tests: those marked "long" are left out of `make test`."""

import pytest


def long(*values):
    """Return parameters whose tests are marked "long"."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]
