"""Stores as a matrix of features and as a pandas table."""

import numpy as np
import pytest
import torch

import tracestore
from tests.bridges.stores import make_store
from tests.helpers import make_traces, write_store
from tracestore.errors import UsageError
from tracestore.store.read.table import positions


@pytest.fixture
def path(tmp_path):
    """Path of a store of 24 traces in one segment."""
    return make_store(tmp_path / "s.zarr")


@pytest.mark.parametrize(
    "options", [{}, {"segments": 3}, {"codec": "blosc-zstd"}, {"codec": "zstd", "segments": 2}, {"dtype": "keep"}]
)
def test_features_are_the_last_tokens(tmp_path, options):
    with tracestore.open(make_store(tmp_path / "s.zarr", **options)) as store:
        for layer in range(-store.num_layers, store.num_layers):
            found = store.features(layer)
            assert found.dtype == np.float16 and found.shape == (24, store.hidden_dim)
            assert np.array_equal(found, np.stack([t.last_token[layer] for t in store]))
        assert np.array_equal(store.features(), store.features(store.num_layers - 1))
        for layer in (store.num_layers, -store.num_layers - 1):
            with pytest.raises(UsageError, match="layer"):
                store.features(layer)


def test_features_are_a_view_of_one_segment(path, tmp_path):
    with tracestore.open(path) as store:
        view = store.features()
        assert not view.flags.owndata and not view.flags.writeable
        assert np.shares_memory(view, store[3].last_token)
    with tracestore.open(make_store(tmp_path / "t.zarr", segments=2)) as store:
        assert store.features().flags.writeable


def test_features_of_bfloat16_are_float32(tmp_path):
    traces = make_traces(5)
    hidden = [[torch.from_numpy(h.astype("f4")).bfloat16() for h in t["hidden_states"]] for t in traces]
    write_store(
        tmp_path / "b.zarr", [t | {"hidden_states": h} for t, h in zip(traces, hidden, strict=True)], dtype="keep"
    )
    with tracestore.open(tmp_path / "b.zarr") as store:
        expected = [torch.from_numpy(t["hidden_states"][1][-1].astype("f4")).bfloat16().float().numpy() for t in traces]
        assert np.array_equal(store.features(1), np.stack(expected)) and store.features(1).dtype == np.float32


def test_features_train_scikit_learn(path):
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    with tracestore.open(path) as store:
        known = ~np.isnan(store.targets())
        model = make_pipeline(StandardScaler(), LogisticRegression())
        features = store.features(-1)[known].astype("f4")
        model.fit(features, store.targets()[known])
        assert model.n_features_in_ == store.hidden_dim and model.predict_proba(features).shape == (21, 2)


def test_the_table_has_one_row_per_trace(path):
    with tracestore.open(path) as store:
        frame = store.to_pandas(texts=True)
        assert list(frame.columns[:5]) == ["question_id", "sample", "score", "label", "group"]
        assert frame["question_id"].tolist() == store.question_ids[:] and frame["question"][3] == "question 3"
        assert frame["score"].isna().sum() == 3 and frame["group"].tolist() == [f"g{k % 3}" for k in range(24)]
        assert frame["num_tokens"].tolist() == store.num_tokens.tolist()
        assert frame["source"][5] == store[5].source[0]
        assert "question" not in store.to_pandas().columns
        means = frame.groupby("group")["score"].mean()
        assert set(means.index) == {"g0", "g1", "g2"}


def test_positions_of_a_narrow_type_select_from_a_large_store():
    for dtype in ("u1", "i1", "u8"):
        assert positions(np.array([5, 0], dtype), 100_000, list).tolist() == [5, 0]
    assert positions(np.array([-1], "i1"), 100_000, list).tolist() == [99_999]
