"""All input formats, pickle protocols and containers that libraries write, bit for bit."""

import itertools

import numpy as np
import pytest
import torch

import tracestore
from tests.helpers import (
    as_torch,
    convert,
    error_of,
    make_graphs,
    make_trace,
    make_traces,
    read_traces,
    write_pickle,
    write_store,
)
from tests.store.second_reader import read_store
from tracestore.ingest.pickles import pickle_reader


def assert_store_holds(store_path, traces, heads):
    """Assert that a store, read by the second reader, holds the traces bit for bit."""
    second = read_store(store_path)
    assert [t["question_id"] for t in second] == [t["question_id"] for t in traces]
    for theirs, trace in zip(second, traces, strict=True):
        hidden = np.stack(trace["hidden_states"])
        assert theirs["hidden_states"].tobytes() == hidden.tobytes()
        assert theirs["last_token"].tobytes() == hidden[:, -1].tobytes()
        if heads:
            assert theirs["attention"].tobytes() == np.stack(trace["attentions"]).tobytes()


@pytest.mark.parametrize("suffix", [".pkl", ".pkl.gz"])
@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_pickles_bit_for_bit(tmp_path, suffix, protocol, library):
    traces = make_traces(6)
    source = traces if library == "numpy" else [as_torch(t) for t in traces]
    path = write_pickle(tmp_path / f"traces{suffix}", source, protocol)
    convert(path, tmp_path / "s.zarr", "--attention", "heads")
    assert_store_holds(tmp_path / "s.zarr", traces, heads=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("suffix", [".pkl", ".pkl.gz"])
def test_dtype_keep_bit_for_bit(tmp_path, dtype, suffix):
    traces = [as_torch(t, getattr(torch, dtype)) for t in make_traces(5, dtype="f4")]
    write_pickle(tmp_path / f"traces{suffix}", traces, 4)
    convert(tmp_path / f"traces{suffix}", tmp_path / "s.zarr", "--dtype", "keep", "--attention", "heads")
    store = tracestore.open(tmp_path / "s.zarr")
    assert store.hidden_dtype == store.attention_dtype == dtype
    for mine, theirs, trace in zip(store, read_store(tmp_path / "s.zarr"), traces, strict=True):
        hidden, attention = torch.stack(trace["hidden_states"]), torch.stack(trace["attentions"])
        bits = torch.int16 if dtype == "bfloat16" else torch.int32
        for got, expected in ((theirs["hidden_states"], hidden), (theirs["attention"], attention)):
            assert got.tobytes() == expected.float().numpy().tobytes()
        assert mine.hidden_states_bits.tobytes() == hidden.view(bits).numpy().tobytes()
        batch = tracestore.TraceLoader(store, "graph", batch_size=1, indices=[mine.index])
        graph = next(iter(batch))
        assert graph.x.dtype == hidden.dtype and torch.equal(graph.x, hidden.reshape(-1, hidden.shape[-1]))


@pytest.mark.parametrize("zip_format", [True, False])
def test_sequences_bit_for_bit(tmp_path, zip_format):
    sequences = torch.randn(7, 3, 8).half()
    labels = torch.tensor([0.0, 1, 1, 0, float("nan"), 1, 0])
    value = {"sequences": sequences, "labels": labels, "question_ids": [f"q{k}" for k in range(7)]}
    (tmp_path / "lstm_solo").mkdir()
    torch.save(value, tmp_path / "lstm_solo/preprocessed_0.pt", _use_new_zipfile_serialization=zip_format)
    convert(tmp_path / "lstm_solo", tmp_path / "s.zarr")
    store = tracestore.open(tmp_path / "s.zarr")
    for k, theirs in enumerate(read_store(tmp_path / "s.zarr")):
        assert theirs["last_token"].tobytes() == sequences[k].numpy().tobytes()
    np.testing.assert_array_equal(store.labels, labels.numpy())
    with pytest.raises(tracestore.MissingFieldError, match="last tokens only"):
        tracestore.TraceDataset(store, view="graph")


@pytest.mark.parametrize("zip_format", [True, False])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("labeled", [True, False])
def test_graphs_bit_for_bit(tmp_path, zip_format, reverse, labeled):
    traces = make_traces(5)
    graphs = [make_graphs(t, reverse=reverse) for t in traces]
    for layer in itertools.chain(*graphs):
        layer.numbers = torch.arange(3)
    value = {"graphs": graphs, "question_ids": [t["question_id"] for t in traces]}
    if labeled:
        value["labels"] = [0.0, 1.0, 0.0, 1.0, 1.0]
    torch.save(value, tmp_path / "sharded_data_part_0.pt", _use_new_zipfile_serialization=zip_format)
    convert(tmp_path / "sharded_data_part_0.pt", tmp_path / "s.zarr")
    store = tracestore.open(tmp_path / "s.zarr")
    for k, theirs in enumerate(read_store(tmp_path / "s.zarr")):
        assert theirs["hidden_states"].tobytes() == np.stack(traces[k]["hidden_states"]).tobytes()
        for (index, weight), layer in zip(theirs["edges"], graphs[k], strict=True):
            expected = layer.edge_index.flip(0) if reverse else layer.edge_index
            if len(traces[k]["tokens"]) > 1:
                np.testing.assert_array_equal(index, expected.numpy())
            assert weight.tobytes() == layer.edge_attr.numpy().tobytes()
        assert store[k].extras["filter_ratio"] == [layer.filter_ratio for layer in graphs[k]]
        np.testing.assert_array_equal(store[k].extras["numbers"], [[0, 1, 2]] * len(graphs[k]))
        np.testing.assert_array_equal(store[k].last_token, np.stack(traces[k]["hidden_states"])[:, -1])
    assert np.isnan(store.labels).all() != labeled
    batch = next(iter(tracestore.TraceLoader(store, "graph", batch_size=5, shuffle="none")))
    assert (batch.edge_index[0] <= batch.edge_index[1]).all() and batch.num_graphs == 15


@pytest.mark.parametrize("one_by_one", [False, True])
def test_sequences_and_graphs_are_one_trace_each(tmp_path, one_by_one):
    traces = make_traces(6)
    ids = [t["question_id"] for t in traces]
    labels = [0.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    for name in ("gnn", "lstm_solo"):
        (tmp_path / "pre" / name).mkdir(parents=True)
    graphs = {"graphs": [make_graphs(t) for t in traces], "labels": labels, "question_ids": ids}
    torch.save(graphs, tmp_path / "pre/gnn/preprocessed_0.pt")
    # The values differ from the last rows of the graphs, to show which of them are read.
    sequences = torch.stack([torch.from_numpy(np.stack(t["hidden_states"])[:, -1]) for t in traces]) + 1
    torch.save(
        {"sequences": sequences, "labels": labels, "question_ids": ids}, tmp_path / "pre/lstm_solo/preprocessed_0.pt"
    )
    if one_by_one:
        convert(tmp_path / "pre/lstm_solo", tmp_path / "s.zarr")
        convert(tmp_path / "pre/gnn", tmp_path / "s.zarr")
    else:
        convert(tmp_path / "pre", tmp_path / "s.zarr")
    store = tracestore.open(tmp_path / "s.zarr")
    assert len(store) == 6 and sorted(store.question_ids) == sorted(ids)
    for trace in store:
        k = ids.index(trace.question_id)
        np.testing.assert_array_equal(trace.last_token, sequences[k].numpy())
        np.testing.assert_array_equal(trace.hidden_states, np.stack(traces[k]["hidden_states"]))
        assert trace.label == labels[k]
    store.require_view("graph")


def test_older_files_get_question_ids_from_other_fields(tmp_path):
    traces = make_traces(3)
    for k, trace in enumerate(traces):
        del trace["question_id"]
        trace |= {
            "question": f"why {k}?",
            "prompt_length": 1,
            "batch_number": 4,
            "cutoff_method": "eos",
            "example_id": k,
        }
        if k < 2:
            trace["global_example_id"] = 100 + k
        trace["logits"] = np.arange(3, dtype="f4")
    write_pickle(tmp_path / "llama2_chat_7B_triviaqa_batch_0004.pkl", traces)
    done = convert(tmp_path / "llama2_chat_7B_triviaqa_batch_0004.pkl", tmp_path / "s.zarr")
    assert "left out: **/*.pkl : []/logits" in done.stdout
    store = tracestore.open(tmp_path / "s.zarr")
    assert store.question_ids == ["100", "101", "llama2_chat_7B_triviaqa_batch_0004.pkl:2"]
    assert store[1].question == "why 1?" and store[1].prompt_length == 1
    assert store[1].extras["cutoff_method"] == "eos" and "logits" not in store[1].extras
    assert store[2].source == ("llama2_chat_7B_triviaqa_batch_0004.pkl", 2)


@pytest.mark.parametrize("suffix", [".pkl", ".pkl.gz"])
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_payloads_of_finished_traces_are_released(tmp_path, monkeypatch, suffix, protocol, library):
    """Reading is correct if no payload outlives its trace."""
    monkeypatch.setattr(pickle_reader, "RETAINED_BYTES", 0)
    traces = make_traces(4, tokens=9, dim=512)
    source = traces if library == "numpy" else [as_torch(t) for t in traces]
    path = write_pickle(tmp_path / f"t{suffix}", source, protocol)
    for record, trace in zip(read_traces(path, "t"), traces, strict=True):
        np.testing.assert_array_equal(np.stack(record.hidden), np.stack(trace["hidden_states"]))
        np.testing.assert_array_equal(np.stack(record.attention), np.stack(trace["attentions"]))


def test_one_array_may_stand_for_all_layers(tmp_path):
    """Files made by hand hold such an array once."""
    trace = make_trace(0, tokens=300, layers=1, dim=1024, heads=4)
    many = trace | {name: [trace[name][0]] * 40 for name in ("hidden_states", "attentions")}
    for suffix in (".pkl", ".pkl.gz"):
        (record,) = read_traces(write_pickle(tmp_path / f"t{suffix}", [many]), "t")
        assert len(record.hidden) == 40
        np.testing.assert_array_equal(record.hidden[39], trace["hidden_states"][0])


@pytest.mark.parametrize("kind", ["pickle", "torch.save", "in memory"])
def test_lazily_negated_tensors_never_lose_their_sign(tmp_path, kind):
    """The imaginary part of a conjugate is a view with torch's negative bit."""
    trace = as_torch(make_trace(0, dtype="f4"))
    values = torch.stack(trace["hidden_states"])
    lazy = torch.complex(torch.zeros_like(values), -values).conj().imag
    assert lazy.is_neg() and torch.equal(lazy, values)
    trace["hidden_states"] = list(lazy)
    assert all(layer.is_neg() for layer in trace["hidden_states"])
    path = tmp_path / ("a.pt" if kind == "torch.save" else "a.pkl")
    if kind == "in memory":
        write_store(tmp_path / "s.zarr", [trace], dtype="keep")
        with tracestore.open(tmp_path / "s.zarr") as store:
            assert np.array_equal(store[0].last_token, values[:, -1].numpy())
        return
    if kind == "pickle":
        write_pickle(path, [trace])
    else:
        sequences = lazy[None, :, -1]
        torch.save({"sequences": sequences, "labels": torch.zeros(1), "question_ids": ["q0"]}, path)
    assert "resolve_neg()" in error_of("convert", path, tmp_path / "s.zarr", code=3)
