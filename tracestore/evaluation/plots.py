"""Plots of a training run."""

from pathlib import Path
from typing import Any

import numpy as np

from tracestore.evaluation.metrics import counts_above
from tracestore.store.io.fsio import atomic_write

PLOTS = ("curves.png", "roc.png", "precision_recall.png", "reliability.png")


def write_plots(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write the files in PLOTS: loss and AUROC over epochs, ROC, precision-recall, reliability.

    Curves of several runs are averaged: per epoch, per false positive rate, per recall.

    Parameters
    ----------
    results : dict
        The content of results.json.
    folder : Path

    Returns
    -------
    list of Path
        The written files; empty where no model was trained.
    """
    models = results["models"]
    if not models:
        return []
    paths = [folder / name for name in PLOTS]
    figure, axes = _axes(2, len(models), 4.2, 3)
    for (name, entry), (top, bottom) in zip(models.items(), axes.T, strict=True):
        _plot_history(name, entry, top, bottom)
    _save(figure, paths[0])
    for path, plot in zip(paths[1:], (_plot_roc, _plot_precision_recall, _plot_reliability), strict=True):
        figure, axes = _axes(1, 1, 5, 4.6)
        plot(results, axes[0, 0])
        _save(figure, path)
    return paths


def _test_scores(results: dict[str, Any], name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return labels and logits of each run of a model."""
    runs = [run["models"] for run in results["runs"]] if "runs" in results else [results["models"]]
    scores = [run[name]["test_scores"] for run in runs]
    return [(np.array(s["label"]), np.array(s["logit"])) for s in scores]


def _axes(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """Return a figure and its (rows, columns) axes; width and height are inches per axis, with labels.

    The margins are fixed, because a layout that measures every text takes longer than drawing.
    """
    from matplotlib.figure import Figure

    left, right, bottom, top = 0.75, 0.15, 0.5, 0.55
    figure = Figure(figsize=(columns * width, rows * height), dpi=110)
    axes = figure.subplots(rows, columns, squeeze=False)
    figure.subplots_adjust(
        left=left / (columns * width),
        right=1 - right / (columns * width),
        bottom=bottom / (rows * height),
        top=1 - top / (rows * height),
        wspace=(left + right) / (width - left - right),
        hspace=(bottom + top) / (height - bottom - top),
    )
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    # figure.savefig would draw twice.
    with atomic_write(path) as file:
        FigureCanvasAgg(figure).print_png(file)  # type: ignore[no-untyped-call]


def _plot_history(name: str, entry: dict[str, Any], top: Any, bottom: Any) -> None:
    history = entry["history"]
    epochs = range(1, len(history["train_loss"]) + 1)
    top.plot(epochs, history["train_loss"], label="train")
    top.plot(epochs, history["val_loss"], label="validation")
    top.set(title=name, ylabel="loss")
    top.legend()
    bottom.plot(epochs, history["val_auroc"], color="C1", label="validation")
    bottom.axhline(entry["test"]["auroc"], color="C2", linestyle="--", label="test, best epoch")
    bottom.set(xlabel="epoch", ylabel="AUROC", ylim=(0, 1.02))
    bottom.legend(loc="lower right")


def _plot_roc(results: dict[str, Any], axis: Any) -> None:
    for name, entry in results["models"].items():
        counts = [counts_above(y, logit) for y, logit in _test_scores(results, name)]
        curves = [(negative / negative[-1], positive / positive[-1]) for positive, negative, _ in counts]
        x, y = curves[0] if len(curves) == 1 else _mean_curve(curves)
        axis.plot(x, y, label=f"{name} ({entry['test']['auroc']:.3f})")
    axis.plot([0, 1], [0, 1], color="gray", linewidth=0.8)
    axis.set(xlabel="false positive rate", ylabel="true positive rate", title="Test split")
    axis.legend(loc="lower right")


def _plot_precision_recall(results: dict[str, Any], axis: Any) -> None:
    for name, entry in results["models"].items():
        curves = []
        for y, logit in _test_scores(results, name):
            positive, negative, _ = counts_above(y, logit)
            # The precision of zero predictions is defined as 1.
            precision = np.r_[1, positive[1:] / (positive + negative)[1:]]
            curves.append((positive / positive[-1], precision))
        if len(curves) == 1:
            # Each precision holds from its recall down to the next lower recall.
            axis.step(*curves[0], where="pre", label=f"{name} ({entry['test']['auprc']:.3f})")
        else:
            axis.plot(*_mean_curve(curves), label=f"{name} ({entry['test']['auprc']:.3f})")
    share = np.mean(np.concatenate([y for y, _ in _test_scores(results, name)]))
    axis.axhline(share, color="gray", linewidth=0.8)
    axis.set(xlabel="recall", ylabel="precision", title="Test split", ylim=(0, 1.02))
    axis.legend(loc="lower left")


def _plot_reliability(results: dict[str, Any], axis: Any) -> None:
    axis.plot([0, 1], [0, 1], color="gray", linewidth=0.8)
    for k, (name, entry) in enumerate(results["models"].items()):
        bins = entry["calibration"]["reliability"]
        x, y = [b["mean_probability"] for b in bins], [b["fraction"] for b in bins]
        axis.plot(x, y, color=f"C{k}", label=f"{name} (ECE {entry['test']['ece']:.3f})")
        # The area of a point is proportional to the number of traces in its bin.
        total = sum(b["count"] for b in bins)
        axis.scatter(x, y, s=[10 + 300 * b["count"] / total for b in bins], color=f"C{k}", alpha=0.6)
    axis.set(xlabel="predicted probability", ylabel="share of hallucinations", title="Test split")
    axis.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    axis.legend(loc="upper left")


def _mean_curve(curves: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean curve, interpolated on a grid of x in [0, 1]."""
    x = np.linspace(0, 1, 201)
    return x, np.mean([np.interp(x, *curve) for curve in curves], axis=0)
