"""Tell padding from tokens: what the ids and states of rows show, and what those of all rows of a source show together."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.execute.arrays import check_border, check_no_padding, num_skipped
from tracestore.ingest.execute.axes import Layers, numbers_of
from tracestore.ingest.execute.traces import TraceCells
from tracestore.ingest.layout.fields import MASKS
from tracestore.ingest.layout.places import Plan
from tracestore.ingest.readers.tree import as_array
from tracestore.store.write.field_values import field_error
from tracestore.store.write.record import moved_position

Span = tuple[int, int]


class Padding:
    """Tell the tokens of traces from padding: what the rows of a source show together, and what the layout states.

    An id that fills rows ends sequences, too, only if that is stated or proved (rule 3a). A length of prompts that is
    equal in all padded rows may count the padding.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, settings = plan, plan.layout.settings
        pad = settings.get("S.pad")
        self._padding: Any = settings.get("S.padding")
        # The id that fills rows, and the one that ends them: None if the layout does not say.
        self._fill: int | None = pad[0] if isinstance(pad, list) else pad
        self._end: int | None = pad[1] if isinstance(pad, list) else None
        self._has_none, self._is_of_ids = self._padding == "none", type(self._padding) is int
        self._is_of_side = "S.side" in settings
        self._left_out: set[int] = {settings["S.padding"]} if self._is_of_ids else set()  # by masks and lengths, too
        self._before: set[int] = set()  # ids before the padding
        self._last: set[int] = set()  # ids that end rows without padding
        self._inner: set[int] = set()  # generated ids before other generated ids, which end no sequence
        self._is_end = self._is_filled = False
        self._begins: set[bool] = set()  # whether rows begin with the id that fills
        # The entry that states the mask, and the one that states its complement.
        self._mask, self._other_mask = MASKS[::-1] if MASKS[1] in plan.layout.addresses else MASKS
        self._is_masked = bool({*MASKS, "S.lengths"} & plan.layout.addresses.keys())
        self.num_masked: int | None = None  # what the mask of the last trace keeps
        self._num_rows = 0
        self._spans: set[tuple[int, int]] = set()  # how many tokens were left out before and behind those of rows
        self._doubled: dict[bool, int] = {}  # whether rows begin with one id twice, and that id or the first one
        self._doubled_end: int | None = None
        self._prompts: dict[tuple[int, int], set[int]] = {}  # by width and stated length: the padding in front

    def span(
        self, trace: TraceCells, layers: Layers, tokens: np.ndarray | None, length: int | None, sizes: list[int]
    ) -> Span:
        """Return the tokens that are no padding.

        Parameters
        ----------
        trace : TraceCells
        layers : list of np.ndarray
            The states.
        tokens : np.ndarray or None
            The ids of the tokens; None, too, if they lack the padding that the states have.
        length : int or None
            That of S.lengths.
        sizes : list of int
            The number of tokens of each pass.
        """
        num_states, fill = len(layers[0]), self._padding
        ids = None if tokens is None else tokens[:num_states]
        mask = trace.known(self._mask, trace.array(self._mask, "ST"))
        is_stated = mask is not None or length is not None
        # An id that masks and lengths leave out may be inside a row, too: it also ends turns.
        is_shown = fill not in (None, "none") and not (is_stated and ids is not None and isinstance(fill, int))
        side = trace.settings.get("S.side")
        filled = span_of_fill(fill, layers, ids) if is_shown else None
        self.num_masked = None
        if mask is not None:
            flags = mask[0][num_skipped(trace.settings, mask[1]) :]
            begin, end = self._span_of_mask(trace, flags, tokens, layers, sizes)
        elif length is not None:
            begin, end = span_of_length(length, num_states, side, ids, layers)
            self._check_left_out(ids, (begin, end), "S.lengths")
        else:
            # At the left only: the id of the padding may end rows, too.
            begin, end = filled = (filled[0], num_states) if filled and side else filled or (0, num_states)
        if trace.is_row and ids is not None:
            is_end_known = len(sizes) > 1 or self._fill is not None
            self._add_row(ids, (begin, end), is_stated=is_stated or fill is not None, is_end_known=is_end_known)
        if filled not in (None, (begin, end)):
            raise InvalidInputError(f"found the tokens {filled}, expected {(begin, end)} as masked", field="S.padding")
        if tokens is not None:
            end = min(end, self._end_of_row(trace, tokens, (begin, num_states), sizes))
        if trace.is_row and fill != "none" and len(sizes) == 1:
            check_border(layers, (begin, end), self._plan.layout.states)
        return begin, end

    def _span_of_mask(
        self, trace: TraceCells, flags: np.ndarray, tokens: np.ndarray | None, layers: Layers, sizes: list[int]
    ) -> Span:
        """Return the run of tokens of a mask (rule 17b), as long as the states, the ids or the first pass (rule 2)."""
        num_states, name = len(layers[0]), self._mask
        if len(flags) not in (num_states, sizes[0], 0 if tokens is None else len(tokens)):
            raise InvalidInputError(f"found {len(flags)} values, expected {num_states} as tokens", field=name)
        if flags.ndim != 1 or not np.isin(flags, (0, 1)).all():
            raise InvalidInputError("found other values than 0 and 1", field=name)
        begin, end = _one_run(flags == (name == MASKS[0]), name)
        self.num_masked = end - begin  # also of a mask of the first pass, or of the ids
        if len(flags) < num_states:
            if end < len(flags):
                raise InvalidInputError("the first pass is padded behind its tokens", field=name)
            end = num_states
        ids = None if tokens is None else tokens[: max(len(flags), num_states)]
        self._check_left_out(ids, (begin, end), name)
        if ids is None and not leaves_out_constants(layers, (begin, end)) and not self._has_full_mask(trace):
            raise InvalidInputError(
                "the states that it leaves out are not constant and no row is full: a mask of the answer, or inverted "
                f"({self._other_mask})? A line for tokens shows what is padding",
                field=name,
            )
        return begin, min(end, num_states)

    def _has_full_mask(self, trace: TraceCells) -> bool:
        """Return whether a mask of the source, or a row of one, leaves out no token."""
        for cell in (cell for column in trace.columns.of(self._mask) for cell in column.all_cells()):
            if (array := as_array(cell.value)) is not None:
                flags = array.read() == (self._mask == MASKS[0])
                if flags.reshape(len(flags) if cell.axes[0] in ("N", "K") else 1, -1).all(axis=1).any():
                    return True
        return False

    def _check_left_out(self, ids: np.ndarray | None, span: Span, name: str) -> None:
        """Rule 17b: the tokens that masks and lengths leave out are one id."""
        if ids is not None:
            self._left_out |= {*ids[: span[0]].tolist(), *ids[span[1] :].tolist()}
            if len(self._left_out) > 1:
                found = f"{sorted(self._left_out)!s:.60}"
                is_inverted = name == self._mask and len({*ids[slice(*span)].tolist()}) == 1
                found += f". Inverted? {self._other_mask}" * is_inverted
                raise InvalidInputError(f"the tokens that it leaves out have several ids: {found}", field=name)

    def prompt_of(self, length: int, span: Span, num_states: int, *, is_stated: bool) -> int:
        """Return the tokens of a prompt without padding; a length that is not stated is the columns of passes or parts."""
        begin, end = span
        if not is_stated:
            return max(length - begin, 0)
        if begin and self._plan.layout.settings.get("S.prompt") == "columns":
            length = moved_position("prompt_length", length, begin, end + 1)  # the last token may have no states
        self._prompts.setdefault((num_states, length), set()).add(begin)
        return length

    def _add_row(self, ids: np.ndarray, span: Span, *, is_stated: bool, is_end_known: bool) -> None:
        """Add a row and the tokens of it that are no padding; refuse one with the id of what is left out next to it."""
        begin, end = span
        if not is_stated:
            check_no_padding(ids, is_end_known=is_end_known)
            self._begins.add(ids[0] == self._fill)
        # The first token may have the id that fills rows; the last one if that id also ends them.
        ends = self._fill if self._end == self._fill else None
        for k, is_edge, stated in (
            (begin, begin > 0 or self._is_of_ids, self._fill),
            (end - 1, (end < len(ids) or self._is_of_ids) and not is_end_known, ends),
        ):
            if is_edge and ids[k] in self._left_out and ids[k] != stated:
                one = int(ids[k])
                raise InvalidInputError(
                    f"the token {k} has the id {one} of the padding: S.pad = [{one}, {one}] if it belongs to the trace",
                    field="tokens",
                )
        self._num_rows += 1
        self._spans.add((begin, len(ids) - end))
        self._doubled[bool(len(ids) > 1 and ids[0] == ids[1])] = int(ids[0])
        if not is_end_known and len(ids) > 1 and ids[-1] == ids[-2]:
            self._doubled_end = int(ids[-1])

    def _end_of_row(self, trace: TraceCells, ids: np.ndarray, span: Span, sizes: list[int]) -> int:
        """Return the number of states before the padding behind an early end; padding before the span is known."""
        begin, num_states = span
        # The columns of the first pass of generation, and whether the row may end with padding that no line states.
        num_prompt = sizes[0] if len(sizes) > 1 and len(trace.cells) == 1 else None
        is_of_array = not trace.fixed.keys().isdisjoint("NK")
        if num_prompt and self._fill in ids[begin + 1 : num_prompt] and self._fill != self._end and not self._is_masked:
            found = f"the id {self._fill} that fills rows is inside a prompt: S.mask or S.lengths states the padding"
            raise InvalidInputError(found, field="S.pad")
        may_be_padded = trace.is_row and (num_prompt is not None or (is_of_array and len(ids) > num_states))
        return self._end_before_padding(ids, num_states, num_prompt, may_be_padded=may_be_padded)

    def _end_before_padding(
        self, ids: np.ndarray, num_states: int, num_prompt: int | None, *, may_be_padded: bool
    ) -> int:
        last = int(ids[-1])
        fill = last if self._fill is None else self._fill
        end = len(ids) - (last == fill)  # of what is before the padding
        while end > 1 and last == fill and ids[end - 1] == fill:
            end -= 1
        if self._fill is None:
            if may_be_padded and (last in self._left_out or (end < len(ids) - 1 and not self._has_none)):
                raise InvalidInputError(f"the row ends with {_fill_advice(last)}", field="tokens")
            self._last |= {last} if may_be_padded else set()
            return num_states
        if num_prompt is not None:
            self._inner.update(ids[num_prompt : end - 1].tolist())
        if end == len(ids):
            self._last.add(last)
            self._doubled_end = last if last in ids[-2:-1] else self._doubled_end
            return num_states
        self._is_filled = True
        before = int(ids[end - 1])
        self._before.add(before)
        if self._end is None:
            self._is_end |= num_prompt is not None and end <= num_prompt  # it is the first id that was generated
        elif self._end not in (fill, before) and self._end >= 0:
            expected = f"{self._end} as the layout says: S.pad = [{fill}, -1] if several ids end rows"
            raise field_error("S.pad", f"the id {before} before the padding of a row", expected)
        end += self._end in (None, fill)  # the first of the padding ends the sequence
        return num_states if end == len(ids) else end - (len(ids) > num_states or num_prompt is not None)

    def close(self) -> None:
        """Refuse rows of which only some begin with padding, and ids at their ends that are padding or may be."""
        self._check_prompts()
        self._check_spans()
        self._check_doubled()
        if self._fill is None:
            if found := self._last & self._left_out:
                raise InvalidInputError(f"a row ends with {_fill_advice(min(found))}", field="tokens")
            return
        if len(self._begins) > 1:
            raise InvalidInputError(
                f"some rows begin with the id {self._fill} that fills rows: S.mask or S.lengths states the padding",
                field="S.pad",
            )
        if self._end in self._inner and (self._end == self._fill or not self._is_filled):
            text = f"the id {self._end} that ends rows by the layout stands before other ids that were generated"
            raise InvalidInputError(f"{text}: S.lengths states where rows end", field="S.pad")
        also = (self._before & self._last) - self._inner
        if self._end is not None:
            if self._end == self._fill and also:
                raise InvalidInputError(
                    f"the id {min(also)} stands before the padding of a row and ends another one: S.pad = [{self._fill}, "
                    f"{min(also)}] if it ends rows, S.lengths if not",
                    field="S.pad",
                )
            return
        if not self._before or self._is_end or self._before & self._inner or (len(self._before) > 1 and not also):
            return
        before = min(also or self._before)
        raise InvalidInputError(
            f"rows end with the id {before} before the id {self._fill} that fills them: S.pad = [{self._fill}, {before}] "
            f"if {before} ends rows, S.pad = [{self._fill}, {self._fill}] if {self._fill} also does",
            field="S.pad",
        )

    def _check_prompts(self) -> None:
        """Refuse stated lengths of prompts, of which some are padded in front, that may be the columns of batches."""
        # Lengths that differ in rows of one width are tokens, unless each of them is also that of a row without padding.
        has_one_each = len({width for width, _ in self._prompts}) == len(self._prompts)
        may_be_columns = has_one_each or all(0 in begins for begins in self._prompts.values())
        may_be_columns &= all(max(begins) < length for (_, length), begins in self._prompts.items())
        padded = next(((length, max(begins)) for (_, length), begins in self._prompts.items() if max(begins)), None)
        if padded and may_be_columns and "S.prompt" not in self._plan.layout.settings:
            raise InvalidInputError(
                f"found {padded[0]} also where {padded[1]} tokens of padding are before the prompt: "
                'S.prompt = "columns" says that it counts them, "tokens" that it does not',
                field="prompt_length",
            )

    def _check_spans(self) -> None:
        """Refuse an id that may begin rows as well as fill them, and what every row leaves out in front."""
        before, behind = ({span[k] for span in self._spans} for k in (0, 1))
        is_at_both = max(before, default=0) > 0 and max(behind, default=0) > 0
        is_at_both &= not self._is_of_side and not (0 in before and self._end not in (None, self._fill))
        if self._is_of_ids and not self._is_masked and (min(before, default=0) == 1 or is_at_both):
            fill = min(self._left_out)
            raise InvalidInputError(
                f"the id {fill} begins rows and ends rows, or begins every row: S.mask or S.lengths states the padding, "
                f"S.pad = [{fill}, END] that the id END ends rows, S.side that rows are padded at the left only",
                field="S.padding",
            )
        if not self._is_of_ids and 0 not in before and before and (1 in before or self._num_rows > 1):
            fill = min(self._left_out)
            raise InvalidInputError(
                f"every row leaves out tokens in front, {min(before)} or more: a prompt? S.padding = {fill} states that the id "
                f"{fill} is padding",
                field="tokens",
            )

    def _check_doubled(self) -> None:
        """Refuse padding that is stated and leaves out nothing, where a row has one id twice at an end."""
        if self._fill is not None and not self._is_filled and not self._has_none and self._doubled_end is not None:
            end = self._doubled_end
            raise InvalidInputError(
                f"no row ends with the id {self._fill} that fills rows by the layout, and a row ends with the id {end} "
                f'twice: S.pad = [{end}, {end}] if it is padding, S.padding = "none" if not',
                field="S.pad",
            )
        twice = self._doubled_end if len(self._doubled) < 2 else self._doubled[True]
        if self._spans == {(0, 0)} and twice is not None and not self._has_none:
            way = "states that it is no padding"
            if self._padding not in (None, "zeros") and not self._is_masked:
                # It would keep what an id or NaN alone shows as padding in another file.
                way = "if no row of any file is padded, S.mask or S.lengths if some are"
            raise InvalidInputError(
                f"no row has padding by the layout, and a row has the id {twice} twice at one end: "
                f'S.padding = "none" {way}',
                field="tokens",
            )


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


def leaves_out_constants(layers: Sequence[np.ndarray], span: Span) -> bool:
    """Return whether the states that a span leaves out are equal; one token alone shows it if it is zero or NaN."""
    for layer in layers:
        states = np.concatenate([numbers_of(layer[: span[0]]), numbers_of(layer[span[1] :])])
        if len(states) == 1 and states.any() and not np.isnan(states).all():
            return False
        if not np.array_equal(states, np.tile(states[:1], (len(states), 1)), equal_nan=True):
            return False
    return True


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
    # States that are zero or NaN are no tokens; one id may be a token.
    fitting = [span for span in spans.values() if _leaves_out_no_states(span, layers)]
    fitting = fitting or [span for span in spans.values() if _leaves_out_one_id(span, ids, len(layers[0]))]
    if len(fitting) != 1:
        raise InvalidInputError(
            f'{length} of {size} tokens: S.side = "right" or "left" says at which end the padding is', field="S.lengths"
        )
    return fitting[0]


def _leaves_out_no_states(span: Span, layers: Sequence[np.ndarray]) -> bool:
    outside = [numbers_of(layer[k]) for layer in layers for k in (slice(None, span[0]), slice(span[1], None))]
    return all(not part.any() for part in outside) or all(np.isnan(part).all() for part in outside)


def _leaves_out_one_id(span: Span, ids: np.ndarray | None, num_states: int) -> bool:
    begin, end = span
    if ids is None or len(ids) != num_states:
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
    return _one_run(~is_fill, "S.padding")


def _fill_advice(fill: int) -> str:
    return (
        f"the id {fill} that fills rows: S.pad = {fill} if it is padding and also ends rows, S.pad = [{fill}, END] if "
        "the id END does, S.lengths if not"
    )
