"""The plots of a training run as SVG files: loss and AUROC over epochs, ROC, precision and recall."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.errors import escape_unprintable
from tracestore.pages.document import stylesheet
from tracestore.pages.elements import Html, element, join
from tracestore.pages.plots import MAX_NAME, Series
from tracestore.reports import curves
from tracestore.reports.detector_tables import PROBE_NAME
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


_WIDTH, _HEIGHT = 720, 400
# Borders of the axes; names of the series are to the right of them.
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 480, 40, 350
_NUM_TICKS = 6


def drawing(title: str, series: Sequence[Series], *, x_label: str, y_label: str) -> str:
    """Return a picture of lines on a light background.

    Parameters
    ----------
    title : str
        Heading of the picture.
    series : sequence of Series
        Of kind "line", with a number as color or none. NaN interrupts a line.
    x_label, y_label : str
        Labels of the axes.
    """
    x, y = (np.concatenate([np.asarray(getattr(s, axis), float) for s in series]) for axis in ("x", "y"))
    across, up = _scale(x, _LEFT, _RIGHT), _scale(y, _BOTTOM, _TOP)
    # The first colors of the file are those of light pages.
    palette = re.findall(r"--series-\d: (#\w+)", stylesheet())[:7]
    parts = [_text(title, _LEFT, 24, font_weight="bold"), _text(x_label, (_LEFT + _RIGHT) / 2, 390, "middle")]
    parts.append(_text(y_label, 16, 195, "middle", transform="rotate(-90 16 195)"))
    ticks = np.linspace(*across[0], _NUM_TICKS)
    if (x == np.round(x)).all():  # epochs
        ticks = np.unique(np.clip(np.round(ticks), *across[0]))
    for value in ticks:
        place = across[1] + across[2] * value
        parts += [_line(place, _TOP, place, _BOTTOM), _text(f"{value:.3g}", place, 368, "middle")]
    for value in np.linspace(*up[0], _NUM_TICKS):
        place = up[1] + up[2] * value
        parts += [_line(_LEFT, place, _RIGHT, place), _text(f"{value:.3g}", _LEFT - 6, place + 4, "end")]
    for k, one in enumerate(series):
        color = palette[(one.color if isinstance(one.color, int) else k) % len(palette)]
        style = {"stroke": color, "stroke_width": 2, "stroke_dasharray": "6 4" if one.is_dashed else None}
        for points in _runs(np.asarray(one.x, float), np.asarray(one.y, float)):
            places = points * (across[2], up[2]) + (across[1], up[1])
            text = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
            parts.append(element("polyline", points=Html(text), fill="none", **style))
        height = _TOP + 20 + 20 * k
        parts += [element("path", d=f"M{_RIGHT + 15} {height}h24", **style), _text(one.name, _RIGHT + 46, height + 4)]
    background = element("rect", width="100%", height="100%", fill="#fff")
    return element(
        "svg", background, join(parts, "\n"), xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        width=_WIDTH, height=_HEIGHT, font_family="sans-serif", font_size=12, role="img", aria_label=title,
    )  # fmt: skip


def _scale(values: np.ndarray, begin: float, end: float) -> tuple[tuple[float, float], float, float]:
    """Return the limits of an axis, and offset and factor from values to pixels."""
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    if low == high:
        low, high = low - 0.5, high + 0.5
    factor = (end - begin) / (high - low)
    return (low, high), begin - factor * low, factor


def _runs(x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """Return the points (n, 2) of each part of a line that is not interrupted."""
    known = np.isfinite(x) & np.isfinite(y)
    parts = np.split(np.stack([x, y], axis=1), np.flatnonzero(np.diff(known)) + 1)
    return [part for part in parts if np.isfinite(part).all() and len(part)]


def _text(text: str, x: float, y: float, anchor: str | None = None, **options: object) -> Html:
    shown = escape_unprintable(text, MAX_NAME)
    return element("text", shown, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, **options)


def _line(x1: float, y1: float, x2: float, y2: float) -> Html:
    return element("path", d=f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}", stroke="#c9d1d9")
