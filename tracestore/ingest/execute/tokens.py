"""Select the tokens of an array that belong to a trace: masks, lengths, offsets and padding."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.store.format import schema

Span = tuple[int, int]


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
    if "S.offsets" in known:
        offsets = _integers(known["S.offsets"], "S.offsets")
        if offsets and offsets[0] != 0:
            offsets = [0, *offsets]
        if not offsets or offsets[-1] != total:
            raise InvalidInputError(f"ends at {offsets[-1] if offsets else 0}, expected {total:,}", field="S.offsets")
        spans = list(itertools.pairwise(offsets))
    elif "S.lengths" in known:
        ends = np.cumsum(_integers(known["S.lengths"], "S.lengths")).tolist()
        if not ends or ends[-1] != total:
            raise InvalidInputError(f"sum is {ends[-1] if ends else 0}, expected {total:,} rows", field="S.lengths")
        spans = list(zip([0, *ends], ends, strict=False))
    elif "S.owner" in known:
        owner = _integers(known["S.owner"], "S.owner")
        if len(owner) != total or owner != sorted(owner):
            raise InvalidInputError(f"found {len(owner)} rows, expected {total:,} in sorted runs", field="S.owner")
        firsts = [k for k in range(total) if k == 0 or owner[k] != owner[k - 1]]
        spans = list(zip(firsts, [*firsts[1:], total], strict=True))
    elif "S.starts" in known and "S.ends" in known:
        starts, ends = _integers(known["S.starts"], "S.starts"), _integers(known["S.ends"], "S.ends")
        spans = list(zip(starts, ends, strict=True))
        position = 0
        for begin, end in sorted(spans):
            if begin != position:
                what = "overlap" if begin < position else "leave a gap"
                raise InvalidInputError(f"ranges {what} at row {min(begin, position):,}", field="S.starts")
            position = end
        if position != total:
            raise InvalidInputError(f"ranges end at {position:,}, expected {total:,}", field="S.ends")
    else:
        raise InvalidInputError("traces behind each other need S.offsets, S.lengths, S.owner, or S.starts and S.ends")
    for k, (begin, end) in enumerate(spans):
        if end <= begin:
            raise InvalidInputError(f"trace {k} has no tokens: {begin} to {end}")
    return spans


def _integers(array: np.ndarray, name: str) -> list[int]:
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidInputError(f"found {array.dtype.name} {array.shape}, expected integers", field=name)
    return [int(value) for value in array.tolist()]


def span_of_mask(mask: np.ndarray) -> Span:
    """Return the run of ones of a mask (rule 17b)."""
    if mask.ndim != 1 or not np.isin(mask, (0, 1)).all():
        raise InvalidInputError("found other values than 0 and 1", field="S.mask")
    ones = np.flatnonzero(mask)
    if not len(ones):
        raise InvalidInputError("found no token of the trace", field="S.mask")
    begin, end = int(ones[0]), int(ones[-1]) + 1
    if end - begin != len(ones):
        raise InvalidInputError(f"found {len(ones)} ones between {begin} and {end}, expected one run", field="S.mask")
    return begin, end


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
        if len(outside) and not np.array_equal(outside, np.tile(outside[:1], (len(outside), 1)), equal_nan=True):
            if has_full_row():
                return
            raise InvalidInputError(
                "the states that it leaves out are not constant and no row is full: a mask of the answer, or inverted? "
                "A line for tokens shows what is padding",
                field=name,
            )


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
    kept = np.flatnonzero(~is_fill)
    if not len(kept):
        raise InvalidInputError("every token is padding", field="S.padding")
    begin, end = int(kept[0]), int(kept[-1]) + 1
    if end - begin != len(kept):
        raise InvalidInputError(
            f"token {begin + int(np.flatnonzero(is_fill[begin:end])[0])} inside the trace is padding", field="S.padding"
        )
    return begin, end


def check_zero_tokens(layers: Sequence[np.ndarray], what: str) -> None:
    """Rule 24: a token that is zero in all layers is refused, except where it is padding."""
    first = numbers_of(layers[0])
    if first[:, 0].all():  # of most traces: a token with one other number is not zero
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


def strip_pad(ids: np.ndarray, pad: int | Sequence[int]) -> int:
    """Return the end of a row of ids without the padding behind an early end (rule 3a).

    Where one id fills rows and ends sequences, the first of them stays. With [fill, end], every fill goes.
    """
    fill, num_kept = (pad, 1) if isinstance(pad, int) else (pad[0], 0)
    end = len(ids)
    while end > 1 and ids[end - 1] == fill and (num_kept == 0 or ids[end - 2] == fill):
        end -= 1
    return end
