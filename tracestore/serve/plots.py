"""Bokeh plots of a trace, of a store and of results.

Titles and formatters may interpret markup or mathematics. Strings of a trace are therefore drawn as
glyphs only.
"""

from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, LinearColorMapper, Range1d
from bokeh.models.annotations import Span
from bokeh.plotting import figure

from tracestore.serve.results import Results
from tracestore.view import downsample

HALLUCINATED_COLOR, CORRECT_COLOR, UNLABELED_COLOR = "#cc3311", "#0077bb", "#999999"
_LINE_COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")
# Maximum number of rows and columns of a heat map: more than a screen shows, few enough for a browser.
_MAX_SIDE = 600
# Maximum number of tokens with names, and of drawn pairs.
_MAX_NAMES = 120
MAX_PAIRS = 1_000


def _figure(**options: Any) -> figure:
    plot = figure(**options)
    plot.toolbar.logo = None  # the logo links to another site
    return plot


def label_colors(targets: np.ndarray) -> list[str]:
    """Return the color of each trace; targets (n,) are 1, 0 or NaN."""
    return [HALLUCINATED_COLOR if t >= 0.5 else CORRECT_COLOR if t < 0.5 else UNLABELED_COLOR for t in targets]


class HeatMap:
    """A heat map of a matrix, with its first row on top."""

    def __init__(self, name: str, across: str, down: str) -> None:
        self._mapper = LinearColorMapper(palette="Magma256", low=0, high=1, nan_color="#00aa00")
        self._source = ColumnDataSource({"image": [np.zeros((1, 1), "f4")], "dw": [1], "dh": [1]})
        self._x, self._y = Range1d(start=0, end=1), Range1d(start=1, end=0)
        self.plot = _figure(
            title=name, width=520, height=420, x_range=self._x, y_range=self._y, x_axis_label=across,
            y_axis_label=down, tools="pan,wheel_zoom,box_zoom,reset", toolbar_location="above",
        )  # fmt: skip
        self.plot.image("image", x=0, y=0, dw="dw", dh="dh", color_mapper=self._mapper, source=self._source)  # type: ignore[call-arg]
        self.plot.add_tools(HoverTool(tooltips=[(across, "$x{0}"), (down, "$y{0}"), ("value", "@image")]))

    def show(self, values: np.ndarray | None) -> None:
        """Show a float32 matrix (rows, columns), or nothing for None."""
        shape = (1, 1) if values is None else values.shape
        values = np.full((1, 1), np.nan, "f4") if values is None else np.where(np.isfinite(values), values, np.nan)
        values = downsample(downsample(values, _MAX_SIDE, 0), _MAX_SIDE, 1).astype("f4")
        known = values[np.isfinite(values)]
        low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
        self._mapper.update(low=low, high=high if high > low else low + 1)
        self._source.data = {"image": [values], "dw": [shape[1]], "dh": [shape[0]]}
        self._x.update(start=0, end=shape[1], reset_start=0, reset_end=shape[1])
        self._y.update(start=shape[0], end=0, reset_start=shape[0], reset_end=0)


class AttentionGraph:
    """Tokens on a line, with an arc to each token that receives attention above a threshold."""

    def __init__(self) -> None:
        self._arcs = ColumnDataSource({k: [] for k in ("x0", "x1", "top", "alpha", "width")})
        self._loops = ColumnDataSource({k: [] for k in ("x", "size")})
        self._tokens = ColumnDataSource({k: [] for k in ("x", "text")})
        self._x, self._y = Range1d(start=-1, end=1), Range1d(start=-1, end=1)
        self.plot = _figure(
            title="attention above the threshold", width=1060, height=380, x_range=self._x, y_range=self._y,
            tools="xpan,xwheel_zoom,reset", toolbar_location="above",
        )  # fmt: skip
        self.plot.bezier(
            "x0", 0, "x1", 0, "x0", "top", "x1", "top", source=self._arcs, line_color="#7733aa", line_alpha="alpha",
            line_width="width",
        )  # fmt: skip
        self.plot.scatter("x", 0, size="size", source=self._loops, fill_alpha=0.4, line_color=None, color="#7733aa")
        self.plot.text("x", 0, "text", source=self._tokens, angle=-np.pi / 2, text_font_size="11px", y_offset=6,
                       text_baseline="middle")  # fmt: skip
        self.plot.yaxis.visible = False
        self.plot.xgrid.visible = self.plot.ygrid.visible = False

    def show(self, attention: np.ndarray | None, tokens: list[str] | None, threshold: float, *, is_causal: bool) -> str:
        """Show the attention of a layer.

        Parameters
        ----------
        attention : ndarray or None
            float32 (S, S). None shows nothing.
        tokens : list of str or None
            Names of the tokens.
        threshold : float
            Lower bound of the drawn attention.
        is_causal : bool
            Tokens attend to themselves and earlier tokens only.

        Returns
        -------
        str
            How many pairs of tokens exceed the threshold.
        """
        size = 0 if attention is None else len(attention)
        self._x.update(start=-1, end=max(1, size), reset_start=-1, reset_end=max(1, size))
        self._y.update(start=-0.45 * max(1, size), end=0.75 * max(1, size))
        names = [t[:14] for t in (tokens or [])[:size]] if size <= _MAX_NAMES else []
        self._tokens.data = {"x": list(range(len(names))), "text": [n if n.strip() else repr(n)[1:-1] for n in names]}
        if attention is None:
            self._arcs.data = {k: [] for k in self._arcs.data}
            self._loops.data = {"x": [], "size": []}
            return "no attention"
        attending, attended = np.nonzero(attention > threshold)
        values = attention[attending, attended]
        strongest = np.argsort(-values, kind="stable")[:MAX_PAIRS]
        attending, attended, drawn = attending[strongest], attended[strongest], values[strongest]
        between = attending != attended
        reach = np.abs(attending - attended)[between]
        shade = np.clip(drawn / max(float(drawn.max(initial=0)), 1e-30), 0.08, 1)
        self._arcs.data = {
            "x0": attending[between], "x1": attended[between], "top": reach.astype("f4"),
            "alpha": shade[between], "width": 0.5 + 2.5 * shade[between],
        }  # fmt: skip
        self._loops.data = {"x": attending[~between], "size": 3 + 9 * shade[~between]}
        cut = f", the {MAX_PAIRS:,} strongest drawn" if len(values) > MAX_PAIRS else ""
        pairs, kind = (size * (size + 1) // 2, " (itself and earlier tokens)") if is_causal else (size * size, "")
        return f"{len(values):,} of {pairs:,} pairs{kind} above {threshold:g}{cut}"


def projection(points: ColumnDataSource) -> figure:
    """Return a scatter plot of traces. `points` has the columns x, y, color and size."""
    plot = _figure(
        title="last tokens' hidden states, two principal components", width=700, height=520,
        tools="tap,pan,wheel_zoom,box_zoom,reset", toolbar_location="above",
    )  # fmt: skip
    plot.scatter("x", "y", color="color", size="size", fill_alpha=0.6, line_color=None, source=points)
    return plot


def probability_plots(results: Results, targets: np.ndarray) -> list[figure]:
    """Return histograms of the probabilities of each detector by label, with its threshold."""
    plots, edges = [], np.linspace(0, 1, 41)
    for name, values in results.probabilities.items():
        plot = _figure(
            title=name, width=520, height=260, x_range=Range1d(start=0, end=1), x_axis_label="probability of a hallucination",
            y_axis_label="traces", tools="", toolbar_location=None,
        )  # fmt: skip
        for legend, color, chosen in (
            ("correct", CORRECT_COLOR, targets < 0.5),
            ("hallucinated", HALLUCINATED_COLOR, targets >= 0.5),
        ):
            counts, _ = np.histogram(values[chosen & ~np.isnan(values)], edges)
            plot.quad(left=edges[:-1], right=edges[1:], bottom=0, top=counts, color=color, fill_alpha=0.5,
                      line_color=None, legend_label=legend)  # fmt: skip
        plot.add_layout(Span(location=results.thresholds.get(name, 0.5), dimension="height", line_dash="dashed"))
        plots.append(plot)
    return plots


def training_plots(history: dict[str, dict[str, list[float]]]) -> list[figure]:
    """Return plots of loss and AUROC by epoch for each detector."""
    plots = []
    for name, curves in history.items():
        for kind in ("loss", "auroc"):
            shown = {k: v for k, v in curves.items() if k.endswith(kind) and v}
            if not shown:
                continue
            plot = _figure(
                title=f"{name}: {kind}", width=520, height=260, x_axis_label="epoch", tools="pan,box_zoom,reset",
                toolbar_location="above",
            )  # fmt: skip
            for color, (curve, values) in zip(_LINE_COLORS, shown.items(), strict=False):
                epochs = list(range(1, len(values) + 1))
                plot.line(epochs, values, color=color, legend_label=curve.replace("_", " "))
                plot.scatter(epochs, values, color=color, size=4)
            longest = max(map(len, shown.values()))
            plot.xaxis.ticker = FixedTicker(ticks=sorted({*range(1, longest + 1, max(1, longest // 10)), longest}))
            plots.append(plot)
    return plots
