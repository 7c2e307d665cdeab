"""Logistic regressions on features of the attention maps of all layers and heads."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np

from tracestore.detectors.logistic import Linear, fit_linear
from tracestore.detectors.published.linear import INNER_BINS, Fitted, choose
from tracestore.detectors.published.probes import usable
from tracestore.evaluation.store_split import inner_bins
from tracestore.features.feature_table import DEFAULT_TOP_K, features
from tracestore.store.read.store import TraceStore

# Columns beyond which a principal component analysis reduces them.
_MAX_COLUMNS = 512
_GRID = (0.001, 0.01, 0.1, 1.0, 10.0)


@dataclass
class MapRegression(Fitted):
    """Base of logistic regressions on features of all attention maps."""

    _model: Linear | None = field(default=None, init=False, repr=False)
    _components: np.ndarray | None = field(default=None, init=False, repr=False)
    _c: float = field(default=0.0, init=False, repr=False)
    _num_heads: int = field(default=0, init=False, repr=False)

    fields: ClassVar[tuple[str, ...]] = ("attention", "answer")

    # The feature of the maps, and its number of eigenvalues.
    feature = ""
    top_k = DEFAULT_TOP_K

    def _columns(self, store: TraceStore, indices: np.ndarray) -> np.ndarray:
        """Return the features ``(n, columns)`` float64."""
        found: np.ndarray = features(store, "attention", top_k=self.top_k)[self.feature][indices]
        return found.reshape(len(indices), -1)

    def fit(self, store: TraceStore, indices: np.ndarray, labels: np.ndarray) -> Self:
        """Fit principal components, if there are many columns, and the regression, whose C cross-validation chooses."""
        x, self._num_heads = self._columns(store, indices), store.num_stored_heads
        kept = usable(labels, np.isfinite(x).all(1), "features of the attention")
        x, y = x[kept], labels[kept]
        self._components = None
        if x.shape[1] > _MAX_COLUMNS:
            from sklearn.decomposition import PCA

            count = min(_MAX_COLUMNS, len(x))
            self._components = PCA(count, svd_solver="full").fit(x).components_.T
            x = x @ self._components
        bins = inner_bins(store, indices[kept], y, INNER_BINS, self.seed, self.keep_together)
        _, self._c = choose(lambda _: x, [0], y, bins, _GRID)
        self._model = fit_linear(x, y, self._c)
        return self

    def score(self, store: TraceStore, indices: np.ndarray) -> np.ndarray:
        """Return logits."""
        assert self._model is not None, "fit() comes first"
        x = self._columns(store, indices)
        return self._model.logits(x if self._components is None else x @ self._components)

    @property
    def chosen(self) -> dict[str, Any]:
        """The inverse regularization."""
        return {} if self._model is None else {"C": self._c}


@dataclass
class LookbackLens(MapRegression):
    """Lookback Lens: logistic regression on the lookback ratio of every layer and head, averaged over the answer.

    The ratio of a token is c / (c + n), with the mean weights c of the prompt and n of the answer up to the token. The
    head mean counts as one head where no other attention is stored.
    """

    cost: ClassVar[str] = "a sum over the attention of the answer"
    reference: ClassVar[str] = "Chuang et al. 2024, arXiv:2407.07071 (lookback ratio)"

    feature = "lookback"


@dataclass
class LapEigvals(MapRegression):
    """LapEigvals: logistic regression on the largest Laplacian eigenvalues of every attention map.

    Beyond 512 columns, principal components of the training traces reduce them to 512.

    Parameters
    ----------
    top_k : int
        Eigenvalues of each map.
    """

    top_k: int = DEFAULT_TOP_K

    fields: ClassVar[tuple[str, ...]] = ("attention",)
    cost: ClassVar[str] = "a sum over the attention of all tokens"
    reference: ClassVar[str] = "Binkowski et al. 2025, arXiv:2502.17598 (Laplacian D - A, d_ii = sum_u a_ui / (S - i))"
    feature = "laplacian"


@dataclass
class LogdetRegression(MapRegression):
    """Logistic regression on the hidden and attention scores of LLM-Check of every layer and head."""

    fields: ClassVar[tuple[str, ...]] = ("hidden_states", "attention", "answer")
    cost: ClassVar[str] = "L Gram matrices, and a sum over the diagonals"
    reference: ClassVar[str] = "scores: Sriramanan et al. 2024, LLM-Check, NeurIPS"
    feature = "attention_logdet"

    def _columns(self, store: TraceStore, indices: np.ndarray) -> np.ndarray:
        states = features(store, "hidden")["hidden_logdet"][indices]
        return np.concatenate([states, super()._columns(store, indices)], axis=1)
