"""Loaders and datasets of a subset of a store, with the default arguments of torch, and in float32."""

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, random_split

import tracestore
from tests.helpers import convert, make_trace, make_traces, write_pickle, write_store
from tracestore.data.batches.batch import SequenceBatch
from tracestore.errors import CorruptStoreError, MissingFieldError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

CHOSEN = [9, 2, 4, 7, 3]


@pytest.fixture
def subset(store_path):
    with tracestore.open(store_path) as store:
        yield store[CHOSEN]


def tensor_of(batch):
    return batch.sequences if isinstance(batch, SequenceBatch) else batch.x


@pytest.mark.parametrize("view", ["sequence", "graph"])
def test_torch_selects_from_a_dataset(store_path, view):
    dataset = tracestore.TraceDataset(store_path, view)
    (batch,) = DataLoader(Subset(dataset, [5, 1]), batch_size=4)
    assert batch.trace_index.tolist() == [5, 1]
    first, second = random_split(dataset, [8, 4], torch.Generator().manual_seed(0))
    seen = [k for part in (first, second) for b in DataLoader(part, batch_size=3) for k in b.trace_index.tolist()]
    assert sorted(seen) == list(range(12))


def test_a_batch_unpacks_as_a_tuple(store_path):
    sequences, score, question_id = next(iter(DataLoader(tracestore.TraceDataset(store_path), batch_size=2)))
    assert sequences.shape == (2, 3, 8) and score.tolist() == pytest.approx([0, 0.1]) and question_id == ["q0", "q1"]


@pytest.mark.parametrize("view", ["sequence", "graph"])
def test_every_loader_takes_a_subset(subset, view):
    whole = tracestore.TraceDataset(subset.store, view)
    dataset = tracestore.TraceDataset(subset, view)
    assert len(dataset) == 5 and dataset[1].trace_index == dataset[-4].trace_index == 2
    with pytest.raises(IndexError):
        dataset[5]
    loaders = [
        DataLoader(dataset, batch_size=2),
        tracestore.TraceLoader(subset, view, batch_size=2, shuffle=False),
        tracestore.TraceLoader(subset, view, batch_size=2, shuffle=False, num_threads=0),
        tracestore.TraceIterableDataset(subset, view, batch_size=2, shuffle=False),
        DataLoader(tracestore.TraceIterableDataset(subset, view, shuffle=False), batch_size=2),
    ]
    for loader in loaders:
        batches = list(loader)
        assert [k for batch in batches for k in batch.trace_index.tolist()] == CHOSEN
        assert [q for batch in batches for q in batch.question_id] == [f"q{k}" for k in CHOSEN]
        item = whole[2] if view == "graph" else whole[2][0]
        found = batches[0][3].x if view == "graph" else batches[0].sequences[1]
        assert torch.equal(found, item[0].x if view == "graph" else item)
    for shuffled in (
        tracestore.TraceLoader(subset, view, batch_size=2, seed=1),
        DataLoader(dataset, batch_size=2, shuffle=True),
        DataLoader(dataset, batch_size=2, sampler=tracestore.ShuffleBufferSampler(dataset, buffer_size=3)),
        tracestore.TraceIterableDataset(subset, view, batch_size=2),
    ):
        assert sorted(k for batch in shuffled for k in batch.trace_index.tolist()) == sorted(CHOSEN)


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_workers_read_a_subset(subset, context):
    options = {"num_workers": 2 if context == "fork" else 1, "multiprocessing_context": context}
    dataset = tracestore.TraceDataset(subset, "graph")
    assert [b.trace_index.item() for b in DataLoader(dataset, **options)] == CHOSEN
    iterable = tracestore.TraceIterableDataset(subset, batch_size=2, shuffle=False)
    batches = [b.trace_index.tolist() for b in DataLoader(iterable, batch_size=None, **options)]
    assert batches == [[9, 2], [4, 7], [3]]
    assert pickle.loads(pickle.dumps(dataset))[0].trace_index == 9


def test_a_state_belongs_to_its_subset(subset):
    loader = tracestore.TraceLoader(subset, batch_size=2)
    state = loader.state_dict()
    tracestore.TraceLoader(subset.store, batch_size=2, indices=CHOSEN).load_state_dict(state)
    with pytest.raises(UsageError, match="indices_crc32c"):
        tracestore.TraceLoader(subset[::-1], batch_size=2).load_state_dict(state)
    with pytest.raises(UsageError, match="another loader: batch_size"):
        tracestore.TraceLoader(subset, batch_size=3).load_state_dict(state)
    with pytest.raises(UsageError, match="found a subset and indices"):
        tracestore.TraceLoader(subset, indices=[0])


def test_an_empty_subset_has_no_batch(subset):
    assert list(tracestore.TraceLoader(subset[:0])) == list(DataLoader(tracestore.TraceDataset(subset[:0]))) == []


def test_only_the_traces_of_a_subset_need_graphs(tmp_path):
    traces = make_traces(6)
    sequences = torch.stack([torch.from_numpy(np.stack(t["hidden_states"])[:, -1]) for t in traces])
    (tmp_path / "data").mkdir()
    named = {"sequences": sequences, "labels": [0.0, 1.0] * 3, "question_ids": [t["question_id"] for t in traces]}
    torch.save(named, tmp_path / "data/preprocessed_0.pt")
    write_pickle(tmp_path / "data/traces.pkl", traces[:4])
    convert(tmp_path / "data", tmp_path / "s.zarr", "--allow-mixed-provenance")
    with tracestore.open(tmp_path / "s.zarr") as store:
        with pytest.raises(MissingFieldError, match="2 of 6 traces"):
            tracestore.TraceLoader(store, "graph")
        with pytest.raises(MissingFieldError, match=r"1 of 2 traces \(first: trace 4"):
            tracestore.TraceDataset(store[3:5], "graph")
        complete = store.filter(num_tokens=lambda n: n > 0)
        (batch,) = tracestore.TraceLoader(complete, "graph")
        assert sorted(batch.question_id) == ["q0", "q1", "q2", "q3"]


@pytest.mark.parametrize("shuffle,name", [(True, "global"), (False, "none")])
def test_shuffle_may_be_a_bool(store_path, shuffle, name):
    for make in (
        lambda shuffle: tracestore.TraceLoader(store_path, batch_size=3, seed=5, shuffle=shuffle),
        lambda shuffle: tracestore.TraceIterableDataset(store_path, batch_size=3, seed=5, shuffle=shuffle),
    ):
        assert [b.question_id for b in make(shuffle)] == [b.question_id for b in make(name)]
    state = tracestore.TraceLoader(store_path, shuffle=shuffle).state_dict()
    tracestore.TraceLoader(store_path, shuffle=name).load_state_dict(state)


@pytest.mark.parametrize("view", ["sequence", "graph"])
def test_float32_is_the_stored_value(variant, view):
    store, _ = variant
    converted = tracestore.TraceDataset(store, view, dtype="float32")
    for k, item in enumerate(tracestore.TraceDataset(store, view)):
        if view == "sequence":
            assert converted[k][0].dtype == torch.float32 and torch.equal(converted[k][0], item[0].float())
            continue
        for ours, stored in zip(converted[k], item, strict=True):
            assert ours.x.dtype == ours.edge_attr.dtype == torch.float32
            assert torch.equal(ours.x, stored.x.float()) and torch.equal(ours.edge_attr, stored.edge_attr.float())
    iterable = tracestore.TraceIterableDataset(store, view, dtype="float32", batch_size=4)
    assert {tensor_of(batch).dtype for batch in iterable} == {torch.float32}


def test_representations_tell_the_sizes(subset):
    path = repr(str(subset.path))
    of_sequences = f"{path}, 'sequence', 5 traces, 3 layers, hidden size 8, float16"
    assert repr(tracestore.TraceDataset(subset)) == f"TraceDataset({of_sequences})"
    assert repr(tracestore.TraceLoader(subset)) == f"TraceLoader({of_sequences}, batch_size=16, shuffle='global')"
    loader = tracestore.TraceLoader(
        subset, "graph", dtype="float32", batch_by="tokens", max_batch_cost=9, shuffle=False
    )
    assert repr(loader) == (
        f"TraceLoader({path}, 'graph', 5 traces, 3 layers, hidden size 8, float32, "
        "batch_by='tokens', max_batch_cost=9, shuffle='none')"
    )
    iterable = tracestore.TraceIterableDataset(subset, batch_size=2)
    assert repr(iterable) == f"TraceIterableDataset({of_sequences}, shuffle='buffer', batch_size=2)"
    assert repr(tracestore.ShuffleBufferSampler(subset, 3)) == "ShuffleBufferSampler(5 indices, buffer_size=3, seed=0)"
    assert repr(tracestore.TraceBatchLoader(subset)) == f"TraceBatchLoader({path}, 1 batch)"


@pytest.mark.parametrize("view", ["sequence", "tokens"])
def test_indices_select_traces_as_a_store_does(store_path, view):
    """A mask, numbers of any type and question ids select what they select of a store, never positions by accident."""
    mask = np.arange(12) % 3 == 1
    store = tracestore.open(store_path)
    chosen = [mask, mask.tolist(), torch.tensor(mask), [4, 1], (4, 1), range(3), np.array([7, 2], "u1"), np.array([2, 7]),
              torch.tensor([7, 2]), [-1, 0], ["q7", "q2"], "q7", np.array(["q3"]), store[[9, 3]].indices, []]  # fmt: skip
    for indices in chosen:
        loader = tracestore.TraceLoader(store, view, indices=indices, shuffle=False)
        found = list(dict.fromkeys(k for batch in loader for k in batch.trace_index.tolist()))
        assert found == store.select(indices).indices.tolist()
    wrong = [mask[:5], mask.tolist()[:5], [1.7, 2.2], np.array([1.0]), [[1, 2]], 3, [12], [-13], ["q12"], [None]]
    wrong += [{1, 2}]
    for indices in wrong:
        with pytest.raises(UsageError, match="indices: "):
            tracestore.TraceLoader(store, view, indices=indices)


def test_one_item_at_a_time(store_path):
    dataset = tracestore.TraceDataset(store_path)
    for index in (np.int32(3), np.uint8(3), torch.tensor(3), np.array(3), 3, -9):
        assert dataset[index].trace_index == 3
    for index in (slice(0, 2), [0, 1], 1.0, "q1", None, np.array([1, 2])):
        with pytest.raises(TypeError):
            dataset[index]


@pytest.mark.parametrize("commits", [1, 3])
@pytest.mark.parametrize("count", [4, 12, 14, 30])
def test_a_store_that_was_replaced_is_not_read_with_the_old_indices(tmp_path, commits, count):
    """Neither a loader of an open store, nor a copy in another process, takes the new store for the old one."""
    path = tmp_path / "s.zarr"
    write_store(path, make_traces(12), score=lambda k: k % 2, commit_after=range(commits - 1))
    store = tracestore.open(path)
    train = store.split(seed=1).train
    objects = (store, train, tracestore.TraceDataset(train), tracestore.TraceIterableDataset(store))
    pickled = [pickle.dumps(value) for value in objects]
    write_store(path, make_traces(count, seed=9), score=0.0, overwrite=True, commit_after=range(commits - 1))
    reads = [store.reopen, *(lambda v=v: tracestore.TraceLoader(v) for v in (store, train)),
             lambda: tracestore.TraceDataset(train), *(lambda d=d: pickle.loads(d) for d in pickled)]  # fmt: skip
    for read in reads:
        with pytest.raises(CorruptStoreError, match=r"s\.zarr: generation \d is gone; open the store again"):
            read()
    assert store[0].question_id == "q0"  # what is open stays readable


def test_a_store_that_grew_has_the_same_first_traces(tmp_path):
    path = tmp_path / "s.zarr"
    write_store(path, make_traces(12), score=lambda k: k % 2)
    with tracestore.open(path) as store:
        pickled = pickle.dumps((store, store[[7, 2]]))
    for k in range(12, 15):
        write_store(path, [make_trace(k)], append=True)
    whole, subset = pickle.loads(pickled)
    assert len(whole) == 15 and subset.question_ids == ["q7", "q2"]


def test_a_pickled_loader_has_the_traces_of_its_construction(tmp_path):
    path = write_store(tmp_path / "s.zarr", make_traces(12), score=lambda k: k % 2)
    options = {"shuffle": False, "batch_size": 4}
    costs = {"batch_by": "tokens", "max_batch_cost": 9, "view": "graph", "as_pyg": False}
    with tracestore.open(path) as store:
        given = [
            *(tracestore.TraceLoader(store, **options | more) for more in ({}, {"view": "tokens"}, costs)),
            tracestore.TraceLoader(store[[7, 2]], **options), tracestore.TraceDataset(store),
            tracestore.TraceDataset(store, "tokens"), tracestore.TraceIterableDataset(store, **options),
            tracestore.TraceIterableDataset(store),
        ]  # fmt: skip
        pickled = pickle.dumps(given)
        numbers = [[getattr(x, "trace_index", x[1]) for x in one] for one in given[4:6]]
        expected = [[b.trace_index.tolist() for b in loader] for loader in given[:4]] + numbers
        states = [loader.state_dict() for loader in given[:4]]
    del given, store
    for k in range(12, 15):
        write_store(path, [make_trace(k)], append=True)
    found = pickle.loads(pickled)
    assert [loader.state_dict() for loader in found[:4]] == [state | {"epoch": 0, "batch": 0} for state in states]
    assert [[b.trace_index.tolist() for b in loader] for loader in found[:4]] == expected[:4]
    assert [[getattr(x, "trace_index", x[1]) for x in one] for one in found[4:6]] == expected[4:]
    assert [b.trace_index.tolist() for b in found[6]] == expected[0]
    assert sorted(x.trace_index for x in found[7]) == list(range(12))
    for dataset in found[4:6]:
        with pytest.raises(IndexError):
            dataset[len(dataset)]
