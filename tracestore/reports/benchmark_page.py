"""The results of a benchmark, as report.html and as text tables."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.evaluation.significance import UNITS, adjusted_p_to
from tracestore.pages import elements
from tracestore.pages.document import Section, document
from tracestore.pages.elements import Html, Table, TableCell, element, join, number, paragraph, table
from tracestore.pages.notebook import fragment
from tracestore.pages.plots import Series, heat_map, plot
from tracestore.reports.detector_tables import format_interval, origin, p_value
from tracestore.store.html import serve_command
from tracestore.store.io.fsio import write_atomic
from tracestore.words import format_size, plural

_MAX_TRANSFER = 6
LEGEND = (
    "PRR: prediction rejection ratio. RC: area under the risk-coverage curve, lower is better. In groups: AUROC over "
    "pairs of the same group. p: of the difference to the best detector, adjusted by Holm for all pairs."
)
_SERVE = "To list and open the traces that a detector misclassifies:"


def write_benchmark(results: Mapping[str, Any], path: Path, command: str | None = None) -> None:
    """Write the page of a benchmark: one file that needs no network.

    Parameters
    ----------
    results : mapping
        The content of benchmark.json.
    path : Path
    command : str, optional
        The command of the benchmark.
    """
    stores = results["stores"]
    verdicts, sections = [], []
    for name, entry in stores.items():
        for scheme in entry["folds"]["schemes"]:
            title = f"{name}, folds by {scheme}"
            verdicts += [element("h3", title), _verdict(entry, scheme)]
            sections.append(Section(title, _scheme(entry, scheme)))
        if entry["label_sources"] is not None:
            sections.append(Section(f"{name}, sources of labels", _label_sources(entry["label_sources"])))
        scores = path.with_name("scores.csv" if len(stores) == 1 else f"scores-{name}.csv")
        if "stores" not in entry["store"]:  # serve shows one store
            config = results["config"]
            serve = serve_command(entry["store"]["path"], scores, config["score"], config["score_threshold"])
            sections.append(Section(f"{name}, traces", join([paragraph(_SERVE), elements.command(serve)])))
        if entry["skipped"]:
            rows = list(entry["skipped"].items())
            sections.append(Section(f"{name}, not run", table(["detector", "reason"], rows, caption="Not run")))
    if results["transfer"]:
        sections.append(Section("Transfer", _transfer(results), "Trained on one store, tested on another."))
    facts = {
        "stores": ", ".join(stores),
        "traces": ", ".join(f"{e['num_traces']:,} ({e['num_hallucinated']:,} hallucinated)" for e in stores.values()),
        "folds": next(iter(stores.values()))["folds"]["num_folds"],
        **origin(command),
    }
    page = document("Benchmark of detectors", facts=facts, sections=[Section("Verdict", join(verdicts)), *sections])
    write_atomic(path, page.encode("utf-8", "backslashreplace"))


def _ranked(entry: Mapping[str, Any], scheme: str) -> list[str]:
    return sorted(entry["detectors"], key=lambda d: -entry["detectors"][d]["schemes"][scheme]["auroc"])


def _p_to_best(entry: Mapping[str, Any], scheme: str, best: str) -> dict[str, dict[str, float | None]]:
    return adjusted_p_to(best, [pair for pair in entry["comparisons"] if pair["scheme"] == scheme])


def _verdict(entry: Mapping[str, Any], scheme: str) -> Html:
    ranked = _ranked(entry, scheme)
    best = ranked[0]
    detectors = entry["detectors"]
    test = detectors[best]["schemes"][scheme]
    value = format_interval(test["auroc"], test["interval_by_question"])
    said = [paragraph(f"{best} has the highest AUROC of {len(ranked)} detectors: {value}.", kind="verdict")]
    for unit, p in _p_to_best(entry, scheme, best).items():
        equal = [d for d in ranked[1:] if (p.get(d) or 0) >= 0.05]
        if equal:
            shown = ", ".join(equal[:5]) + (f" and {len(equal) - 5} more" if len(equal) > 5 else "")
            text = f"The tests by {unit} show no difference to {shown} (p ≥ 0.05, adjusted by Holm)."
            said.append(paragraph(text))
    low = test["interval_by_question"][0] if test["interval_by_question"] else test["auroc"]
    for control in ranked[1:]:
        reached = detectors[control]["schemes"][scheme]["auroc"]
        if detectors[control]["kind"] == "control" and reached >= low:
            text = f"The control {control} reaches {reached:.3f}, which is in the interval of {best} or above it."
            said.append(paragraph(text, kind="warning"))
    return join(said)


def scheme_table(entry: Mapping[str, Any], scheme: str) -> Table:
    """Return the table of the detectors of a store, the best first; columns without values are left out."""
    detectors, ranked = entry["detectors"], _ranked(entry, scheme)
    p, rows = _p_to_best(entry, scheme, ranked[0]), []
    for name in ranked:
        found = detectors[name]
        test = found["schemes"][scheme]
        by_group = test["interval_by_group"]
        external = found["kind"] == "external"
        rows.append([
            name, found["kind"], TableCell(format_interval(test["auroc"], test["interval_by_question"]), test["auroc"]),
            number(None) if by_group is None else TableCell(f"{by_group[0]:.3f} to {by_group[1]:.3f}", by_group[0]),
            *(number(test[c]) for c in ("within_group_auroc", "auprc", "prr", "risk_coverage_area", "ece", "brier")),
            *(p_value(p[unit].get(name)) for unit in UNITS), test["num_without_score"] or None,
            number(None if external else found["fit_s"] + found["score_s"], 1),
            TableCell(format_size(found["peak_bytes"]), float(found["peak_bytes"])),
        ])  # fmt: skip
    header = ["detector", "kind", "AUROC (95 % by question)", "95 % by group", "in groups", "AUPRC", "PRR", "RC", "ECE",
              "Brier", "p to best by question", "by group", "without score", "seconds", "memory"]  # fmt: skip
    # Without groups, or with scores of all traces, columns are empty.
    shown = [k for k in range(len(header)) if any(number(None) != row[k] is not None for row in rows)]
    return Table("Detectors", [header[k] for k in shown], [[row[k] for k in shown] for row in rows])


def too_few(entry: Mapping[str, Any], scheme: str) -> list[str]:
    """Return the reasons why detectors have no intervals."""
    return sorted({r for of in entry["detectors"].values() for r in of["schemes"][scheme]["too_few"].values()})


def _scheme(entry: Mapping[str, Any], scheme: str) -> Html:
    detectors, ranked = entry["detectors"], _ranked(entry, scheme)
    tests = [detectors[d]["schemes"][scheme] for d in ranked]
    intervals = [t["interval_by_question"] or (np.nan, np.nan) for t in tests]
    kinds: dict[str, list[int]] = {}
    for k, name in enumerate(ranked):
        kinds.setdefault(detectors[name]["kind"], []).append(k)
    series = [
        Series(kind, of, [tests[k]["auroc"] for k in of], "points", [intervals[k][0] for k in of],
               [intervals[k][1] for k in of])
        for kind, of in kinds.items()
    ]  # fmt: skip
    figure = plot(
        "AUROC with 95 % intervals", series, x_label="", y_label="AUROC", x_names=ranked, is_horizontal=True,
        references=[("chance", "y", 0.5)], height=100 + 20 * len(ranked),
    )  # fmt: skip
    notes = [paragraph(text, kind="note") for text in (LEGEND, *too_few(entry, scheme))]
    return join([scheme_table(entry, scheme), *notes, figure])


def label_source_tables(found: Mapping[str, Any]) -> list[Table]:
    """Return tables of the sources' traces, of their agreement, and of AUROC under each source."""
    sources = list(found["sources"])
    counts = [[name, of["num_traces"], of["num_hallucinated"]] for name, of in found["sources"].items()]
    agreement = [
        [p["first"], p["second"], p["num_traces"], number(p["agreement"]), number(p["kappa"])]
        for p in found["agreement"]
    ]
    tables = [
        Table("Sources of labels", ["source", "traces", "hallucinated"], counts),
        Table("Agreement", ["source", "other source", "traces of both", "equal labels", "Cohen's kappa"], agreement),
    ]
    for scheme, detectors in found["schemes"].items():
        rows = [
            [name, *(TableCell(_auroc(of[s]), of[s]["auroc"]) for s in sources)]
            for name, of in sorted(detectors.items(), key=lambda item: -(item[1][sources[0]]["auroc"] or 0))
        ]
        caption = f"AUROC under the labels of each source (95 % by question), folds by {scheme}"
        tables.append(Table(caption, ["detector", *sources], rows))
    return tables


def _label_sources(found: Mapping[str, Any]) -> Html:
    note = f"The detectors are fitted to {found['fitted_to']}. Only the labels of the tested traces are exchanged."
    return join([paragraph(note, kind="note"), *label_source_tables(found)])


def _auroc(found: Mapping[str, Any]) -> str:
    return "–" if found["auroc"] is None else format_interval(found["auroc"], found["interval_by_question"])


def _transfer_cells(results: Mapping[str, Any]) -> dict[tuple[str, str, str], float]:
    """Return AUROC by detector and the stores of training and test; within a store, that of the folds by question."""
    cells = {(c["detector"], c["trained_on"], c["tested_on"]): c["auroc"] for c in results["transfer"]}
    for store, entry in results["stores"].items():
        for detector, found in entry["detectors"].items():
            cells[detector, store, store] = found["schemes"]["question"]["auroc"]
    return cells


def transfer_table(results: Mapping[str, Any]) -> Table:
    """Return the table of AUROC of each detector for each pair of stores."""
    cells = _transfer_cells(results)
    pairs = list(itertools.product(results["stores"], repeat=2))
    names = dict.fromkeys(detector for detector, _, _ in cells)
    rows = [[name, *(number(cells.get((name, a, b))) for a, b in pairs)] for name in names]
    header = ["detector", *(f"{a} → {b}" for a, b in pairs)]
    return Table("AUROC, trained on → tested on", header, rows)


def _transfer(results: Mapping[str, Any]) -> Html:
    """Return the table of all pairs of stores, and heat maps of the best detectors."""
    stores, cells = list(results["stores"]), _transfer_cells(results)
    names = dict.fromkeys(detector for detector, _, _ in cells)
    matrices = {n: np.array([[cells.get((n, a, b), np.nan) for b in stores] for a in stores], float) for n in names}
    best = sorted(names, key=lambda n: -np.nan_to_num(np.nanmean(matrices[n])))[:_MAX_TRANSFER]
    maps = [
        heat_map(n, matrices[n], x_label="tested on", y_label="trained on", value_label="AUROC", x_names=stores,
                 y_names=stores, height=260)
        for n in best
    ]  # fmt: skip
    return join([transfer_table(results), element("div", *maps, class_="plots")])


def format_results(results: dict[str, Any]) -> str:
    """Return the tables of every store and scheme of folds, and the transfer matrix of several stores."""
    parts = []
    for name, entry in results["stores"].items():
        counts = (
            f"{plural(entry['num_traces'], 'trace')}, {entry['num_hallucinated']:,} hallucinated, "
            f"{plural(entry['num_groups'], 'group')}, {plural(entry['folds']['num_folds'], 'fold')}"
        )
        for scheme in entry["folds"]["schemes"]:
            lines = [f"{name}, folds by {scheme}: {counts}", scheme_table(entry, scheme).text()]
            parts.append("\n".join([*lines, *too_few(entry, scheme)]))
        if entry["label_sources"] is not None:
            parts.append(
                f"{name}, sources of labels; the detectors are fitted to {entry['label_sources']['fitted_to']}"
            )
            parts += [f"{found.caption}\n{found.text()}" for found in label_source_tables(entry["label_sources"])]
        parts += [f"not run: {detector}: {reason}" for detector, reason in entry["skipped"].items()]
        parts.append(f"features of all layers: {entry['features_s']:.1f} s")
    if results["transfer"]:
        found = transfer_table(results)
        parts.append(f"{found.caption}\n{found.text()}")
    return "\n\n".join([*parts, LEGEND])


class BenchmarkResults(dict[str, Any]):
    """The content of benchmark.json, shown as tables in a notebook."""

    def _repr_html_(self) -> str:
        tables: list[object] = []
        for name, entry in self["stores"].items():
            for scheme in entry["folds"]["schemes"]:
                tables.append(scheme_table(entry, scheme)._replace(caption=f"{name}, folds by {scheme}"))
            skipped = "; ".join(f"{detector}: {reason}" for detector, reason in entry["skipped"].items())
            tables += [paragraph("Skipped: ", skipped, kind="note")] if skipped else []
        values = {name: f"{e['num_traces']:,} labeled traces" for name, e in self["stores"].items()}
        return fragment("Comparison of detectors", *tables, values=values)
