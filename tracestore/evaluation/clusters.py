"""Intervals and paired tests by question and by group.

By question, and with at least 100 groups: the bootstrap. With fewer groups, whose percentile intervals are too short,
a delete-one-group jackknife with Student's t.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from tracestore.evaluation.evaluate import BootstrapResampler, RunScores
from tracestore.evaluation.metrics import LEVEL, percentile_interval
from tracestore.evaluation.significance import adjust

# With fewer groups there is a jackknife instead of a bootstrap, and below the second number neither.
BOOTSTRAP_GROUPS, MIN_GROUPS = 100, 5
UNITS = ("question", "group")


class Resampling:
    """AUROC of one detector, and its resamples by question or by group.

    Attributes
    ----------
    estimate : float
    method : {"bootstrap", "jackknife"} or None
        None: too few questions or groups, `reason` tells how many.
    values : np.ndarray
        AUROC of each resample. Those of two detectors on the same traces are paired.
    """

    def __init__(self, runs: Sequence[RunScores], unit: str, seed: int) -> None:
        resampler = BootstrapResampler(runs, seed, unit)
        has_groups = any((run.group != "").any() for run in runs)
        count = resampler.num_questions if unit == "question" or has_groups else 0
        self.estimate = float(resampler.estimate()[0])
        is_jackknife = unit == "group" and count < BOOTSTRAP_GROUPS
        too_few_groups = None if count >= MIN_GROUPS else f"{count} groups, fewer than {MIN_GROUPS}"
        self.reason = too_few_groups if is_jackknife else resampler.too_few
        self.method: str | None = None
        self.values = np.zeros(0)
        if self.reason is None:
            self.method = "jackknife" if is_jackknife else "bootstrap"
            self.values = (resampler.leave_one_out() if is_jackknife else resampler.draws())[:, 0]

    def interval(self) -> list[float] | None:
        """Return the 95 % interval, within 0 and 1."""
        if self.method is None:
            return None
        if self.method == "bootstrap":
            return list(percentile_interval(self.values))
        low, high = jackknife_interval(self.estimate, self.values)
        return [max(0.0, low), min(1.0, high)]


def jackknife_error(values: np.ndarray) -> float:
    """Return the standard error from the estimates ``(G,)`` without each of G groups.

    References
    ----------
    Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter 11.
    """
    count = len(values)
    return float(np.sqrt((count - 1) / count * np.square(values - values.mean()).sum()))


def jackknife_interval(estimate: float, values: np.ndarray) -> tuple[float, float]:
    """Return estimate -+ t s, with the jackknife's standard error s and Student's t with G - 1 degrees of freedom."""
    from scipy.stats import t

    half = float(t.ppf((1 + LEVEL) / 2, len(values) - 1)) * jackknife_error(values)
    return estimate - half, estimate + half


def jackknife_p(difference: float, values: np.ndarray) -> float:
    """Return the two-sided p value of a zero difference, by Student's t with G - 1 degrees of freedom."""
    from scipy.stats import t

    error = jackknife_error(values)
    # Scores that order all traces alike differ by rounding only.
    if error < 1e-12:
        return 1.0 if abs(difference) < 1e-12 else 0.0
    return float(2 * t.sf(abs(difference) / error, len(values) - 1))


def bootstrap_wald_p(difference: float, values: np.ndarray) -> float:
    """Return the two-sided p value of a zero difference, from a normal distribution with the bootstrap's standard error.

    The share of resamples on one side of 0 has a resolution of 0.001, too coarse for Holm's correction over the pairs
    of 20 detectors.

    References
    ----------
    Efron and Tibshirani 1993, "An Introduction to the Bootstrap".
    """
    error = float(values.std(ddof=1))
    if error < 1e-12:
        return 1.0 if abs(difference) < 1e-12 else 0.0
    return math.erfc(abs(difference) / (error * math.sqrt(2)))


def compare_pairs(found: Mapping[str, Resampling]) -> list[dict[str, Any]]:
    """Compare every pair of detectors that were tested on the same traces.

    Parameters
    ----------
    found : mapping
        The resampling of each detector, all by the same unit and seed.

    Returns
    -------
    list of dict
        For each pair: first, second, difference (of AUROC, first - second), interval, method, p, and p_holm, which is
        adjusted for the number of pairs. The last four are None with too few questions or groups.
    """
    pairs: list[dict[str, Any]] = []
    for a, b in combinations(found, 2):
        difference, values = found[a].estimate - found[b].estimate, found[a].values - found[b].values
        pair = {"first": a, "second": b, "difference": difference, "method": found[a].method}
        if found[a].method is None:
            pair |= dict.fromkeys(("interval", "p", "p_holm"))
        elif found[a].method == "bootstrap":
            pair |= {"interval": list(percentile_interval(values)), "p": bootstrap_wald_p(difference, values)}
        else:
            pair |= {"interval": list(jackknife_interval(difference, values)), "p": jackknife_p(difference, values)}
        pairs.append(pair)
    return adjust(pairs)


def adjusted_p_to(detector: str, comparisons: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Return p_holm of the difference between every other detector and `detector`, by unit.

    Parameters
    ----------
    detector : str
    comparisons : sequence of mapping
        Pairs of one scheme of folds with their unit, as in benchmark.json.
    """
    found: dict[str, dict[str, float | None]] = {unit: {} for unit in UNITS}
    for pair in comparisons:
        if detector in (pair["first"], pair["second"]):
            (other,) = {pair["first"], pair["second"]} - {detector}
            found[pair["unit"]][other] = pair["p_holm"]
    return found
