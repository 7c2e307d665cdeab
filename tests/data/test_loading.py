"""Datasets, samplers and the loader: equal values, exact epochs, exact continuation."""

import functools
import json
import operator
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import tracestore
from tests.core.oracles import oracle_edges
from tests.helpers import make_trace, make_traces
from tracestore.errors import UsageError
from tracestore.store.format import schema

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


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
    with tracestore.create(tmp_path / "v.zarr", **options) as writer:
        for k, trace in enumerate(traces):
            writer.append(trace, score=None if k == 3 else k / 11)
    return tracestore.open(tmp_path / "v.zarr"), traces


def expected_graph(store, index, rule):
    """x, edge_index, edge_attr of each layer of a trace, in numpy."""
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
        loader = tracestore.TraceLoader(
            store,
            "graph",
            batch_size=3,
            seed=seed,
            edge_format=edges,
            attention_threshold=threshold,
            top_k=top_k,
            dtype=dtype,
        )
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
            stored = np.concatenate([store[k].attention_mean.reshape(-1) for k in batch.trace_index.tolist()]).astype(
                wide
            )
            found = batch.attention.numpy()
            pairs = [n * (n + 1) // 2 for n in sizes_here]
            assert batch.attention_ptr.tolist() == [0, *np.cumsum(pairs).tolist()]
            if top_k is None:
                np.testing.assert_array_equal(found, stored)
            else:
                np.testing.assert_array_equal(found[~np.isnan(found)], np.concatenate(weight).astype(wide))


@pytest.mark.parametrize("view", ["sequence", "graph"])
def test_collate_equals_the_loader(variant, view):
    store, _ = variant
    collate = tracestore.collate_sequences if view == "sequence" else tracestore.collate_graphs
    loader = DataLoader(tracestore.TraceDataset(store, view), batch_size=4, collate_fn=collate)
    for a, b in zip(loader, tracestore.TraceLoader(store, view, batch_size=4, shuffle="none"), strict=True):
        names = ["sequences"] if view == "sequence" else ["x", "edge_index", "edge_attr", "batch", "ptr"]
        for name in [*names, "trace_index"]:
            assert torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype, name
        for name in ("y", "score"):
            assert torch.equal(a[name].isnan(), b[name].isnan()) and torch.allclose(
                a[name].nan_to_num(), b[name].nan_to_num()
            )
        assert a.question_id == b.question_id


def test_items_are_what_the_contract_says(store_path):
    store = tracestore.open(store_path)
    sequence, score, question_id = tracestore.TraceDataset(store_path)[4]
    np.testing.assert_array_equal(sequence.numpy(), store[4].last_token)
    assert score == store[4].score and question_id == "q4"
    layers = tracestore.TraceDataset(store, view="graph")[4]
    assert isinstance(layers, list) and len(layers) == store.num_layers
    assert layers[0].x.shape == (5, 8) and layers[0].edge_attr.shape == (layers[0].edge_index.shape[1], 1)
    assert len(tracestore.TraceDataset(store)) == 12


@pytest.mark.parametrize(
    "view,context",
    [
        ("sequence", "fork"),
        ("graph", "fork"),
        *(pytest.param(view, "spawn", marks=pytest.mark.long) for view in ("sequence", "graph")),
    ],
)
def test_workers_fork_and_spawn(store_path, context, view):
    collate = tracestore.collate_sequences if view == "sequence" else tracestore.collate_graphs
    store = tracestore.open(store_path)
    expected = list(tracestore.TraceLoader(store, view, batch_size=5, shuffle="none"))
    dataset = tracestore.TraceDataset(store, view)
    _ = dataset[0]  # maps are open before the fork
    loader = DataLoader(
        dataset,
        batch_size=5,
        collate_fn=collate,
        num_workers=2,
        multiprocessing_context=context,
        persistent_workers=True,
    )
    name = "sequences" if view == "sequence" else "x"
    for _epoch in range(2):
        for a, b in zip(loader, expected, strict=True):
            assert torch.equal(a[name], b[name])


@pytest.mark.parametrize("batch_size", [None, 5])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_iterable_is_exact_over_ranks_and_workers(store_path, batch_size, world_size, workers):
    for epoch in range(2):
        seen, by_batch = [], {}
        for rank in range(world_size):
            dataset = tracestore.TraceIterableDataset(
                store_path, buffer_size=6, seed=7, batch_size=batch_size, rank=rank, world_size=world_size
            )
            dataset.set_epoch(epoch)
            loader = DataLoader(dataset, batch_size=None, num_workers=workers)
            items = list(loader)
            assert len(items) == len(dataset)
            for g, item in enumerate(items):
                ids = item.trace_index.tolist() if batch_size else [int(item[2][1:])]
                by_batch.setdefault(g, []).extend(ids)
                seen += ids
        assert sorted(seen) == list(range(12))
        if batch_size:
            whole = tracestore.TraceIterableDataset(
                store_path, buffer_size=6, seed=7, batch_size=batch_size, rank=0, world_size=1
            )
            whole.set_epoch(epoch)
            assert [by_batch[g] for g in sorted(by_batch)] == [b.trace_index.tolist() for b in whole]


def test_sampler(store_path):
    dataset = tracestore.TraceDataset(store_path)
    sampler = tracestore.ShuffleBufferSampler(len(dataset), buffer_size=4, seed=1)
    first = list(sampler)
    assert sorted(first) == list(range(12)) and list(sampler) == first and len(sampler) == 12
    sampler.set_epoch(1)
    assert list(sampler) != first
    parts = [list(tracestore.ShuffleBufferSampler(12, 4, 1, rank=r, world_size=5)) for r in range(5)]
    assert sorted(functools.reduce(operator.iadd, parts, [])) == list(range(12)) and sum(map(len, parts)) == 12
    loader = DataLoader(dataset, batch_size=5, sampler=sampler, collate_fn=tracestore.collate_sequences)
    assert sum(len(b) for b in loader) == 12


@pytest.mark.parametrize("shuffle", ["global", "buffer", "block", "none"])
def test_state_continues_with_the_next_batch(store_path, shuffle):
    def make(threads):
        return tracestore.TraceLoader(
            store_path, batch_size=2, shuffle=shuffle, buffer_size=4, seed=3, num_threads=threads
        )

    loader = make(2)
    epochs = [[b.trace_index.tolist() for b in loader] for _ in range(2)]
    assert all(sorted(functools.reduce(operator.iadd, e, [])) == list(range(12)) for e in epochs)
    assert (epochs[0] != epochs[1]) or shuffle == "none"
    for stop in range(6):
        loader = make(3)
        _ = list(loader)
        iterator = iter(loader)
        got = [next(iterator).trace_index.tolist() for _ in range(stop)]
        state = json.loads(json.dumps(loader.state_dict()))
        iterator.close()
        other = make(stop % 3)
        other.load_state_dict(state)
        assert got + [b.trace_index.tolist() for b in other] == epochs[1]
    with pytest.raises(UsageError, match="another loader"):
        tracestore.TraceLoader(store_path, batch_size=3, shuffle=shuffle, seed=3).load_state_dict(state)


@pytest.mark.parametrize("num_threads", [0, 2])
def test_who_counts_batches_gets_the_next_epoch_too(store_path, num_threads):
    """As training frameworks do that know how many there are, and never ask for one more."""
    order = []
    loader = tracestore.TraceLoader(store_path, batch_size=5, num_threads=num_threads)
    for epoch in range(3):
        loader.set_epoch(epoch)
        order.append([b.question_id for b in loader])
    counted = tracestore.TraceLoader(store_path, batch_size=5, num_threads=num_threads)
    kept = []
    for epoch in range(3):
        kept.append(iter(counted))
        assert [next(kept[-1]).question_id for _ in range(len(counted))] == order[epoch]
        if epoch:  # an earlier one that is drained after all changes nothing
            assert next(kept[epoch - 1], None) is None
    counted.set_epoch(1)
    for _ in range(2):
        assert [b.question_id for b, _ in zip(counted, range(len(counted)), strict=False)] == order[1]
        counted.set_epoch(1)
    # A state taken after the last batch goes on with the next epoch, also where an iterator is
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
    # Told the same epoch again, it begins anew, and says so.
    counted.set_epoch(0)
    assert counted.state_dict()["batch"] == 0
    counted.set_epoch(1)
    # What was left in the middle begins again.
    next(iter(counted))
    assert [b.question_id for b in counted] == order[1]


def test_same_batches_for_any_number_of_threads(store_path):
    runs = [
        [b.trace_index.tolist() for b in tracestore.TraceLoader(store_path, "graph", batch_size=5, num_threads=t)]
        for t in (0, 1, 2, 8)
    ]
    assert runs[0] == runs[1] == runs[2] == runs[3]


def test_a_list_of_batches_keeps_its_values(store_path):
    loader = tracestore.TraceLoader(store_path, batch_size=3, shuffle="none")
    for k, batch in enumerate(list(loader)):
        assert batch.trace_index.tolist() == list(range(3 * k, 3 * k + 3))
        for row, index in zip(batch.sequences, batch.trace_index.tolist(), strict=True):
            np.testing.assert_array_equal(row.numpy(), loader.store[index].last_token)


def test_early_stop_leaves_no_thread(store_path):
    import threading

    before = threading.active_count()
    for _ in tracestore.TraceLoader(store_path, "graph", batch_size=2, num_threads=4):
        break
    with pytest.raises(ZeroDivisionError):
        for _ in tracestore.TraceLoader(store_path, "graph", batch_size=2, num_threads=4):
            _ = 1 / 0
    import gc

    gc.collect()
    assert threading.active_count() == before


def test_cache_stays_within_its_bytes(tmp_path):
    with tracestore.create(tmp_path / "c.zarr", codec="zstd") as writer:
        for trace in make_traces(30, tokens=40, dim=128, layers=8):
            writer.append(trace)
    dataset = tracestore.TraceDataset(tmp_path / "c.zarr", "graph", max_cache_batches=1, batch_size=1)
    limit = dataset.store.internals.chunk_cache.max_bytes
    for k in (0, 29, 3, 17, 0):
        _ = dataset[k]
        assert dataset.store.internals.chunk_cache.num_bytes <= max(limit, schema.INNER_CHUNK_BYTES)


def test_the_cache_keeps_what_is_needed_soonest(tmp_path):
    """With the order announced, fewer chunks are decoded than least-recently-used would."""
    from tracestore.store.read.chunk_cache import ChunkCache

    def decoded(sequence, announced):
        cache = ChunkCache(3 * 800)
        keys = [[("a", k)] for k in sequence]
        for begin in range(len(keys)):
            if announced:
                for ahead in keys[begin + 7 : begin + 8] if begin else keys[:8]:
                    cache.hint_upcoming(ahead)
            cache.get(keys[begin][0], lambda: np.zeros(100))
            if announced:
                cache.release(keys[begin])
        assert cache.num_bytes <= 3 * 800
        return cache.num_decoded

    cyclic = [0, 1, 2, 3] * 10  # the worst case of least-recently-used
    assert decoded(cyclic, False) == 40 and decoded(cyclic, True) < 25
    with tracestore.create(tmp_path / "c.zarr", codec="zstd") as writer:
        for trace in make_traces(60, tokens=30, dim=128, layers=6):
            writer.append(trace)
    counts = {}
    for window in (0, 32):
        loader = tracestore.TraceLoader(tmp_path / "c.zarr", "graph", batch_size=4, cache_bytes=1 << 20, num_threads=1)
        if not window:
            loader.store.hint_upcoming = lambda *a, **k: lambda: None
        seen = flat = [i for b in loader for i in b.trace_index.tolist()]
        assert sorted(flat) == list(range(60))
        counts[window] = loader.store.internals.chunk_cache.num_decoded
        assert not loader.store.internals.chunk_cache._upcoming and seen
    assert counts[32] <= counts[0]


def test_wrong_arguments_say_what_is_expected(store_path):
    for kwargs, word in (
        ({"view": "picture"}, "sequence"),
        ({"shuffle": "wild"}, "global"),
        ({"batch_size": 0}, "at least 1"),
        ({"indices": [99]}, "indices"),
        ({"view": "graph", "top_k": 2.0}, "top_k"),
        ({"memory_budget": 10}, "batches"),
    ):
        with pytest.raises(UsageError, match=word):
            tracestore.TraceLoader(store_path, **kwargs)


def test_a_loader_reads_the_generation_of_its_store(tmp_path):
    """Not a newer one, whose scores and traces its indices and labels know nothing of."""
    with tracestore.create(tmp_path / "s.zarr") as writer:
        for k in range(4):
            writer.append(make_trace(k), score=0.9)
    store = tracestore.open(tmp_path / "s.zarr")
    with tracestore.create(tmp_path / "s.zarr", append=True) as writer:
        writer.append(make_trace(9), score=0.1)
    assert len(tracestore.open(tmp_path / "s.zarr")) == 5
    assert len(tracestore.TraceLoader(store, "sequence", batch_size=2).store) == 4
    assert len(tracestore.TraceDataset(store)) == 4


def test_little_is_read_ahead_of_small_batches(store_path, monkeypatch):
    """Of a cold store, batches are planned up to a number and not only up to their bytes."""
    from tracestore._core.gather import ThreadPool
    from tracestore.data import prefetch

    def cold(self, drop_behind):
        begin(self, drop_behind)
        self._threads = ThreadPool(1)

    begin, read_ahead, counts = prefetch._ReadAhead.__init__, prefetch.NativePrefetcher.read_ahead, []

    def counted(self, batch):
        is_read = read_ahead(self, batch)
        counts.append(len(self._reading))
        assert self._reading_bytes == sum(size for _, size in self._reading)
        return is_read

    monkeypatch.setattr(prefetch._ReadAhead, "__init__", cold)
    monkeypatch.setattr(prefetch.NativePrefetcher, "read_ahead", counted)
    monkeypatch.setattr(prefetch, "_READ_AHEAD_BATCHES", 3)
    ids = [b.question_id for b in tracestore.TraceLoader(store_path, batch_size=1, shuffle="none")]
    assert [i for batch in ids for i in batch] == tracestore.open(store_path).question_ids[:]
    assert max(counts) == 3
