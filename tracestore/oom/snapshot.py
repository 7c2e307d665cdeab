"""Copies of the state that a failed step may change, to restore it afterwards."""

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
    """Return the random states of torch (CPU and GPUs), Python and numpy.

    The values have types that ``torch.load(weights_only=True)`` accepts.
    """
    version, internal, gauss = random.getstate()
    _, key, position, has_gauss, cached_gauss = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
        "numpy": {
            "key": np.asarray(key).tolist(),
            "pos": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(cached_gauss),
        },
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore what `get_random_state` returned."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    legacy = state["numpy"]
    np.random.set_state(
        ("MT19937", np.asarray(legacy["key"], np.uint32), legacy["pos"], legacy["has_gauss"], legacy["gauss"])
    )
    if "cuda" in state:
        # A run may resume with fewer GPUs.
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])


def seed_step(key: int, device: torch.device) -> None:
    """Seed torch's random generators of the CPU and of one device.

    ``torch.manual_seed`` looks for every kind of device, which takes a hundredth of a short step.
    """
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        number = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[number].manual_seed(key)


def flush_autograd_queue() -> None:
    """Run a tiny backward pass.

    A failed backward pass on the CPU leaves unvisited nodes, and the tensors they saved, in
    the queue of the autograd engine until the next pass.
    """
    with torch.enable_grad():
        torch.zeros((), requires_grad=True).neg().backward()


# Immutable types, which copy.copy() returns unchanged.
_IMMUTABLE_TYPES = (int, float, bool, complex, str, tuple, type(None))


def _metric_state(attributes: dict[str, Any]) -> dict[str, Any]:
    """Copy the tensors, numbers and collections among the attributes of a metric."""
    out: dict[str, Any] = {}
    for name, value in attributes.items():
        if isinstance(value, torch.Tensor):
            out[name] = value.detach().clone()
        elif isinstance(value, (list, dict, set, *_IMMUTABLE_TYPES)):
            out[name] = copy.copy(value)
    return out


class TensorCopies:
    """Copies of tensors, in memory that is reused by the next call of `save`."""

    def __init__(self) -> None:
        self._live: list[torch.Tensor] = []
        self._saved: list[torch.Tensor] = []

    @torch.no_grad()
    def save(self, live: list[torch.Tensor]) -> None:
        """Copy the tensors."""
        if not self._fits(live):
            self._live = []  # If the allocation fails, there is nothing to restore.
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
        """Copy the saved values back."""
        if self._live:
            torch._foreach_copy_(self._live, self._saved)


class StepSnapshot:
    """Random states, buffers, metrics and the scaler: what forward and backward may change.

    Parameters
    ----------
    model : torch.nn.Module
        Its buffers are saved, for example the statistics of BatchNorm.
    scaler : torch.amp.GradScaler, optional
    metrics : sequence of object
        Objects that the loss function updates.
    """

    def __init__(self, model: nn.Module, scaler: Any = None, metrics: Sequence[Any] = ()) -> None:
        self.is_saved = False
        self._scaler, self._metrics = scaler, list(metrics)
        self._modules = [m for m in model.modules() if m._buffers]
        self._buffers = TensorCopies()
        self._buffer_slots: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._metric_states: list[dict[str, Any]] = []
        self._scaler_state: dict[str, Any] = {}

    def discard(self) -> None:
        """Mark the snapshot as outdated."""
        self.is_saved = False

    def save(self, seed: Callable[[], Any] | None = None) -> None:
        """Copy the state.

        If `seed` is given, it is called to set the random states, now and in `restore`. Otherwise
        they are copied, which takes a tenth of a millisecond.
        """
        if self._modules:
            self._buffer_slots = [(m, n, b) for m in self._modules for n, b in m._buffers.items() if b is not None]
            self._buffers.save([b for _, _, b in self._buffer_slots])
        if self._metrics:
            self._metric_states = [_metric_state(vars(m)) for m in self._metrics]
        if self._scaler is not None:
            self._scaler_state = self._scaler.state_dict()
        if seed is None:
            seed = partial(restore_random_state, get_random_state())
        else:
            seed()
        self._reseed = seed
        self.is_saved = True

    def restore(self) -> None:
        """Restore the state. Several attempts may restore the same snapshot."""
        self._reseed()
        # Forward may have replaced a buffer by another tensor.
        for module, name, buffer in self._buffer_slots:
            module._buffers[name] = buffer
        self._buffers.restore()
        for metric, state in zip(self._metrics, self._metric_states, strict=True):
            vars(metric).update(_metric_state(state))
        if self._scaler_state:
            # update() also clears the record of optimizers whose gradients were unscaled.
            self._scaler.update(self._scaler_state["scale"])
            self._scaler.load_state_dict(self._scaler_state)


# Optimizers whose initial state is known. Adam and SGD are subclasses of torch's; the check compares exact types.
_KNOWN_OPTIMIZERS = (
    Adam,
    SGD,
    *(
        getattr(torch.optim, name)
        for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adadelta")
    ),
)
_FUSED_OPTIMIZERS = (Adam, SGD, torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


def create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the optimizer's state before training, where it is one of torch's own.

    This makes a step with zero gradients and learning rate, and then sets the state to its initial
    values. Other optimizers, and SGD with dampening, whose first step differs from the later ones,
    allocate their state in their first step, which is undone if it fails.
    """
    if type(optimizer) not in _KNOWN_OPTIMIZERS or any(g.get("dampening") for g in optimizer.param_groups):
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
        # mu_product belongs to NAdam, mu and eta to ASGD, step_size to Rprop.
        initial_values = {"mu_product": 1.0, "mu": 1.0, "eta": float(rate), "step_size": float(rate)}
        for p in group["params"]:
            for name, value in optimizer.state.get(p, {}).items():
                if isinstance(value, torch.Tensor):
                    value.fill_(initial_values.get(name, 0.0))


def writes_after_allocating(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``step()`` allocates all its memory before it writes weights and state.

    torch's fused kernels do so for parameters of one device and dtype. They increment the step
    counters first.
    """
    kinds = {(p.device, p.dtype) for g in optimizer.param_groups for p in g["params"]}
    fused = type(optimizer) in _FUSED_OPTIMIZERS and all(g.get("fused") for g in optimizer.param_groups)
    return fused and len(kinds) == len(optimizer.param_groups) == 1


class StepCounters:
    """The step counters of a fused optimizer, which a failed step may have incremented."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._copies = optimizer, TensorCopies()

    def save(self) -> None:
        """Copy the counters."""
        self._copies.save([state["step"] for state in self._optimizer.state.values() if "step" in state])

    def restore(self) -> None:
        """Restore the counters."""
        self._copies.restore()


# GradScaler.step() sets these attributes of a fused optimizer and leaves them there if its step fails;
# the next step would divide the gradients by the scale twice.
_SCALER_ATTRIBUTES = ("grad_scale", "found_inf")


class OptimizerSnapshot:
    """All weights and state of an optimizer, which a failed step may have written in part."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._copies = TensorCopies()
        self.save()  # allocates the copies before training

    def save(self) -> None:
        """Copy weights, state and options."""
        states, groups = self._optimizer.state, self._optimizer.param_groups
        tensors = [v for values in states.values() for v in values.values() if isinstance(v, torch.Tensor)]
        self._copies.save([*(p for group in groups for p in group["params"]), *tensors])
        self._states = {p: _copy_containers(values) for p, values in states.items()}
        attributes = vars(self._optimizer)
        self._scaler_attributes = {name: attributes[name] for name in _SCALER_ATTRIBUTES if name in attributes}
        self._groups = [_copy_containers(group) for group in groups]

    def restore(self) -> None:
        """Restore weights, state and options."""
        self._copies.restore()
        for name in _SCALER_ATTRIBUTES:
            vars(self._optimizer).pop(name, None)
        vars(self._optimizer).update(self._scaler_attributes)
        # The step may have added state, or replaced one of its tensors by another.
        self._optimizer.state.clear()
        self._optimizer.state.update({p: _copy_containers(values) for p, values in self._states.items()})
        for group, values in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(values)


def _copy_containers(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with a copy of each container, and the same tensors."""
    kept = (*_IMMUTABLE_TYPES, torch.Tensor)
    return {k: v if isinstance(v, kept) else copy.copy(v) for k, v in values.items()}
