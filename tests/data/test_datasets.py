"""Datasets, the sampler and collate functions: equal values and exact epochs."""

import functools
import operator
import pickle
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

import tracestore
from tests.data.expected_batches import assert_same_batches
from tests.helpers import make_traces, write_store
from tests.tiers import long
from tracestore.data import datasets
from tracestore.store.format import schema

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


COLLATE = {"sequence": tracestore.collate_sequences, "graph": tracestore.collate_graphs}


@pytest.mark.parametrize("view", COLLATE)
def test_a_data_loader_gives_the_batches_of_the_loader(variant, view):
    store, _ = variant
    dataset = tracestore.TraceDataset(store, view)
    collated = DataLoader(dataset, batch_size=4, collate_fn=COLLATE[view])
    assert_same_batches(collated, tracestore.TraceLoader(store, view, batch_size=4, shuffle=False))
    assert_same_batches(DataLoader(dataset), tracestore.TraceLoader(store, view, batch_size=1, shuffle=False))


def test_items_follow_the_contract(store_path):
    store = tracestore.open(store_path)
    sequence, score, question_id = tracestore.TraceDataset(store_path)[4]
    np.testing.assert_array_equal(sequence.numpy(), store[4].last_token)
    assert score == store[4].score and question_id == "q4"
    layers = tracestore.TraceDataset(store, view="graph")[4]
    assert isinstance(layers, list) and len(layers) == store.num_layers
    assert layers[0].x.shape == (5, 8) and layers[0].edge_attr.shape == (layers[0].edge_index.shape[1], 1)
    assert len(tracestore.TraceDataset(store)) == 12


@pytest.mark.parametrize(
    "view,context", [("sequence", "fork"), ("graph", "fork"), pytest.param("sequence", "spawn", marks=pytest.mark.long)]
)
def test_workers_fork_and_spawn(store_path, context, view):
    dataset = tracestore.TraceDataset(store_path, view)
    _ = dataset[0]  # maps are open before the fork
    options = {"num_workers": 2, "multiprocessing_context": context, "persistent_workers": True}
    loader = DataLoader(dataset, batch_size=5, collate_fn=COLLATE[view], **options)
    for _epoch in range(2):
        assert_same_batches(loader, tracestore.TraceLoader(store_path, view, batch_size=5, shuffle=False))


@pytest.mark.parametrize("batch_size", [None, 5])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 3, *long(1)])
def test_iterable_is_exact_over_ranks_and_workers(store_path, batch_size, world_size, workers):
    def dataset_of(rank, world_size):
        options = {"buffer_size": 6, "seed": 7, "batch_size": batch_size, "rank": rank, "world_size": world_size}
        dataset = tracestore.TraceIterableDataset(store_path, **options)
        dataset.set_epoch(1)
        return dataset

    seen, by_batch = [], {}
    for rank in range(world_size):
        dataset = dataset_of(rank, world_size)
        items = list(DataLoader(dataset, batch_size=None, num_workers=workers))
        assert len(items) == len(dataset)
        for g, item in enumerate(items):
            ids = item.trace_index.tolist() if batch_size else [int(item[2][1:])]
            by_batch.setdefault(g, []).extend(ids)
            seen += ids
    assert sorted(seen) == list(range(12))
    if batch_size:
        assert [by_batch[g] for g in sorted(by_batch)] == [b.trace_index.tolist() for b in dataset_of(0, 1)]


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


def test_cache_stays_within_its_bytes(tmp_path):
    write_store(tmp_path / "c.zarr", make_traces(30, tokens=40, dim=128, layers=8), codec="zstd")
    dataset = tracestore.TraceDataset(tmp_path / "c.zarr", "graph", max_cache_batches=1, batch_size=1)
    limit = dataset.store.internals.chunk_cache.max_bytes
    for k in (0, 29, 3, 17, 0):
        _ = dataset[k]
        assert dataset.store.internals.chunk_cache.num_bytes <= max(limit, schema.INNER_CHUNK_BYTES)


@pytest.mark.long
def test_stateful_data_loader_continues(store_path, monkeypatch):
    """A StatefulDataLoader continues from its state without reading earlier traces again."""
    loader_of = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def make(workers):
        data = tracestore.TraceIterableDataset(store_path, "sequence", batch_size=4, shuffle="buffer", seed=3)
        return loader_of(data, batch_size=None, num_workers=workers)

    read = []
    gather = datasets.BatchGatherer.gather
    monkeypatch.setattr(datasets.BatchGatherer, "gather", lambda *args: read.append(1) or gather(*args))
    for workers in (0, 2):
        whole = [b.question_id for b in make(workers)]
        loader = make(workers)
        batches = iter(loader)
        first = [next(batches).question_id for _ in range(3)]
        state = loader.state_dict()
        resumed = make(workers)
        resumed.load_state_dict(state)
        read.clear()
        rest = [b.question_id for b in resumed]
        assert first + rest == whole
        assert workers or len(read) == len(rest), "earlier traces were read again"
        # The next epoch has its own order.
        assert [b.question_id for b in resumed] != whole


@pytest.mark.parametrize(
    ("workers", "context", "is_persistent"),
    [
        (0, None, False),
        (1, "fork", False),
        (3, "fork", False),
        (3, "fork", True),
        pytest.param(2, "spawn", False, marks=pytest.mark.long),
        pytest.param(2, "spawn", True, marks=pytest.mark.long),
    ],
)
def test_each_iteration_has_its_own_epoch(store_path, workers, context, is_persistent):
    """Iterations advance the epoch, and set_epoch() chooses it, in this process, and in new and kept workers."""
    options = {"batch_size": 5, "shuffle": "global", "seed": 3}
    dataset = tracestore.TraceIterableDataset(store_path, **options)
    dataset = pickle.loads(pickle.dumps(dataset))
    loader = DataLoader(
        dataset, batch_size=None, num_workers=workers, multiprocessing_context=context, persistent_workers=is_persistent
    )
    chosen_and_epoch = ((None, 0), (None, 1), (5, 5), (5, 5), (None, 6), (2, 2), (None, 3), (0, 0))
    # New workers of spawn import torch.
    for chosen, epoch in chosen_and_epoch[: 5 if context == "spawn" and not is_persistent else None]:
        if chosen is not None:
            dataset.set_epoch(chosen)
        expected = tracestore.TraceLoader(store_path, **options)
        expected.set_epoch(epoch)
        assert [b.question_id for b in loader] == [b.question_id for b in expected]
        assert dataset.epoch == epoch + 1


class SlowStart(tracestore.TraceIterableDataset):
    """The last worker begins each iteration late."""

    def __iter__(self):
        if (info := get_worker_info()) is not None and info.id == info.num_workers - 1:
            time.sleep(0.2)
        return super().__iter__()


def ids_of(loader):
    return [question_id for batch in loader for question_id in batch.question_id]


@pytest.mark.long
@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.parametrize("begin", ["abandoned", "abandoned twice", "two at once", "equal seeds", "in this process"])
def test_workers_of_an_iteration_have_one_epoch(store_path, begin, is_persistent):
    """An iteration has each trace once, also if its workers begin at different times, next to another one."""
    dataset = SlowStart(store_path, batch_size=2, shuffle="global", seed=3)
    loader = DataLoader(dataset, batch_size=None, num_workers=3, persistent_workers=is_persistent)
    expected = sorted(tracestore.open(store_path).question_ids)
    if begin.startswith("abandoned"):
        for _ in range(1 + begin.endswith("twice")):
            next(iter(loader))
    elif begin == "two at once":
        other = DataLoader(dataset, batch_size=None, num_workers=3, persistent_workers=is_persistent)
        first, second = iter(loader), iter(other)
        assert sorted(ids_of(second)) == expected and sorted(ids_of(first)) == expected
    elif begin == "equal seeds":
        orders = []
        for epoch in (5, 9, 9):
            torch.manual_seed(0)
            dataset.set_epoch(epoch)
            orders.append(ids_of(loader))
            assert sorted(orders[-1]) == expected
        assert orders[0] != orders[1] == orders[2]
    else:
        ids_of(dataset)
    assert sorted(ids_of(loader)) == expected
