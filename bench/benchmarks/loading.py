"""Batches from a store in the page cache, against a memory copy of the same bytes in the same run.

    python -m benchmarks.loading STORE EDGES (in bench/)

waits for `common.run_measured` once everything is imported, then loads an epoch.
"""

import statistics
import sys
from pathlib import Path

import numpy as np

import tracestore

from .common import BATCH_SIZE, STORES, Fixtures, Memcpy, timed, wait_for_start


def input_bytes(store):
    """Return the bytes that the graph view reads of a store: hidden states and attention."""
    tokens = np.asarray(store.num_tokens, "f8")
    return int(2 * store.num_layers * (tokens.sum() * store.hidden_dim + (tokens * (tokens + 1) / 2).sum()))


def run_epoch(loader):
    for batch in loader:
        del batch


def start_thread_pools(loader):
    """Run epochs until the loader's buffers have their pages."""
    for _ in range(3):
        run_epoch(loader)


def graph_loader(path, edges):
    return tracestore.TraceLoader(tracestore.open(path), "graph", batch_size=BATCH_SIZE, edge_format=edges)


def memcpy_ratios(path, edges, rounds):
    """Return the time of an epoch as a multiple of that of a memory copy, one after the other in each round."""
    loader, copy = graph_loader(path, edges), Memcpy(input_bytes(tracestore.open(path)))
    start_thread_pools(loader)
    copy()
    return [timed(lambda: run_epoch(loader)) / timed(copy) for _ in range(rounds)]


class Loading(Fixtures):
    """Epochs of graph batches of 16: 400 traces of the small shape, 40 of the large one."""

    params = (list(STORES), ["coo", "packed"])
    param_names = ("shape", "edges")

    def setup(self, folder, shape, edges):
        self.path = Path(folder) / shape
        self.loader = graph_loader(self.path, edges)
        start_thread_pools(self.loader)

    def time_epoch(self, folder, shape, edges):
        run_epoch(self.loader)

    def track_limit(self, folder, shape, edges):
        return statistics.median(memcpy_ratios(self.path, edges, 3))

    track_limit.unit = "of a 2-thread memcpy's time"


class Sequences(Fixtures):
    """Epochs of last tokens, as the LSTM reads them: 400 traces of the small shape."""

    def setup(self, folder):
        self.loader = tracestore.TraceLoader(Path(folder) / "small", "sequence", batch_size=BATCH_SIZE)
        start_thread_pools(self.loader)

    def time_epoch(self, folder):
        run_epoch(self.loader)


if __name__ == "__main__":
    import torch_geometric.data  # noqa: F401  the batches' class

    loader = graph_loader(*sys.argv[1:])
    wait_for_start()
    run_epoch(loader)
