"""Training steps: the fused operators compared with PyG one layer at a time, and the LSTM's data wait.

    python -m benchmarks.training MODEL SHAPE fused|pyg STEPS (in bench/)

creates batch, edges and model, waits for `common.run_measured`, then prints the seconds of each step
after the first. The measured memory is that of activations, gradients, workspaces and optimizer state.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tracestore
from tracestore.detectors.graph.inputs import GraphInputs
from tracestore.detectors.graph.padding import can_pad, to_padded
from tracestore.detectors.layers.dropout import TraceMasks
from tracestore.detectors.layers.model_config import ModelConfig
from tracestore.detectors.models import detector_loss
from tracestore.detectors.registry import make_model
from tracestore.oom.guard import OOMGuard
from tracestore.oom.optimizers import Adam
from tracestore.oom.snapshot import seed_step
from tracestore.train.step_graphs import StepGraphs, StepInputs

from .common import GRAPH_MODELS, STEP_SHAPES, Fixtures, measure_steps, wait_for_start

THREADS = 2


def make_inputs(shape: str) -> GraphInputs:
    """Return random float16 hidden states and packed attention whose rows sum to 1."""
    B, L, D, low, high, top_k, threshold = STEP_SHAPES[shape]
    rng = np.random.default_rng(0)
    tokens = np.repeat(rng.integers(low, high + 1, B), L)
    nodes, pairs = (np.concatenate([[0], np.cumsum(n)]) for n in (tokens, tokens * (tokens + 1) // 2))
    weights = []
    for size in tokens:
        square = np.tril(rng.random((size, size), "f4") ** 8 + 1e-4)
        row = (square / square.sum(1, keepdims=True))[np.tril_indices(size)].astype("f2")
        if top_k is not None:  # the loader marks dropped pairs with NaN
            row[np.argsort(-row, kind="stable")[max(1, int(top_k * len(row))) :]] = np.nan
        weights.append(row)
    x = rng.standard_normal((nodes[-1], D), "f4").astype("f2")
    weight = torch.from_numpy(np.concatenate(weights))
    limit = threshold if top_k is None else -np.inf
    return GraphInputs(torch.from_numpy(x), torch.from_numpy(nodes), weight, torch.from_numpy(pairs), L, None, limit)


def select_layers(inputs: GraphInputs, layers: Sequence[int]) -> GraphInputs:
    """Return the graphs of some layers."""
    graphs = [t * inputs.num_layers + k for t in range(inputs.num_traces) for k in layers]
    parts: dict[str, torch.Tensor] = {}
    for values, ptr in (("x", "node_ptr"), ("weight", "weight_ptr")):
        sizes = getattr(inputs, ptr).diff()
        pieces = getattr(inputs, values).split(sizes.tolist())
        parts[values] = torch.cat([pieces[g] for g in graphs])
        parts[ptr] = torch.nn.functional.pad(sizes[graphs].cumsum(0), (1, 0))
    return replace(inputs, **parts, num_layers=len(layers), layers=tuple(layers))  # type: ignore[arg-type]


def layer_inputs(inputs: GraphInputs, layer: int) -> GraphInputs:
    """Return one layer of every trace, with edge lists."""
    one = select_layers(inputs, [layer])
    edge_index, weight = one.coo()
    return replace(one, weight=weight[:, 0], edge_index=edge_index, threshold=0.0)


class Step:
    """One training step: forward, backward, Adam. Kind "pyg" computes layer by layer, like users' scripts."""

    def __init__(self, model: str, shape: str, kind: str, device: str | torch.device = "cpu") -> None:
        B, L, D, *_ = STEP_SHAPES[shape]
        torch.manual_seed(0)
        inputs = make_inputs(shape) if model in GRAPH_MODELS else torch.randn(B, L, D).half()
        self.model = make_model(model, ModelConfig(L, D, message_passing=kind)).to(device)
        if isinstance(inputs, GraphInputs):
            # As training gets them from the loader: the layers that the model reads, prepared.
            config = self.model.encoder.config
            self.inputs: Any = select_layers(inputs, self.model.layers_read).prepare(config)
            on_gpu = torch.device(device).type == "cuda" and kind == "fused" and can_pad(self.inputs)
            self.inputs = to_padded(self.inputs, torch.device(device))[0] if on_gpu else self.inputs.to(device)
        else:
            self.inputs = inputs.to(device)
        self.optimizer = Adam(self.model.parameters(), fused=True)
        self.y = (torch.arange(B) % 2).float().to(device)
        self.graphs: StepGraphs | None = None
        if kind == "pyg":
            layers = [layer_inputs(inputs, k).to(device).prepare(config) for k in self.model.layers_read]
            encode = self.model.encoder.encode
            self.model.encoder.forward = lambda *_: torch.cat([encode(layer) for layer in layers], dim=1)
        # Training draws dropout masks per trace; with PyG, torch draws them.
        self.masks = None if kind == "pyg" else TraceMasks(1, 0, B)

    def record(self) -> None:
        """Let the step be recorded and replayed, as in training on a GPU."""
        self.graphs = StepGraphs(self.loss, self.optimizer)

    def loss(self, given: StepInputs | None = None) -> torch.Tensor:
        """Return the loss of the batch."""
        given = StepInputs(self.inputs, self.y, self.masks) if given is None else given
        return detector_loss(self.model(given.inputs, given.masks), given.y, 0.01)

    def __call__(self) -> float:
        """Run the step and return its seconds."""
        began = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        replayed = self.graphs and self.graphs.loss(StepInputs(self.inputs, self.y, self.masks))
        (replayed or self.loss()).backward()
        if self.graphs is None or not self.graphs.step():
            self.optimizer.step()
        return time.perf_counter() - began


class PlainLSTM:
    """A step of torch.nn.LSTM with a linear layer, on sequences of all layers: the least that lstm_solo could cost."""

    def __init__(self, shape: str, device: str | torch.device = "cpu") -> None:
        B, L, D, *_ = STEP_SHAPES[shape]
        config = ModelConfig(L, D)
        self.x, self.y = torch.randn(B, L, D, device=device), (torch.arange(B) % 2).float().to(device)
        hidden = config.lstm_hidden
        self.lstm = torch.nn.LSTM(D, hidden, batch_first=True, bidirectional=True).to(device)
        self.head = torch.nn.Linear(2 * hidden, 1).to(device)
        self.optimizer = Adam([*self.lstm.parameters(), *self.head.parameters()], fused=True)

    def __call__(self) -> None:
        """Run the step."""
        self.optimizer.zero_grad(set_to_none=True)
        logits = self.head(self.lstm(self.x)[0].mean(1)).squeeze(1)
        torch.nn.functional.binary_cross_entropy_with_logits(logits, self.y).backward()
        self.optimizer.step()


def guard_share(model: str, shape: str, steps: int, fused: bool = True) -> tuple[float, float]:
    """Return the time that the guard adds to a step, in seconds and as a share of the step.

    Steps with and without the guard alternate. The guard's time is the difference of their times outside the forward
    pass, the backward pass and the optimizer's step: both free the gradients. Both variants seed each step, like
    training. Optimizers that are not `fused` need a snapshot.
    """
    torch.set_num_threads(THREADS)
    step = Step(model, shape, "fused")
    optimizer = Adam(step.model.parameters(), fused=fused)
    guard, inside = OOMGuard(step.model, optimizer), 0.0

    def accumulate_time(call):
        @functools.wraps(call)
        def timed(*args, **options):
            nonlocal inside
            began = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                inside += time.perf_counter() - began

        return timed

    optimizer.step = accumulate_time(optimizer.step)
    loss_of = accumulate_time(lambda begin, end: step.loss())
    backward, torch.Tensor.backward = torch.Tensor.backward, accumulate_time(torch.Tensor.backward)

    def guarded_step():
        guard.step(len(step.y), loss_of, seed=functools.partial(seed_step, 1, step.y.device))

    def plain_step():
        seed_step(1, step.y.device)
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(0, len(step.y))
        value = float(loss.detach())
        loss.backward()
        del loss  # frees the graph, like the guard
        optimizer.step()
        return value

    outside, whole = {"guard": [], "plain": []}, []
    try:
        for _ in range(steps + 1):
            for name, run in (("guard", guarded_step), ("plain", plain_step)):
                inside, began = 0.0, time.perf_counter()
                run()
                whole.append(time.perf_counter() - began)
                outside[name].append(whole[-1] - inside)
    finally:
        torch.Tensor.backward = backward
    added = statistics.median(outside["guard"][1:]) - statistics.median(outside["plain"][1:])
    return added, added / statistics.median(whole[2:])


def lstm_data_share(store_path: Path, epochs: int = 3) -> float:
    """Train lstm_solo from a store. Return the share of an epoch spent waiting for batches."""
    torch.set_num_threads(THREADS)
    with tracestore.open(store_path) as store:
        loader = tracestore.TraceLoader(store, "sequence", batch_size=16, num_threads=1)
        model = make_model("lstm_solo", ModelConfig(store.num_layers, store.hidden_dim))
        optimizer = Adam(model.parameters(), fused=True)
        shares, step = [], 0
        for _ in range(epochs + 1):
            waited, began, batches = 0.0, time.perf_counter(), iter(loader)
            while True:
                requested = time.perf_counter()
                batch = next(batches, None)
                waited += time.perf_counter() - requested
                if batch is None:
                    break
                optimizer.zero_grad(set_to_none=True)
                masks = TraceMasks(step, 0, len(batch.y))
                detector_loss(model(batch.sequences, masks), batch.y, 0.01).backward()
                optimizer.step()
                step += 1
            shares.append(waited / (time.perf_counter() - began))
    return statistics.median(shares[1:])


class Steps:
    """Training steps of the detectors with the fused operators."""

    params = (["lstm_solo", *GRAPH_MODELS], list(STEP_SHAPES)[:2])
    param_names = ("model", "shape")
    timeout = 600

    def setup(self, model, shape):
        """Create the model and the batch and run one step."""
        torch.set_num_threads(THREADS)
        self.step = Step(model, shape, "fused")
        self.step()

    def time_step(self, model, shape):
        """Run one step."""
        self.step()


class StepsLimit:
    """Steps compared with PyG's, which compute the same function one layer at a time."""

    params = (["gnn_det_lstm"], list(STEP_SHAPES)[:1])
    param_names = ("model", "shape")
    timeout = 600

    def track_limit(self, model, shape):
        """Return the time in percent of PyG's."""
        fused, pyg = measure_steps(model, shape, "fused", 5)[0], measure_steps(model, shape, "pyg", 1)[0]
        return 100 * fused / pyg

    track_limit.unit = "% of PyG's time"


class AllShapes(StepsLimit):
    """Both graph models and all shapes, which take minutes. `make asv` leaves them out."""

    params = (list(GRAPH_MODELS), list(STEP_SHAPES))

    def track_memory_limit(self, model, shape):
        """Return the memory in percent of PyG's."""
        fused, pyg = measure_steps(model, shape, "fused", 5)[1], measure_steps(model, shape, "pyg", 1)[1]
        return 100 * fused / pyg

    track_memory_limit.unit = "% of PyG's memory"


class Shares(Fixtures):
    """Overheads of lstm_solo, which has the shortest steps."""

    def track_waiting_for_data(self, folder):
        """Return the share of an epoch spent waiting for batches, in percent."""
        return 100 * lstm_data_share(Path(folder) / "small")

    track_waiting_for_data.unit = "% of an epoch"

    def track_guard(self, folder):
        """Return the share of a step that the guard takes, in percent."""
        return 100 * guard_share("lstm_solo", next(iter(STEP_SHAPES)), 60)[1]

    track_guard.unit = "% of a step"


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["lstm_solo", *GRAPH_MODELS])
    parser.add_argument("shape", choices=STEP_SHAPES)
    parser.add_argument("kind", choices=["fused", "pyg"])
    parser.add_argument("steps", type=int)
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    step = Step(args.model, args.shape, args.kind)
    wait_for_start()
    step()
    for _ in range(args.steps):
        print(step())


if __name__ == "__main__":
    main()
