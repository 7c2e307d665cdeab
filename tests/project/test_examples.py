"""The examples in the docstrings of public names run and print the documented output."""

import doctest
import importlib
import inspect
import re

import pytest

import tracestore
from tests.helpers import ROOT, make_traces, write_store

API = (ROOT / "docs/api.md").read_text(encoding="utf-8")
MODULES = {
    "tracestore.store.trace_fields": None,
    "tracestore.store.format.provenance": None,
    "tracestore.store.read.store": None,
    "tracestore.store.read.subset": "pandas",
    "tracestore.store.read.trace": None,
    "tracestore.store.write.create": None,
    "tracestore.oom.guard": None,
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


def public_objects():
    """Return the public functions and classes, without exceptions, by name."""
    found = {name: getattr(tracestore, name) for name in tracestore.__all__}
    return {name: o for name, o in found.items() if callable(o) and not issubclass_of(o, BaseException)}


def issubclass_of(value, kind):
    return inspect.isclass(value) and issubclass(value, kind)


def documented_methods(name, kind):
    """Return the methods that docs/api.md shows of a class: its members, or all that are public."""
    methods = [f for n, f in inspect.getmembers(kind, inspect.isfunction) if not n.startswith("_")]
    listed = re.search(
        rf"^::: tracestore\.{name}\n    options:\n(?:      .*\n)*?      members: \[(.*)\]", API, re.MULTILINE
    )
    return methods if listed is None else [f for f in methods if f.__name__ in listed[1].split(", ")]


def test_every_public_name_has_types_documented_parameters_and_an_example():
    for name, value in public_objects().items():
        assert f"::: tracestore.{name}\n" in API and "\n    Examples\n" in value.__doc__, name
        for function in [value] if inspect.isfunction(value) else documented_methods(name, value):
            where, text = f"{name}.{function.__name__}", function.__doc__
            assert "return" in function.__annotations__, where
            for parameter in list(inspect.signature(function).parameters.values())[inspect.isclass(value) :]:
                assert parameter.annotation is not inspect.Parameter.empty, where
                listed = rf"^ +(?:[\w*]+, )*\*{{0,2}}{parameter.name}(?:, \w+)*(?: :|$)"
                assert "; see `" in text or re.search(listed, text, re.MULTILINE), f"{where}: {parameter.name}"


def test_dir_shows_public_names_only():
    assert dir(tracestore) == sorted(tracestore.__all__)
    assert all(hasattr(tracestore, name) for name in dir(tracestore))
