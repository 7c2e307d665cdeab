"""Intervals and paired tests by question and by group.

By question, and with at least 100 groups: the bootstrap. With fewer groups, whose percentile intervals are too short,
a delete-one-group jackknife with Student's t.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from tracestore.evaluation.evaluate import BootstrapResampler, RunScores
from tracestore.evaluation.metrics import LEVEL, percentile_interval
from tracestore.evaluation.significance import adjust, p_value

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
        self.values = np.zeros(0)
        if self.reason is None:
            self.values = (resampler.leave_one_out() if is_jackknife else resampler.draws)[:, 0]
        if np.isnan(self.values).any():
            self.reason = "without one of the groups, no fold has traces of both classes"
        self.method = None if self.reason else "jackknife" if is_jackknife else "bootstrap"

    def interval(self) -> list[float] | None:
        """Return the 95 % interval, within 0 and 1."""
        found, _ = self.interval_and_p(self.estimate, self.values)
        return None if found is None else [max(0.0, found[0]), min(1.0, found[1])]

    def interval_and_p(self, estimate: float, values: np.ndarray) -> tuple[list[float] | None, float | None]:
        """Return the 95 % interval of an estimate with these resamples, and the p value of 0; None with too few."""
        if self.method is None:
            return None, None
        if self.method == "bootstrap":
            return list(percentile_interval(values)), p_value(estimate, float(values.std(ddof=1)))
        return list(jackknife_interval(estimate, values)), p_value(estimate, jackknife_error(values), len(values) - 1)


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
        difference, method = found[a].estimate - found[b].estimate, found[a].method
        interval, p = found[a].interval_and_p(difference, found[a].values - found[b].values)
        pair = {"first": a, "second": b, "difference": difference, "method": method, "interval": interval}
        pairs.append(pair | {"p": p, "p_holm": None})
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
