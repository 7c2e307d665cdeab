"""Search for traces by text, label, score, group, length and errors of detectors."""

import itertools
import math
import re
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any
from urllib.parse import urlencode

import numpy as np

from tracestore.errors import CorruptStoreError, TracestoreError, UsageError, escape_unprintable
from tracestore.serve.results import Results
from tracestore.store.format import schema
from tracestore.store.format.ragged import is_offsets
from tracestore.store.read.batch_sources import primary_locations
from tracestore.store.read.index import grouped
from tracestore.store.read.segment import SegmentReader
from tracestore.store.read.store import TraceStore

ANY, HALLUCINATED, CORRECT, UNLABELED = "any", "hallucinated", "correct", "unlabeled"
LABELS = (ANY, HALLUCINATED, CORRECT, UNLABELED)
STORED, SCORE, TOKENS = "as stored", "score", "tokens"
_MAX_WORDS = 1_000
# Ends each text. Texts that contain it are searched as if it were a space.
_END = b"\0"


@dataclass(frozen=True)
class Query:
    """Describe the traces that a visitor wants to see, as the address of the page contains it.

    Parameters
    ----------
    words : str
        Words that the question id, question or answer contain, in any case.
    label : str
        One of LABELS.
    missed : str
        Name of a detector that misclassifies the traces; "": any trace.
    group : str
        Group of the traces; "": any group.
    min_score, max_score : float or None
        Bounds of the score. A trace without a score meets no bound.
    min_tokens, max_tokens : int or None
        Bounds of the number of tokens.
    order : str
        One of `TraceSearch.orders`. Traces without a value come last.
    descending : bool
        Reverse the order.
    page : int
        Page of the list, from 1.
    """

    words: str = ""
    label: str = ANY
    missed: str = ""
    group: str = ""
    min_score: float | None = None
    max_score: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    order: str = STORED
    descending: bool = False
    page: int = 1

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, str]) -> "Query":
        """Return the query of the arguments of an address; others than those of a query are ignored.

        UsageError names an argument that is not valid.
        """
        values: dict[str, Any] = {}
        for field in fields(cls):
            text = arguments.get(field.name, "").strip()
            if text:
                values[field.name] = _parse(field.name, text)
        return cls(**values)

    def pairs(self, **changes: Any) -> list[tuple[str, str]]:
        """Return names and values of the arguments that do not have their default; `changes` replaces some."""
        values, default = asdict(self) | changes, Query()
        chosen = {k: v for k, v in values.items() if v != getattr(default, k, None)}
        return [(k, str(int(v) if isinstance(v, bool) else v)) for k, v in chosen.items()]

    def arguments(self, **changes: Any) -> str:
        """Return `pairs` as the arguments of an address."""
        return urlencode(self.pairs(**changes), errors="surrogatepass")


def label_name(target: float) -> str:
    """Return the name of a label: 1, 0 or NaN."""
    return HALLUCINATED if target >= 0.5 else CORRECT if target < 0.5 else ""


def _parse(name: str, text: str) -> Any:
    """Return the value of an argument of an address."""
    kind = Query.__dataclass_fields__[name].type
    try:
        if kind is str:
            return text[:_MAX_WORDS]
        if kind is bool:
            return {"0": False, "1": True}[text]
        value = float(text) if kind == float | None else int(text[:18])
        if not math.isfinite(value) or (kind is int and value < 1):
            raise ValueError
        return value
    except (ValueError, KeyError):
        expected = "0 or 1" if kind is bool else "a number of at least 1" if kind is int else "a number"
        raise UsageError(f"{name}: found {escape_unprintable(text, 40)}, expected {expected}") from None


class FoldedTexts:
    """Question ids, questions and answers of all traces, casefolded.

    They need as many bytes of memory as the texts have, and at most 39 for each trace.

    Parameters
    ----------
    store : TraceStore
        The store. All texts are read.

    Raises
    ------
    CorruptStoreError
        A text cannot be read.
    """

    def __init__(self, store: TraceStore) -> None:
        places = primary_locations(store.internals.index.locations(store.indices))
        blobs, owners = [], []
        for number, traces in grouped(places[:, 0]):
            blob, count = _segment_texts(store.internals.segment(number), places[traces, 1])
            blobs.append(blob)
            owners.append(np.tile(traces.astype("i4"), count))
        self._num_traces = len(store)
        self._bytes = b"".join(blobs)
        self._ends = np.flatnonzero(np.frombuffer(self._bytes, "u1") == 0)
        self._owners = np.concatenate(owners or [np.zeros(0, "i4")])

    def containing(self, words: str) -> np.ndarray:
        """Return which traces contain all words, bool (N,).

        Parameters
        ----------
        words : str
            Words that the question id, question or answer must contain, in any case.
        """
        mask = np.ones(self._num_traces, bool)
        for word in words.replace("\0", " ").casefold().split():
            # Up to the end of its text, so that each text is found once.
            pattern = re.escape(word.encode("utf-8", "surrogatepass")) + b"[^\0]*"
            begins = [match.start() for match in re.finditer(pattern, self._bytes)]
            found = np.zeros(self._num_traces, bool)
            found[self._owners[np.searchsorted(self._ends, begins)]] = True
            mask &= found
        return mask


def _segment_texts(segment: SegmentReader, rows: np.ndarray) -> tuple[bytes, int]:
    """Return the folded texts of some rows, each with its end, and the number of texts of a row.

    The first text of all rows comes first, then the second text of all rows.
    """
    if len(rows) and rows.max() >= segment.num_rows:
        raise CorruptStoreError(f"{segment.rows_path}: row {rows.max()} of {segment.num_rows}")
    present = segment.values("fields")[rows]
    fields = [("question_id", np.ones(len(rows), bool))]
    fields.append(("question", (present & schema.FIELD_BITS["question"]) != 0))
    is_open = np.ones(len(rows), bool)
    for name in schema.ANSWER_FIELDS:
        is_there = (present & schema.FIELD_BITS[name]) != 0
        fields.append((name, is_there & is_open))
        is_open &= ~is_there
    blobs = [_joined(segment, name, rows, chosen) for name, chosen in fields if name == "question_id" or chosen.any()]
    try:
        return b"".join(map(_folded, blobs)), len(blobs)
    except UnicodeDecodeError as error:
        raise CorruptStoreError(f"{segment.rows_path}: {error}") from None


def _folded(texts: bytes) -> bytes:
    # The casefolded form of ASCII is its lower case, which is ten times as fast.
    if texts.isascii():
        return texts.lower()
    return texts.decode("utf-8", "surrogatepass").casefold().encode("utf-8", "surrogatepass")


def _joined(segment: SegmentReader, name: str, rows: np.ndarray, chosen: np.ndarray) -> bytes:
    """Return one text of each row, or nothing for a row that is not chosen, each with its end."""
    values, offsets = segment.values(name), segment.values(f"{name}_offsets")
    if not is_offsets(offsets, len(values)):
        raise CorruptStoreError(f"{segment.rows_path}: {name}_offsets: not offsets")
    data = values.tobytes().replace(_END, b" ")
    begins = offsets[rows].tolist()
    ends = np.where(chosen, offsets[rows + 1], offsets[rows]).tolist()
    return _END.join([*(data[begin:end] for begin, end in zip(begins, ends, strict=True)), b""])


class TraceSearch:
    """A search over the traces of a store.

    A thread reads the texts of all traces once. `start_reading` starts it. The first search for words waits for it.

    Parameters
    ----------
    store : TraceStore
        The store.
    results : Results, optional
        Results of detectors.
    score_threshold : float, optional
        Traces with a lower score count as hallucinated. Default: 0.5, for scores in [0, 1].
    """

    def __init__(self, store: TraceStore, results: Results | None = None, score_threshold: float | None = None) -> None:
        self.store, self.results = store, results or Results()
        self.targets = store.targets(score_threshold)
        self._texts: Future[FoldedTexts] | None = None
        self._lock = threading.Lock()
        self._last_found = lru_cache(maxsize=1)(self._find)
        # A new order of the same traces does not search again.
        self._last_matches = lru_cache(maxsize=1)(lambda filters: np.flatnonzero(self._matches(filters)))

    @property
    def orders(self) -> tuple[str, ...]:
        """Names of the orders."""
        return (STORED, SCORE, TOKENS, *self.results.probabilities)

    @property
    def groups(self) -> list[str]:
        """Names of the groups of the store, sorted."""
        return self._group_numbers[0]

    def find(self, query: Query) -> np.ndarray:
        """Return the indices of the matching traces in their order, int64 (n,). The page of the query is ignored.

        UsageError if the query names a label, detector, group or order that there is not. CorruptStoreError if the
        texts cannot be read.
        """
        if query.order not in self.orders:
            raise UsageError(f"order: there is no {escape_unprintable(query.order, 80)}")
        return self._last_found(replace(query, page=1))

    def _find(self, query: Query) -> np.ndarray:
        indices = self._last_matches(replace(query, order=STORED, descending=False))
        found: np.ndarray = indices[self._ranks(query.order, indices, query.descending)]
        return found

    def is_missed(self, name: str) -> np.ndarray:
        """Return which traces a detector misclassifies at its threshold, bool (N,)."""
        predicted, known = self.results.predicts(name), ~np.isnan(self.results.probabilities[name])
        missed: np.ndarray = known & ((self.targets < 0.5) & predicted | (self.targets >= 0.5) & ~predicted)
        return missed

    @cached_property
    def num_other_labels(self) -> int:
        """Number of traces that have another label in the results."""
        known = ((float(self.targets[index]), label) for index, label in self.results.labels.items())
        return sum(not math.isnan(target) and (target >= 0.5) != (label >= 0.5) for target, label in known)

    def start_reading(self) -> "Future[FoldedTexts]":
        """Return the future texts of all traces, which a thread reads once."""
        with self._lock:
            if self._texts is None:
                texts = Future[FoldedTexts]()
                threading.Thread(target=self._read, args=(texts,), name="texts", daemon=True).start()
                self._texts = texts
            return self._texts

    def _matches(self, query: Query) -> np.ndarray:
        names = {"label": LABELS, "missed": ("", *self.results.probabilities)}
        names |= {"group": ("", *self.groups)} if query.group else {}
        for name, known in names.items():
            if getattr(query, name) not in known:
                raise UsageError(f"{name}: there is no {escape_unprintable(getattr(query, name), 80)}")
        mask = np.ones(len(self.store), bool)
        if query.label != ANY:
            targets = self.targets
            mask &= {HALLUCINATED: targets >= 0.5, CORRECT: targets < 0.5, UNLABELED: np.isnan(targets)}[query.label]
        if query.missed:
            mask &= self.is_missed(query.missed)
        if query.group:
            names_of_groups, numbers = self._group_numbers
            mask &= numbers == names_of_groups.index(query.group)
        for values, low, high in (
            (self.store.scores, query.min_score, query.max_score),
            (self.store.num_tokens, query.min_tokens, query.max_tokens),
        ):
            if low is not None:
                mask &= values >= low
            if high is not None:
                mask &= values <= high
        if query.words:
            mask &= self.start_reading().result().containing(query.words)
        return mask

    def _ranks(self, order: str, indices: np.ndarray, descending: bool) -> np.ndarray:
        if order == STORED:
            ranks = np.arange(len(indices))
            return ranks[::-1] if descending else ranks
        columns = {SCORE: self.store.scores, TOKENS: self.store.num_tokens, **self.results.probabilities}
        values = np.asarray(columns[order], "f8")[indices]
        # Negated rather than reversed: NaN then sorts last in both directions.
        return np.argsort(-values if descending else values, kind="stable")

    @cached_property
    def _group_numbers(self) -> tuple[list[str], np.ndarray]:
        """The sorted names of the groups, and the number of the group of each trace (N,), -1 for none."""
        columns = self.store.internals.columns
        data, offsets = columns.groups.tobytes(), columns.groups_offsets.tolist()
        of_traces = [data[a:b] for a, b in itertools.pairwise(offsets)]
        known = sorted(set(of_traces) - {b""})
        numbers = {name: k for k, name in enumerate(known)} | {b"": -1}
        names = [name.decode("utf-8", "surrogatepass") for name in known]
        return names, np.array([numbers[name] for name in of_traces], np.int64)

    def _read(self, texts: "Future[FoldedTexts]") -> None:
        try:
            texts.set_result(FoldedTexts(self.store))
        except TracestoreError as error:
            texts.set_exception(error)
        except Exception as error:  # The page shows it.
            text = f"{self.store.path}: texts cannot be read: {type(error).__name__}: {error}"
            texts.set_exception(TracestoreError(text))
        with suppress(Exception):  # a page that needs the groups shows it
            _ = self._group_numbers
