"""The results of a comparison as text tables."""

from typing import Any

from tracestore.reports.benchmark_page import LEGEND, label_source_tables, scheme_table, too_few, transfer_table
from tracestore.words import plural


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
