"""The metrics of detectors as text."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tracestore.words import format_p

COLUMNS = ("auroc", "auprc", "brier", "ece", "accuracy", "precision", "recall", "f1")
TITLES = {"auroc": "AUROC", "auprc": "AUPRC", "brier": "Brier", "ece": "ECE", "f1": "F1",
          "auroc_std_over_seeds": "std over seeds"}  # fmt: skip
PROBE_NAME = "logistic probe"
METHODS = {"delong": "DeLong", "bootstrap": "bootstrap"}


def entries_of(results: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and the entry of each model, and of the probe if there is one."""
    entries = list(results["models"].items())
    if results.get("probe"):
        entries.append((PROBE_NAME, results["probe"]))
    return entries


def pair_name(pair: Mapping[str, Any]) -> str:
    """Return "first - second" for a pair of `compare`."""
    return " - ".join(PROBE_NAME if pair[k] == "logistic_probe" else pair[k] for k in ("first", "second"))


def format_table(results: dict[str, Any]) -> str:
    """Return a text table with a row for each model, for the probe and for each compared pair."""
    pairs = results.get("comparisons") or []
    width = max([14, *(len(pair_name(p)) for p in pairs)])
    rest = " ".join(f"{TITLES.get(c, c):>9}" for c in COLUMNS[1:])
    lines = [f"{'model':{width}} {'n':>6} {'AUROC':>6} {'95 % interval':>16} {rest}"]
    for name, entry in entries_of(results):
        test = entry["test"]
        values = " ".join(f"{test[c]:9.3f}" for c in COLUMNS[1:])
        interval = _limits(test["auroc_interval"])
        lines.append(f"{name:{width}} {test['num_traces']:6,} {test['auroc']:6.3f} {interval:>16} {values}")
    if pairs:
        lines.append(f"{'difference':{width}} {'':6} {'AUROC':>6} {'95 % interval':>16} {'p':>9} {'Holm':>9}  test")
    for pair in pairs:
        lines.append(
            f"{pair_name(pair):{width}} {'':6} {pair['difference']:+6.3f} {_limits(pair['interval'], '+'):>16} "
            f"{format_p(pair['p']):>9} {format_p(pair['p_holm']):>9}  {METHODS.get(pair['method'], '-')}"
        )
    return "\n".join([*lines, *too_few(entry for _, entry in entries_of(results))])


def _limits(interval: Sequence[float] | None, sign: str = "") -> str:
    return "-" if interval is None else f"{interval[0]:{sign}.3f} to {interval[1]:{sign}.3f}"


def too_few(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the distinct reasons why entries have no intervals."""
    reasons = (entry["test"]["too_few"] for entry in entries)
    return list(dict.fromkeys(reason for reason in reasons if reason is not None))


def format_interval(value: float, interval: Sequence[float] | None, sign: str = "") -> str:
    """Return a value with its interval in parentheses."""
    return f"{value:{sign}.3f}" + ("" if interval is None else f" ({_limits(interval, sign)})")
