"""Stores on an object server, and epochs over them."""

from concurrent.futures import ThreadPoolExecutor

import tracestore
from tests.helpers import make_traces, write_store
from tracestore.store.read.internals import StoreInternals
from tracestore.store.read.store import TraceStore
from tracestore.store.remote.object_store import ObjectStore
from tracestore.store.remote.remote_files import RemoteFiles

SEGMENTS = 6


def make_store(path, **options):
    """Write a store of 36 traces in six segments."""
    traces = make_traces(6 * SEGMENTS, tokens=24, layers=3, dim=32)
    return write_store(path, traces, score=lambda k: k / 36, commit_after=range(5, 36, 6), **options)


def upload(folder, address):
    """Upload the files of a store to a URL."""
    objects = ObjectStore(address)
    files = [path for path in folder.rglob("*") if path.is_file()]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda path: objects.put(path.relative_to(folder).as_posix(), path), files))


def open_with_cache(address, cache):
    """Open a remote store with a given disk cache."""
    return TraceStore(StoreInternals.open(RemoteFiles(ObjectStore(address), cache), cache_bytes=1 << 20))


def epoch(store, view="graph", **options):
    """Return the ids and tensors of the batches of an epoch, in order."""
    found = []
    for batch in tracestore.TraceLoader(store, view=view, batch_size=5, seed=3, **options):
        if view == "sequence":
            found.append((batch.question_id, batch.sequences.clone(), batch.score.clone()))
        else:
            found.append((batch.question_id, batch.x.clone(), batch.edge_index.clone(), batch.edge_attr.clone()))
    return found


def assert_same_epoch(found, expected):
    """Assert that two results of `epoch` are equal."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one[0] == other[0]
        assert all(a.equal(b) for a, b in zip(one[1:], other[1:], strict=True))


def cached(tmp_path):
    """Return the sizes of the files in the disk cache, by name."""
    return {p.name: p.stat().st_size for p in (tmp_path / "cache").glob("[!.]*")}


def committed_files(store):
    """Return the entries of all files of a generation except its manifest."""
    internals = store.internals
    segments = [internals.segment(number) for number in range(internals.manifest.num_segments)]
    files = [file for segment in segments for file in (segment.rows, *segment.entries.values())]
    return internals.manifest.small_files() + files
