"""A view of one trace, in a terminal, as JSON or as a picture."""

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.errors import UsageError, escape_unprintable
from tracestore.extras import needs
from tracestore.store.format import schema
from tracestore.store.io.fsio import atomic_write, map_os_errors
from tracestore.store.read.store import TraceStore
from tracestore.store.read.trace import Trace

# From the lowest to the highest value, as characters and as indices of the 256 terminal colors.
_SHADES = " .:-=+*#%@"
_COLORS = (16, 17, 18, 54, 90, 126, 162, 203, 214, 227)
_MAX_ROWS = 40
_MAX_TEXT = 2_000
# A picture draws smaller values than this fraction of the largest one like that fraction.
_DRAWN_RANGE = 1e4
PICTURES = (".png", ".pdf", ".svg")
# Attributes of a trace in the JSON document.
_JSON_FIELDS = (
    "index", "question_id", "sample", "source", "score", "scores", "label", "group", "has_nonfinite", "num_tokens",
    "prompt_length", "question", "answer", "tokens", "tokens_decoded", "attention_layout", *schema.OPTIONAL_FIELDS,
)  # fmt: skip


def find_trace(store: TraceStore, name: str, sample: int = 0) -> Trace:
    """Return the trace with a question id or, if no trace has that id, with that index.

    Parameters
    ----------
    store : TraceStore
        The store.
    name : str
        Question id or index.
    sample : int
        Which of several answers to the question.

    Raises
    ------
    KeyError
        No trace has that id or index.
    """
    try:
        return store[store.index_of(name, sample)]
    except KeyError:
        if name.isdecimal() and int(name) < len(store) and sample == 0:
            return store[int(name)]
        raise


@dataclass
class View:
    """The displayed values of a trace.

    Parameters
    ----------
    trace : Trace
        The trace.
    layer : int
        Layer of the attention.
    head : int or None
        Head of the attention. None: the mean of the heads.
    attention : ndarray or None
        float32 (S, S); attention[i, j] is how much token i attends to token j. None if not stored.
    norms : ndarray or None
        Norms of the hidden states, float32 (L, S). None if only the last token is stored.
    """

    trace: Trace
    layer: int
    head: int | None
    attention: np.ndarray | None
    norms: np.ndarray | None

    @classmethod
    def read(cls, store: TraceStore, trace: Trace, layer: int | None = None, head: int | None = None) -> "View":
        """Read the values of a trace.

        Parameters
        ----------
        store : TraceStore
            The store of the trace.
        trace : Trace
            The trace.
        layer : int, optional
            Layer of the attention. Default: the middle layer.
        head : int, optional
            Head of the attention. Default: the mean of the heads.

        Raises
        ------
        UsageError
            The store lacks the layer or the head.
        """
        if layer is None:
            layer = store.num_layers // 2
        if not 0 <= layer < store.num_layers:
            raise UsageError(f"found --layer {layer}, expected 0 to {store.num_layers - 1}")
        return cls(trace, layer, head, read_attention(store, trace, layer, head), _read_norms(store, trace))

    @property
    def title(self) -> str:
        """Title of the attention: layer and head."""
        return f"layer {self.layer}, {'mean over the heads' if self.head is None else f'head {self.head}'}"


def read_attention(store: TraceStore, trace: Trace, layer: int, head: int | None) -> np.ndarray | None:
    """Return the attention (S, S) float32 of a layer and a head, or None for a trace without attention.

    `head` None stands for the mean of the heads. UsageError if the store lacks the head.
    """
    if trace.attention_layout is None:
        if head is not None:
            raise UsageError("found --head, but the trace has no attention")
        return None
    weights = trace.attention_layer(layer)
    if head is not None:
        if weights.ndim == 2:
            raise UsageError(f"found --head {head}, but the store holds head-averaged attention only")
        if not 0 <= head < len(weights):
            raise UsageError(f"found --head {head}, expected 0 to {len(weights) - 1}")
        weights = weights[head]
    attention = np.asarray(weights, "<f4")
    return attention if attention.ndim == 2 else attention.mean(axis=0)


def _read_norms(store: TraceStore, trace: Trace) -> np.ndarray | None:
    if not trace.num_tokens:
        return None
    layers = (schema.as_float32(h, store.hidden_dtype) for h in store.private_trace(trace.index).hidden_states_bits)
    return np.stack([np.sqrt(np.einsum("sd,sd->s", h, h)) for h in layers])


def as_json(view: View) -> dict[str, Any]:
    """Return the JSON document of `tracestore view --json`."""
    trace = view.trace
    values = {name: getattr(trace, name) for name in _JSON_FIELDS}
    values["source"] = dict(zip(("path", "position"), trace.source, strict=True))
    values |= {"layer": view.layer, "head": view.head, "attention": view.attention, "hidden_norms": view.norms}
    return {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in values.items()}


def render_terminal(view: View) -> list[str]:
    """Return the lines of a view for standard output: in color and in its width if it is a terminal."""
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size((100, 40)).columns if is_terminal else 100
    return render_lines(view, width=width, colors=is_terminal and "NO_COLOR" not in os.environ)


def render_lines(view: View, *, width: int, colors: bool) -> list[str]:
    """Return the lines of a view for a width in columns, with terminal colors or characters."""
    trace, (source, position) = view.trace, view.trace.source
    name, source = escape_unprintable(trace.question_id), escape_unprintable(source)
    out = [f"trace {trace.index}: {name}, sample {trace.sample}, from {source} {position}"]
    for name, text in (("question", trace.question), ("answer", trace.answer), ("group", trace.group)):
        if text:
            out += _wrapped(name, text, width)
    numbers = {"score": trace.score, "label": trace.label}
    # A single named score is the score.
    numbers |= {name: v for name, v in trace.scores.items() if len(trace.scores) > 1}
    known = [f"{name} {value:g}" for name, value in numbers.items() if value == value]
    known += [f"{name} {v}" for name in ("temperature", "seed") if (v := getattr(trace, name)) is not None]
    out += _wrapped("values", ", ".join(known) or "no score, no label", width)
    prompt = "" if trace.prompt_length is None else f", {trace.prompt_length} of them in the prompt"
    out += _wrapped("tokens", f"{trace.num_tokens}{prompt}" if trace.num_tokens else "the last token only", width)
    if trace.answer_span is not None:
        unknown = "; -1: unknown" * (-1 in trace.answer_span)
        out += _wrapped("", "answer: tokens [{}, {})".format(*trace.answer_span) + unknown, width)
    for span in trace.spans or ():
        out += _wrapped(
            "span", ", ".join(f"{name} {value}" for name, value in ({"start": None, "end": None} | span).items()), width
        )
    if trace.has_nonfinite:
        out += _wrapped("note", "its arrays hold NaN or infinite values", width)
    if trace.tokens_decoded:
        out += _wrapped("", "|".join(repr(t)[1:-1] if not t.isprintable() else t for t in trace.tokens_decoded), width)
    for name, field in schema.PER_TOKEN_FIELDS.items():
        found = trace.optional(name)
        values = np.empty(0) if found is None else field.shown(found)
        if np.isfinite(values).any():
            out += ["", f"{name}, tokens across: {np.nanmin(values):.3g} to {np.nanmax(values):.3g}"]
            out += _heat_map(values[None], width, colors)
    if view.attention is not None:
        maximum = np.nanmax(view.attention)
        out += ["", f"attention, {view.title}: rows attend to columns; square root, maximum {maximum:.3g}"]
        out += _heat_map(np.sqrt(np.maximum(view.attention, 0)), width, colors)
    if view.norms is not None:
        low, high = np.nanmin(view.norms), np.nanmax(view.norms)
        out += ["", f"norm of hidden states, layers down, tokens across: logarithm, {low:.3g} to {high:.3g}"]
        out += _heat_map(np.log1p(view.norms), width, colors)
    return out


def _wrapped(name: str, text: str, width: int) -> list[str]:
    """Return the lines of a field, with its name in a column of its own.

    Lines break anywhere, because many languages have no spaces between words.
    """
    text, room = escape_unprintable(text, _MAX_TEXT), max(20, width - 10)
    chunks = [text[k : k + room] for k in range(0, len(text), room)] or [""]
    return [f"{name if k == 0 else '':9} {chunk}" for k, chunk in enumerate(chunks)]


def _heat_map(values: np.ndarray, width: int, colors: bool) -> list[str]:
    """Return a heat map with two columns per value if they fit, else with the maximum of each block."""
    values = values.astype("f4")
    least = min(values[np.isfinite(values)].tolist(), default=0.0)  # 0 would be the highest log-probability
    values = np.nan_to_num(values, nan=least, posinf=float(np.finfo("f4").max), neginf=least)
    cells = downsample(downsample(values, _MAX_ROWS, 0), max(1, width - 2), 1)
    low, high = float(cells.min()), float(cells.max())
    levels = np.zeros(cells.shape, int)
    if high > low:
        levels = np.minimum(((cells - low) / (high - low) * len(_SHADES)).astype(int), len(_SHADES) - 1)
    repeat = 2 if 2 * cells.shape[1] <= width - 2 else 1
    if colors:
        return ["  " + "".join(f"\x1b[48;5;{_COLORS[v]}m{' ' * repeat}" for v in row) + "\x1b[0m" for row in levels]
    return ["  " + "".join(_SHADES[v] * repeat for v in row).rstrip() for row in levels]


def downsample(values: np.ndarray, max_size: int, axis: int) -> np.ndarray:
    """Return at most `max_size` values along an axis, each the maximum of a block."""
    size = values.shape[axis]
    if size <= max_size:
        return values
    begins = np.unique(np.arange(max_size) * size // max_size)
    return np.maximum.reduceat(values, begins, axis=axis)


def save_picture(view: View, path: Path) -> None:
    """Save the heat maps of attention and norms, both on logarithmic scales.

    Parameters
    ----------
    view : View
        The view.
    path : Path
        File that ends with .png, .pdf or .svg.

    Raises
    ------
    UsageError
        The suffix is none of these, or the trace has nothing to draw.
    """
    if path.suffix.lower() not in PICTURES:
        raise UsageError(f"{path}: found {path.suffix or 'no suffix'}, expected one of {', '.join(PICTURES)}")
    with needs("pictures"):
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    panels: list[tuple[np.ndarray, str, str, str]] = []
    if view.attention is not None:
        panels.append((view.attention, f"attention, {view.title}", "attended token", "attending token"))
    if view.norms is not None:
        panels.append((view.norms, "norm of hidden states", "token", "layer"))
    if not panels:
        raise UsageError("the trace has neither attention nor hidden states of all tokens: nothing to draw")
    figure = Figure(figsize=(6 * len(panels), 5), layout="constrained")
    for number, (values, title, across, down) in enumerate(panels, 1):
        positive, norm = values[np.isfinite(values) & (values > 0)], None
        if len(positive):
            low, high = float(positive.min()), float(positive.max())
            norm = LogNorm(max(low, high / _DRAWN_RANGE), high, clip=True)
        axes = figure.add_subplot(1, len(panels), number)
        image = axes.imshow(values, aspect="auto", cmap="magma", norm=norm, interpolation="nearest")
        axes.set(title=title, xlabel=across, ylabel=down)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(image, ax=axes)
    # parse_math=False: a $ in a question is text.
    figure.suptitle(escape_unprintable(f"{view.trace.question_id}: {view.trace.question or ''}", 100), parse_math=False)
    with map_os_errors(path), atomic_write(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower(), dpi=120)
