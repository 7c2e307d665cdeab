"""Traces batch by batch as dicts, for scripts that were written for folders of pickles."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.errors import UsageError
from tracestore.export.exporter import TRACES_PER_FILE
from tracestore.export.file_formats import complete_dict, pickled_list, record_dict
from tracestore.ingest.builtin.parts import find_sources
from tracestore.ingest.sources import read_traces
from tracestore.store.io.destinations import require_outside_stores
from tracestore.store.io.files import LocalFiles, parse_location
from tracestore.store.io.fsio import atomic_write, map_os_errors
from tracestore.store.maintain.selection import by_source
from tracestore.store.read.store import TraceStore, open_store
from tracestore.store.read.subset import TraceSubset
from tracestore.store.read.trace import Trace
from tracestore.words import plural

_MIB = 1 << 20


class TraceBatchLoader:
    """The traces of a folder of files, or of a store, as dicts of the pickle schema.

    A batch is a file of the folder, or the traces of a store that came from one file. Traces that a
    program appended to a store form batches of 500. A subset keeps its order: there a batch is a run of
    traces of one file, or of appended ones. Files are parsed as data: no code in them runs,
    and only the current trace takes memory. Arrays are NumPy's, read-only views of the mapped file
    where it is not compressed; bfloat16 gives torch tensors. Each dict has a question_id, and label,
    scores, group and layer_ids if the trace has them. A score that `tracestore convert` does not know has the key
    score_NAME. For a store of head-averaged attention, `attentions` is a list of L arrays (1, S, S).

    Parameters
    ----------
    path : str, PathLike, TraceStore or TraceSubset
        A folder or file of pickles, a store, or a subset of a store. Files of last tokens or graphs (.pt) hold no dicts:
        convert them.

    Raises
    ------
    UsageError
        If there is nothing to read.
    InvalidInputError
        While reading, if a file does not hold traces.
    CorruptStoreError
        While reading, if the store is damaged.

    Examples
    --------
    >>> import tracestore
    >>> loader = tracestore.TraceBatchLoader("store.zarr")
    >>> len(loader), loader.get_total_traces()
    (1, 12)
    >>> trace = next(loader.iter_traces())
    >>> trace["question_id"], len(trace["hidden_states"]), trace["hidden_states"][0].shape
    ('q0', 3, (1, 8))
    """

    def __init__(self, path: str | os.PathLike[str] | TraceStore | TraceSubset = "traces_data") -> None:
        if isinstance(path, TraceStore | TraceSubset):
            self.path = path.path
            self._batches = _store_batches(path)
            return
        self.path = parse_location(path)
        if not isinstance(self.path, Path) or (self.path.is_dir() and LocalFiles(self.path).generations()):
            self._batches = _store_batches(open_store(self.path))
        else:
            self._batches = [
                _Batch(source.name, source.file_bytes(), partial(read_traces, source, None), record_dict)
                for source in find_sources([self.path], self.path)
            ]

    def __repr__(self) -> str:
        return f"TraceBatchLoader({str(self.path)!r}, {plural(len(self), 'batch')})"

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._batches)

    def _batch(self, batch_idx: int) -> "_Batch":
        if not 0 <= batch_idx < len(self):
            raise IndexError(f"batch {batch_idx} of {len(self)}")
        return self._batches[batch_idx]

    def get_batch(self, batch_idx: int) -> list[dict[str, Any]]:
        """Return all traces of a batch.

        Parameters
        ----------
        batch_idx : int
            Number of the batch, from 0.

        Raises
        ------
        IndexError
            If there is no such batch.
        """
        return list(self._batch(batch_idx))

    def iter_batches(self) -> Iterator[list[dict[str, Any]]]:
        """Return an iterator over the lists of traces of each batch. One batch at a time is in memory."""
        return map(list, self._batches)

    def iter_traces(self) -> Iterator[dict[str, Any]]:
        """Return an iterator over the traces. One trace at a time is in memory."""
        return chain.from_iterable(self._batches)

    def get_total_traces(self) -> int:
        """Return the number of traces of all batches."""
        return sum(batch.count_traces() for batch in self._batches)

    def get_trace_by_global_id(self, global_id: int) -> dict[str, Any] | None:
        """Return the first trace with this `global_example_id`, or None.

        The traces are searched in order. Of a store only the texts are read.

        Parameters
        ----------
        global_id : int
        """
        found = (batch.find(global_id) for batch in self._batches)
        return next((trace for trace in found if trace is not None), None)

    def get_batch_info(self) -> list[dict[str, Any]]:
        """Return a dict for each batch. The files of a folder are read once to count traces.

        Returns
        -------
        list of dict
            "batch_idx", "filename", "size_mb" (MiB of the file) and "num_traces".
        """
        return [
            {"batch_idx": k, "filename": b.name, "size_mb": b.num_bytes / _MIB, "num_traces": b.count_traces()}
            for k, b in enumerate(self._batches)
        ]


@dataclass
class _Batch:
    """The traces of one batch, as an iterable of dicts.

    Parameters
    ----------
    name : str
        Name of the file.
    num_bytes : int
        Size of the file.
    read : callable
        Return an iterator over the traces, as objects with `extras`.
    as_dict : callable
        Return the dict of such an object.
    num_traces : int
        The number of traces; -1 if they have to be counted.
    """

    name: str
    num_bytes: int
    read: Callable[[], Iterator[Any]]
    as_dict: Callable[[Any], dict[str, Any]]
    num_traces: int = -1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.as_dict, self.read())  # map holds no trace: the reader's memory holds one

    def count_traces(self) -> int:
        """Return the number of traces."""
        if self.num_traces < 0:
            self.num_traces = sum(1 for _ in self.read())
        return self.num_traces

    def find(self, global_id: int) -> dict[str, Any] | None:
        """Return the first trace with this `global_example_id`, or None."""
        matches = (trace for trace in self.read() if trace.extras.get("global_example_id") == global_id)
        return next(map(self.as_dict, matches), None)


def _store_batches(traces: TraceStore | TraceSubset) -> list[_Batch]:
    store: TraceStore = traces.store if isinstance(traces, TraceSubset) else traces

    def batch(name: str, num_bytes: int, indices: np.ndarray) -> _Batch:
        def read() -> Iterator[Trace]:
            return map(store.__getitem__, indices.tolist())

        return _Batch(name, num_bytes, read, partial(complete_dict, store), len(indices))

    index, batches, num_appended = store.internals.index, [], 0
    sizes = np.array([source.size for source in index.sources()], np.int64)
    owners = np.asarray(index.read_column("source"))[traces.indices]
    if isinstance(traces, TraceSubset):  # a batch ends where the next trace of the subset is of another file
        cuts = np.flatnonzero(np.diff(np.where(sizes[owners] > 0, owners, -1))) + 1
        groups = [(int(owners[i[0]]), traces.indices[i]) for i in np.split(np.arange(len(owners)), cuts) if len(i)]
    else:
        groups = [(k, indices) for k, indices, _ in by_source(store, traces.indices) if sizes[k] > 0 and len(indices)]
        appended = np.flatnonzero(sizes[owners] == 0)  # each of them is a source of its own
        groups += [(int(owners[appended[0]]), appended)] if len(appended) else []
    for number, indices in groups:
        if sizes[number] > 0:
            source = index.source(number)
            batches.append(batch(source.path, source.size, indices))
            continue
        for begin in range(0, len(indices), TRACES_PER_FILE):
            batches.append(batch(f"appended_{num_appended:04d}", 0, indices[begin : begin + TRACES_PER_FILE]))
            num_appended += 1
    return batches


def merge_batches(output_file: str | os.PathLike[str], traces_dir: str | os.PathLike[str] = "traces_data") -> int:
    """Write each trace of a folder or a store into one pickled list, a new file.

    One trace at a time is in memory. Errors are those of `TraceBatchLoader`.

    Parameters
    ----------
    output_file : str or PathLike
        The pickle to write.
    traces_dir : str or PathLike
        See `TraceBatchLoader`.

    Returns
    -------
    int
        The number of traces.

    Raises
    ------
    UsageError
        If the file exists, or would lie in a store.
    DiskFullError
        If there is no space left.

    Examples
    --------
    >>> import tracestore
    >>> tracestore.merge_batches("all.pkl", "store.zarr")
    12
    """
    return _write(output_file, TraceBatchLoader(traces_dir).iter_traces())


def extract_batch_subset(
    batch_numbers: Iterable[int],
    output_file: str | os.PathLike[str],
    traces_dir: str | os.PathLike[str] = "traces_data",
) -> int:
    """Write some batches of a folder or a store into one pickled list, a new file, in the given order.

    One trace at a time is in memory. Errors are those of `TraceBatchLoader`.

    Parameters
    ----------
    batch_numbers : iterable of int
        Numbers of the batches.
    output_file : str or PathLike
        The pickle to write.
    traces_dir : str or PathLike
        See `TraceBatchLoader`.

    Returns
    -------
    int
        The number of traces.

    Raises
    ------
    UsageError
        If the file exists, or would lie in a store.
    DiskFullError
        If there is no space left.
    IndexError
        If there is no such batch.

    Examples
    --------
    >>> import tracestore
    >>> tracestore.extract_batch_subset([0], "first.pkl", "store.zarr")
    12
    """
    loader = TraceBatchLoader(traces_dir)
    batches = [loader._batch(k) for k in batch_numbers]
    return _write(output_file, (trace for batch in batches for trace in batch))


def _write(output_file: str | os.PathLike[str], traces: Iterator[dict[str, Any]]) -> int:
    path, count = Path(output_file), 0
    require_outside_stores(path)
    if os.path.lexists(path):
        raise UsageError(f"{path}: exists; remove it, or choose another name")
    with map_os_errors(path), atomic_write(path) as file, pickled_list(file) as write:
        for trace in traces:
            write(trace)
            count += 1
            del trace  # before the next one is read
    return count
