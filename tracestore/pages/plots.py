"""Plots of all pages: numbers and texts here, BokehJS draws them in the browser.

A plot has hover, zoom by dragging (or the buttons, or the wheel with Ctrl), a legend outside of its axes
that hides series, the colors of the page's theme, and its numbers as a table for screen readers. It becomes
an element with a JSON document, so that a page of 15 plots needs one copy of BokehJS and no Python of Bokeh.
Texts are never interpreted: BokehJS gets them without the delimiters of its formulas.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tracestore.errors import escape_unprintable
from tracestore.pages.elements import Html, element

# Maximum number of characters of a name in a plot.
MAX_NAME = 40
# Maximum number of rows and columns of a heat map: more than a screen shows.
MAX_SIDE = 400

Kind = Literal["line", "step", "points", "bars"]


@dataclass(frozen=True)
class Series:
    """One entry of the legend, with its numbers.

    Parameters
    ----------
    name : str
        Name in the legend. Series of the same name share their entry.
    x, y : sequence of float
        Positions and values; a value that is NaN or None interrupts a line.
    kind : str
        "line"; "step" (each value holds down to the previous x); "points"; "bars" (x: positions).
    low, high : sequence of float, optional
        Interval of each value: a band around a line, whiskers of points and bars.
    color : int or str, optional
        Number of a color of the palette, or "correct", "hallucinated", "muted". Default: the position of
        the name in the legend.
    is_dashed : bool
        Dash the line.
    has_marks : bool
        Mark each value of a line.
    sizes : sequence of float, optional
        Diameters of points in pixels.
    texts : sequence of str, optional
        A text of each value for the tooltip.
    links : sequence of str, optional
        An address of each value, opened by a click.
    """

    name: str
    x: Sequence[float] | np.ndarray
    y: Sequence[float | None] | np.ndarray
    kind: Kind = "line"
    low: Sequence[float] | np.ndarray | None = None
    high: Sequence[float] | np.ndarray | None = None
    color: int | str | None = None
    is_dashed: bool = False
    has_marks: bool = False
    sizes: Sequence[float] | np.ndarray | None = None
    texts: Sequence[str] | None = None
    links: Sequence[str] | None = None


def plot(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
    is_integer_x: bool = False,
    x_names: Sequence[str] | None = None,
    is_horizontal: bool = False,
    is_square: bool = False,
    references: Sequence[tuple[str, str, float]] = (),
    height: int = 300,
    note: str = "",
) -> Html:
    """Return a plot of lines, intervals, bars or points.

    Parameters
    ----------
    title : str
        Heading of the plot, and its name for screen readers.
    series : sequence of Series
        What is drawn, the first one at the bottom.
    x_label, y_label : str
        Labels of the axes.
    x_range, y_range : (float, float), optional
        Limits of the axes. Default: the data.
    is_integer_x : bool
        Label integers only: epochs, layers.
    x_names : sequence of str, optional
        Names of the positions 0, 1, ... on the x axis: groups, models.
    is_horizontal : bool
        Exchange the axes: positions from top to bottom, values to the right.
    is_square : bool
        Draw a square: ROC, reliability.
    references : sequence of (name, "x", "y" or "diagonal", value)
        Dashed lines at a value of an axis, or from (0, 0) to (1, 1).
    height : int
        Height in pixels.
    note : str
        Sentence under the plot.
    """
    spec = {
        "x": {
            "label": x_label,
            "range": x_range,
            "integer": is_integer_x,
            "names": _names(x_names),
        },
        "y": {"label": y_label, "range": y_range},
        "horizontal": is_horizontal,
        "square": is_square,
        "series": [_series(s) for s in series],
        "references": [list(r) for r in references],
        "height": height,
    }
    return _figure(title, spec, note)


def histogram(
    title: str,
    edges: Sequence[float] | np.ndarray,
    counts: Mapping[str, Sequence[float] | np.ndarray],
    *,
    x_label: str,
    y_label: str = "traces",
    colors: Mapping[str, str] | None = None,
    references: Sequence[tuple[str, str, float]] = (),
) -> Html:
    """Return a histogram of one or more distributions with common bins.

    Parameters
    ----------
    title : str
        Heading of the plot.
    edges : sequence of float
        Edges of the bins, one more than counts.
    counts : mapping of str to sequence of float
        Counts of each distribution, by its name.
    x_label, y_label : str
        Labels of the axes.
    colors : mapping of str to str, optional
        Color names of distributions, as in Series.
    references
        As in `plot`.
    """
    series = []
    for name, values in counts.items():
        color = (colors or {}).get(name)
        series.append({
            "name": escape_unprintable(name, MAX_NAME), "kind": "bins", "color": color,
            "x": _numbers(edges[:-1]), "right": _numbers(edges[1:]), "y": _numbers(values),
        })  # fmt: skip
    spec = {
        "x": {"label": x_label, "range": [float(edges[0]), float(edges[-1])]},
        "y": {"label": y_label},
        "series": series,
        "references": [list(r) for r in references],
        "height": 260,
    }
    return _figure(title, spec)


def heat_map(
    title: str,
    values: np.ndarray,
    *,
    x_label: str,
    y_label: str,
    value_label: str,
    x_names: Sequence[str] | None = None,
    y_names: Sequence[str] | None = None,
    height: int = 360,
    note: str = "",
) -> Html:
    """Return a heat map of a matrix with a color bar. The first row is at the top.

    Parameters
    ----------
    title : str
        Heading of the plot.
    values : ndarray
        float (rows, columns), of at most MAX_SIDE rows and columns. Values that are not finite have no color.
    x_label, y_label, value_label : str
        Names of columns, rows and values.
    x_names, y_names : sequence of str, optional
        Names of columns and rows: tokens.
    height, note
        As in `plot`.

    Raises
    ------
    ValueError
        The matrix is too large.
    """
    if max(values.shape) > MAX_SIDE:
        raise ValueError(f"a heat map of {values.shape}, expected at most {MAX_SIDE} rows and columns")
    known = values[np.isfinite(values)].astype(float)
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    span = high - low or 1.0
    # 16 bits per value: a third of the size of decimal numbers.
    levels = np.where(np.isfinite(values), np.round((values - low) / span * 65534), 65535).astype("<u2")
    image = {"rows": values.shape[0], "columns": values.shape[1], "low": low, "high": low + span}
    image["levels"] = base64.b64encode(levels.tobytes()).decode()
    spec = {
        "x": {"label": x_label, "integer": True, "names": _names(x_names)},
        "y": {"label": y_label, "integer": True, "names": _names(y_names)},
        "image": image | {"label": value_label},
        "series": [],
        "references": [],
        "height": height,
    }
    return _figure(title, spec, note)


def _series(series: Series) -> dict[str, Any]:
    # Paths differ at the end.
    shown = series.name if len(series.name) <= MAX_NAME else f"…{series.name[1 - MAX_NAME :]}"
    spec: dict[str, Any] = {
        "name": escape_unprintable(shown, MAX_NAME), "kind": series.kind, "color": series.color,
        "x": _numbers(series.x), "y": _numbers(series.y),
    }  # fmt: skip
    for name in ("low", "high", "sizes"):
        values = getattr(series, name)
        if values is not None:
            spec[name] = _numbers(values)
    if series.texts is not None:
        spec["texts"] = [escape_unprintable(t, 120) for t in series.texts]
    if series.links is not None:
        spec["links"] = list(series.links)
    return spec | ({"dashed": True} if series.is_dashed else {}) | ({"marks": True} if series.has_marks else {})


def _names(names: Sequence[str] | None) -> list[str] | None:
    return None if names is None else [escape_unprintable(name, MAX_NAME) for name in names]


def _numbers(values: Sequence[float | None] | np.ndarray) -> list[float | None]:
    """Return numbers with six digits; null where they are not finite."""
    numbers = (math.nan if v is None else float(v) for v in values)
    return [None if not math.isfinite(v) else float(f"{v:.6g}") for v in numbers]


def _figure(title: str, spec: dict[str, Any], note: str = "") -> Html:
    # "<" would let a text end the script element.
    text = json.dumps(spec, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return element(
        "figure",
        element("figcaption", title),
        element("div", class_="plot", data_plot=True, data_height=spec["height"], data_title=title),
        element("script", Html(text), type="application/json"),
        element("p", note, class_="note") if note else "",
    )
