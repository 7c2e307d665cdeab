"""The plots of a training run as files: loss and AUROC over epochs, ROC, precision and recall."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.evaluation.metric_table import PROBE_NAME
from tracestore.pages.plots import Series
from tracestore.pages.svg import drawing
from tracestore.reports import curves
from tracestore.reports.run_page import test_scores
from tracestore.store.io.fsio import write_atomic

PLOTS = ("loss.svg", "auroc.svg", "roc.svg", "precision_recall.svg")


def write_plots(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write PLOTS.

    Parameters
    ----------
    results : mapping
        The content of results.json.
    folder : Path
        An existing folder.

    Returns
    -------
    list of Path
        The written files; empty where no model was trained.
    """
    losses, aurocs = [], []
    for k, (name, entry) in enumerate(results["models"].items()):
        history = {key: np.array(values, float) for key, values in entry["history"].items()}
        epochs = np.arange(1, len(history["train_loss"]) + 1)
        losses.append(Series(f"{name}, training", epochs, history["train_loss"], color=k))
        losses.append(Series(f"{name}, validation", epochs, history["val_loss"], color=k, is_dashed=True))
        aurocs.append(Series(name, epochs, history["val_auroc"]))
    if not losses:
        return []
    of_test: dict[str, list[Series]] = {"roc": [], "precision_recall": []}
    for name, runs in test_scores(results).items():
        for plot, curve in (("roc", curves.roc), ("precision_recall", curves.precision_recall)):
            of_test[plot].append(Series(name, *curves.mean_curve(runs, curve), is_dashed=name == PROBE_NAME))
    drawings = (
        drawing("Loss", losses, x_label="epoch", y_label="loss"),
        drawing("Validation AUROC", aurocs, x_label="epoch", y_label="AUROC"),
        drawing("ROC, test split", of_test["roc"], x_label="false positive rate", y_label="true positive rate"),
        drawing("Precision and recall, test split", of_test["precision_recall"], x_label="recall", y_label="precision"),
    )
    paths = [folder / name for name in PLOTS]
    for path, text in zip(paths, drawings, strict=True):
        write_atomic(path, text.encode("utf-8", "backslashreplace"))
    return paths
