"""Intervals and tests by question and by group."""

import numpy as np
import pytest
from scipy import stats

from tracestore.evaluation.clusters import (
    Resampling,
    bootstrap_wald_p,
    compare_pairs,
    jackknife_error,
    jackknife_interval,
    jackknife_p,
)
from tracestore.evaluation.evaluate import RunScores
from tracestore.evaluation.metrics import auroc
from tracestore.evaluation.significance import holm


def make_runs(num_groups=12, per_group=10, effect=1.0, group_effect=0.0, seed=0, noise_seed=0):
    """Return two folds of traces in groups; the score has an effect of the label and a random one of the group."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(num_groups), per_group)
    y = rng.integers(0, 2, len(group))
    shift = group_effect * rng.standard_normal(num_groups)
    noise = np.random.default_rng([seed, noise_seed]).standard_normal(len(group))
    score = (effect + shift[group]) * y + noise
    runs = []
    for fold in (0, 1):
        trace = np.flatnonzero(group % 2 == fold)
        names = np.array([f"g{k}" for k in group[trace]], dtype=object)
        questions = np.array([f"q{k}" for k in trace], dtype=object)
        runs.append(RunScores(fold, trace, questions, names, y[trace], score[trace], 0.0, 1.0))
    return runs


def test_jackknife_of_the_mean_is_the_standard_error_of_the_mean():
    x = np.random.default_rng(0).standard_normal(20)
    values = np.array([np.delete(x, k).mean() for k in range(20)])
    assert jackknife_error(values) == pytest.approx(x.std(ddof=1) / np.sqrt(20))
    low, high = jackknife_interval(x.mean(), values)
    expected = stats.t.interval(0.95, 19, x.mean(), stats.sem(x))
    assert (low, high) == pytest.approx(expected)
    assert jackknife_p(x.mean(), values) == pytest.approx(stats.ttest_1samp(x, 0).pvalue)
    assert jackknife_p(0.0, np.zeros(5)) == 1 and jackknife_p(0.3, np.full(5, 0.3)) == 0


def test_leaving_out_a_group_is_the_auroc_without_its_traces():
    runs = make_runs()
    found = Resampling(runs, "group", 0)
    assert found.method == "jackknife" and len(found.values) == 12
    expected = []
    for name in [f"g{k}" for k in (0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11)]:
        expected.append(np.mean([auroc(r.y[r.group != name], r.logit[r.group != name]) for r in runs]))
    np.testing.assert_allclose(np.sort(found.values), np.sort(expected))
    low, high = found.interval()
    assert low < found.estimate < high <= 1


def test_interval_by_group_is_longer_if_groups_differ():
    length = {}
    for effect in (0.0, 3.0):
        runs = make_runs(num_groups=20, per_group=20, group_effect=effect, seed=3)
        for unit in ("question", "group"):
            low, high = Resampling(runs, unit, 0).interval()
            length[effect, unit] = high - low
    assert length[3.0, "group"] > 1.5 * length[3.0, "question"]
    assert length[0.0, "group"] < 2 * length[0.0, "question"]


def test_method_follows_the_number_of_groups():
    assert Resampling(make_runs(num_groups=100, per_group=3), "group", 0).method == "bootstrap"
    assert Resampling(make_runs(num_groups=99, per_group=3), "group", 0).method == "jackknife"
    few = Resampling(make_runs(num_groups=4), "group", 0)
    assert few.method is None and few.interval() is None and "4 groups" in few.reason
    pairs = compare_pairs({"a": few, "b": few})
    assert pairs[0]["p"] is None and pairs[0]["p_holm"] is None and pairs[0]["difference"] == 0


def test_questions_without_a_group_are_no_groups():
    runs = make_runs()
    for run in runs:
        run.group[:] = ""
    found = Resampling(runs, "group", 0)
    assert found.interval() is None and "0 groups" in found.reason
    assert Resampling(runs, "question", 0).interval() is not None
    runs[0].group[0] = "g"
    assert Resampling(runs, "group", 0).method == "bootstrap"


def test_fold_that_has_one_class_without_a_group_is_left_out():
    runs = make_runs(num_groups=6)
    for run in runs:
        run.y[:] = run.group == run.group[0]
    found = Resampling(runs, "group", 0)
    assert np.isfinite(found.values).all()


@pytest.mark.parametrize("unit", ["question", "group"])
def test_pairs_are_adjusted_by_holm(unit):
    models = {
        name: make_runs(effect=e, noise_seed=k) for k, (name, e) in enumerate(zip("abc", (3, 2.9, 0), strict=True))
    }
    pairs = compare_pairs({name: Resampling(runs, unit, 0) for name, runs in models.items()})
    assert [(p["first"], p["second"]) for p in pairs] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert [p["p_holm"] for p in pairs] == holm([p["p"] for p in pairs])
    assert pairs[1]["p_holm"] < 0.01 < pairs[0]["p"]
    for pair in pairs:
        assert pair["interval"][0] < pair["difference"] < pair["interval"][1]
    same = compare_pairs({"a": Resampling(models["a"], unit, 0), "b": Resampling(models["a"], unit, 0)})
    assert same[0]["difference"] == 0 and same[0]["p"] == 1


def test_p_value_of_the_bootstrap_is_finer_than_its_resamples():
    values = np.random.default_rng(0).normal(0.3, 0.05, 2000)
    assert bootstrap_wald_p(0.3, values) == pytest.approx(2 * stats.norm.sf(0.3 / values.std(ddof=1)))
    assert bootstrap_wald_p(0.3, values) < 1e-6
    assert bootstrap_wald_p(0.0, np.zeros(9)) == 1 and bootstrap_wald_p(0.1, np.full(9, 0.1)) == 0


def test_p_values_by_group_are_uniform_without_a_difference():
    # Two detectors with the same effect, and groups that differ: rejected in about 5 of 100 cases.
    rejected = 0
    for seed in range(200):
        runs = [make_runs(num_groups=16, per_group=8, group_effect=1.0, seed=seed, noise_seed=k) for k in (0, 1)]
        a, b = (Resampling(r, "group", 0) for r in runs)
        rejected += jackknife_p(a.estimate - b.estimate, a.values - b.values) < 0.05
    assert 1 <= rejected <= 24
