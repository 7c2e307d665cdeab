"""Stores that are mixed by weights: the shares in every prefix, the order of each store, exact resume."""

import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import tracestore
from tests.helpers import make_trace, write_store
from tracestore.data.order import EpochOrder, MixedOrder, mixing_slots
from tracestore.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

WEIGHTS = st.lists(st.integers(1, 60), min_size=1, max_size=7)


@given(WEIGHTS)
@example([1] * 50)
@example([9_999, 1])
@example([1, 9_999])
@example([5_000, 3_000, 1_999, 1])
@example([97, 89, 83, 1, 1])
def test_every_prefix_has_each_store_within_one_of_its_share(weights):
    slots = np.tile(mixing_slots(tuple(weights)), 2)
    counts = np.cumsum(np.eye(len(weights), dtype=np.int64)[slots], axis=0)
    shares = np.arange(1, len(slots) + 1)[:, None] * np.array(weights) / sum(weights)
    assert np.abs(counts - shares).max() < 1
    assert counts[sum(weights) - 1].tolist() == weights


@settings(deadline=None)
@given(WEIGHTS, st.integers(1, 150))
@example([3, 1], 1)
@example([3, 1], 2)
@example([3, 1], 10)
@example([9_999, 1], 30_001)
def test_the_shares_hold_over_all_epochs(weights, length):
    epochs = range(min(100, 2 * sum(weights) // length + 2))
    orders = [MixedOrder([1] * len(weights), tuple(weights), length, 0, epoch) for epoch in epochs]
    stores = np.concatenate([order.ids_at(np.arange(length)) for order in orders])
    counts = np.cumsum(np.eye(len(weights), dtype=np.int64)[stores], axis=0)
    shares = np.arange(1, len(stores) + 1)[:, None] * np.array(weights) / sum(weights)
    assert np.abs(counts - shares).max() < 1


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_store_is_read_in_its_own_order_and_again_when_it_ends(data):
    weights = tuple(data.draw(WEIGHTS))
    sizes = [data.draw(st.integers(1, 40)) for _ in weights]
    length, seed = data.draw(st.integers(1, 150)), data.draw(st.integers(0, 9))
    shuffle = data.draw(st.sampled_from(["global", "buffer", "block", "none"]))
    kind = shuffle, 5, 3
    orders = [MixedOrder(sizes, weights, length, seed, epoch, *kind) for epoch in range(3)]
    found = np.concatenate([order.ids_at(np.arange(length)) for order in orders])
    first = np.cumsum([0, *sizes])
    for k, size in enumerate(sizes):
        own = found[(first[k] <= found) & (found < first[k + 1])] - first[k]
        passes = [EpochOrder(size, seed + k, n, *kind).ids_at(np.arange(size)) for n in range(len(own) // size + 1)]
        assert own.tolist() == np.concatenate(passes)[: len(own)].tolist()
    # At any position, in any order, the ids are the same.
    positions = np.array(data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20)))
    again = MixedOrder(sizes, weights, length, seed, 2, *kind).ids_at(positions)
    assert again.tolist() == found[2 * length + positions].tolist()


def trace_numbers(batches):
    return [batch.trace_index.tolist() for batch in batches]


@pytest.mark.parametrize("epoch_size", [1, 7, 31, 100])
def test_batches_of_the_loader(joined, epoch_size):
    store, _ = joined
    loader = tracestore.TraceLoader(store, batch_size=8, weights=[3, 1], epoch_size=epoch_size, seed=1)
    order = [MixedOrder([12, 19], (3, 1), epoch_size, 1, epoch).ids_at(np.arange(epoch_size)) for epoch in range(2)]
    assert len(loader) == -(-epoch_size // 8)
    for expected in order:
        batches = list(loader)
        assert [k for batch in trace_numbers(batches) for k in batch] == expected.tolist()
        for batch in batches:
            expected = np.stack([store[int(k)].last_token for k in batch.trace_index])
            np.testing.assert_array_equal(batch.sequences.numpy(), expected)


def test_an_epoch_of_any_size_without_weights(joined):
    store, _ = joined
    loader = tracestore.TraceLoader(store, batch_size=4, epoch_size=10, seed=5)
    found = [k for _ in range(9) for batch in trace_numbers(loader) for k in batch]
    plain = tracestore.TraceLoader(store, batch_size=4, seed=5)
    assert found == [k for _ in range(3) for batch in trace_numbers(plain) for k in batch][:90]
    tokens = tracestore.TraceLoader(store, "tokens", epoch_size=13, batch_size=5)
    assert [len(batch.trace_index) for batch in tokens] == [5, 5, 3]


def test_a_subset_is_mixed_by_the_stores_of_its_traces(joined):
    store, _ = joined
    subset = store[[30, 3, 15, 1, 20, 2]]
    loader = tracestore.TraceLoader(subset, batch_size=1, shuffle=False, weights=[1, 1], epoch_size=8)
    assert [batch[0] for batch in trace_numbers(loader)] == [3, 30, 1, 15, 2, 20, 3, 30]


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [{}, {"weights": [3, 1], "epoch_size": 45}, {"weights": [1, 5], "shuffle": "buffer", "buffer_size": 6}]
)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_resume_after_any_batch(joined_paths, options, data):
    options = {"batch_size": data.draw(st.integers(1, 9)), "seed": 3, "num_threads": 0} | options
    whole = tracestore.TraceLoader(joined_paths, **options)
    expected = [trace_numbers(whole) for _ in range(2)]
    stop = data.draw(st.integers(0, len(whole)))
    ranks, workers = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3))
    states = []
    for rank in range(ranks):
        loader = tracestore.TraceLoader(joined_paths, rank=rank, world_size=ranks, **options)
        batches = iter(loader)
        for _ in range(stop):
            next(batches)
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert all(state == states[0] for state in states)
    new_ranks = data.draw(st.integers(1, 4))
    parts = []
    for rank in range(new_ranks):
        loader = tracestore.TraceLoader(
            joined_paths, rank=rank, world_size=new_ranks, **options | {"num_threads": workers}
        )
        loader.load_state_dict(states[0])
        epoch, begin = loader.epoch, states[0]["batch"]
        numbers = [loader.batch_indices(k).tolist() for k in range(begin, len(loader))]
        assert trace_numbers(loader) == numbers
        parts.append((epoch, begin, numbers))
    epoch, begin, _ = parts[0]
    joined = [[k for part in slices for k in part] for slices in zip(*(part[2] for part in parts), strict=True)]
    assert joined == expected[epoch][begin:]


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("weights", [None, [2, 3]])
def test_worker_processes_continue_after_a_batch(joined, workers, weights):
    store, _ = joined
    options = {"batch_size": 5, "weights": weights, "epoch_size": 33, "seed": 2}
    expected = list(tracestore.TraceLoader(store, **options))
    loader = tracestore.TraceLoader(store, **options)
    loader.load_state_dict(loader.state_dict() | {"batch": 2})
    numbers = [loader.batch_indices(k) for k in range(2, len(loader))]
    found = DataLoader(numbers, batch_size=None, collate_fn=loader.gather, num_workers=workers)
    for a, b in zip(found, expected[2:], strict=True):
        assert torch.equal(a.trace_index, b.trace_index) and torch.equal(a.sequences, b.sequences)


def test_the_state_names_the_stores_by_content(pair, tmp_path):
    copies = [shutil.copytree(path, tmp_path / f"copy-{k}") for k, path in enumerate(pair[:2])]
    state = tracestore.TraceLoader(pair[:2], weights=[1, 2], batch_size=4).state_dict()
    assert len(state["stores"]) == 2
    tracestore.TraceLoader(copies, weights=[1, 2], batch_size=4).load_state_dict(state)
    others = {
        "stores": tracestore.TraceLoader(pair[1::-1], weights=[1, 2], batch_size=4),
        "weights": tracestore.TraceLoader(pair[:2], weights=[2, 1], batch_size=4),
        "num_samples": tracestore.TraceLoader(pair[:2], weights=[1, 2], batch_size=4, epoch_size=9),
    }
    for name, loader in others.items():
        with pytest.raises(UsageError, match=f"state of another loader: {name}"):
            loader.load_state_dict(state)
    plain = tracestore.TraceLoader(pair[2], batch_size=4)
    with pytest.raises(UsageError, match="state of another loader"):
        plain.load_state_dict(tracestore.TraceLoader(pair[:2], batch_size=4).state_dict())


@pytest.mark.parametrize("weights", [[1], [1, 2, 3], [0, 1], [-1, 2], [0.5, 0.5], [1, 10_000], []])
def test_weights_that_are_refused(joined, weights):
    with pytest.raises(UsageError, match="expected a positive integer for each of 2 stores, together at most 10,000"):
        tracestore.TraceLoader(joined[0], weights=weights)


def test_other_options_that_are_refused(joined, tmp_path):
    store, _ = joined
    for size in (0, -1, 2.5):
        with pytest.raises(UsageError, match="epoch_size"):
            tracestore.TraceLoader(store, epoch_size=size)
    with pytest.raises(UsageError, match="view 'tokens' takes none"):
        tracestore.TraceLoader(store, "tokens", weights=[1, 1])
    with pytest.raises(UsageError, match=r"a store has no trace in the epoch: \[3, 0\]"):
        tracestore.TraceLoader(store[:3], weights=[1, 1])


def test_batches_of_bounded_cost_are_mixed(joined):
    store, _ = joined
    options = {"batch_by": "tokens", "max_batch_cost": 20, "weights": [1, 1], "epoch_size": 40}
    loader = tracestore.TraceLoader(store, "graph", as_pyg=False, **options)
    found = [k for batch in trace_numbers(loader) for k in batch]
    assert found == MixedOrder([12, 19], (1, 1), 40, 0, 0).ids_at(np.arange(40)).tolist()


def test_three_stores(tmp_path):
    paths = [write_store(tmp_path / f"{n}", [make_trace(10 * n + k) for k in range(n + 1)]) for n in range(3)]
    loader = tracestore.TraceLoader(paths, batch_size=6, weights=[1, 2, 3], epoch_size=60)
    for batch in trace_numbers(loader):
        assert np.bincount(np.searchsorted([1, 3], batch, side="right")).tolist() == [1, 2, 3]
