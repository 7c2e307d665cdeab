"""The logistic regression of the probe, compared with scikit-learn."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tracestore.detectors.logistic import fit_linear
from tracestore.evaluation.probe import _PRECISION


@pytest.mark.parametrize(("n", "d", "offset"), [(70, 576, 0), (70, 576, 3000), (4500, 64, 1), (5, 3, 0), (2, 1, 0)])
def test_logits_equal_those_of_scikit_learn(n, d, offset):
    rng = np.random.default_rng(n + d)
    x = (rng.normal(size=(n, d)) * rng.lognormal(0, 2, d) + offset * rng.normal(size=d)).astype("f4")
    x[:, -1] = 7 if d > 1 else x[:, -1]
    y = (x[:, 0] + rng.normal(size=n) * x[:, 0].std() > np.median(x[:, 0])).astype(int)
    y[:2] = 0, 1
    reference = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=10_000, tol=1e-9))
    reference.fit(x.astype("f8"), y)
    held_out = x + rng.normal(size=x.shape).astype("f4")
    found = fit_linear(x, y, 0.01, **_PRECISION).logits(held_out)
    expected = reference.decision_function(held_out.astype("f8"))
    np.testing.assert_allclose(found, expected, atol=1e-4 * max(1, np.abs(expected).max()))


def test_separable_classes_and_constant_columns():
    x = np.array([[-1, 5], [-2, 5], [1, 5], [2, 5]], "f4")
    found = fit_linear(x, np.array([0, 0, 1, 1]), 1e6, **_PRECISION)
    assert (found.logits(x) * [-1, -1, 1, 1] > 5).all() and found.weight[1] == 0
