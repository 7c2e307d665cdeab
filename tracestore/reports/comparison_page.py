"""The page of several runs, which `tracestore compare --output` writes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.evaluation.evaluate import run_scores
from tracestore.pages.document import Section, document
from tracestore.pages.elements import Html, element, join, paragraph, table
from tracestore.pages.plots import Series, plot
from tracestore.reports import curves
from tracestore.reports.detector_tables import PROBE_NAME, best_of, model_table, origin, pair_table, verdict
from tracestore.store.io.fsio import write_atomic
from tracestore.words import plural


def write_comparison(
    found: Mapping[str, Mapping[str, Any]],
    runs: Mapping[str, Any],
    path: Path,
    command: str | None,
    notes: Sequence[str],
) -> None:
    """Write one page about several runs.

    Parameters
    ----------
    found : mapping
        What `compare_runs` returns for the runs.
    runs : mapping
        The results of each run by its folder.
    path : Path
        The page.
    command : str or None
        The command that compares.
    notes : sequence of str
        Warnings about what is compared.
    """
    verdicts, sections = [paragraph(f"{note}.", kind="warning") for note in notes], []
    for name, entry in found.items():
        models, pairs = entry["models"], entry["comparisons"]
        verdicts += [element("h3", name), verdict(models, pairs, {})]
        tables = [model_table(models, {}, best_of(models)), pair_table(pairs)]
        note = f"{plural(entry['num_runs'], 'training')} of each run, of the folds and seeds that all runs have."
        sections.append(Section(name, join([*tables, _plots(runs, name)]), note))
    facts = {
        "runs": len(runs),
        "stores": ", ".join(dict.fromkeys(r["store"]["path"] for r in runs.values())),
        **origin(command),
    }
    page = document(
        "Comparison of runs",
        facts=facts,
        sections=[Section("Verdict", join(verdicts)), Section("Options that differ", _options(runs)), *sections],
    )
    write_atomic(path, page.encode("utf-8", "backslashreplace"))


def _options(runs: Mapping[str, Any]) -> Html:
    """Return a table of the options that are not the same in all runs."""
    configs = {folder: results["config"] for folder, results in runs.items()}
    names = dict.fromkeys(name for config in configs.values() for name in config)
    rows = []
    for name in names:
        values = [str(config.get(name, "–")) for config in configs.values()]
        if len(set(values)) > 1:
            rows.append([name, *values])
    if not rows:
        return paragraph("The runs have the same options.")
    return table(["option", *configs], rows, caption="Options that differ")


def _plots(runs: Mapping[str, Any], name: str) -> Html:
    validation, rocs, risks = [], [], []
    of_runs = {folder: run_scores(results)[name] for folder, results in runs.items()}
    common = set.intersection(*map(set, of_runs.values()))
    for folder, results in runs.items():
        trainings = [r["models"] for r in results.get("runs") or () if (r["fold"] or 0, r["seed"]) in common]
        histories = [models[name]["history"]["val_auroc"] for models in trainings or [results["models"]]]
        history = np.mean(np.array(histories, np.float64), axis=0)
        validation.append(Series(folder, np.arange(1, len(history) + 1), history, has_marks=True))
        scores = [of_run for key, of_run in of_runs[folder].items() if key in common]
        rocs.append(Series(folder, *curves.mean_curve(scores, curves.roc)))
        risks.append(Series(folder, *curves.mean_curve(scores, curves.risk_coverage)))
    probe = next((r["probe"]["best_val_auroc"] for r in runs.values() if r.get("probe")), None)
    lines = [] if probe is None else [(f"{PROBE_NAME} of the first run", "y", probe)]
    return element(
        "div",
        plot("Validation AUROC", validation, x_label="epoch", y_label="AUROC", is_integer_x=True, references=lines),
        plot("ROC", rocs, x_label="false positive rate", y_label="true positive rate", x_range=(0, 1),
             y_range=(0, 1.02), is_square=True, height=360, references=[("chance", "diagonal", 0)]),
        plot("Risk and coverage", risks, x_label="coverage", y_label="share of hallucinations among the answered",
             x_range=(0, 1), is_square=True, height=360),
        class_="plots",
    )  # fmt: skip
