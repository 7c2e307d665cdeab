"""Traces batch by batch as dicts, for scripts written against folders of pickles."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.export.exporter import TRACES_PER_FILE, layers_of, trace_dict
from tracestore.export.pickle_list import PickleListWriter
from tracestore.ingest.formats import read_traces
from tracestore.ingest.sources import SourceFile, find_sources
from tracestore.store.format import schema
from tracestore.store.io.files import LocalFiles, parse_location
from tracestore.store.io.fsio import atomic_write, map_os_errors
from tracestore.store.read.selection import by_source
from tracestore.store.read.store import TraceStore, open_store
from tracestore.store.write.record import TraceRecord

_MIB = 1 << 20


class TraceBatchLoader:
    """The traces of a folder of files, or of a store, as dicts of the pickle schema.

    A batch is a file of the folder, or what a store has of one source file (of traces that a
    program appended, 500). Files are read as data: nothing in them is run, and only the trace
    that is at hand takes memory. Arrays are numpy's, read-only views of the mapped file where it
    is not compressed; bfloat16 comes as torch tensors. Every dict has a question_id, and of a
    store that holds the mean over the heads `attentions` are L arrays (1, S, S).

    UsageError where there is nothing to read, InvalidInputError where a file is not one of
    traces, CorruptStoreError as everywhere. Files of last tokens or graphs (.pt) have no
    dicts: convert them.
    """

    def __init__(self, path: str | os.PathLike[str] = "traces_data") -> None:
        self.path = parse_location(path)
        self._batches: Sequence[_File | _Part]
        if not isinstance(self.path, Path) or (self.path.is_dir() and LocalFiles(self.path).generations()):
            self._batches = _parts(open_store(self.path))
        else:
            self._batches = [_File(source) for source in find_sources([self.path], self.path)]

    def __len__(self) -> int:
        """Batches."""
        return len(self._batches)

    def _batch(self, batch_idx: int) -> "_File | _Part":
        if not 0 <= batch_idx < len(self):
            raise IndexError(f"batch {batch_idx} of {len(self)}")
        return self._batches[batch_idx]

    def get_batch(self, batch_idx: int) -> list[dict[str, Any]]:
        """All traces of a batch. IndexError where there is no such batch."""
        return list(self._batch(batch_idx))

    def iter_batches(self) -> Iterator[list[dict[str, Any]]]:
        """Batch after batch; one at a time is held."""
        for batch in self._batches:
            yield list(batch)

    def iter_traces(self) -> Iterator[dict[str, Any]]:
        """Trace after trace; one at a time is held."""
        for batch in self._batches:
            yield from batch

    def get_total_traces(self) -> int:
        """Traces of all batches."""
        return sum(batch.count() for batch in self._batches)

    def get_trace_by_global_id(self, global_id: int) -> dict[str, Any] | None:
        """The first trace whose `global_example_id` this is, or None. Looks through the traces in
        order; of a store through its texts only."""
        for batch in self._batches:
            found = batch.find(lambda value: value == global_id)
            if found is not None:
                return found
        return None

    def get_batch_info(self) -> list[dict[str, Any]]:
        """batch_idx, filename, size_mb (MiB of the file) and num_traces of each batch. Of a folder
        it counts traces by reading the files once."""
        return [
            {"batch_idx": k, "filename": b.name, "size_mb": b.size / _MIB, "num_traces": b.count()}
            for k, b in enumerate(self._batches)
        ]


class _File:
    """A file of a folder."""

    def __init__(self, source: SourceFile) -> None:
        self._source, self._count = source, -1
        self.name = source.name

    @property
    def size(self) -> int:
        return self._source.path.stat().st_size

    def _records(self) -> Iterator[TraceRecord]:
        return read_traces(self._source.path, self.name, need_attention=None)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for record in self._records():
            yield _record_dict(record)
            del record

    def count(self) -> int:
        if self._count < 0:
            self._count = sum(1 for _ in self._records())
        return self._count

    def find(self, matches: Callable[[Any], bool]) -> dict[str, Any] | None:
        for record in self._records():
            if matches(record.extras.get("global_example_id")):
                return _record_dict(record)
        return None


class _Part:
    """What a store has of one source file."""

    def __init__(self, store: TraceStore, name: str, size: int, indices: np.ndarray) -> None:
        self._store, self._indices = store, indices
        self.name, self.size = name, size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (trace_dict(self._store, self._store[k]) for k in self._indices.tolist())

    def count(self) -> int:
        return len(self._indices)

    def find(self, matches: Callable[[Any], bool]) -> dict[str, Any] | None:
        for k in self._indices.tolist():
            trace = self._store[k]
            if matches(trace.extras.get("global_example_id")):
                return trace_dict(self._store, trace)
        return None


def _parts(store: TraceStore) -> list[_Part]:
    parts, appended = [], []
    for number, indices, _ in by_source(store, np.arange(len(store))):
        source = store.internals.index.source(number)
        if source.size > 0:
            parts.append(_Part(store, source.path, source.size, indices))
        else:
            appended.append(indices)
    # Each trace that a program appended is a source of its own.
    traces = np.concatenate(appended) if appended else np.zeros(0, np.int64)
    for begin in range(0, len(traces), TRACES_PER_FILE):
        parts.append(
            _Part(store, f"appended_{begin // TRACES_PER_FILE:04d}", 0, traces[begin : begin + TRACES_PER_FILE])
        )
    return parts


def _record_dict(record: TraceRecord) -> dict[str, Any]:
    """The dict that a record was made from. InvalidInputError where it was none."""
    if record.hidden is None or record.edges is not None:
        raise InvalidInputError("found last tokens or graphs, which are no dicts of traces; convert the file")
    values: dict[str, Any] = {"hidden_states": _layers(record.hidden)}
    if record.attention is not None:
        values["attentions"] = _layers(record.attention)
    for name in ("tokens", "tokens_decoded", "prompt_length"):
        if getattr(record, name) is not None:
            values[name] = getattr(record, name)
    values |= record.strings
    values["question_id"] = record.question_id
    if record.sample:
        values["sample"] = record.sample
    return record.extras | values


def _layers(layers: Iterable[np.ndarray]) -> list[Any]:
    layers = list(layers)
    return layers_of(layers, "bfloat16" if layers[0].dtype == schema.BFLOAT16 else None)


def merge_batches(output_file: str | os.PathLike[str], traces_dir: str | os.PathLike[str] = "traces_data") -> int:
    """Writes every trace of a folder or a store into one pickled list, trace by trace: no more
    than one is in memory. -> traces. Errors as of TraceBatchLoader; DiskFullError."""
    loader = TraceBatchLoader(traces_dir)
    return _write(output_file, loader.iter_traces())


def extract_batch_subset(
    batch_numbers: Iterable[int],
    output_file: str | os.PathLike[str],
    traces_dir: str | os.PathLike[str] = "traces_data",
) -> int:
    """The same of some batches, in the order they are named. IndexError where there is no such batch."""
    loader = TraceBatchLoader(traces_dir)
    batches = [loader._batch(k) for k in batch_numbers]
    return _write(output_file, (trace for batch in batches for trace in batch))


def _write(output_file: str | os.PathLike[str], traces: Iterator[dict[str, Any]]) -> int:
    path, count = Path(output_file), 0
    with map_os_errors(path), atomic_write(path) as file:
        writer = PickleListWriter(file)
        for trace in traces:
            writer.append(trace)
            count += 1
            del trace
        writer.finish()
    return count
