"""Test the principal components against a full decomposition."""

import numpy as np
import pytest

from tracestore.serve.projection import principal_components


@pytest.mark.parametrize("shape", [(3, 1), (3, 8), (40, 5), (100, 300), (300, 60)])
def test_components_are_those_of_a_full_decomposition(shape):
    rng = np.random.default_rng(1)
    scales = np.sqrt(np.arange(1, shape[0] + 1))[:, None] if min(shape) > 12 else 1.0
    states = rng.standard_normal(shape) / scales
    states += 3 * np.outer(rng.standard_normal(shape[0]), rng.standard_normal(shape[1]))
    x = (states - states.mean(0)) / states.std(0)
    left, sizes, _ = np.linalg.svd(x, full_matrices=False)
    points, share = principal_components(states.astype("f4"))
    assert points.shape == (shape[0], 2) and share == pytest.approx((sizes[:2] ** 2).sum() / (sizes**2).sum(), rel=1e-3)
    for k in range(min(2, len(sizes))):
        expected = left[:, k] * sizes[k]
        sign = np.sign(expected[np.abs(expected).argmax()])
        error = np.abs(points[:, k] - sign * expected).max()
        assert error < (1e-4 if k == 0 or min(shape) <= 12 else 0.3) * np.abs(expected).max()


def test_constant_and_infinite_columns_have_no_weight():
    states = np.ones((4, 3), "f4")
    points, share = principal_components(states)
    assert (points == 0).all() and share == 0
    states[0] = [np.nan, np.inf, 2]
    points, share = principal_components(states)
    assert np.isfinite(points).all() and 0 < share <= 1 + 1e-9
    assert principal_components(states[:0])[0].shape == (0, 2)
