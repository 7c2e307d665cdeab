"""Steps that are recorded and replayed. A recording of the tests is a function that computes the step again."""

import numpy as np
import pytest
import torch

from tests.detectors.layers.interpreted import interpreted
from tests.helpers import make_traces, write_store
from tracestore import open as open_store
from tracestore.detectors.graph import gine_op, padding
from tracestore.detectors.layers.model_config import ModelConfig
from tracestore.detectors.registry import MODELS
from tracestore.evaluation.store_split import Split
from tracestore.train import step_graphs
from tracestore.train.config import TrainConfig, TrainState
from tracestore.train.model_runner import ModelRunner
from tracestore.train.trainer import Trainer

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
GRAPH_DETECTORS = [name for name, spec in MODELS.items() if spec.view == "graph"]
READOUTS = [{}, {"pooling": "last", "skip": "last"}, {"pooling": "all", "skip": "none"}]
# Version 0 sets these options.
PADDED = [(name, options) for name in GRAPH_DETECTORS for options in READOUTS if not (options and name.endswith("v0"))]
SIZES = {"gnn_hidden": 8, "latent_dim": 4, "lstm_hidden": 4, "num_readers": 2}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    traces = [
        t | {"prompt_length": 1 + k % 3} for k, t in enumerate(make_traces(22, tokens=lambda k: 4 + k % 5, layers=9))
    ]
    path = tmp_path_factory.mktemp("graphs") / "s.zarr"
    return open_store(write_store(path, traces, score=lambda k: k % 2))


class Recording:
    """Stands for torch.cuda.CUDAGraph: a replay runs what was recorded."""

    replays = 0

    def pool(self):
        return (0, 0)

    def replay(self):
        Recording.replays += 1
        out = self.work()
        if out is not None:
            self.out.copy_(out)


@pytest.fixture
def recordings(monkeypatch):
    """Let steps of a CPU be recorded."""

    def run(self, work, graph=None):
        if graph is None:
            return work()
        graph.work, graph.out = work, torch.zeros(())
        return graph.out

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(step_graphs.StepGraphs, "_run", run)
    Recording.replays = 0


def trainer_of(store, name, folder, batch_size=4, sizes=SIZES, **options):
    indices = np.arange(len(store))
    split = Split(dict.fromkeys(("train", "val", "test"), indices), {})
    config = TrainConfig(batch_size=batch_size, loader_threads=1, **options)
    model_config = ModelConfig.from_store(store, **sizes)
    trainer = Trainer(name, store, split, indices % 2, model_config, config, folder, lambda _: None)
    trainer._setup()
    return trainer


def train(trainer, epochs=2):
    """Return the losses of some epochs, and the weights after them."""
    losses = []
    for epoch in range(epochs):
        state = TrainState(epoch=epoch)
        trainer._train_epoch(state)
        losses.append(state.loss_sum / state.loss_count)
    return losses, [p.detach().cpu().clone() for p in trainer.model.parameters()]


def record_on_cpu(trainer):
    graphs = step_graphs.StepGraphs(lambda given: trainer.runner.forward(given)[1], trainer.guard.optimizer)
    trainer.runner.graphs = trainer.guard.graphs = trainer.feed.graphs = graphs
    return graphs


@pytest.mark.parametrize("accumulated", [2, 3])
def test_accumulated_batches_are_not_replayed(store, recordings, tmp_path, accumulated):
    options = {"sizes": SIZES | {"dropout": 0.0}, "grad_accum_steps": accumulated}
    expected = train(trainer_of(store, "lstm_solo", tmp_path / "plain", **options))
    trainer = trainer_of(store, "lstm_solo", tmp_path / "graphs", **options)
    record_on_cpu(trainer)
    found = train(trainer)
    assert found[0] == expected[0] and all(map(torch.equal, found[1], expected[1]))


def test_gradients_of_a_replay_are_not_added_to_others(store, recordings, tmp_path):
    trainer = trainer_of(store, "lstm_solo", tmp_path)
    graphs = record_on_cpu(trainer)
    trainer.feed.seek(0, 0)
    (batch,) = trainer.feed.next_batches(1)
    loss = graphs.loss(batch.traces(0, batch.size))
    loss.backward()
    with pytest.raises(RuntimeError, match="cannot be added"):
        loss.backward()


@pytest.mark.long
def test_a_step_of_the_optimizer_that_cannot_be_recorded_is_computed(store, recordings, tmp_path, monkeypatch):
    sizes = SIZES | {"dropout": 0.0}
    expected = train(trainer_of(store, "lstm_solo", tmp_path / "plain", sizes=sizes))
    trainer = trainer_of(store, "lstm_solo", tmp_path / "graphs", sizes=sizes)
    graphs = record_on_cpu(trainer)

    def fails(self):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(step_graphs.StepGraphs, "_record_optimizer", fails)
    found = train(trainer)
    assert found[0] == expected[0] and all(map(torch.equal, found[1], expected[1]))
    assert not graphs.is_active


def test_inputs_of_recordings_take_a_share_of_the_memory(store, recordings, tmp_path):
    trainer = trainer_of(store, "lstm_solo", tmp_path)
    graphs = record_on_cpu(trainer)
    graphs._room = 1
    train(trainer, 1)
    assert graphs.is_active and not graphs._recordings and Recording.replays == 0


@pytest.mark.parametrize("name", ["lstm_solo", "lstm_solo_v0"])
def test_replayed_steps_equal_plain_steps(store, recordings, tmp_path, name):
    """Also of the short last batch, whose step is another recording."""
    sizes = SIZES | {"dropout": 0.0}
    expected = train(trainer_of(store, name, tmp_path / "plain", sizes=sizes))
    trainer = trainer_of(store, name, tmp_path / "graphs", sizes=sizes)
    graphs = record_on_cpu(trainer)
    found = train(trainer)
    assert found[0] == expected[0] and all(map(torch.equal, found[1], expected[1]))
    assert len(graphs._recordings) == 2
    assert Recording.replays == 12 + 11, "each step, and the optimizer's from the second on"


def test_memory_that_runs_out_releases_the_recordings(store, recordings, tmp_path):
    trainer = trainer_of(store, "lstm_solo", tmp_path)
    graphs = record_on_cpu(trainer)
    train(trainer, 1)
    replay, Recording.replay = Recording.replay, None
    try:
        Recording.replay = lambda _: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory."))
        train(trainer, 1)
    finally:
        Recording.replay = replay
    assert not graphs.is_active and not graphs._recordings and not graphs.gradients
    assert [(e["size_before"], e["size_after"]) for e in trainer.guard.events] == [(4, 4)]


@pytest.mark.long
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("not permitted")])
def test_a_step_that_cannot_be_recorded_is_computed_as_before(store, recordings, tmp_path, monkeypatch, error):
    sizes = SIZES | {"dropout": 0.0}
    expected = train(trainer_of(store, "lstm_solo", tmp_path / "plain", sizes=sizes))
    trainer = trainer_of(store, "lstm_solo", tmp_path / "graphs", sizes=sizes)
    graphs = record_on_cpu(trainer)
    record, calls = step_graphs.StepGraphs._record, []

    def fails_later(self, inputs):
        calls.append(1)
        if len(calls) == 2:
            raise error
        return record(self, inputs)

    monkeypatch.setattr(step_graphs.StepGraphs, "_record", fails_later)
    if isinstance(error, torch.OutOfMemoryError):
        found = train(trainer)
    else:
        with pytest.warns(RuntimeWarning, match=r"cannot be recorded as a CUDA graph \(RuntimeError: not permitted\)"):
            found = train(trainer)
    assert found[0] == expected[0] and all(map(torch.equal, found[1], expected[1]))
    assert not graphs.is_active and not trainer.guard.events


@pytest.fixture(scope="module")
def kernels():
    one, ptr = torch.ones(1, 1), torch.tensor([0, 1])
    edges = gine_op.Edges(ptr, torch.ones(1), ptr, None, None, 0.0)
    return interpreted(
        "tracestore.detectors.graph.gine_triton",
        lambda m: m.aggregate(torch.empty(1, 1), one, one, torch.zeros(1), edges),
    )


@pytest.mark.long
@pytest.mark.parametrize(("name", "options"), PADDED)
def test_padded_graphs_have_the_loss_and_gradients_of_the_batch(store, kernels, tmp_path, monkeypatch, name, options):
    monkeypatch.setattr("tracestore.detectors.models.GNN_DROPOUT", 0.0)
    trainer = trainer_of(store, name, tmp_path, batch_size=2, sizes=SIZES | {"dropout": 0.0, **options})
    trainer.model.double().train()
    trainer.feed.seek(0, 0)
    (batch,) = trainer.feed.next_batches(1)
    given = batch.traces(0, batch.size)

    def computed():
        trainer.model.zero_grad()
        loss = trainer.runner.forward(given)[1]
        loss.backward()
        return [loss.detach(), *(p.grad for p in trainer.model.parameters() if p.grad is not None)]

    expected = computed()
    monkeypatch.setattr(padding, "_LEAST", 144)
    assert padding.can_pad(given.inputs)
    inputs = given.inputs
    given.inputs, _ = padding.to_padded(inputs, torch.device("cpu"))
    assert len(given.inputs.x) > len(inputs.x) and len(given.inputs.weight) > len(inputs.weight)
    given.inputs.weight[len(inputs.weight) :] = torch.nan
    monkeypatch.setattr(gine_op, "_kernels", lambda _: kernels)
    for mine, theirs in zip(computed(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", GRAPH_DETECTORS)
def test_batches_of_about_the_same_size_have_the_same_shapes(store, tmp_path, name):
    trainer = trainer_of(store, name, tmp_path)
    trainer.feed.seek(0, 0)
    shapes = set()
    for _ in range(5):
        (batch,) = trainer.feed.next_batches(1)
        padded, _ = padding.to_padded(batch.inputs, torch.device("cpu"))
        shapes.add(tuple(t.shape for t in padded.tensors()))
        assert padded.index.ptr[-1] == len(padded.index.graph)
    assert len(shapes) == 1


@pytest.mark.parametrize("length", [1, 255, 256, 257, 4096, 4097, 15_840, 63_360, 1_000_000])
def test_a_length_grows_by_an_eighth_at_most(length):
    padded = padding.padded_length(length)
    assert length <= padded <= max(256, length * 1.13) and padded % 16 == 0
    assert padding.padded_length(padded) == padded


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_replayed_steps_of_a_gpu_equal_plain_steps(store, tmp_path, monkeypatch, name, precision):
    trainer = trainer_of(store, name, tmp_path / "graphs", device="cuda", precision=precision)
    losses, weights = train(trainer, 3)
    graphs = trainer.runner.graphs
    assert graphs.is_active and graphs._optimizer_graph is not None and len(graphs._recordings) >= 2
    monkeypatch.setattr(ModelRunner, "record_steps", lambda *_: None)
    expected, weights_expected = train(
        trainer_of(store, name, tmp_path / "plain", device="cuda", precision=precision), 3
    )
    tolerance = 1e-4 if precision == "float32" else 2e-2
    assert np.allclose(losses, expected, rtol=tolerance)
    if precision == "float32":
        for mine, theirs in zip(weights, weights_expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=2e-4)


@pytest.mark.gpu
@gpu
def test_a_recording_that_waits_for_the_gpu_leaves_everything_as_it_was(store, tmp_path):
    trainer = trainer_of(store, "lstm_solo", tmp_path, device="cuda")
    forward, graphs = trainer.runner.forward, trainer.runner.graphs

    def waits(given):
        logits, loss = forward(given)
        if torch.cuda.is_current_stream_capturing():
            float(loss)
        return logits, loss

    trainer.runner.forward = waits
    current = torch.cuda.current_stream()
    with pytest.warns(RuntimeWarning, match="cannot be recorded"):
        train(trainer, 1)
    assert not graphs.is_active and torch.cuda.current_stream() == current
    before = torch.cuda.memory_allocated()
    for epoch in (1, 2):
        trainer._train_epoch(TrainState(epoch=epoch))
        torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
