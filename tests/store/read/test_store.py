"""Opening a store and reading its traces."""

import pickle
import sys

import numpy as np
import pytest

import tracestore
from tests.helpers import make_trace, make_traces, read_all, run_cli, write_store
from tracestore.errors import CorruptStoreError, MissingFieldError, UsageError


def test_arrays_are_zero_copy_and_read_only(store_path):
    store = tracestore.open(store_path)
    hidden = store[4].hidden_states
    base = hidden
    while isinstance(base, np.ndarray):
        base = base.base
    assert type(getattr(base, "obj", base)).__name__ == "MappedFile"
    with pytest.raises(ValueError):
        hidden[0, 0, 0] = 1
    expected = hidden.copy()
    store.close()
    np.testing.assert_array_equal(hidden, expected)


def test_opening_an_array_takes_few_calls(store_path):
    """To write the expected zarr.json only to compare it would take 1,000 calls more, also in a cold remote epoch."""
    count = 0

    def count_call(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    with tracestore.open(store_path) as store:
        segment, before = store.internals.segment(0), sys.getprofile()
        sys.setprofile(count_call)
        try:
            segment.array("hidden_states")
        finally:
            sys.setprofile(before)
    assert 50 < count < 400


def test_missing_scores_are_nan_and_unknown_traces_raise(store_path):
    store = tracestore.open(store_path)
    assert np.isnan(store.scores[10:]).all() and not np.isnan(store.scores[:10]).any()
    assert np.isnan(store.targets()[10:]).all()
    with pytest.raises(KeyError, match="nowhere"):
        store.index_of("nowhere")
    with pytest.raises(IndexError):
        store[12]
    assert store[-1].index == 11


def test_a_pickled_store_opens_the_same_store(store_path):
    with tracestore.open(store_path) as store, pickle.loads(pickle.dumps(store)) as other:
        np.testing.assert_equal(read_all(other), read_all(store))


def test_a_pickled_trace_is_its_copy_and_pickled_ids_are_a_list(store_path):
    with tracestore.open(store_path) as store:
        trace, ids = pickle.loads(pickle.dumps((store[3], store.question_ids)))
        assert (type(trace), type(ids)) == (type(store[3].copy()), list) and ids == store.question_ids
        assert trace.keys() == store[3].keys()
        np.testing.assert_equal([trace[name] for name in trace], [store[3][name] for name in trace])
    assert trace.hidden_states.shape == (3, 4, 8)


def test_missing_fields_raise(tmp_path):
    store = tracestore.open(write_store(tmp_path / "s.zarr", make_traces(1), attention="none"))
    with pytest.raises(MissingFieldError, match="attention"):
        _ = store[0].attention
    with pytest.raises(MissingFieldError, match="no graphs"):
        store.require_view("graph")


@pytest.mark.long
def test_reading_imports_neither_zarr_nor_torch(store_path):
    code = (
        "import sys, tracestore; s = tracestore.open(sys.argv[1]); "
        "[t.attention for t in s]; print([m for m in ('zarr', 'torch', 'numcodecs') if m in sys.modules])"
    )
    assert run_cli("-c", code, store_path, check=0).stdout.strip() == "[]"


@pytest.mark.long
def test_an_open_store_prints_nothing_when_the_interpreter_ends(store_path):
    code = "import sys, tracestore; store = tracestore.open(sys.argv[1]); trace = store[0]; import numpy; numpy.keep = store"
    assert run_cli("-c", code, store_path, check=0).stderr == ""


def test_the_group_of_a_trace_counts_from_the_end_as_the_traces_do(tmp_path):
    with tracestore.create(tmp_path / "s.zarr", attention="none") as writer:
        for k in range(3):
            writer.append(make_trace(k), group=f"g{k}")
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert [store.group(k) for k in range(-3, 3)] == ["g0", "g1", "g2"] * 2
        for k in (-4, 3):
            with pytest.raises(IndexError, match=f"trace {k} of 3"):
                store.group(k)


def test_ids_are_taken_by_integers_only(store_path):
    """A mask would give the ids of the first two traces, again and again."""
    with tracestore.open(store_path) as store:
        assert store.question_ids.take(np.array([2, 0])) == [store.question_ids[2], store.question_ids[0]]
        for indices in (store.indices < 2, np.array([1.7])):
            with pytest.raises(UsageError, match="found indices of"):
                store.question_ids.take(indices)


def test_scores_and_labels_are_read_only_in_every_store(tmp_path):
    """A caller that fills missing scores of the returned array would change the labels and splits of the store."""
    for k in range(2):
        with tracestore.create(tmp_path / "s.zarr", append=True) as writer:
            writer.append(make_trace(k), score=0.25, label=0, group="g")
    write_store(tmp_path / "t.zarr", [make_trace(5)], score=1.0)
    for path in (tmp_path / "s.zarr", tmp_path / "t.zarr", [tmp_path / "s.zarr", tmp_path / "t.zarr"]):
        with tracestore.open(path) as store:
            columns = store.internals.columns
            for values in (store.scores, store.labels, store.named_scores("score"), columns.groups_offsets):
                assert not values.flags.writeable


@pytest.mark.parametrize("is_joined", [False, True])
def test_a_store_that_was_replaced_while_it_was_open_says_so(tmp_path, is_joined):
    """A segment that is mapped stays readable; one that was not read yet has gone with the old store."""
    store, other = (write_store(tmp_path / name, make_traces(4), commit_after=[1]) for name in ("s.zarr", "t.zarr"))
    with tracestore.open([store, other] if is_joined else store) as opened:
        first = opened[0].hidden_states
        write_store(store, make_traces(4, seed=1), overwrite=True)
        assert np.array_equal(opened[0].hidden_states, first)
        with pytest.raises(CorruptStoreError, match="generation 2 is gone; open the store again") as error:
            _ = opened[3].hidden_states
        assert str(error.value).startswith(f"{store}/manifest/" if is_joined else "manifest/")
