"""Logistic regression with an L2 penalty on standardised columns, by Newton's method."""

from dataclasses import dataclass

import numpy as np
import torch

_MAX_STEPS = 100
_MAX_PRODUCTS = 500
# Rows whose deviations are looked at together, as float64.
_ROWS = 4096


@dataclass(frozen=True)
class Logistic:
    """Weights (D,) of standardised columns, intercept, and each column's mean and scale (D,)."""

    weight: torch.Tensor
    intercept: float
    mean: np.ndarray
    scale: np.ndarray

    def logits(self, x: np.ndarray) -> np.ndarray:
        """(n, D) float32 -> (n,) float64."""
        logits: np.ndarray = (_standardised(x, self.mean, self.scale) @ self.weight).double().numpy()
        return logits + self.intercept


def _standardised(x: np.ndarray, mean: np.ndarray, scale: np.ndarray) -> torch.Tensor:
    z = np.empty(x.shape, np.float32)
    np.subtract(x, mean, out=z, casting="same_kind")
    np.divide(z, scale, out=z, casting="same_kind")
    return torch.from_numpy(z)


def _mean_and_scale(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each column, float64; scale 1 where a column is constant."""
    n = len(x)
    mean = x.mean(axis=0, dtype=np.float64)
    variance = np.zeros(x.shape[1])
    for begin in range(0, n, _ROWS):
        variance += np.square(x[begin : begin + _ROWS] - mean).sum(axis=0)
    variance /= n
    eps = np.finfo(np.float64).eps
    is_constant = variance <= n * eps * variance + np.square(n * mean * eps)
    return mean, np.where(is_constant, 1.0, np.sqrt(variance))


def fit_logistic(x: np.ndarray, y: np.ndarray, inverse_regularization: float) -> Logistic:
    """Return the minimum of |w|^2 / 2 + C sum_i log(1 + exp(-s_i (w z_i + b))).

    Each Newton step is solved by conjugate gradients, which read the rows but make no (D, D) matrix.

    Parameters
    ----------
    x : (n, D) float32, finite
    y : (n,) 0 or 1, of which s is -1 or 1
    inverse_regularization : C
    """
    mean, scale = _mean_and_scale(x)
    z, target, c = _standardised(x, mean, scale), torch.from_numpy(y).double(), inverse_regularization

    # A vector holds w and, behind it, b. Products with z are float32, everything else float64.
    def forward(v: torch.Tensor) -> torch.Tensor:
        return (z @ v[:-1].float()).double() + v[-1]

    def backward(r: torch.Tensor) -> torch.Tensor:
        return torch.cat([(r.float() @ z).double(), r.sum()[None]])

    def penalty(v: torch.Tensor) -> torch.Tensor:
        return torch.cat([v[:-1], v.new_zeros(1)])

    def objective(v: torch.Tensor, logits: torch.Tensor) -> float:
        # By numpy: torch's cross-entropy wakes all threads for a handful of values.
        losses = np.logaddexp(0, logits.numpy()) - y * logits.numpy()
        return float(v[:-1].square().sum() / 2) + c * float(losses.sum())

    at = torch.zeros(x.shape[1] + 1, dtype=torch.float64)
    logits = forward(at)
    value = objective(at, logits)
    for _ in range(_MAX_STEPS):
        p = torch.sigmoid(logits)
        gradient = penalty(at) + c * backward(p - target)
        curvature = c * p * (1 - p)
        step, product, residual = torch.zeros_like(at), torch.zeros_like(logits), -gradient
        direction, size = residual, float(residual @ residual)
        enough = 1e-4 * size
        for _ in range(_MAX_PRODUCTS):
            along = forward(direction)
            bent = penalty(direction) + backward(curvature * along)
            rate = size / float(direction @ bent)
            step, product, residual = step + rate * direction, product + rate * along, residual - rate * bent
            size, before = float(residual @ residual), size
            if size <= enough:
                break
            direction = residual + size / before * direction
        gain, length = -float(gradient @ step), 1.0
        # Half the step until the value falls by a part of what the slope promises (Armijo 1966).
        while length > 1e-6 and objective(at + length * step, logits + length * product) > value - 1e-4 * length * gain:
            length /= 2
        if length <= 1e-6 or gain <= 1e-10 * value:
            break
        at = at + length * step
        logits = forward(at)
        value = objective(at, logits)
    return Logistic(at[:-1].float(), float(at[-1]), mean, scale)
