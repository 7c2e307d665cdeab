"""The page: layout, controls and their callbacks.

Text from a store or from results is never interpreted as markup: PreText and Div with render_as_text
make text nodes, tables escape their cells (but not their titles), and glyphs paint.
"""

import html
from collections.abc import Callable
from typing import Any

import numpy as np
from bokeh.document import Document
from bokeh.events import Tap
from bokeh.layouts import column, row
from bokeh.model import Model
from bokeh.models.layouts import TabPanel, Tabs
from bokeh.models.sources import ColumnDataSource
from bokeh.models.widgets.buttons import Button, Toggle
from bokeh.models.widgets.inputs import Select, TextInput
from bokeh.models.widgets.markups import Div, PreText
from bokeh.models.widgets.sliders import Slider
from bokeh.models.widgets.tables import DataTable, NumberFormatter, StringFormatter, TableColumn

from tracestore.errors import TracestoreError, escape_unprintable
from tracestore.extras import needs
from tracestore.serve import plots
from tracestore.serve.search import ANY, LABELS, Query, TraceSearch
from tracestore.store.format import schema
from tracestore.store.read.trace import Trace
from tracestore.view import View

_PAGE_ROWS = 200
_MAX_TEXT = 4_000
_MAX_CELL = 120
# Maximum number of traces in the projection, which takes a second or two to read.
_MAX_POINTS = 1_000
_MEAN = "mean over the heads"


def _text(name: str, width: int) -> Div:
    return Div(css_classes=[name], width=width, render_as_text=True, disable_math=True,
               styles={"white-space": "pre-wrap", "overflow-wrap": "anywhere"})  # fmt: skip


class Page:
    """The page of one visitor. All visitors share the search and its store."""

    def __init__(self, search: TraceSearch) -> None:
        self._searcher, self._store = search, search.store
        self._found = np.zeros(0, np.int64)
        self._begin = 0
        self._trace: Trace | None = None
        self._make_search()
        self._make_trace()
        self._make_projection()
        self._search()
        if len(self._found):
            self._open(int(self._found[0]))

    def fill(self, document: Document) -> None:
        """Add the page to a Bokeh document."""
        results = self._searcher.results
        probabilities = plots.probability_plots(results, self._searcher.targets)
        training = plots.training_plots(results.history)
        test_metrics = "\n".join(
            f"{name}: " + ", ".join(f"{k} {v:.3f}" for k, v in test.items()) for name, test in results.test.items()
        )
        none = PreText(text="Give the folder that tracestore train wrote: tracestore serve STORE --results DIR")
        test = PreText(text=test_metrics, css_classes=["test-metrics"])
        panels = {
            "Trace": self._trace_panel,
            "Projection": self._projection_panel,
            "Predictions": column(*_rows(probabilities)) if probabilities else none,
            "Training": column(test, *_rows(training)) if results.test else none,
        }
        tabs = Tabs(tabs=[TabPanel(title=t, child=panel) for t, panel in panels.items()], css_classes=["tabs"])
        document.title = "tracestore"
        document.add_root(column(self._search_panel, tabs, margin=10))
        self._searcher.start_reading()

    # Search

    def _make_search(self) -> None:
        filters: list[Any] = [*LABELS, *(f"missed by {name}" for name in self._searcher.results.probabilities)]
        orders: list[Any] = [*self._searcher.orders]
        self._words = TextInput(title="words in id, question or answer", css_classes=["words"], width=300)
        self._filter = Select(title="traces", options=filters, value=filters[0], css_classes=["filter"])
        self._order = Select(title="order by", options=orders, value=orders[0], css_classes=["order"])
        self._descending = Toggle(label="largest first", css_classes=["descending"], margin=(24, 5, 5, 5))
        self._earlier = self._button("earlier", "earlier", lambda: self._turn(-_PAGE_ROWS))
        self._later = self._button("later", "later", lambda: self._turn(_PAGE_ROWS))
        self._message, self._problem = _text("message", 500), _text("problem", 1060)
        for control in (self._words, self._filter, self._order):
            self._on(control, "value", self._search)
        self._on(self._descending, "active", self._search)
        self._rows = ColumnDataSource({})
        self._rows.selected.on_change("indices", self._picked)
        text, number = StringFormatter(nan_format=""), NumberFormatter(format="0.000", nan_format="")
        columns = [
            TableColumn(field="index", title="trace", width=60),
            TableColumn(field="question_id", title="question id", width=160, formatter=text),
            TableColumn(field="question", title="question", width=330, formatter=text),
            TableColumn(field="answer", title="answer", width=260, formatter=text),
            TableColumn(field="tokens", title="tokens", width=60),
            TableColumn(field="score", title="score", width=60, formatter=number),
            TableColumn(field="label", title="label", width=90, formatter=text),
        ]
        columns += [
            TableColumn(field=f"model {k}", title=html.escape(name), width=90, formatter=number)
            for k, name in enumerate(self._searcher.results.probabilities)
        ]
        # The table does not sort: the search sorts all matches, not only the rows of one page.
        table = DataTable(source=self._rows, columns=columns, width=1060, height=260, index_position=None,
                          sortable=False, reorderable=False, css_classes=["table"])  # fmt: skip
        controls = row(self._words, self._filter, self._order, self._descending, self._earlier, self._later)
        self._search_panel = column(controls, self._message, self._problem, table)

    def _search(self) -> None:
        chosen = self._filter.value
        label, missed = (chosen, "") if chosen in LABELS else (ANY, chosen.removeprefix("missed by "))
        query = Query(self._words.value, label, missed, order=self._order.value, descending=self._descending.active)
        self._found = self._attempt(lambda: self._searcher.find(query), np.zeros(0, np.int64))
        self._begin = 0
        self._list()

    def _turn(self, by: int) -> None:
        if 0 <= self._begin + by < len(self._found):
            self._begin += by
            self._list()

    def _list(self) -> None:
        shown = self._found[self._begin : self._begin + _PAGE_ROWS]
        self._rows.selected.indices = []
        self._rows.data = self._attempt(lambda: self._columns(shown), {})
        first = min(self._begin + 1, len(self._found))
        self._message.text = f"{first:,} to {self._begin + len(shown):,} of {len(self._found):,} found, {len(self._store):,} traces in all"
        self._earlier.disabled = self._begin == 0
        self._later.disabled = self._begin + _PAGE_ROWS >= len(self._found)

    def _columns(self, indices: np.ndarray) -> dict[str, Any]:
        traces = [self._store[int(k)] for k in indices]
        columns: dict[str, Any] = {
            "index": indices,
            "question_id": [escape_unprintable(t.question_id, _MAX_CELL) for t in traces],
            "question": [escape_unprintable(t.question or "", _MAX_CELL) for t in traces],
            "answer": [escape_unprintable(t.answer or "", _MAX_CELL) for t in traces],
            "tokens": [t.num_tokens for t in traces],
            "score": self._store.scores[indices],
            "label": [_label(v) for v in self._searcher.targets[indices]],
        }
        for k, values in enumerate(self._searcher.results.probabilities.values()):
            columns[f"model {k}"] = values[indices]
        return columns

    def _picked(self, _name: str, _old: list[int], new: list[int]) -> None:
        shown = self._found[self._begin : self._begin + _PAGE_ROWS]
        if new and new[0] < len(shown):
            self._handle(lambda: self._open(int(shown[new[0]])))

    # One trace

    def _make_trace(self) -> None:
        num_heads = self._store.num_stored_heads if self._store.attention_mode == "heads" else 0
        heads: list[Any] = [_MEAN, *map(str, range(num_heads))]
        self._about, self._question, self._answer = (_text(n, 1060) for n in ("about", "question", "answer"))
        self._layer = self._layer_slider("layer", self._store.num_layers // 2)
        self._head = Select(title="head", options=heads, value=_MEAN, css_classes=["head"])
        self._threshold = Slider(
            title="attention above", start=0, end=1, step=0.01, value=0.05, css_classes=["threshold"]
        )
        self._pairs = _text("pairs", 700)
        self._heat = plots.HeatMap("attention, square root", "attended token", "attending token")
        self._norms = plots.HeatMap("norm of hidden states, logarithm", "token", "layer")
        self._graph = plots.AttentionGraph()
        self._on(self._layer, "value_throttled", self._draw)
        self._on(self._head, "value", self._draw)
        self._on(self._threshold, "value_throttled", self._draw_graph)
        self._view: View | None = None
        self._trace_panel = column(
            self._about,
            self._question,
            self._answer,
            row(self._layer, self._head, self._threshold),
            row(self._heat.plot, self._norms.plot),
            self._pairs,
            self._graph.plot,
        )

    def _open(self, index: int) -> None:
        self._trace = trace = self._store[index]
        self._about.text, self._question.text, self._answer.text = self._attempt(
            lambda: (
                self._values(trace),
                "Question: " + escape_unprintable(trace.question or "", _MAX_TEXT),
                "Answer: " + escape_unprintable(trace.answer or "", _MAX_TEXT),
            ),
            ("", "", ""),
        )
        self._draw()

    def _values(self, trace: Trace) -> str:
        source, position = trace.source
        values = [f"trace {trace.index}: {escape_unprintable(trace.question_id)}, sample {trace.sample}"]
        values.append(f"{trace.num_tokens} tokens" if trace.num_tokens else "last tokens only")
        if not np.isnan(trace.score):
            values.append(f"score {trace.score:g}")
        truth = _label(self._searcher.targets[trace.index])
        values.append(f"truth: {truth or 'unknown'}")
        for name, probabilities in self._searcher.results.probabilities.items():
            if not np.isnan(probabilities[trace.index]):
                values.append(f"{name} {probabilities[trace.index]:.3f}")
        values.append(f"from {escape_unprintable(source)} {position}")
        return "; ".join(values)

    def _draw(self) -> None:
        if self._trace is None:
            return
        head = None if self._head.value == _MEAN else int(self._head.value)
        layer, trace = self._chosen_layer(self._layer), self._trace
        self._view = self._attempt(lambda: View.read(self._store, trace, layer, head), None)
        attention = None if self._view is None else self._view.attention
        norms = None if self._view is None else self._view.norms
        self._heat.show(None if attention is None else np.sqrt(np.maximum(attention, 0)))
        self._norms.show(None if norms is None else np.log1p(norms))
        self._draw_graph()

    def _draw_graph(self) -> None:
        view = self._view
        attention = None if view is None else view.attention
        is_causal = view is not None and view.trace.attention_layout == "causal"
        names = None if view is None else self._attempt(lambda: view.trace.tokens_decoded, None)
        self._pairs.text = self._graph.show(attention, names, float(self._threshold.value), is_causal=is_causal)

    # Projection of all traces

    def _make_projection(self) -> None:
        self._depth = self._layer_slider("depth", max(0, self._store.num_layers - 1))
        self._points = ColumnDataSource({k: [] for k in ("x", "y", "color", "size")})
        self._projected = np.zeros(0, np.int64)
        self._projection_note = _text("projection-note", 700)
        plot = plots.projection(self._points)
        # Bokeh selects the point before it reports the tap.
        plot.on_event(Tap, lambda _: self._handle(self._tapped))
        self._on(self._depth, "value_throttled", self._project)
        draw = self._button("draw", "project", self._project, button_type="primary")
        self._projection_panel = column(row(self._depth, draw), self._projection_note, plot)

    def _project(self) -> None:
        layer = self._chosen_layer(self._depth)
        chosen = self._found
        if len(chosen) > _MAX_POINTS:
            chosen = np.sort(np.random.default_rng(0).choice(chosen, _MAX_POINTS, replace=False))
        points, share = self._attempt(lambda: self._principal(chosen, layer), (np.zeros((0, 2)), 0.0))
        self._projected = chosen[: len(points)]
        self._points.selected.indices = []
        self._points.data = {
            "x": points[:, 0],
            "y": points[:, 1],
            "color": plots.label_colors(self._searcher.targets[self._projected]),
            "size": np.full(len(points), 7),
        }
        self._projection_note.text = (
            f"layer {layer}, {len(points):,} of the {len(self._found):,} traces found, columns standardized; "
            f"{share:.0%} of the variance; red: hallucinated, blue: correct, gray: unlabeled; click a point to open its trace"
        )

    def _principal(self, indices: np.ndarray, layer: int) -> tuple[np.ndarray, float]:
        """Return the principal components (n, 2) of traces, and their share of the variance."""
        with needs("serve"):
            from sklearn.decomposition import PCA
            from sklearn.preprocessing import StandardScaler

        if len(indices) < 3:
            return np.zeros((0, 2)), 0.0
        last = [self._store.private_trace(int(k)).last_token[layer] for k in indices]
        states = schema.as_float32(np.stack(last), self._store.hidden_dtype)
        states = StandardScaler().fit_transform(np.nan_to_num(states, posinf=0, neginf=0))
        model = PCA(2, svd_solver="randomized", random_state=0)
        points = model.fit_transform(states)
        return points, float(np.nan_to_num(model.explained_variance_ratio_).sum())

    def _tapped(self) -> None:
        picked = self._points.selected.indices
        if picked and picked[0] < len(self._projected):
            self._open(int(self._projected[picked[0]]))

    def _layer_slider(self, name: str, layer: int) -> Slider:
        end = max(1, self._store.num_layers - 1)
        return Slider(title="layer", start=0, end=end, step=1, value=layer, css_classes=[name])

    def _chosen_layer(self, slider: Slider) -> int:
        return min(int(slider.value), max(0, self._store.num_layers - 1))

    def _attempt(self, work: Callable[[], Any], otherwise: Any) -> Any:
        """Return `work()`, or show an error of the store on the page and return `otherwise`."""
        try:
            return work()
        except TracestoreError as error:
            self._problem.text = escape_unprintable(str(error))
            return otherwise

    def _handle(self, work: Callable[[], None]) -> None:
        """Handle one action of the visitor: clear the error of the previous action, then call `work`."""
        self._problem.text = ""
        work()

    def _on(self, model: Model, name: str, work: Callable[[], None]) -> None:
        """Call `work` when a property of a control changes."""
        model.on_change(name, lambda attr, old, new: self._handle(work))

    def _button(self, label: str, name: str, work: Callable[[], None], **options: Any) -> Button:
        """Return a button that calls `work`, on the level of text inputs with a title."""
        button = Button(label=label, css_classes=[name], margin=(24, 5, 5, 5), **options)
        button.on_click(lambda _: self._handle(work))
        return button


def _label(target: float) -> str:
    return "hallucinated" if target >= 0.5 else "correct" if target < 0.5 else ""


def _rows(items: list[Any]) -> list[Any]:
    """Return the plots in rows of two."""
    return [row(*items[k : k + 2]) for k in range(0, len(items), 2)]
