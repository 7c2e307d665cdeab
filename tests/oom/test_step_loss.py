"""The loss of a step without waiting for a GPU."""

import pytest
import torch

from tests.oom.failing import SIZE, FailAt, make
from tracestore.oom.guard import OOMGuard


@pytest.mark.parametrize("name", ["lstm_solo", "gvae_lstm"])
def test_submit_is_a_step_whose_loss_is_read_later(name):
    losses = []
    for call in ("step", "submit"):
        _, guard, loss_of = make(name)
        with FailAt(20):
            losses.append(getattr(guard, call)(SIZE, loss_of))
        assert len(guard.events) == 1 and guard.num_steps == 1
    assert losses[0] == losses[1].result() == losses[1].result()


def test_the_parts_of_a_failed_attempt_do_not_count():
    """The second micro-batch of the second attempt fails, so that the third has four of one item."""
    weight = torch.nn.Parameter(torch.zeros(1))
    calls = iter(range(100))

    def loss_of(begin, end):
        if end - begin > 1 or next(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return (weight - begin).square().sum()

    guard = OOMGuard(torch.nn.ParameterList([weight]), torch.optim.SGD([weight], lr=0.1))
    assert guard.submit(4, loss_of).result() == (0 + 1 + 4 + 9) / 4


def test_a_gpu_is_waited_for_when_the_loss_is_read():
    pytest.importorskip("triton", reason="Triton is not installed")
    from tests.detectors.layers.gpu_operations import Gpu

    with Gpu() as gpu:
        model = torch.nn.Linear(3, 1).to("cuda")
        guard = OOMGuard(model, torch.optim.Adam(model.parameters(), fused=True))
        x = torch.arange(12.0).view(4, 3).to("cuda")
        expected = float(model(x).square().mean())
        guard.policy.size = 2
        gpu.reset()
        loss = guard.submit(4, lambda begin, end: model(x[begin:end]).square().mean(), seed=lambda: None)
        assert not gpu.synchronizations
        assert loss.result() == pytest.approx(expected) and gpu.synchronizations == {"synchronize a stream": 1}
