"""Significance tests of the difference between detectors on the same traces.

`Resampling` resamples by question or by group. By question, and with at least 100 groups: the bootstrap. With fewer
groups, whose percentile intervals are too short, a delete-one-group jackknife with Student's t.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from tracestore.evaluation.evaluate import BootstrapResampler, RunScores
from tracestore.evaluation.metrics import LEVEL, percentile_interval


def midranks(values: np.ndarray) -> np.ndarray:
    """Return the rank of each value in its row, from 1; equal values have the mean of their ranks.

    scipy.stats.rankdata does the same, but its import takes two seconds. Rows with NaN get NaN.

    Parameters
    ----------
    values : np.ndarray
        ``(k, n)``.
    """
    ranks = np.empty(values.shape)
    for row, out in zip(values, ranks, strict=True):
        ordered = np.sort(row)
        out[:] = (np.searchsorted(ordered, row, "left") + np.searchsorted(ordered, row, "right") + 1) / 2
    ranks[np.isnan(values).any(axis=1)] = np.nan
    return ranks


def delong(y: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the AUROC of several sets of scores of the same traces, and their covariance.

    Traces are assumed to be independent.

    Parameters
    ----------
    y : np.ndarray
        ``(n,)``, 0 or 1.
    scores : np.ndarray
        ``(k, n)``.

    Returns
    -------
    auroc : np.ndarray
        ``(k,)``.
    covariance : np.ndarray
        ``(k, k)``.

    References
    ----------
    DeLong, DeLong and Clarke-Pearson 1988, "Comparing the Areas under Two or More Correlated
    Receiver Operating Characteristic Curves", equations 5 and 6. Sun and Xu 2014, "Fast
    Implementation of DeLong's Algorithm", for the midranks.
    """
    positive, negative = scores[:, y == 1], scores[:, y == 0]
    m, n = positive.shape[1], negative.shape[1]
    among_all = midranks(np.concatenate([positive, negative], axis=1))
    # Structural components: for each positive the share of negatives below it, and vice versa.
    v10 = (among_all[:, :m] - midranks(positive)) / n
    v01 = 1 - (among_all[:, m:] - midranks(negative)) / m
    covariance = np.atleast_2d(np.cov(v10)) / m + np.atleast_2d(np.cov(v01)) / n
    return v10.mean(axis=1), covariance


def p_value(difference: float, error: float, degrees: float = math.inf) -> float:
    """Return the two-sided p value of a zero difference with a standard error.

    The distribution is Student's t with these degrees of freedom. The one of the bootstrap is normal: the share of its
    resamples on one side of 0 has a resolution of 0.001, too coarse for Holm's correction over the pairs of 20
    detectors.

    References
    ----------
    Efron and Tibshirani 1993, "An Introduction to the Bootstrap".
    """
    # Scores that order all traces alike differ by rounding only.
    if error < 1e-12:
        return 1.0 if abs(difference) < 1e-12 else 0.0
    if degrees == math.inf:
        return math.erfc(abs(difference) / (error * math.sqrt(2)))
    from scipy.stats import t

    return float(2 * t.sf(abs(difference) / error, degrees))


def delong_p(y: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """Return the two-sided p value of equal AUROC by `delong`, NaN where a class has fewer than two traces."""
    if min((y == 1).sum(), (y == 0).sum()) < 2:
        return float("nan")
    aurocs, covariance = delong(y, np.stack([a, b]))
    variance = float(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    # Where both order the traces alike, rounding leaves a variance of about 1e-17, which may be negative.
    return p_value(float(aurocs[0] - aurocs[1]), math.sqrt(max(0.0, variance)))


def bootstrap_p(differences: np.ndarray) -> float:
    """Return the two-sided p value of a zero difference: twice the smaller tail, counting the sample itself.

    References
    ----------
    Davison and Hinkley 1997, "Bootstrap Methods and their Application", section 4.4.1.
    """
    tail = min(int((differences <= 0).sum()), int((differences >= 0).sum()))
    return min(1.0, 2 * (tail + 1) / (len(differences) + 1))


def holm(p: Sequence[float]) -> list[float]:
    """Return the p values adjusted for multiple tests.

    References
    ----------
    Holm 1979, "A Simple Sequentially Rejective Multiple Test Procedure".
    """
    order = np.argsort(p, kind="stable")
    factors = len(p) - np.arange(len(p))
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(1, np.maximum.accumulate(np.asarray(p)[order] * factors))
    return adjusted.tolist()


def adjust(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return pairs with p_holm, their p adjusted for the number of pairs that have one."""
    tested = [pair for pair in pairs if pair["p"] is not None]
    for pair, p in zip(tested, holm([pair["p"] for pair in tested]), strict=True):
        pair["p_holm"] = p
    return pairs


def _tested(runs: Sequence[RunScores]) -> dict[int, list[tuple[int, str, int]]]:
    """Return trace, question and label of the test split of each fold."""
    return {
        run.fold: sorted(zip(run.trace.tolist(), run.question.tolist(), run.y.tolist(), strict=True)) for run in runs
    }


def compare(models: Mapping[str, Sequence[RunScores]], seed: int) -> list[dict[str, Any]]:
    """Compare every pair of models.

    Parameters
    ----------
    models : mapping
        The runs of each model, by name.
    seed : int
        Seed of the bootstrap.

    Returns
    -------
    list of dict
        For each pair: first, second, difference (of AUROC, first - second), interval and
        bootstrap_p (from a bootstrap by question), delong_p (only for one run with one trace
        per question), p (that of "method": delong where it applies, else bootstrap) and p_holm
        (p adjusted for the number of pairs). Where too few questions were tested, interval,
        method, p and p_holm are None, and too_few gives the reason.

    Raises
    ------
    ValueError
        The models were not tested on the same folds, traces and labels.
    """
    resamplers = {name: BootstrapResampler(runs, seed) for name, runs in models.items()}
    pairs: list[dict[str, Any]] = []
    for a, b in combinations(models, 2):
        if _tested(models[a]) != _tested(models[b]):
            raise ValueError(f"{a} and {b} were tested on different traces, labels or folds")
        first, second = resamplers[a], resamplers[b]
        pair: dict[str, Any] = {"first": a, "second": b, "difference": float((first.estimate() - second.estimate())[0])}
        if (reason := first.too_few) is not None:
            pairs.append(pair | dict.fromkeys(("interval", "method", "p", "p_holm")) | {"too_few": reason})
            continue
        one_run = len(models[a]) == len(models[b]) == 1
        independent = one_run and first.num_questions == len(first.trace)
        differences = first.draws[:, 0] - second.draws[:, 0]
        p = {"bootstrap_p": bootstrap_p(differences)}
        if independent:
            p["delong_p"] = delong_p(models[a][0].y, models[a][0].logit, models[b][0].logit)
        method = "delong" if independent and not np.isnan(p["delong_p"]) else "bootstrap"
        interval = list(percentile_interval(differences))
        pairs.append(pair | {"interval": interval, "method": method, "p": p[f"{method}_p"], **p})
    return adjust(pairs)


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
        too_few_groups = None if count >= MIN_GROUPS else f"{count} groups, at least {MIN_GROUPS} are needed"
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
