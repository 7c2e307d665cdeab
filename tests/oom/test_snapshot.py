"""Snapshots restore tensors of every kind exactly."""

import pytest
import torch

from tests.oom.failing import step_with_failure
from tracestore.oom.guard import OOMGuard
from tracestore.oom.snapshot import TensorCopies

pytestmark = pytest.mark.usefixtures("young_heap")


def bytes_of(tensors):
    """Return the bytes of tensors as comparable values."""
    return [t.detach().contiguous().reshape(-1).view(torch.uint8).tolist() for t in tensors]


def make_tensors():
    torch.manual_seed(0)
    return [
        torch.rand(3, 5),
        torch.tensor(7.0),
        torch.rand(7).to(torch.bfloat16),
        torch.rand(4, dtype=torch.float64),
        torch.tensor([True, False, True]),
        torch.rand(4, 6).t(),
        torch.zeros(0),
        torch.arange(3),
        torch.tensor([float("nan"), -0.0, float("inf")]).half(),
        torch.rand(2, 3, requires_grad=True),
        torch.rand(2).to(torch.complex64),
        torch.rand(300_000),
    ]


def test_restores_every_kind_of_tensor():
    live, copies = make_tensors(), TensorCopies()
    for _ in range(2):
        before = bytes_of(live)
        copies.save(live)
        with torch.no_grad():
            for t in live:
                t.zero_()
        copies.restore()
        assert bytes_of(live) == before
        with torch.no_grad():
            for t in live:
                t.fill_(1)


def test_restores_sparse_tensors():
    live = [torch.sparse_coo_tensor([[0, 2], [1, 0]], [3.0, 4.0], (3, 3)).coalesce(), torch.ones(2)]
    copies = TensorCopies()
    for _ in range(2):
        copies.save(live)
        with torch.no_grad():
            live[0].values().zero_(), live[1].zero_()
            copies.restore()
        assert live[0].values().tolist() == [3, 4] and live[1].tolist() == [1, 1]


def test_restores_buffers_that_forward_resized_or_replaced():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)
            self.register_buffer("seen", torch.zeros(0))
            self.register_buffer("mean", torch.zeros(()))
            self.fail = False

        def forward(self, x):
            self.seen.resize_(4).fill_(len(x))
            self.mean = 0.5 * self.mean + 1
            if self.fail:
                self.fail = False
                raise torch.OutOfMemoryError("CUDA out of memory")
            return self.layer(x).mean()

    model = Layer()
    guard = OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        model.fail = step == 1
        guard.step(4, lambda begin, end: model(torch.ones(end - begin, 2)))
    assert len(guard.events) == 1 and model.mean == 1.75, "each step counted once"


def phases_of_failures(make_guard, live):
    """Fail each operation of a step in turn, each time with new objects.

    `make_guard()` returns a guard before the step. `live(guard)` returns tensors that a failure must not change.
    Return the phases of the failures.
    """
    phases = []
    while True:
        guard = make_guard()
        phase = step_with_failure(guard, 4, loss_of(guard.model), len(phases), lambda g=guard: bytes_of(live(g)))
        if phase is None:
            return phases
        phases.append(phase)


def loss_of(model):
    """Return the loss function of a model with three inputs."""
    return lambda begin, end: model(torch.ones(end - begin, 3)).square().mean()


class ReplacingOptimizer(torch.optim.Optimizer):
    """An optimizer that replaces its state in each step."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + p.grad
                    p.add_(state["m"], alpha=-group["lr"])


def test_restores_state_that_the_step_replaces():
    def make_guard():
        model = torch.nn.Linear(3, 2)
        guard = OOMGuard(model, ReplacingOptimizer(model.parameters(), 0.1))
        for _ in range(3):
            guard.step(4, loss_of(model))
        return guard

    def live(guard):
        return [*guard.model.parameters(), *(s["m"] for s in guard.optimizer.state.values())]

    assert phases_of_failures(make_guard, live).count("optimizer") >= 6


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_restores_parameters_that_were_added_later(options):
    """Unfreezing a part of a model adds parameters."""

    def make_guard():
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
        guard = OOMGuard(model, torch.optim.Adam(model[1].parameters(), lr=0.1, **options))
        guard.step(4, loss_of(model))
        guard.optimizer.add_param_group({"params": model[0].parameters()})
        guard.step(4, loss_of(model))
        return guard

    assert "optimizer" in phases_of_failures(make_guard, lambda guard: guard.model.parameters())


def test_restores_tensors_whose_data_was_replaced_before():
    a, b = torch.ones(4), torch.ones(4)
    copies = TensorCopies()
    copies.save([a, b])
    b.data = torch.full((4,), 3.0)
    copies.save([a, b])
    a.zero_(), b.zero_()
    copies.restore()
    assert a.tolist() == [1] * 4 and b.tolist() == [3] * 4


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_restores_weights_that_were_replaced_between_steps(make):
    """vector_to_parameters and weight averaging replace them."""

    def make_guard():
        model = torch.nn.Linear(3, 2)
        guard = OOMGuard(model, make(model.parameters(), lr=0.1))
        guard.step(4, loss_of(model))
        model.weight.data = torch.full((2, 3), 5.0)
        return guard

    assert phases_of_failures(make_guard, lambda guard: guard.model.parameters()).count("optimizer") >= 2


@pytest.mark.parametrize("is_state_moved", [False, True])
def test_restores_weights_and_state_whose_memory_was_replaced(is_state_moved):
    """The weights become another view of the same memory, and the state moves to shared memory."""

    def make_guard():
        base = torch.rand(10, 10)
        model = torch.nn.Linear(3, 10)
        model.weight.data = base.view(-1)[:30].view(10, 3)
        guard = OOMGuard(model, torch.optim.Adam(model.parameters(), lr=0.1))
        guard.step(4, loss_of(model))
        model.weight.data = base[:, :3]
        if is_state_moved:
            guard.step(4, loss_of(model))
            guard.optimizer.state[model.weight]["exp_avg"].share_memory_()
        return guard

    def live(guard):
        return [*guard.model.parameters(), *(v for s in guard.optimizer.state.values() for v in s.values())]

    assert phases_of_failures(make_guard, live).count("optimizer") >= 12
