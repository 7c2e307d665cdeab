"""Stored arrays are readable without tracestore: by zarr, tensorstore, zarrs, and a reader written from the docs."""

import re

import numpy as np
import zarr

import tracestore
from tests.helpers import ROOT, make_optional, make_traces, write_store
from tests.store.second_reader import RAGGED, read_store
from tracestore.store.format import schema


def read_with_tensorstore(kvstore):
    import tensorstore

    return tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result().read().result()


def test_other_zarr_libraries_read_the_large_arrays(store_path):
    arrays = [p.parent for p in store_path.rglob("zarr.json") if '"array"' in p.read_text()]
    assert len(arrays) == 6
    for folder in arrays:
        with_zarr = zarr.open_array(folder, mode="r")[...]
        with_tensorstore = read_with_tensorstore({"driver": "file", "path": f"{folder}/"})
        np.testing.assert_array_equal(with_zarr, with_tensorstore)
        assert with_zarr.dtype == with_tensorstore.dtype
        with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
            np.testing.assert_array_equal(with_zarr, zarr.open_array(folder, mode="r")[...])


def test_other_zarr_libraries_read_the_small_arrays(store_path):
    files = sorted(store_path.rglob("*.zip"))
    assert len(files) == 6
    for path in files:
        with zarr.storage.ZipStore(path, mode="r") as file:
            arrays = {name: array[...] for name, array in zarr.open_group(file, mode="r").arrays()}
        for name, with_zarr in arrays.items():
            kvstore = {"driver": "zip", "base": f"file://{path}", "path": f"{name}/"}
            with_tensorstore = read_with_tensorstore(kvstore)
            np.testing.assert_array_equal(with_zarr, with_tensorstore)
            assert with_zarr.dtype == with_tensorstore.dtype


def test_a_reader_written_from_the_docs_reads_the_traces(store_path):
    store, second = tracestore.open(store_path), read_store(store_path)
    assert len(second) == len(store)
    for mine, theirs in zip(store, second, strict=True):
        assert mine.question_id == theirs["question_id"]
        np.testing.assert_array_equal(mine.hidden_states, theirs["hidden_states"])
        np.testing.assert_array_equal(mine.attention, theirs["attention"])
        np.testing.assert_array_equal(mine.last_token, theirs["last_token"])


def test_a_reader_written_from_the_docs_reads_the_optional_fields(tmp_path):
    traces = make_traces(4, tokens=4)
    traces[1] |= make_optional(4) | {"spans": [{"start": 0, "end": 2, "type": "x"}]}
    second = read_store(write_store(tmp_path / "s.zarr", traces))
    for name in {*RAGGED, "temperature", "seed"}:
        np.testing.assert_array_equal(second[1][name], traces[1][name])
    assert (second[1]["answer_begin"], second[1]["answer_end"]) == traces[1]["answer_span"]
    assert second[0].keys() & schema.OPTIONAL_FIELDS.keys() == {"temperature", "seed"}
    assert np.isnan(second[0]["temperature"]) and second[0]["seed"] == second[0]["answer_begin"] == -1
    np.testing.assert_array_equal(second[3]["tokens"], traces[3]["tokens"])


def key_hash(question_id, sample):
    """Return the hash of docs/format.md, in plain Python."""
    value = 0xCBF29CE484222325
    for byte in question_id.encode() + sample.to_bytes(4, "little"):
        value = (value ^ byte) * 0x100000001B3 % 2**64
    value ^= value >> 32
    return value * 0x9E3779B97F4A7C15 % 2**64 ^ value >> 29


def test_the_hash_of_the_docs_finds_the_traces(tmp_path):
    for row in re.findall(r"\| (\S+) \| (\d) \| ([0-9a-f]{16}) \|", (ROOT / "docs/format.md").read_text()):
        assert f"{key_hash(row[0], int(row[1])):016x}" == row[2]
    with tracestore.create(tmp_path / "s.zarr") as writer:
        for trace in make_traces(40, tokens=2):
            for sample in (0, 3):
                writer.append(trace | {"sample": sample})
    with zarr.storage.ZipStore(tmp_path / "s.zarr/index/0000000001.zip", mode="r") as file:
        index = {name: array[:] for name, array in zarr.open_group(file, mode="r").arrays()}
    table, offsets = index["key_table"].tolist(), index["id_offsets"]
    assert len(table) == 256
    for row in range(80):
        question_id, sample = index["id"][offsets[row] : offsets[row + 1]].tobytes().decode(), int(index["sample"][row])
        slot = key_hash(question_id, sample) % len(table)
        while table[slot] != row + 1:
            assert table[slot] != 0, (question_id, sample)
            slot = (slot + 1) % len(table)
