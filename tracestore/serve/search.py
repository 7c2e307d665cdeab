"""Search for traces by text, label, score and predictions of detectors."""

import threading

import numpy as np

from tracestore.errors import TracestoreError
from tracestore.serve.results import Results
from tracestore.store.read.store import TraceStore

ANY, HALLUCINATED, CORRECT, UNLABELED = "any", "hallucinated", "correct", "unlabeled"
LABEL_FILTERS = (ANY, HALLUCINATED, CORRECT, UNLABELED)
ORDERS = ("as stored", "score", "tokens")


class TraceSearch:
    """A search over the traces of a store.

    A thread reads the texts of all traces once, which takes some seconds and 30 MB for 100,000 traces.
    `start_reading` starts it. The first search for words waits for it.

    Parameters
    ----------
    store : TraceStore
        The store.
    results : Results, optional
        Results of detectors.
    score_threshold : float
        Traces with a lower score count as hallucinated.
    """

    def __init__(self, store: TraceStore, results: Results | None = None, score_threshold: float = 0.5) -> None:
        self.store, self.results = store, results or Results()
        self.targets = store.targets(score_threshold)
        self._texts: list[str] = []
        self._thread: threading.Thread | None = None
        self._error: TracestoreError | None = None
        self._lock = threading.Lock()

    @property
    def filters(self) -> tuple[str, ...]:
        """Names of the filters: by label, and by the errors of each detector."""
        return (*LABEL_FILTERS, *(f"missed by {name}" for name in self.results.probabilities))

    @property
    def orders(self) -> tuple[str, ...]:
        """Names of the orders."""
        return (*ORDERS, *self.results.probabilities)

    def find(
        self, words: str = "", filter_name: str = ANY, order: str = ORDERS[0], *, descending: bool = False
    ) -> np.ndarray:
        """Return the indices of the matching traces, int64 (n,).

        Parameters
        ----------
        words : str
            Words that the question id, question or answer contain, in any case.
        filter_name : str
            One of `filters`.
        order : str
            One of `orders`. Traces without a value come last.
        descending : bool
            Reverse the order.

        Raises
        ------
        KeyError
            `filter_name` or `order` is unknown.
        """
        indices = np.flatnonzero(self._matches(filter_name))
        wanted = words.casefold().split()
        if wanted:
            texts = self._all_texts()
            indices = np.array([k for k in indices if all(w in texts[k] for w in wanted)], np.int64)
        ranked: np.ndarray = indices[self._ranks(order, indices, descending)]
        return ranked

    def start_reading(self) -> threading.Thread:
        """Start the thread that reads the texts unless it was started, and return it."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._read, name="texts", daemon=True)
                self._thread.start()
            return self._thread

    def _matches(self, filter_name: str) -> np.ndarray:
        correct, hallucinated = self.targets < 0.5, self.targets >= 0.5
        masks = {ANY: np.ones(len(self.store), bool), HALLUCINATED: hallucinated, CORRECT: correct}
        masks[UNLABELED] = np.isnan(self.targets)
        for name, values in self.results.probabilities.items():
            threshold = self.results.thresholds.get(name, 0.5)
            masks[f"missed by {name}"] = (correct & (values >= threshold)) | (hallucinated & (values < threshold))
        return masks[filter_name]

    def _ranks(self, order: str, indices: np.ndarray, descending: bool) -> np.ndarray:
        if order == ORDERS[0]:
            ranks = np.arange(len(indices))
            return ranks[::-1] if descending else ranks
        columns = {"score": self.store.scores, "tokens": self.store.num_tokens, **self.results.probabilities}
        values = np.asarray(columns[order], "f8")[indices]
        # Negated rather than reversed: NaN then sorts last in both directions.
        return np.argsort(-values if descending else values, kind="stable")

    def _all_texts(self) -> list[str]:
        self.start_reading().join()
        if self._error is not None:
            raise self._error
        return self._texts

    def _read(self) -> None:
        texts = []
        try:
            for trace in self.store:
                texts.append("\n".join((trace.question_id, trace.question or "", trace.answer or "")).casefold())
        except TracestoreError as error:
            self._error = error
        except Exception as error:  # The page shows it.
            self._error = TracestoreError(f"{self.store.path}: texts cannot be read: {type(error).__name__}: {error}")
        self._texts = texts
