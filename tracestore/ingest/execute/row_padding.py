"""Tell padding from tokens: what the ids and states of rows show, and what those of all rows of a source show together."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.execute.tokens import Span, numbers_of
from tracestore.ingest.layout.language import Layout
from tracestore.ingest.layout.places import Plan

_FILL_ADVICE = (
    ' in all layers: padding? S.mask, S.lengths or S.padding tells the padding apart, S.padding = "none" states that '
    "there is none"
)
_BORDER_ADVICE = ': S.padding = "none" states that only what the layout leaves out is padding'


def check_no_padding(ids: np.ndarray, *, is_end_known: bool = False) -> None:
    """Refuse a row of a stack that ends or begins with one id repeated: padding without a mask."""
    for edge, inner in ((ids[:1], ids[1:2]), (ids[-1:], ids[-2:-1]))[: 1 if is_end_known else 2]:
        if len(inner) and inner[0] == edge[0]:
            raise InvalidInputError(
                f'the row has the id {int(edge[0])} twice at one end: S.mask, S.lengths or S.padding = "none" states '
                "whether it is padding",
                field="tokens",
            )


def check_ends(layers: Sequence[np.ndarray], what: str) -> None:
    """Rule 17c: two tokens at an end of a row have no equal states in all layers, unless a program filled both."""
    last = len(layers[0]) - 1
    for edge, inner in ((0, 1), (last, last - 1)):
        if last and _are_equal(layers, edge, inner):
            raise InvalidInputError(f"the tokens {edge} and {inner} have equal states{_FILL_ADVICE}", field=what)
        if _is_nan(layers, edge) and not _is_nan(layers, last - edge):
            raise InvalidInputError(f"the token {edge} is NaN{_FILL_ADVICE}", field=what)


def check_border(layers: Sequence[np.ndarray], span: Span, what: str) -> None:
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


class PadAccount:
    """Rule 3a: rows of a source that end with the id that fills rows. Whether it also ends sequences is stated or proved.

    Attributes
    ----------
    left_out : set of int
        The ids that masks and lengths leave out.
    """

    def __init__(self, layout: Layout) -> None:
        settings = layout.settings
        pad = settings.get("S.pad")
        # The id that fills rows, and the one that ends them: None if the layout does not say.
        self._fill: int | None = pad[0] if isinstance(pad, list) else pad
        self._end: int | None = pad[1] if isinstance(pad, list) else None
        self._padding: Any = settings.get("S.padding")
        self._has_none, self._is_of_ids = self._padding == "none", type(self._padding) is int
        self.left_out: set[int] = {self._padding} if type(self._padding) is int else set()
        self._before: set[int] = set()  # ids before the padding
        self._last: set[int] = set()  # ids that end rows without padding
        self._inner: set[int] = set()  # generated ids before other generated ids, which end no sequence
        self._is_end = self._is_filled = False
        self._begins: set[bool] = set()  # whether rows begin with the id that fills
        self._is_masked = bool({"S.mask", "S.lengths"} & layout.addresses.keys())
        self._num_rows = 0
        self._spans: set[tuple[int, int]] = set()  # how many tokens were left out before and behind those of rows
        self._doubled: dict[bool, int] = {}  # whether rows begin with one id twice, and that id or the first one
        self._doubled_end: int | None = None

    def add_row(self, ids: np.ndarray, span: Span, *, is_stated: bool, is_end_known: bool) -> None:
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
            if is_edge and ids[k] in self.left_out and ids[k] != stated:
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
        self._check_doubled()
        if self._fill is None:
            if found := self._last & self.left_out:
                raise InvalidInputError(f"a row ends with {_fill_advice(min(found))}", field="tokens")
            return
        if len(self._begins) > 1:
            raise InvalidInputError(
                f"some rows begin with the id {self._fill} that fills rows: S.mask or S.lengths states the padding",
                field="S.pad",
            )
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

    def _check_spans(self) -> None:
        """Refuse an id that may begin rows as well as fill them, and what every row leaves out in front."""
        before, behind = ({span[k] for span in self._spans} for k in (0, 1))
        is_at_both = max(before, default=0) and max(behind, default=0)
        is_at_both = is_at_both and not (0 in before and self._end not in (None, self._fill))
        if self._is_of_ids and not self._is_masked and (min(before, default=0) == 1 or is_at_both):
            fill = min(self.left_out)
            raise InvalidInputError(
                f"the id {fill} begins rows and ends rows, or begins every row: S.mask or S.lengths states the padding, "
                f"S.pad = [{fill}, END] that the id END ends rows",
                field="S.padding",
            )
        if not self._is_of_ids and 0 not in before and before and (1 in before or self._num_rows > 1):
            fill = min(self.left_out)
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


def _fill_advice(fill: int) -> str:
    return (
        f"the id {fill} that fills rows: S.pad = {fill} if it is padding and also ends rows, S.pad = [{fill}, END] if "
        "the id END does, S.lengths if not"
    )
