"""Out-of-memory errors at chosen operations, and small detectors to raise them in."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.train.runs import select_layers
from tracestore.detectors.graph.gine import GraphInputs
from tracestore.detectors.layers.dropout import TraceMasks
from tracestore.detectors.layers.model_config import ModelConfig
from tracestore.detectors.models import detector_loss
from tracestore.detectors.registry import MODELS, make_model
from tracestore.oom.guard import OOMGuard

NO_KERNEL = "could not create a primitive descriptor for the LSTM forward propagation primitive. Run workload with environment variable ONEDNN_VERBOSE=all to get additional diagnostic information."
SIZE = 4
LAYERS, DIM = 3, 8
# Profiler marks and collectives are no operations of a step.
_NOT_COUNTED = ("profiler", "c10d")


class FailAt(TorchDispatchMode):
    """Counts operations, and raises torch.OutOfMemoryError at numbers `first` to `last`.

    With `watch` it keeps weak references to the results of the operations before the first failure.
    """

    def __init__(self, first=-1, last=None, watch=False):
        super().__init__()
        self.first, self.last = first, first if last is None else last
        self.count = 0
        self.watch, self.refs = watch, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in _NOT_COUNTED:
            return func(*args, **(kwargs or {}))
        number = self.count
        self.count += 1
        if self.first <= number <= self.last:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        out = func(*args, **(kwargs or {}))
        if self.watch and number < self.first and func._opname[-1] != "_":
            results = out if isinstance(out, tuple | list) else (out,)
            self.refs += [(func._opname, weakref.ref(t)) for t in results if isinstance(t, torch.Tensor)]
        return out


def fail_in_attempts(guard, mode, operation, times, copying=0):
    """Let an operation fail in each of the first `times` attempts of the next step, which runs under `mode`.

    `copying` is the number of operations of the snapshot, which later attempts skip unless it failed.
    """
    attempts = []

    def before_attempt(event=None):
        mode.count = copying if attempts and operation >= copying else 0
        mode.first = mode.last = operation if len(attempts) < times else -1
        attempts.append(event)

    before_attempt()
    guard.on_event = before_attempt


def step_with_failure(guard, size, loss_of, operation, live):
    """Run a step whose first attempt fails at an operation. `live()` must be unchanged before the next attempt.

    Return the phase of the failure, or None if the step has fewer operations.
    """
    before, phases = live(), []

    def check(event):
        assert live() == before, operation
        phases.append(event["phase"])

    guard.on_event = check
    with FailAt(operation):
        guard.step(size, loss_of)
    return phases[0] if phases else None


def graphs(dtype, seed=0):
    """Return a packed batch of SIZE traces of 1 to 4 tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([1 + k for k in range(SIZE)]).repeat_interleave(LAYERS)
    pairs = tokens * (tokens + 1) // 2

    def pointers(sizes):
        return torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])

    x = torch.randn(int(tokens.sum()), DIM, dtype=dtype, generator=generator)
    weight = torch.rand(int(pairs.sum()), dtype=dtype, generator=generator)
    size = tokens[::LAYERS]
    answer = torch.stack([size // 2, size], dim=1)
    return GraphInputs(x, pointers(tokens), weight, pointers(pairs), LAYERS, answer=answer)


def make_optimizer(name, parameters):
    """Return "sgd", "adam" or "fused" Adam."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=1e-5, fused=name == "fused")


def make(name, optimizer="adam", drawn="by trace", dtype=torch.float64, **options):
    """Return a detector, its guard, and the loss function of a fixed batch.

    Dropout masks and the noise of the VAE are drawn "by trace", as in training, or "by torch".
    """
    torch.manual_seed(0)
    # Two readers: a campaign has the square of the number of operations to compute.
    sizes = {"gnn_hidden": 4, "latent_dim": 4, "lstm_hidden": 4, "num_readers": 2}
    config = ModelConfig(LAYERS, DIM, **sizes, dropout=0.5, standardize=True)
    model = make_model(name, config).to(dtype)
    opt = make_optimizer(optimizer, model.parameters())
    guard = OOMGuard(model, opt, **options)
    sequences = torch.randn(SIZE, LAYERS, DIM, dtype=dtype)
    batch, y = select_layers(graphs(dtype), model.layers_read), torch.tensor([0.0, 1.0, 1.0, 0.0])

    def loss_of(begin, end):
        inputs = sequences[begin:end] if MODELS[name].view == "sequence" else batch.traces(begin, end)
        if drawn == "by torch":
            output = model(inputs)
        else:
            masks = TraceMasks(7, begin, end - begin)
            output = model(inputs, masks)
        return detector_loss(output, y[begin:end], 0.01)

    return model, guard, loss_of


def everything(guard):
    """Return copies of weights, optimizer state and random state."""
    tensors = [p.detach().clone() for p in guard.model.parameters()]
    for state in guard.optimizer.state.values():
        tensors += [v.clone() for _, v in sorted(state.items()) if isinstance(v, torch.Tensor)]
    return [*tensors, torch.get_rng_state()]


def same(a, b):
    """Return whether two lists of tensors are equal."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
