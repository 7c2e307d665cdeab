"""Time and memory of opening a store with a million traces, relative to other work of the same run."""

import numpy as np
import psutil

import tracestore
from tests.helpers import run_cli
from tests.machine import assert_within
from tests.store.synthetic import make_index_only_store
from tracestore.data import order


def test_a_million_traces_open_quickly_in_little_memory(tmp_path):
    n = 1_000_000
    make_index_only_store(tmp_path / "s.zarr", n, num_segments=2000, num_parts=11)
    store = tracestore.open(tmp_path / "s.zarr")
    rng = np.random.default_rng(0)
    some = rng.integers(0, n, 200).tolist()
    for k in some:
        assert store.index_of(f"q{k}") == k and store.question_ids[k] == f"q{k}"
    locations = store.internals.index.locations(np.array(some))
    assert locations[:, 2].tolist() == [30 + k * 7919 % 41 for k in some]
    # Opening maps the index and reads no value per trace.
    python_loop = lambda: [int(v) for v in np.asarray(store.num_tokens)]  # noqa: E731
    assert_within(1, lambda: tracestore.open(tmp_path / "s.zarr"), python_loop)
    # Conditions on columns and masks are computed without a Python object per trace.
    assert_within(1, lambda: store.filter(y=1, num_tokens=[30, 40]), python_loop)
    assert_within(1, lambda: store[store.scores < 0.5], python_loop)
    assert store[store.scores < 0.5].indices[-1] == store.filter(y=1).indices[-1] == n // 2 - 1
    # Compare a lookup by id with a lookup in a dict, which takes 20 ns.
    table = {f"q{k}": k for k in range(0, n, 100)}
    keys = list(table)[:1000]
    assert_within(60, lambda: [store.index_of(k) for k in keys], lambda: [table[k] for k in keys], rounds=100)
    # Measure the private memory of an open store in a separate process.
    code = (
        "import sys, tracestore, psutil\n"
        "tracestore.open(sys.argv[2])\n"
        "p = psutil.Process(); before = p.memory_full_info().uss\n"
        "s = tracestore.open(sys.argv[1]); s.index_of('q77'); s.scores\n"
        "i = p.memory_full_info(); maps = [m for m in p.memory_maps() if 's.zarr' in m.path]\n"
        "print(i.uss - before - sum(m.private_clean for m in maps))"
    )
    make_index_only_store(tmp_path / "small.zarr", 10, 2, 1)
    private = int(run_cli("-c", code, tmp_path / "s.zarr", tmp_path / "small.zarr", check=0).stdout)
    assert private < 64 * n
    # The order of an epoch takes constant memory.
    before = psutil.Process().memory_info().rss
    plan = order.EpochOrder(n, 1, 0)
    for begin in range(0, n, 4096):
        plan.ids_at(np.arange(begin, min(n, begin + 4096)))
    assert psutil.Process().memory_info().rss - before < 4 << 20
