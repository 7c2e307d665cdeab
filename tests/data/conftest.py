"""Stores of several formats."""

import functools

import pytest

import tracestore
from tests.helpers import make_trace, write_store
from tracestore.store.format import schema


@pytest.fixture(scope="session")
def write_variant(tmp_path_factory):
    """Return a function that writes a store of a format and returns its path and its traces, lengths 1 to 9."""
    return functools.cache(lambda name: _write_variant(name, tmp_path_factory.mktemp("variant") / "v.zarr"))


def _write_variant(name, path):
    options = {"attention": "heads" if name == "heads" else "mean", "codec": name if name in schema.CODECS else "none"}
    options["dtype"] = "keep" if name == "float32" else "float16"
    traces = [
        make_trace(
            k, tokens=1 + k * 5 % 9, causal=name != "square" or k % 2 == 0, dtype="f4" if name == "float32" else "f2"
        )
        for k in range(11)
    ]
    return write_store(path, traces, score=lambda k: None if k == 3 else k / 11, **options), traces


@pytest.fixture(params=["mean", "heads", "square", "zstd", "blosc-zstd", "blosc-lz4", "float32"])
def variant(request, write_variant):
    """(store, traces) in several formats, which no test changes."""
    path, traces = write_variant(request.param)
    return tracestore.open(path), traces
