"""Choice of layer and regularization of logistic regressions inside of the training split."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Self

import numpy as np

from tracestore.detectors.interface import Detector, Kind
from tracestore.detectors.logistic import Linear, fit_linear
from tracestore.errors import MissingFieldError, TrainingError
from tracestore.evaluation.metrics import auroc
from tracestore.store.read.store import TraceStore

# Candidates of the inverse regularization C, and the one with which layers are compared.
GRID = (0.0003, 0.001, 0.003, 0.01, 0.1)
FIRST_C = 0.003
# Largest gradient of a regression that is compared with others.
_CANDIDATE_TOL = 1e-2
# Bins of the cross-validation inside of the training split.
INNER_BINS = 3
# Fits a model to rows and labels, and returns the function that gives its logits for rows.
Fit = Callable[[np.ndarray, np.ndarray], Callable[[np.ndarray], np.ndarray]]


class Fitted(Detector):
    """Base of detectors whose fitted values are the private fields of a dataclass: plain values, arrays and `Linear`."""

    source: ClassVar[str] = "by formula"

    def check(self, store: TraceStore) -> None:
        """Check that a store has the fields and, for features of each head, the heads of the store of `fit`."""
        super().check(store)
        heads, found = getattr(self, "_num_heads", 0), store.num_stored_heads
        if heads not in (0, found):
            raise MissingFieldError(
                f"{store.path}: fitted to attention of {heads} heads (a mean is one), found {found}"
            )

    def state(self) -> dict[str, Any]:
        """Return the fitted values by name."""
        return {f.name: _encode(getattr(self, f.name)) for f in fields(self) if not f.init}  # type: ignore[arg-type]

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the fitted values."""
        names = [f.name for f in fields(self) if not f.init]  # type: ignore[arg-type]
        if sorted(names) != sorted(state):
            raise ValueError("other names")
        for name in names:
            setattr(self, name, _decode(state[name]))


class Unfitted(Fitted):
    """Base of scores that nothing is fitted for."""

    kind: ClassVar[Kind] = "untrained"
    layers: ClassVar[str] = "none"
    gives_logits: ClassVar[bool] = False

    def fit(self, store: TraceStore, indices: np.ndarray, labels: np.ndarray) -> Self:
        """Return the detector unchanged."""
        return self


def _encode(value: Any) -> Any:
    if isinstance(value, Linear):
        return {"linear": [value.mean, value.scale, value.weight, value.intercept]}
    return [_encode(item) for item in value] if isinstance(value, list) else value


def _decode(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"linear"}:
        mean, scale, weight, intercept = value["linear"]
        if not mean.shape == scale.shape == weight.shape == (len(weight),):
            raise ValueError("other shapes")
        return Linear(mean, scale, weight, float(intercept))
    return [_decode(item) for item in value] if isinstance(value, list) else value


def choose(
    inputs: Callable[[int], np.ndarray],
    layers: Sequence[int],
    y: np.ndarray,
    bins: np.ndarray,
    grid: Sequence[float] = GRID,
) -> tuple[list[int], float]:
    """Return the layers, the best first, and the C with the best mean AUROC of a cross-validation.

    The layers are compared with one C, then the values of C for the best layer.

    Layers with NaN or infinite values are left out. Of equal values the first one counts.

    Parameters
    ----------
    inputs : callable
        Returns the rows ``(n, D)`` of a layer.
    layers : sequence of int
    y : np.ndarray
        ``(n,)``, 0 or 1.
    bins : np.ndarray
        ``(n,)``, the bin of each row; see `inner_bins`.
    grid : sequence of float
        Candidates of C.

    Raises
    ------
    TrainingError
        If every layer has NaN or infinite values, or no bin can be tested.
    """
    first = FIRST_C if FIRST_C in grid else grid[len(grid) // 2]
    by_layer = {}
    for layer in layers:
        x = inputs(layer)
        if np.isfinite(x).all():
            by_layer[layer] = cross_validated(x, y, bins, candidate(first)) if len(layers) > 1 else 0.0
    if not by_layer:
        raise TrainingError("no layer without NaN or infinite values; --drop-nonfinite leaves the traces out")
    ranked = sorted(by_layer, key=lambda k: (-by_layer[k], k))
    x = inputs(ranked[0])
    by_c = {c: cross_validated(x, y, bins, candidate(c)) for c in grid}
    return ranked, max(grid, key=lambda c: by_c[c])


def cross_fitted(x: np.ndarray, y: np.ndarray, bins: np.ndarray, fit: Fit) -> np.ndarray:
    """Return the logit ``(n,)`` of each row from the model of the other bins, NaN if those lack a class.

    Raises
    ------
    TrainingError
        If there is no logit.
    """
    out = np.full(len(x), np.nan)
    for b in np.unique(bins):
        inside = bins == b
        if 0 < y[~inside].sum() < (~inside).sum():
            out[inside] = fit(x[~inside], y[~inside])(x[inside])
    if np.isnan(out).all():
        raise TrainingError("too few traces of a class for a choice inside of the training split")
    return out


def cross_validated(x: np.ndarray, y: np.ndarray, bins: np.ndarray, fit: Fit) -> float:
    """Return the mean AUROC over the bins of `cross_fitted`."""
    logits = cross_fitted(x, y, bins, fit)
    tested = np.unique(bins[~np.isnan(logits)])
    values = np.array([auroc(y[bins == b], logits[bins == b]) for b in tested])
    return float(values[~np.isnan(values)].mean()) if not np.isnan(values).all() else np.nan


def candidate(c: float) -> Fit:
    """Return how regressions with an inverse regularization are fitted to compare candidates."""
    return lambda x, y: fit_linear(x, y, c, tol=_CANDIDATE_TOL, is_wide=False).logits
