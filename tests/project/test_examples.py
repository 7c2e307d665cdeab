"""The examples in the docstrings of public names run and print the documented output."""

import doctest
import importlib

import pytest

from tests.helpers import make_traces, write_store

MODULES = {
    "tracestore.data.collate": None,
    "tracestore.data.datasets": None,
    "tracestore.data.loader": None,
    "tracestore.bridges.pyg": "torch_geometric",
    "tracestore.bridges.lightning": "lightning",
    "tracestore.bridges.huggingface": "datasets",
    "tracestore.export.batch_loader": None,
    "tracestore.export.exporter": None,
}


@pytest.fixture
def store_in_current_folder(tmp_path, monkeypatch):
    """store.zarr with 12 traces q0, q1, ... of 3 layers and 8 dimensions."""
    monkeypatch.chdir(tmp_path)
    write_store("store.zarr", make_traces(12), score=lambda k: k % 2)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name, store_in_current_folder, tmp_path, monkeypatch):
    if MODULES[name]:
        pytest.importorskip(MODULES[name])
    if MODULES[name] == "datasets":
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0 and results.attempted > 0
