"""Opening a store for reading."""

import operator
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal

import numpy as np

from tracestore.errors import CorruptStoreError, MissingFieldError, UnknownTraceError, UsageError
from tracestore.store.format import schema
from tracestore.store.format.labels import ScoreField, describe, unlabeled_note
from tracestore.store.format.provenance import Provenance
from tracestore.store.io.files import reading_committed
from tracestore.store.lens import Lens
from tracestore.store.read import table
from tracestore.store.read.batch_sources import GRAPH_ROW, GRAPH_SEGMENT, LAYOUT, NUM_TOKENS
from tracestore.store.read.index import QuestionIds
from tracestore.store.read.internals import StoreInternals, StorePin, open_files
from tracestore.store.read.joined import JoinedInternals
from tracestore.store.read.subset import TraceCollection, TraceSubset
from tracestore.store.read.trace import Trace
from tracestore.words import plural

DEFAULT_CACHE_BYTES = 256 << 20
# One store, or several that are read as one.
StorePath = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class TraceStore(TraceCollection):
    """One generation of a store, opened for reading and pinned until close().

    ``store[i]`` and ``store[question_id]`` are a Trace. Slices, boolean masks, index arrays, lists of question ids,
    `select`, `filter` and `split` give a lazy `TraceSubset`, which every loader takes like a store. Opening maps the
    index and reads no trace; each process maps the other files when it first uses them. A store is safe to use from
    threads and across fork. A pickled copy opens the same generation, or if it is gone one with further traces.

    Use `tracestore.open` to open a store.

    Attributes
    ----------
    path : Path, str or tuple
        The folder of the store, or its URL; a tuple of them if several stores are opened as one.
    internals : StoreInternals
        Files, index and segments, for the other modules of this package.

    Examples
    --------
    >>> import tracestore
    >>> store = tracestore.open("store.zarr")
    >>> store
    TraceStore('store.zarr', 12 traces)
    >>> store["q3"].num_tokens, store[2:5], store[store.scores < 0.5].indices
    (4, TraceSubset(3 of 12 traces of 'store.zarr'), array([ 0,  2,  4,  6,  8, 10]))
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (_pins(self), self.internals.chunk_cache.max_bytes, self.internals.score_name)

    def reopen(self, cache_bytes: int = DEFAULT_CACHE_BYTES) -> "TraceStore":
        """Open the same generation again, with maps and a chunk cache of its own.

        CorruptStoreError if a writer has removed the generation, or another store has its name.
        """
        return _checked(TraceStore(self.internals.reopen(cache_bytes)), _pins(self))

    def __enter__(self) -> "TraceStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the maps and the pin. Arrays that were returned stay valid."""
        self.internals.close()

    def __repr__(self) -> str:
        return f"TraceStore({str(self.path)!r}, {plural(len(self), 'trace')})"

    # Attributes

    def __len__(self) -> int:
        return self.internals.manifest.num_traces

    @property
    def indices(self) -> np.ndarray:
        """Store indices (N,) int64 of the traces, 0 to N - 1."""
        return np.arange(len(self))

    @property
    def num_heads(self) -> int | None:
        """H: attention heads of the model; None if no source had the attention of every head."""
        return self.internals.attributes.num_heads

    @property
    def attention_mode(self) -> Literal["mean", "heads", "none"]:
        """Stored form of the attention: head mean, every head, or none."""
        return self.internals.attributes.attention  # type: ignore[return-value]

    @property
    def num_stored_heads(self) -> int:
        """Attention values of one pair of tokens in one layer: H, or 1 for the head mean."""
        return self.internals.num_stored_heads

    @property
    def attention_layout(self) -> str | None:
        """causal, square or edges; None for a store without attention."""
        return self.internals.attributes.attention_layout

    @property
    def hidden_dtype(self) -> str:
        """Stored dtype of the hidden states, such as float16 or bfloat16."""
        return self.internals.attributes.hidden_dtype or "float16"

    @property
    def attention_dtype(self) -> str:
        """Stored dtype of the attention."""
        return self.internals.attributes.attention_dtype or "float16"

    @property
    def generation(self) -> int:
        """Number of the commit that is open."""
        return self.internals.manifest.generation

    @property
    def codec(self) -> str:
        """Codec of the large arrays; "none" if they are not compressed."""
        return str(self.internals.attributes.options.get("codec", "none"))

    @property
    def question_ids(self) -> QuestionIds:
        """The question id of each trace."""
        return QuestionIds(self.internals.index)

    @property
    def score_name(self) -> str | None:
        """Name of the score that `scores` holds; None for a store without scores."""
        return self.internals.score_name

    @property
    def score_fields(self) -> dict[str, ScoreField]:
        """Direction, source and version of each named score."""
        return dict(self.internals.attributes.scores)

    def named_scores(self, name: str) -> np.ndarray:
        """Return a named score (N,) float64, NaN for a trace without it.

        Parameters
        ----------
        name : str
            A key of `score_fields`. KeyError for another name.
        """
        if name not in self.internals.attributes.scores:
            raise KeyError(name)
        return self.internals.columns.score(name)

    def group(self, index: int) -> str:
        """Return the group of a trace that a split keeps together, "" if missing."""
        return self.internals.columns.group(self._store_index(index))

    def token_and_pair_counts(
        self, indices: np.ndarray, layers: Sequence[int] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of some traces and their stored pairs of tokens.

        The pairs (edges, in a store of edges) of some or all layers are added up, once for all heads; both are (n,) int64.
        """
        locations = self.internals.index.locations(indices)
        tokens, layout = locations[:, NUM_TOKENS], locations[:, LAYOUT]
        pairs = np.where(layout == schema.LAYOUT_SQUARE, tokens * tokens, tokens * (tokens + 1) // 2)
        pairs *= self.num_layers if layers is None else len(layers)
        pairs[layout == schema.LAYOUT_NONE] = 0
        for k in np.flatnonzero(layout == schema.LAYOUT_EDGES):
            segment = self.internals.segment(int(locations[k, GRAPH_SEGMENT]))
            begin = segment.begin("edges", int(locations[k, GRAPH_ROW]))
            ptr = segment.edge_offsets(begin, self.num_layers)
            pairs[k] = (ptr[1:] - ptr[:-1])[slice(None) if layers is None else list(layers)].sum()
        return tokens, pairs

    @property
    def score_direction(self) -> str:
        """The answers that a high score marks: "correct" or "hallucination"."""
        return self.internals.score_direction

    @property
    def provenance(self) -> tuple[Provenance, ...]:
        """The distinct provenances of the sources, without unknown ones; see Trace.provenance."""
        return self.internals.attributes.provenance

    @property
    def lens(self) -> Lens | None:
        """Final norm and unembedding matrix of the language model, for a logit lens; None: the store has none."""
        return self.internals.lens

    def describe_labels(self, score_threshold: float | None = None) -> list[str]:
        """Return the lines that tell which labels the scores give, which traces get none, and which groups there are."""
        columns = self.internals.columns
        lines = [describe(self.scores, columns.labels, score_threshold, self.score_direction)]
        note = unlabeled_note(columns.scores, columns.labels, self.score_name)
        lines = [] if np.isnan(self.scores).all() else lines
        return [*lines, *([] if note is None else [note]), *columns.describe_groups()]

    def describe_shared_keys(self, targets: np.ndarray | None = None) -> list[str]:
        """Return the line about keys that several of the stores opened as one have; none if there are no such keys.

        With `targets`, the label of each trace (N,), it tells how many of these keys have different labels.
        """
        shared = self.internals.shared_keys()
        text = f"keys (question id and sample) in more than one store: {len(shared):,}"
        if targets is not None:
            labels = (set(targets[traces][~np.isnan(targets[traces])]) for traces in shared)
            text += f", {sum(len(of_key) > 1 for of_key in labels):,} of them with different labels"
        return [text] if shared else []

    # Traces

    def index_of(self, question_id: str, sample: int = 0) -> int:
        """Return the store index of a question's trace.

        Parameters
        ----------
        question_id : str
        sample : int
            Number of the answer among those to the question.

        Raises
        ------
        UnknownTraceError
            With the id, if the trace is absent.
        """
        index = self.internals.index.find(str(question_id), operator.index(sample))
        if index < 0:
            raise UnknownTraceError(question_id, *([sample] if sample else []))
        return index

    def _subset(self, positions: np.ndarray) -> TraceSubset:
        return TraceSubset(self, positions)

    def private_trace(self, index: int) -> Trace:
        """Return trace `index`, whose arrays are in memory of their own instead of views of the mapped files."""
        return Trace(self.internals, index, private=True)

    def set_cache_limit(self, max_bytes: int) -> None:
        """Keep at most max_bytes of decoded chunks from now on, but at least one chunk."""
        self.internals.chunk_cache.resize(max_bytes)

    # Contents

    def require_view(self, view: str, indices: np.ndarray | None = None) -> None:
        """Raise an error unless the traces have the data of a view of a loader.

        Parameters
        ----------
        view : {"sequence", "graph", "tokens"}
        indices : np.ndarray, optional
            Store indices of the traces to check. Default: all.

        Raises
        ------
        MissingFieldError
            The message names what is missing and how to get it.
        """
        if view not in ("sequence", "graph", "tokens"):
            raise UsageError(f"found view {view!r}, expected 'sequence', 'graph' or 'tokens'")
        if len(self) == 0 or view == "sequence":
            return
        indices = self.indices if indices is None else indices
        missing = self.internals.index.read_column("graph_segment")[indices] < 0
        if missing.any():
            first = int(indices[missing][0])
            raise MissingFieldError(
                f"{self.path}: no {'graphs' if view == 'graph' else 'hidden states of all tokens'}: {int(missing.sum())} of {len(indices)} traces (first: trace {first}, "
                f"{self.question_ids[first]}) hold last tokens only; convert the pickles or gnn/ files of the same questions"
            )
        bare = self.internals.index.read_column("layout")[indices] == schema.LAYOUT_NONE
        if view == "graph" and bare.any():
            raise MissingFieldError(
                f"{self.path}: no graphs: {int(bare.sum())} of {len(indices)} traces have no attention; convert files with attention, without --attention none"
            )

    def digest(self, indices: np.ndarray) -> str:
        """Return a digest of some traces: of their ids, samples and stored arrays, by the checksums in the store.

        Equal traces have the same digest in every order and every store, also after a merge. No large array is read.
        """
        return table.digest(self.internals, indices)

    def info(self) -> dict[str, Any]:
        """Return the fields of ``tracestore info --json``."""
        return table.facts(self.internals)


def _pins(store: TraceStore) -> list[StorePin]:
    return [StorePin.of(member) for member in store.internals.members]


def _reopen(pins: list[StorePin], cache_bytes: int, score: str | None) -> TraceStore:
    """Open the store of a pickled TraceStore."""
    locations, generations = [pin.location for pin in pins], [pin.generation for pin in pins]
    return _checked(TraceStore(_open(locations, cache_bytes, score, generations, True)), pins)


def _checked(store: TraceStore, pins: list[StorePin]) -> TraceStore:
    """Raise CorruptStoreError if a store has other traces than its pin, or moves the traces of those after it."""
    for member, pin in zip(store.internals.members, pins, strict=True):
        found = StorePin.of(member, pin.num_segments)
        is_longer = found.num_traces > pin.num_traces
        if found[3:] != pin[3:] or found.num_traces < pin.num_traces or (is_longer and len(pins) > 1):
            raise CorruptStoreError(f"{pin.location}: generation {pin.generation} is gone; open the store again")
    return store


def _open(
    locations: Sequence[str | os.PathLike[str]],
    cache_bytes: int,
    score: str | None,
    generations: Sequence[int | None],
    allow_mixed_provenance: bool,
) -> StoreInternals:
    """Open one store, or several as one."""
    if len(locations) == 1:
        return StoreInternals.open(open_files(locations[0]), cache_bytes, generations[0], score)
    with ExitStack() as stack:
        members = []
        for location, generation in zip(locations, generations, strict=True):
            files = open_files(location)
            files.prefix = f"{files.location}/"
            with reading_committed(str(files.location), prefix=files.prefix):
                members.append(StoreInternals.open(files, 0, generation))
            stack.callback(members[-1].close)
        internals = JoinedInternals(members, cache_bytes, score, allow_mixed_provenance=allow_mixed_provenance)
        stack.pop_all()
    return internals


def open_store(
    path: StorePath,
    *,
    score: str | None = None,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    allow_mixed_provenance: bool = False,
) -> TraceStore:
    """Open a store, or several stores as one, for reading (tracestore.open).

    Parameters
    ----------
    path : str, PathLike or sequence of them
        A folder, or a URL that begins with s3://, gs://, http:// or https://. Files of a URL are cached on the
        local disk when they are first used (docs/remote.md; extra [remote]). Of several stores, which must fit each
        other as those of ``tracestore merge``, the traces follow each other in this order; of a question id and
        sample that two stores have, ``store[question_id]`` is the trace of the first one.
    score : str, optional
        Name of the score that `scores`, `score` of a trace, and labels use. Default: the store's default score.
    cache_bytes : int
        Bound in bytes of the decoded chunks of a compressed store.
    allow_mixed_provenance : bool
        Accept several stores whose models, layers or prompts differ.

    Returns
    -------
    TraceStore

    Raises
    ------
    UsageError
        If there is no store, it lacks the score, or several stores do not fit each other.
    CorruptStoreError
        If no generation is intact.
    RemoteError
        If a server fails for a long time.

    Examples
    --------
    >>> import tracestore
    >>> with tracestore.open("store.zarr") as store:
    ...     print(len(store), store[0].hidden_states.shape)
    12 (3, 1, 8)
    """
    locations = [path] if isinstance(path, str | os.PathLike) else list(path)
    if not locations:
        raise UsageError("found no store to open")
    return TraceStore(_open(locations, cache_bytes, score, [None] * len(locations), allow_mixed_provenance))
