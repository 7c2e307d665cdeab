"""Operations and synchronizations of a training step on a GPU, counted without one."""

import numpy as np
import pytest
import torch

import tracestore
from tests.helpers import make_traces, write_store
from tracestore.detectors.layers.model_config import ModelConfig
from tracestore.evaluation.store_split import Split
from tracestore.train.config import TrainConfig
from tracestore.train.model_runner import ModelRunner
from tracestore.train.trainer import Trainer, TrainState

LAYERS, DIM, BATCH = 30, 576, 16

pytest.importorskip("triton", reason="Triton is not installed")

from tests.detectors.layers.gpu_operations import Gpu  # noqa: E402 - needs Triton


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    traces = make_traces(4 * BATCH, tokens=lambda k: 2 + k % 4, layers=LAYERS, dim=DIM)
    return tracestore.open(write_store(tmp_path_factory.mktemp("g") / "s.zarr", traces, score=lambda k: k % 2))


def count_step(store, name, folder, **options):
    """Return what a step of the trainer counts, in the middle of an epoch."""
    indices = np.arange(len(store))
    split = Split(dict.fromkeys(("train", "val", "test"), indices), {})
    config = TrainConfig(device="cuda", batch_size=BATCH, loader_threads=1, **options)
    with Gpu() as gpu, pytest.MonkeyPatch.context() as patch:
        # What a step starts where no graph of it is recorded.
        patch.setattr(ModelRunner, "record_steps", lambda *_: None)
        model_config = ModelConfig.from_store(store)
        trainer = Trainer(name, store, split, indices % 2, model_config, config, folder, lambda _: None)
        trainer._setup()
        trainer.model.train()
        state = TrainState()
        trainer.feed.seek(0, 0)
        for _ in range(2):
            trainer._step(state)
        gpu.reset()
        trainer._step(state)
        trainer.feed.close()
    return gpu


# Most operations of a step, and those in float32 and bf16 when each trace had a random generator of its own and the
# readers were computed one after the other.
MOST = {"lstm_solo": 90, "gnn_det_lstm": 180, "gvae_lstm": 250}
EARLIER = {"lstm_solo": (284, 442), "gnn_det_lstm": (709, 891), "gvae_lstm": (783, 994)}


@pytest.mark.long
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", MOST)
def test_a_step_starts_few_operations(store, tmp_path, name, precision):
    gpu = count_step(store, name, tmp_path, precision=precision)
    total = gpu.operations.total()
    print(f"{name}, {precision}: {total} operations, earlier {EARLIER[name][precision == 'bf16']}")
    print(f"{gpu.operations.most_common()}\nsynchronizations: {dict(gpu.synchronizations)}")
    assert total <= MOST[name]
    assert gpu.synchronizations == {"synchronize a stream": 1}


def test_what_is_counted():
    with Gpu() as gpu:
        x = torch.arange(6.0).pin_memory().to("cuda", non_blocking=True).requires_grad_()
        assert x.device.type == "cuda" and gpu.operations == {"copy to the GPU": 1} and not gpu.synchronizations
        gpu.reset()
        views = [x.view(2, 3), x[1:], x.detach(), x.unsqueeze(0).expand(4, 6), torch.empty(3, device="cuda")]
        assert all(map(gpu.has, views)) and not gpu.operations.total()
        (x * 2).sum().backward()
        # The gradient of a sum is a view of its scalar, which begins as a one.
        assert gpu.operations == {"mul": 2, "sum": 1, "ones_like": 1} and gpu.has(x.grad)
        gpu.reset()
        waiting = [
            lambda: x.tolist(),
            lambda: float(x.detach()[0]),
            lambda: bool(x[0] > 1),
            lambda: x[x > 1],
            lambda: x.nonzero(),
            lambda: x.cpu(),
            lambda: torch.ones(3).to("cuda", non_blocking=True),
            lambda: torch.tensor([1.0], device="cuda"),
            lambda: torch.repeat_interleave(torch.ones(2, dtype=torch.int64, device="cuda")),
        ]
        for k, call in enumerate(waiting):
            gpu.reset()
            call()
            assert gpu.synchronizations.total() == 1, k
        gpu.reset()
        torch.ones(3).add(1).tolist()
        assert not gpu.operations and not gpu.synchronizations, "tensors of the CPU"


def test_an_lstm_is_one_operation_in_each_direction_of_autograd():
    with Gpu() as gpu:
        lstm = torch.nn.LSTM(3, 4, batch_first=True, bidirectional=True).to("cuda")
        x = torch.ones(2, 5, 3).to("cuda")
        gpu.reset()
        out, _ = lstm(x)
        out.sum().backward()
    assert gpu.operations["lstm"] == gpu.operations["lstm backward"] == 1 and gpu.operations.total() < 12
    torch.testing.assert_close(out.detach(), lstm.to("cpu")(torch.ones(2, 5, 3))[0].detach())
    assert all(p.grad is not None for p in lstm.parameters())
