"""The options `layers` and `positions` of the views "sequence" and "graph"."""

import numpy as np
import pytest
import torch

import tracestore
from tests.helpers import convert, make_traces, write_pickle, write_store
from tests.store.format.store_kinds import graphs_of, sequences_of
from tracestore.errors import MissingFieldError, UsageError

LAYERS = [1, [2], [2, 0], [0, -1]]


def numbers(layers, num_layers=3):
    """Return the chosen layers, counted from the first."""
    return [n % num_layers for n in ([layers] if isinstance(layers, int) else layers)]


@pytest.mark.parametrize(
    ("layers", "position"), [*((layers, "last") for layers in LAYERS), (None, 0), (None, -1), ([2, 0], 0)]
)
def test_sequences_hold_the_chosen_layers_and_position(variant, layers, position):
    store, _ = variant
    options = {"layers": layers, "positions": position}
    at = -1 if position == "last" else position
    expected = [t.hidden_states[slice(None) if layers is None else numbers(layers), at] for t in store]
    for batch in tracestore.TraceLoader(store, "sequence", **options, batch_size=4):
        for index, sequence in zip(batch.trace_index.tolist(), batch.sequences, strict=True):
            np.testing.assert_array_equal(sequence.numpy(), expected[index])
    np.testing.assert_array_equal(tracestore.TraceDataset(store, **options)[4][0].numpy(), expected[4])


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("edge_format", ["coo", "packed", "heads"])
def test_graphs_of_chosen_layers_are_those_of_a_batch_of_all(variant, layers, edge_format):
    store, _ = variant
    if edge_format != "coo" and store.attention_layout == "square":
        pytest.skip("packed edges need causal attention")
    options = {"batch_size": 4, "edge_format": edge_format, "attention_threshold": 0.3, "as_pyg": False}
    whole = tracestore.TraceLoader(store, "graph", **options)
    chosen = tracestore.TraceLoader(store, "graph", layers=layers, **options)
    for every, some in zip(whole, chosen, strict=True):
        count = len(numbers(layers))
        assert some.num_layers == count and len(some.ptr) == len(some) * count + 1
        for g in range(len(some) * count):
            h = g // count * 3 + numbers(layers)[g % count]
            nodes, same = slice(*some.ptr[g : g + 2]), slice(*every.ptr[h : h + 2])
            edges, same_edges = slice(*some.edge_ptr[g : g + 2]), slice(*every.edge_ptr[h : h + 2])
            assert torch.equal(some.x[nodes], every.x[same]) and (some.batch[nodes] == g).all()
            if edge_format == "coo":
                assert torch.equal(
                    some.edge_index[:, edges] - some.ptr[g], every.edge_index[:, same_edges] - every.ptr[h]
                )
                assert torch.equal(some.edge_attr[edges], every.edge_attr[same_edges])
            else:
                assert torch.equal(some.attention[edges], every.attention[same_edges])


def test_layers_of_a_store_of_edges(tmp_path):
    traces = make_traces(5, tokens=4)
    convert(write_pickle(tmp_path / "graphs.pkl", graphs_of(traces)), tmp_path / "s.zarr")
    loader = tracestore.TraceLoader(
        tmp_path / "s.zarr", "graph", layers=[2, 0], batch_by="edges", max_batch_cost=10**6, shuffle="none"
    )
    (batch,) = loader
    (whole,) = tracestore.TraceLoader(tmp_path / "s.zarr", "graph", shuffle="none")
    some, every = batch.to_data_list(), whole.to_data_list()
    assert len(some) == 10 and len({graph.num_edges for graph in some}) > 1
    for g, graph in enumerate(some):
        expected = every[g // 2 * 3 + [2, 0][g % 2]]
        for name in ("x", "edge_index", "edge_attr"):
            assert torch.equal(graph[name], expected[name])


def test_costs_count_the_chosen_layers(tmp_path):
    write_store(tmp_path / "s.zarr", make_traces(12, tokens=5))
    for by, whole, one in (("nodes", 15, 5), ("edges", 45, 15)):
        for layers, cost in ((None, whole), ([1], one)):
            loader = tracestore.TraceLoader(
                tmp_path / "s.zarr", "graph", layers=layers, batch_by=by, max_batch_cost=2 * cost
            )
            assert len(loader) == 6, (by, layers)


def test_sequence_files_give_layers_of_their_last_tokens_only(tmp_path):
    traces = make_traces(4, tokens=5)
    convert(write_pickle(tmp_path / "sequences.pkl", sequences_of(traces)), tmp_path / "s.zarr")
    loader = tracestore.TraceLoader(tmp_path / "s.zarr", layers=[1], shuffle="none")
    (batch,) = loader
    np.testing.assert_array_equal(batch.sequences[:, 0].numpy(), [t["hidden_states"][1][-1] for t in traces])
    with pytest.raises(MissingFieldError, match="no hidden states of all tokens"):
        tracestore.TraceLoader(tmp_path / "s.zarr", positions=0)


@pytest.mark.parametrize(
    "view,options,message",
    [
        ("graph", {"positions": "answer"}, "view 'graph' takes all tokens"),
        ("sequence", {"positions": "answer"}, "view 'sequence' takes 'last' or one integer"),
        ("sequence", {"positions": [0, 1]}, "view 'sequence' takes 'last' or one integer"),
        ("graph", {"layers": [3]}, "different ones of 3"),
        ("sequence", {"layers": [-4]}, "different ones of 3"),
    ],
)
def test_a_choice_that_a_view_does_not_take_is_refused(tmp_path, view, options, message):
    write_store(tmp_path / "s.zarr", make_traces(3))
    with pytest.raises(UsageError, match=message):
        tracestore.TraceLoader(tmp_path / "s.zarr", view, **options)


def test_a_trace_that_ends_before_the_position_is_named(tmp_path):
    write_store(tmp_path / "s.zarr", make_traces(3, tokens=lambda k: 3 - k))
    loader = tracestore.TraceLoader(tmp_path / "s.zarr", positions=2, shuffle="none", num_threads=0)
    with pytest.raises(UsageError, match=r"^trace 1 \(q1\) has 2 tokens and none at position 2"):
        list(loader)


def test_a_store_without_traces_has_no_batches(tmp_path):
    with tracestore.create(tmp_path / "s.zarr") as writer:
        writer.set_lens(np.ones((5, 8), "f4"))
    for layers in (None, 0, [1, -1]):
        assert list(tracestore.TraceLoader(tmp_path / "s.zarr", layers=layers)) == []
