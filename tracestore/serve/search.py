"""Search for traces by text, label, score, group, length and errors of detectors."""

import itertools
import math
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any
from urllib.parse import urlencode

import numpy as np

from tracestore.errors import TracestoreError, UsageError, escape_unprintable
from tracestore.serve.results import Results
from tracestore.serve.texts import FoldedTexts
from tracestore.store.read.store import TraceStore

ANY, HALLUCINATED, CORRECT, UNLABELED = "any", "hallucinated", "correct", "unlabeled"
LABELS = (ANY, HALLUCINATED, CORRECT, UNLABELED)
STORED, SCORE, TOKENS = "as stored", "score", "tokens"
_MAX_WORDS = 1_000


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
        self._texts: FoldedTexts | None = None
        self._thread: threading.Thread | None = None
        self._error: TracestoreError | None = None
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

    def start_reading(self) -> threading.Thread:
        """Start the thread that reads the texts unless it was started, and return it."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._read, name="texts", daemon=True)
                self._thread.start()
            return self._thread

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
            mask &= self._all_texts().containing(query.words)
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

    def _all_texts(self) -> FoldedTexts:
        self.start_reading().join()
        if self._texts is None:
            raise self._error or TracestoreError(f"{self.store.path}: texts cannot be read")
        return self._texts

    def _read(self) -> None:
        try:
            self._texts = FoldedTexts(self.store)
            _ = self._group_numbers
        except TracestoreError as error:
            self._error = error
        except Exception as error:  # The page shows it.
            self._error = TracestoreError(f"{self.store.path}: texts cannot be read: {type(error).__name__}: {error}")
