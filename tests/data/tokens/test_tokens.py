"""View "tokens": values, choice of layers and positions, exact epochs, continuation."""

import json
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
from tests.helpers import convert, make_trace, make_traces, write_pickle, write_store
from tracestore._core import gather
from tracestore.errors import CorruptStoreError, MemoryBudgetError, MissingFieldError, UsageError
from tracestore.store.format import schema

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def rows_of(batches):
    """Return {(trace, position): hidden state} of batches, after checking that no token comes twice."""
    found = {}
    for batch in batches:
        assert len(batch) == len(batch.hidden_states) == len(batch.y) == len(batch.score)
        places = zip(batch.trace_index.tolist(), batch.position.tolist(), strict=True)
        for place, row in zip(places, batch.hidden_states, strict=True):
            assert place not in found
            found[place] = row.clone()
    return found


def chosen_positions(trace, positions, optional):
    """Return the positions of a trace that an argument `positions` chooses, in plain Python."""
    every = list(range(trace.num_tokens))
    if positions in (None, "all"):
        return every
    if positions == "last":
        return every[-1:]
    if isinstance(positions, slice):
        return every[positions]
    if positions == "answer":
        begin, end = optional["answer_span"]
        return every[begin:end]
    if positions == "prompt":
        return every[: optional["prompt_length"]]
    return [every[p] for p in ([positions] if isinstance(positions, int) else positions)]


POSITIONS = [None, "all", "last", "answer", "prompt", 0, -2, [0, 1], [2, 0], [-1, 0, 1]]
POSITIONS += [slice(1, None), slice(None, None, -2)]


@given(
    st.integers(0, 2**16),
    st.lists(st.integers(3, 9), min_size=1, max_size=6),
    st.sampled_from([1, 3, 8, 33]),
    st.sampled_from(schema.CODECS),
    st.sampled_from([None, 0, -1, [2], [2, 0], [0, 1, 2]]),
    st.sampled_from(POSITIONS),
    st.sampled_from(["global", "buffer", "block", "none"]),
    st.sampled_from([None, "float32"]),
    st.sampled_from([0, 2]),
    st.integers(1, 9),
)
@settings(max_examples=60, deadline=None)
@pytest.mark.long
def test_every_row_equals_the_stored_hidden_state(
    seed, sizes, dim, codec, layers, positions, shuffle, dtype, threads, batch_size
):
    optional = {"answer_span": (1, 3), "prompt_length": 2}
    if positions == [-1, 0, 1] and 2 in sizes:
        sizes = [3]
    with tempfile.TemporaryDirectory() as name:
        traces = [make_trace(k, tokens=n, dim=dim, seed=seed) | optional for k, n in enumerate(sizes)]
        write_store(Path(name) / "s.zarr", traces, score=lambda k: k / 9, commit_after=(0, 2), codec=codec)
        loader = tracestore.TraceLoader(
            Path(name) / "s.zarr", "tokens", layers=layers, positions=positions, batch_size=batch_size,
            shuffle=shuffle, seed=seed, dtype=dtype, num_threads=threads, block_bytes=dim * 16,
        )  # fmt: skip
        store = loader.store
        numbers = (
            list(range(3)) if layers is None else [n % 3 for n in ([layers] if isinstance(layers, int) else layers)]
        )
        found = rows_of(loader)
        expected = [(k, p) for k in range(len(sizes)) for p in chosen_positions(store[k], positions, optional)]
        assert sorted(found) == sorted(expected)
        assert len(loader) == -(-len(expected) // batch_size)
        for (k, position), row in found.items():
            states = store[k].hidden_states[numbers, position]
            np.testing.assert_array_equal(
                row.numpy(), (states[0] if len(numbers) == 1 else states).astype(dtype or "f2")
            )
        if shuffle == "none":
            assert list(found) == expected


def test_batches_name_the_trace_position_layer_label_and_score(variant):
    store, _ = variant
    loader = tracestore.TraceLoader(store, "tokens", layers=-1, batch_size=7)
    targets = store.targets()
    for batch in loader:
        assert batch.hidden_states.shape == (len(batch), store.hidden_dim) and batch.layers == [2]
        np.testing.assert_array_equal(batch.y.numpy(), targets[batch.trace_index].astype("f4"))
        np.testing.assert_array_equal(batch.score.numpy(), store.scores[batch.trace_index].astype("f4"))
        assert len(batch.to(torch.float64)) == len(batch)
    gathered = loader.gather([3, 0, 3])
    assert gathered.trace_index.tolist() == [int(k) for k in gathered.trace_index] and len(gathered) == 3
    assert torch.equal(gathered.hidden_states[0], gathered.hidden_states[2])
    with pytest.raises(IndexError, match="tokens"):
        loader.gather([int(store.num_tokens.sum())])


@pytest.mark.parametrize("view", ["sequence", "tokens"])
def test_a_batch_is_gathered_by_integers_only(variant, view):
    """A mask would be the batch of the first two traces, again and again."""
    loader = tracestore.TraceLoader(variant[0], view)
    for indices in (np.arange(11) < 2, [True, False], [1.7], ["q1"], [[0, 1]], 3):
        with pytest.raises(UsageError, match="found indices of"):
            loader.gather(indices)
    assert len(loader.gather([])) == 0 and loader.gather(torch.tensor([2, 1])).trace_index.shape == (2,)


@pytest.fixture
def store(tmp_path):
    """A store of 23 traces of 1 to 9 tokens in several segments."""
    traces = make_traces(23, tokens=lambda k: 1 + k * 5 % 9)
    return tracestore.open(write_store(tmp_path / "s.zarr", traces, commit_after=(4, 11)))


def test_ranks_get_disjoint_slices_of_the_same_batches(store):
    whole = list(tracestore.TraceLoader(store, "tokens", layers=1, batch_size=10, seed=3))
    parts = [
        list(tracestore.TraceLoader(store, "tokens", layers=1, batch_size=10, seed=3, rank=r, world_size=3))
        for r in range(3)
    ]
    for k, batch in enumerate(whole):
        joined = torch.cat([part[k].hidden_states for part in parts])
        assert torch.equal(joined, batch.hidden_states)


def test_a_state_continues_after_its_batch(store):
    loader = tracestore.TraceLoader(store, "tokens", layers=0, positions=slice(0, 3), batch_size=8, seed=5)
    batches = iter(loader)
    next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [b.position.tolist() for b in batches]
    other = tracestore.TraceLoader(
        store, "tokens", layers=0, positions=slice(0, 3), batch_size=8, seed=5, num_threads=0
    )
    other.load_state_dict(state)
    assert [b.position.tolist() for b in other] == rest
    elsewhere = tracestore.TraceLoader(store, "tokens", layers=0, positions=slice(1, 4), batch_size=8, seed=5)
    with pytest.raises(UsageError, match="state of another loader"):
        elsewhere.load_state_dict(state)


def test_epochs_differ_and_a_last_batch_can_be_left_out_or_filled(store):
    total = int(store.num_tokens.sum())
    loader = tracestore.TraceLoader(store, "tokens", layers=0, batch_size=8, seed=1)
    assert loader.batch_indices(0, 0).tolist() != loader.batch_indices(0, 1).tolist()
    assert total % 8
    dropped = tracestore.TraceLoader(store, "tokens", layers=0, batch_size=8, drop_last=True)
    assert len(dropped) == total // 8 == len(list(dropped))
    padded = tracestore.TraceLoader(store, "tokens", layers=0, batch_size=8, pad_last=True)
    assert {len(batch) for batch in padded} == {8}


def test_indices_restrict_the_traces(store):
    loader = tracestore.TraceLoader(store, "tokens", layers=0, indices=[7, 2], batch_size=4)
    found = rows_of(loader)
    assert {trace for trace, _ in found} == {2, 7} and len(found) == store.num_tokens[[2, 7]].sum()


def test_an_empty_selection_has_no_batches(store):
    loader = tracestore.TraceLoader(store, "tokens", positions=slice(100, None))
    assert len(loader) == 0 and list(loader) == []
    assert list(tracestore.TraceLoader(store, "tokens", indices=[])) == []


@pytest.mark.parametrize(
    "options,message",
    [
        ({"positions": "middle"}, "found positions 'middle'"),
        ({"positions": [0, 0]}, "each once"),
        ({"positions": []}, "at least one"),
        ({"positions": [0, 1.5]}, "expected an integer"),
        ({"positions": 8}, r"trace 0 \(q0\) has 1 tokens and none at position 8"),
        ({"positions": -9}, "none at position -9"),
        ({"positions": [0, -1]}, r"name a token of trace 0 \(q0\) twice"),
        ({"positions": slice(0, "x")}, "found positions slice"),
        ({"layers": [3]}, "different ones of 3"),
        ({"layers": [0, -3]}, "different ones of 3"),
        ({"layers": []}, "at least one"),
        ({"layers": "0"}, "expected an integer"),
        ({"batch_by": "tokens", "max_batch_cost": 9}, "view 'tokens' takes batch_size"),
        ({"indices": [23]}, "trace 23 of 23"),
    ],
)
def test_options_that_do_not_fit_are_refused(store, options, message):
    with pytest.raises(UsageError, match=message):
        tracestore.TraceLoader(store, "tokens", **options)


@pytest.mark.parametrize("positions", ["answer", "prompt"])
def test_a_trace_without_the_fields_of_a_named_position_is_named(tmp_path, positions):
    traces = [make_trace(0, tokens=4) | {"prompt_length": 2}, make_trace(1, tokens=4)]
    write_store(tmp_path / "s.zarr", traces)
    with pytest.raises(MissingFieldError, match=r"^trace 1 \(q1\) has no .*prompt_length.*") as error:
        tracestore.TraceLoader(tmp_path / "s.zarr", "tokens", positions=positions)
    assert "\n" not in str(error.value)


def test_named_positions_use_the_span_then_the_mask_then_the_prompt(tmp_path):
    mask = [0, 1, 1, 0, 1]
    traces = [
        make_trace(0, tokens=5) | {"answer_span": (3, 4), "generated_mask": mask, "prompt_length": 2},
        make_trace(1, tokens=5) | {"generated_mask": mask, "prompt_length": 2},
        make_trace(2, tokens=5) | {"prompt_length": 2},
        make_trace(3, tokens=5) | {"generated_mask": mask},
        make_trace(4, tokens=5) | {"answer_span": (5, 5), "prompt_length": 5},
        make_trace(5, tokens=5)
        | {"tokens": np.arange(6), "tokens_decoded": ["t"] * 6, "answer_span": (4, 6), "prompt_length": 0},
    ]
    write_store(tmp_path / "s.zarr", traces)

    def places(positions):
        loader = tracestore.TraceLoader(tmp_path / "s.zarr", "tokens", positions=positions, shuffle="none")
        found = {k: [] for k in range(len(traces))}
        for trace, position in rows_of(loader):
            found[trace].append(position)
        return found

    assert places("answer") == {0: [3], 1: [1, 2, 4], 2: [2, 3, 4], 3: [1, 2, 4], 4: [], 5: [4]}
    assert places("prompt") == {0: [0, 1], 1: [0, 1], 2: [0, 1], 3: [0, 3], 4: [0, 1, 2, 3, 4], 5: []}


def test_traces_of_last_tokens_only_are_refused(tmp_path):
    sequences = {"sequences": np.zeros((2, 3, 8), "f2"), "labels": np.zeros(2), "question_ids": ["a", "b"]}
    convert(write_pickle(tmp_path / "sequences.pkl", sequences), tmp_path / "s.zarr")
    with pytest.raises(MissingFieldError, match="no hidden states of all tokens"):
        tracestore.TraceLoader(tmp_path / "s.zarr", "tokens")


def test_traces_without_attention_have_tokens(tmp_path):
    write_store(tmp_path / "s.zarr", make_traces(3, tokens=4), attention="none")
    assert len(rows_of(tracestore.TraceLoader(tmp_path / "s.zarr", "tokens", layers=0))) == 12


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_an_iterable_dataset_yields_each_token_once(tmp_path, codec, num_workers):
    write_store(tmp_path / "s.zarr", make_traces(9, tokens=lambda k: 1 + k), codec=codec)
    dataset = tracestore.TraceIterableDataset(tmp_path / "s.zarr", "tokens", layers=1, batch_size=8)
    found = rows_of(DataLoader(dataset, batch_size=None, num_workers=num_workers))
    assert len(found) == 45 and len(dataset) == 6
    for (trace, position), row in found.items():
        np.testing.assert_array_equal(row.numpy(), dataset.items.store[trace].hidden_states[1, position])


@pytest.mark.parametrize("shuffle", ["none", "buffer", "block", "global"])
@pytest.mark.parametrize("positions", ["all", "last"])
@pytest.mark.parametrize("chosen", [slice(5, None), [22, 3, 3, 9]])
def test_an_iterable_dataset_yields_each_token_of_a_subset(store, shuffle, positions, chosen):
    subset = store[chosen]
    dataset = tracestore.TraceIterableDataset(
        subset, "tokens", layers=1, positions=positions, shuffle=shuffle, batch_size=8
    )
    found = [(k, p, row) for b in dataset for k, p, row in zip(b.trace_index, b.position, b.hidden_states, strict=True)]
    wanted = [(k, p) for k in subset.indices.tolist() for p in range(store.num_tokens[k])]
    wanted = [(k, p) for k, p in wanted if positions == "all" or p == store.num_tokens[k] - 1]
    assert sorted((int(k), int(p)) for k, p, _ in found) == sorted(wanted)
    for trace, position, row in found:
        np.testing.assert_array_equal(row.numpy(), store[int(trace)].hidden_states[1, int(position)])
    items = tracestore.TraceIterableDataset(subset, "tokens", layers=1, positions=positions, shuffle=shuffle)
    assert sorted((k, p) for _, k, p in items) == sorted(wanted)


def test_a_dataset_has_an_item_for_each_token(store):
    dataset = tracestore.TraceDataset(store, "tokens", layers=[0, 2], positions="last")
    state, trace, position = dataset[-1]
    assert len(dataset) == 23 and (trace, position) == (22, store.num_tokens[22] - 1)
    np.testing.assert_array_equal(state.numpy(), store[22].hidden_states[[0, 2], -1])
    copy = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(copy[-1][0], state)
    items = list(tracestore.TraceIterableDataset(store, "tokens", layers=0))
    assert len(items) == store.num_tokens.sum()


def test_a_compressed_epoch_keeps_its_memory_budget(tmp_path):
    write_store(tmp_path / "s.zarr", make_traces(40, tokens=60, dim=256), codec="zstd")
    loader = tracestore.TraceLoader(tmp_path / "s.zarr", "tokens", layers=0, batch_size=64, memory_budget=32 << 20)
    assert len(rows_of(loader)) == 40 * 60
    with pytest.raises(MemoryBudgetError, match="lower batch_size"):
        tracestore.TraceLoader(tmp_path / "s.zarr", "tokens", layers=0, batch_size=1 << 20, memory_budget=32 << 20)


def test_a_cold_store_is_read_ahead_row_by_row(store):
    loader = tracestore.TraceLoader(store, "tokens", layers=[0, 2], batch_size=8)
    job = loader._gatherer.job(loader.batch_indices(0))
    pages = gather.PrefetchJob(job.sources)
    pages.run()
    assert pages.num_bytes == job.num_bytes == 8 * 2 * store.hidden_dim * 2


def test_a_truncated_file_raises_instead_of_ending_the_process(tmp_path):
    write_store(tmp_path / "s.zarr", make_traces(8, tokens=50, dim=64))
    loader = tracestore.TraceLoader(tmp_path / "s.zarr", "tokens", layers=0, batch_size=400)
    rows_of(loader)
    (shard,) = (tmp_path / "s.zarr").glob("segments/*/hidden_states/c/0/0")
    shard.chmod(0o644)
    with shard.open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(CorruptStoreError):
        list(loader)
