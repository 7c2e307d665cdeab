"""Stores of several formats."""

import pytest

import tracestore
from tests.helpers import make_trace, write_store
from tracestore.store.format import schema


@pytest.fixture(params=["mean", "heads", "square", "zstd", "blosc-zstd", "blosc-lz4", "float32"])
def variant(request, tmp_path):
    """(store, traces) in several formats, lengths 1 to 9."""
    name = request.param
    options = {"attention": "heads" if name == "heads" else "mean", "codec": name if name in schema.CODECS else "none"}
    options["dtype"] = "keep" if name == "float32" else "float16"
    traces = [
        make_trace(
            k, tokens=1 + k * 5 % 9, causal=name != "square" or k % 2 == 0, dtype="f4" if name == "float32" else "f2"
        )
        for k in range(11)
    ]
    write_store(tmp_path / "v.zarr", traces, score=lambda k: None if k == 3 else k / 11, **options)
    return tracestore.open(tmp_path / "v.zarr"), traces
