"""Arrays of one trace: states, attention and ids, of all parts and passes."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.execute.axes import LayerIds, Layers, dtype_of, numbers_of, read_block, shaped
from tracestore.ingest.execute.traces import TraceCells, passes
from tracestore.ingest.execute.walk import Cell
from tracestore.ingest.layout.addresses import KeyStep
from tracestore.ingest.layout.fields import PROMPT_MASK
from tracestore.ingest.layout.places import Place
from tracestore.ingest.readers.tree import Items
from tracestore.store.format import schema
from tracestore.store.write.field_values import field_error

_TOLERANCE = 2e-2  # of a sum of weights in float16 or bfloat16
_BITS, _FLOAT = np.dtype("<u2"), np.dtype("<f4")
_MOST_BITS = int(np.float16(1 + _TOLERANCE).view("<u2"))  # of positive numbers up to it; negative ones have more
PADDING_WAYS = 'S.mask, S.lengths or S.padding of a layout states the padding, --padding none (or S.padding = "none") that there is none'
IS_MASKED = "is masked in every head"
_FILL_ADVICE = f" in all layers: padding? {PADDING_WAYS}"
_BORDER_ADVICE = ': S.padding = "none" states that only what the layout leaves out is padding'


def _float8_values(stated: str) -> np.ndarray:
    """Return the values of the 256 codes of an 8-bit format of the Open Compute Project, all of which float16 holds."""
    codes = np.arange(256, dtype="<u2")
    if stated == "float8_e5m2":  # the first byte of a float16
        return (codes << 8).view("<f2")
    # Four bits of the exponent, whose bias is less by 8, and no infinity.
    values = ((codes & 0x80) << 8 | (codes & 0x7F) << 7).view("<f2") * np.float16(256)
    values[[0x7F, 0xFF]] = np.nan
    return values


def settled_dtype(layers: Layers, what: str, settings: Mapping[str, Any]) -> Layers:
    """Return states in the dtype and scale that the layout states; rule 7: void, integer and byte values need them."""
    stated, scale, found = settings.get(f"dtype.{what}"), settings.get(f"scale.{what}"), layers[0].dtype.name
    if stated is not None:
        wanted = dtype_of(stated)
        if any(layer.dtype.itemsize != wanted.itemsize or layer.dtype.kind == "b" for layer in layers):
            raise InvalidInputError(f"found {found} values, expected the bits of {stated}", field=what)
        layers = [np.ascontiguousarray(layer).view(wanted) for layer in layers]
        if stated.startswith("float8"):
            layers = [_float8_values(stated)[layer] for layer in layers]
    if scale is not None:
        if layers[0].dtype.kind not in "iu":
            text = f"found {stated or found} values, expected integers, whose unit it is: multiply floats before saving"
            raise InvalidInputError(text, field=f"scale.{what}")
        layers = [layer.astype("<f4") * np.float32(scale) for layer in layers]
    if layers[0].dtype.kind != "f" and layers[0].dtype != schema.BFLOAT16:
        raise InvalidInputError(
            f"found {found} values, expected floating-point numbers; dtype.{what} states the kind of the bits, "
            f"scale.{what} the unit of integers",
            field=what,
        )
    return layers


def read_states(trace: TraceCells, letters: str) -> tuple[Layers, list[int], LayerIds]:
    """Return the layers of the states, the number of tokens of each part and pass, and the numbers of the layers."""
    what, settings = trace.plan.layout.states, trace.settings
    parts: list[Layers] = []
    ids: LayerIds = None
    rows, shape = _rows_of_passes(trace), trace.array(f"shape.{what}", "V")
    for _, cells_of_part in sorted(trace.cells.items()):
        num_before = trace.num_first = sum(len(layers[0]) for layers in parts)
        if shape is not None:
            cells_of_part = [shaped(cell, shape[0], settings.get(f"dtype.{what}")) for cell in cells_of_part]
        for cells, fixed in passes(cells_of_part, trace.fixed, rows, (num_before, len(parts))):
            layers, own_ids = read_block(cells, letters, fixed, settings, what, num_before)
            layers = settled_dtype(layers, what, settings)
            if shapes := {layer.shape for layer in layers} - {layers[0].shape}:
                raise field_error(what, f"{shapes.pop()} in one layer", f"{layers[0].shape} as in the first")
            if parts and (own_ids != ids or len(layers) != len(parts[0])):
                raise InvalidInputError(f"found {len(layers)} layers, expected {len(parts[0])} as before", field=what)
            parts.append(layers)
            ids = own_ids
    if "S" not in letters:
        if len(parts) > 1:
            raise InvalidInputError("found several passes of one token", field=what)
        return parts[0], [1], ids
    sizes = [len(layers[0]) for layers in parts]
    if settings.get("P.repeats"):
        if sizes != sorted(sizes):
            raise InvalidInputError(f"passes of {sizes!s:.60} tokens do not grow", field=what)
        parts, sizes = parts[-1:], sizes[-1:]
    if len({(layers[0].shape[1:], layers[0].dtype) for layers in parts}) > 1:
        raise InvalidInputError("found passes of different widths", field=what)
    return parts[0] if len(parts) == 1 else list(map(np.concatenate, zip(*parts, strict=True))), sizes, ids


def _rows_of_passes(trace: TraceCells) -> list[int] | None:
    """Return the row of the batch that each pass of a trace is, None without a line for P.rows."""
    found = trace.array("P.rows", "P")
    return None if found is None else found[0].tolist()


def read_attention(trace: TraceCells, num_tokens: int, *, is_needed: bool) -> tuple[Layers | None, LayerIds]:
    """Return the layers (H, S, S) of the attention of a trace, None without, and the layers that names bind."""
    found = {k: cells for k, cells in trace.cells_of("attentions").items() if not all(map(_is_empty, cells))}
    blocks: list[Layers] = []
    numbers: list[LayerIds] = []
    for part, cells_of_part in sorted(found.items()) if is_needed else ():
        fixed = trace.fixed_of(cells_of_part[0].place)
        for cells, inner in passes(cells_of_part, fixed, _rows_of_passes(trace), None if part else ()):
            layers, own = read_block(cells, "HSQ", inner, trace.settings, "attentions")
            blocks.append(settled_dtype(layers, "attentions", trace.settings))
            numbers.append(own)
            if own != numbers[0]:
                raise InvalidInputError(f"found the layers {own}, expected {numbers[0]} as before", field="attentions")
    if trace.settings.get("P.repeats"):
        blocks = blocks[-1:]
    return (joined_attention(blocks, num_tokens), numbers[0]) if blocks else (None, None)


def read_tokens(trace: TraceCells, num_states: int, length: int | None, *, has_passes: bool) -> np.ndarray | None:
    """Return the ids of the tokens: as many as states, or one more where that is known (rule 3).

    Ids without padding next to padded states are as many as `length` says.
    """
    found = trace.array("tokens", "STG")
    if found is None:
        return None
    ids, letter = found
    place = next(trace.columns.of("tokens")).place
    is_of_answer = trace.plan.is_of_answer
    if letter == "G" and is_of_answer:
        letter = "S"
    if is_of_sequences(place):
        letter = "T"
    count = num_skipped(trace.settings, letter)
    skipped, known = ids[:count].tolist(), trace.columns.skipped
    if known not in (None, skipped):
        raise InvalidInputError(f"found {skipped} and {known} where T.skip leaves out one text", field="tokens")
    trace.columns.skipped, ids = skipped, ids[count:]
    # The ids that generate() and vLLM return are always one more: one id less would move the others.
    is_exact = letter == "G" or (letter == "T" and (has_passes or is_of_answer))
    more = (1,) if is_exact else (0, 1) if letter == "T" else (0,)
    if letter == "T" and len(set(ids[num_states + 1 :].tolist())) < 2 and _rows_of_passes(trace) is not None:
        ids = ids[: num_states + 1]  # a beam that ended early
    is_unpadded = letter == "S" and ids.shape == (length,) and len(ids) < num_states
    if not is_unpadded:
        check_ids(ids, num_states, 0 if is_of_answer else trace.prompt_length, more, is_of_answer=is_of_answer)
    return ids


def is_of_sequences(place: Place) -> bool:
    """Return whether a place is that of the ids that generate() returns, without axes in the layout."""
    last = place.address.path[-1] if place.address.path else None
    return place.address.axes is None and isinstance(last, KeyStep) and last.text == "sequences"


def num_skipped(settings: Mapping[str, Any], letter: str) -> int:
    """Return how many values in front of those on an axis are of tokens whose states were left out."""
    number: int = settings.get("T.skip", 0) if letter == "T" else 0
    return number


def leave_out_skipped(values: dict[str, Any], num_skipped: int) -> None:
    """Reduce the length of a prompt by the ids in front without states."""
    length = values.get("prompt_length")
    if num_skipped and "answer_span" in values:
        raise field_error("answer_span", "next to T.skip", "none: it may count what is left out")
    if num_skipped and type(length) is int:
        if length < num_skipped:
            raise InvalidInputError(f"found {length}, expected at least T.skip = {num_skipped}", field="prompt_length")
        values["prompt_length"] = length - num_skipped


def check_ids(
    ids: np.ndarray, num_states: int, prompt_length: Any, more: Collection[int], *, is_of_answer: bool = False
) -> None:
    """Rule 3: ids are more than states by one of the numbers `more`."""
    if not num_states:
        raise InvalidInputError("found zero tokens, expected at least one", field="hidden_states")
    if ids.ndim != 1 or len(ids) - num_states not in more:
        found = f"{len(ids)} ids" if ids.ndim == 1 else f"the shape {ids.shape}"
        expected = " or ".join(str(num_states + k) for k in more)
        hint = {
            num_states + 1: "; -> T says that the last token has no states, with T.skip = 1 the first one"
            + ", if prompt_length counts all that is in front" * is_of_answer,
            num_states - 1: '; ["=ID", ADDRESS] puts the id of a first token that the ids lack in front',
        }.get(ids.shape[0] if ids.ndim == 1 else -1, "")
        if type(prompt_length) is int and prompt_length > 1 and ids.shape[:1] == (num_states + prompt_length,):
            hint = "; the axis G instead of S of the states says that they begin at prompt_length"
        raise InvalidInputError(f"found {found}, expected {expected} for {num_states} states{hint}", field="tokens")


def check_generated(mask: np.ndarray, prompt_length: int | None) -> None:
    """Refuse a mask of the generated tokens that is one of the prompt, or in which no answer follows `prompt_length`."""
    if mask[:1].any() and not mask[-1:].any():
        text = f"found the first token as generated and the last one as not; {PROMPT_MASK} takes the inverse"
        raise InvalidInputError(text, field="generated_mask")
    begins = np.flatnonzero(np.diff(mask, prepend=0) == 1)
    if prompt_length is not None and len(begins) and prompt_length not in begins:
        text = f"found the first generated token at {begins[0]}, expected {prompt_length} as prompt_length says"
        raise InvalidInputError(text, field="generated_mask")


def of_span(values: Any, span: tuple[int, int], num_states: int) -> Any:
    """Return the values of the tokens of a span, and of a last token without states; fewer than states have no padding."""
    more = len(values) - num_states
    return values[span[0] : span[1] + more] if more >= 0 else values


def set_marked_prompt(
    trace: TraceCells, values: dict[str, Any], span: tuple[int, int], num_states: int, tokens: np.ndarray | None
) -> None:
    """Set prompt_length to the number of tokens in a span that a line marks as the prompt, which comes first."""
    if (found := trace.known(PROMPT_MASK, trace.array(PROMPT_MASK, "ST"))) is None:
        return
    flags = of_span(found[0][num_skipped(trace.settings, found[1]) :], span, num_states)
    has_last = found[1] == "T" and tokens is not None and len(tokens) > num_states
    num_tokens = span[1] - span[0] + has_last
    if flags.ndim != 1 or len(flags) != num_tokens or not np.isin(flags, (0, 1)).all():
        found_flags = f"{flags.dtype} of the shape {flags.shape}"
        raise field_error(PROMPT_MASK, found_flags, f"0 or 1 for each of {num_tokens} tokens")
    length = int(flags.sum())
    if flags[length:].any():
        raise InvalidInputError("found 1 behind 0, expected 1 for the prompt, which comes first", field=PROMPT_MASK)
    if values.setdefault("prompt_length", length) != length:
        raise InvalidInputError(f"found {values['prompt_length']}, expected {length} as marked", field="prompt_length")


def joined_attention(blocks: Sequence[Layers], num_tokens: int) -> Layers:
    """Return the layers (H, S, S) of passes, each of which attends to the tokens so far.

    Raises
    ------
    InvalidInputError
        If a pass has another number of layers or columns (rule 2).
    """
    what = "attentions"
    if len(blocks) == 1:
        layers = blocks[0]
        if wrong := [layer.shape for layer in layers if layer.shape[-2:] != (num_tokens, num_tokens)]:
            raise field_error(what, f"the shape {wrong[0]}", f"(H, {num_tokens}, {num_tokens}) as states")
        return layers
    joined = []
    for of_layer in zip(*blocks, strict=True):
        seen, rows, window = 0, [], 0
        for layer in of_layer:
            seen += layer.shape[1]
            is_of_window = window in (0, layer.shape[2])  # a sliding window is as wide in every later pass
            window = layer.shape[2] if layer.shape[2] < seen else window
            layer = _columns_so_far(layer, seen)
            if layer.shape[2] != seen or not is_of_window:
                raise field_error(what, f"{layer.shape[2]} columns", f"the {seen} tokens so far")
            rows.append(np.pad(layer, ((0, 0), (0, 0), (0, num_tokens - seen))))
        joined.append(np.concatenate(rows, axis=1))
        if seen != num_tokens:
            raise InvalidInputError(f"found {seen} rows, expected {num_tokens} as states", field=what)
    return joined


def _columns_so_far(layer: np.ndarray, seen: int) -> np.ndarray:
    """Return the columns of a pass for the tokens so far, or all columns if the pass does not show which they are.

    A static cache has columns of zeros behind them. A sliding window keeps the last ones, to which one new token attends
    with weights that sum to 1.
    """
    width = layer.shape[2]
    if width > seen and not numbers_of(layer[:, :, seen:]).any():
        return layer[:, :, :seen]
    if width < seen and layer.shape[1] == 1 and _are_one(numbers_of(layer).sum(-1, dtype="f4")):
        return np.pad(layer, ((0, 0), (0, 0), (seen - width, 0)))
    return layer


def check_attention_values(layer: np.ndarray) -> None:
    """Rule 6a: attention lies in [0, 1], and its rows sum to 1 rather than its columns."""
    values = numbers_of(layer)
    if layer.dtype != np.float16 or np.maximum.reduce(layer.view(_BITS), axis=None, initial=0) > _MOST_BITS:
        low, high = float(values.min(initial=0)), float(values.max(initial=0))
        if low < -1e-6 or high > 1 + _TOLERANCE:
            raise InvalidInputError(f"found values from {low:.3g} to {high:.3g}, expected 0 to 1", field="attentions")
    # Of causal attention the first column sums to more: every token attends to the first one.
    if abs(float(np.add.reduce(values[0, :, 0], dtype=_FLOAT)) - 1) > 2 * _TOLERANCE:
        return
    rows, columns = (values.sum(axis, dtype="f4") for axis in (-1, -2))
    if _are_one(columns) and not _are_one(rows):
        raise InvalidInputError("its columns sum to 1 and its rows do not: it is transposed", field="attentions")


def check_masked_tokens(layer: np.ndarray) -> None:
    """Rule 6b: no token is masked: seen by none, or in front, where it sees one that does not see it."""
    values = numbers_of(layer)
    masked = np.flatnonzero(values[0, -1] == 0)  # the last token mostly sees all others
    masked = masked[~values[:, :, masked].any(axis=(0, 1))]
    seen = np.flatnonzero(values[:, 0].any(axis=0))  # by the first token: in causal attention only itself
    is_front = len(seen) > 0 and not values[:, seen[-1], 0].any()
    if is_front or len(masked):
        raise InvalidInputError(
            f"token {0 if is_front else masked[0]} {IS_MASKED}, as padding: {PADDING_WAYS}", field="attentions"
        )


def _are_one(sums: np.ndarray) -> bool:
    return bool((abs(sums - 1) <= 2 * _TOLERANCE).all())


def _is_empty(cell: Cell) -> bool:
    """Return whether a value is a list of nothing, as a model that gives no attention leaves it."""
    return isinstance(cell.value, Items) and not cell.value.is_stream and not cell.value.length


def check_new_tokens(sizes: list[int], what: str) -> None:
    """Rule 5: passes grow by new tokens only. 5a: without ids, passes after the first have one token each."""
    if any(size != 1 for size in sizes[1:]):
        raise InvalidInputError(
            f"passes of {sizes!s:.60} tokens: do later ones repeat earlier tokens? P.repeats = true, or P.new = true",
            field=what,
        )


def check_zero_tokens(layers: Sequence[np.ndarray], what: str) -> None:
    """Rule 24: a token that is zero in all layers is refused, except where it is padding."""
    first = numbers_of(layers[0])
    if np.logical_and.reduce(first[:, 0]):  # of most traces: a token with one other number is not zero
        return
    suspects = np.flatnonzero(~first.any(axis=1))
    for layer in layers[1:]:
        suspects = suspects[~numbers_of(layer[suspects]).any(axis=1)]
    if len(suspects):
        raise InvalidInputError(
            f"token {int(suspects[0])} is zero in all layers: padding or a file that was not written to its end; "
            'S.mask, S.lengths or S.padding = "zeros" of a layout states the padding',
            field=what,
        )


def check_no_padding(ids: np.ndarray, *, is_end_known: bool = False) -> None:
    """Refuse a row of a stack that ends or begins with one id repeated: padding without a mask."""
    for edge, inner in ((ids[:1], ids[1:2]), (ids[-1:], ids[-2:-1]))[: 1 if is_end_known else 2]:
        if len(inner) and inner[0] == edge[0]:
            raise InvalidInputError(
                f"the row has the id {int(edge[0])} twice at one end: padding? {PADDING_WAYS}", field="tokens"
            )


def check_ends(layers: Sequence[np.ndarray], what: str) -> None:
    """Rule 17c: two tokens at an end of a row have no equal states in all layers, unless a program filled both."""
    last = len(layers[0]) - 1
    for edge, inner in ((0, 1), (last, last - 1)):
        if last and _are_equal(layers, edge, inner):
            raise InvalidInputError(f"the tokens {edge} and {inner} have equal states{_FILL_ADVICE}", field=what)
        if _is_nan(layers, edge) and not _is_nan(layers, last - edge):
            raise InvalidInputError(f"the token {edge} is NaN{_FILL_ADVICE}", field=what)


def check_border(layers: Sequence[np.ndarray], span: tuple[int, int], what: str) -> None:
    """Rule 17c: what a row leaves out has other states than the token next to it, and is padding as a whole."""
    last, (begin, end) = len(layers[0]) - 1, span
    # The outermost token, the one inside of it, and the one next to the tokens of the trace, at each end.
    for outer, second, inner, kept in ((0, 1, begin - 1, begin), (last, last - 1, end, end - 1)):
        if inner < 0 or inner > last:
            continue
        if _are_equal(layers, inner, kept):
            raise InvalidInputError(
                f"the tokens {inner} and {kept} have equal states, and one is left out{_BORDER_ADVICE}", field=what
            )
        is_fill = inner not in (outer, second) and _are_equal(layers, outer, second)
        if is_fill and not _are_equal(layers, outer, inner, is_exact=False):
            raise InvalidInputError(
                f"the tokens {outer} and {inner} are left out, and only one is filled{_BORDER_ADVICE}", field=what
            )


def _are_equal(layers: Sequence[np.ndarray], one: int, two: int, *, is_exact: bool = True) -> bool:
    """Return whether two tokens have equal states in all layers, or nearly equal ones."""
    pairs = ((numbers_of(layer[one]), numbers_of(layer[two])) for layer in layers)
    if is_exact:
        return all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)
    return all(np.allclose(a, b, rtol=0.05, atol=1e-3, equal_nan=True) for a, b in pairs)


def _is_nan(layers: Sequence[np.ndarray], k: int) -> bool:
    return all(bool(np.isnan(numbers_of(layer[k])).all()) for layer in layers)
