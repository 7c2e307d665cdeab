"""An HTML page about a store: what it holds, distributions, example traces, data-quality issues, provenance, bytes."""

import random
import shlex
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

import tracestore
from tracestore.errors import escape_unprintable
from tracestore.pages.document import Section, document
from tracestore.pages.elements import Html, TableCell, card, cards, command, details, element, join, paragraph, table
from tracestore.pages.plots import Series, heat_map, histogram, plot
from tracestore.store.format import schema
from tracestore.store.format.labels import CORRECT, DEFAULT_THRESHOLD, is_in_unit_range
from tracestore.store.html import trace_facts, trace_texts, view_command
from tracestore.store.io.fsio import atomic_write, check_destination, map_os_errors
from tracestore.store.maintain.lint import KINDS, LintReport, lint_traces
from tracestore.store.read.batch_sources import primary_locations
from tracestore.store.read.index import grouped
from tracestore.store.read.store import TraceStore
from tracestore.trace_view import View, downsample
from tracestore.words import format_size, plural

SEED = 0
_EXAMPLES, _LINKED = 6, 3
# The sample whose hidden states are read for the norms: traces, and a bound of their bytes.
_NORM_TRACES, _NORM_BYTES = 200, 256 << 20
_MAX_ROWS, _MAX_OPEN, _MAX_SIDE = 50, 10, 96
_QUANTILES = (0, 5, 25, 50, 75, 95, 100)
_BINS = 40
_CLASSES = ("hallucinated", "correct", "unlabeled")


def write_report(
    store: TraceStore,
    path: Path,
    *,
    score_threshold: float | None = None,
    lint: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write an HTML page about a store: one file that needs no network and runs the scripts of `pages` only.

    Parameters
    ----------
    store : TraceStore
        The store.
    path : Path
        The page.
    score_threshold : float, optional
        Traces with a lower score (where a high one means a hallucination: with this or a higher one) count as
        hallucinated. Default: 0.5, for scores in [0, 1].
    lint : bool
        Include the issues that lint finds, which reads every value.
    progress : callable, optional
        Called with the number of checked traces and their total.

    Raises
    ------
    UsageError
        The page cannot be written.
    MissingExtraError
        Bokeh is not installed.
    """
    check_destination(path)
    targets = store.targets(score_threshold)
    classes = np.select([targets >= 0.5, targets < 0.5], [0, 1], 2)
    issues = lint_traces(store, score_threshold, progress) if lint else None
    if score_threshold is None and is_in_unit_range(store.scores):
        score_threshold = DEFAULT_THRESHOLD
    examples = _examples(classes)
    sections = [
        Section("Contents", _contents(store, classes, score_threshold)),
        Section("Distributions", _distributions(store, classes, score_threshold)),
        Section(
            "Example traces",
            cards(_trace_card(store, k, _CLASSES[classes[k]]) for k in examples),
            note=f"Drawn at random with seed {SEED}, from each class in turn.",
        ),
        Section("Data-quality issues", _issues(store, issues, classes, examples)),
        Section("Provenance", _provenance(store)),
        Section("Bytes", table(["array", "size", "share"], _sizes(store), caption="Files of the store by array")),
    ]
    text = document(f"Store {escape_unprintable(store.path.name)}", facts=_facts(store), sections=sections)
    with map_os_errors(path), atomic_write(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def _facts(store: TraceStore) -> dict[str, object]:
    info = store.info()
    attention = f"{info['attention']}, {info['attention_layout']}" if info["attention_layout"] else "none"
    return {
        "store": info["path"],
        "traces": info["num_traces"],
        "models": ", ".join(sorted({p.model for p in store.provenance if p.model})) or "unknown",
        "tokens": info["num_tokens"],
        "layers": info["num_layers"],
        "hidden size": info["hidden_dim"],
        "attention heads": info["num_heads"],
        "attention": attention,
        "dtype": info["hidden_dtype"],
        "size": format_size(info["bytes"]),
        "generation": info["generation"],
        "tracestore": tracestore.__version__,
    }


def _contents(store: TraceStore, classes: np.ndarray, threshold: float | None) -> Html:
    counts = np.bincount(classes, minlength=3).tolist()
    direction = "below" if store.score_direction == CORRECT else "at or above"
    names = (
        f"hallucinated ({f'score {direction} {threshold:g}, or ' if threshold is not None else ''}label 1)",
        "correct",
        "unlabeled: excluded from training",
    )
    share = [[name, count, _percent(count, len(store))] for name, count in zip(names, counts, strict=True)]
    verdict = f"{plural(len(store), 'trace')}: " + ", ".join(
        f"{count:,} {name}" for name, count in zip(_CLASSES, counts, strict=True) if count
    )
    scores = [
        [
            f"{name} (default)" if name == store.score_name else name,
            f"high: {field.direction}",
            int(np.isfinite(values := store.named_scores(name)).sum()),
            *_quantiles(values, (0, 50, 100)),
            field.source or "",
        ]
        for name, field in sorted(store.score_fields.items())
    ]
    fields = [[name, count, _percent(count, len(store))] for name, count in _field_counts(store)]
    parts = [table(["class", "traces", "share"], share, caption="Classes")]
    if scores:
        header = ["score", "direction", "traces", "minimum", "median", "maximum", "source"]
        parts.append(table(header, scores, caption="Scores"))
    serve = [shlex.join(["tracestore", "serve", str(m.files.location)]) for m in store.internals.members]
    return join([
        paragraph(verdict, kind="verdict"),
        element(
            "div",
            element("div", *parts),
            element("div", table(["field", "traces", "share"], fields, caption="Fields")),
            class_="tables",
        ),
        paragraph("To search and open the traces:"), *map(command, serve),
    ])  # fmt: skip


def _percent(count: int, total: int) -> TableCell:
    share = 100 * count / max(1, total)
    return TableCell(f"{share:.1f} %", share)


def _quantiles(values: np.ndarray, levels: Iterable[float]) -> list[TableCell]:
    known = values[np.isfinite(values)]
    found = np.percentile(known, list(levels)) if len(known) else [np.nan for _ in levels]
    return [TableCell("–") if np.isnan(v) else TableCell(f"{v:,.4g}", float(v)) for v in found]


def _field_counts(store: TraceStore) -> list[tuple[str, int]]:
    """Return the number of traces that have each field, most frequent first."""
    index, counts = store.internals.index, Counter[str]()
    places = primary_locations(index.locations(store.indices))
    for number, traces in grouped(places[:, 0]):
        segment, own = store.internals.segment(number), places[traces, 1]
        bits = segment.values("fields")[own]
        for name, bit in schema.FIELD_BITS.items():
            counts[name] += int(np.count_nonzero(bits & bit))
        for name in segment.optional_names:
            counts[name] += int(np.count_nonzero(segment.has_optional(name)[own]))
    groups = sum(bool(store.group(k)) for k in range(len(store)))
    known = [(name, count) for name, count in counts.items() if count]
    known += [("group", groups)] if groups else []
    return sorted(known, key=lambda item: (-item[1], item[0]))


def _distributions(store: TraceStore, classes: np.ndarray, threshold: float | None) -> Html:
    lengths, scores = store.num_tokens, store.scores
    figures = []
    for title, values, label, references in (
        ("Length", lengths[:] * 1.0, "tokens of a trace", ()),
        (f"Score: {store.score_name}", scores, "score", [] if threshold is None else [("threshold", "x", threshold)]),
    ):
        known = np.isfinite(values) & ((values > 0) | (label == "score"))
        if known.any():
            figures.append(_histogram(title, values, known, classes, label, references))
    figures += _norms(store)
    rows = [
        [name, *_quantiles(values, _QUANTILES)]
        for name, values in (("tokens", np.where(lengths > 0, lengths, np.nan)), ("score", scores))
        if np.isfinite(values).any()
    ]
    header = ["value", *(f"{q} %" for q in _QUANTILES)]
    quantiles = table(header, rows, caption="Quantiles", is_sortable=False) if rows else ""
    return join([element("div", *figures, class_="plots"), quantiles])


def _histogram(
    title: str, values: np.ndarray, known: np.ndarray, classes: np.ndarray, label: str, references: Any
) -> Html:
    low, high = float(values[known].min()), float(values[known].max())
    edges = np.linspace(low, high, _BINS + 1)
    if (values[known] % 1 == 0).all() and high - low >= 2:  # bins of equally many integers
        edges = np.arange(low, high + 1 + (step := np.ceil((high - low + 1) / _BINS)), step) - 0.5
    # Values so close, or so large, that no edge lies between them are one bin.
    if not (np.diff(edges) > 0).all():
        edges = np.array([low - max(1.0, abs(low) * 1e-6), high + max(1.0, abs(high) * 1e-6)])
    counts = {
        name: np.histogram(values[known & (classes == k)], edges)[0]
        for k, name in enumerate(_CLASSES)
        if (known & (classes == k)).any()
    }
    colors = {"hallucinated": "hallucinated", "correct": "correct", "unlabeled": "muted"}
    return histogram(title, edges, counts, x_label=label, colors=colors, references=references)


def _norms(store: TraceStore) -> list[Html]:
    """Return the plot of the norms of hidden states by layer, from a random sample of traces."""
    if not len(store):
        return []
    norms: list[np.ndarray] = []
    num_bytes = 0
    for k in random.Random(SEED).sample(range(len(store)), min(_NORM_TRACES, len(store))):
        trace = store.private_trace(k)
        states = trace.hidden_states_bits if trace.num_tokens else trace.last_token_bits[:, None]
        num_bytes += states.nbytes
        if norms and num_bytes > _NORM_BYTES:
            break
        wide = schema.as_float32(states, store.hidden_dtype)
        found = np.sqrt(np.einsum("lsd,lsd->ls", wide, wide))
        norms.append(found)
    values = np.concatenate(norms, axis=1)
    values[~np.isfinite(values)] = np.nan
    at_end = np.stack([found[:, -1] for found in norms], axis=1)
    at_end[~np.isfinite(at_end)] = np.nan
    low, middle, high = np.nanpercentile(values, (5, 50, 95), axis=1)
    layers = np.arange(store.num_layers)
    series = [
        Series("all tokens: median, 5 to 95 %", layers, middle, low=low, high=high, has_marks=True),
        Series("last token: median", layers, np.nanmedian(at_end, axis=1), is_dashed=True, has_marks=True),
    ]
    note = f"{plural(values.shape[1], 'token')} of {plural(len(norms), 'trace')}, drawn at random with seed {SEED}."
    return [
        plot("Norm of hidden states by layer", series, x_label="layer", y_label="norm", is_integer_x=True, note=note)
    ]


def _examples(classes: np.ndarray) -> list[int]:
    """Return some traces, from each class in turn, the same ones each time."""
    draw = random.Random(SEED)
    by_class = [np.flatnonzero(classes == k).tolist() for k in range(len(_CLASSES))]
    drawn = [draw.sample(indices, min(_EXAMPLES, len(indices))) for indices in by_class]
    in_turn = [k for turn in zip_longest(*drawn) for k in turn if k is not None]
    return sorted(in_turn[:_EXAMPLES])


def _trace_card(store: TraceStore, index: int, label: str, *, has_plot: bool = True) -> Html:
    trace = store[index]
    content = [trace_texts(trace), trace_facts(trace)]
    if has_plot and trace.attention_layout is not None:
        view = View.read(store, trace)
        assert view.attention is not None
        blocks = downsample(downsample(view.attention, _MAX_SIDE, 0), _MAX_SIDE, 1)
        is_whole = blocks.shape == view.attention.shape
        figure = heat_map(
            f"Attention, {view.title}",
            np.sqrt(np.maximum(blocks, 0)),
            x_label="attended token",
            y_label="attending token",
            value_label="square root of the attention",
            note=""
            if is_whole
            else f"Each value is the maximum of a block of the {plural(trace.num_tokens, 'token')}.",
        )
        content.append(figure)
    content.append(command(view_command(store, index)))
    kind = label if label != "unlabeled" else None
    return element("div", card(f"Trace {index}", *content, badge=label, kind=kind), id=f"trace-{index}")


def _linked(issues: LintReport) -> dict[int, None]:
    """Return the first traces of each kind of issue."""
    found: dict[int, None] = {}
    for kind in issues.counts:
        indices = [f.index for f in issues.findings if f.kind == kind and f.index is not None]
        found |= dict.fromkeys(indices[:_LINKED])
    return found


def _issues(store: TraceStore, issues: LintReport | None, classes: np.ndarray, examples: list[int]) -> Html:
    if issues is None:
        return paragraph("Not checked.")
    if not issues.counts:
        return paragraph(f"None in {plural(issues.num_traces, 'trace')}.")
    rows = []
    for kind, count in issues.counts.items():
        listed = [f for f in issues.findings if f.kind == kind]
        severity, advice = KINDS[kind]
        links = join(
            (element("a", f.index, href=f"#trace-{f.index}") for f in listed[:_LINKED] if f.index is not None), ", "
        )
        rows.append([kind.replace("_", " "), severity, count, links, listed[0].found, advice])
    header = ["issue", "severity", "traces", "first traces", "found", "what to do"]
    others = [k for k in _linked(issues) if k not in examples]
    traces = cards(_trace_card(store, k, _CLASSES[classes[k]], has_plot=False) for k in others)
    return join([
        table(header, rows, caption="Issues by kind"),
        details(f"Traces of these issues ({len(others)})", traces, is_open=True) if others else "",
    ])  # fmt: skip


def _provenance(store: TraceStore) -> Html:
    index = store.internals.index
    counts = np.bincount(index.read_column("source"), minlength=store.internals.manifest.num_sources)
    traces: Counter[str] = Counter()
    rows = []
    for k, source in enumerate(index.sources()):
        traces[str(source.provenance or "unknown")] += int(counts[k])
        if k < _MAX_ROWS:
            size = TableCell(format_size(source.size), source.size) if source.size else ""
            rows.append([source.path, size, source.num_traces])
    origins = table(["model, layers, prompt", "traces"], traces.most_common(_MAX_ROWS), caption="Origins")
    more = len(counts) - len(rows)
    sources = table(["file", "size", "traces"], rows, caption="Sources")
    rest = paragraph(f"and {plural(more, 'more source')}") if more > 0 else ""
    return join([origins, details(plural(len(counts), "source"), sources, rest, is_open=len(rows) <= _MAX_OPEN)])


def _sizes(store: TraceStore) -> list[list[object]]:
    """Return the name, the size and the share of each array and of the other files, largest first."""
    sizes: Counter[str] = Counter()
    for number in range(store.info()["num_segments"]):
        segment = store.internals.segment(number)
        rows = store.internals.index.segment(number).rows
        for file in (rows, *segment.entries.values()):
            sizes[file.path.removeprefix(f"{segment.name}/").partition("/")[0]] += file.size
    total = store.info()["bytes"]
    sizes["columns, index, manifest"] = max(0, total - sum(sizes.values()))
    return [[name, TableCell(format_size(size), size), _percent(size, total)] for name, size in sizes.most_common()]
