"""A training plan without training and without torch, whose import alone takes seconds.

Memory follows from the sizes of model and batch: a few terms, whose factors were fitted to
real steps of detectors and stores of many sizes (bench/plan.py, which fits them again). Time
is what the operations of a step take on this machine: the C core's aggregation and BLAS's
products are tried for some milliseconds at the sizes of the step, and the factors say how
many of them a step is worth. Both hold for the defaults of a training on the CPU; `covers`
says where nothing but real steps tell (train.measure).
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracestore._core.gine import Graphs
from tracestore.data.batch_format import BatchFormat, GraphOptions
from tracestore.data.budget import plan_memory
from tracestore.data.epoch import EpochMaker
from tracestore.platform_support import num_cores
from tracestore.store import schema
from tracestore.store.reader import TraceStore
from tracestore.train.config import TrainConfig
from tracestore.train.memory import RESERVE_BYTES
from tracestore.train.model_config import VIEWS, ModelConfig
from tracestore.train.plan import (
    LATER_BATCHES,
    LATER_BYTES,
    SLACK_BYTES,
    TrainingPlan,
    largest_batch_factor,
    mapped_bytes,
    sizes_of,
    training_part,
)

# Of a process that has imported what training imports: anonymous memory, and pages of files.
_LIBRARIES_BYTES = 148 << 20
_LIBRARY_FILE_BYTES = 100 << 20
_FLOAT = 4
# What gine_op.CHUNK_BYTES is on the CPU.
_CHUNK_BYTES = 16 << 20


# What the terms of memory count for, in their order; those of the data segment are for the floor.
MEMORY = np.array([18.4e6, 2.8, 2.7, 48.9, 8.6, 6.4])
DATA = np.array([80.5e6, 4.9, 3.4, 68.9, 13.2, 5.9])
# What the terms of the time of a step count for.
TIME = np.array([19e3, 97, 63e3, 1.45, 1.8, 1.13, 0.33, 0.051, 17.5])
# The first of them are of a step, whatever its traces.
_OF_STEP = 3
# Of the detectors that they were fitted to.
_LSTM_LAYERS = 2
_LSTM_SIZES = range(64, 193)
# A floor is not to be promised too low.
_FLOOR_MARGIN = 1.1


@dataclass(frozen=True)
class Sizes:
    """Of a detector and a mean trace, as the terms of memory and time need them. Graph
    detectors: nodes and pairs of all layers; others: 0."""

    parameters: int
    num_layers: int
    hidden_dim: int
    gnn_hidden: int
    lstm_in: int
    lstm_hidden: int
    num_lstm_layers: int
    nodes: float
    pairs: float
    batch_bytes: float

    @classmethod
    def of(cls, name: str, config: ModelConfig, nodes: float, pairs: float, batch_bytes: float) -> "Sizes":
        """config: the detector's; nodes, pairs and batch_bytes: of a mean trace."""
        is_graph = VIEWS[name] == "graph"
        reads = {"lstm_solo": config.hidden_dim, "gnn_det_lstm": config.gnn_hidden, "gvae_lstm": config.latent_dim}
        return cls(
            num_parameters(name, config),
            config.num_layers,
            config.hidden_dim,
            config.gnn_hidden,
            reads[name],
            config.lstm_hidden,
            config.num_lstm_layers,
            nodes if is_graph else 0.0,
            pairs if is_graph else 0.0,
            batch_bytes,
        )

    def memory_of_trace(self) -> np.ndarray:
        """(3,) bytes: states of the LSTM, what it reads, and rows of the graph encoder."""
        rows = self.num_layers * _FLOAT
        return np.array([rows * self.lstm_hidden, rows * self.lstm_in, self.nodes * self.gnn_hidden * _FLOAT])

    def memory_of_model(self, batch_size: int) -> np.ndarray:
        """(3,): 1, and bytes of the parameters and of the part that gine_linear works on."""
        part = min(_CHUNK_BYTES, batch_size * self.nodes * self.hidden_dim * _FLOAT)
        return np.array([1.0, self.parameters * _FLOAT, part])


def num_parameters(name: str, config: ModelConfig) -> int:
    """Of make_model(name, config)."""

    def linear(inputs: int, outputs: int) -> int:
        return (inputs + 1) * outputs

    hidden, latent, dim = config.gnn_hidden, config.latent_dim, config.hidden_dim
    total, reads = 0, dim
    if name != "lstm_solo":
        first = linear(config.edge_dim, dim) + linear(dim, hidden) + linear(hidden, hidden)
        second = linear(config.edge_dim, hidden) + 2 * linear(hidden, hidden)
        total, reads = first + second, hidden
    if name == "gvae_lstm":
        total += 2 * linear(hidden, latent) + linear(latent, hidden) + linear(hidden, hidden)
        reads = latent
    width = config.lstm_hidden
    for layer in range(config.num_lstm_layers):
        total += 2 * 4 * width * ((2 * width if layer else reads) + width + 2)
    return total + linear(2 * width, 128) + linear(128, 64) + linear(64, 1)


class Machine:
    """What operations take here, in seconds, each tried once for some milliseconds."""

    def __init__(self, num_threads: int) -> None:
        from threadpoolctl import ThreadpoolController

        self.num_threads = num_threads
        self._pools = ThreadpoolController()  # BLAS's threads
        self._known: dict[tuple[Any, ...], Any] = {}

    def _once(self, key: tuple[Any, ...], measure: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = measure()
        return self._known[key]

    def product(self, rows: int, inner: int, columns: int) -> float:
        """Of one multiplication and addition in a product of float32 matrices of these sizes."""
        rows = max(1, min(rows, _ROWS, _PRODUCTS // (inner * columns)))

        def measure(threads: int) -> float:
            with self._pools.limit(limits=threads):
                return _product(rows, inner, columns)

        return float(self._once(("product", rows, inner, columns), lambda: self._sensible(measure)))

    def _sensible(self, measure: Callable[[int], float]) -> float:
        """By several threads, or by one where that is faster: where others are at work, threads wait
        for each other, and what is short may take a hundred times as long."""
        return min(map(measure, {self.num_threads, 1}))

    def aggregation(self, num_tokens: int, dim: int, dtype: str, *, of_input: bool) -> float:
        """Of one pair and column in a training step's aggregation: forward, again in
        backward, and backward, with the gradient of its input where wanted."""
        # Of long graphs a part, for the time's sake: a pair of theirs takes as long.
        num_tokens = max(1, min(num_tokens, int(math.sqrt(2 * _LARGEST_GRAPH / dim))))
        key = ("aggregation", num_tokens, dim, dtype, of_input)

        def measure(threads: int) -> float:
            return _aggregation(num_tokens, dim, dtype, of_input, threads)

        return float(self._once(key, lambda: self._sensible(measure)))

    def copying(self) -> float:
        """Of one byte, from one large array into another."""
        return float(self._once(("copying",), _copying))

    def interpreting(self) -> float:
        """Of one turn of a loop in Python: how fast one processor is with work in small pieces."""
        return float(self._once(("interpreting",), _interpreting))

    def terms(self, sizes: Sizes, num_tokens: int, dtype: str, batch_size: int) -> np.ndarray:
        """(9,) seconds of the parts of a step on batch_size mean traces of num_tokens tokens: what
        TIME weighs."""
        s, rows = sizes, batch_size * sizes.num_layers
        nodes, pairs, hidden, dim = batch_size * s.nodes, batch_size * s.pairs, s.gnn_hidden, s.hidden_dim
        summing = encoding = 0.0
        if s.nodes:
            # Before its products, whose threads spin for a while in the way of others.
            summing = pairs * dim * self.aggregation(num_tokens, dim, dtype, of_input=False)
            summing += pairs * hidden * self.aggregation(num_tokens, hidden, "float32", of_input=True)
            part = max(1, _CHUNK_BYTES // (_FLOAT * dim))
            encoding = 3 * nodes * dim * hidden * self.product(part, dim, hidden)
            encoding += 6 * nodes * hidden * hidden * self.product(part, hidden, hidden)
        gates, cells = 4 * s.lstm_hidden, 2 * s.num_lstm_layers * s.num_layers
        products = 3 if s.nodes else 2  # forward, gradient of the weights, and of what is read
        reading = 2 * products * rows * s.lstm_in * gates * self.product(rows, s.lstm_in, gates)
        above = 2 * 3 * (s.num_lstm_layers - 1) * rows * 2 * s.lstm_hidden * gates
        reading += above * self.product(rows, 2 * s.lstm_hidden, gates)
        reading += 3 * cells * batch_size * s.lstm_hidden * gates * self.product(batch_size, s.lstm_hidden, gates)
        turn, byte = self.interpreting(), self.copying()
        return np.array(
            [
                turn,
                cells * turn,
                (s.nodes > 0) * turn,
                reading,
                encoding,
                summing,
                rows * 2 * s.num_lstm_layers * s.lstm_hidden * turn,
                nodes * hidden * turn,
                nodes * dim * _FLOAT * byte,
            ]
        )


# What is tried: rows and multiplications of a product, pair-columns of an aggregation (several graphs)
# and of one graph, bytes of a copy, turns of a loop.
_ROWS, _PRODUCTS = 1024, 1 << 29
_PAIR_COLUMNS, _LARGEST_GRAPH = 2_000_000, 20_000_000
_COPIED = 16 << 20
_TURNS = 10_000
_LEAST_TIMES, _MOST_TIMES, _LONG_ENOUGH_S = 3, 30, 0.015


def _seconds(work: Callable[[], Any]) -> float:
    """The least of a few times, after one to warm up: what others do on the machine only adds, and to
    what is short it may add a hundred times as much."""
    work()
    least, taken, times = math.inf, 0.0, 0
    while times < _LEAST_TIMES or (times < _MOST_TIMES and taken < _LONG_ENOUGH_S):
        began = time.perf_counter()
        work()
        last = time.perf_counter() - began
        least, taken, times = min(least, last), taken + last, times + 1
    return least


def _product(rows: int, inner: int, columns: int) -> float:
    a, b, out = (np.ones(shape, "f4") for shape in ((rows, inner), (inner, columns), (rows, columns)))
    return _seconds(lambda: np.matmul(a, b, out=out)) / (rows * inner * columns)


def _aggregation(num_tokens: int, dim: int, dtype: str, of_input: bool, num_threads: int) -> float:
    pairs = num_tokens * (num_tokens + 1) // 2
    graphs = num_threads * max(1, _PAIR_COLUMNS // (num_threads * pairs * dim))
    rng = np.random.default_rng(0)
    w, b = rng.standard_normal((2, dim), "f4")
    x = np.zeros((graphs * num_tokens, dim), schema.storage_dtype(dtype))
    if dtype != "bfloat16":
        x[:] = w
    ends = np.arange(graphs + 1, dtype=np.int64)
    weights, code = np.full(graphs * pairs, 1 / num_tokens, "f2"), schema.dtype_code
    edges = Graphs(x, code(dtype), ends * num_tokens, weights, code("float16"), ends * pairs, num_threads=num_threads)
    out, grad_w, grad_b = np.ones(x.shape, "f4"), np.empty(dim, "f4"), np.empty(dim, "f4")
    grad_x = np.empty(x.shape, "f4") if of_input else None
    workspace = np.empty(edges.workspace_bytes(_FLOAT, True), np.uint8)

    def step() -> None:
        edges.forward(w, b, out, workspace)
        edges.forward(w, b, out, workspace)
        edges.backward(w, b, out, grad_x, grad_w, grad_b, workspace)

    return _seconds(step) / (graphs * pairs * dim)


def _copying() -> float:
    source, target = np.ones(_COPIED, np.uint8), np.empty(_COPIED, np.uint8)
    return _seconds(lambda: np.copyto(target, source)) / _COPIED


def _interpreting() -> float:
    def turns() -> None:
        most = 0
        for k in range(_TURNS):
            most = max(k, most)

    return _seconds(turns) / _TURNS


def covers(name: str, store: TraceStore, config: TrainConfig, sizes: dict[str, Any]) -> bool:
    """Whether there is an estimate: float32 on all layers of an uncompressed store, an LSTM of two
    layers; of graphs the fused operators on packed head means, without thresholds; where the LSTM is
    all there is, of a size whose time is known well enough."""
    plain = (
        config.precision == "float32"
        and not config.activation_checkpointing
        and not sizes.get("standardize", False)
        and sizes.get("layers") is None
        and sizes.get("num_lstm_layers", 2) == _LSTM_LAYERS
        and store.codec == "none"
    )
    if VIEWS[name] == "sequence":
        return plain and sizes.get("lstm_hidden", 128) in _LSTM_SIZES
    return (
        plain
        and sizes.get("message_passing", "fused") == "fused"
        and sizes.get("edge_features", "mean") == "mean"
        and config.top_k is None
        and config.attention_threshold == 0
        and store.attention == "mean"
        and store.attention_layout == "causal"
    )


def default_threads() -> int:
    """As many as torch takes: what the environment says, else one for each core."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        given = os.environ.get(variable, "").split(",")[0].strip()
        if given.isdecimal() and int(given):
            return int(given)
    return num_cores()


class Estimator:
    """Estimates the plan of each detector by its name: the one that measure.plan_training would
    measure, where `covers`. What several need is looked at once."""

    def __init__(
        self, store: TraceStore, config: TrainConfig, sizes: dict[str, Any], num_threads: int | None = None
    ) -> None:
        self._store, self._config = store, config
        self._model = ModelConfig.of_store(store, **sizes)
        self._indices, self._num_train = training_part(store)
        self._looked_up: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.machine = Machine(num_threads or default_threads())

    def _sizes_of(self, view: str) -> tuple[np.ndarray, np.ndarray]:
        if view not in self._looked_up:
            self._looked_up[view] = sizes_of(self._store, view, self._indices)
        return self._looked_up[view]

    def _costs(self, view: str) -> np.ndarray:
        form = BatchFormat(view, GraphOptions(edges="packed"))
        return form.bytes_of_sizes(self._store, *self._sizes_of(view))

    def sizes(self, name: str) -> Sizes:
        """Of a detector and a mean trace."""
        tokens, pairs = (float(sizes.mean()) for sizes in self._sizes_of(VIEWS[name]))
        mean_bytes = float(self._costs(VIEWS[name]).mean())
        return Sizes.of(name, self._model, self._store.num_layers * tokens, pairs, mean_bytes)

    def seconds(self, name: str, batch_size: int) -> np.ndarray:
        """Machine.terms of a step."""
        tokens = max(1, round(float(self._sizes_of(VIEWS[name])[0].mean())))
        return self.machine.terms(self.sizes(name), tokens, self._store.hidden_dtype, batch_size)

    def __call__(self, name: str) -> TrainingPlan:
        store, config, view = self._store, self._config, VIEWS[name]
        store.require(view)
        sizes, costs = self.sizes(name), self._costs(view)
        batch_size = min(config.batch_size, len(costs))
        form = BatchFormat(view, GraphOptions(edges="packed"))
        epochs = EpochMaker(store, form, batch_size=batch_size, seed=config.seed, indices=self._indices)
        # Where an epoch has no more batches than these, they are all.
        loaded = plan_memory(epochs, config.loader_threads, 0, None).batches_in_flight + 1
        loaded, later = (min(n, len(epochs.plan(0))) for n in (loaded, loaded + LATER_BATCHES))
        of_model, of_trace = sizes.memory_of_model(batch_size), sizes.memory_of_trace()
        # The loader's batches, and of the micro-batch the one trace that is the longest.
        longest = float(of_trace @ DATA[3:]) * float(costs.max()) / sizes.batch_bytes
        floor = float(of_model @ DATA[:3]) + loaded * batch_size * sizes.batch_bytes + longest
        seconds = self.seconds(name, batch_size) * TIME
        of_step = float(seconds[:_OF_STEP].sum())
        return TrainingPlan(
            name,
            config.batch_size,
            self._num_train,
            _LIBRARIES_BYTES,
            _LIBRARY_FILE_BYTES + mapped_bytes(store, view, *self._sizes_of(view)),
            later * int(sizes.batch_bytes),
            LATER_BYTES + int(_LIBRARIES_BYTES + float(of_model @ MEMORY[:3])),
            float(of_trace @ MEMORY[3:]),
            largest_batch_factor(epochs, costs, self._indices),
            0.0,
            of_step,
            (float(seconds.sum()) - of_step) / batch_size,
            int(_FLOOR_MARGIN * floor) + RESERVE_BYTES + SLACK_BYTES,
            measured=False,
        )
