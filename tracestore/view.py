"""One trace in the terminal, or as a picture."""

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

# From nothing to most; on a terminal with colours the background says it.
_SHADES = " .:-=+*#%@"
_COLOURS = (16, 17, 18, 54, 90, 126, 162, 203, 214, 227)  # of the 256 that terminals have
_MAX_ROWS = 40
_MAX_TEXT = 2_000
_PICTURES = (".png", ".pdf", ".svg")


def find_trace(store: TraceStore, name: str, sample: int = 0) -> Trace:
    """The trace with the question id `name` or, where none has it, with that index. KeyError
    where there is neither."""
    try:
        return store[store.index_of(name, sample)]
    except KeyError:
        if name.isdecimal() and int(name) < len(store) and sample == 0:
            return store[int(name)]
        raise


@dataclass
class View:
    """What is looked at: attention[i, j], how much token i attends to token j in one layer, of one
    head or the mean over them, (S, S) float32 or None; norms: of the hidden states, (L, S) float32
    or None."""

    trace: Trace
    layer: int
    head: int | None
    attention: np.ndarray | None
    norms: np.ndarray | None

    @classmethod
    def of(cls, store: TraceStore, trace: Trace, layer: int | None = None, head: int | None = None) -> "View":
        """`layer`: the middle one where it is None; `head`: None for the mean. UsageError where
        the store does not have them."""
        if layer is None:
            layer = store.num_layers // 2
        if not 0 <= layer < store.num_layers:
            raise UsageError(f"found --layer {layer}, expected 0 to {store.num_layers - 1}")
        attention = norms = None
        if trace.attention_layout is not None:
            every = trace.attention_of(layer)
            if head is None:
                attention = schema.as_float32(every, store.attention_dtype)
                attention = attention if every.ndim == 2 else attention.mean(axis=0)
            elif every.ndim == 2:
                raise UsageError(f"found --head {head}, but the store has the mean over the heads only")
            elif not 0 <= head < len(every):
                raise UsageError(f"found --head {head}, expected 0 to {len(every) - 1}")
            else:
                attention = schema.as_float32(every[head], store.attention_dtype)
        elif head is not None:
            raise UsageError("found --head, but the trace has no attention")
        if trace.num_tokens:
            layers = (
                schema.as_float32(h, store.hidden_dtype) for h in Trace(store, trace.index, private=True).hidden_states
            )
            norms = np.stack([np.sqrt(np.einsum("sd,sd->s", h, h)) for h in layers])
        return cls(trace, layer, head, attention, norms)

    @property
    def title(self) -> str:
        return f"layer {self.layer}, {'mean over the heads' if self.head is None else f'head {self.head}'}"


def as_json(view: View) -> dict[str, Any]:
    """The document of `tracestore view --json`."""
    trace = view.trace
    return {
        "index": trace.index,
        "question_id": trace.question_id,
        "sample": trace.sample,
        "source": {"path": trace.source[0], "position": trace.source[1]},
        "score": trace.score,
        "label": trace.label,
        "group": trace.group,
        "has_nonfinite": trace.has_nonfinite,
        "num_tokens": trace.num_tokens,
        "prompt_length": trace.prompt_length,
        "question": trace.question,
        "answer": trace.answer,
        "tokens": None if trace.tokens is None else trace.tokens.tolist(),
        "tokens_decoded": trace.tokens_decoded,
        "attention_layout": trace.attention_layout,
        "layer": view.layer,
        "head": view.head,
        "attention": None if view.attention is None else view.attention.tolist(),
        "hidden_norms": None if view.norms is None else view.norms.tolist(),
    }


def lines(view: View, *, width: int, colours: bool) -> list[str]:
    """The trace as text, `width` columns wide."""
    trace, (source, position) = view.trace, view.trace.source
    out = [
        f"trace {trace.index}: {escape_unprintable(trace.question_id)}, sample {trace.sample}, from {escape_unprintable(source)} {position}"
    ]
    for name, text in (("question", trace.question), ("answer", trace.answer), ("group", trace.group)):
        if text:
            out += _wrapped(name, text, width)
    said = [f"{name} {value:g}" for name, value in (("score", trace.score), ("label", trace.label)) if value == value]
    out += _wrapped("values", ", ".join(said) or "no score, no label", width)
    prompt = "" if trace.prompt_length is None else f", {trace.prompt_length} of them the prompt"
    out += _wrapped("tokens", f"{trace.num_tokens}{prompt}" if trace.num_tokens else "the last one only", width)
    if trace.has_nonfinite:
        out += _wrapped("note", "its arrays hold NaN or infinite values", width)
    if trace.tokens_decoded:
        out += _wrapped("", "|".join(repr(t)[1:-1] if not t.isprintable() else t for t in trace.tokens_decoded), width)
    if view.attention is not None:
        out += [
            "",
            f"attention, {view.title}: rows attend to columns; square root, darkest {np.nanmax(view.attention):.3g}",
        ]
        out += _heat_map(np.sqrt(np.maximum(view.attention, 0)), width, colours)
    if view.norms is not None:
        low, high = np.nanmin(view.norms), np.nanmax(view.norms)
        out += ["", f"norm of hidden states, layers down, tokens across: logarithm, {low:.3g} to {high:.3g}"]
        out += _heat_map(np.log1p(view.norms), width, colours)
    return out


def _wrapped(name: str, text: str, width: int) -> list[str]:
    """A field with its name in a column of its own. Lines are cut, not broken at words: text has no
    spaces in many languages."""
    text, room = escape_unprintable(text, _MAX_TEXT), max(20, width - 10)
    pieces = [text[k : k + room] for k in range(0, len(text), room)] or [""]
    return [f"{name if k == 0 else '':9} {piece}" for k, piece in enumerate(pieces)]


def _heat_map(values: np.ndarray, width: int, colours: bool) -> list[str]:
    """Two columns a value where there is room; where not, the largest of each block."""
    values = np.nan_to_num(values.astype("f4"), nan=0.0, posinf=float(np.finfo("f4").max), neginf=0.0)
    shown = downsample(downsample(values, _MAX_ROWS, 0), max(1, width - 2), 1)
    low, high = float(shown.min()), float(shown.max())
    levels = np.zeros(shown.shape, int)
    if high > low:
        levels = np.minimum(((shown - low) / (high - low) * len(_SHADES)).astype(int), len(_SHADES) - 1)
    cell = 2 if 2 * shown.shape[1] <= width - 2 else 1
    if colours:
        return ["  " + "".join(f"\x1b[48;5;{_COLOURS[v]}m{' ' * cell}" for v in row) + "\x1b[0m" for row in levels]
    return ["  " + "".join(_SHADES[v] * cell for v in row).rstrip() for row in levels]


def downsample(values: np.ndarray, most: int, axis: int) -> np.ndarray:
    """At most `most` values along an axis, each the maximum of a block."""
    size = values.shape[axis]
    if size <= most:
        return values
    begins = np.unique(np.arange(most) * size // most)
    return np.maximum.reduceat(values, begins, axis=axis)


def render_terminal(view: View) -> list[str]:
    """Lines for standard output as it is."""
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size((100, 40)).columns if is_terminal else 100
    return lines(view, width=width, colours=is_terminal and "NO_COLOR" not in os.environ)


def save_picture(view: View, path: Path) -> None:
    """The two heat maps as a .png, .pdf or .svg. UsageError for another suffix."""
    if path.suffix.lower() not in _PICTURES:
        raise UsageError(f"{path}: found {path.suffix or 'no suffix'}, expected one of {', '.join(_PICTURES)}")
    with needs("train"):
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    panels = [
        (values, title, bottom)
        for values, title, bottom in (
            (view.attention, f"attention, {view.title}", "attended token"),
            (view.norms, "norm of hidden states", "token"),
        )
        if values is not None
    ]
    if not panels:
        raise UsageError("the trace has neither attention nor hidden states of all tokens: nothing to draw")
    figure = Figure(figsize=(6 * len(panels), 5), layout="constrained")
    for number, (values, title, bottom) in enumerate(panels, 1):
        axes = figure.add_subplot(1, len(panels), number)
        is_attention = values is view.attention
        is_log = not is_attention and bool((values[np.isfinite(values)] > 0).any())
        drawn = axes.imshow(
            values, aspect="auto", cmap="magma", norm="log" if is_log else "linear", interpolation="nearest"
        )
        axes.set(title=title, xlabel=bottom, ylabel="attending token" if is_attention else "layer")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(drawn, ax=axes)
    # $ and other signs of mathematics in a question stay what they are.
    figure.suptitle(escape_unprintable(f"{view.trace.question_id}: {view.trace.question or ''}", 100), parse_math=False)
    with map_os_errors(path), atomic_write(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower(), dpi=120)
