"""Nothing leaks from the tested traces: labels that hold no information give AUROC 0.5."""

import numpy as np
import pytest

import tracestore
from tests.helpers import make_trace, write_store
from tracestore.benchmark.run import BenchmarkOptions, run_benchmark
from tracestore.detectors.registry import select

COUNT, QUESTIONS, GROUPS = 240, 120, 12


def write_groups(path, labels):
    """Write two answers to each question whose arrays reveal their group, and nothing else."""
    traces = []
    for k in range(COUNT):
        group = k % GROUPS
        trace, rng = make_trace(k, tokens=7 + group % 3), np.random.default_rng(k)
        center = 2 * np.random.default_rng(1000 + group).standard_normal(8)
        trace["hidden_states"] = [(h + center).astype("f2") for h in trace["hidden_states"]]
        weights = [np.tril(a + group / 4 * np.eye(len(a[0]))) for a in trace["attentions"]]
        trace["attentions"] = [(a / a.sum(-1, keepdims=True)).astype("f2") for a in weights]
        logprob = -rng.exponential(1 + group / 4, len(trace["tokens"]))
        answer = {"question_id": f"q{k % QUESTIONS}", "sample": k // QUESTIONS, "prompt_length": 3}
        text = {"generated_answer_clean": "yes" if rng.random() < (group + 1) / 14 else "no"}
        traces.append(trace | answer | text | {"token_logprob": logprob, "token_entropy": -logprob})
    return write_store(path, traces, label=lambda k: int(labels[k]), group=lambda k: f"g{k % GROUPS}", attention="mean")


def by_scheme(results):
    """Yield scheme, detector and metrics."""
    (entry,) = results["stores"].values()
    assert entry["skipped"] == {}
    for name, found in entry["detectors"].items():
        for scheme, test in found["schemes"].items():
            yield scheme, name, test


OPTIONS = BenchmarkOptions(tuple(select("features")))


@pytest.mark.long
def test_labels_that_depend_on_the_group_only_give_chance_within_groups(tmp_path):
    rates = np.random.default_rng(5).permutation(np.linspace(0.1, 0.9, GROUPS))
    labels = np.random.default_rng(6).random(COUNT) < rates[np.arange(COUNT) % GROUPS]
    results = run_benchmark([write_groups(tmp_path / "s.zarr", labels)], tmp_path / "out", OPTIONS, lambda _: None)
    overall = {}
    for scheme, name, test in by_scheme(results):
        # 4 standard errors: there are about 800 pairs.
        assert abs(test["within_group_auroc"] - 0.5) < 0.17, (scheme, name)
        overall[scheme, name] = test["auroc"]
    assert overall["question", "probe_mean"] > 0.65 and overall["question", "group_rate"] > 0.65
    assert overall["group", "group_rate"] == 0.5


@pytest.mark.long
def test_permuted_labels_give_chance(tmp_path):
    labels = np.random.default_rng(7).permutation(np.arange(COUNT) % 2)
    results = run_benchmark([write_groups(tmp_path / "s.zarr", labels)], tmp_path / "out", OPTIONS, lambda _: None)
    for scheme, name, test in by_scheme(results):
        low, high = test["interval_by_question"]
        # With two tests of each detector, a few of the 95 % intervals miss by chance; an interval of 99.9 % is 1.7 times as long.
        middle, half = (low + high) / 2, 1.7 * (high - low) / 2
        assert middle - half <= 0.5 <= middle + half, (scheme, name, low, high)
    store = tracestore.open(tmp_path / "s.zarr")
    assert len(store) == results["stores"]["s"]["num_traces"]
