"""The models of `tracestore train` through the interface of detectors."""

import numpy as np
import pytest

import tracestore
from tests.helpers import make_traces, write_store
from tests.train.runs import write_labeled
from tracestore.benchmark.run import _with_references
from tracestore.detectors.layers.model_config import ModelConfig
from tracestore.detectors.registry import MODELS, make_detector
from tracestore.evaluation.metrics import auroc
from tracestore.evaluation.store_split import inner_bins, trace_keys


@pytest.mark.long
@pytest.mark.parametrize("name", ["lstm_solo", "gnn_det_lstm"])
def test_model_is_trained_on_the_given_traces_and_scores_others(name, tmp_path):
    store = tracestore.open(write_labeled(tmp_path / "s.zarr"))
    labels = np.arange(60) % 2
    detector = make_detector(name, epochs=3).fit(store, np.arange(48), labels[:48])
    order = np.arange(48, 60)[::-1]
    scores = detector.score(store, order)
    np.testing.assert_allclose(scores[::-1], detector.score(store, order[::-1]), atol=1e-6)
    assert auroc(labels[order], scores) > 0.8
    assert set(detector.chosen) == {"threshold", "temperature"} and detector.parameters["epochs"] == 3
    again = make_detector(name, epochs=3).fit(store, np.arange(48), labels[:48])
    np.testing.assert_array_equal(again.score(store, order), scores)


@pytest.mark.parametrize("name", MODELS)
def test_models_state_the_layers_that_they_read(name, tmp_path):
    store = tracestore.open(write_store(tmp_path / "s.zarr", make_traces(2)))
    config = MODELS[name].model_config(ModelConfig.from_store(store))
    assert (make_detector(name).layers == "all") == (len(config.layers_read) == store.num_layers)


@pytest.mark.long
def test_model_is_trained_on_the_given_labels_whatever_the_scores(tmp_path):
    """A store of other scores with the same states gives the same detector: its own threshold does not count."""
    labels, found = np.arange(48) % 2, []
    for scale in (1, 100):
        path = write_store(tmp_path / f"{scale}.zarr", make_traces(48, tokens=2), score=lambda k, s=scale: s * (k % 2))
        store = tracestore.open(path)
        found.append(make_detector("lstm_solo", epochs=1).fit(store, np.arange(48), labels).score(store, np.arange(48)))
    np.testing.assert_array_equal(*found)


def test_inner_bins_keep_questions_and_groups_together(sampled):
    store = tracestore.open(sampled)
    indices, labels = np.arange(80), np.arange(80) // 7 % 2
    for keep in ("question", "group"):
        bins = inner_bins(store, indices, labels, 3, 0, keep)
        keys = trace_keys(store, indices, keep)
        assert set(bins) == {0, 1, 2}
        assert len(set(zip(keys, bins.tolist(), strict=True))) == len(set(keys))
    other = inner_bins(store, indices, labels, 3, 1, "question")
    assert (other != inner_bins(store, indices, labels, 3, 0, "question")).any()


@pytest.mark.parametrize(("wanted", "twins"), [("gnn_det_lstm", 1), ("gvae_lstm", 1), ("lstm_solo", 0), ("length", 0)])
def test_the_twin_of_a_graph_detector_is_in_every_comparison(wanted, twins):
    found = _with_references([wanted])
    assert (
        wanted in found and [name.removesuffix("_no_edges") for name in found if "no_edges" in name] == [wanted] * twins
    )
