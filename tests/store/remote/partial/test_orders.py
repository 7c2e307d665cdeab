"""Bytes that epochs fetch with caches smaller than the store, and the advice to take another order."""

import re
import subprocess
import sys
import warnings

import pytest

import tracestore
from tests.helpers import ROOT, make_trace, write_store
from tests.store.remote.stores import open_with_cache, upload
from tracestore.errors import TracestoreWarning
from tracestore.store.remote.disk_cache import DiskCache

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20}


def make_store(path, tokens, segments, **options):
    """Write a store of eight traces a segment. Layers have 16 KiB or more from 130 tokens on."""
    count = 8 * segments
    traces = (make_trace(k, tokens=tokens + k % 7, layers=4, dim=96, heads=1) for k in range(count))
    return write_store(path, traces, score=lambda k: k / count, commit_after=range(7, count, 8), **options)


def large_bytes(store):
    return sum(t.hidden_states.nbytes + t.attention_packed.nbytes for t in tracestore.open(store))


def loader_and_advice(store, **options):
    """Return a loader and the estimated bytes of a global and of a block epoch; None without advice.

    Of compressed arrays there are none.
    """
    options = {"view": "graph", "batch_size": 4, "block_bytes": 200_000, "as_pyg": False, "seed": 3} | options
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TracestoreWarning)
        loader = tracestore.TraceLoader(store, **options)
    (text,) = [str(c.message) for c in caught if c.category is TracestoreWarning] or [""]
    if not text:
        return loader, None
    found = re.findall(r"about ([0-9.]+) (KiB|MiB)", text)
    assert "--shuffle block" in text and len(found) == (2 if loader.store.codec == "none" else 0)
    return loader, [float(number) * UNITS[unit] for number, unit in found]


@pytest.mark.long
@pytest.mark.parametrize(
    ("tokens", "codec", "share"), [(130, "none", 2.0), (130, "none", 0.25), (30, "none", 2.0), (30, "blosc-zstd", 2.0)]
)
def test_no_advice_where_a_global_order_costs_as_much(tmp_path, remote, tokens, codec, share):
    """Local stores, caches with room, and layers that are fetched one by one."""
    local = make_store(tmp_path / "local.zarr", tokens, 12, codec=codec)
    assert loader_and_advice(local)[1] is None
    upload(local, remote)
    store = open_with_cache(remote, DiskCache(tmp_path / "cache", int(share * large_bytes(local))))
    assert loader_and_advice(store)[1] is None


@pytest.mark.long
@pytest.mark.parametrize("codec", ["none", "blosc-zstd"])
def test_the_advice_has_the_bytes_of_both_orders(tmp_path, remote, proxy, codec):
    local = make_store(tmp_path / "local.zarr", 30, 40, codec=codec)
    upload(local, remote)
    room, fetched = int(0.4 * large_bytes(local)), []
    for k, shuffle in enumerate(("global", "block")):
        store = open_with_cache(remote, DiskCache(tmp_path / shuffle, room))
        before = proxy.sent
        loader, advice = loader_and_advice(store, shuffle=shuffle)
        for _ in loader:
            pass
        if shuffle == "global":
            estimates = advice
        if codec == "none":
            assert proxy.sent - before == pytest.approx(estimates[k], rel=0.1)
        else:
            fetched.append(proxy.sent - before)
    assert advice is None, "block order needs no advice"
    assert not fetched or fetched[0] > 1.5 * fetched[1], "the advice is right"


@pytest.mark.long
def test_one_rank_with_a_small_cache_fetches_layers(tmp_path, remote, proxy):
    """Whole files would be fetched many times: 11 times the store with a cache of a quarter."""
    local = make_store(tmp_path / "local.zarr", 130, 12)
    upload(local, remote)
    total = large_bytes(local)
    loader, _ = loader_and_advice(open_with_cache(remote, DiskCache(tmp_path / "cache", total // 4)))
    assert sum(len(batch.trace_index) for batch in loader) == 96
    assert proxy.large <= 1.3 * total


RANK = """
import sys, tracestore
loader = tracestore.TraceLoader(
    sys.argv[1], "graph", batch_size=16, seed=1, rank=int(sys.argv[2]), world_size=4, as_pyg=False
)
print(sum(len(batch.trace_index) for batch in loader))
"""


@pytest.mark.long
def test_four_ranks_share_a_cache_of_a_quarter_of_the_store(tmp_path, remote, proxy, monkeypatch):
    local = make_store(tmp_path / "local.zarr", 130, 24)
    upload(local, remote)
    total = large_bytes(local)
    monkeypatch.setenv("TRACESTORE_CACHE_SIZE", str(total // 4))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    words = [[sys.executable, "-c", RANK, remote, str(rank)] for rank in range(4)]
    processes = [subprocess.Popen(w, cwd=ROOT, stdout=subprocess.PIPE, text=True) for w in words]
    assert sum(int(process.communicate()[0]) for process in processes) == 192
    assert proxy.large <= 1.3 * total
