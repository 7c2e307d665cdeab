"""Copies of live tensors are exact, whatever the tensors are."""

import pytest
import torch

from tests.train.failing import FailAt
from tracestore.train.oom import OOMGuard
from tracestore.train.tensor_copies import TensorCopies


def bytes_of(tensors):
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
        copies.take(live)
        with torch.no_grad():
            for t in live:
                t.zero_()
        copies.restore()
        assert bytes_of(live) == before
        with torch.no_grad():
            for t in live:
                t.fill_(1)


def test_lists_again_what_has_other_memory():
    a, b = torch.ones(4), torch.ones(4)
    copies = TensorCopies()
    copies.take([a, b])
    b.data = torch.full((4,), 3.0)
    copies.take([a, b])
    a.zero_(), b.zero_()
    copies.restore()
    assert a.tolist() == [1] * 4 and b.tolist() == [3] * 4


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_weights_that_were_replaced_between_steps_come_back(make):
    """As vector_to_parameters and averaging of weights replace them."""
    code, failed = 1, 0
    while code != 0:
        model = torch.nn.Linear(3, 2)
        guard = OOMGuard(model, make(model.parameters(), lr=0.1))
        guard.step(4, lambda begin, end: model(torch.ones(end - begin, 3)).square().mean())
        model.weight.data = torch.full((2, 3), 5.0)
        model(torch.ones(1, 3)).sum().backward()
        with FailAt(failed):
            code = guard._optimizer_step()
        assert (model.weight.tolist() == [[5.0] * 3] * 2) == (code != 0)
        failed += 1
    assert failed >= 2
