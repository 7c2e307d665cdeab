"""Selecting traces of a store by question, segment or source."""

from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from tracestore.errors import UsageError
from tracestore.store.format import schema
from tracestore.store.io.fsio import open_regular
from tracestore.store.maintain.consistency import check_rows
from tracestore.store.read.batch_sources import GRAPH_SEGMENT, SEQUENCE_SEGMENT
from tracestore.store.read.store import TraceStore

# Bound of the memory for a file of question ids.
_MAX_IDS_BYTES = 1 << 30


def read_ids(path: Path) -> list[str]:
    """Return the question ids of a text file with one id a line; empty lines are skipped.

    UsageError if the file does not exist, is not a regular file, is too large or has no id.
    """
    try:
        with open_regular(path) as file:
            data = file.read(_MAX_IDS_BYTES + 1)
        if len(data) > _MAX_IDS_BYTES:
            raise UsageError(f"{path}: more than {_MAX_IDS_BYTES:,} bytes; split it, and run subset for each part")
        text = data.decode("utf-8-sig", "surrogatepass")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not a text file of question ids") from None
    # splitlines() and strip() would also split and skip at characters that an id may consist of.
    ids = [line for line in (line.removesuffix("\r") for line in text.split("\n")) if line]
    if not ids:
        raise UsageError(f"{path}: holds no question id")
    return ids


def indices_of_segments(store: TraceStore, segments: Collection[int]) -> np.ndarray:
    """Return the indices (n,) int64 of the traces that have arrays in some segments.

    UsageError if the store lacks a segment.
    """
    count = store.info()["num_segments"]
    for number in segments:
        if not 0 <= number < count:
            raise UsageError(f"{store.path}: found segment {number}, expected 0 to {count - 1}")
    locations = store.internals.index.locations(np.arange(len(store)))
    lies = np.isin(locations[:, (GRAPH_SEGMENT, SEQUENCE_SEGMENT)], np.array(sorted(segments), np.int64))
    return np.flatnonzero(lies.any(axis=1)).astype(np.int64)


def large_array_bytes(store: TraceStore, indices: np.ndarray) -> np.ndarray:
    """Return the bytes (n,) int64 of hidden states, or last tokens, and attention of some traces, without compression.

    Edges are not counted. A store that holds copies of the traces is at least as large as the sum. CorruptStoreError if
    the index and the segments disagree about the number of tokens.
    """
    check_token_counts(store, indices)
    tokens, pairs = store.token_and_pair_counts(indices)
    itemsize = schema.storage_dtype(store.hidden_dtype).itemsize
    found: np.ndarray = np.maximum(tokens, 1) * (store.num_layers * store.hidden_dim * itemsize)
    if store.attention_layout != "edges":
        found += pairs * (store.num_stored_heads * schema.storage_dtype(store.attention_dtype).itemsize)
    return found


def check_token_counts(store: TraceStore, indices: np.ndarray) -> None:
    """Raise CorruptStoreError if the index and the segments disagree about the number of tokens of some traces."""
    index = store.internals.index
    segments = index.locations(indices)[:, GRAPH_SEGMENT]
    for number in np.unique(segments[segments >= 0]).tolist():
        check_rows(index, store.internals.segment(number), indices[segments == number], "graph_row")


def by_source(store: TraceStore, wanted: np.ndarray) -> Iterator[tuple[int, np.ndarray, bool]]:
    """Group some traces by the source that added them.

    Yields
    ------
    tuple
        Number of the source, store indices of its wanted traces, and whether these are all that it added. Sources
        without a wanted trace are skipped, unless every trace is wanted.
    """
    owners = np.asarray(store.internals.index.read_column("source"))
    counts = np.bincount(owners, minlength=store.internals.manifest.num_sources)
    order = wanted[np.argsort(owners[wanted], kind="stable")]
    edges = np.searchsorted(owners[order], np.arange(len(counts) + 1))
    files = Counter(source.path for source in store.internals.index.sources())
    for number, count in enumerate(counts.tolist()):
        indices = order[edges[number] : edges[number + 1]]
        if len(wanted) == len(store):
            yield number, indices, True
        elif len(indices):
            # `num_traces` exceeds `count` if the source also added arrays to traces of other sources.
            source = store.internals.index.source(number)
            is_whole = len(indices) == count == source.num_traces and source.num_skipped == 0
            yield number, indices, is_whole and files[source.path] == 1  # a changed file has others
