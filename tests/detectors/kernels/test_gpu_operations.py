"""Operations and synchronizations of a training step on a GPU, counted without one."""

import numpy as np
import pytest

import tracestore
from tests.helpers import make_traces, write_store
from tracestore.detectors.config import ModelConfig
from tracestore.evaluation.split import Split
from tracestore.train.config import TrainConfig
from tracestore.train.trainer import Trainer, TrainState

LAYERS, DIM, BATCH = 30, 576, 16

pytest.importorskip("triton", reason="Triton is not installed")

from tests.detectors.kernels.gpu_operations import Gpu  # noqa: E402 - needs Triton


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    traces = make_traces(4 * BATCH, tokens=lambda k: 2 + k % 4, layers=LAYERS, dim=DIM)
    return tracestore.open(write_store(tmp_path_factory.mktemp("g") / "s.zarr", traces, score=lambda k: k % 2))


def count_step(store, name, folder, **options):
    """Return what a step of the trainer counts, in the middle of an epoch."""
    indices = np.arange(len(store))
    split = Split(dict.fromkeys(("train", "val", "test"), indices), {})
    config = TrainConfig(device="cuda", batch_size=BATCH, loader_threads=1, **options)
    with Gpu() as gpu:
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


# Most operations of a step in float32 and bf16.
MOST = {"lstm_solo": (54, 54), "gnn_det_lstm": (456, 480), "gvae_lstm": (530, 583)}


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", MOST)
def test_a_step_starts_few_operations(store, tmp_path, name, precision):
    gpu = count_step(store, name, tmp_path, precision=precision)
    print(f"{name}, {precision}: {gpu.operations.total()} operations {gpu.operations.most_common()}")
    print(f"synchronizations: {dict(gpu.synchronizations)}")
    assert gpu.operations.total() <= MOST[name][precision == "bf16"]
