"""Finding traces among many: by text, label, score and what detectors said."""

import threading

import numpy as np

from tracestore.errors import TracestoreError
from tracestore.serve.results import Results
from tracestore.store.read.store import TraceStore

ANY, HALLUCINATED, CORRECT, UNLABELLED = "any", "hallucinated", "right", "neither"
LABELS = (ANY, HALLUCINATED, CORRECT, UNLABELLED)
ORDERS = ("as stored", "score", "tokens")


class TraceSearch:
    """Which traces of a store a search finds, and in which order.

    The texts of all traces are read once, by a thread of their own: `read_texts` starts it, and so
    does the first search for words, which waits for it. 100,000 traces take some seconds and 30 MB.
    """

    def __init__(self, store: TraceStore, results: Results | None = None, score_threshold: float = 0.5) -> None:
        self.store, self.results = store, results or Results()
        self.targets = store.targets(score_threshold)
        self._texts: list[str] = []
        self._reading: threading.Thread | None = None
        self._error: TracestoreError | None = None
        self._lock = threading.Lock()

    @property
    def filters(self) -> tuple[str, ...]:
        """Names of filters: by label, and by each detector's mistakes."""
        return (*LABELS, *(f"missed by {name}" for name in self.results.probabilities))

    @property
    def orders(self) -> tuple[str, ...]:
        return (*ORDERS, *self.results.probabilities)

    def find(
        self, words: str = "", label: str = ANY, order: str = ORDERS[0], *, descending: bool = False
    ) -> np.ndarray:
        """Store indices, (n,) int64: every one of `words` in question id, question or answer, in
        any case; `label` one of `filters`, `order` one of `orders`, what has no value last.
        KeyError for others."""
        chosen = self._has_label(label)
        indices = np.flatnonzero(chosen)
        wanted = words.casefold().split()
        if wanted:
            texts = self._every_text()
            indices = np.array([k for k in indices if all(w in texts[k] for w in wanted)], np.int64)
        ranked: np.ndarray = indices[self._ranks(order, indices, descending)]
        return ranked

    def _has_label(self, label: str) -> np.ndarray:
        right, hallucinated = self.targets < 0.5, self.targets >= 0.5
        kinds = {ANY: np.ones(len(self.store), bool), HALLUCINATED: hallucinated, CORRECT: right}
        kinds[UNLABELLED] = np.isnan(self.targets)
        for name, values in self.results.probabilities.items():
            threshold = self.results.thresholds.get(name, 0.5)
            kinds[f"missed by {name}"] = (right & (values >= threshold)) | (hallucinated & (values < threshold))
        return kinds[label]

    def _ranks(self, order: str, indices: np.ndarray, descending: bool) -> np.ndarray:
        if order == ORDERS[0]:
            ranks = np.arange(len(indices))
            return ranks[::-1] if descending else ranks
        columns = {"score": self.store.scores, "tokens": self.store.num_tokens, **self.results.probabilities}
        values = np.asarray(columns[order], "f8")[indices]
        ranks = np.argsort(-values if descending else values, kind="stable")
        return ranks  # NaN sorts last either way

    def _every_text(self) -> list[str]:
        self.read_texts().join()
        if self._error is not None:
            raise self._error
        return self._texts

    def read_texts(self) -> threading.Thread:
        """The thread that reads them, started where it was not."""
        with self._lock:
            if self._reading is None:
                self._reading = threading.Thread(target=self._read, name="texts", daemon=True)
                self._reading.start()
            return self._reading

    def _read(self) -> None:
        texts = []
        try:
            for trace in self.store:
                texts.append("\n".join((trace.question_id, trace.question or "", trace.answer or "")).casefold())
        except TracestoreError as error:
            self._error = error
        except Exception as error:  # said on the page, and not an empty result
            self._error = TracestoreError(f"{self.store.path}: texts cannot be read: {type(error).__name__}: {error}")
        self._texts = texts
