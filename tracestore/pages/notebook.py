"""HTML for notebooks: a fragment with styles of its own, without scripts, on the background of the notebook.

Values are escaped as everywhere in `pages`. The styles hold for the fragment only.
"""

from collections.abc import Mapping
from typing import Any

from tracestore.pages.elements import Html, TableCell, element, facts, number, paragraph, table
from tracestore.words import format_p, format_size

_TINTS = "".join(
    f".tracestore .v{k}{{background:color-mix(in srgb,#d55e00 {6 * k}%,transparent)}}" for k in range(1, 10)
)
# Text has the color of the notebook, so that light and dark themes work without a query.
_STYLE = (
    ".tracestore{font:14px/1.45 system-ui,sans-serif;max-width:75rem;overflow-wrap:anywhere}"
    ".tracestore h3{font-size:1.1rem;margin:.3rem 0}.tracestore p{margin:.3rem 0}"
    ".tracestore .note,.tracestore dt{opacity:.8;font-size:.9em}"
    ".tracestore .facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(10rem,1fr));gap:.3rem 1rem;margin:.3rem 0}"
    ".tracestore dd{margin:0;font-variant-numeric:tabular-nums}"
    ".tracestore .table{overflow-x:auto}.tracestore table{border-collapse:collapse;font-size:.92em}"
    ".tracestore caption{text-align:left;font-weight:600;padding:.3rem 0}"
    ".tracestore td,.tracestore th{padding:.2rem .8rem .2rem 0;border-bottom:1px solid #8886;text-align:left;"
    "font-weight:normal;vertical-align:top}.tracestore thead th{font-weight:600}"
    ".tracestore .n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}"
    ".tracestore .tokens{white-space:pre-wrap}" + _TINTS
)


def fragment(title: object, *content: object, values: Mapping[str, object] | None = None) -> str:
    """Return the HTML of an object in a notebook.

    Parameters
    ----------
    title : object
        The heading.
    *content : object
        What follows the values, escaped unless it is Html.
    values : mapping, optional
        Names and values of the object; those that are None are omitted.
    """
    return element(
        "div", element("style", Html(_STYLE)), element("h3", title), facts(values or {}), *content, class_="tracestore"
    )


class TrainingResults(dict[str, Any]):
    """The content of results.json, shown as tables in a notebook."""

    def _repr_html_(self) -> str:
        entries = list(self["models"].items())
        entries += [("logistic probe", self["probe"])] if self.get("probe") else []
        rows = [
            [name, (test := entry["test"])["num_traces"], number(test["auroc"]), interval(test["auroc_interval"])]
            + [number(test[metric]) for metric in ("auprc", "brier", "ece", "accuracy", "f1")]
            for name, entry in entries
            if "test" in entry
        ]
        header = ["model", "traces", "AUROC", "95 %", "AUPRC", "Brier", "ECE", "accuracy", "F1"]
        pairs = [
            [
                f"{p['first']} - {p['second']}",
                number(p["difference"], sign=True),
                interval(p["interval"]),
                format_p(p["p_holm"]),
            ]
            for p in self.get("comparisons") or []
        ]
        of_pairs = ["pair", "difference in AUROC", "95 %", "p (Holm)"]
        return fragment(
            "Training results",
            table(header, rows, caption="Test split", is_sortable=False),
            table(of_pairs, pairs, caption="Comparisons", is_sortable=False) if pairs else "",
            values={
                "store": self["store"]["path"],
                "traces": self["store"]["num_traces"],
                "seed": self["config"]["seed"],
            },
        )


class BenchmarkResults(dict[str, Any]):
    """The content of benchmark.json, shown as tables in a notebook."""

    def _repr_html_(self) -> str:
        tables = []
        for name, entry in self["stores"].items():
            found = entry["detectors"]
            for scheme in entry["folds"]["schemes"]:
                tests = {detector: of["schemes"][scheme] for detector, of in found.items()}
                rows = [
                    [d, found[d]["kind"], number(t["auroc"]), interval(t["interval_by_question"]), number(t["within_group_auroc"]),
                     number(t["auprc"]), number(t["ece"]), TableCell(format_size(found[d]["peak_bytes"]), found[d]["peak_bytes"])]
                    for d, t in sorted(tests.items(), key=lambda item: -item[1]["auroc"])
                ]  # fmt: skip
                header = ["detector", "kind", "AUROC", "95 % by question", "in groups", "AUPRC", "ECE", "memory"]
                tables.append(table(header, rows, caption=f"{name}, folds by {scheme}", is_sortable=False))
            skipped = "; ".join(f"{detector}: {reason}" for detector, reason in entry["skipped"].items())
            tables += [paragraph("Skipped: ", skipped, kind="note")] if skipped else []
        values = {name: f"{e['num_traces']:,} labeled traces" for name, e in self["stores"].items()}
        return fragment("Comparison of detectors", *tables, values=values)


def interval(limits: Any) -> str:
    """Return a confidence interval as text, a dash if there is none."""
    return "–" if limits is None else f"{limits[0]:.3f} to {limits[1]:.3f}"
