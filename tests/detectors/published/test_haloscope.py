"""HaloScope against an exhaustive choice with singular vectors of numpy."""

import numpy as np
import pytest

import tracestore
from tests.detectors.published.conftest import COUNT, make_labeled
from tests.detectors.published.test_published import newton
from tests.helpers import write_store
from tracestore.detectors.logistic import fit_linear
from tracestore.detectors.published.haloscope import LABELED_BINS, QUANTILES, membership_scores
from tracestore.detectors.published.linear import FIRST_C
from tracestore.detectors.registry import make_detector
from tracestore.errors import TrainingError
from tracestore.evaluation.metrics import auroc
from tracestore.evaluation.store_split import inner_bins

TRAIN, TEST = np.arange(40), np.arange(40, COUNT)
LABELS = np.arange(COUNT) % 2


def membership(x, unlabeled, k):
    """Return (1 / k) sum_j s_j (f v_j)^2 of each row."""
    f = x - x[unlabeled].mean(0)
    _, singular, right = np.linalg.svd(f[unlabeled], full_matrices=False)
    return np.array([sum(singular[j] * (row @ right[j]) ** 2 for j in range(k)) / k for row in f])


def test_membership_scores_by_formula():
    rng = np.random.default_rng(0)
    x, unlabeled = rng.standard_normal((30, 6)) * [5, 3, 2, 1, 1, 1] + 10, np.arange(5, 30)
    found = membership_scores(x.astype("f4"), unlabeled, 4)
    expected = np.stack([membership(x.astype("f4").astype("f8"), unlabeled, k) for k in range(1, 5)], 1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert membership_scores(x, unlabeled, 10).shape == (30, 5)


def test_probe_learns_the_estimated_classes_of_unlabeled_traces(store):
    detector = make_detector("halo_scope").fit(store, TRAIN, LABELS[TRAIN])
    x = np.stack([t.last_token.astype("f8") for t in store], 1)
    is_labeled = inner_bins(store, TRAIN, LABELS[TRAIN], LABELED_BINS, 0, "question") == 0
    labeled, unlabeled = np.flatnonzero(is_labeled), np.flatnonzero(~is_labeled)
    values = {
        (layer, k): auroc(LABELS[labeled], membership(x[layer, TRAIN], unlabeled, k)[labeled])
        for layer in range(3)
        for k in range(1, 8)
    }
    layer, k = max(values, key=lambda key: abs(values[key] - 0.5))
    zeta = membership(x[layer, TRAIN], unlabeled, k)[unlabeled] * (1 if values[layer, k] >= 0.5 else -1)
    classes = {q: (zeta > np.quantile(zeta, q)).astype(int) for q in QUANTILES}
    chosen = max(
        QUANTILES,
        key=lambda q: auroc(
            LABELS[labeled], fit_linear(x[layer, unlabeled], classes[q], FIRST_C).logits(x[layer, labeled])
        ),
    )
    expected = {"layers": [layer], "components": k, "sign": 1 if values[layer, k] >= 0.5 else -1, "quantile": chosen}
    assert detector.chosen == expected
    z, w = x[layer, unlabeled], newton(x[layer, unlabeled], classes[chosen], FIRST_C)
    logits = (x[layer, TEST] - z.mean(0)) / z.std(0) @ w[:-1] + w[-1]
    np.testing.assert_allclose(detector.score(store, TEST), logits, rtol=1e-5, atol=1e-7)


def test_labels_of_unlabeled_traces_are_not_read(store, monkeypatch):
    is_labeled = inner_bins(store, TRAIN, LABELS[TRAIN], LABELED_BINS, 0, "question") == 0
    monkeypatch.setattr("tracestore.detectors.published.haloscope.inner_bins", lambda *_: np.where(is_labeled, 0, 1))
    other = np.where(is_labeled, LABELS[TRAIN], np.random.default_rng(0).permutation(LABELS[TRAIN]))
    scores = [make_detector("halo_scope").fit(store, TRAIN, y).score(store, TEST) for y in (LABELS[TRAIN], other)]
    np.testing.assert_array_equal(*scores)


def test_states_without_any_variance_are_refused(tmp_path):
    traces = [make_labeled(k) for k in range(12)]
    for trace in traces:
        trace["hidden_states"] = [np.ones_like(h) for h in trace["hidden_states"]]
    store = tracestore.open(write_store(tmp_path / "s.zarr", traces))
    with pytest.raises(TrainingError, match="no threshold separates them"):
        make_detector("halo_scope").fit(store, np.arange(12), LABELS[:12])
