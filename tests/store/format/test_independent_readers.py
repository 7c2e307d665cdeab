"""Stored arrays are readable without tracestore: by zarr, tensorstore, zarrs, and a reader written from the docs."""

import numpy as np
import zarr

import tracestore
from tests.store.second_reader import read_store


def test_other_zarr_libraries_read_the_arrays(store_path):
    import tensorstore

    arrays = [p.parent for p in store_path.rglob("zarr.json") if '"array"' in p.read_text()]
    assert len(arrays) > 40
    for folder in arrays:
        with_zarr = zarr.open_array(folder, mode="r")[...]
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/"}}
        with_tensorstore = tensorstore.open(spec, read=True).result().read().result()
        np.testing.assert_array_equal(with_zarr, with_tensorstore)
        assert with_zarr.dtype == with_tensorstore.dtype
        with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
            np.testing.assert_array_equal(with_zarr, zarr.open_array(folder, mode="r")[...])


def test_a_reader_written_from_the_docs_reads_the_traces(store_path):
    store, second = tracestore.open(store_path), read_store(store_path)
    assert len(second) == len(store)
    for mine, theirs in zip(store, second, strict=True):
        assert mine.question_id == theirs["question_id"]
        np.testing.assert_array_equal(mine.hidden_states, theirs["hidden_states"])
        np.testing.assert_array_equal(mine.attention, theirs["attention"])
        np.testing.assert_array_equal(mine.last_token, theirs["last_token"])
