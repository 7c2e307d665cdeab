"""Batches from a warm store, against a memory copy of the same bytes in the same run."""

import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

import tracestore
from tracestore.data.order import EpochOrder

SHAPES = {"small": (30, 576, 1600), "large": (32, 4096, 240)}
BATCH = 16


def make_store(path, layers, dim, count):
    """Synthetic float16 traces of 30 to 70 tokens, one head, every causal weight positive."""
    rng = np.random.default_rng(0)
    base = rng.standard_normal((layers, 70, dim), "f4").astype("f2")
    with tracestore.create(path) as writer:
        for k in range(count):
            tokens = int(rng.integers(30, 71))
            square = np.tril(rng.random((layers, 1, tokens, tokens), "f4") + 1e-3)
            writer.append(
                {
                    "hidden_states": list(np.roll(base[:, :tokens], k, axis=2)),
                    "attentions": list((square / square.sum(-1, keepdims=True)).astype("f2")),
                    "tokens": np.arange(tokens),
                    "tokens_decoded": [""] * tokens,
                    "generated_answer_clean": "",
                    "question_id": f"q{k}",
                },
                score=k % 2,
            )


def input_bytes(store):
    """What the graph view reads of a store: hidden states and attention."""
    tokens = np.asarray(store.num_tokens, "f8")
    return int(2 * store.num_layers * (tokens.sum() * store.hidden_dim + (tokens * (tokens + 1) / 2).sum()))


class Memcpy:
    """Two threads copying num_bytes, pages touched before."""

    def __init__(self, num_bytes, threads=2):
        part = num_bytes // threads
        self.pairs = [(np.ones(part, "u1"), np.ones(part, "u1")) for _ in range(threads)]

    def seconds(self):
        threads = [threading.Thread(target=np.copyto, args=p) for p in self.pairs]
        began = time.perf_counter()
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return time.perf_counter() - began


def epoch_seconds(loader):
    began = time.perf_counter()
    for batch in loader:
        del batch
    return time.perf_counter() - began


def memcpy_ratios(path, edges, rounds):
    """Of each round: traces a second, and the epoch's share of memcpy's speed, one after the other."""
    store = tracestore.open(path)
    loader = tracestore.TraceLoader(store, "graph", batch_size=BATCH, edges=edges)
    copy = Memcpy(input_bytes(store))
    for _ in range(2):
        epoch_seconds(loader), copy.seconds()
    rates, ratios = [], []
    for _ in range(rounds):
        seconds, limit = epoch_seconds(loader), copy.seconds()
        rates.append(len(store) / seconds)
        ratios.append(limit / seconds)
    return rates, ratios


class Loading:
    """Epochs of graph batches."""

    params = (["small", "large"], ["coo", "packed"])
    param_names = ("shape", "edges")
    timeout = 600

    def setup_cache(self):
        folder = Path(tempfile.mkdtemp())
        for name, shape in SHAPES.items():
            make_store(folder / name, *shape)
        return str(folder)

    def setup(self, folder, shape, edges):
        self.path = Path(folder) / shape
        self.loader = tracestore.TraceLoader(self.path, "graph", batch_size=BATCH, edges=edges)
        epoch_seconds(self.loader)

    def time_epoch(self, folder, shape, edges):
        epoch_seconds(self.loader)

    def peakmem_epoch(self, folder, shape, edges):
        epoch_seconds(self.loader)

    def track_memcpy_ratio(self, folder, shape, edges):
        return statistics.median(memcpy_ratios(self.path, edges, 5)[1])

    track_memcpy_ratio.unit = "of a 2-thread memcpy"


class Order:
    """A global shuffle of a million ids."""

    def time_a_million_ids(self):
        EpochOrder(1_000_000, 1, 0).at(np.arange(1_000_000))
