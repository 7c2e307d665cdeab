"""What a failed step must not have changed, copied before it and put back after."""

import copy
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from tracestore.oom.optimizers import SGD, Adam


def get_random_state() -> dict[str, Any]:
    """The random states of torch (CPU and GPUs), Python and numpy."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def seed_step(key: int, device: torch.device) -> None:
    """Seeds what a step draws from, on the CPU and on its device: torch.manual_seed looks for
    every kind of device each time, which takes a hundredth of a short step."""
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.manual_seed(key)


def restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if "cuda" in state:
        # A run may go on with fewer GPUs.
        for device, of_device in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(of_device, device)


def _metric_state(metric: Any) -> dict[str, Any]:
    """What a metric counts: its tensors, numbers and lists of them (torchmetrics keeps
    its states as attributes)."""
    out: dict[str, Any] = {}
    for name, value in vars(metric).items():
        if isinstance(value, torch.Tensor):
            out[name] = value.detach().clone()
        elif isinstance(value, list | dict | set):
            out[name] = value.copy()
        elif value is None or isinstance(value, bool | int | float | complex | str):
            out[name] = value
    return out


class TensorCopies:
    """Copies of live tensors, in memory that is kept from one call of `take` to the next."""

    def __init__(self) -> None:
        self._live: list[torch.Tensor] = []
        self._saved: list[torch.Tensor] = []

    @torch.no_grad()
    def take(self, live: list[torch.Tensor]) -> None:
        if not self._fits(live):
            self._live = []  # where allocating fails, there is nothing to restore
            self._saved = [torch.empty_like(t) for t in live]
        self._live = live
        if live:
            torch._foreach_copy_(self._saved, live)

    def _fits(self, live: list[torch.Tensor]) -> bool:
        return len(live) == len(self._saved) and all(
            s.shape == t.shape and s.dtype == t.dtype and s.device == t.device
            for s, t in zip(self._saved, live, strict=True)
        )

    @torch.no_grad()
    def restore(self) -> None:
        if self._live:
            torch._foreach_copy_(self._live, self._saved)


class StepSnapshot:
    """Beside gradients, what forward and backward change: random states, the model's
    buffers (BatchNorm), metrics that the loss function updates, and the scaler."""

    def __init__(self, model: nn.Module, scaler: Any = None, metrics: Sequence[Any] = ()) -> None:
        self.scaler, self.metrics = scaler, list(metrics)
        self._modules = [m for m in model.modules() if m._buffers]
        self._buffers = TensorCopies()
        self._held: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._metric_states: list[dict[str, Any]] = []
        self._scaler_state: dict[str, Any] = {}

    def take(self, seed: Callable[[], Any] | None = None) -> None:
        """`seed` sets the random states that the step begins with: then they are not copied,
        which takes a tenth of a millisecond."""
        if self._modules:
            self._held = [(m, n, b) for m in self._modules for n, b in m._buffers.items() if b is not None]
            self._buffers.take([b for _, _, b in self._held])
        if self.metrics:
            self._metric_states = [_metric_state(m) for m in self.metrics]
        if self.scaler is not None:
            self._scaler_state = self.scaler.state_dict()
        if seed is None:
            seed = partial(restore_random_state, get_random_state())
        else:
            seed()
        self._reseed = seed

    def restore(self) -> None:
        self._reseed()
        for module, name, buffer in self._held:  # also where forward put another in its place
            module._buffers[name] = buffer
        self._buffers.restore()
        for metric, state in zip(self.metrics, self._metric_states, strict=True):
            # Copied again: the same snapshot may have to serve several attempts.
            vars(metric).update({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()})
            vars(metric).update({k: v.copy() for k, v in state.items() if isinstance(v, list | dict | set)})
        if self._scaler_state:
            # update() also forgets which optimizers' gradients were unscaled already.
            self.scaler.update(self._scaler_state["scale"])
            self.scaler.load_state_dict(self._scaler_state)


# Optimizers of torch whose state begins with known values.
_KNOWN = (
    Adam,
    SGD,
    *(
        getattr(torch.optim, name)
        for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adadelta")
    ),
)
_FUSED = (Adam, SGD, torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


def create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocates what the optimizer keeps a parameter now, before training: a step with
    zero gradients and learning rate, after which the state is set to what it begins with.
    Others than torch's own (and SGD with dampening, whose first step is another) are left
    to make it in their first step: a failed one drops it again."""
    if type(optimizer) not in _KNOWN or any(g.get("dampening") for g in optimizer.param_groups):
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
        # mu_product of NAdam, mu of ASGD; eta of ASGD and step_size of Rprop begin at the rate.
        begins_with = {"mu_product": 1.0, "mu": 1.0, "eta": float(rate), "step_size": float(rate)}
        for p in group["params"]:
            for name, value in optimizer.state.get(p, {}).items():
                if isinstance(value, torch.Tensor):
                    value.fill_(begins_with.get(name, 0.0))


def writes_after_allocating(optimizer: torch.optim.Optimizer) -> bool:
    """Whether step() writes weights and state only once it needs no more memory: torch's
    fused kernels on one device and dtype. Step counters may still be ahead."""
    kinds = {(p.device, p.dtype) for g in optimizer.param_groups for p in g["params"]}
    fused = type(optimizer) in _FUSED and all(g.get("fused") for g in optimizer.param_groups)
    return fused and len(kinds) == len(optimizer.param_groups) == 1


class StepCounters:
    """The step counters of a fused optimizer, which may be ahead of a step that failed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._listed: Any = None
        self._counters: list[torch.Tensor] = []
        self._copies = TensorCopies()

    def take(self) -> None:
        state = self._optimizer.state
        if state is not self._listed or len(state) != len(self._counters):
            self._counters = [s["step"] for s in state.values() if "step" in s]
            self._listed = state
        self._copies.take(self._counters)

    def restore(self) -> None:
        self._copies.restore()


# What GradScaler.step() hangs on a fused optimizer, and leaves there where its step fails: the next
# one would divide the gradients by the scale twice.
_OF_SCALER = ("grad_scale", "found_inf")


class OptimizerSnapshot:
    """The weights and state that a failed optimizer step may have half written."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._copies = TensorCopies()
        self._tensors: list[tuple[Any, str, torch.Tensor]] = []
        self._names: dict[Any, set[str]] = {}
        self._states: dict[Any, dict[str, Any]] = {}
        self.take()  # the memory is there before training

    def take(self) -> None:
        state = self._optimizer.state
        self._tensors = [
            (p, name, v) for p, of in state.items() for name, v in of.items() if isinstance(v, torch.Tensor)
        ]
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        self._copies.take([*parameters, *(v for _, _, v in self._tensors)])
        self._names = {p: set(of) for p, of in state.items()}
        self._states = {p: _plain(of) for p, of in state.items()}
        self._of_scaler = {n: vars(self._optimizer)[n] for n in _OF_SCALER if n in vars(self._optimizer)}
        self._groups = [_plain(group) for group in self._optimizer.param_groups]

    def restore(self) -> None:
        self._copies.restore()
        for name in _OF_SCALER:
            vars(self._optimizer).pop(name, None)
        vars(self._optimizer).update(self._of_scaler)
        state = self._optimizer.state
        for p in list(state):
            if p not in self._names:
                del state[p]
                continue
            for name in set(state[p]) - self._names[p]:
                del state[p][name]
            state[p].update(copy.deepcopy(self._states.get(p, {})))
        for p, name, tensor in self._tensors:  # also where the step put another in its place
            state[p][name] = tensor
        for group, values in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(values)


# What copy.copy() gives back as it is.
_ATOMS = (int, float, bool, str, tuple, type(None))


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Copies of what is no tensor and no list of parameters."""
    return {
        k: v if type(v) in _ATOMS else copy.copy(v)
        for k, v in values.items()
        if k != "params" and not isinstance(v, torch.Tensor)
    }
