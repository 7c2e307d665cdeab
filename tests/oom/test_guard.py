"""The guard recovers from out-of-memory errors, on small models."""

import gc
import itertools
import random
import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.oom.failing import NO_KERNEL, FailAt, step_with_failure
from tracestore.errors import InsufficientMemoryError
from tracestore.oom import oom_errors
from tracestore.oom.guard import OOMGuard
from tracestore.oom.snapshot import writes_after_allocating

SIZE = 8
pytestmark = pytest.mark.usefixtures("young_heap")


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
    """Run steps, the second one in `mode`. Return the final weights and the guard."""
    model, guard, loss_of = make(optimizer, dropout)
    torch.manual_seed(5)
    for step in range(steps):
        if step == 1 and mode is not None:
            with mode:
                guard.step(SIZE, loss_of)
        else:
            guard.step(SIZE, loss_of)
    return weights(model), guard


class FailAbove(TorchDispatchMode):
    """Raises out-of-memory errors for matrix products of more than `limit` rows."""

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
def test_micro_batches_sum_to_the_gradient_of_the_batch(limit):
    expected, _ = run("adam", 0.0, None)
    got, guard = run("adam", 0.0, FailAbove(limit))
    for a, b in zip(expected, got, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    assert guard.micro_batch <= limit
    sizes = [(e["size_before"], e["size_after"]) for e in guard.events]
    assert sizes[0] == (8, 8) and sizes[1] == (8, 4)


def test_one_item_that_does_not_fit_changes_nothing():
    model, guard, loss_of = make()
    guard.step(SIZE, loss_of)
    before, state = weights(model), torch.get_rng_state()
    with pytest.raises(InsufficientMemoryError), FailAbove(0):
        guard.step(SIZE, loss_of)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    assert torch.equal(state, torch.get_rng_state()) and guard.num_steps == 1
    assert [e["size_after"] for e in guard.events] == [8, 4, 2, 1, 1, 1]
    guard.policy.size = None
    guard.step(SIZE, loss_of)


def test_a_failed_optimizer_step_is_undone():
    model, guard, loss_of = make("adam")
    guard.step(SIZE, loss_of)
    before = weights(model)
    steps = [s["step"].clone() for s in guard.optimizer.state.values()]

    def fail():
        with torch.no_grad():
            next(iter(model.parameters())).add_(1.0)  # a step that failed halfway
        raise torch.OutOfMemoryError("out of memory")

    original, guard.optimizer.step = guard.optimizer.step, fail
    with pytest.raises(InsufficientMemoryError, match="optimizer"):
        guard.step(SIZE, loss_of)
    guard.optimizer.step = original
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    assert all(torch.equal(a, s["step"]) for a, s in zip(steps, guard.optimizer.state.values(), strict=True))


def test_tensors_of_a_failed_attempt_are_freed_before_the_retry():
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


def test_the_micro_batch_grows_after_steps_without_failures():
    _, guard, loss_of = make()
    guard.policy.size = 2
    for _ in range(60):
        guard.step(SIZE, loss_of)
    assert guard.micro_batch == 4
    state = guard.state_dict()
    other = make()[1]
    other.load_state_dict(state)
    assert other.micro_batch == 4 and other.num_steps == 60


def test_a_missing_kernel_is_not_out_of_memory():
    """The error is raised unchanged after one item failed as well, without an event."""
    model, guard, loss_of = make()
    sizes = []

    def no_kernel(begin, end):
        sizes.append(end - begin)
        loss_of(begin, end)
        raise RuntimeError(NO_KERNEL)

    for attempt in (lambda: guard.step(SIZE, no_kernel), lambda: guard.evaluate(SIZE, no_kernel)):
        sizes.clear()
        with pytest.raises(RuntimeError, match="primitive descriptor"):
            attempt()
        assert sizes == [SIZE, 1] and guard.events == []
    assert guard.micro_batch is None and all(p.grad is None for p in model.parameters())


def test_an_ambiguous_error_is_out_of_memory_if_smaller_batches_avoid_it():
    def above(limit):
        model, guard, loss_of = make()
        calls = []

        def limited(begin, end):
            calls.append(end - begin)
            if end - begin > limit:
                raise RuntimeError("could not create a primitive")
            return loss_of(begin, end)

        torch.manual_seed(5)
        guard.step(SIZE, limited)
        assert guard.evaluate(SIZE, limited)
        return weights(model), guard

    (whole, none), (split, guard) = above(SIZE), above(2)
    assert none.events == [] and guard.micro_batch == 2
    assert [e["size_after"] for e in guard.events if e["phase"] == "forward"] == [8, 4, 2]
    for a, b in zip(whole, split, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_an_ambiguous_error_is_out_of_memory_while_memory_is_short(monkeypatch):
    monkeypatch.setattr(oom_errors, "memory_is_short", lambda needed: True)
    _, guard, _ = make()

    def fail(begin, end):
        raise RuntimeError("could not create a primitive")

    with pytest.raises(InsufficientMemoryError, match="one item alone"):
        guard.step(SIZE, fail)
    with pytest.raises(InsufficientMemoryError, match="one item alone"):
        guard.evaluate(SIZE, fail)


@pytest.mark.parametrize("is_short", [False, True])
def test_an_ambiguous_error_of_the_optimizer_depends_on_free_memory(monkeypatch, is_short):
    monkeypatch.setattr(oom_errors, "memory_is_short", lambda needed: is_short)
    _, guard, loss_of = make()

    def fail():
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(guard.optimizer, "step", fail)
    with pytest.raises(
        InsufficientMemoryError if is_short else RuntimeError, match="optimizer" if is_short else "thread"
    ):
        guard.step(SIZE, loss_of)


def test_other_errors_propagate():
    _, guard, _ = make()
    with pytest.raises(ValueError, match="mine"):
        guard.step(SIZE, lambda a, b: (_ for _ in ()).throw(ValueError("mine")))


def test_host_memory_is_released_before_the_retry():
    model, _, loss_of = make()
    calls = []
    guard = OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1), on_host_memory=lambda: calls.append(1))

    def once(begin, end):
        if not calls:
            raise MemoryError
        return loss_of(begin, end)

    guard.step(SIZE, once)
    assert calls == [1] and len(guard.events) == 1


OPTIMIZERS = {
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "fused_sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "unknown": lambda p: Unknown(p),
}


class Unknown(torch.optim.Optimizer):
    """Keeps a counter per group and, from the first step on, a number and a tensor per parameter."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "calls": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.5)
                p.sub_(state["mean"] * group["lr"] / (1 + group["calls"] + state["count"]))


def contents(optimizer):
    """Return weights, state and groups of an optimizer as a comparable value."""
    state = optimizer.state_dict()
    flat = [p.tolist() for g in optimizer.param_groups for p in g["params"]]
    for key, values in sorted(state["state"].items()):
        flat += [(key, k, v.tolist() if isinstance(v, torch.Tensor) else v) for k, v in sorted(values.items())]
    return repr([flat, state["param_groups"]])


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_guarded_optimizers_equal_bare_ones(name):
    """Neither the state that is allocated before training nor a failure at any operation of a step changes a result.

    Weights, state and counters are unchanged after a failure.
    """
    x = torch.randn(4, 3, dtype=torch.float64)

    def make_pair():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2).double()
        return model, OPTIMIZERS[name](model.parameters())

    bare, optimizer = make_pair()
    expected, phases = [], set()
    for _ in range(3):
        optimizer.zero_grad()
        bare(x).square().mean().backward()
        optimizer.step()
        expected.append(contents(optimizer))
    for operation in itertools.count():
        model, optimizer = make_pair()
        guard, failed = OOMGuard(model, optimizer), False
        for step in range(3):
            phase = step_with_failure(
                guard, 4, lambda a, b, model=model: model(x[a:b]).square().mean(), operation,
                lambda optimizer=optimizer: contents(optimizer),
            )  # fmt: skip
            assert contents(optimizer) == expected[step], operation
            failed |= phase is not None
            phases.add(phase)
        if not failed:
            break
    assert phases == {"forward", "backward", "optimizer", None}


@pytest.mark.parametrize("make_fused", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_failed_step_of_a_fused_optimizer_writes_only_counters(make_fused):
    model = torch.nn.Linear(3, 2)
    optimizer = make_fused(model.parameters(), lr=0.1, fused=True)
    OOMGuard(model, optimizer)  # Allocates the state.
    assert writes_after_allocating(optimizer)
    failures = 0
    while True:
        model(torch.ones(1, 3)).sum().backward()
        tensors = [p.data for p in model.parameters()]
        tensors += [v for s in optimizer.state.values() for k, v in s.items() if k != "step" and torch.is_tensor(v)]
        before = [t.clone() for t in tensors]
        try:
            with FailAt(failures):
                optimizer.step()
        except torch.OutOfMemoryError:
            failures += 1
            assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
        else:
            break
    assert failures >= 1 and not torch.equal(before[0], tensors[0])


class SeenMetric:
    """A metric that keeps its state in attributes, as torchmetrics does."""

    def __init__(self):
        self.total, self.count, self.values = torch.zeros(()), 0, []

    def update(self, value):
        self.total += value
        self.count += 1
        self.values.append(value)


def test_metrics_count_each_item_once():
    model, metric = torch.nn.Linear(3, 1), SeenMetric()
    guard = OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.0), metrics=[metric])
    failures = []

    def loss_of(begin, end):
        metric.update(torch.tensor(float(end - begin)))
        if len(failures) < 2:
            failures.append(1)
            raise torch.OutOfMemoryError("out of memory")
        return model(torch.ones(end - begin, 3)).mean()

    guard.step(4, loss_of)
    assert metric.count == 2 and float(metric.total) == 4 and [float(v) for v in metric.values] == [2, 2]


def test_random_states_are_restored():
    model, drawn = torch.nn.Linear(1, 1), []
    guard = OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.0))

    def loss_of(begin, end):
        drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))
        if len(drawn) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return model(torch.ones(1, 1)).mean()

    guard.step(1, loss_of)
    assert drawn[0] == drawn[1]


@pytest.mark.long
@pytest.mark.parametrize("fused", [False, True])
def test_a_failure_does_not_change_the_scaler(fused):
    """Memory runs out at every operation: in the first forward, after gradients were unscaled, and in
    a fused step, which reads the scale from the optimizer.
    """

    def run(mode):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        guard = OOMGuard(model, torch.optim.Adam(model.parameters(), lr=0.1, fused=fused), scaler=scaler)
        with mode:
            for k in range(4):
                guard.step(2, lambda a, b, k=k: (model(torch.full((b - a, 3), k + 1.0)) - 1).square().mean())
        return weights(model), scaler.state_dict(), guard.events

    whole = FailAt()
    expected, scale, none = run(whole)
    assert none == []
    phases = set()
    for operation in range(whole.count):
        got, other, events = run(FailAt(operation))
        assert len(events) <= 1 and scale == other, operation
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)), operation
        phases |= {event["phase"] for event in events}
    assert phases == {"forward", "backward", "optimizer"}
