"""Jobs that gather a batch of tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tracestore._core import gather
from tracestore.data.batches.batch import BatchLayout, TokenBatch
from tracestore.data.batches.batch_jobs import BatchGatherer, BatchJob
from tracestore.data.tokens.token_table import Tokens, TokenTable
from tracestore.store.format.schema import dtype_code, storage_dtype
from tracestore.store.read.array_reader import ArrayReader
from tracestore.store.read.chunk_cache import ChunkKey
from tracestore.store.read.store import TraceStore

# Decoded chunks that a job holds at a time, besides those of the cache.
_DECODED_BYTES = 8 << 20


class OpenArrays:
    """The hidden states of segments that were used, so that a batch opens none again.

    A file that the cache of a remote store evicts is released with the next batch.
    """

    def __init__(self, store: TraceStore) -> None:
        self._internals, self._store = store.internals, store
        self._clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenArrays, (self._store,)

    def _clear(self) -> None:
        num_segments = self._internals.manifest.num_segments
        self._views: list[Any] = [None] * num_segments
        self._is_open = np.zeros(num_segments, bool)
        self._num_evictions = self._internals.num_evictions

    def views(self, segments: np.ndarray, rows: np.ndarray) -> list[Any]:
        """Return an ArrayView for each segment of the store, or None for one that is not in `segments`.

        They have these rows of hidden states.
        """
        self._internals.close_evicted()
        if self._internals.num_evictions != self._num_evictions:
            self._clear()
        for number in np.unique(segments[~self._is_open[segments]]).tolist():
            reader = self._internals.segment(number).array("hidden_states")
            self._views[number] = reader.view(rows[segments == number])
            self._is_open[number] = not reader.is_partial
        return list(self._views)


class _Chunk(NamedTuple):
    """An inner chunk, the rows of it to copy, and where in the batch they go."""

    reader: ArrayReader
    number: int
    row: np.ndarray
    target: np.ndarray

    def decode(self) -> gather.ArrayView:
        """Return the rows of the chunk."""
        begin = self.number * self.reader.chunk_rows
        end = min(begin + self.reader.chunk_rows, self.reader.shape[0])
        data = self.reader.flat(begin, end)
        return gather.ArrayView(data.view("u1"), end - begin, self.reader.row_items * data.itemsize)


def _chunks(store: TraceStore, tokens: Tokens) -> Iterator[_Chunk]:
    """Yield the inner chunks that hold some tokens, each once."""
    order = np.lexsort((tokens.row, tokens.segment))
    segment, row = tokens.segment[order], tokens.row[order]
    for begin, end in _equal_ranges(segment):
        reader = store.internals.segment(int(segment[begin])).array("hidden_states")
        reader.require_rows(0, int(row[end - 1]) + 1)
        chunk, inside = np.divmod(row[begin:end], reader.chunk_rows)
        for first, last in _equal_ranges(chunk):
            yield _Chunk(reader, int(chunk[first]), inside[first:last], order[begin + first : begin + last])


def _equal_ranges(values: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each range of equal neighbors."""
    begins = np.flatnonzero(np.diff(values, prepend=-1)).tolist()
    return pairwise([*begins, len(values)])


class _CodedRows:
    """The native job of a compressed store, in the place of a `gather.RowJob`: decodes chunks and copies their rows.

    It holds few decoded chunks at a time, whatever the number of chunks of a batch.
    """

    def __init__(self, store: TraceStore, tokens: Tokens, dtype: int, out_dtype: int, row_bytes: int) -> None:
        self._store, self._tokens, self._dtypes = store, tokens, (dtype, out_dtype)
        self.out_bytes = len(tokens.row) * row_bytes

    def set_output(self, out: Any, offset: int = 0) -> None:
        """Write `out_bytes` at an offset of a buffer."""
        self._out = out, offset

    def run(self) -> None:
        """Decode and copy. CorruptStoreError names a damaged chunk."""
        held: list[_Chunk] = []
        views: list[Any] = []
        for chunk in _chunks(self._store, self._tokens):
            held.append(chunk)
            views.append(chunk.decode())
            if sum(view.num_rows * view.row_bytes for view in views) >= _DECODED_BYTES:
                self._copy(held, views)
                held, views = [], []
        if held:
            self._copy(held, views)

    def _copy(self, chunks: list[_Chunk], views: list[Any]) -> None:
        array = np.repeat(np.arange(len(chunks), dtype=np.int32), [len(chunk.row) for chunk in chunks])
        row, target = (np.concatenate(values) for values in ([c.row for c in chunks], [c.target for c in chunks]))
        job = gather.RowJob(views, array, row, *self._dtypes, target, len(self._tokens.row))
        job.set_output(*self._out)
        job.run()


class TokenJob(BatchJob):
    """The job of a TokenBatch. `indices` are numbers of tokens of the table."""

    native: Any
    _gatherer: "TokenGatherer"

    def _look_up(self) -> None:
        store, self._table = self._store, self._gatherer.table
        self._dtype = self._format.hidden_dtype(store)
        numbers, self._tokens = self._indices, self._table.locate(self._indices)
        self._indices = self._tokens.trace
        dtypes = dtype_code(store.hidden_dtype), dtype_code(self._dtype)
        if store.codec == "none":
            # Rows are copied in the order of the store: addresses of neighbors are translated faster.
            order = self._table.store_order(numbers)
            self._views = self._gatherer.arrays.views(self._tokens.segment, self._tokens.row)
            segment, row = self._tokens.segment[order], self._tokens.row[order]
            self.native = gather.RowJob(self._views, segment, row, *dtypes, order, len(order))
        else:
            row_bytes = store.hidden_dim * storage_dtype(self._dtype).itemsize
            self.native = _CodedRows(store, self._tokens, *dtypes, row_bytes)
        self._place({"hidden_states": self.native.out_bytes})

    @property
    def sources(self) -> list[Any]:
        """The stored rows that the job reads."""
        places = zip(self._tokens.segment.tolist(), self._tokens.row.tolist(), strict=True)
        return [self._views[segment].rows(row, row + 1) for segment, row in places]

    def layout(self) -> BatchLayout:
        """Return where the tensors lie in the buffer."""
        num_layers, dim = len(self._table.layers), self._store.hidden_dim
        shape = (len(self._indices), dim) if num_layers == 1 else (len(self._indices), num_layers, dim)
        return BatchLayout(TokenBatch, {"hidden_states": (0, shape, self._dtype)}, {})

    def metadata(self) -> dict[str, Any]:
        """Return the fields of the batch that do not lie in its buffer."""
        own = {"trace_index": self._tokens.trace, "position": self._tokens.position}
        return self._scores() | own | {"layers": self._table.layers.tolist()}


@dataclass(frozen=True)
class TokenGatherer(BatchGatherer):
    """Gathers batches of tokens, whose numbers in `table` are the indices."""

    table: TokenTable
    arrays: OpenArrays

    def _look_up(self, indices: np.ndarray) -> BatchJob:
        return TokenJob(self, indices)

    def _chunk_keys(self, indices: np.ndarray) -> list[ChunkKey]:
        return [(*chunk.reader.key, chunk.number) for chunk in _chunks(self.store, self.table.locate(indices))]

    def traces(self, indices: np.ndarray) -> np.ndarray:
        """See BatchGatherer."""
        return np.unique(self.table.locate(indices).trace)
