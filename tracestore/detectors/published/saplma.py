"""SAPLMA: a feed-forward network on the last token's hidden state of one layer."""

import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np

from tracestore.detectors.published.linear import INNER_BINS, Fitted, cross_validated
from tracestore.detectors.published.probes import finite_last_tokens
from tracestore.evaluation.store_split import inner_bins
from tracestore.features.feature_table import features
from tracestore.store.read.store import TraceStore

HIDDEN = (256, 128, 64)
_BATCH_SIZE, _LEARNING_RATE = 32, 0.001


@dataclass
class Saplma(Fitted):
    """SAPLMA: a feed-forward network (256, 128, 64) on the last token of one layer, trained for five epochs with Adam.

    The layer is one of five: the last one, and those at 1/2, 5/8, 3/4 and 7/8 of the depth. Inputs are standardized,
    which the paper does not do: raw states have columns in the thousands.

    Parameters
    ----------
    epochs : int
    """

    epochs: int = 5
    _network: "list[np.ndarray]" = field(default_factory=list, init=False, repr=False)
    _layer: int = field(default=0, init=False, repr=False)

    fields: ClassVar[tuple[str, ...]] = ("last_token",)
    layers: ClassVar[str] = "one of five, chosen by cross-validation"
    cost: ClassVar[str] = "a network of 190,000 weights for D = 576"
    reference: ClassVar[str] = "Azaria and Mitchell 2023, arXiv:2304.13734"

    def _train(self, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
        """Return mean and scale of the inputs, then weights and biases of each layer."""
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.neural_network import MLPClassifier
        from sklearn.preprocessing import StandardScaler

        scaler = StandardScaler().fit(x)
        network = MLPClassifier(
            HIDDEN,
            alpha=0.0,
            batch_size=min(_BATCH_SIZE, len(x)),
            learning_rate_init=_LEARNING_RATE,
            max_iter=self.epochs,
            random_state=self.seed,
        )
        with warnings.catch_warnings():
            # Five epochs are meant.
            warnings.simplefilter("ignore", ConvergenceWarning)
            network.fit(scaler.transform(x), y)
        pairs = zip(network.coefs_, network.intercepts_, strict=True)
        return [scaler.mean_, scaler.scale_, *(array for pair in pairs for array in pair)]

    def fit(self, store: TraceStore, indices: np.ndarray, labels: np.ndarray) -> Self:
        """Choose the layer by cross-validation on the traces, then train on all of them."""
        states = features(store, "last")["last"]
        rows, y = finite_last_tokens(store, indices, labels)
        bins = inner_bins(store, rows, y, INNER_BINS, self.seed, self.keep_together)
        count = store.num_layers
        candidates = sorted({round((count - 1) * part / 8) for part in (4, 5, 6, 7, 8)})

        def validated(layer: int) -> float:
            return cross_validated(states[layer, rows], y, bins, lambda x, y: partial(_logits, self._train(x, y)))

        self._layer = max(candidates, key=validated) if len(candidates) > 1 else candidates[0]
        self._network = self._train(states[self._layer, rows], y)
        return self

    def score(self, store: TraceStore, indices: np.ndarray) -> np.ndarray:
        """Return logits."""
        return _logits(self._network, features(store, "last")["last"][self._layer, indices])

    @property
    def chosen(self) -> dict[str, Any]:
        """The layer."""
        return {"layers": [self._layer]} if self._network else {}


def _logits(network: list[np.ndarray], x: np.ndarray) -> np.ndarray:
    """Return the logits of the network; NaN for rows with NaN or infinite values."""
    finite = np.isfinite(x).all(1)
    h = (x[finite] - network[0]) / network[1]
    for k in range(2, len(network), 2):
        h = (np.maximum(h, 0) if k > 2 else h) @ network[k] + network[k + 1]
    out = np.full(len(x), np.nan)
    out[finite] = h[:, 0]
    return out
