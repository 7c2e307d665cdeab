"""Select the tokens of an array that belong to a trace: masks, lengths, offsets and padding."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.store.format import schema

Span = tuple[int, int]
# What gives the rows of each trace on an axis.
_RANGES = ("S.offsets", "S.lengths", "S.owner", "S.starts")


def ranges_of(known: dict[str, np.ndarray], total: int) -> list[Span]:
    """Return the tokens of each trace on an axis along which all lie behind each other (rule 9).

    Parameters
    ----------
    known : dict
        Arrays by their fields: S.offsets, S.lengths, S.owner, or S.starts and S.ends.
    total : int
        Extent of the axis.

    Raises
    ------
    InvalidInputError
        If the ranges do not cover the axis, or overlap.
    """
    name = next((name for name in _RANGES if name in known), None)
    values = {name: _integers(array, name) for name, array in known.items()}
    if name is None or (name == "S.starts" and len(values.get("S.ends", ())) != len(values[name])):
        raise InvalidInputError("traces behind each other need S.offsets, S.lengths, S.owner, or S.starts and S.ends")
    spans: list[Span]
    if name == "S.offsets":
        spans = list(itertools.pairwise([0] * (values[name][:1] != [0]) + values[name]))
    elif name == "S.lengths":
        spans = list(itertools.pairwise(itertools.accumulate(values[name], initial=0)))
    elif name == "S.owner":
        spans = _runs(values[name])
    else:
        spans = list(zip(values[name], values["S.ends"], strict=True))
    _check_cover(spans, total, name)
    return spans


def _runs(owners: list[int]) -> list[Span]:
    """Return the runs of equal numbers, which are sorted."""
    if owners != sorted(owners):
        raise InvalidInputError("found rows of one trace in several places", field="S.owner")
    ends = list(itertools.accumulate(len(list(run)) for _, run in itertools.groupby(owners)))
    return list(zip([0, *ends], ends, strict=False))


def _check_cover(spans: list[Span], total: int, name: str) -> None:
    """Rule 9: ranges are disjoint and cover the axis; each has a token."""
    position = 0
    for k, (begin, end) in enumerate(sorted(spans)):
        if begin != position:
            what = "overlap" if begin < position else "leave a gap"
            raise InvalidInputError(f"ranges {what} at row {min(begin, position):,}", field=name)
        if end <= begin:
            raise InvalidInputError(f"trace {k} has no tokens: {begin} to {end}", field=name)
        position = end
    if position != total:
        raise InvalidInputError(f"ranges end at {position:,}, expected {total:,} rows", field=name)


def _integers(array: np.ndarray, name: str) -> list[int]:
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidInputError(f"found {array.dtype.name} {array.shape}, expected integers", field=name)
    return [int(value) for value in array.tolist()]


def _one_run(flags: np.ndarray, name: str) -> Span:
    """Return the run of tokens that are no padding; refuse none, and several."""
    kept = np.flatnonzero(flags)
    if not len(kept):
        raise InvalidInputError("found no token of the trace", field=name)
    begin, end = int(kept[0]), int(kept[-1]) + 1
    if end - begin != len(kept):
        gap = begin + int(np.flatnonzero(flags[begin:end] == 0)[0])
        raise InvalidInputError(f"token {gap} inside the trace is left out, expected one run of tokens", field=name)
    return begin, end


def span_of_mask(mask: np.ndarray) -> Span:
    """Return the run of ones of a mask (rule 17b)."""
    if mask.ndim != 1 or not np.isin(mask, (0, 1)).all():
        raise InvalidInputError("found other values than 0 and 1", field="S.mask")
    return _one_run(mask, "S.mask")


def check_left_out(
    ids: np.ndarray | None,
    span: Span,
    pads: set[int],
    layers: Sequence[np.ndarray],
    name: str,
    has_full_row: Callable[[], bool],
) -> None:
    """Rule 17b: the tokens that a mask leaves out are one id; without tokens, their states are constant or the row is full."""
    begin, end = span
    if ids is not None:
        found = {*ids[:begin].tolist(), *ids[end:].tolist()} | pads
        if len(found) > 1:
            raise InvalidInputError(
                f"the tokens that it leaves out have several ids: {sorted(found)!s:.60}", field=name
            )
        pads |= found
        return
    for layer in layers:
        outside = np.concatenate([numbers_of(layer[:begin]), numbers_of(layer[end:])])
        if not _is_constant(outside):
            if has_full_row():
                return
            raise InvalidInputError(
                "the states that it leaves out are not constant and no row is full: a mask of the answer, or inverted? "
                "A line for tokens shows what is padding",
                field=name,
            )


def _is_constant(states: np.ndarray) -> bool:
    """Return whether states of tokens are equal; one token alone shows it if it is zero or NaN."""
    if len(states) == 1:
        return not states.any() or bool(np.isnan(states).all())
    return np.array_equal(states, np.tile(states[:1], (len(states), 1)), equal_nan=True)


def span_of_length(
    length: int, size: int, side: str | None, ids: np.ndarray | None, layers: Sequence[np.ndarray]
) -> Span:
    """Return the tokens of a trace of `length` of `size` tokens (rule 17a).

    Without `S.side`, what is left out must be zero, NaN or one token id at one end.
    """
    if not 0 < length <= size:
        raise InvalidInputError(f"found {length}, expected 1 to {size}", field="S.lengths")
    if length == size:
        return 0, size
    spans = {"right": (0, length), "left": (size - length, size)}
    if side is not None:
        return spans[side]
    fitting = [span for span in spans.values() if _is_padding(span, ids, layers)]
    if len(fitting) != 1:
        raise InvalidInputError(
            f'{length} of {size} tokens: S.side = "right" or "left" says at which end the padding is', field="S.lengths"
        )
    return fitting[0]


def _is_padding(span: Span, ids: np.ndarray | None, layers: Sequence[np.ndarray]) -> bool:
    """Return whether what a span leaves out at one end is zero, NaN, or one token id."""
    begin, end = span
    outside = [numbers_of(layer[k]) for layer in layers for k in (slice(None, begin), slice(end, None))]
    if all(not part.any() for part in outside) or all(np.isnan(part).all() for part in outside):
        return True
    if ids is None or len(ids) != len(layers[0]):
        return False
    left_out = {*ids[:begin].tolist(), *ids[end:].tolist()}
    edge = ids[begin - 1 : begin + 1] if begin else ids[end - 1 : end + 1]
    return len(left_out) == 1 and len(set(edge.tolist())) == 2


def tokens_of_columns(width: int, span: Span) -> int:
    """Return the number of tokens of a trace among the first columns of a padded row."""
    if not span[0] <= width <= span[1] + 1:
        raise InvalidInputError(
            f"found {width} columns, expected {span[0]} to {span[1] + 1}, where the tokens of the trace are",
            field="prompt_length",
        )
    return width - span[0]


def span_of_fill(fill: Any, layers: Sequence[np.ndarray], ids: np.ndarray | None) -> Span:
    """Return the tokens that are no padding by `S.padding`: zeros, NaN, or a number in states or ids."""
    size = len(layers[0])
    if isinstance(fill, int) and ids is not None and len(ids) == size and (ids == fill).any():
        is_fill = ids == fill
    else:
        is_fill = np.ones(size, bool)
        for layer in layers:
            values = numbers_of(layer)
            is_fill &= np.isnan(values).all(1) if fill == "nan" else (values == (0 if fill == "zeros" else fill)).all(1)
    return _one_run(~is_fill, "S.padding")


def check_prompt(length: int | None, num_tokens: int) -> None:
    """Refuse a prompt that is longer than its trace, whose last token may have no states."""
    if (length or 0) > num_tokens + 1:
        raise InvalidInputError(f"found {length}, more than {num_tokens} tokens", field="prompt_length")


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
        if not len(suspects):
            return
        suspects = suspects[~numbers_of(layer[suspects]).any(axis=1)]
    if len(suspects):
        raise InvalidInputError(
            f"token {int(suspects[0])} is zero in all layers: padding or a file that was not written to its end; "
            'S.mask, S.lengths or S.padding = "zeros" tells the padding apart',
            field=what,
        )


def numbers_of(array: np.ndarray) -> np.ndarray:
    """Return an array with a dtype of NumPy: bfloat16 as float32."""
    return (array["bfloat16"].astype("<u4") << 16).view("<f4") if array.dtype == schema.BFLOAT16 else array


def of_span(values: Any, span: Span, num_states: int) -> Any:
    """Return the values of the tokens of a span, and of a last token without states; fewer than states have no padding."""
    more = len(values) - num_states
    return values[span[0] : span[1] + more] if more >= 0 else values
