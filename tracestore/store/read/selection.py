"""Choosing traces of a store: by question, segment or source."""

from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from tracestore.errors import UsageError
from tracestore.store.read.batch_sources import GRAPH_SEGMENT, SEQUENCE_SEGMENT
from tracestore.store.read.store import TraceStore


def read_ids(path: Path) -> list[str]:
    """The question ids of a text file, one a line, empty lines left out. UsageError where
    there is no such file or no id in it."""
    try:
        with path.open(encoding="utf-8-sig", errors="surrogatepass", newline="") as file:
            text = file.read()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not a text file of question ids") from None
    # Not splitlines(), which ends lines where ids may have characters of their own.
    ids = [line.rstrip("\r") for line in text.split("\n")]
    ids = [line for line in ids if line.strip()]
    if not ids:
        raise UsageError(f"{path}: holds no question id")
    return ids


def indices_of_ids(store: TraceStore, question_ids: Collection[str]) -> np.ndarray:
    """(n,) int64: every sample of these questions, in the store's order. KeyError with the
    first id that is not there."""
    wanted = set(question_ids)
    indices, found = [], set()
    for index, question_id in enumerate(store.question_ids):
        if question_id in wanted:
            indices.append(index)
            found.add(question_id)
    for question_id in question_ids:
        if question_id not in found:
            raise KeyError(question_id)
    return np.array(indices, np.int64)


def indices_of_segments(store: TraceStore, segments: Collection[int]) -> np.ndarray:
    """(n,) int64: the traces that have arrays in these segments, by number. UsageError where
    the store has no such segment."""
    count = store.info()["num_segments"]
    for number in segments:
        if not 0 <= number < count:
            raise UsageError(f"{store.path}: found segment {number}, expected 0 to {count - 1}")
    locations = store.internals.index.locations(np.arange(len(store)))
    lies = np.isin(locations[:, (GRAPH_SEGMENT, SEQUENCE_SEGMENT)], np.array(sorted(segments), np.int64))
    return np.flatnonzero(lies.any(axis=1)).astype(np.int64)


def by_source(store: TraceStore, wanted: np.ndarray) -> Iterator[tuple[int, np.ndarray, bool]]:
    """Each source of a store, those of the `wanted` traces that it gave first, and whether
    these are all that it gave. All sources where all are wanted, else those that give any."""
    owners = np.asarray(store.internals.index.read_column("source"))
    counts = np.bincount(owners, minlength=store.internals.manifest.num_sources)
    order = wanted[np.argsort(owners[wanted], kind="stable")]
    edges = np.searchsorted(owners[order], np.arange(len(counts) + 1))
    for number, count in enumerate(counts.tolist()):
        indices = order[edges[number] : edges[number + 1]]
        if len(wanted) == len(store):
            yield number, indices, True
        elif len(indices):
            # What it gave beside what it gave first: to traces that another source had brought.
            source = store.internals.index.source(number)
            yield number, indices, len(indices) == count == source.num_traces and source.num_skipped == 0
