"""Orders and batches of positions: every id once, whatever the ranks, and equal to NumPy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data import shuffle_oracle
from tracestore._core import shuffle
from tracestore.data import order


@given(
    st.integers(0, 3000),
    st.integers(-5, 2**63),
    st.integers(0, 50),
    st.sampled_from(order.SHUFFLES),
    st.integers(1, 400),
)
@settings(max_examples=80, deadline=None)
def test_every_id_once(n, seed, epoch, mode, size):
    plan = order.EpochOrder(n, seed, epoch, mode, size, size)
    ids = plan.ids_at(np.arange(n))
    assert sorted(ids.tolist()) == list(range(n))
    some = np.arange(n)[:: max(1, n // 7)]
    np.testing.assert_array_equal(plan.ids_at(some), ids[some])


def test_orders_differ_by_seed_and_epoch_and_repeat():
    at = np.arange(1000)
    first = order.EpochOrder(1000, 1, 0).ids_at(at)
    np.testing.assert_array_equal(first, order.EpochOrder(1000, 1, 0).ids_at(at))
    for other in (order.EpochOrder(1000, 2, 0), order.EpochOrder(1000, 1, 1)):
        assert (other.ids_at(at) == first).mean() < 0.02
    # Pinned so that a later version trains in the same order.
    assert order.EpochOrder(10, 42, 0).ids_at(np.arange(10)).tolist() == [2, 5, 3, 0, 6, 9, 8, 7, 4, 1]


def test_global_order_mixes():
    ids = order.EpochOrder(20_000, 3, 0).ids_at(np.arange(20_000))
    assert abs(np.corrcoef(ids, np.arange(20_000))[0, 1]) < 0.03
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.03


def test_global_order_needs_no_memory_for_a_billion():
    ids = order.EpochOrder(10**9, 1, 2).ids_at(np.arange(5))
    assert len(set(ids.tolist())) == 5 and ids.min() >= 0 and ids.max() < 10**9


def test_buffer_keeps_a_window():
    ids = order.EpochOrder(2000, 0, 0, "buffer", 50).ids_at(np.arange(2000))
    assert (ids - np.arange(2000)).max() < 50 and (ids != np.arange(2000)).mean() > 0.9
    np.testing.assert_array_equal(order.EpochOrder(100, 0, 0, "buffer", 1).ids_at(np.arange(100)), np.arange(100))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("n,batch", [(0, 4), (1, 4), (37, 8), (40, 8), (41, 7)])
def test_ranks_split_each_batch(n, batch, world_size):
    batches = order.Batches(n, batch)
    for g in range(len(batches)):
        whole = batches.positions(g)
        slices = [batches.positions(g, r, world_size) for r in range(world_size)]
        np.testing.assert_array_equal(np.concatenate(slices), whole)
        assert max(map(len, slices)) - min(map(len, slices)) <= 1


@given(st.integers(0, 5000), st.integers(0, 2**64 - 1), st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_orders_in_c_equal_those_in_numpy(n, key, size):
    positions = np.arange(n)
    out = np.empty(n, np.int64)
    shuffle.permute(positions, n, key, out)
    np.testing.assert_array_equal(out, shuffle_oracle.permute(positions, n, key))
    buffer = shuffle.ShuffleBuffer(n, size, key)
    expected = shuffle_oracle.shuffle_buffer(n, size, key)
    for begin in (0, n // 2, n // 3):  # going on, and starting over
        out = np.empty(n - begin, np.int64)
        buffer.read(begin, out)
        np.testing.assert_array_equal(out, expected[begin:])


def test_orders_reject_positions_outside_the_epoch():
    with pytest.raises(ValueError, match="outside"):
        shuffle.permute(np.array([3]), 3, 0, np.empty(1, np.int64))
    with pytest.raises(ValueError, match="outside"):
        shuffle.ShuffleBuffer(4, 2, 0).read(3, np.empty(2, np.int64))


@given(st.lists(st.integers(1, 50), max_size=300), st.integers(1, 120))
@settings(max_examples=100, deadline=None)
def test_cost_batches_equal_a_loop(costs, limit):
    costs = np.array(costs, np.int64)
    expected, current, spent = [], [], 0
    for k, cost in enumerate(costs.tolist()):
        if current and spent + cost > limit:
            expected.append(current)
            current, spent = [], 0
        current.append(k)
        spent += cost
    if current:
        expected.append(current)
    batches = order.CostBoundedBatches(len(costs), limit, lambda at: costs[at])
    assert [batches.positions(g).tolist() for g in range(len(batches))] == expected
    whole = order.CostBoundedBatches(len(costs), limit, lambda at: costs[at], drop_last=True)
    short = bool(expected) and int(costs[expected[-1]].sum()) < limit
    assert len(whole) == len(expected) - short
