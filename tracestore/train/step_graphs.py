"""Training steps as CUDA graphs: a GPU starts hundreds of small operations at once.

A step of a detector starts 300 operations of a few microseconds each, and Python takes longer to start them than a GPU
to compute them. Forward and backward of a batch are therefore recorded once for each set of shapes, and the optimizer's
step once; then they are replayed on the memory of the recording. `StepInputs` and `SideStreams` serve steps without
recordings, too.

References
----------
PyTorch, "CUDA semantics", section "CUDA Graphs".
"""

import functools
import gc
import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from tracestore.detectors.graph.inputs import GraphInputs
from tracestore.detectors.layers.dropout import TraceMasks
from tracestore.oom.oom_errors import is_out_of_memory

T = TypeVar("T")
# Graphs that are kept, and the share of the memory of a GPU, 1 / 16, that their inputs take. Other shapes are computed operation by operation.
_MAX_GRAPHS, _INPUT_SHARE = 64, 16


@dataclass
class StepInputs:
    """The inputs of some traces of a batch.

    Parameters
    ----------
    inputs : torch.Tensor or GraphInputs
        Sequences ``(B, L, D)``, or graphs.
    y : torch.Tensor
        Labels ``(B,)``.
    masks : TraceMasks, optional
        Dropout masks, and the noise of a variational autoencoder, in training.
    """

    inputs: Any
    y: torch.Tensor
    masks: TraceMasks | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors."""
        inputs = self.inputs.tensors() if isinstance(self.inputs, GraphInputs) else [self.inputs]
        return [*inputs, self.y, *([] if self.masks is None else [self.masks.state])]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "StepInputs":
        """Return a copy with a function applied to each tensor, in the order of `tensors`."""
        inputs = self.inputs._map(function) if isinstance(self.inputs, GraphInputs) else function(self.inputs)
        y, masks = function(self.y), self.masks
        if masks is not None:
            masks = TraceMasks(masks.key, masks.first, masks.count)
            masks.state = function(self.masks.state)  # type: ignore[union-attr]
        return StepInputs(inputs, y, masks)


class SideStreams(NamedTuple):
    """The streams on which batches are copied, and on which steps are recorded."""

    copies: torch.cuda.Stream
    recordings: torch.cuda.Stream


@functools.cache
def side_streams(device: torch.device) -> SideStreams:
    """Return the streams of a GPU, the same in each call.

    torch returns 32 streams in turn, so that one for each feed would become the one of recordings, and a copy a part
    of a recording. The matrix products of each stream have a workspace.
    """
    return SideStreams(torch.cuda.Stream(device), torch.cuda.Stream(device))


class ReplayedLoss:
    """The loss of a replayed graph, whose gradients have been computed with it."""

    def __init__(self, graphs: "StepGraphs", value: torch.Tensor) -> None:
        self._graphs, self._value = graphs, value

    def __mul__(self, factor: float) -> "ReplayedLoss":
        torch._foreach_mul_(self._graphs.gradients, factor)
        return ReplayedLoss(self._graphs, self._value * factor)

    def detach(self) -> torch.Tensor:
        """Return the value."""
        return self._value

    def backward(self) -> None:
        """Set the gradients of the parameters, which must have none: the next replay overwrites these."""
        if any(parameter.grad is not None for parameter in self._graphs.trained):
            raise RuntimeError("the gradients of a recorded step cannot be added to others")
        for parameter, gradient in zip(self._graphs.trained, self._graphs.gradients, strict=True):
            parameter.grad = gradient


class _Recording:
    """A CUDA graph, the tensors that it reads, and the loss that it writes."""

    def __init__(self, inputs: StepInputs) -> None:
        self.graph = torch.cuda.CUDAGraph()
        copies = iter([torch.empty_like(tensor) for tensor in inputs.tensors()])
        self.inputs = inputs.map(lambda _: next(copies))
        self.loss: torch.Tensor | None = None
        # Tensors of one dtype are copied in one operation.
        tensors = self.inputs.tensors()
        by_dtype: dict[torch.dtype, list[int]] = {}
        for k, tensor in enumerate(tensors):
            by_dtype.setdefault(tensor.dtype, []).append(k)
        self._groups = [(numbers, [tensors[k] for k in numbers]) for numbers in by_dtype.values()]

    def read(self, inputs: StepInputs) -> None:
        """Copy the tensors of a batch."""
        tensors = inputs.tensors()
        for numbers, own in self._groups:
            torch._foreach_copy_(own, [tensors[k] for k in numbers], non_blocking=True)


class StepGraphs:
    """The graphs of a model and its optimizer.

    Parameters
    ----------
    loss_of : callable
        ``loss_of(inputs)`` returns the mean loss of `StepInputs`.
    optimizer : torch.optim.Optimizer
        A fused one, whose state exists.

    Attributes
    ----------
    trained : list of torch.nn.Parameter
        Parameters with a gradient.
    gradients : list of torch.Tensor
        Their gradients, which each replay overwrites.
    is_active : bool
        Whether graphs are recorded and replayed.
    """

    def __init__(self, loss_of: Callable[[StepInputs], torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        self._loss_of, self._optimizer = loss_of, optimizer
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.trained: list[torch.nn.Parameter] = []
        self.gradients: list[torch.Tensor] = []
        self._recordings: dict[object, _Recording] = {}
        self._optimizer_graph: torch.cuda.CUDAGraph | None = None
        self._num_steps = 0
        self._device = self._parameters[0].device
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        self._room = sys.maxsize
        if self._device.type == "cuda":
            self._room = torch.cuda.get_device_properties(self._device).total_memory // _INPUT_SHARE
        self.is_active = True

    def loss(self, inputs: StepInputs) -> ReplayedLoss | None:
        """Compute the loss and its gradients. None: no graph can be used, nothing was computed."""
        key = tuple((tensor.shape, tensor.dtype) for tensor in inputs.tensors())
        recording = self._recordings.get(key)
        if recording is None and self.is_active and len(self._recordings) < _MAX_GRAPHS:
            num_bytes = sum(tensor.nbytes for tensor in inputs.tensors())
            if num_bytes > self._room:
                return None
            recording = self._try(lambda: self._record(inputs))
            if recording is None:
                self._optimizer.zero_grad(set_to_none=True)
            else:
                self._recordings[key] = recording
                self._room -= num_bytes
        if recording is None or recording.loss is None:
            return None
        recording.read(inputs)
        recording.graph.replay()
        return ReplayedLoss(self, recording.loss)

    def step(self) -> bool:
        """Step the optimizer with the gradients of a graph. Return False, and do nothing, if there are none."""
        if not self.trained or any(p.grad is not g for p, g in zip(self.trained, self.gradients, strict=True)):
            return False
        if self._optimizer_graph is None:
            self._num_steps += 1
            # The first step allocates, and loads the kernels.
            if not self.is_active or self._num_steps == 1:
                return False
            self._optimizer_graph = self._try(self._record_optimizer)
            if self._optimizer_graph is None:
                return False
        self._optimizer_graph.replay()
        return True

    def release(self) -> None:
        """Free the memory of all graphs and use none from now on, because memory is short."""
        self.is_active = False
        self._recordings.clear()
        self._optimizer_graph = None
        self.trained, self.gradients = [], []
        # The matrix products of each stream have a workspace.
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:
            clear()

    def _record(self, inputs: StepInputs) -> _Recording:
        recording = _Recording(inputs)
        recording.read(inputs)
        # The first call loads kernels, which a recording must not do.
        recording.loss = self._run(lambda: self._pass(recording.inputs))
        recording.loss = self._run(lambda: self._pass(recording.inputs), recording.graph)
        return recording

    def _pass(self, inputs: StepInputs) -> torch.Tensor:
        """Compute loss and gradients, and move the gradients into the memory that all graphs share."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss_of(inputs)
        loss.backward()
        found = [p for p in self._parameters if p.grad is not None]
        if not self.trained:
            self.trained = found
            self.gradients = [torch.empty_like(p) for p in found]
        if [id(p) for p in found] != [id(p) for p in self.trained]:
            raise RuntimeError("other parameters have gradients")
        torch._foreach_copy_(self.gradients, [p.grad for p in found])
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _record_optimizer(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        groups = self._optimizer.param_groups
        before = [group["capturable"] for group in groups]
        for group in groups:
            group["capturable"] = True
        try:
            self._run(lambda: self._optimizer.step(), graph)
        finally:
            for group, value in zip(groups, before, strict=True):
                group["capturable"] = value
        return graph

    def _run(self, work: Callable[[], T], graph: torch.cuda.CUDAGraph | None = None) -> T:
        """Run work on a stream of its own, and record it if a graph is given."""
        device = self._device
        with torch.cuda.device(device):
            stream, current = side_streams(device).recordings, torch.cuda.current_stream(device)
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream):
                    if graph is None:
                        return work()
                    # torch.cuda.graph would free the pinned memory of the batches ahead, too.
                    torch.cuda.synchronize()
                    torch.cuda.empty_cache()
                    # Other threads may allocate pinned memory meanwhile.
                    graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                    try:
                        return work()
                    finally:
                        graph.capture_end()
            except BaseException:
                # Else torch may not allocate outside of the memory of recordings after one that was invalidated.
                with suppress(Exception):
                    torch._C._cuda_endAllocateToPool(device.index or 0, self._pool)  # type: ignore[arg-type]
                raise
            finally:
                # A recording that fails can leave its stream the current one.
                torch.cuda.set_stream(current)
                current.wait_stream(stream)

    def _try(self, record: Callable[[], T]) -> T | None:
        """Return a recording. If it fails, no graph is used from now on."""
        try:
            return record()
        except Exception as error:
            reason, is_short = f"{type(error).__name__}: {error}".splitlines()[0][:200], is_out_of_memory(error)
            logging.getLogger(__name__).debug("a CUDA graph cannot be recorded", exc_info=True)
        # Outside of the handler, whose traceback keeps tensors of the recording.
        self.release()
        gc.collect()
        torch.cuda.empty_cache()
        if not is_short:
            warnings.warn(
                f"a training step cannot be recorded as a CUDA graph ({reason}); its operations are started one by "
                "one, which is slower. Please report this with the output of: tracestore doctor",
                RuntimeWarning,
                stacklevel=2,
            )
        return None
