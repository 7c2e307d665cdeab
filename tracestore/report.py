"""An HTML page about a store: properties, labels, lengths, scores, sizes, sources, samples and issues."""

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.console import format_size
from tracestore.errors import escape_unprintable
from tracestore.extras import needs
from tracestore.page import html_table, inline_image, page
from tracestore.store.io.fsio import atomic_write, check_destination, map_os_errors
from tracestore.store.maintain.lint import KINDS, lint_store
from tracestore.store.read.store import TraceStore

_SAMPLES = 8
_MAX_SOURCES = 50
_MAX_TEXT = 300
_QUANTILES = (0, 5, 25, 50, 75, 95, 100)


def write_report(
    store: TraceStore,
    path: Path,
    *,
    score_threshold: float = 0.5,
    lint: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write an HTML page about a store: one file that needs no network and runs no scripts.

    Parameters
    ----------
    store : TraceStore
        The store.
    path : Path
        The page.
    score_threshold : float
        Traces with a lower score count as hallucinated.
    lint : bool
        Include the issues that lint finds, which reads every value.
    progress : callable, optional
        Called with the number of checked traces and their total.

    Raises
    ------
    UsageError
        The page cannot be written.
    """
    check_destination(path)
    lengths = store.num_tokens
    parts = [
        "<h2>Store</h2>" + html_table(["", ""], _summary(store)),
        "<h2>Labels</h2>" + html_table(["", "traces"], _classes(store, score_threshold)),
        "<h2>Lengths and scores</h2>" + html_table(["", *(f"{q} %" for q in _QUANTILES)], _quantiles(store, lengths)),
        _histograms(store, lengths, score_threshold),
        "<h2>Size</h2>" + html_table(["array", "bytes", "share"], _sizes(store)),
        "<h2>Sources</h2>" + _sources(store),
        "<h2>Samples</h2>" + html_table(["trace", "question", "answer", "tokens", "score", "label"], _samples(store)),
        "<h2>Data-quality issues</h2>" + (_issues(store, score_threshold, progress) if lint else "<p>Not checked.</p>"),
    ]
    text = page(f"Store {escape_unprintable(store.path.name)}", parts)
    with map_os_errors(path), atomic_write(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def _summary(store: TraceStore) -> list[tuple[str, Any]]:
    info = store.info()
    info["bytes"] = format_size(info["bytes"])
    info["fields"] = ", ".join(info["fields"])
    info["provenance"] = "; ".join(map(str, store.provenance)) or None
    return [(name.replace("_", " "), "unknown" if value is None else value) for name, value in info.items()]


def _classes(store: TraceStore, threshold: float) -> list[tuple[str, str]]:
    targets = store.targets(threshold)
    counts = (
        (f"hallucinated (score below {threshold:g}, or label 1)", int((targets >= 0.5).sum())),
        ("correct", int((targets < 0.5).sum())),
        ("unlabeled: excluded from training", int(np.isnan(targets).sum())),
    )
    total = max(1, len(store))
    return [(name, f"{count:,} ({100 * count / total:.1f} %)") for name, count in counts]


def _quantiles(store: TraceStore, lengths: np.ndarray) -> list[list[str]]:
    rows = []
    for name, values in (("tokens", lengths[lengths > 0]), ("score", store.scores[np.isfinite(store.scores)])):
        if len(values):
            rows.append([name, *(f"{v:,.4g}" for v in np.percentile(values, _QUANTILES))])
    return rows


def _histograms(store: TraceStore, lengths: np.ndarray, threshold: float) -> str:
    with needs("train"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    scores = store.scores[np.isfinite(store.scores)]
    for axes, values, title in ((left, lengths[lengths > 0], "tokens of a trace"), (right, scores, "score")):
        try:
            axes.hist(values, bins=40, color="#4477aa")
        except ValueError:  # the values are so close that no bin edge lies between them
            axes.text(0.5, 0.5, f"{len(values):,} values about {values[0]:g}", ha="center", transform=axes.transAxes)
        axes.set(title=title, ylabel="traces")
    right.axvline(threshold, color="#ee6677", label=f"threshold {threshold:g}")
    right.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return inline_image(buffer.getvalue(), "histograms of tokens and scores")


def _sizes(store: TraceStore) -> list[tuple[str, str, str]]:
    """Return the name, the size and the share of each array and of the other files, largest first."""
    sizes: dict[str, int] = {}
    for number in range(store.info()["num_segments"]):
        segment = store.internals.segment(number)
        rows = store.internals.index.segment(number).rows
        for file in (rows, *segment.entries.values()):
            name = file.path.removeprefix(f"{segment.name}/").partition("/")[0]
            sizes[name] = sizes.get(name, 0) + file.size
    total = store.info()["bytes"]
    sizes["columns, index, manifest"] = max(0, total - sum(sizes.values()))
    ranked = sorted(sizes.items(), key=lambda item: -item[1])
    return [(name, format_size(size), f"{100 * size / max(1, total):.1f} %") for name, size in ranked]


def _sources(store: TraceStore) -> str:
    count = store.info()["num_sources"]
    rows = []
    for number in range(min(count, _MAX_SOURCES)):
        source = store.internals.index.source(number)
        rows.append((source.path, format_size(source.size) if source.size else "", f"{source.num_traces:,}"))
    more = f"<p>and {count - len(rows):,} more</p>" if count > len(rows) else ""
    return html_table(["file", "size", "traces"], rows) + more


def _samples(store: TraceStore) -> list[tuple[object, ...]]:
    """Return the rows of some traces, the same ones each time."""
    chosen = sorted(random.Random(0).sample(range(len(store)), min(_SAMPLES, len(store))))
    rows = []
    for trace in map(store.__getitem__, chosen):
        question, answer = (escape_unprintable(text or "", _MAX_TEXT) for text in (trace.question, trace.answer))
        values = [f"{v:g}" if v == v else "" for v in (trace.score, trace.label)]
        rows.append((f"{trace.index} ({trace.question_id})", question, answer, trace.num_tokens, *values))
    return rows


def _issues(store: TraceStore, threshold: float, progress: Callable[[int, int], None] | None) -> str:
    report = lint_store(store.path, score=store.score_name, score_threshold=threshold, progress=progress)
    if not report.counts:
        return f"<p>None in {report.num_traces:,} traces.</p>"
    rows = []
    for kind, count in report.counts.items():
        first = next(f for f in report.findings if f.kind == kind)
        severity, advice = KINDS[kind]
        where = "" if first.index is None else f"{first.index} ({first.question_id})"
        rows.append((severity, kind.replace("_", " "), f"{count:,}", where, first.found, advice))
    return html_table(["severity", "kind", "traces", "first", "found", "what to do"], rows)
