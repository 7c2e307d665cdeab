"""Loading of batches from the page cache, compared with a memory copy of the same bytes.

    python -m benchmarks.loading STORE EDGES (in bench/)

imports everything, waits for `common.run_measured`, then loads an epoch.
"""

import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

import tracestore
from tracestore.store.maintain.merge import merge_stores

from .common import BATCH_SIZE, STORES, Fixtures, Memcpy, timed, wait_for_start

if __name__ != "__main__":
    # asv imports the benchmarks and forks a process for each, which need not import PyG again.
    import torch_geometric.data  # noqa: F401


def input_bytes(store):
    """Return the bytes of hidden states and attention that the graph view reads from a store."""
    tokens = np.asarray(store.num_tokens, "f8")
    return int(2 * store.num_layers * (tokens.sum() * store.hidden_dim + (tokens * (tokens + 1) / 2).sum()))


def run_epoch(loader):
    """Iterate over one epoch."""
    for batch in loader:
        del batch


def warm_up(loader):
    """Run epochs until the pages of the loader's buffers are allocated."""
    for _ in range(3):
        run_epoch(loader)


def graph_loader(path, edges):
    """Return a loader of graph batches."""
    return tracestore.TraceLoader(tracestore.open(path), "graph", batch_size=BATCH_SIZE, edge_format=edges)


def memcpy_ratios(loader, store, rounds):
    """Return the time of an epoch of a warm loader as a multiple of the time of a memory copy, for each round."""
    copy = Memcpy(input_bytes(store))
    copy()
    return [timed(lambda: run_epoch(loader)) / timed(copy) for _ in range(rounds)]


class Loading(Fixtures):
    """Epochs of graph batches of 16: 400 traces of the small shape, 40 of the large one."""

    params = (list(STORES), ["coo", "packed"])
    param_names = ("shape", "edges")

    def setup(self, folder, shape, edges):
        """Open a store and warm up."""
        self.path = Path(folder) / shape
        self.loader = graph_loader(self.path, edges)
        warm_up(self.loader)

    def time_epoch(self, folder, shape, edges):
        """Iterate over one epoch."""
        run_epoch(self.loader)

    def track_limit(self, folder, shape, edges):
        """Return the time of an epoch as a multiple of the time of a memory copy."""
        return statistics.median(memcpy_ratios(self.loader, tracestore.open(self.path), 9))

    track_limit.unit = "of a 2-thread memcpy's time"


class Joined(Fixtures):
    """Epochs of graph batches of 16 of two stores that are opened as one: 400 traces of the small shape."""

    params = ("coo", "packed")
    param_names = ("edges",)

    def setup(self, folder, edges):
        """Divide the store into two, open both as one, and warm up."""
        self.temporary = tempfile.TemporaryDirectory(dir=folder)
        whole, halves = Path(folder) / "small", [Path(self.temporary.name) / name for name in ("a", "b")]
        for half, chosen in zip(halves, np.array_split(np.arange(STORES["small"][2]), 2), strict=True):
            merge_stores([whole], half, chosen=[chosen])
        self.loaders = [graph_loader(paths, edges) for paths in (halves, whole)]
        for loader in self.loaders:
            warm_up(loader)

    def teardown(self, folder, edges):
        """Remove the two stores."""
        self.temporary.cleanup()

    def track_throughput(self, folder, edges):
        """Return the throughput as a multiple of that of the merged store."""
        rounds = [[timed(lambda one=loader: run_epoch(one)) for loader in self.loaders] for _ in range(9)]
        return statistics.median(merged / joined for joined, merged in rounds)

    track_throughput.unit = "of the merged store's throughput"


class Sequences(Fixtures):
    """Epochs of last tokens, the input of the LSTM: 400 traces of the small shape."""

    def setup(self, folder):
        """Open the store."""
        self.loader = tracestore.TraceLoader(Path(folder) / "small", "sequence", batch_size=BATCH_SIZE)
        warm_up(self.loader)

    def time_epoch(self, folder):
        """Iterate over one epoch."""
        run_epoch(self.loader)


if __name__ == "__main__":
    loader = graph_loader(*sys.argv[1:])
    wait_for_start()
    run_epoch(loader)
