"""Write the tables of bench/LEADERBOARD.md from results of `tracestore benchmark`.

Usage: python bench/leaderboard.py PAGE BENCHMARK_JSON...

The lines of PAGE between the two markers are replaced by a table for each store, with one line for each detector that did
not run, and a transfer matrix for each file that has one.
"""

import json
import sys
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- leaderboard: written by bench/leaderboard.py -->", "<!-- end of leaderboard -->"


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a table in Markdown, with an empty line after it."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)] + [""]


def number(value: float | None) -> str:
    """Return a number with three decimals, or a dash."""
    return "-" if value is None else f"{value:.3f}"


def interval(values: list[float] | None) -> str:
    """Return an interval, or a dash."""
    return "-" if values is None else f"{values[0]:.3f} to {values[1]:.3f}"


def store_lines(name: str, entry: dict[str, Any]) -> list[str]:
    """Return the section of a store, with the detectors in the order of AUROC with folds by question."""
    detectors = entry["detectors"]
    rows = []
    for detector in sorted(detectors, key=lambda d: -detectors[d]["schemes"]["question"]["auroc"]):
        found = detectors[detector]
        question, group = found["schemes"]["question"], found["schemes"].get("group")
        kind = "" if found["kind"] == "trained" else f" ({found['kind']})"
        cells = [f"{detector}{kind}", number(question["auroc"]), interval(question["interval_by_question"])]
        cells += ["-", "-"] if group is None else [number(group["auroc"]), interval(group["interval_by_group"])]
        cells += [number(question["within_group_auroc"]), number(question["ece"])]
        rows.append([*cells, f"{found['fit_s'] + found['score_s']:.1f}"])
    header = ["detector", "AUROC, folds by question", "95 % by question", "AUROC, folds by group", "95 % by group"]
    lines = [
        f"### {name}",
        "",
        f"{entry['num_traces']} traces, {entry['num_hallucinated']} hallucinated, {entry['num_groups']} groups, "
        f"{entry['folds']['num_folds']} folds, seed {entry['folds']['seed']}.",
        "",
        *table([*header, "in groups", "ECE", "s"], rows),
    ]
    sources = entry["label_sources"]
    if sources is not None:
        lines += [f"Sources of labels; the detectors are fitted to {sources['fitted_to']}:", ""]
        pairs = [
            [p["first"], p["second"], str(p["num_traces"]), number(p["agreement"]), number(p["kappa"])]
            for p in sources["agreement"]
        ]
        lines += table(["source", "other source", "traces", "equal labels", "Cohen's kappa"], pairs)
    prefix = f"{entry['store']['path']}: "
    return lines + [f"Not run: {name}: {reason.removeprefix(prefix)}\n" for name, reason in entry["skipped"].items()]


def transfer_lines(results: dict[str, Any]) -> list[str]:
    """Return the transfer matrix: AUROC of each detector that was fitted to one store and scored another."""
    cells = {(c["detector"], c["trained_on"], c["tested_on"]): c for c in results["transfer"]}
    pairs = list(dict.fromkeys(key[1:] for key in cells))
    rows = [
        [detector, *(number(cells[detector, a, b]["auroc"]) if (detector, a, b) in cells else "-" for a, b in pairs)]
        for detector in dict.fromkeys(key[0] for key in cells)
    ]
    title = f"### Transfer: {', '.join(results['stores'])}"
    return [title, "", *table(["trained on → tested on", *(f"{a} → {b}" for a, b in pairs)], rows)] if pairs else []


def main() -> None:
    """Replace the tables of the page."""
    page, files = Path(sys.argv[1]), sys.argv[2:]
    lines = []
    for file in files:
        results = json.loads(Path(file).read_text(encoding="utf-8"))
        for name, entry in results["stores"].items():
            lines += store_lines(name, entry)
        lines += transfer_lines(results)
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        sys.exit(f"{page}: expected the lines {BEGIN} and {END}")
    body = "\n".join(lines).rstrip()
    page.write_text(f"{before}{BEGIN}\n\n{body}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
