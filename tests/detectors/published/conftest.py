"""Fixtures of the tests of published detectors: a store in which everything predicts the label a little."""

import numpy as np
import pytest

import tracestore
from tests.helpers import make_trace, write_store

COUNT, BEGIN = 60, 3


def make_labeled(k, shift=1.0):
    """Return a trace of a question whose label is k % 2, and whose arrays depend on it."""
    trace, label = make_trace(k, tokens=6 + k % 3, dim=8), k % 2
    rng = np.random.default_rng(k)
    trace["hidden_states"] = [
        (h + shift * label * (layer == 1) * np.r_[1, np.zeros(7)]).astype("f2")
        for layer, h in enumerate(trace["hidden_states"])
    ]
    trace["attentions"] = [(a / a.sum(-1, keepdims=True) * (1 - 0.2 * label)).astype("f2") for a in trace["attentions"]]
    logprob = -rng.exponential(1 + label, 6 + k % 3)
    return trace | {"prompt_length": BEGIN, "token_logprob": logprob, "token_entropy": -logprob * rng.random()}


def write_published(path, traces=None):
    """Write 60 traces of 12 groups, or others, with the label k % 2."""
    traces = traces or [make_labeled(k) for k in range(COUNT)]
    return write_store(path, traces, label=lambda k: k % 2, group=lambda k: f"g{k // 5}", attention="heads")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Keep cached features in the folder of the test."""
    monkeypatch.setenv("TRACESTORE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def published_store(tmp_path_factory):
    """Write the store that no test changes."""
    return write_published(tmp_path_factory.mktemp("published") / "s.zarr")


@pytest.fixture
def store(published_store):
    """Open the store."""
    return tracestore.open(published_store)
