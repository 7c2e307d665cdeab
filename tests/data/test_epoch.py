"""The batches of an epoch, the same for any number of threads, workers and ranks."""

import functools
import json
import operator
import shutil

import numpy as np
import pytest
from torch.utils.data import DataLoader

import tracestore
from tests.helpers import make_traces, write_store
from tracestore.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
MODES = ["global", "buffer", "block", "none"]
N = 61


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """61 traces of 1 to 9 tokens."""
    path = tmp_path_factory.mktemp("epoch") / "s.zarr"
    return write_store(path, make_traces(N, tokens=lambda k: 1 + k * 5 % 9), score=lambda k: k / N)


def ids(batches):
    return [b.trace_index.tolist() for b in batches]


def flat(lists):
    return functools.reduce(operator.iadd, lists, [])


def make(store, **options):
    return tracestore.TraceLoader(
        store, **({"batch_size": 7, "seed": 5, "buffer_size": 20, "block_bytes": 4000} | options)
    )


@pytest.mark.long
@pytest.mark.parametrize("shuffle", MODES)
def test_the_same_for_any_number_of_threads_workers_and_ranks(store, shuffle):
    expected = ids(make(store, shuffle=shuffle, num_threads=0))
    assert sorted(flat(list(expected))) == list(range(N))
    for threads in (1, 2, 4, 8):
        assert ids(make(store, shuffle=shuffle, num_threads=threads)) == expected
    for world in (2, 3, 5):
        ranks = [ids(make(store, shuffle=shuffle, rank=r, world_size=world)) for r in range(world)]
        assert [flat([part[g] for part in ranks]) for g in range(len(expected))] == expected
    for workers in (0, 1, 2, 4):
        dataset = tracestore.TraceIterableDataset(
            store, batch_size=7, seed=5, shuffle=shuffle, buffer_size=20, block_bytes=4000
        )
        assert ids(DataLoader(dataset, batch_size=None, num_workers=workers)) == expected


@pytest.mark.long
@pytest.mark.parametrize("options", [{"shuffle": m} for m in MODES] + [{"batch_by": "tokens", "max_batch_cost": 30}])
def test_continues_after_any_batch_with_other_threads_and_ranks(store, options):
    """50 random positions: no trace is repeated or missing after any of them."""
    rng = np.random.default_rng(1)
    epochs = {}
    reference = make(store, **options)
    for epoch in range(6):
        reference.set_epoch(epoch)
        epochs[epoch] = ids(reference)
    for _ in range(50):
        epoch = int(rng.integers(6))
        stop = int(rng.integers(len(epochs[epoch])))
        first = make(store, num_threads=int(rng.integers(0, 5)), **options)
        first.set_epoch(epoch)
        iterator = iter(first)
        got = [next(iterator).trace_index.tolist() for _ in range(stop)]
        state = json.loads(json.dumps(first.state_dict()))
        iterator.close()
        world = int(rng.integers(1, 4))
        others = [
            make(store, num_threads=int(rng.integers(0, 5)), rank=r, world_size=world, **options) for r in range(world)
        ]
        for other in others:
            other.load_state_dict(state)
        rest = [ids(other) for other in others]
        assert got + [flat([part[g] for part in rest]) for g in range(len(rest[0]))] == epochs[epoch]


@pytest.mark.parametrize("cost", ["tokens", "nodes", "edges", "bytes"])
def test_batches_by_cost(store, cost):
    opened = tracestore.open(store)
    tokens = np.asarray(opened.num_tokens, np.int64)
    layers = opened.num_layers
    per_trace = {"tokens": tokens, "nodes": tokens * layers, "edges": layers * tokens * (tokens + 1) // 2}
    limit = {"tokens": 20, "nodes": 60, "edges": 150, "bytes": 5000}[cost]
    loader = make(store, view="graph", batch_by=cost, max_batch_cost=limit)
    num_batches, batches = len(loader), ids(loader)
    assert sorted(flat([list(b) for b in batches])) == list(range(N)) and len(batches) == num_batches
    sizes = per_trace.get(cost, loader.format.bytes_per_trace(opened, np.arange(N)))
    costs = [int(sizes[b].sum()) for b in batches]
    assert all(c <= limit or len(b) == 1 for c, b in zip(costs, batches, strict=True))
    # Greedy: no batch could have taken the first trace of the next one.
    assert all(c + sizes[n[0]] > limit for c, n in zip(costs, batches[1:], strict=False))


@pytest.mark.parametrize("cost", ["tokens", "nodes", "edges"])
def test_a_trace_costs_at_least_one(tmp_path, cost):
    """Last tokens without states of all tokens are as many batches as the limit says, also without the last one."""
    write_store(tmp_path / "s.zarr", [{"question_id": k, "last_token": np.ones((3, 8))} for k in range(30)])
    for drop_last, expected in ((False, [8, 8, 8, 6]), (True, [8, 8, 8])):
        loader = make(tmp_path / "s.zarr", batch_by=cost, max_batch_cost=8, drop_last=drop_last)
        assert list(map(len, ids(loader))) == expected


@pytest.mark.parametrize(("cost", "other"), [("nodes", {"layers": [0]}), ("bytes", {"dtype": "float32"})])
def test_a_state_belongs_to_costs(store, cost, other):
    """A position means other traces where the costs compose other batches."""
    options = {"view": "graph", "as_pyg": False, "batch_by": cost, "max_batch_cost": 3000}
    first = make(store, **options)
    next(iter(first))
    make(store, **options, num_threads=0).load_state_dict(json.loads(json.dumps(first.state_dict())))
    with pytest.raises(UsageError, match="state of another loader: costs_crc32c"):
        make(store, **options, **other).load_state_dict(first.state_dict())


def test_a_state_belongs_to_a_store_and_its_copies(store, tmp_path):
    """Another store with as many traces would continue in the middle of its epoch."""
    state = make(store).state_dict()
    shutil.copytree(store, tmp_path / "copy.zarr")
    make(tmp_path / "copy.zarr").load_state_dict(state)
    chosen = {"indices": range(20)}
    write_store(tmp_path / "copy.zarr", make_traces(N + 9)[N:], append=True)
    make(tmp_path / "copy.zarr", **chosen).load_state_dict(make(store, **chosen).state_dict())  # it has grown
    write_store(tmp_path / "other.zarr", make_traces(N + 1)[1:])
    with pytest.raises(UsageError, match="state of another loader: stores"):
        make(tmp_path / "other.zarr").load_state_dict(state)


def test_pad_and_drop_last(store):
    padded = ids(make(store, pad_last=True))
    plain = ids(make(store))
    assert [len(b) for b in padded] == [7] * 9 and padded[-1][5:] == plain[0][:2] and padded[:-1] == plain[:-1]
    assert ids(make(store, drop_last=True)) == plain[:-1]
    with pytest.raises(UsageError, match="pad_last"):
        make(store, pad_last=True, drop_last=True)
    for wrong in ({"batch_by": "tokens"}, {"batch_by": "kilos", "max_batch_cost": 3}, {"max_batch_cost": 3}):
        with pytest.raises(UsageError, match="batch_"):
            make(store, **wrong)


def test_an_empty_slice_is_an_empty_batch(store):
    for view in ("sequence", "graph"):
        batch = list(make(store, view=view, batch_size=3, rank=3, world_size=4))[-1]
        assert len(batch.y) == 0 and batch.question_id == []
        assert (batch.sequences if view == "sequence" else batch.x).shape[-1] == 8


def test_batches_that_are_held_are_never_overwritten(tmp_path):
    """Views, tensors saved for backward and numpy arrays of each batch keep its memory."""
    import torch

    write_store(tmp_path / "s.zarr", make_traces(60, tokens=20, layers=4, dim=64))
    loader = tracestore.TraceLoader(tmp_path / "s.zarr", "graph", batch_size=5, dtype="float32", num_threads=3)
    weight = torch.ones(64, requires_grad=True)
    held = []
    for batch in loader:
        first = batch.x[:3, 1:9]
        product = (batch.x * weight).sum()  # keeps x for the backward pass
        held.append(
            (first, first.clone(), product, batch.x.sum(0).clone(), batch.edge_index.numpy(), batch.edge_index.clone())
        )
    assert loader._pool.used_bytes > 0
    for view, copy, product, total, array, edges in held:
        assert torch.equal(view, copy) and np.array_equal(array, edges.numpy())
        (grad,) = torch.autograd.grad(product, weight)
        assert torch.allclose(grad, total)
    del held, view, copy, product, total, array, edges, batch, first, grad
    assert loader._pool.used_bytes == 0
