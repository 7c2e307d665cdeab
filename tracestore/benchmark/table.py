"""The results of a comparison as text tables."""

from collections.abc import Sequence
from typing import Any

from tracestore.console import format_size, plural
from tracestore.evaluation.clusters import adjusted_p_to

_KINDS = {"control": "*", "untrained": "-", "external": "+"}
LEGEND = (
    "* control, - untrained, + scores from a file. AUROC, AUPRC, PRR (prediction rejection ratio) and RC (area under "
    "the risk-coverage curve, lower is better): means over folds. In groups: AUROC over pairs of the same group. "
    "vs best: p of the difference to the best detector, adjusted by Holm for all pairs."
)


def _number(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.3f}"


def _interval(interval: Sequence[float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"


def _p(value: float | None) -> str:
    return "-" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def format_results(results: dict[str, Any]) -> str:
    """Return the tables of every store and scheme of folds, and the transfer matrices of several stores."""
    parts = []
    for name, entry in results["stores"].items():
        parts += [_scheme_table(name, entry, scheme) for scheme in entry["folds"]["schemes"]]
        if entry["label_sources"] is not None:
            parts.append(_label_sources(name, entry["label_sources"]))
        parts += [f"not run: {detector}: {reason}" for detector, reason in entry["skipped"].items()]
        parts.append(f"features of all layers: {entry['features_s']:.1f} s")
    if results["transfer"]:
        parts.append(_transfer_table(results))
    return "\n\n".join([*parts, LEGEND])


def _scheme_table(name: str, entry: dict[str, Any], scheme: str) -> str:
    detectors = entry["detectors"]
    ranked = sorted(detectors, key=lambda d: -detectors[d]["schemes"][scheme]["auroc"])
    p_to_best = adjusted_p_to(ranked[0], [pair for pair in entry["comparisons"] if pair["scheme"] == scheme])
    width = 2 + max(map(len, ranked))
    lines = [
        f"{name}, folds by {scheme}: {plural(entry['num_traces'], 'trace')}, {entry['num_hallucinated']:,} hallucinated, "
        f"{plural(entry['num_groups'], 'group')}, {plural(entry['folds']['num_folds'], 'fold')}",
        f"{'':{width}} {'AUROC':>6} {'95 % by question':>16} {'95 % by group':>16} {'in groups':>9} {'AUPRC':>6} "
        f"{'PRR':>6} {'RC':>6} {'ECE':>6} {'Brier':>6} {'vs best: question':>17} {'group':>7} {'seconds':>8} {'memory':>8}",
    ]
    for detector in ranked:
        found = detectors[detector]
        test = found["schemes"][scheme]
        seconds = "-" if found["kind"] == "external" else f"{found['fit_s'] + found['score_s']:.1f}"
        ps = [_p(p_to_best[unit].get(detector)) for unit in ("question", "group")]
        lines.append(
            f"{_KINDS.get(found['kind'], ' ')} {detector:{width - 2}} {_number(test['auroc']):>6} "
            f"{_interval(test['interval_by_question']):>16} {_interval(test['interval_by_group']):>16} "
            f"{_number(test['within_group_auroc']):>9} "
            + " ".join(f"{_number(test[c]):>6}" for c in ("auprc", "prr", "risk_coverage_area", "ece", "brier"))
            + f" {ps[0]:>17} {ps[1]:>7} {seconds:>8} {format_size(found['peak_bytes']):>8}"
        )
    reasons = {r for d in ranked for r in detectors[d]["schemes"][scheme]["too_few"].values()}
    missing = [
        f"{d}: {plural(n, 'trace')} without a score"
        for d in ranked
        if (n := detectors[d]["schemes"][scheme]["num_without_score"])
    ]
    return "\n".join([*lines, *sorted(reasons), *missing])


def _label_sources(name: str, found: dict[str, Any]) -> str:
    """Return AUROC of each detector under each source of labels, and the agreement of the sources."""
    sources = list(found["sources"])
    lines = [f"{name}, sources of labels; the detectors are fitted to {found['fitted_to']}"]
    for source, counts in found["sources"].items():
        lines.append(f"{source}: {plural(counts['num_traces'], 'trace')}, {counts['num_hallucinated']:,} hallucinated")
    for pair in found["agreement"]:
        lines.append(
            f"{pair['first']} and {pair['second']}: {_number(pair['agreement'])} of {plural(pair['num_traces'], 'label')} "
            f"equal, kappa {_number(pair['kappa'])}"
        )
    for scheme, detectors in found["schemes"].items():
        width = max(map(len, (f"AUROC, folds by {scheme}", *detectors)))
        lines.append(f"\n{f'AUROC, folds by {scheme}':{width}}  " + "  ".join(f"{s:>6}" for s in sources))
        first = sources[0]
        for detector in sorted(detectors, key=lambda d: -(detectors[d][first]["auroc"] or 0)):
            values = [(_number(detectors[detector][s]["auroc"]), max(6, len(s))) for s in sources]
            lines.append(f"{detector:{width}}  " + "  ".join(f"{value:>{length}}" for value, length in values))
    return "\n".join(lines)


def _transfer_table(results: dict[str, Any]) -> str:
    """Return AUROC of each detector for each pair of stores; the diagonal is the cross-validation by question."""
    stores = list(results["stores"])
    cells = {(c["detector"], c["trained_on"], c["tested_on"]): c["auroc"] for c in results["transfer"]}
    for store, entry in results["stores"].items():
        for detector, found in entry["detectors"].items():
            cells[detector, store, store] = found["schemes"]["question"]["auroc"]
    names = list(dict.fromkeys(detector for detector, _, _ in cells))
    pairs = [(a, b) for a in stores for b in stores]
    width = max(len(n) for n in ("trained on -> tested on", *names))
    titles = [f"{a} -> {b}" for a, b in pairs]
    lines = [f"{'trained on -> tested on':{width}}  " + "  ".join(titles)]
    for name in names:
        values = [_number(cells.get((name, a, b))) for a, b in pairs]
        lines.append(f"{name:{width}}  " + "  ".join(f"{v:>{len(t)}}" for v, t in zip(values, titles, strict=True)))
    return "\n".join(lines)
