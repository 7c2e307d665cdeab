"""Training on a GPU. Tests that apply to the CPU also run there, which checks the tests themselves."""

import json

import numpy as np
import pytest
import torch

from tests.experiment.quiet import SMALL, train_quietly
from tests.helpers import run_cli
from tests.train.runs import FAST, ONLY
from tracestore.detectors.registry import MODELS
from tracestore.experiment import training_run
from tracestore.train.config import TrainConfig

pytestmark = pytest.mark.gpu
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


@pytest.fixture
def train(labeled, tmp_path, monkeypatch):
    monkeypatch.setattr(training_run, "write_report", lambda *_: None)

    def go(out, device, names=MODELS, sizes=SMALL, **options):
        config = TrainConfig(**({"epochs": 2, "loader_threads": 1, "device": device} | options))
        return train_quietly(labeled, tmp_path / out, names, config, sizes)

    return go


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_training_and_resuming_equal_the_cpu(train, device):
    """Dropout is off: its masks differ between kinds of device."""
    # On a CPU, other tests resume every model.
    names, sizes = MODELS if device == "cuda" else ("lstm_solo", "gvae_lstm"), SMALL | {"dropout": 0.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tracestore.detectors.models.GNN_DROPOUT", 0.0)
        here = train("here", device, names, sizes)
        cpu = train("cpu", "cpu", names, sizes)
        train("cut", device, names, sizes, epochs=1)
        cut = train("cut", device, names, sizes, resume=True)
    for name in names:
        losses = [r["models"][name]["history"]["train_loss"] for r in (here, cpu, cut)]
        assert np.allclose(losses[0], losses[1], rtol=1e-3) and np.allclose(losses[0], losses[2], rtol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_fused_and_pyg_message_passing_have_equal_losses(train, device, name):
    sizes = SMALL | {"dropout": 0.0, "layers": (0, 2)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tracestore.detectors.models.GNN_DROPOUT", 0.0)
        losses = [
            train(kind, device, [name], sizes | {"message_passing": kind})["models"][name]["history"]["train_loss"]
            for kind in ("fused", "pyg")
        ]
    assert np.allclose(*losses, rtol=1e-4)


@gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_losses_are_close_to_float32(train, precision):
    full = train("full", "cuda")
    half = train(precision, "cuda", precision=precision)
    for name in MODELS:
        losses = [r["models"][name]["history"]["train_loss"] for r in (full, half)]
        assert np.allclose(*losses, rtol=0.1)


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_recovers_from_a_real_lack_of_memory(device):
    """A batch that does not fit is split with the same gradient, and the failed tensors are freed.

    Memory is limited by a fraction of the GPU and a ballast, on the CPU by RLIMIT_DATA.
    """
    code = (
        "import gc, resource, sys, torch\n"
        "from tracestore.train import OOMGuard\n"
        "from tracestore.oom.memory_limits import start_thread_pools\n"
        "from tracestore.platform_support import memory_use\n"
        "device = torch.device(sys.argv[1])\n"
        "torch.manual_seed(0)\n"
        "x = torch.randn(64, 1 << 18, device=device)\n"
        "w = torch.nn.Parameter(torch.ones(1 << 18, device=device))\n"
        "def loss_of(begin, end):\n"
        "    h = (x[begin:end] * w).relu()\n"
        "    return (h * h.sin()).square().mean()\n"
        "loss_of(0, 64).backward(); expected, w.grad = w.grad.clone(), None\n"
        "optimizer = torch.optim.SGD([w], lr=0.0)\n"
        "guard = OOMGuard(torch.nn.ParameterList([w]), optimizer)\n"
        "kept = []\n"
        "step = optimizer.step\n"
        "optimizer.step = lambda: kept.append(w.grad.clone())\n"
        "room = 5 * x.nbytes // 2\n"
        "if device.type == 'cuda':\n"
        "    torch.cuda.empty_cache()\n"
        "    total = torch.cuda.get_device_properties(0).total_memory\n"
        "    torch.cuda.set_per_process_memory_fraction(0.5)\n"
        "    ballast = torch.empty(total // 2 - torch.cuda.memory_reserved() - room, dtype=torch.uint8, device=device)\n"
        "    baseline = torch.cuda.memory_allocated()\n"
        "else:\n"
        "    start_thread_pools()\n"
        "    resource.setrlimit(resource.RLIMIT_DATA, (memory_use().data + room, -1))\n"
        "guard.step(64, loss_of)\n"
        "assert guard.events[0]['size_before'] == 64 and guard.micro_batch < 64, guard.events\n"
        "assert torch.allclose(kept[0], expected, rtol=1e-4, atol=1e-7)\n"
        "if device.type == 'cuda':\n"
        "    kept.clear(); optimizer.zero_grad(); gc.collect()\n"
        "    assert torch.cuda.memory_allocated() <= baseline, (torch.cuda.memory_allocated(), baseline)\n"
        "print(guard.micro_batch)\n"
    )
    done = run_cli("-c", code, device, check=0, env={"OMP_NUM_THREADS": "1"})
    assert 1 <= int(done.stdout) < 64


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_ranks_on_gpus(labeled, tmp_path):
    """NCCL sums the gradients, gloo exchanges small values."""
    flags = ["--store", labeled, "--no-probe", *FAST, *ONLY["gnn_det_lstm"], "--epochs", 2, "--json"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    many = run_cli(*launcher, "tools/train.py", *flags, "--output-dir", tmp_path / "many", check=0)
    one = run_cli("tools/train.py", *flags, "--output-dir", tmp_path / "one", check=0)
    losses = [json.loads(d.stdout)["models"]["gnn_det_lstm"]["history"]["train_loss"] for d in (many, one)]
    assert np.allclose(*losses, rtol=0, atol=1e-5)
