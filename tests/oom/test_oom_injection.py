"""Out of memory at every operation of a step of every detector. TRACESTORE_OOM=all runs
all of them; a stratified sample otherwise."""

import gc
import os
from collections import Counter

import pytest
import torch

from tests.oom.failing import SIZE, FailAt, everything, make, same
from tracestore.detectors.registry import DETECTORS
from tracestore.errors import InsufficientMemoryError

ALL = os.environ.get("TRACESTORE_OOM") == "all"
pytestmark = pytest.mark.usefixtures("young_heap")
OPTIMIZERS = ("sgd", "adam", "fused")


def steps(case, mode_of_second=None, count=3):
    """`count` steps, the second under a mode. -> the guard."""
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
    """All of range(count), or `wanted` of them evenly, ends included."""
    return range(count) if ALL else sorted({round(k * (count - 1) / (wanted - 1)) for k in range(wanted)})


@pytest.fixture(scope="module")
def phases():
    counted = Counter()
    yield counted
    print(f"injections by phase: {dict(counted)}")
    assert {"forward", "backward", "optimizer"} <= set(counted)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", DETECTORS)
def test_once_anywhere_is_as_if_never(name, optimizer, phases):
    """With dropout: the retry at the same size is bitwise a run that never failed."""
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
    """How many operations a step has, and how many of them copy what may have to be put back."""
    _, guard, loss_of = make(*case)
    guard.step(SIZE, loss_of)
    whole, copying = FailAt(), FailAt()
    with whole:
        guard.step(SIZE, loss_of)
    with copying:
        guard._snapshot.save()
    return whole.count, copying.count


def second_step(case, operation, times, copying):
    """The second step fails at one operation of each of its first `times` attempts.
    -> the guard, all before that step, whether it finished."""
    _, guard, loss_of = make(*case)
    torch.manual_seed(5)
    guard.step(SIZE, loss_of)
    before = everything(guard)
    mode, attempt, calls = FailAt(), guard._attempt, []

    def counted(*args):
        # Later attempts do not copy again, unless copying is what failed.
        mode.count = copying if calls and operation >= copying else 0
        mode.first = mode.last = operation if len(calls) < times else -1
        calls.append(1)
        return attempt(*args)

    guard._attempt = counted
    try:
        with mode:
            guard.step(SIZE, loss_of)
    except InsufficientMemoryError:
        return guard, before, False
    return guard, before, True


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", DETECTORS)
def test_twice_anywhere_splits_to_the_same_result(name, optimizer):
    """An operation that fails in both attempts at full size: the batch is split (or the
    optimizer tried a third time) and comes to what the whole one does within 1e-12, dropout and all."""
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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", DETECTORS)
def test_for_good_leaves_all_as_it_was(name, optimizer):
    """An operation that fails whatever the size: weights, optimizer and random state are
    those before the step, to be saved."""
    case = (name, optimizer, "by torch", torch.float32)
    count, copying = operations(case)
    for operation in sample(count, 6):
        guard, before, finished = second_step(case, operation, 99, copying)
        assert not finished and same(everything(guard), before), operation
        assert guard.num_steps == 1 and all(p.grad is None for p in guard.model.parameters())


@pytest.mark.parametrize("name", DETECTORS)
def test_failed_tensors_are_gone_before_the_retry(name):
    """Also what a failed backward pass leaves in the autograd engine's queue."""
    case = (name, "adam", "by trace", torch.float32)
    watched = 0
    for operation in sample(operations(case)[0], 24):
        _, guard, loss_of = make(*case)
        guard.step(SIZE, loss_of)
        mode, attempt, alive = FailAt(operation, watch=True), guard._attempt, []
        keep = {id(t) for t in (*guard.model.parameters(), *guard.model.buffers())}

        def looking(*args, mode=mode, attempt=attempt, alive=alive, keep=keep):
            if mode.refs and not alive:
                gc.collect()
                alive.append([n for n, r in mode.refs if r() is not None and id(r()) not in keep])
                mode.watch = False
            return attempt(*args)

        guard._attempt = looking
        with mode:
            guard.step(SIZE, loss_of)
        if alive:
            watched += len(mode.refs)
            assert alive[0] == [], operation
    assert watched > 50
