"""The projection of traces on the principal components of their last tokens' hidden states."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np

from tracestore.errors import TracestoreError
from tracestore.pages.document import Section
from tracestore.pages.elements import Html, details, element, join, number, paragraph, table
from tracestore.pages.plots import Series, plot
from tracestore.serve.forms import address, alert, form, hidden_fields, number_field, number_of, part
from tracestore.serve.search import CORRECT, HALLUCINATED, UNLABELED, Query, TraceSearch, label_name
from tracestore.words import plural

# Maximum number of traces in the projection.
MAX_POINTS = 1_000
# Dimensions of the subspace that the components are searched in, and iterations.
_SUBSPACE, _ITERATIONS = 12, 8
_COLORS = ((HALLUCINATED, "hallucinated"), (CORRECT, "correct"), (UNLABELED, "muted"))


class Projection:
    """Projections of what searches find; the last one is kept."""

    def __init__(self, search: TraceSearch) -> None:
        self._search = search
        self._last_points = lru_cache(maxsize=1)(self._points)

    def sections(self, query: Query, arguments: Mapping[str, str]) -> list[Section]:
        """Return the sections of the page. An error is a line on the page."""
        count = self._search.store.num_layers
        layer, problem, content = max(0, count - 1), "", Html("")
        try:
            layer = number_of(arguments, "layer", count, layer)
            content = self._content(query, layer)
        except TracestoreError as error:
            problem = str(error)
        field = number_field("Layer", "layer", layer, min=0, max=max(0, count - 1))
        controls = form("/projection", "Projection", *hidden_fields(query.pairs()), field)
        return [Section("Principal components", join([controls, part("points", alert(problem), content)]))]

    def _content(self, query: Query, layer: int) -> Html:
        chosen, points, share = self._last_points(replace(query, page=1), layer)
        found, arguments = len(self._search.find(query)), query.arguments(page=1)
        message = (
            f"Layer {layer}: {len(points):,} of the {found:,} traces found, columns standardized; "
            f"{share:.0%} of the variance. A click on a point opens its trace."
        )
        if not len(points):
            message = f"{plural(found, 'trace')} found; a projection needs at least three."
        link = paragraph(element("a", "List these traces", href=address("/store", arguments)))
        head = [element("p", message, role="status", class_="message"), link]
        if not len(points):
            return join(head)
        links = [address(f"/trace/{index}", arguments) for index in chosen.tolist()]
        names = [
            f"{index}: {name}" for index, name in zip(chosen, self._search.store.question_ids.take(chosen), strict=True)
        ]
        labels = [label_name(target) or UNLABELED for target in self._search.targets[chosen]]
        series = []
        for label, color in _COLORS:
            inside = [k for k, own in enumerate(labels) if own == label]
            if inside:
                x, y = points[inside].T
                texts = [names[k] for k in inside]
                series.append(Series(label, x, y, "points", color=color, texts=texts, links=[links[k] for k in inside]))
        drawn = plot("Traces", series, x_label="first component", y_label="second component", height=520)
        rows = [
            [element("a", name, href=link), label, number(x, 2), number(y, 2)]
            for name, link, label, (x, y) in zip(names, links, labels, points.tolist(), strict=True)
        ]
        listed = table(["trace", "label", "first component", "second component"], rows, caption="Points")
        return join([*head, drawn, details("Points as a table", listed)])

    def _points(self, query: Query, layer: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Return the traces (n,), their components (n, 2) and the share of the variance; n = 0 for too few traces."""
        chosen = self._search.find(query)
        if len(chosen) > MAX_POINTS:
            chosen = np.random.default_rng(0).choice(chosen, MAX_POINTS, replace=False)
        chosen = np.sort(chosen) if len(chosen) >= 3 else chosen[:0]
        return chosen, *principal_components(self._search.store[chosen].features(layer))


def principal_components(states: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the two principal components (n, 2) of standardized states (n, D), and their share of the variance.

    The value of each component that is largest in magnitude is positive.
    """
    if len(states) == 0:
        return np.zeros((0, 2)), 0.0
    x = np.nan_to_num(states.astype("f8"), posinf=0, neginf=0)
    x -= x.mean(0)
    deviations = x.std(0)
    x /= np.where(deviations > 0, deviations, 1)
    # Subspace iteration [Halko et al. 2011, algorithm 4.4], of a subspace that holds everything for small matrices.
    basis = np.random.default_rng(0).standard_normal((x.shape[1], min(*x.shape, _SUBSPACE)))
    for _ in range(_ITERATIONS):
        basis = np.linalg.qr(x.T @ np.linalg.qr(x @ basis)[0])[0]
    left, sizes, _ = np.linalg.svd(x @ basis, full_matrices=False)
    points = np.zeros((len(x), 2))
    points[:, : min(2, len(sizes))] = left[:, :2] * sizes[:2]
    points *= np.where(points[np.abs(points).argmax(0), [0, 1]] < 0, -1, 1)
    total = float(np.square(x).sum())
    return points, float(np.square(sizes[:2]).sum()) / total if total > 0 else 0.0
