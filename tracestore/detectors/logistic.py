"""Logistic regression with an L2 penalty on standardized columns."""

from dataclasses import dataclass

import numpy as np
import torch

_MAX_NEWTON_STEPS = 100
_MAX_CG_STEPS = 500


@dataclass(frozen=True)
class Logistic:
    """A fitted logistic regression.

    Parameters
    ----------
    weight : torch.Tensor
        ``(D,)`` float32, weights of the standardized columns.
    intercept : float
    mean, scale : torch.Tensor
        ``(D,)`` float32, mean and scale of each column.
    """

    weight: torch.Tensor
    intercept: float
    mean: torch.Tensor
    scale: torch.Tensor

    def logits(self, x: np.ndarray) -> np.ndarray:
        """Return the logits ``(n,)`` float64 of the rows x ``(n, D)`` float32."""
        logits: np.ndarray = (_standardize(x, self.mean, self.scale) @ self.weight).double().numpy()
        return logits + self.intercept


def _standardize(x: np.ndarray, mean: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (torch.from_numpy(x) - mean).div_(scale)


def fit_logistic(x: np.ndarray, y: np.ndarray, inverse_regularization: float) -> Logistic:
    """Return the minimum of |w|^2 / 2 + C sum_i log(1 + exp(-s_i (w z_i + b))).

    Here z is x with standardized columns, and s_i is 1 where y_i is 1, else -1. Newton's method
    with a truncated conjugate-gradient solver reads the rows but builds no (D, D) matrix.

    Parameters
    ----------
    x : np.ndarray
        ``(n, D)`` float32, finite.
    y : np.ndarray
        ``(n,)``, 0 or 1.
    inverse_regularization : float
        C.

    References
    ----------
    Nocedal and Wright 2006, "Numerical Optimization", algorithm 7.1 (line search Newton-CG) and
    equation 3.4 (Armijo's condition of sufficient decrease).
    """
    variance, mean = torch.var_mean(torch.from_numpy(x), dim=0, correction=0)
    scale = torch.where(variance > 0, variance.sqrt(), 1.0)  # a constant column is all zeros
    z, target, c = _standardize(x, mean, scale), torch.from_numpy(y).double(), inverse_regularization

    # A vector holds w followed by b. Products with z are float32, everything else is float64.
    def forward(v: torch.Tensor) -> torch.Tensor:
        return (z @ v[:-1].float()).double() + v[-1]

    def backward(r: torch.Tensor) -> torch.Tensor:
        return torch.cat([(r.float() @ z).double(), r.sum()[None]])

    def penalty(v: torch.Tensor) -> torch.Tensor:
        return torch.cat([v[:-1], v.new_zeros(1)])

    def objective(v: torch.Tensor, logits: torch.Tensor) -> float:
        # numpy, because torch's cross-entropy starts all threads for a handful of values.
        losses = np.logaddexp(0, logits.numpy()) - y * logits.numpy()
        return float(v[:-1].square().sum() / 2) + c * float(losses.sum())

    parameters = torch.zeros(x.shape[1] + 1, dtype=torch.float64)
    logits = forward(parameters)
    value = objective(parameters, logits)
    for _ in range(_MAX_NEWTON_STEPS):
        p = torch.sigmoid(logits)
        gradient = penalty(parameters) + c * backward(p - target)
        curvature = c * p * (1 - p)
        # Conjugate gradients for Hessian @ step = -gradient; step_logits follows as forward(step).
        step, step_logits, residual = torch.zeros_like(parameters), torch.zeros_like(logits), -gradient
        direction, norm = residual, float(residual @ residual)
        tolerance = 1e-4 * norm
        for _ in range(_MAX_CG_STEPS):
            direction_logits = forward(direction)
            product = penalty(direction) + backward(curvature * direction_logits)
            rate = norm / float(direction @ product)
            step, step_logits = step + rate * direction, step_logits + rate * direction_logits
            residual = residual - rate * product
            norm, previous = float(residual @ residual), norm
            if norm <= tolerance:
                break
            direction = residual + norm / previous * direction
        decrease, length = -float(gradient @ step), 1.0
        # Halve the step until the objective decreases by a fraction of what the slope predicts.
        while (
            length > 1e-6
            and objective(parameters + length * step, logits + length * step_logits) > value - 1e-4 * length * decrease
        ):
            length /= 2
        if length <= 1e-6 or decrease <= 1e-10 * value:
            break
        parameters = parameters + length * step
        logits = forward(parameters)
        value = objective(parameters, logits)
    return Logistic(parameters[:-1].float(), float(parameters[-1]), mean, scale)
