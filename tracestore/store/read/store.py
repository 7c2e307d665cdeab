"""Opening a store for reading."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, overload

import numpy as np

from tracestore.errors import CorruptStoreError, MissingFieldError, UsageError
from tracestore.extras import needs
from tracestore.store.format import schema
from tracestore.store.format.labels import CORRECT, DEFAULT_THRESHOLD, derive, describe
from tracestore.store.io.files import LocalFiles, RemoteURL, StoreFiles, parse_location
from tracestore.store.read import table
from tracestore.store.read.batch_sources import ATTENTION_START, GRAPH_SEGMENT, LAYOUT, NUM_TOKENS, chunk_keys
from tracestore.store.read.chunk_cache import ChunkCache
from tracestore.store.read.generation import Generation, open_latest
from tracestore.store.read.index import StoreIndex
from tracestore.store.read.segment import SegmentReader
from tracestore.store.read.trace import Trace

DEFAULT_CACHE_BYTES = 256 << 20


class QuestionIds(Sequence[str]):
    """The question ids of a store, decoded when they are asked for."""

    def __init__(self, index: StoreIndex) -> None:
        self._index = index

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, item: int) -> str: ...
    @overload
    def __getitem__(self, item: slice) -> list[str]: ...
    def __getitem__(self, item: int | slice) -> str | list[str]:
        if isinstance(item, slice):
            return [self._index.question_id(k) for k in range(*item.indices(len(self)))]
        k = range(len(self))[item]
        return self._index.question_id(k)

    def at(self, indices: np.ndarray) -> list[str]:
        """The ids of some traces."""
        return self._index.question_ids(indices)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} question ids>"


class Prefetch:
    """What is told of a pass over a store as it goes; of a local one nobody wants to know."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def at(self, batch: int) -> None:
        """This batch is looked up next; those before it were."""


class TraceStore:
    """A store opened for reading: one generation, pinned until close().

    `store[i]` is a Trace, `store.index_of(id)` its index. Opening maps the index
    and reads no trace; files are mapped when first used, by each process for
    itself. Safe to use from threads, across fork, and to pickle; a pickled store
    reopens the same generation where it is still there.
    """

    def __init__(self, path: str | os.PathLike[str], *, cache_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        self._open(path, cache_bytes, None)

    def _open(self, path: str | os.PathLike[str], cache_bytes: int, generation: int | None) -> None:
        folder = Path(path)
        if not folder.exists():
            raise UsageError(f"{folder}: no such store")
        if not folder.is_dir():
            raise UsageError(f"{folder}: not a store")
        self._hold(folder, open_latest(folder, generation), LocalFiles(folder), cache_bytes)

    def _hold(self, path: Path | RemoteURL, found: Generation, files: StoreFiles, cache_bytes: int) -> None:
        self.path, self._files = path, files
        self._manifest, self._index = found.manifest, found.index
        self._columns, self._pin = found.columns, found.pin
        self._attributes = self._manifest.attributes
        self._cache = ChunkCache(cache_bytes)
        self._segments: dict[int, SegmentReader] = {}
        self._closed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self.path), self._cache.max_bytes, self._manifest.generation, len(self))

    def again(self, cache_bytes: int = DEFAULT_CACHE_BYTES) -> "TraceStore":
        """The same generation opened once more, with maps and cache of its own."""
        return _reopen(str(self.path), cache_bytes, self.generation, len(self))

    def __enter__(self) -> "TraceStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drops the maps and the pin; arrays that were handed out stay valid."""
        self._segments.clear()
        self._pin.close()
        self._closed = True

    def __repr__(self) -> str:
        return f"TraceStore({str(self.path)!r}, {len(self)} traces)"

    # Attributes

    def __len__(self) -> int:
        return self._manifest.num_traces

    @property
    def num_layers(self) -> int:
        return self._attributes.num_layers or 0

    @property
    def hidden_dim(self) -> int:
        return self._attributes.hidden_dim or 0

    @property
    def num_heads(self) -> int | None:
        """H of the model; None where no source had attention of every head."""
        return self._attributes.num_heads

    @property
    def attention(self) -> str:
        """mean, heads or none: what is stored of the attention."""
        return self._attributes.attention

    @property
    def num_stored_heads(self) -> int:
        """Attention values of one pair of tokens in one layer: H, or 1 for the mean."""
        return self._attributes.num_stored_heads

    @property
    def attention_layout(self) -> str | None:
        return self._attributes.attention_layout

    @property
    def hidden_dtype(self) -> str:
        return self._attributes.hidden_dtype or "float16"

    @property
    def attention_dtype(self) -> str:
        return self._attributes.attention_dtype or "float16"

    @property
    def generation(self) -> int:
        return self._manifest.generation

    @property
    def codec(self) -> str:
        return str(self._attributes.options.get("codec", "none"))

    @property
    def question_ids(self) -> QuestionIds:
        return QuestionIds(self._index)

    @property
    def scores(self) -> np.ndarray:
        """(N,) float64, read-only, NaN where a trace has no score."""
        return self._columns.scores

    @property
    def labels(self) -> np.ndarray:
        """(N,) float64: labels that came with the sources, NaN where missing."""
        return self._columns.labels

    def group(self, index: int) -> str:
        return self._columns.group(index)

    @property
    def num_tokens(self) -> np.ndarray:
        """(N,) tokens of each trace; 0 where only its last tokens are stored."""
        return self._index.column("num_tokens")

    def sizes(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of some traces: S, and the stored pairs (of edge stores: edges) of all layers
        together, one value a head mean; both (n,) int64."""
        places = self._index.places(indices)
        tokens, layout = places[:, NUM_TOKENS], places[:, LAYOUT]
        pairs = np.where(layout == schema.LAYOUT_SQUARE, tokens * tokens, tokens * (tokens + 1) // 2) * self.num_layers
        pairs[layout == schema.LAYOUT_NONE] = 0
        for k in np.flatnonzero(layout == schema.LAYOUT_EDGES):
            start = int(places[k, ATTENTION_START])
            ptr = self._segment(int(places[k, GRAPH_SEGMENT])).edge_offsets(start, self.num_layers)
            pairs[k] = int(ptr[-1]) - int(ptr[0])
        return tokens, pairs

    @property
    def has_nonfinite(self) -> np.ndarray:
        """(N,) bool: traces whose source had NaN or infinite values in its arrays."""
        return self._index.column("nonfinite").astype(bool)

    @property
    def score_direction(self) -> str:
        """What a high score says of an answer: "correct" or "hallucination"."""
        return self._attributes.score_direction or CORRECT

    def targets(self, score_threshold: float = DEFAULT_THRESHOLD) -> np.ndarray:
        """(N,) float64 labels: the stored one, else by the score (see labels.derive), else NaN."""
        return derive(self.scores, self.labels, score_threshold, self.score_direction)

    def describe_scores(self, score_threshold: float = DEFAULT_THRESHOLD) -> str:
        """How many scores become which label, as a line for people."""
        return describe(self.scores, score_threshold, self.score_direction)

    # As a whole

    def features(self, layer: int = -1) -> np.ndarray:
        """(N, D): the last token's hidden state in one layer, for scikit-learn and the like.

        layer: negative ones count from the last. Of the stored dtype; float32 where that is
        bfloat16, which numpy lacks. A read-only view of the file where one uncompressed segment
        holds all traces in order, else a copy. UsageError for a layer that is not there."""
        return table.features(self, layer)

    def to_pandas(self, *, texts: bool = False) -> Any:
        """A pandas DataFrame with a row a trace, in the store's order: question_id, sample, score,
        label, group, num_tokens, has_nonfinite, source, source_position; with `texts` question and
        answer too. MissingExtraError where pandas is not installed."""
        with needs("bridges"):
            import pandas
        return pandas.DataFrame(table.metadata(self, texts=texts))

    # Traces

    def index_of(self, question_id: str, sample: int = 0) -> int:
        """Store index of a question's trace; KeyError with the id when absent."""
        index = self._index.find(str(question_id), sample)
        if index < 0:
            raise KeyError(question_id)
        return index

    def __contains__(self, question_id: object) -> bool:
        return isinstance(question_id, str) and self._index.find(question_id, 0) >= 0

    def __getitem__(self, index: int) -> Trace:
        try:
            k = range(len(self))[index]
        except IndexError:
            raise IndexError(f"trace {index} of {len(self)}") from None
        return Trace(self, k)

    def __iter__(self) -> Iterator[Trace]:
        return (Trace(self, k) for k in range(len(self)))

    def _segment(self, number: int) -> SegmentReader:
        if self._closed:
            raise UsageError(f"{self.path}: the store is closed")
        segment = self._segments.get(number)
        if segment is None:
            if not 0 <= number < self._manifest.num_segments:
                raise CorruptStoreError(
                    f"{self.path}: the index names segment {number} of {self._manifest.num_segments}"
                )
            entries = {f.path: f for f in self._index.segment_files(number)}
            segment = self._segments[number] = SegmentReader(
                self._files, number, entries, self._cache, self._attributes, self._index.segment_rows(number)
            )
        return segment

    def announce(self, indices: np.ndarray, view: str) -> Callable[[], None]:
        """Tells the cache of a compressed store which traces come after all that were
        announced before; -> to be called when they were read, or will not be."""
        keys = chunk_keys(self, indices, view)
        self._cache.announce(keys)
        return partial(self._cache.done, keys)

    def coming(self, traces: Callable[[int], np.ndarray], start: int, total: int, view: str) -> Prefetch:
        """For a pass over batches start .. total - 1, of which `traces` gives the indices: enter it
        before, tell it of each batch. Where files come from far, they are fetched ahead."""
        return Prefetch()

    def set_cache_limit(self, max_bytes: int) -> None:
        """Keeps at most max_bytes of decoded chunks from now on (one chunk at least)."""
        self._cache.limit(max_bytes)

    # What is there

    def require(self, view: str) -> None:
        """MissingFieldError, naming what is missing and how to get it, unless every
        trace can be seen as `view` ("sequence" or "graph")."""
        if view not in ("sequence", "graph"):
            raise UsageError(f"found view {view!r}, expected 'sequence' or 'graph'")
        if len(self) == 0 or view == "sequence":
            return
        missing = self._index.column("graph_segment") < 0
        if missing.any():
            first = int(np.flatnonzero(missing)[0])
            raise MissingFieldError(
                f"{self.path}: no graphs: {int(missing.sum())} of {len(self)} traces (first: trace {first}, "
                f"{self.question_ids[first]}) hold last tokens only; convert the pickles or gnn/ files of the same questions"
            )
        bare = self._index.column("layout") == schema.LAYOUT_NONE
        if bare.any():
            raise MissingFieldError(
                f"{self.path}: no graphs: {int(bare.sum())} of {len(self)} traces have no attention; convert without --attention none"
            )

    def info(self) -> dict[str, Any]:
        """What `tracestore info --json` prints."""
        m = self._manifest
        return {
            "path": str(self.path),
            "format_version": self._attributes.format_version,
            "generation": m.generation,
            "num_traces": m.num_traces,
            "num_tokens": m.num_tokens,
            "num_layers": self._attributes.num_layers,
            "hidden_dim": self._attributes.hidden_dim,
            "num_heads": self._attributes.num_heads,
            "hidden_dtype": self.hidden_dtype,
            "attention": self.attention,
            "attention_layout": self.attention_layout,
            "attention_dtype": self._attributes.attention_dtype,
            "codec": self.codec,
            "fields": list(m.fields),
            "num_segments": m.num_segments,
            "num_sources": m.num_sources,
            "bytes": m.num_bytes,
            "num_scored": m.num_scored,
            "num_labelled": m.num_labelled,
            "score_direction": self._attributes.score_direction,
        }


def _kind_of(path: str | os.PathLike[str]) -> type[TraceStore]:
    if isinstance(parse_location(path), Path):
        return TraceStore
    # Imported here: most stores are local, and what fetches others is an extra.
    from tracestore.store.remote.files import RemoteStore

    return RemoteStore


def _reopen(path: str, cache_bytes: int, generation: int, num_traces: int) -> TraceStore:
    kind = _kind_of(path)
    store = kind.__new__(kind)
    store._open(path, cache_bytes, generation)
    if store.generation != generation and len(store) < num_traces:
        raise CorruptStoreError(f"{path}: generation {generation} is gone")
    return store


def open_store(path: str | os.PathLike[str], *, cache_bytes: int = DEFAULT_CACHE_BYTES) -> TraceStore:
    """Opens a store for reading (tracestore.open): a folder, or an address that begins with
    s3://, gs://, http:// or https://, whose files are kept on this machine's disk as they are used
    (docs/remote.md; extra [remote]).

    cache_bytes bounds the decoded chunks of compressed stores. UsageError where
    there is no store, CorruptStoreError where no generation reads back whole, RemoteError where a
    server fails for long.
    """
    return _kind_of(path)(path, cache_bytes=cache_bytes)
