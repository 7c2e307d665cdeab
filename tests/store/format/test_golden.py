"""Stores of format version 1 stay readable, by tracestore and by an independent reader."""

import shutil

import numpy as np
import pytest

import tracestore
from tests.golden.make_golden import layered_traces
from tests.helpers import ROOT, convert, make_graphs, make_traces, tree_bytes
from tests.store.second_reader import read_store
from tracestore.store.maintain.verify import verify_store

GOLDEN = ROOT / "tests/golden"


@pytest.mark.parametrize("name", ["v1_heads.zarr", "v1_edges.zarr", "v1_bfloat16.zarr", "v1_layers.zarr"])
def test_golden_stores_are_intact(name):
    assert verify_store(GOLDEN / name).damaged == {}


@pytest.mark.parametrize("read", ["tracestore", "second reader"])
def test_stores_of_pickles_are_readable(read):
    traces = make_traces(5)
    store = tracestore.open(GOLDEN / "v1_heads.zarr")
    assert store.question_ids == [t["question_id"] for t in traces]
    np.testing.assert_array_equal(store.scores, [0.25, np.nan, np.nan, 0.75, np.nan])
    second = read_store(GOLDEN / "v1_heads.zarr")
    for k, trace in enumerate(traces):
        hidden = store[k].hidden_states if read == "tracestore" else second[k]["hidden_states"]
        attention = store[k].attention if read == "tracestore" else second[k]["attention"]
        assert hidden.tobytes() == np.stack(trace["hidden_states"]).tobytes()
        assert attention.tobytes() == np.stack(trace["attentions"]).tobytes()


def test_stores_of_graphs_and_sequences_are_readable():
    store, second = tracestore.open(GOLDEN / "v1_edges.zarr"), read_store(GOLDEN / "v1_edges.zarr")
    assert len(store) == 5 and store.labels.tolist() == [0, 1, 1, 0, 1]
    for k, trace in enumerate(make_traces(5)):
        for (index, weight), layer in zip(second[k]["edges"], make_graphs(trace), strict=True):
            np.testing.assert_array_equal(index, layer.edge_index.numpy())
            np.testing.assert_array_equal(weight, layer.edge_attr.numpy()[:, 0])
        np.testing.assert_array_equal(store[k].last_token, np.stack(trace["hidden_states"])[:, -1])


def test_a_store_with_checksums_of_layers_and_a_layout_is_readable():
    """Its segments, index parts and columns have hashes in their names."""
    with tracestore.open(GOLDEN / "v1_layers.zarr") as store:
        second, traces = read_store(GOLDEN / "v1_layers.zarr"), layered_traces()
        assert store.question_ids == [t["question_id"] for t in traces] and store.generation == 2
        assert store.internals.attributes.layouts == ('hidden_states = "{id}.npz : hs -> L S D"\n',)
        for k, trace in enumerate(traces):
            expected = np.stack(trace["hidden_states"]).tobytes()
            assert store[k].hidden_states.tobytes() == second[k]["hidden_states"].tobytes() == expected
        segments = [store.internals.segment(k) for k in range(2)]
        assert [len(s.layers["hidden_states"].crcs) for s in segments] == [2, 4]
        assert all(len(s.name) == len("segments/") + 32 for s in segments)


def test_golden_inputs_make_the_golden_store(tmp_path):
    """The same sources and options give the same bytes of segments in all versions; only their names differ."""
    inputs = tmp_path / "inputs"
    shutil.copytree(GOLDEN / "inputs", inputs)
    shutil.rmtree(inputs / "preprocessed")
    convert(inputs, tmp_path / "s.zarr", "--attention", "heads")
    mine, golden = tree_bytes(tmp_path / "s.zarr"), tree_bytes(GOLDEN / "v1_heads.zarr")
    for folder, first_part in (("segments", 2), ("columns", 2), ("zarr.json", 0)):
        found, expected = (
            {"/".join(name.split("/")[first_part:]): data for name, data in files.items() if name.startswith(folder)}
            for files in (mine, golden)
        )
        assert found == expected and found, folder
