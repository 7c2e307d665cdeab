"""A store for tests of bridges."""

import pytest

from tests.bridges.stores import make_store


@pytest.fixture
def path(tmp_path):
    return make_store(tmp_path / "s.zarr")
