"""Fixtures of the tests of the benchmark."""

import pytest

from tests.evaluation.conftest import sampled

__all__ = ["sampled"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Keep cached features in the folder of the test."""
    monkeypatch.setenv("TRACESTORE_CACHE_DIR", str(tmp_path / "cache"))
