"""Detectors of several answers to a question, against values that numpy computes by their formulas."""

import numpy as np
import pytest

import tracestore
from tests.detectors.published.conftest import BEGIN, make_labeled, write_published
from tests.helpers import make_trace, write_store
from tracestore.detectors.apart import list_detectors
from tracestore.detectors.interface import missing_fields
from tracestore.detectors.registry import make_detector, select

QUESTIONS, SAMPLES = 8, 3
NAMES = [name for name in select("features") if "samples" in make_detector(name).fields]
EVERY = np.arange(QUESTIONS * SAMPLES + 1)


def text_of(question, sample):
    """Return answers of which, from question to question, all, two or none are equal after normalization."""
    return (("The 12.", "12", "12!"), ("Paris", "the Paris", "Lyon"), ("one", "two", "three"))[question % 3][sample]


@pytest.fixture
def store(tmp_path):
    """Open a store with three answers to each of eight questions, sample after sample, and one answer to a ninth."""
    traces = []
    for sample in range(SAMPLES):
        for question in range(QUESTIONS):
            trace = make_labeled(QUESTIONS * sample + question)
            answer = {"question_id": f"q{question}", "sample": sample}
            traces.append(trace | answer | {"generated_answer_clean": text_of(question, sample)})
    return tracestore.open(write_published(tmp_path / "s.zarr", [*traces, make_labeled(99)]))


def scores_of(name, store):
    return make_detector(name).fit(store, EVERY, EVERY % 2).score(store, EVERY)


def by_question(values):
    """Return the value of each question for each trace, NaN for the question with one answer."""
    return np.r_[np.tile(values, SAMPLES), np.nan]


def entropies(store, probability):
    """Return the entropy over clusters of equal answers."""
    expected = []
    for question in range(QUESTIONS):
        p = np.array([probability(store[QUESTIONS * sample + question]) for sample in range(SAMPLES)])
        p /= p.sum()
        clusters = ([p.sum()], [p[0] + p[1], p[2]], p)[question % 3]
        expected.append(-sum(c * np.log(c) for c in clusters))
    return by_question(expected)


def test_semantic_entropy_sums_likelihoods_of_equal_answers(store):
    expected = entropies(store, lambda trace: np.exp(trace.token_logprob[BEGIN:].astype("f8").mean()))
    np.testing.assert_allclose(scores_of("semantic_entropy", store), expected, rtol=1e-5, atol=1e-12)


def test_discrete_semantic_entropy_counts_equal_answers(store):
    expected = entropies(store, lambda trace: 1.0)
    assert expected[:3] == pytest.approx([0, np.log(3) - 2 / 3 * np.log(2), np.log(3)])
    np.testing.assert_allclose(scores_of("discrete_semantic_entropy", store), expected, rtol=1e-5, atol=1e-12)


def test_eigen_score_is_the_mean_log_eigenvalue_of_the_covariance(store):
    expected = []
    for question in range(QUESTIONS):
        z = np.stack([store[QUESTIONS * k + question].hidden_states[1, -1].astype("f8") for k in range(SAMPLES)], 1)
        covariance = z.T @ (np.eye(8) - 1 / 8) @ z
        expected.append(np.log(np.linalg.eigvalsh(covariance + 1e-3 * np.eye(SAMPLES))).mean())
    np.testing.assert_allclose(scores_of("eigen_score", store), by_question(expected), rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_fitted_and_no_other_question_counts(name, store):
    detector = make_detector(name).fit(store, EVERY[:4], np.array([0, 1, 0, 1]))
    assert detector.state() == {} and detector.chosen == {} and detector.kind == "untrained"
    assert detector.reference and detector.cost and detector.layers
    np.testing.assert_array_equal(detector.score(store, EVERY[5:9]), scores_of(name, store)[5:9])


def test_one_answer_without_a_feature_leaves_its_question_without_a_score(tmp_path):
    traces = [make_labeled(k) | {"question_id": f"q{k // 2}", "sample": k % 2} for k in range(4)]
    traces[0] = make_trace(0, tokens=4) | {"question_id": "q0", "sample": 0}
    traces[0]["hidden_states"][1][:] = np.inf
    del traces[0]["generated_answer_clean"]
    store = tracestore.open(write_store(tmp_path / "s.zarr", traces))
    for name in NAMES:
        scores = make_detector(name).score(store, np.arange(4))
        assert np.isnan(scores[:2]).all() and np.isfinite(scores[2:]).all()


def test_store_with_one_answer_per_question_does_not_apply(tmp_path):
    traces = [make_labeled(k) for k in range(4)]
    for trace in traces:
        del trace["generated_answer_clean"]
    single = tracestore.open(write_store(tmp_path / "s.zarr", traces))
    rows = {row["name"]: row["missing"] for row in list_detectors(single)}
    for name in NAMES:
        assert "one answer per question, several are needed: tracestore extract --samples K" in rows[name][0]
    assert "lack the text of the answer" in next(missing_fields(single, ("answer_text",)))
