"""Select the tokens of an array that belong to a trace: masks, lengths, offsets and padding."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.layout.places import Plan
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


def check_no_padding(ids: np.ndarray, *, is_end_known: bool = False) -> None:
    """Refuse a row of a stack that ends or begins with one id repeated: padding without a mask."""
    for edge, inner in ((ids[:1], ids[1:2]), (ids[-1:], ids[-2:-1]))[: 1 if is_end_known else 2]:
        if len(inner) and inner[0] == edge[0]:
            raise InvalidInputError(
                f'the row has the id {int(edge[0])} twice at one end: S.mask, S.lengths or S.padding = "none" states '
                "whether it is padding",
                field="tokens",
            )


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


class PromptAccount:
    """The stated lengths of prompts of a source: one that is equal in all padded rows may count the padding."""

    def __init__(self, plan: Plan) -> None:
        names = {place.name for place in plan.others}
        self._is_open = "prompt_length" in names and "S.prompt" not in plan.layout.settings
        self._lengths: set[int | None] = set()
        self._max_begin = 0

    def add(self, length: int | None, begin: int) -> None:
        """Add the length of a prompt, and the number of tokens of padding before it."""
        self._lengths.add(length)
        self._max_begin = max(self._max_begin, begin)

    def close(self) -> None:
        """Refuse one length of several prompts, of which some are padded in front."""
        length = self._lengths.pop() if len(self._lengths) == 1 else None
        if self._is_open and length is not None and 0 < self._max_begin < length:
            raise InvalidInputError(
                f"found {length} in every row, also where {self._max_begin} tokens of padding are before the prompt: "
                'S.prompt = "columns" says that it counts them, "tokens" that it does not',
                field="prompt_length",
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


class PadAccount:
    """Rule 3a: rows of a source that end with the id that fills rows. Whether it also ends sequences is stated or proved.

    Attributes
    ----------
    left_out : set of int
        The ids that masks and lengths leave out.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        pad = settings.get("S.pad")
        # The id that fills rows, and the one that ends them: None if the layout does not say.
        self._fill: int | None = pad[0] if isinstance(pad, list) else pad
        self._end: int | None = pad[1] if isinstance(pad, list) else None
        self._has_none = settings.get("S.padding") == "none"
        self.left_out: set[int] = {fill} if type(fill := settings.get("S.padding")) is int else set()
        self._before: set[int] = set()  # ids before the padding
        self._last: set[int] = set()  # ids that end rows without padding
        self._inner: set[int] = set()  # generated ids before other generated ids, which end no sequence
        self._is_end = self._is_filled = False
        self._begins: set[bool] = set()  # whether rows begin with the id that fills
        self._is_of_ids = type(settings.get("S.padding")) is int
        self._spans: set[tuple[int, int]] = set()  # how many tokens were left out before and behind those of rows
        self._doubled: dict[bool, int] = {}  # whether rows begin with one id twice, and that id or the first one
        self._doubled_end: int | None = None

    def begin(self, first: int) -> None:
        """Add the first id of a row without a mask or length."""
        self._begins.add(first == self._fill)

    def add_span(self, span: Span, ids: np.ndarray, *, is_end_known: bool) -> None:
        """Add the tokens of a row that are no padding."""
        self._spans.add((span[0], len(ids) - span[1]))
        self._doubled[bool(len(ids) > 1 and ids[0] == ids[1])] = int(ids[0])
        if not is_end_known and len(ids) > 1 and ids[-1] == ids[-2]:
            self._doubled_end = int(ids[-1])

    def end_of_row(self, ids: np.ndarray, num_states: int, num_prompt: int | None, *, may_be_padded: bool) -> int:
        """Return the number of states before the padding behind an early end.

        Parameters
        ----------
        ids : np.ndarray
            The ids of the row.
        num_prompt : int or None
            The columns of the first pass of generation.
        may_be_padded : bool
            Whether the row may end with padding that no line states.
        """
        last = int(ids[-1])
        fill = last if self._fill is None else self._fill
        end = len(ids) - (last == fill)  # of what is before the padding
        while end > 1 and last == fill and ids[end - 1] == fill:
            end -= 1
        if self._fill is None:
            if may_be_padded and (last in self.left_out or (end < len(ids) - 1 and not self._has_none)):
                raise InvalidInputError(f"the row ends with {_fill_advice(last)}", field="tokens")
            self._last |= {last} if may_be_padded else set()
            return num_states
        if self._end is None and num_prompt is not None:
            self._inner.update(ids[num_prompt : end - 1].tolist())
        if end == len(ids):
            self._last.add(last)
            self._doubled_end = last if last in ids[-2:-1] else self._doubled_end
            return num_states
        self._is_filled = True
        before = int(ids[end - 1])
        if self._end is None:
            self._before.add(before)
            self._is_end |= num_prompt is not None and end <= num_prompt  # it is the first id that was generated
        elif self._end not in (fill, before) and self._end >= 0:
            raise InvalidInputError(
                f"found the id {before} before the padding of a row, expected {self._end} as the layout says: "
                f"S.pad = [{fill}, -1] if several ids end rows",
                field="S.pad",
            )
        end += self._end in (None, fill)  # the first of the padding ends the sequence
        return num_states if end == len(ids) else end - (len(ids) > num_states or num_prompt is not None)

    def close(self) -> None:
        """Refuse rows of which only some begin with padding, and ids at their ends that are padding or may be."""
        self._check_spans()
        if self._fill is None:
            if found := self._last & self.left_out:
                raise InvalidInputError(f"a row ends with {_fill_advice(min(found))}", field="tokens")
            return
        if len(self._begins) > 1:
            raise InvalidInputError(
                f"some rows begin with the id {self._fill} that fills rows: S.mask or S.lengths states the padding",
                field="S.pad",
            )
        also = self._before & self._last
        if not self._before or self._is_end or self._before & self._inner or (len(self._before) > 1 and not also):
            return
        before = min(also or self._before)
        raise InvalidInputError(
            f"rows end with the id {before} before the id {self._fill} that fills them: S.pad = [{self._fill}, {before}] "
            f"if {before} ends rows, S.pad = [{self._fill}, {self._fill}] if {self._fill} also does",
            field="S.pad",
        )

    def _check_spans(self) -> None:
        """Refuse padding that is stated and leaves out nothing, and an id that may begin rows as well as fill them."""
        before, behind = ({span[k] for span in self._spans} for k in (0, 1))
        if self._is_of_ids and (before == {1} or (max(before, default=0) and max(behind))):
            raise InvalidInputError(
                f"the id {min(self.left_out)} begins rows and ends rows, or begins every row: S.mask or S.lengths "
                "states the padding",
                field="S.padding",
            )
        if self._fill is not None and not self._is_filled and not self._has_none and self._doubled_end is not None:
            end = self._doubled_end
            raise InvalidInputError(
                f"no row ends with the id {self._fill} that fills rows by the layout, and a row ends with the id {end} "
                f'twice: S.pad = [{end}, {end}] if it is padding, S.padding = "none" if not',
                field="S.pad",
            )
        twice = self._doubled_end if len(self._doubled) < 2 else self._doubled[True]
        if before | behind == {0} and twice is not None and not self._has_none:
            raise InvalidInputError(
                f"no row has padding by the layout, and a row has the id {twice} twice at one end: "
                'S.padding = "none" states that it is no padding',
                field="tokens",
            )


def _fill_advice(fill: int) -> str:
    return (
        f"the id {fill} that fills rows: S.pad = {fill} if it is padding and also ends rows, S.pad = [{fill}, END] if "
        "the id END does, S.lengths if not"
    )
