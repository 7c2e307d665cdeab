"""Logistic regression with an L2 penalty on standardized columns."""

from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Linear:
    """A logistic regression on standardized columns: logit = ((x - mean) / scale) @ weight + intercept.

    Attributes
    ----------
    mean, scale, weight : np.ndarray
        ``(D,)``.
    intercept : float
    """

    mean: np.ndarray
    scale: np.ndarray
    weight: np.ndarray
    intercept: float

    def logits(self, x: np.ndarray) -> np.ndarray:
        """Return the logits ``(n,)`` float64 of rows ``(n, D)``; NaN for rows with NaN or infinite values."""
        finite = np.isfinite(x).all(1)
        out = np.full(len(x), np.nan)
        out[finite] = (x[finite] - self.mean) / self.scale @ self.weight + self.intercept
        return out


def fit_linear(
    x: np.ndarray,
    y: np.ndarray,
    c: float,
    *,
    tol: float = 1e-7,
    is_wide: bool = True,
    solver: Literal["lbfgs", "newton-cg"] = "lbfgs",
) -> Linear:
    """Fit scikit-learn's logistic regression with an L2 penalty to standardized columns.

    Parameters
    ----------
    x : np.ndarray
        ``(n, D)``, finite.
    y : np.ndarray
        ``(n,)``, 0 or 1.
    c : float
        Inverse of the regularization strength.
    tol : float
        Largest gradient at the end.
    is_wide : bool
        Compute in float64. False: in the dtype of x, which "newton-cg" suffers less from.
    solver : {"lbfgs", "newton-cg"}
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    x = x.astype(np.float64) if is_wide else x
    scaler = StandardScaler().fit(x)
    model = LogisticRegression(C=c, max_iter=2000, tol=tol, solver=solver).fit(scaler.transform(x), y)
    return Linear(scaler.mean_, scaler.scale_, model.coef_[0].astype(np.float64), float(model.intercept_[0]))
