"""Fixtures of the tests of splits and of folds."""

import numpy as np
import pytest

import tracestore
from tests.conftest import NUM_RESAMPLES
from tests.helpers import make_trace
from tracestore.evaluation import metrics


@pytest.fixture(autouse=True)
def all_resamples(monkeypatch):
    """Draw as many resamples as users get."""
    monkeypatch.setattr(metrics, "BOOTSTRAP_SAMPLES", NUM_RESAMPLES)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """A store of 40 questions with 2 samples each; some are in groups, and one question is in two groups."""
    path = tmp_path_factory.mktemp("sampled") / "store.zarr"
    rng = np.random.default_rng(0)
    with tracestore.create(path) as writer:
        for k in range(40):
            for sample in range(2):
                group = "" if k >= 30 else f"g{k // 3 + (k == 29 and sample)}"
                trace = {**make_trace(k, tokens=2, seed=sample), "sample": sample}
                writer.append(trace, score=float(rng.random()), group=group)
        writer.append(make_trace(99))
    return path
