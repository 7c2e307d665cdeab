"""The command `tracestore plan`, and the measured cost model behind it."""

import json

import numpy as np
import pytest
import torch

import tracestore
from tests.helpers import command, make_traces, run_cli, write_store
from tracestore.data.batches.batch_format import BatchFormat
from tracestore.data.epoch import EpochPlanner
from tracestore.detectors.registry import DEFAULT_MODELS
from tracestore.errors import UsageError
from tracestore.planning.plan import TrainingPlan, largest_batch_factor, plan_micro_batches, plan_training
from tracestore.platform_support import memory_use
from tracestore.train.config import TrainConfig

SMALL = {"gnn_hidden": 8, "latent_dim": 8, "lstm_hidden": 8}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "store.zarr"
    return write_store(path, make_traces(40, tokens=lambda k: 5 + k, layers=3, dim=16), score=lambda k: k % 2)


FLAGS = ["--lstm-hidden", 64, "--gnn-hidden", 8, "--latent-dim", 8, "--num-threads", 1]


def plans_of(path, *flags):
    # In a separate process, because the command measures the memory of its process.
    done = run_cli("-m", "tracestore", "plan", path, "--memory", "4GiB", "--json", *FLAGS, *flags, check=0)
    plans = json.loads(done.stdout)["models"]
    for plan in plans:
        assert 100 << 20 < plan["libraries_bytes"] <= plan["peak_memory_bytes"] < 2 << 30
        assert 0 < plan["seconds_per_epoch"] < 60 and 0 < plan["floor_bytes"] < 1 << 30
        assert plan["largest_batch"] > 16 == plan["largest_micro_batch"]
    return {plan["model"]: plan for plan in plans}


@pytest.mark.long
def test_all_detectors_are_planned(path):
    assert tuple(plans_of(path)) == DEFAULT_MODELS
    done = command("plan", path, "--model", "nothing", check=2)
    assert "lstm_solo" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("lstm_solo", ["--precision", "bf16"]),
        ("lstm_solo", ["--layers", "0,2", "--standardize", "--lstm-hidden", 8]),
        ("gnn_det_lstm", ["--top-k", 0.5]),
        ("gnn_det_lstm", ["--message-passing", "pyg", "--attention-threshold", 0.1]),
    ],
)
def test_options_of_training_are_measured(path, model, flags):
    assert plans_of(path, "--model", model, *flags)[model]["seconds_per_epoch"] > 0


@pytest.mark.long
def test_unusual_stores(tmp_path):
    """A single trace, a long trace, no labels, and a store without graphs."""
    for name, tokens, dim in (("one", 3, 8), ("long", 1500, 64)):
        write_store(tmp_path / name, make_traces(1, tokens=tokens, layers=1, dim=dim))
        assert plans_of(tmp_path / name, "--model", "gnn_det_lstm")["gnn_det_lstm"]["seconds_per_epoch"] > 0
    traces = [{n: v for n, v in t.items() if n != "attentions"} for t in make_traces(6, tokens=3)]
    write_store(tmp_path / "last", traces, attention="none")
    assert list(plans_of(tmp_path / "last")) == ["lstm_solo"]
    done = command("plan", tmp_path / "last", "--model", "gvae_lstm", check=2)
    assert done.stderr.count("\n") == 1


def test_the_largest_batch_of_an_epoch(path):
    store = tracestore.open(path)
    indices = np.arange(1, 40, 2)
    form = BatchFormat("graph", edge_format="packed")
    costs = form.bytes_per_trace(store, indices)
    epochs = EpochPlanner(store, form, batch_size=6, seed=3, indices=indices)
    plan = epochs.plan(0)
    largest = max(form.bytes_per_trace(store, plan.traces(k)).sum() for k in range(len(plan)))
    assert largest_batch_factor(epochs, costs, indices) == pytest.approx(largest / (6 * costs.mean()))


def plan(**changes):
    values = {"name": "lstm_solo", "batch_size": 16, "num_train": 100, "floor_bytes": 50, "largest_batch_factor": 1.5}
    values |= {"libraries_bytes": 300, "file_bytes": 0, "loader_bytes_per_trace": 2, "fixed_bytes": 1000}
    values |= {"trace_bytes": 10.0, "seconds_start": 0.25, "seconds_fixed": 0.5, "seconds_per_trace": 0.1}
    return TrainingPlan(**(values | changes))


def test_the_largest_batch_is_the_largest_that_fits():
    p = plan()
    for memory in (1016, 1017, 1500, 2000, 12345):
        batch = p.largest_batch(memory)
        assert p.peak_bytes(batch) <= memory < p.peak_bytes(batch + 1)
        micro = p.largest_micro_batch(memory, 16)
        assert micro == 16 or micro == 0 or p.peak_bytes(16, micro) <= memory < p.peak_bytes(16, micro + 1)
    assert p.largest_batch(900) == 0
    assert p.seconds_per_epoch(16) == pytest.approx(0.25 + 7 * 0.5 + 100 * 0.1)


@pytest.mark.long
def test_planning_preserves_the_random_state(path):
    store = tracestore.open(path)
    torch.manual_seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    found = plan_training("gvae_lstm", store, TrainConfig(batch_size=4), SMALL)
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == np.random.get_state()[1].tolist()
    assert found.num_train == 28 and found.largest_batch_factor > 1


@pytest.mark.long
def test_a_budget_determines_the_micro_batch(path):
    store, start = tracestore.open(path), memory_use()
    config = TrainConfig(batch_size=4)
    assert plan_micro_batches(["lstm_solo"], store, config, SMALL, 8 << 30, start, 20) == {"lstm_solo": None}
    with pytest.raises(UsageError, match="below"):
        plan_micro_batches(["lstm_solo"], store, config, SMALL, 1 << 20, start, 20)
