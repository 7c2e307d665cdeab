"""Linear probes on hidden states."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

import numpy as np

from tracestore.detectors.logistic import Linear, fit_linear
from tracestore.detectors.published.linear import INNER_BINS, Fitted, candidate, choose, cross_fitted
from tracestore.errors import TrainingError
from tracestore.evaluation.store_split import inner_bins
from tracestore.features.feature_table import features
from tracestore.features.trace_features import STATISTICS
from tracestore.store.read.store import TraceStore

Pooling = Literal["last", "prompt_last", "answer_mean", "answer_max"]


def layer_inputs(store: TraceStore, pooling: Pooling) -> np.ndarray:
    """Return the states ``(L, N, D)`` float32 of a pooling."""
    return features(store, "last" if pooling == "last" else "hidden")[pooling]


def usable(y: np.ndarray, is_present: np.ndarray, what: str) -> np.ndarray:
    """Return the positions of the traces that have a feature. TrainingError unless both classes are among them."""
    kept = np.flatnonzero(is_present)
    if not 0 < y[kept].sum() < len(kept):
        raise TrainingError(f"{len(kept)} of {len(y)} training traces have {what}, and not of both classes")
    return kept


def finite_last_tokens(store: TraceStore, indices: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the traces without NaN or infinite values in their last tokens, and their labels."""
    states = features(store, "last")["last"]
    kept = usable(labels, np.array([np.isfinite(states[:, k]).all() for k in indices]), "finite last tokens")
    return indices[kept], labels[kept]


@dataclass
class LayerProbe(Fitted):
    """Logistic regression on the hidden states of one layer, or the mean logit of those of several layers.

    Parameters
    ----------
    pooling : {"last", "prompt_last", "answer_mean", "answer_max"}
        Last token; last token of the prompt; mean or maximum over the tokens of the answer.
    num_layers : int, optional
        The best so many layers. None: all.
    """

    pooling: Pooling = "answer_mean"
    num_layers: int | None = 1
    _models: list[Linear] = field(default_factory=list, init=False, repr=False)
    _layers: list[int] = field(default_factory=list, init=False, repr=False)
    _c: float = field(default=0.0, init=False, repr=False)

    reference: ClassVar[str] = "Alain and Bengio 2017, arXiv:1610.01644"

    def __post_init__(self) -> None:
        # The last token of the prompt is known before there is an answer.
        self.kind = "control" if self.pooling == "prompt_last" else "trained"  # type: ignore[misc]
        self.fields = ("last_token",) if self.pooling == "last" else ("hidden_states", "answer")  # type: ignore[misc]
        is_all = self.num_layers is None
        self.layers = "all" if is_all else f"{self.num_layers}, chosen by cross-validation"  # type: ignore[misc]
        self.cost = f"{'L' if is_all else self.num_layers} x a product of D values"  # type: ignore[misc]

    def fit(self, store: TraceStore, indices: np.ndarray, labels: np.ndarray) -> Self:
        """Choose layers and regularization by cross-validation on the traces, then fit to all of them."""
        states = layer_inputs(store, self.pooling)
        kept = usable(labels, ~np.isnan(states[:, indices, 0]).all(0), f"states for {self.pooling}")
        rows, y = indices[kept], labels[kept]
        bins = inner_bins(store, rows, y, INNER_BINS, self.seed, self.keep_together)
        ranked, self._c = choose(lambda layer: states[layer, rows], range(store.num_layers), y, bins)
        self._layers = ranked[: self.num_layers]
        self._models = [fit_linear(states[layer, rows], y, self._c) for layer in self._layers]
        return self

    def score(self, store: TraceStore, indices: np.ndarray) -> np.ndarray:
        """Return logits, the mean over the layers."""
        assert self._models, "fit() comes first"
        states = layer_inputs(store, self.pooling)
        logits = [model.logits(states[k, indices]) for k, model in zip(self._layers, self._models, strict=True)]
        mean: np.ndarray = np.mean(logits, axis=0)
        return mean

    @property
    def chosen(self) -> dict[str, Any]:
        """The layers, the best first, and the inverse regularization."""
        return {"layers": self._layers, "C": self._c} if self._models else {}


@dataclass
class ProbeAndLogprob(LayerProbe):
    """Logistic regression on the logit of LayerProbe and the mean log-probability of the answer.

    The logits for this regression come from cross-validation on the training traces.
    """

    _stack: Linear | None = field(default=None, init=False, repr=False)

    reference: ClassVar[str] = "stacking: Wolpert 1992, Neural Networks 5"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kind, self.fields = "trained", (*self.fields, "token_logprob")  # type: ignore[misc]

    def fit(self, store: TraceStore, indices: np.ndarray, labels: np.ndarray) -> Self:
        """Fit the probe, then the regression on its cross-fitted logits and the log-probabilities."""
        super().fit(store, indices, labels)
        states, logprob = layer_inputs(store, self.pooling)[self._layers], mean_logprob(store)
        is_finite = np.isfinite(states[:, indices]).all((0, 2))
        kept = usable(labels, is_finite & np.isfinite(logprob[indices]), "finite log-probabilities")
        rows, y = indices[kept], labels[kept]
        bins = inner_bins(store, rows, y, INNER_BINS, self.seed, self.keep_together)
        logits = np.mean([cross_fitted(layer[rows], y, bins, candidate(self._c)) for layer in states], axis=0)
        both = np.stack([logits, logprob[rows]], axis=1)[~np.isnan(logits)]
        self._stack = fit_linear(both, y[~np.isnan(logits)], 1.0)
        return self

    def score(self, store: TraceStore, indices: np.ndarray) -> np.ndarray:
        """Return logits."""
        assert self._stack is not None, "fit() comes first"
        both = np.stack([super().score(store, indices), mean_logprob(store)[indices]], axis=1)
        return self._stack.logits(both)

    @property
    def chosen(self) -> dict[str, Any]:
        """The choices of the probe, and the weights of its standardized logit and the log-probability."""
        return super().chosen | ({} if self._stack is None else {"weights": self._stack.weight.tolist()})


def mean_logprob(store: TraceStore) -> np.ndarray:
    """Return the mean log-probability ``(N,)`` float64 of the answer of each trace, NaN where it is unknown."""
    column: np.ndarray = features(store, "tokens")["tokens"][:, STATISTICS.index("mean_logprob")]
    return column
