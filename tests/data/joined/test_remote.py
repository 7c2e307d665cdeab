"""A local and a remote store that are read as one."""

import pickle

import numpy as np
import pytest

import tracestore
from tests.data.expected_batches import assert_same_batches
from tests.helpers import make_trace, write_store
from tests.store.remote.conftest import local_store, remote, remote_store, server, uploaded, written
from tracestore.store.maintain.merge import merge_stores

__all__ = ["local_store", "remote", "remote_store", "server", "uploaded", "written"]
OPTIONS = {"sequence": {}, "graph": {"as_pyg": False}, "tokens": {"batch_size": 9}}


@pytest.mark.long
@pytest.mark.parametrize("is_first", [True, False])
def test_batches_of_a_local_and_a_remote_store(local_store, remote_store, tmp_path, is_first):
    own = write_store(tmp_path / "own", [make_trace(100 + k, tokens=3, dim=32) for k in range(9)])
    pair = [remote_store, own] if is_first else [own, remote_store]
    merge_stores([local_store, own] if is_first else [own, local_store], tmp_path / "merged")
    with tracestore.open(pair) as store, tracestore.open(tmp_path / "merged") as merged:
        for view, more in OPTIONS.items():
            loaders = [tracestore.TraceLoader(s, view, **{"batch_size": 4, **more}) for s in (store, merged)]
            assert_same_batches(*loaders)
        copy = pickle.loads(pickle.dumps(store))
        assert [str(path) for path in copy.path] == [str(path) for path in pair]
        np.testing.assert_array_equal(copy[40].hidden_states, merged[40].hidden_states)


@pytest.mark.long
def test_files_that_the_cache_evicts_are_fetched_again(remote_store, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACESTORE_CACHE_SIZE", "60000")
    own = write_store(tmp_path / "own", [make_trace(100 + k, tokens=3, dim=32) for k in range(9)])
    with tracestore.open([own, remote_store]) as store:
        for options in ({"num_threads": 0}, {"weights": [1, 2], "epoch_size": 90}):
            for batch in tracestore.TraceLoader(store, batch_size=4, **options):
                expected = np.stack([store[int(k)].last_token for k in batch.trace_index])
                np.testing.assert_array_equal(batch.sequences.numpy(), expected)
        assert store.internals.num_evictions > 0
