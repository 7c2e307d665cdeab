"""Intervals and tests by question and by group."""

import numpy as np
import pytest
from scipy import stats

from tracestore.evaluation.evaluate import RunScores
from tracestore.evaluation.metrics import auroc
from tracestore.evaluation.significance import (
    Resampling,
    compare_pairs,
    holm,
    jackknife_error,
    jackknife_interval,
    p_value,
)


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
    assert p_value(x.mean(), jackknife_error(values), 19) == pytest.approx(stats.ttest_1samp(x, 0).pvalue)
    assert p_value(0.0, 0.0, 4) == 1 and p_value(0.3, 0.0, 4) == 0


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


def spread_runs(num_positive, seed=0):
    """Return five folds by question of 110 groups of three traces, each group in several folds."""
    rng = np.random.default_rng(seed)
    y = np.zeros(330, int)
    y[rng.choice(330, num_positive, replace=False)] = 1
    score, fold = y + rng.standard_normal(330), np.zeros(330, int)
    for label in (0, 1):
        fold[y == label] = np.arange((y == label).sum()) % 5
    names = np.array([[f"q{k}", f"g{k // 3}"] for k in range(330)], dtype=object)
    traces = [np.flatnonzero(fold == k) for k in range(5)]
    return [RunScores(k, t, *names[t].T, y[t], score[t], 0.0, 1.0) for k, t in enumerate(traces)]


@pytest.mark.parametrize("num_positive", [12, 20, 150])
def test_groups_that_lie_in_several_folds_are_drawn_as_a_whole(num_positive):
    """A fold whose drawn traces have one class is left out of the mean."""
    runs = spread_runs(num_positive)
    found = Resampling(runs, "group", 0)
    assert found.method == "bootstrap" and np.isfinite(found.values).all()
    groups = sorted({name for run in runs for name in run.group})
    labels = {name: {int(y) for run in runs for y in run.y[run.group == name]} for name in groups}
    rows = [{name: np.flatnonzero(run.group == name) for name in groups} for run in runs]
    rng, expected = np.random.default_rng(1), []
    for _ in range(300):
        drawn = []
        for classes in ({0}, {1}, {0, 1}):
            members = [name for name in groups if labels[name] == classes]
            drawn += rng.choice(members, len(members)).tolist() if members else []
        chosen = [np.concatenate([of[name] for name in drawn]) for of in rows]
        values = [auroc(run.y[k], run.logit[k]) for run, k in zip(runs, chosen, strict=True)]
        expected.append(np.nanmean(values))
    assert found.values.std() == pytest.approx(np.std(expected), rel=0.15)
    assert found.values.mean() == pytest.approx(np.mean(expected), abs=0.02)


def test_class_of_one_group_has_no_interval_by_group():
    """The AUROC without that group is not defined."""
    (run, _) = make_runs()
    run.y[:] = run.group == "g0"
    found = Resampling([run], "group", 0)
    assert found.method is None and found.interval() is None and "both classes" in found.reason
    (pair,) = compare_pairs({"a": found, "b": found})
    assert pair["p"] is None and pair["interval"] is None


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
    error = np.random.default_rng(0).normal(0.3, 0.05, 2000).std(ddof=1)
    assert p_value(0.3, error) == pytest.approx(2 * stats.norm.sf(0.3 / error))
    assert p_value(0.3, error) < 1e-6
    assert p_value(0.0, 0.0) == 1 and p_value(0.1, 0.0) == 0


@pytest.mark.long
def test_p_values_by_group_are_uniform_without_a_difference():
    # Two detectors with the same effect, and groups that differ: rejected in about 5 of 100 cases.
    rejected = 0
    for seed in range(200):
        runs = [make_runs(num_groups=16, per_group=8, group_effect=1.0, seed=seed, noise_seed=k) for k in (0, 1)]
        a, b = (Resampling(r, "group", 0) for r in runs)
        error = jackknife_error(a.values - b.values)
        rejected += p_value(a.estimate - b.estimate, error, len(a.values) - 1) < 0.05
    assert 1 <= rejected <= 24
