"""What a million traces in 2,000 segments cost before any data is read.

python bench/scale.py
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tracestore
from tests.store.synthetic import make_index_only_store
from tracestore.data import order

N = 1_000_000


def median_seconds(work, repeats=9):
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "s.zarr"
        make_index_only_store(path, N, num_segments=2000, num_parts=11)
        size = sum(f.stat().st_size for f in (path / "index").rglob("*") if f.is_file())
        print(f"index {size / N:.0f} bytes a trace")
        print(f"open {median_seconds(lambda: tracestore.open(path)) * 1e3:.1f} ms")
        store = tracestore.open(path)
        rng = np.random.default_rng(0)
        keys = [f"q{k}" for k in rng.integers(0, N, 20_000).tolist()]
        lookup = median_seconds(lambda: [store.index_of(k) for k in keys]) / len(keys)
        print(f"index_of {lookup * 1e6:.2f} us")
        plan = order.EpochOrder(N, 1, 0)
        batches = np.arange(N).reshape(-1, 16)[:5000]
        ids = median_seconds(lambda: [plan.at(b) for b in batches]) / len(batches)
        indices = [plan.at(b) for b in batches]
        places = median_seconds(lambda: [store._index.places(i) for i in indices]) / len(batches)
        print(f"order {ids * 1e6:.1f} us and lookup {places * 1e6:.1f} us a batch of 16")
        whole = median_seconds(lambda: plan.at(np.arange(N)))
        print(f"global shuffle {whole / N * 1e9:.0f} ns an id")


if __name__ == "__main__":
    main()
