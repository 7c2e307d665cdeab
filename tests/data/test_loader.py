"""TraceLoader: values of batches, exact epochs and exact continuation."""

import json
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tracestore
from tests.core.oracles import oracle_edges
from tests.helpers import make_trace, make_traces, write_store
from tracestore.errors import MissingFieldError, UsageError
from tracestore.store.format import schema

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def expected_graph(store, index, rule):
    """Yield x, edge_index and edge_attr of each layer of a trace, in numpy."""
    trace = store[index]
    mean = trace.attention_mean
    causal = trace.attention_layout == "causal"
    for layer in range(store.num_layers):
        square = np.zeros((trace.num_tokens, trace.num_tokens), mean.dtype)
        if causal:
            square[np.tril_indices(trace.num_tokens)] = mean[layer]
        else:
            square[:] = mean[layer].reshape(square.shape)
        source, target, weight = oracle_edges(square, causal, *rule)
        yield trace.hidden_states[layer], np.stack([source, target]), weight


@pytest.mark.parametrize("threshold,top_k", [(0.0, None), (0.4, None), (0.0, 0.3)])
@pytest.mark.parametrize("num_threads", [0, 3])
def test_graph_batches_equal_the_oracle(variant, threshold, top_k, num_threads):
    store, _ = variant
    loader = tracestore.TraceLoader(
        store, "graph", batch_size=4, num_threads=num_threads, attention_threshold=threshold, top_k=top_k
    )
    seen = []
    for batch in loader:
        assert batch.num_graphs == len(batch.y) * store.num_layers == len(batch.ptr) - 1
        data = batch.to_data_list()
        for k, index in enumerate(batch.trace_index.tolist()):
            seen.append(index)
            for layer, (x, edges, weight) in enumerate(expected_graph(store, index, (threshold, top_k or 0.0))):
                got = data[k * store.num_layers + layer]
                np.testing.assert_array_equal(got.x.numpy(), x)
                np.testing.assert_array_equal(got.edge_index.numpy(), edges)
                np.testing.assert_array_equal(got.edge_attr.numpy()[:, 0], weight)
            assert batch.question_id[k] == store.question_ids[index]
            y = float(batch.y[k])
            assert np.isnan(y) if index == 3 else y == float(store.scores[index] < 0.5)
        copy = pickle.loads(pickle.dumps(batch))
        assert torch.equal(copy.edge_index, batch.edge_index) and torch.equal(batch.to("cpu").x, batch.x)
    assert sorted(seen) == list(range(11))


@pytest.mark.long
@given(
    st.integers(0, 2**16),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.integers(1, 3),
    st.sampled_from([1, 3, 8, 33]),
    st.sampled_from(schema.CODECS),
    st.sampled_from(["coo", "packed"]),
    st.sampled_from([(0.0, None), (0.4, None), (0.0, 0.3), (0.0, 1.0)]),
    st.sampled_from([None, "float32"]),
)
@settings(max_examples=40, deadline=None)
def test_every_field_equals_the_oracle(seed, sizes, layers, dim, codec, edges, rule, dtype):
    """One trace, one layer, one token, odd sizes; equal weights for ties."""
    with tempfile.TemporaryDirectory() as name:
        with tracestore.create(Path(name) / "s.zarr", codec=codec) as writer:
            for k, tokens in enumerate(sizes):
                trace = make_trace(k, tokens=tokens, layers=layers, dim=dim, heads=1, seed=seed)
                trace["attentions"] = [(np.ceil(a * 4) / 4).astype("f2") for a in trace["attentions"]]
                writer.append(trace, score=k / 5)
        store = tracestore.open(Path(name) / "s.zarr")
        threshold, top_k = rule
        options = {"edge_format": edges, "attention_threshold": threshold, "top_k": top_k, "dtype": dtype}
        loader = tracestore.TraceLoader(store, "graph", batch_size=3, seed=seed, **options)
        for batch in loader:
            x, source, weight, node = [], [], [], 0
            for index in batch.trace_index.tolist():
                for hidden, pairs, values in expected_graph(store, index, (threshold, top_k or 0.0)):
                    x.append(hidden)
                    source.append(pairs + node)
                    weight.append(values)
                    node += len(hidden)
            wide = dtype or "float16"
            np.testing.assert_array_equal(batch.x.numpy(), np.concatenate(x).astype(wide))
            sizes_here = [len(h) for h in x]
            assert batch.batch.tolist() == np.repeat(np.arange(len(x)), sizes_here).tolist()
            assert batch.ptr.tolist() == [0, *np.cumsum(sizes_here).tolist()]
            assert batch.score.tolist() == store.scores[batch.trace_index.numpy()].astype("f4").tolist()
            if edges == "coo":
                np.testing.assert_array_equal(batch.edge_index.numpy(), np.concatenate(source, axis=1))
                np.testing.assert_array_equal(batch.edge_attr.numpy()[:, 0], np.concatenate(weight).astype(wide))
                continue
            stored = np.concatenate([store[k].attention_mean.reshape(-1) for k in batch.trace_index.tolist()])
            found = batch.attention.numpy()
            pairs = [n * (n + 1) // 2 for n in sizes_here]
            assert batch.attention_ptr.tolist() == [0, *np.cumsum(pairs).tolist()]
            if top_k is None:
                np.testing.assert_array_equal(found, stored.astype(wide))
            else:
                np.testing.assert_array_equal(found[~np.isnan(found)], np.concatenate(weight).astype(wide))


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_consumer_that_counts_batches_gets_the_next_epoch(store_path, num_threads):
    """Training frameworks that know the number of batches never ask for one more."""
    order = []
    loader = tracestore.TraceLoader(store_path, batch_size=5, num_threads=num_threads)
    for epoch in range(3):
        loader.set_epoch(epoch)
        order.append([b.question_id for b in loader])
        assert loader.epoch == epoch + 1
    counted = tracestore.TraceLoader(store_path, batch_size=5, num_threads=num_threads)
    kept = []
    for epoch in range(3):
        kept.append(iter(counted))
        assert [next(kept[-1]).question_id for _ in range(len(counted))] == order[epoch]
        if epoch:  # draining an earlier iterator changes nothing
            assert next(kept[epoch - 1], None) is None and counted.epoch == epoch
    counted.set_epoch(1)
    for _ in range(2):
        assert [b.question_id for b, _ in zip(counted, range(len(counted)), strict=False)] == order[1]
        counted.set_epoch(1)
    # A state taken after the last batch continues with the next epoch, even if an iterator was
    # made and dropped before.
    counted.set_epoch(0)
    last = iter(counted)
    for _ in range(len(counted)):
        next(last)
    state = counted.state_dict()
    other = tracestore.TraceLoader(store_path, batch_size=5, num_threads=num_threads)
    other.load_state_dict(state)
    iter(other)
    assert [b.question_id for b in other] == order[1]
    # Setting the same epoch again restarts it.
    counted.set_epoch(0)
    assert counted.state_dict()["batch"] == 0
    counted.set_epoch(1)
    # An epoch that was left early starts again.
    next(iter(counted))
    assert [b.question_id for b in counted] == order[1]
    # Its state is that of the first batch once the epoch is set again.
    counted.set_epoch(1)
    assert [next(iter(counted)).question_id for _ in range(2)] == [order[1][0]] * 2
    counted.set_epoch(1)
    assert counted.state_dict()["batch"] == 0
    # The position of a state that was loaded is kept.
    counted.load_state_dict(state | {"epoch": 1, "batch": 1})
    counted.set_epoch(1)
    assert counted.state_dict()["batch"] == 1 and [b.question_id for b in counted] == order[1][1:]


def test_messages_for_wrong_arguments(store_path):
    for kwargs, word in (
        ({"view": "picture"}, "sequence"),
        ({"shuffle": "wild"}, "global"),
        ({"batch_size": 0}, "at least 1"),
        ({"indices": [99]}, "indices"),
        ({"view": "graph", "top_k": 2.0}, "top_k"),
        ({"memory_budget": 10}, "batches"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"layers": True}, "found layers True"),
        ({"positions": False}, "found positions False"),
        ({"score_threshold": "x"}, "found score_threshold 'x', expected a number"),
        ({"score_threshold": [0.5, 0.6]}, "found score_threshold"),
    ):
        with pytest.raises(UsageError, match=word):
            tracestore.TraceLoader(store_path, **kwargs)


def test_stored_edges_were_chosen_before(tmp_path):
    trace = make_trace(0) | {"edges": [(np.zeros((2, 1), "i4"), np.full(1, 0.5, "f2"))] * 3}
    del trace["attentions"]
    path = write_store(tmp_path / "s.zarr", [trace])
    for rule in ({"attention_threshold": 0.6}, {"top_k": 0.5}):
        tracestore.TraceLoader(path, "sequence", **rule)
        for reader in (tracestore.TraceLoader, tracestore.TraceDataset):
            with pytest.raises(UsageError, match="chosen before"):
                reader(path, view="graph", **rule)


@pytest.mark.parametrize("options", [{}, {"view": "tokens"}, {"view": "graph", "as_pyg": False}])
def test_a_dtype_of_a_batch_is_that_of_its_values(store_path, options):
    """float16 has no index above 2,048 exactly."""
    batch = next(iter(tracestore.TraceLoader(store_path, **options)))
    moved = batch.to(torch.bfloat16)
    for name, tensor in vars(batch).items():
        if isinstance(tensor, torch.Tensor):
            dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
            torch.testing.assert_close(getattr(moved, name), tensor.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert batch.to("cpu", torch.float32).y.dtype == torch.float32


def test_chosen_traces_need_what_the_view_reads(tmp_path):
    """Also chosen by indices, as the bridge to Lightning does with a subset."""
    with tracestore.create(tmp_path / "s.zarr") as writer:
        for k in range(4):
            whole = make_trace(k)
            last = np.stack([states[-1] for states in whole["hidden_states"]])
            writer.append({"question_id": f"q{k}", "last_token": last} if k == 1 else whole)
    store = tracestore.open(tmp_path / "s.zarr")
    for options in ({"view": "graph", "as_pyg": False}, {"view": "tokens"}, {"positions": 0}):
        (some,) = tracestore.TraceLoader(store, indices=[0, 2, 3], shuffle=False, **options)
        (same,) = tracestore.TraceLoader(store[[0, 2, 3]], shuffle=False, **options)
        assert torch.equal(some.trace_index, same.trace_index)
        with pytest.raises(MissingFieldError, match="1 of 2 traces"):
            tracestore.TraceLoader(store, indices=[1, 2], **options)


def test_a_loader_reads_the_generation_of_its_store(tmp_path):
    """A newer generation has other scores and traces than the indices and labels of the store."""
    store = tracestore.open(write_store(tmp_path / "s.zarr", make_traces(4), score=0.9))
    with tracestore.create(tmp_path / "s.zarr", append=True) as writer:
        writer.append(make_trace(9), score=0.1)
    assert len(tracestore.open(tmp_path / "s.zarr")) == 5
    assert len(tracestore.TraceLoader(store, "sequence", batch_size=2).store) == 4
    assert len(tracestore.TraceDataset(store)) == 4


def test_whole_numbers_of_any_type(store_path):
    """An integer of numpy or torch gives the batches and the state of the same int; another value is refused by name."""
    names = ("seed", "batch_size", "buffer_size", "block_bytes", "epoch_size")
    for kind in (np.int64, np.uint8, np.int32, torch.tensor, np.array):
        options = {name: kind(7) for name in names} | {"shuffle": "buffer", "weights": np.array([1])}
        loader = tracestore.TraceLoader(store_path, **options)
        expected = tracestore.TraceLoader(store_path, **dict.fromkeys(names, 7), shuffle="buffer", weights=[1])
        for one in (loader, expected):
            one.set_epoch(kind(3) if one is loader else 3)
        assert [b.question_id for b in loader] == [b.question_id for b in expected]
        assert json.dumps(loader.state_dict()) == json.dumps(expected.state_dict())
        costs = [tracestore.TraceLoader(store_path, batch_by="tokens", max_batch_cost=n) for n in (kind(7), 7)]
        assert json.dumps(costs[0].state_dict()) == json.dumps(costs[1].state_dict())
        samplers = [tracestore.ShuffleBufferSampler(12, n, n) for n in (kind(7), 7)]
        assert list(samplers[0]) == list(samplers[1])
    wrong = [(name, value) for name in names for value in (1.5, "7", None)]
    wrong = [pair for pair in wrong if pair not in (("batch_size", None), ("epoch_size", None))]
    wrong += [(name, 0) for name in names[1:]] + [("seed", float("nan"))]
    for name, value in wrong:
        with pytest.raises(UsageError, match=f"found {name} "):
            tracestore.TraceLoader(store_path, **{name: value})
    for value in (1.0, "1", None):
        with pytest.raises(UsageError, match="found epoch "):
            loader.set_epoch(value)
    with pytest.raises(UsageError, match="layers"):
        tracestore.TraceLoader(store_path, layers=[True, False])


def test_labels_of_any_array(store_path):
    for targets in ([0, 1] * 6, np.arange(12) % 2, np.arange(12) % 2 == 1, np.arange(12, dtype="f4") % 2):
        loader = tracestore.TraceLoader(store_path, targets=targets, shuffle=False)
        if isinstance(targets, np.ndarray):
            targets[:] = 0  # the array of the caller
        assert [y for batch in loader for y in batch.y.tolist()] == [0.0, 1.0] * 6
    for targets in ([0, 1], [[0, 1] * 6], 0):
        with pytest.raises(UsageError, match="found targets of shape"):
            tracestore.TraceLoader(store_path, targets=targets)


def test_a_threshold_is_a_number(store_path):
    """NaN is above and below nothing: it would label every answer correct, and keep no edge."""
    for name, view in (("score_threshold", "sequence"), ("attention_threshold", "graph")):
        with pytest.raises(UsageError, match=f"found {name} nan"):
            tracestore.TraceLoader(store_path, view, **{name: float("nan")})
    with tracestore.open(store_path) as store:
        for read in (store.targets, store[:5].targets, lambda t: store.split(score_threshold=t)):
            with pytest.raises(UsageError, match="found score_threshold nan"):
                read(float("nan"))


@pytest.mark.parametrize(("attention", "edge_format"), [("heads", "coo"), ("heads", "packed"), ("edges", "coo")])
def test_weights_of_one_head_keep_the_stored_dtype(tmp_path, attention, edge_format):
    (trace,) = make_traces(1, heads=1, dtype="f4")
    weights = np.stack(trace["attentions"])[:, 0]
    if attention == "edges":
        trace["edges"] = [(np.stack(np.nonzero(w)), w[np.nonzero(w)]) for w in weights]
        del trace["attentions"]
    write_store(tmp_path / "s.zarr", [trace], attention="heads", dtype="keep")
    (batch,) = tracestore.TraceLoader(tmp_path / "s.zarr", "graph", edge_format=edge_format, as_pyg=False)
    found = batch.edge_attr if edge_format == "coo" else batch.attention
    assert found.dtype == torch.float32 and sorted(found.flatten().tolist()) == sorted(weights[weights > 0].tolist())
