"""The summary table and report.html of a training run."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracestore.page import html_table, inline_image, page
from tracestore.store.io.fsio import atomic_write

COLUMNS = ("auroc", "auprc", "brier", "ece", "accuracy", "precision", "recall", "f1")
_TITLES = {"auroc": "AUROC", "auprc": "AUPRC", "brier": "Brier", "ece": "ECE", "f1": "F1"}
_METHODS = {"delong": "DeLong", "bootstrap": "bootstrap"}


def _entries(results: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    entries = list(results["models"].items())
    if results.get("probe"):
        entries.append(("logistic probe", results["probe"]))
    return entries


def _pair_name(pair: dict[str, Any]) -> str:
    return f"{pair['first']} - {pair['second']}".replace("logistic_probe", "logistic probe")


def _p(value: float | None) -> str:
    if value is None:
        return "-"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def format_table(results: dict[str, Any]) -> str:
    """Return a text table with a row for each model, for the probe and for each compared pair."""
    pairs = results.get("comparisons") or []
    width = max([14, *(len(_pair_name(p)) for p in pairs)])
    rest = " ".join(f"{_TITLES.get(c, c):>9}" for c in COLUMNS[1:])
    lines = [f"{'model':{width}} {'n':>6} {'AUROC':>6} {'95 % interval':>16} {rest}"]
    for name, entry in _entries(results):
        test = entry["test"]
        values = " ".join(f"{test[c]:9.3f}" for c in COLUMNS[1:])
        interval = _limits(test["auroc_interval"])
        lines.append(f"{name:{width}} {test['num_traces']:6,} {test['auroc']:6.3f} {interval:>16} {values}")
    if pairs:
        lines.append(f"{'difference':{width}} {'':6} {'AUROC':>6} {'95 % interval':>16} {'p':>9} {'Holm':>9}  test")
    for pair in pairs:
        lines.append(
            f"{_pair_name(pair):{width}} {'':6} {pair['difference']:+6.3f} {_limits(pair['interval'], '+'):>16} "
            f"{_p(pair['p']):>9} {_p(pair['p_holm']):>9}  {_METHODS.get(pair['method'], '-')}"
        )
    return "\n".join([*lines, *_too_few(results)])


def _limits(interval: Sequence[float] | None, sign: str = "") -> str:
    return "-" if interval is None else f"{interval[0]:{sign}.3f} to {interval[1]:{sign}.3f}"


def _too_few(results: dict[str, Any]) -> list[str]:
    """Return the distinct reasons why there are no intervals."""
    return list(dict.fromkeys(e["test"]["too_few"] for _, e in _entries(results) if e["test"]["too_few"] is not None))


def _format_interval(value: float, interval: Sequence[float] | None, sign: str = "") -> str:
    return f"{value:{sign}.3f}" + ("" if interval is None else f" ({_limits(interval, sign)})")


def _models(results: dict[str, Any]) -> str:
    rows = []
    for name, entry in _entries(results):
        test = entry["test"]
        first = [_format_interval(test[c], test[f"{c}_interval"]) for c in ("auroc", "auprc")]
        rows.append([name, f"{test['num_traces']:,}", *first, *(f"{test[c]:.3f}" for c in COLUMNS[2:])])
    reasons = "".join(f"<p>{reason}</p>" for reason in _too_few(results))
    return reasons + html_table(
        ["model", "n", "AUROC (95 %)", "AUPRC (95 %)", *(_TITLES.get(c, c) for c in COLUMNS[2:])], rows
    )


def _section(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a heading and a table, or nothing without rows."""
    return f"<h2>{title}</h2>{html_table(header, rows)}" if rows else ""


def _comparisons(results: dict[str, Any]) -> str:
    rows = [
        [
            _pair_name(p),
            _format_interval(p["difference"], p["interval"], "+"),
            _p(p["p"]),
            _p(p["p_holm"]),
            _METHODS.get(p["method"], "-"),
        ]
        for p in results.get("comparisons") or []
    ]
    return _section("Comparisons", ["pair", "difference in AUROC (95 %)", "p", "p, Holm", "test"], rows)


def _spread(results: dict[str, Any]) -> str:
    rows = []
    for name, entry in _entries(results) if "runs" in results else ():
        test = entry["test"]
        std = test["auroc_std_over_seeds"]
        values = ", ".join(f"{v:.3f}" for v in test["auroc_by_run"])
        rows.append([name, values, "" if std is None else f"{std:.3f}", f"{test['auroc_out_of_fold']:.3f}"])
    header = ["model", "AUROC of each run (by fold, then by seed)", "std over seeds", "out of fold, pooled"]
    return _section("Runs", header, rows)


def _calibration(results: dict[str, Any]) -> str:
    rows = []
    for name, entry in _entries(results):
        c = entry["calibration"]
        values = (c["ece"], c["scaled"]["ece"], c["brier"], c["scaled"]["brier"], c["temperature"])
        rows.append([name, *(f"{v:.3f}" for v in values)])
    return _section("Calibration", ["model", "ECE", "ECE, scaled", "Brier", "Brier, scaled", "temperature"], rows)


def _groups(results: dict[str, Any]) -> str:
    entries = _entries(results)
    rows = []
    # The entries have the same groups, because the models are tested on the same traces.
    for groups in zip(*(entry["by_group"] for _, entry in entries), strict=True):
        values = ["one class" if group["auroc"] is None else f"{group['auroc']:.3f}" for group in groups]
        rows.append([groups[0]["group"], groups[0]["num_traces"], groups[0]["num_hallucinated"], *values])
    return _section("AUROC by group", ["group", "traces", "hallucinated", *(name for name, _ in entries)], rows)


def _layers(results: dict[str, Any]) -> str:
    """Return the validation AUROC of the probe of each layer."""
    values = results.get("probe", {}).get("val_auroc_by_layer", [])
    rows = [[k, "not finite" if v is None or math.isnan(v) else f"{v:.3f}"] for k, v in enumerate(values)]
    return _section("Logistic probe by layer", ["layer", "AUROC on validation"], rows)


def _counts(results: dict[str, Any]) -> str:
    rows = [
        [k, name, c["hallucinated"], c["correct"]]
        for k, splits in enumerate(results["counts"])
        for name, c in splits.items()
    ]
    return _section("Traces", ["fold", "split", "hallucinated", "correct"], rows)


def _events(results: dict[str, Any]) -> str:
    events = [(name, event) for name, entry in results["models"].items() for event in entry["oom_events"]]
    columns = list(dict.fromkeys(key for _, event in events for key in event))
    rows = [[name, *(event.get(c, "") for c in columns)] for name, event in events]
    table = _section("Out of memory", ["model", *(c.replace("_", " ") for c in columns)], rows)
    return table or "<h2>Out of memory</h2><p>No out-of-memory errors.</p>"


def write_page(results: dict[str, Any], plots: list[Path], path: Path) -> None:
    """Write report.html, one file without external resources and without scripts.

    Parameters
    ----------
    results : dict
        The content of results.json.
    plots : list of Path
        PNG files to embed.
    path : Path
    """
    sections = (
        _models(results),
        _comparisons(results),
        _spread(results),
        *(inline_image(p.read_bytes(), p.stem) for p in plots),
        _calibration(results),
        _groups(results),
        _layers(results),
        _counts(results),
        _events(results),
        _section("Configuration", ["name", "value"], list(results["config"].items())),
        _section("Store", ["name", "value"], list(results["store"].items())),
    )
    with atomic_write(path) as file:
        file.write(page("Training report", sections).encode("utf-8", "backslashreplace"))
