"""Plots, the table and the page of a training run."""

import base64
import html
import math
from pathlib import Path
from typing import Any

COLUMNS = ("auroc", "accuracy", "precision", "recall", "f1")


def table(results: dict[str, Any]) -> str:
    """The closing table: a row a model, the probe below."""
    header = f"{'model':14} {'AUROC':>6} {'95 % interval':>15} " + " ".join(f"{c:>9}" for c in COLUMNS[1:])
    lines = [header]
    for name, entry in _entries(results):
        test = entry["test"]
        low, high = test["auroc_interval"]
        rest = " ".join(f"{test[c]:9.3f}" for c in COLUMNS[1:])
        lines.append(f"{name:14} {test['auroc']:6.3f} {f'{low:.3f} to {high:.3f}':>15} {rest}")
    return "\n".join(lines)


def _entries(results: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    entries = list(results["models"].items())
    if results.get("probe"):
        entries.append(("logistic probe", results["probe"]))
    return entries


def write_plots(results: dict[str, Any], folder: Path) -> list[Path]:
    """curves.png (loss and AUROC over epochs) and roc.png, as far as there are data."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from sklearn.metrics import roc_curve

    models = results["models"]
    if not models:
        return []
    figure, axes = pyplot.subplots(2, len(models), figsize=(4.2 * len(models), 6), squeeze=False, layout="constrained")
    for column, (name, entry) in enumerate(models.items()):
        history = entry["history"]
        epochs = range(1, len(history["train_loss"]) + 1)
        top, bottom = axes[0][column], axes[1][column]
        top.plot(epochs, history["train_loss"], label="train")
        top.plot(epochs, history["val_loss"], label="validation")
        top.set(title=name, ylabel="loss")
        top.legend()
        bottom.plot(epochs, history["val_auroc"], color="C1", label="validation")
        bottom.axhline(entry["test"]["auroc"], color="C2", linestyle="--", label="test, best epoch")
        bottom.set(xlabel="epoch", ylabel="AUROC", ylim=(0, 1.02))
        bottom.legend(loc="lower right")
    paths = [folder / "curves.png", folder / "roc.png"]
    figure.savefig(paths[0], dpi=110)
    pyplot.close(figure)
    figure, axis = pyplot.subplots(figsize=(5, 4.6), layout="constrained")
    for name, entry in models.items():
        scores = entry["test_scores"]
        false_positive, true_positive, _ = roc_curve(scores["label"], scores["logit"])
        axis.plot(false_positive, true_positive, label=f"{name} ({entry['test']['auroc']:.3f})")
    axis.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    axis.set(xlabel="false positive rate", ylabel="true positive rate", title="Test part")
    axis.legend(loc="lower right")
    figure.savefig(paths[1], dpi=110)
    pyplot.close(figure)
    return paths


def write_page(results: dict[str, Any], plots: list[Path], path: Path) -> None:
    """report.html: one file that needs no network."""
    rows = []
    for name, entry in _entries(results):
        test = entry["test"]
        low, high = test["auroc_interval"]
        cells = [name, f"{test['auroc']:.3f} ({low:.3f} to {high:.3f})"] + [f"{test[c]:.3f}" for c in COLUMNS[1:]]
        rows.append("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + "</tr>")
    images = "".join(
        f'<img alt="{p.stem}" src="data:image/png;base64,{base64.b64encode(p.read_bytes()).decode()}">' for p in plots
    )
    split = results["split"]
    counts = ", ".join(f"{part} {len(ids):,}" for part, ids in split.items())
    events = sum(len(m["oom_events"]) for m in results["models"].values())
    config = "".join(
        f"<tr><td>{html.escape(str(k))}</td><td>{html.escape(str(v))}</td></tr>" for k, v in results["config"].items()
    )
    head = "".join(f"<th>{c}</th>" for c in ("model", "AUROC (95 % interval)", *COLUMNS[1:]))
    path.write_text(
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>tracestore: training report</title>"
        "<style>body{font-family:sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem}"
        "table{border-collapse:collapse}td,th{padding:.3rem .7rem;border-bottom:1px solid #ccc;text-align:left}"
        "img{max-width:100%}</style>"
        f"<h1>Training report</h1><table><tr>{head}</tr>{''.join(rows)}</table>"
        f"<p>Questions: {counts}. Out-of-memory events: {events}.</p>{images}"
        f"<h2>Configuration</h2><table>{config}</table></html>",
        encoding="utf-8",
    )


def finite(value: Any) -> Any:
    """The value with NaN and infinities as None, for JSON."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
