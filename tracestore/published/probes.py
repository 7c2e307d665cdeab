"""Linear probes on hidden states."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

import numpy as np

from tracestore.errors import TrainingError
from tracestore.evaluation.split import inner_bins
from tracestore.features.table import features
from tracestore.features.tokens import STATISTICS
from tracestore.published.linear import INNER_BINS, Fitted, Linear, choose, cross_fitted_logits, fit_linear
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


@dataclass
class LayerProbe(Fitted):
    """Logistic regression on the hidden states of one layer.

    Parameters
    ----------
    pooling : {"last", "prompt_last", "answer_mean", "answer_max"}
        Last token; last token of the prompt; mean or maximum over the tokens of the answer.
    """

    pooling: Pooling = "answer_mean"
    _model: Linear | None = field(default=None, init=False, repr=False)
    _layer: int = field(default=0, init=False, repr=False)
    _c: float = field(default=0.0, init=False, repr=False)

    layers: ClassVar[str] = "one, chosen by cross-validation"
    cost: ClassVar[str] = "one product of D values"
    reference: ClassVar[str] = "Alain and Bengio 2017, arXiv:1610.01644"
    source: ClassVar[str] = "by formula"

    @property
    def kind(self) -> Any:  # type: ignore[override]
        """Control for the prompt's last token, which is known before there is an answer."""
        return "control" if self.pooling == "prompt_last" else "trained"

    @property
    def fields(self) -> tuple[str, ...]:  # type: ignore[override]
        """The fields of the pooling."""
        return ("last_token",) if self.pooling == "last" else ("hidden_states", "answer")

    def fit(self, store: TraceStore, indices: np.ndarray, labels: np.ndarray) -> Self:
        """Choose layer and regularization by cross-validation on the traces, then fit to all of them."""
        states = layer_inputs(store, self.pooling)
        kept = usable(labels, ~np.isnan(states[:, indices, 0]).all(0), f"states for {self.pooling}")
        rows, y = indices[kept], labels[kept]
        bins = inner_bins(store, rows, y, INNER_BINS, self.seed, self.keep_together)
        self._layer, self._c = choose(lambda layer: states[layer, rows], range(store.num_layers), y, bins)
        self._model = fit_linear(states[self._layer, rows], y, self._c)
        return self

    def score(self, store: TraceStore, indices: np.ndarray) -> np.ndarray:
        """Return logits."""
        assert self._model is not None, "fit() comes first"
        return self._model.logits(layer_inputs(store, self.pooling)[self._layer, indices])

    @property
    def chosen(self) -> dict[str, Any]:
        """The layer and the inverse regularization."""
        return {} if self._model is None else {"layers": [self._layer], "C": self._c}


@dataclass
class ProbeAndLogprob(LayerProbe):
    """Logistic regression on a probe's logit and the mean log-probability of the answer.

    The probe's logits for this regression come from cross-validation on the training traces.
    """

    _stack: Linear | None = field(default=None, init=False, repr=False)

    cost: ClassVar[str] = "one product of D values, if log-probabilities are stored"
    reference: ClassVar[str] = "stacking: Wolpert 1992, Neural Networks 5"

    @property
    def kind(self) -> Any:  # type: ignore[override]
        """Always trained."""
        return "trained"

    @property
    def fields(self) -> tuple[str, ...]:  # type: ignore[override]
        """Fields of the probe, and log-probabilities."""
        return (*super().fields, "token_logprob")

    def fit(self, store: TraceStore, indices: np.ndarray, labels: np.ndarray) -> Self:
        """Fit the probe, then the regression on its cross-fitted logits and the log-probabilities."""
        super().fit(store, indices, labels)
        states, logprob = layer_inputs(store, self.pooling)[self._layer], mean_logprob(store)
        kept = usable(labels, np.isfinite(states[indices]).all(1) & ~np.isnan(logprob[indices]), "log-probabilities")
        rows, y = indices[kept], labels[kept]
        bins = inner_bins(store, rows, y, INNER_BINS, self.seed, self.keep_together)
        logits = cross_fitted_logits(states[rows], y, bins, self._c)
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


@dataclass
class ProbeEnsemble(Fitted):
    """Mean logit of the logistic regressions of all layers.

    Parameters
    ----------
    pooling : {"last", "prompt_last", "answer_mean", "answer_max"}
        See LayerProbe.
    """

    pooling: Pooling = "answer_mean"
    _models: list[Linear] = field(default_factory=list, init=False, repr=False)
    _layers: list[int] = field(default_factory=list, init=False, repr=False)
    _c: float = field(default=0.0, init=False, repr=False)

    fields: ClassVar[tuple[str, ...]] = ("last_token", "hidden_states", "answer")
    cost: ClassVar[str] = "L products of D values"
    reference: ClassVar[str] = "Alain and Bengio 2017, arXiv:1610.01644, averaged"
    source: ClassVar[str] = "by formula"

    def fit(self, store: TraceStore, indices: np.ndarray, labels: np.ndarray) -> Self:
        """Choose the regularization for the best layer, and fit every layer with it."""
        states = layer_inputs(store, self.pooling)
        kept = usable(labels, ~np.isnan(states[:, indices, 0]).all(0), f"states for {self.pooling}")
        rows, y = indices[kept], labels[kept]
        bins = inner_bins(store, rows, y, INNER_BINS, self.seed, self.keep_together)
        middle = store.num_layers // 2
        _, self._c = choose(lambda layer: states[layer, rows], [middle], y, bins)
        finite = [k for k in range(store.num_layers) if np.isfinite(states[k, rows]).all()]
        self._layers, self._models = finite, [fit_linear(states[k, rows], y, self._c) for k in finite]
        return self

    def score(self, store: TraceStore, indices: np.ndarray) -> np.ndarray:
        """Return the mean of the logits."""
        states = layer_inputs(store, self.pooling)
        logits = [model.logits(states[k, indices]) for k, model in zip(self._layers, self._models, strict=True)]
        mean: np.ndarray = np.mean(logits, axis=0)
        return mean

    @property
    def chosen(self) -> dict[str, Any]:
        """The layers without infinite values, and the inverse regularization."""
        return {"layers": self._layers, "C": self._c} if self._models else {}
