"""Cost of opening and indexing a million traces in 2,000 segments."""

from pathlib import Path

import numpy as np

import tracestore
from tracestore.data.order import EpochOrder

from .common import BATCH_SIZE, MILLION, SMALL, Fixtures, Memcpy, median_seconds

LOOKUPS = 1000
BATCHES = 2000
# A trace of the small shape in the graph view: hidden states of 50 tokens and a triangle of attention.
TRACE_BYTES = 2 * SMALL["layers"] * (50 * SMALL["dim"] + 50 * 51 // 2)


class Scale(Fixtures):
    """The index of a million traces."""

    def setup(self, folder):
        """Open the store and draw ids."""
        self.path = Path(folder) / "million"
        self.store = tracestore.open(self.path)
        self.keys = [f"q{k}" for k in np.random.default_rng(0).integers(0, MILLION, LOOKUPS).tolist()]
        self.order, self.ids = EpochOrder(MILLION, 1, 0), np.arange(MILLION)

    def time_open(self, folder):
        """Open the store."""
        tracestore.open(self.path)

    def track_lookup(self, folder):
        """Return the time to look up a question id, of 1,000, in microseconds."""
        return 1e6 * median_seconds(lambda: [self.store.index_of(key) for key in self.keys]) / LOOKUPS

    track_lookup.unit = "µs"

    def time_shuffle_of_a_million(self, folder):
        """Compute the order of an epoch."""
        self.order.ids_at(self.ids)

    def track_limit(self, folder):
        """Return the time of order and lookup of a batch in percent of a memory copy of the batch."""
        batches = self.ids[: BATCHES * BATCH_SIZE].reshape(BATCHES, BATCH_SIZE)
        seconds = (
            median_seconds(lambda: [self.store.internals.index.locations(self.order.ids_at(b)) for b in batches], 5)
            / BATCHES
        )
        return 100 * seconds / median_seconds(Memcpy(BATCH_SIZE * TRACE_BYTES))

    track_limit.unit = "% of the batch's 2-thread memcpy"

    def track_index_size(self, folder):
        """Return the bytes of the index per trace."""
        size = sum(f.stat().st_size for f in (self.path / "index").rglob("*") if f.is_file())
        return size / MILLION

    track_index_size.unit = "bytes/trace"
