"""Precision on processors with and without the kernels for it."""

import pytest
import torch

from tests.helpers import run_cli
from tests.train.runs import FAST, ONLY
from tracestore.detectors.layers import precision
from tracestore.detectors.layers.model_config import ModelConfig
from tracestore.detectors.registry import make_model
from tracestore.errors import UsageError

CPU = torch.device("cpu")
CONFIG = ModelConfig(3, 16, lstm_hidden=8, dropout=0.0)


@pytest.fixture
def kernels(monkeypatch):
    """Let the tiny cases find no kernel for the layers in `missing`."""

    def without(*missing):
        original = precision._try

        def attempt(layer, device_type, dtype):
            if layer in missing and dtype is not None:
                raise RuntimeError("could not create a primitive descriptor")
            original(layer, device_type, dtype)

        monkeypatch.setattr(precision, "_try", attempt)
        precision.has_kernel.cache_clear()

    yield without
    precision.has_kernel.cache_clear()


def test_a_missing_lstm_kernel_makes_the_lstm_float32(kernels):
    """The rest of the model computes in bfloat16; gradients reach every weight."""
    kernels("LSTM")
    assert precision.float32_layers("bf16", "cpu") == ["LSTM"]
    model = make_model("lstm_solo", CONFIG)
    dtypes = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.LSTM | torch.nn.Linear):
            module.register_forward_hook(
                lambda _, __, out, name=name: dtypes.update({name: (out[0] if isinstance(out, tuple) else out).dtype})
            )
    with precision.autocast_for(model, "bf16", CPU):
        logits = model(torch.randn(4, 3, 16)).logits
    logits.float().sum().backward()
    assert {d for n, d in dtypes.items() if "lstm" in n} == {torch.float32}
    assert {d for n, d in dtypes.items() if "head" in n} == {torch.bfloat16}
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_with_all_kernels_nothing_is_changed(kernels, monkeypatch):
    monkeypatch.setattr(precision, "_try", lambda *_: None)
    model = make_model("lstm_solo", CONFIG)
    before = [module.forward for module in model.modules()]
    assert precision.float32_layers("bf16", "cpu") == []
    precision.autocast_for(model, "bf16", CPU)
    assert [module.forward for module in model.modules()] == before


def test_a_device_without_linear_layers_is_refused(kernels):
    kernels("Linear")
    with pytest.raises(UsageError, match=r"--precision bf16.*use float32"):
        precision.autocast_for(make_model("lstm_solo", CONFIG), "bf16", CPU)


def test_a_tiny_case_that_fails_in_float32_too_is_raised(monkeypatch):
    """A lack of memory, for example, says nothing about kernels and is not cached."""
    precision.has_kernel.cache_clear()

    def fail(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(precision, "_try", fail)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        precision.has_kernel("LSTM", "cpu", torch.bfloat16)
    monkeypatch.undo()
    assert precision.has_kernel("Linear", "cpu", torch.bfloat16)


def test_tiny_cases_draw_no_random_numbers():
    precision.has_kernel.cache_clear()
    before = torch.get_rng_state()
    precision.float32_layers("bf16", "cpu")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.long
@pytest.mark.parametrize("isa", [{"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"}, {}])
def test_bfloat16_trains_and_scores_on_every_processor(labeled, tmp_path, monkeypatch, isa):
    for name, value in isa.items():
        monkeypatch.setenv(name, value)
    flags = ["--store", labeled, "--output-dir", tmp_path / "r", *FAST, *ONLY["lstm_solo"], "--epochs", 1, "--no-probe"]
    done = run_cli("tools/train.py", *flags, "--precision", "bf16", check=0)
    if isa:
        assert "no LSTM kernel" in done.stdout
    best = tmp_path / "r/lstm_solo/best.pt"
    run_cli(
        "-m", "tracestore", "predict", "--checkpoint", best, "--store", labeled, "--output", tmp_path / "s.csv", check=0
    )
