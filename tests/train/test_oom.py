"""Running out of memory at every operation of a step."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tracestore.errors import DoesNotFitError
from tracestore.train.oom import OOMGuard, classify

SIZE = 8


class FailAt(TorchDispatchMode):
    """Raises a real torch.OutOfMemoryError at operations number `first` .. `last`; counts all."""

    def __init__(self, first=-1, last=None):
        super().__init__()
        self.first, self.last = first, first if last is None else last
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "profiler":  # marks on a timeline: they allocate nothing
            return func(*args, **(kwargs or {}))
        number = self.count
        self.count += 1
        if self.first <= number <= self.last:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return func(*args, **(kwargs or {}))


def make(optimizer="adam", dropout=0.0, dtype=torch.float64):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(7, 1)
    ).to(dtype)
    if optimizer == "sgd":
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        opt = torch.optim.Adam(model.parameters(), lr=0.1, fused=optimizer == "fused")
    x, y = torch.randn(SIZE, 5, dtype=dtype), torch.randn(SIZE, dtype=dtype)
    guard = OOMGuard(model, opt)

    def loss_of(begin, end):
        return (model(x[begin:end]).squeeze(1) - y[begin:end]).square().mean()

    return model, guard, loss_of


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def run(optimizer, dropout, mode, steps=3):
    """Steps with the failure in the second one; final weights and the guard."""
    model, guard, loss_of = make(optimizer, dropout)
    torch.manual_seed(5)
    for step in range(steps):
        if step == 1 and mode is not None:
            with mode:
                guard.step(SIZE, loss_of)
        else:
            guard.step(SIZE, loss_of)
    return weights(model), guard


@pytest.mark.parametrize("optimizer", ["adam", "fused", "sgd"])
def test_every_operation_once(optimizer):
    """One failure anywhere: the retry at the same size is bitwise a run that never failed."""
    counter = FailAt()
    expected, _ = run(optimizer, 0.5, counter)
    assert counter.count > 40
    for operation in range(counter.count):
        got, guard = run(optimizer, 0.5, FailAt(operation))
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)), operation
        if guard.events:
            (event,) = guard.events
            assert (
                event["phase"] in ("forward", "backward", "optimizer") and event["size_before"] == event["size_after"]
            )
            assert (event["epoch"], event["step"]) == (0, 1)


class FailAbove(TorchDispatchMode):
    """Out of memory whenever a matrix product sees more than `limit` rows."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "addmm" in str(func) and args[1].shape[0] > self.limit:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."
            )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_a_split_batch_has_the_gradient_of_the_whole(limit):
    expected, _ = run("adam", 0.0, None)
    got, guard = run("adam", 0.0, FailAbove(limit))
    for a, b in zip(expected, got, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    assert guard.micro_batch <= limit
    sizes = [(e["size_before"], e["size_after"]) for e in guard.events]
    assert sizes[0] == (8, 8) and sizes[1] == (8, 4)


def test_one_item_that_does_not_fit_leaves_all_as_it_was():
    model, guard, loss_of = make()
    guard.step(SIZE, loss_of)
    before, state = weights(model), torch.get_rng_state()
    with pytest.raises(DoesNotFitError), FailAbove(0):
        guard.step(SIZE, loss_of)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    assert torch.equal(state, torch.get_rng_state()) and guard.num_steps == 1
    assert [e["size_after"] for e in guard.events] == [8, 4, 2, 1, 1, 1]
    guard.micro_batch = None
    guard.step(SIZE, loss_of)


def test_optimizer_failures_never_step_twice():
    model, guard, loss_of = make("adam")
    guard.step(SIZE, loss_of)
    before = weights(model)
    steps = [s["step"].clone() for s in guard.optimizer.state.values()]

    def fail():
        with torch.no_grad():
            next(iter(model.parameters())).add_(1.0)  # half of a step was done
        raise torch.OutOfMemoryError("out of memory")

    original, guard.optimizer.step = guard.optimizer.step, fail
    with pytest.raises(DoesNotFitError, match="optimizer"):
        guard.step(SIZE, loss_of)
    guard.optimizer.step = original
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    assert all(torch.equal(a, s["step"]) for a, s in zip(steps, guard.optimizer.state.values(), strict=True))


def test_failed_tensors_are_gone_before_the_retry():
    model, guard, _loss_of = make()
    refs, alive = [], []

    def leaking(begin, end):
        alive.append(sum(r() is not None for r in refs))
        refs.clear()
        out = model(torch.ones(end - begin, 5, dtype=torch.float64))
        refs.extend([weakref.ref(out), weakref.ref(out.square())])
        if len(alive) < 3:
            raise torch.OutOfMemoryError("out of memory")
        return out.mean()

    guard.step(SIZE, leaking)
    gc.collect()
    assert alive[:3] == [0, 0, 0]


def test_buffers_are_restored():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    guard = OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.0))
    x, calls = torch.randn(4, 3), []

    def loss_of(begin, end):
        out = model(x[begin:end]).mean()
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return out

    guard.step(4, loss_of)
    assert int(model[1].num_batches_tracked) == 1


def test_the_size_grows_again():
    _, guard, loss_of = make()
    guard.micro_batch = 2
    for _ in range(60):
        guard.step(SIZE, loss_of)
    assert guard.micro_batch == 4
    state = guard.state_dict()
    other = make()[1]
    other.load_state_dict(state)
    assert other.micro_batch == 4 and other.num_steps == 60


@pytest.mark.parametrize(
    "error,kind",
    [
        (torch.OutOfMemoryError("x"), "device"),
        (RuntimeError("CUDA out of memory. Tried"), "device"),
        (RuntimeError("CUDA error: out of memory"), "device"),
        (RuntimeError("HIP out of memory"), "device"),
        (RuntimeError("XPU out of memory"), "device"),
        (RuntimeError("MPS backend out of memory"), "device"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"), "device"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "device"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), "device"),
        (MemoryError(), "host"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), "host"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), None),
        (RuntimeError("CUDA error: device-side assert triggered"), None),
        (RuntimeError("shape mismatch"), None),
        (ValueError("out of memory"), None),
    ],
)
def test_classification(error, kind):
    assert classify(error) == kind


def test_other_errors_pass_through():
    _, guard, _ = make()
    with pytest.raises(ValueError, match="mine"):
        guard.step(SIZE, lambda a, b: (_ for _ in ()).throw(ValueError("mine")))


def test_host_memory_gives_caches_back_first():
    model, _, loss_of = make()
    asked = []
    guard = OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1), on_host_memory=lambda: asked.append(1))

    def once(begin, end):
        if not asked:
            raise MemoryError
        return loss_of(begin, end)

    guard.step(SIZE, once)
    assert asked == [1] and len(guard.events) == 1
