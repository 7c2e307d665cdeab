"""Sources of which each is a task of its own."""

import pytest

from tests.helpers import make_trace, write_pickle
from tracestore.convert import cutting


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch):
    """Make a task of each source."""
    monkeypatch.setattr(cutting, "MIN_BYTES", 1)


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for k in range(6):
        traces = [make_trace(10 * k + i, tokens=3 + i) | {"rare": i, "temperature": 0.5} for i in range(4)]
        write_pickle(folder / f"batch_{k}{'.pkl.gz' if k % 2 else '.pkl'}", traces)
    return folder
