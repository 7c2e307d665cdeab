"""Metrics of selective answering and within groups, against definitions that loop over traces."""

import numpy as np
import pytest

from tracestore.evaluation.metrics import auroc, prediction_rejection_ratio, risk_coverage_area, within_group_auroc


def test_risk_coverage_area_is_the_mean_risk_over_coverages():
    y, score = np.array([0, 1, 0, 1, 1]), np.array([0.1, 0.2, 0.3, 0.4, 0.5])
    assert risk_coverage_area(y, score) == pytest.approx(np.mean([0, 1 / 2, 1 / 3, 2 / 4, 3 / 5]))
    assert risk_coverage_area(np.zeros(3), np.arange(3)) == 0


def test_equal_scores_count_as_their_mean_over_all_orders():
    rng = np.random.default_rng(0)
    y, score = rng.integers(0, 2, 12), rng.integers(0, 4, 12).astype(float)
    orders = [risk_coverage_area(y, score + 1e-6 * rng.random(12)) for _ in range(4000)]
    assert risk_coverage_area(y, score) == pytest.approx(np.mean(orders), abs=0.005)


def test_rejection_ratio_is_1_for_perfect_and_0_for_constant_scores():
    y = np.array([0, 1, 0, 0, 1])
    assert prediction_rejection_ratio(y, y.astype(float)) == pytest.approx(1)
    assert prediction_rejection_ratio(y, np.zeros(5)) == pytest.approx(0)
    assert prediction_rejection_ratio(y, 1.0 - y) < 0
    assert np.isnan(prediction_rejection_ratio(np.ones(3), np.arange(3)))


def test_auroc_within_groups_counts_pairs_of_a_group():
    rng = np.random.default_rng(1)
    y, score, group = rng.integers(0, 2, 60), rng.integers(0, 9, 60).astype(float), rng.integers(0, 5, 60)
    pairs = [
        (score[i] > score[j]) + 0.5 * (score[i] == score[j])
        for i in range(60)
        for j in range(60)
        if y[i] == 1 and y[j] == 0 and group[i] == group[j]
    ]
    assert within_group_auroc(y, score, group) == pytest.approx(np.mean(pairs))
    # Scores that are a function of the group say nothing within groups, whatever they say overall.
    y = (group + rng.random(60) > 2.5).astype(int)
    assert within_group_auroc(y, group.astype(float), group) == 0.5 and auroc(y, group.astype(float)) > 0.8
    assert np.isnan(within_group_auroc(np.array([0, 1]), np.zeros(2), np.array([0, 1])))
