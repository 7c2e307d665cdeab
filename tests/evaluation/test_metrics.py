"""Metrics compared with their definitions, scikit-learn and simulations."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit
from scipy.stats import kstest, rankdata
from sklearn.metrics import average_precision_score, brier_score_loss, roc_auc_score

from tests.conftest import NUM_RESAMPLES
from tracestore.console import nan_to_none
from tracestore.evaluation import metrics
from tracestore.evaluation.evaluate import BootstrapResampler, RunScores, evaluate_runs
from tracestore.evaluation.significance import Resampling, bootstrap_p, compare, delong, delong_p, holm, midranks
from tracestore.reports.detector_tables import TrainingResults, format_table, model_table, pair_table, verdict


def scored(y, logit, *, fold=0, trace=None, question=None, group=None, threshold=0.0, temperature=1.0):
    n = len(y)
    trace = np.arange(n) if trace is None else np.asarray(trace)
    question = [f"q{k}" for k in trace] if question is None else question
    return RunScores(
        fold,
        trace,
        np.array(question, dtype=object),
        np.array([""] * n if group is None else group, dtype=object),
        np.asarray(y),
        np.asarray(logit, float),
        threshold,
        temperature,
    )


def both_classes(draw, n):
    y = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
    return np.array([0, 0, 1, 1, *y])


@st.composite
def labels_and_scores(draw, sets=1):
    """Draw labels and scores with few distinct values, so that ties are common."""
    y = both_classes(draw, draw(st.integers(0, 12)))
    values = st.lists(st.integers(-3, 3), min_size=len(y), max_size=len(y))
    return y, np.array([draw(values) for _ in range(sets)], float)


@given(labels_and_scores())
def test_youden_threshold_is_the_best_score(drawn):
    """Also for scores that order the traces worse than chance."""
    y, (score,) = drawn

    def youden(threshold):
        return (score[y == 1] >= threshold).mean() - (score[y == 0] >= threshold).mean()

    threshold = metrics.youden_threshold(y, score)
    assert threshold in score and youden(threshold) == pytest.approx(max(youden(value) for value in score))


def test_known_values():
    y, score = np.array([0, 0, 1, 1]), np.array([0.1, 0.4, 0.35, 0.8])
    assert metrics.auroc(y, score) == 0.75 and np.isnan(metrics.auroc(y[:2], score[:2]))
    assert np.isnan(metrics.auroc(y, np.where(np.arange(len(y)) == 0, np.nan, score)))
    with pytest.raises(ValueError, match=f"found {len(y)} labels and 2 scores"):
        metrics.auroc(y, score[:2])
    assert metrics.threshold_metrics(y, score >= 0.35) == {
        "accuracy": 0.75,
        "precision": 2 / 3,
        "recall": 1.0,
        "f1": 0.8,
    }
    assert metrics.youden_threshold(y, score) in (0.35, 0.8)
    auprc = metrics.RankMetrics(y, score).weighted(np.ones((1, 4)))[0, 1]
    assert auprc == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    p = np.array([0.0, 0.2, 0.2, 1.0])
    assert metrics.brier(y, p) == pytest.approx(brier_score_loss(y, p)) == pytest.approx((0.04 + 0.64) / 4)
    bins = metrics.reliability(y, p, 5)
    assert [(b["low"], b["count"], b["mean_probability"], b["fraction"]) for b in bins] == [
        (0.0, 1, 0.0, 0.0),
        (0.2, 2, 0.2, 0.5),
        (0.8, 1, 1.0, 1.0),
    ]
    assert metrics.ece(bins) == pytest.approx(0.5 * 0.3)
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06]) and holm([0.9, 0.8]) == [1.0, 1.0]
    assert bootstrap_p(np.ones(999)) == 0.002 and bootstrap_p(np.zeros(9)) == 1.0


@pytest.mark.long
@given(labels_and_scores(), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_weighted_metrics_equal_those_of_scikit_learn(case, seed):
    y, (score,) = case
    weights = np.random.default_rng(seed).integers(0, 4, (5, len(y))).astype(float)
    weights[:, [0, 2]] += 1  # one trace of each class
    found = metrics.RankMetrics(y, score).weighted(weights)
    for w, (auroc, auprc) in zip(weights, found, strict=True):
        assert auroc == pytest.approx(roc_auc_score(y, score, sample_weight=w), abs=1e-12)
        assert auprc == pytest.approx(average_precision_score(y, score, sample_weight=w), abs=1e-12)


def test_resamples_contain_whole_questions_of_each_stratum():
    clusters = np.array([0, 0, 1, 2, 2, 2, 3, 4])
    strata = np.array([1, 1, 1, 2, 2, 2, 2, 3])
    draws = metrics.bootstrap(lambda w: w, clusters, strata, 0)
    assert draws.shape == (NUM_RESAMPLES, 8) and np.array_equal(
        draws, metrics.bootstrap(lambda w: w, clusters, strata, 0)
    )
    first = draws[:, [0, 2, 3, 6, 7]]
    assert np.array_equal(first[:, [0, 0, 1, 2, 2, 2, 3, 4]], draws)
    assert (first[:, :2].sum(1) == 2).all() and (first[:, 2:4].sum(1) == 2).all() and (first[:, 4] == 1).all()
    assert len(np.unique(first, axis=0)) == 9, "two strata have three distinct draws of two questions each"


def test_samples_of_one_question_do_not_narrow_the_interval():
    rng = np.random.default_rng(1)
    y = rng.integers(0, 2, 80)
    logit = rng.normal(size=80) + y
    once = scored(y, logit)
    four = scored(np.repeat(y, 4), np.repeat(logit, 4), question=[f"q{k // 4}" for k in range(320)])
    apart = scored(np.repeat(y, 4), np.repeat(logit, 4))

    def width(run):
        low, high = evaluate_runs([run], 0)["test"]["auroc_interval"]
        return high - low

    assert width(four) == pytest.approx(width(once), rel=0.1)
    assert width(apart) == pytest.approx(width(once) / 2, rel=0.2)


def test_bootstrap_interval_covers_the_truth(monkeypatch):
    """95 % intervals of 200 samples of two normal distributions with AUROC 0.7602."""
    monkeypatch.setattr(metrics, "BOOTSTRAP_SAMPLES", 300)
    rng, hits = np.random.default_rng(2), 0
    for k in range(200):
        y = np.repeat([0, 1], 40)
        rank_metrics = metrics.RankMetrics(y, rng.normal(size=80) + y)
        draws = metrics.bootstrap(rank_metrics.weighted, np.arange(80), y, k)
        low, high = metrics.percentile_interval(draws[:, 0])
        hits += low <= 0.76025 <= high
    assert 0.89 <= hits / 200 <= 0.99


@given(st.lists(st.lists(st.sampled_from([0.0, -0.0, 1.5, -2.0, np.inf, np.nan, 1e-300]), min_size=5, max_size=5)))
def test_midranks_equal_those_of_scipy(rows):
    values = np.array(rows).reshape(-1, 5)
    np.testing.assert_array_equal(midranks(values), rankdata(values, axis=1))


def delong_by_pairs(y, scores):
    """Compute AUROC and covariance from the m x n kernel, as DeLong et al. 1988 define them."""
    kernel = [np.sign(s[y == 1][:, None] - s[y == 0][None]) / 2 + 0.5 for s in scores]
    v10, v01 = np.array([k.mean(1) for k in kernel]), np.array([k.mean(0) for k in kernel])
    m, n = v10.shape[1], v01.shape[1]
    theta = v10.mean(1)
    d10, d01 = v10 - theta[:, None], v01 - theta[:, None]
    return theta, d10 @ d10.T / (m - 1) / m + d01 @ d01.T / (n - 1) / n


@given(labels_and_scores(sets=3))
@settings(max_examples=50, deadline=None)
def test_delong_equals_its_definition(case):
    y, scores = case
    theta, covariance = delong(y, scores)
    expected_theta, expected_covariance = delong_by_pairs(y, scores)
    np.testing.assert_allclose(theta, expected_theta, atol=1e-12)
    np.testing.assert_allclose(covariance, expected_covariance, atol=1e-12)
    assert theta[0] == pytest.approx(roc_auc_score(y, scores[0]))


def test_delong_under_the_null_and_against_the_bootstrap():
    rng = np.random.default_rng(3)
    y = np.repeat([0, 1], [50, 30])
    p = []
    for _ in range(600):
        shared = rng.normal(size=80) + y
        p.append(delong_p(y, shared + rng.normal(size=80), shared + rng.normal(size=80)))
    assert kstest(p, "uniform").pvalue > 0.01 and 0.03 <= np.mean(np.array(p) < 0.05) <= 0.075
    assert delong_p(y, shared, np.exp(shared)) == 1.0 and delong_p(y, shared, -shared) < 1e-6
    assert delong_p(y, 1.0 * y, 1.0 - y) == 0.0 and np.isnan(delong_p(y[:51], shared[:51], -shared[:51]))
    # The bootstrap gives a similar p value.
    a, b = shared + rng.normal(size=80), 0.6 * shared + rng.normal(size=80)
    (pair,) = compare({"a": [scored(y, a)], "b": [scored(y, b)]}, 0)
    assert pair["method"] == "delong" and pair["p"] == pair["delong_p"] == delong_p(y, a, b)
    assert pair["bootstrap_p"] == pytest.approx(pair["delong_p"], rel=0.5)
    theta, covariance = delong(y, np.stack([a, b]))
    se = np.sqrt(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    low, high = pair["interval"]
    assert high - low == pytest.approx(2 * 1.96 * se, rel=0.1) and pair["difference"] == pytest.approx(
        -np.diff(theta)[0]
    )


def test_the_bootstrap_test_keeps_its_level_with_several_traces_per_question(monkeypatch):
    """Four samples of one question share their score, so that a test by trace rejects too often."""
    monkeypatch.setattr(metrics, "BOOTSTRAP_SAMPLES", 200)
    rng = np.random.default_rng(4)
    y = np.repeat([0, 1], 30)
    by_question, by_trace = [], []
    for _ in range(150):
        shared = rng.normal(size=60) + y
        a, b = (np.repeat(shared + rng.normal(size=60), 4) for _ in range(2))
        yy, question = np.repeat(y, 4), [f"q{k // 4}" for k in range(240)]
        draws = [BootstrapResampler([scored(yy, s, question=question)], 0).draws[:, 0] for s in (a, b)]
        by_question.append(bootstrap_p(draws[0] - draws[1]))
        by_trace.append(delong_p(yy, a, b))
    assert np.mean(np.array(by_question) < 0.05) < 0.11
    assert np.mean(np.array(by_trace) < 0.05) > 0.25
    (pair,) = compare({n: [scored(yy, s, question=question)] for n, s in (("a", a), ("b", b))}, 0)
    assert pair["method"] == "bootstrap" and "delong_p" not in pair


def test_the_bootstrap_test_keeps_its_level_with_one_hallucination_in_each_fold(monkeypatch):
    """Drawn within folds, the only hallucination of a fold would be in every resample."""
    monkeypatch.setattr(metrics, "BOOTSTRAP_SAMPLES", 200)
    rng = np.random.default_rng(4)
    y, fold = np.arange(105) < 5, np.arange(105) % 5
    folds = [np.flatnonzero(fold == k) for k in range(5)]
    p, lengths = [], []
    for _ in range(60):
        shared, draws = rng.normal(size=105) + y, []
        for _ in range(2):
            score = shared + rng.normal(size=105)
            runs = [scored(y[t], score[t], fold=k, trace=t, question=[f"q{i}" for i in t]) for k, t in enumerate(folds)]
            draws.append(BootstrapResampler(runs, 0).draws[:, 0])
        p.append(bootstrap_p(draws[0] - draws[1]))
        lengths.append(np.ptp(metrics.percentile_interval(draws[0])))
    assert np.mean(np.array(p) < 0.05) < 0.2
    assert np.mean(lengths) > 0.2


def test_comparisons_of_three_are_adjusted_and_paired():
    rng = np.random.default_rng(5)
    y = np.repeat([0, 1], 60)
    good = rng.normal(size=120) + 2 * y
    runs = {"good": [scored(y, good)], "same": [scored(y, 3 * good - 1)], "noise": [scored(y, rng.normal(size=120))]}
    pairs = compare(runs, 0)
    assert [(p["first"], p["second"]) for p in pairs] == [("good", "same"), ("good", "noise"), ("same", "noise")]
    assert pairs[0]["difference"] == 0 and pairs[0]["interval"] == [0, 0] and pairs[0]["p_holm"] == 1
    assert pairs[1]["p"] < 1e-4 and pairs[1]["interval"][0] > 0.1
    assert [p["p_holm"] for p in pairs] == holm([p["p"] for p in pairs])
    with pytest.raises(ValueError, match="different traces"):
        compare({"a": [scored(y, good)], "b": [scored(y, good, trace=np.arange(1, 121))]}, 0)


def test_rank_metrics_are_averaged_over_runs_and_decisions_pooled():
    rng = np.random.default_rng(6)
    y = rng.integers(0, 2, 60)
    logit = rng.normal(size=60) + 2 * y
    a = scored(y[:40], logit[:40], fold=0, trace=np.arange(40))
    b = scored(y[40:], logit[40:] + 9, fold=1, trace=np.arange(40, 60), threshold=9.0)
    test = evaluate_runs([a, b], 0)["test"]
    expected = (metrics.auroc(y[:40], logit[:40]) + metrics.auroc(y[40:], logit[40:])) / 2
    assert test["auroc"] == pytest.approx(expected) and test["num_traces"] == 60
    assert test["accuracy"] == pytest.approx(np.mean((logit >= 0) == y))
    # A run with another seed tests the same traces of a fold; each trace counts once.
    again = evaluate_runs([a, b, a, b], 0)["test"]
    assert again["num_traces"] == 60 and again["auroc_interval"] == pytest.approx(test["auroc_interval"])


def test_auroc_by_group():
    y, logit = [0, 1, 1, 0, 1], [0.0, 1.0, 2.0, 3.0, 0.5]
    groups = evaluate_runs([scored(y, logit, group=["a", "a", "b", "", "b"])], 0)["by_group"]
    assert groups == [
        {"group": "a", "auroc": 1.0, "num_traces": 2, "num_hallucinated": 1},
        {"group": "b", "auroc": None, "num_traces": 2, "num_hallucinated": 2},
    ]


@pytest.mark.long
def test_temperature_corrects_overconfidence():
    rng = np.random.default_rng(7)
    true = rng.normal(size=4000)
    y = (rng.random(4000) < expit(true)).astype(int)
    temperature = metrics.fit_temperature(y, 3 * true)
    assert temperature == pytest.approx(3, rel=0.1)
    calibration = evaluate_runs([scored(y, 3 * true, temperature=temperature)], 0)["calibration"]
    assert calibration["ece"] > 0.1 > 0.05 > calibration["scaled"]["ece"]
    assert calibration["scaled"]["brier"] < calibration["brier"]
    assert sum(b["count"] for b in calibration["reliability"]) == 4000
    # Perfect separation gives the most confident temperature, without a warning.
    assert metrics.fit_temperature(np.array([0, 1]), np.array([-800.0, 800.0])) > 0


def folds_of(counts, seed=0):
    """Return folds of so many correct and hallucinated questions."""
    rng, runs, start = np.random.default_rng(seed), [], 0
    for fold, both in enumerate(counts):
        y = np.repeat([0, 1], both)
        runs.append(scored(y, rng.normal(size=len(y)) + y, fold=fold, trace=start + np.arange(len(y))))
        start += len(y)
    return runs


@pytest.mark.parametrize(("counts", "share"), [([(2, 1)] * 5, 0.9995), ([(1, 1), (4, 0), (0, 4)], 0.452)])
def test_resamples_without_a_fold_of_both_classes_are_left_out(counts, share):
    """One resample with NaN made the interval NaN, and the pages of the results failed."""
    models = {name: folds_of(counts, seed=k) for k, name in enumerate("ab")}
    draws = [BootstrapResampler(runs, 0).draws for runs in models.values()]
    assert len(draws[0]) == len(draws[1]) == pytest.approx(share * NUM_RESAMPLES, rel=0.05)
    assert len(draws[0]) < NUM_RESAMPLES and np.isfinite(draws).all()
    entries = {name: evaluate_runs(runs, 0) for name, runs in models.items()}
    (pair,) = compare(models, 0)
    found = nan_to_none(
        [entries["a"]["test"]["auroc_interval"], entries["a"]["test"]["auprc_interval"], pair["interval"]]
    )
    reason = entries["a"]["test"]["too_few"]
    if share > 0.9:
        assert reason is None and all(low < high for low, high in found)
        assert 0 < pair["bootstrap_p"] == bootstrap_p(draws[0][:, 0] - draws[1][:, 0])
    else:
        assert found == [None] * 3 and pair["p"] is None and "of both classes" in reason == pair["too_few"]
    page = model_table(entries, {}, "a") + pair_table([pair]) + verdict(entries, [pair], {})
    results = {"models": entries, "comparisons": [pair], "store": {"path": "s", "num_traces": 9}, "config": {"seed": 0}}
    text = format_table(results) + page + TrainingResults(results)._repr_html_()
    assert "nan" not in text.lower() and text.count(str(reason)) == (2 if reason else 0)
    by_question = Resampling(models["a"], "question", 0)
    assert by_question.reason == reason and by_question.interval() == entries["a"]["test"]["auroc_interval"]


def test_a_run_of_one_class_counts_in_neither_metric():
    """Its average precision without correct traces is 1, with any scores."""
    runs = folds_of([(5, 5)] * 2)
    expected = BootstrapResampler(runs, 0).estimate()
    one_class = scored(np.ones(6, int), np.arange(6), fold=2, trace=np.arange(20, 26))
    np.testing.assert_allclose(BootstrapResampler([*runs, one_class], 0).estimate(), expected)


@pytest.mark.parametrize(
    ("correct", "hallucinated", "is_enough"), [(1, 1, False), (4, 50, False), (50, 4, False), (5, 5, True)]
)
def test_too_few_questions_give_no_interval_and_no_test(correct, hallucinated, is_enough):
    """Without the limit, two traces in correct order had AUROC 1.000 (1.000 to 1.000) and p < 0.001."""
    y = np.repeat([0, 1], [correct, hallucinated])
    n = len(y)
    names = np.array([f"q{k}" for k in range(n)], dtype=object)
    runs = [RunScores(0, np.arange(n), names, names, y, logit, 0.0, 1.0) for logit in (y + 0.0, 1.0 - y)]
    test = evaluate_runs(runs[:1], 0)["test"]
    (pair,) = compare({"a": runs[:1], "b": runs[1:]}, 0)
    assert test["auroc"] == 1 and pair["difference"] == 1
    assert (test["auroc_interval"] is not None) == (test["auprc_interval"] is not None) == is_enough
    assert (pair["p"] is not None) == (pair["interval"] is not None) == (pair["p_holm"] is not None) == is_enough
    if not is_enough:
        assert f"{hallucinated} hallucinated and {correct} correct" in test["too_few"] == pair["too_few"]
    # Several answers to one question count as one question.
    if is_enough:
        runs = [RunScores(0, np.arange(n), np.where(names == "q1", "q0", names), names, y, y + 0.0, 0.0, 1.0)]
        assert evaluate_runs(runs, 0)["test"]["auroc_interval"] is None
