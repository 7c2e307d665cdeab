"""Wrong values of small arrays, with correct checksums."""

import pytest

import tracestore
from tests.helpers import make_traces, write_store
from tests.malicious_inputs.stores import Store
from tracestore.errors import CorruptStoreError
from tracestore.export.exporter import export_store
from tracestore.store.format import schema
from tracestore.store.maintain.merge import merge_stores


def _store_with(folder, name, value):
    """Write a store whose index has a wrong value for its first trace."""
    path = write_store(folder / "store.zarr", make_traces(4))
    store = Store(path)
    arrays = store.part(0)
    arrays[name][0] = value
    store.set_part(0, arrays)
    store.seal()
    return path


@pytest.mark.parametrize("format", ["pkl", "pt-gnn", "safetensors"])
def test_token_counts_are_checked_before_the_free_space(tmp_path, format):
    path = _store_with(tmp_path, "num_tokens", 1 << 19)
    with tracestore.open(path) as store, pytest.raises(CorruptStoreError, match="num_tokens: differs from"):
        export_store(store, tmp_path / "out", format=format)


def test_token_counts_are_checked_before_a_merge(tmp_path):
    path = _store_with(tmp_path, "num_tokens", 1 << 19)
    with pytest.raises(CorruptStoreError, match="num_tokens: differs from"):
        merge_stores([path], tmp_path / "merged.zarr")


def test_rows_beyond_a_segment_are_found_by_a_search_of_texts(tmp_path):
    pytest.importorskip("tornado")
    from tracestore.serve.search import FoldedTexts

    path = _store_with(tmp_path, "graph_row", 255)
    with tracestore.open(path) as store, pytest.raises(CorruptStoreError, match="row 255 of 4"):
        FoldedTexts(store)


def test_texts_of_tokens_that_end_before_they_begin(tmp_path):
    path = write_store(tmp_path / "store.zarr", make_traces(4))
    store = Store(path)
    (segment,) = store.segments()
    arrays = store.arrays(f"{segment}/rows.zip", schema.ROW_DTYPES)
    arrays["tokens_decoded_ptr"][1] = arrays["tokens_decoded_ptr"][2] + 1
    store.set_rows(segment, arrays)
    store.reseal()
    store.seal()
    with tracestore.open(path) as opened, pytest.raises(CorruptStoreError, match="tokens_decoded_offsets: items"):
        list(opened[1].tokens_decoded)


@pytest.mark.parametrize("name", ["num_layers", "hidden_dim", "hidden_dtype"])
def test_shapes_that_are_unknown_in_a_store_with_traces(tmp_path, name):
    path = write_store(tmp_path / "store.zarr", make_traces(4))
    store = Store(path)
    store.manifest["attributes"][name] = None
    store.seal()
    with pytest.raises(CorruptStoreError, match=f"{name}.*in a store with traces"):
        tracestore.open(path)
