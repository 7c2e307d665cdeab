"""HaloScope: a probe that learns from unlabeled traces, whose classes a subspace of their states estimates."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np

from tracestore.detectors.logistic import Linear, fit_linear
from tracestore.detectors.published.linear import FIRST_C, Fitted, candidate
from tracestore.detectors.published.probes import finite_last_tokens, usable
from tracestore.errors import TrainingError
from tracestore.evaluation.metrics import auroc
from tracestore.evaluation.store_split import inner_bins
from tracestore.features.feature_table import features
from tracestore.store.read.store import TraceStore

# One in so many training questions is labeled; the labels of the others are not read.
LABELED_BINS = 4
# Candidates of the share of the unlabeled traces that counts as correct.
QUANTILES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass
class HaloScope(Fitted):
    """HaloScope: a probe of classes that a subspace of unlabeled states estimates.

    With the last tokens' states f_i of one layer, centered on the unlabeled traces, and the largest singular values s_j
    and right singular vectors v_j of those, the membership score is zeta_i = (1/k) sum_j s_j (f_i v_j)^2, j = 1 to k.
    Unlabeled traces with a score above a threshold count as hallucinations, the others as correct, and a logistic
    regression learns these classes. (The paper trains a network of 1,024 hidden units.) Three quarters of the training
    questions are unlabeled. The labels of the others choose the layer, k and the sign of the score with the largest
    AUROC of zeta, then the threshold with the largest AUROC of the regression.

    Parameters
    ----------
    max_components : int
        Largest k.
    """

    max_components: int = 10
    _model: Linear | None = field(default=None, init=False, repr=False)
    _layer: int = field(default=0, init=False, repr=False)
    _components: int = field(default=0, init=False, repr=False)
    _sign: int = field(default=1, init=False, repr=False)
    _quantile: float = field(default=0.0, init=False, repr=False)

    fields: ClassVar[tuple[str, ...]] = ("last_token",)
    layers: ClassVar[str] = "one, chosen on labels of a quarter of the training questions"
    gives_logits: ClassVar[bool] = False
    cost: ClassVar[str] = "one product of D values"
    reference: ClassVar[str] = "Du et al. 2024, arXiv:2409.17504 (membership score zeta)"

    def fit(self, store: TraceStore, indices: np.ndarray, labels: np.ndarray) -> Self:
        """Choose layer, components, sign and threshold by the labeled traces, and fit the probe to the unlabeled ones."""
        states = features(store, "last")["last"]
        rows, y = finite_last_tokens(store, indices, labels)
        is_labeled = inner_bins(store, rows, y, LABELED_BINS, self.seed, self.keep_together) == 0
        labeled = usable(y, is_labeled, "a label for the choice of layer and threshold")
        unlabeled = np.flatnonzero(~is_labeled)

        best, zeta = -1.0, np.zeros(len(rows))
        for layer in range(store.num_layers):
            scores = membership_scores(states[layer, rows], unlabeled, self.max_components)
            for k, column in enumerate(scores.T):
                value = auroc(y[labeled], column[labeled])
                if abs(value - 0.5) > best:
                    best, self._layer, self._components = abs(value - 0.5), layer, k + 1
                    self._sign = 1 if value >= 0.5 else -1
                    zeta = self._sign * column

        x, best = states[self._layer, rows], -1.0
        classes = np.zeros(len(unlabeled))
        for quantile in QUANTILES:
            estimated = (zeta[unlabeled] > np.quantile(zeta[unlabeled], quantile)).astype(int)
            if not 0 < estimated.sum() < len(estimated):
                continue
            value = auroc(y[labeled], candidate(FIRST_C)(x[unlabeled], estimated)(x[labeled]))
            if value > best:
                best, self._quantile, classes = value, quantile, estimated
        if best < 0:
            raise TrainingError("the membership scores of all traces are equal, so that no threshold separates them")
        self._model = fit_linear(x[unlabeled], classes, FIRST_C)
        return self

    def score(self, store: TraceStore, indices: np.ndarray) -> np.ndarray:
        """Return logits of the estimated classes."""
        assert self._model is not None, "fit() comes first"
        return self._model.logits(features(store, "last")["last"][self._layer, indices])

    @property
    def chosen(self) -> dict[str, Any]:
        """The layer, the number of components, the sign, and the share of the traces below the threshold."""
        if self._model is None:
            return {}
        return {
            "layers": [self._layer],
            "components": self._components,
            "sign": self._sign,
            "quantile": self._quantile,
        }


def membership_scores(x: np.ndarray, unlabeled: np.ndarray, max_components: int) -> np.ndarray:
    """Return the membership scores of states for 1 to `max_components` components.

    Parameters
    ----------
    x : np.ndarray
        ``(n, D)``, finite.
    unlabeled : np.ndarray
        Positions of the rows that the mean and the singular vectors come from.
    max_components : int
        At most one less than the rows and columns are used.

    Returns
    -------
    np.ndarray
        ``(n, k)`` float64.
    """
    from sklearn.decomposition import PCA

    x = x.astype(np.float64)
    count = min(max_components, len(unlabeled) - 1, x.shape[1] - 1)
    if count < 1:
        raise TrainingError("HaloScope needs two unlabeled traces and two columns")
    if not np.ptp(x[unlabeled], axis=0).any():
        return np.zeros((len(x), count))
    pca = PCA(count, svd_solver="arpack", random_state=0).fit(x[unlabeled])
    weighted = pca.transform(x) ** 2 * pca.singular_values_
    scores: np.ndarray = np.cumsum(weighted, axis=1) / np.arange(1, count + 1)
    return scores
