"""Out-of-memory errors at operations of a step, for every detector.

TRACESTORE_OOM=all tests every operation; the default is a sample.
"""

import gc
import os
from collections import Counter

import pytest
import torch

from tests.oom.failing import SIZE, FailAt, everything, fail_in_attempts, make, same
from tracestore.detectors.registry import MODELS
from tracestore.errors import InsufficientMemoryError

ALL = os.environ.get("TRACESTORE_OOM") == "all"
pytestmark = pytest.mark.usefixtures("young_heap")
NAMES = [name for name in MODELS if not name.endswith("_v0")]
OPTIMIZERS = ("sgd", "adam", "fused")
# Every detector with one optimizer, in turn; the other pairs are marked long.
CASES = [
    pytest.param(name, optimizer, marks=[] if n % len(OPTIMIZERS) == k else [pytest.mark.long])
    for n, name in enumerate(NAMES)
    for k, optimizer in enumerate(OPTIMIZERS)
]


def steps(case, mode_of_second=None, count=3):
    """Run `count` steps, the second one under a mode. Return the guard."""
    _, guard, loss_of = make(*case)
    torch.manual_seed(5)
    for step in range(count):
        if step == 1 and mode_of_second is not None:
            with mode_of_second:
                guard.step(SIZE, loss_of)
        else:
            guard.step(SIZE, loss_of)
    return guard


def sample(count, wanted):
    """Return `wanted` evenly spaced numbers of range(count), ends included, or all of them."""
    return range(count) if ALL else sorted({round(k * (count - 1) / (wanted - 1)) for k in range(wanted)})


@pytest.fixture(scope="module")
def phases():
    """Count the failures by phase; every phase must occur."""
    counted = Counter()
    yield counted
    print(f"injections by phase: {dict(counted)}")
    assert {"forward", "backward", "optimizer"} <= set(counted)


@pytest.mark.long
@pytest.mark.parametrize(("name", "optimizer"), CASES)
def test_one_failure_changes_nothing(name, optimizer, phases):
    """The retry at the same size equals a run without a failure bit for bit, dropout included."""
    case, counter = (name, optimizer, "by torch", torch.float32), FailAt()
    expected = everything(steps(case, counter))
    met = Counter()
    for operation in sample(counter.count, 12):
        guard = steps(case, FailAt(operation))
        assert same(everything(guard), expected), operation
        (event,) = guard.events
        assert event["size_before"] == event["size_after"] == SIZE and (event["epoch"], event["step"]) == (0, 1)
        met[event["phase"]] += 1
    phases.update(met)
    assert set(met) == {"forward", "backward", "optimizer"}


def operations(case):
    """Return the number of operations of a step and of its snapshot."""
    _, guard, loss_of = make(*case)
    guard.step(SIZE, loss_of)
    whole = FailAt()
    with whole:
        guard.step(SIZE, loss_of)
    # The second attempt of a step whose last operation failed is a step without a snapshot.
    retried = FailAt(whole.count - 1)
    fail_in_attempts(guard, retried, whole.count - 1, 1)
    with retried:
        guard.step(SIZE, loss_of)
    return whole.count, whole.count - retried.count


def second_step(case, operation, times, copying):
    """Fail the second step at one operation of each of its first `times` attempts.

    Return the guard, the tensors before that step and whether the step finished.
    """
    _, guard, loss_of = make(*case)
    torch.manual_seed(5)
    guard.step(SIZE, loss_of)
    before = everything(guard)
    mode = FailAt()
    fail_in_attempts(guard, mode, operation, times, copying)
    try:
        with mode:
            guard.step(SIZE, loss_of)
    except InsufficientMemoryError:
        return guard, before, False
    return guard, before, True


@pytest.mark.long
@pytest.mark.parametrize(("name", "optimizer"), CASES)
def test_two_failures_split_the_batch_with_the_same_result(name, optimizer):
    """After two failures at full size the batch is split, or the optimizer steps a third time.

    The result equals that of the whole batch within 1e-12, dropout included.
    """
    case = (name, optimizer, "by trace", torch.float64)
    count, copying = operations(case)
    expected = everything(second_step(case, 0, 0, copying)[0])
    for operation in sample(count, 8):
        guard, _, finished = second_step(case, operation, 2, copying)
        assert finished and len(guard.events) == 2
        split = guard.events[-1]["phase"] != "optimizer"
        assert guard.micro_batch == (SIZE // 2 if split else None)
        for a, b in zip(everything(guard)[:-1], expected[:-1], strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-12), operation


@pytest.mark.long
@pytest.mark.parametrize(("name", "optimizer"), CASES)
def test_permanent_failures_change_nothing(name, optimizer):
    """Weights, optimizer and random state are those before the step, so that they can be saved."""
    case = (name, optimizer, "by torch", torch.float32)
    count, copying = operations(case)
    for operation in sample(count, 6):
        guard, before, finished = second_step(case, operation, 99, copying)
        assert not finished and same(everything(guard), before), operation
        assert guard.num_steps == 1 and all(p.grad is None for p in guard.model.parameters())


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_a_failed_attempt_are_freed_before_the_retry(name):
    """This includes tensors in the queue of the autograd engine after a failed backward pass."""
    case = (name, "adam", "by trace", torch.float32)
    watched = 0
    for operation in sample(operations(case)[0], 24):
        _, guard, loss_of = make(*case)
        guard.step(SIZE, loss_of)
        mode, alive = FailAt(operation, watch=True), []
        keep = {id(t) for t in (*guard.model.parameters(), *guard.model.buffers())}

        def before_retry(_, mode=mode, alive=alive, keep=keep):
            if mode.refs and not alive:
                gc.collect()
                alive.append([n for n, r in mode.refs if r() is not None and id(r()) not in keep])
                mode.watch = False

        guard.on_event = before_retry
        with mode:
            guard.step(SIZE, loss_of)
        if alive:
            watched += len(mode.refs)
            assert alive[0] == [], operation
    assert watched > 50
