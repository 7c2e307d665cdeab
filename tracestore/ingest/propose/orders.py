"""Axes of leaves: every order that the extents allow, never one by the name; the shape of flat states."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tracestore.ingest.layout.fields import PROMPT_MASK
from tracestore.ingest.layout.patterns import AXIS_NAMES
from tracestore.ingest.propose.leaves import Leaf, Spot
from tracestore.ingest.propose.meanings import STATES, Meaning
from tracestore.ingest.propose.names import words_of
from tracestore.store.format import schema

Axes = tuple[str, ...]
Sizes = dict[str, int | None]
_MAX_SPOTS = 64
# Letters that the axes of a field may be, and those that they must be; of other fields `1` alone.
_LETTERS = {
    "attentions": ("LH1", "SS"),
    "tokens": ("1", "S"),
    "sequences": ("1", "T"),
    "tokens_decoded": ("1", "S"),
    **dict.fromkeys(("S.mask", PROMPT_MASK), ("1", "S")),
    "L.ids": ("1", "L"),
    **dict.fromkeys(schema.PER_TOKEN_FIELDS, ("1", "S")),
}


@dataclass
class Frame:
    """The states of a proposal: their leaf, their axes and the extents of each letter by what binds them.

    Attributes
    ----------
    leaf : Leaf
    axes : tuple of str
    bound : frozenset of str
        Letters that names bind.
    """

    leaf: Leaf
    axes: Axes
    bound: frozenset[str]

    @cached_property
    def sizes(self) -> list[tuple[Mapping[str, Any], Sizes]]:
        """For each spot: what binds it, and the extent of each letter."""
        spots = self.leaf.spots[:_MAX_SPOTS]
        return [(spot.where, dict(zip(self.axes, spot.dims, strict=True))) for spot in spots]

    @cached_property
    def num_layers(self) -> int | None:
        """The layers of each trace."""
        layers = {spot.where["layer"] for spot in self.leaf.spots if "layer" in spot.where}
        return self.sizes[0][1]["L"] if "L" in self.axes else len(layers) or 1

    @property
    def has_tokens(self) -> bool:
        """Return whether the states are those of all tokens."""
        return not {"S", "(N S)"}.isdisjoint((*self.axes, *self.bound))

    @property
    def has_passes(self) -> bool:
        """Return whether states are in passes of generation: an axis, or steps that names number."""
        return "P" in self.axes or any("step" in spot.where for spot in self.leaf.spots)

    @property
    def num_tokens(self) -> set[int | None]:
        """The different numbers of tokens."""
        return {sizes.get("S") for _, sizes in self.sizes}

    def matching(self, leaf: Leaf, spot: Spot) -> Iterator[Sizes]:
        """Yield the extents of the states that bind the same as a spot of a leaf."""
        is_same = leaf.files == self.leaf.files
        names = [n for n in spot.where if n not in AXIS_NAMES and (is_same or (n != "F" and n[0] != "["))]
        for where, sizes in self.sizes:
            if all(where.get(name, spot.where[name]) == spot.where[name] for name in names):
                yield sizes


def states_axes(leaf: Leaf, letters: Sequence[str], *, has_passes: bool, bound: frozenset[str]) -> list[Axes]:
    """Return every order of axes that states may have.

    Parameters
    ----------
    leaf : Leaf
    letters : sequence of str
        What an axis may be, besides D and 1.
    has_passes : bool
        Whether passes of generation may be in front.
    bound : frozenset of str
        Letters that names bind.
    """
    columns = [set(sizes) for sizes in zip(*(spot.dims for spot in leaf.spots[:_MAX_SPOTS]), strict=True)]

    def takes(letter: str, at: int) -> bool:
        sizes = columns[at]
        if letter == "1":
            return sizes == {1}
        if letter == "P":
            return at == 0
        if letter in "LD":
            return len(sizes) == 1 and None not in sizes
        return None not in sizes or letter in ("S", "(N S)") or (letter == "N" and at == 0)

    letters = [letter for letter in (*letters, "D", "1", *"P" * has_passes) if letter not in bound]
    found = [axes for axes in _orders(len(columns), letters, takes) if _is_possible(axes, columns, bound)]
    return sorted(found, key=unusual)


def _orders(rank: int, letters: Sequence[str], takes: Callable[[str, int], bool], at: int = 0) -> Iterator[Axes]:
    """Yield every order of letters that the axes from `at` on take: `1` as often as it fits, others as often as given."""
    if at == rank:
        yield ()
        return
    for letter in dict.fromkeys(letters):
        if takes(letter, at):
            left = list(letters)
            if letter != "1":
                left.remove(letter)
            for rest in _orders(rank, left, takes, at + 1):
                yield (letter, *rest)


def _is_possible(axes: Axes, columns: Sequence[set[int | None]], bound: frozenset[str]) -> bool:
    """Return whether states have one D, L below D (rule 19), and passes of all layers."""
    is_flat = "(N S)" in axes and not {"N", "P"}.isdisjoint(axes)
    if ("D" in axes) == ("D" in bound) or is_flat or ("P" in axes and axes[1] != "L"):
        return False
    size = {letter: next(iter(sizes)) or 0 for letter, sizes in zip(axes, columns, strict=True)}
    return "D" not in axes or size["D"] > max(1, size.get("L", 0))


def unusual(axes: Axes) -> int:
    """Return how far an order is from the usual ones, for the order of candidates."""
    at = {letter: k for k, letter in enumerate(axes)}
    last = len(axes) - 1
    cost = 4 * (last - at.get("D", last)) + 2 * at.get("N", 0) + (at.get("S", last) < at.get("L", 0))
    return cost + ("L" not in at and last > 0) + 2 * ("S" not in at and "(N S)" not in at)


def fitting(leaf: Leaf, name: str, frame: Frame, *, is_stacked: bool, bound: frozenset[str]) -> list[Axes]:
    """Return every order of the axes of another field that fits the states.

    Parameters
    ----------
    leaf : Leaf
    name : str
        Its field; "sequences" for ids of which one more than states may be.
    frame : Frame
        The states.
    is_stacked : bool
        Whether N is an axis of it.
    bound : frozenset of str
        Letters that its names bind.
    """
    required, optional = _wanted(name, frame, is_stacked=is_stacked, bound=bound)
    pairs = [(spot.dims, sizes) for spot in leaf.spots[:_MAX_SPOTS] for sizes in frame.matching(leaf, spot)]

    is_of_batches = leaf.files != frame.leaf.files and not leaf.bound and bool(frame.leaf.bound - AXIS_NAMES.keys())

    def takes(letter: str, at: int) -> bool:
        if letter == "N" and is_of_batches:
            return True  # a row per trace of all batches, which the reading counts
        return all(_is_size(letter, dims[at], sizes, frame, name) for dims, sizes in pairs)

    found = [
        axes
        for axes in _orders(leaf.rank, [*optional, *required], takes)
        if all(axes.count(one) == required.count(one) for one in required)
        and (name != "attentions" or _is_attention(axes))
    ]
    # Of as many layers as the states with layers in front, and heads in front of one layer less, the first is meant:
    # the second has one head more than layers, and its states hold the embeddings.
    first = leaf.spots[0].dims
    whole = [axes for axes in found if (first[axes.index("L")] if "L" in axes else None) == frame.num_layers]
    return whole if any("LH" in "".join(axes).replace("1", "") for axes in whole) else found


def _wanted(name: str, frame: Frame, *, is_stacked: bool, bound: frozenset[str]) -> tuple[list[str], list[str]]:
    """Return the letters that the axes of a field must be, and those that they may be, without those that names bind."""
    optional, required = map(list, _LETTERS.get(name, ("1", "")))
    required += ["N"] * (is_stacked and "N" in frame.axes) + ["P"] * (name == "attentions" and "P" in frame.axes)
    if "(N S)" in frame.axes and "S" in required and is_stacked:
        required = ["(N S)" if letter == "S" else letter for letter in required if letter != "N"]
    return [one for one in required if one not in bound], [one for one in optional if one not in bound]


def _is_attention(axes: Axes) -> bool:
    """Return whether rows and columns of attention are behind each other, with heads in front; a pass has layers first.

    An array of a batch that is one of several is that of a layer, never of a head.
    """
    if "S" not in axes:
        return True
    first = axes.index("S")
    is_of_heads = {"H", "L"} <= set(axes)
    if is_of_heads and not {"1", "N"}.isdisjoint(axes[axes.index("H") : axes.index("L")]):
        return False
    is_in_front = not is_of_heads or (axes.index("H") < first and ("P" not in axes or axes[1] == "L"))
    return is_in_front and axes[first + 1 : first + 2] == ("S",)


def _is_size(letter: str, dim: int | None, sizes: Sizes, frame: Frame, name: str) -> bool:
    if letter == "1":
        return dim == 1
    if letter == "H":
        return dim is not None
    if letter == "L":
        if frame.num_layers is None or dim is None:
            return frame.num_layers is None
        return dim == frame.num_layers or (name == "attentions" and dim == frame.num_layers - 1)
    known = sizes.get("S" if letter == "T" else letter)
    if letter == "P":
        return dim == known
    if dim is None or known is None or (letter in "ST" and frame.has_passes):
        return True
    return dim == known or (letter == "T" and dim == known + 1)


# Words of the numbers of layers and tokens, and of the hidden size, next to flat states.
_WORDS_OF_AXES = {
    "L": frozenset(("layer", "layers", "block", "blocks")),
    "S": frozenset(("seq", "seqlen", "len", "length", "token", "tokens", "toks")),
    "D": frozenset(("dim", "d", "width", "size", "hidden", "channels")),
}


def extents_of(states: Meaning, meanings: Sequence[Meaning]) -> tuple[Axes, list[Leaf]]:
    """Return the list of extents next to flat states, or the axes of numbers that are extents; give the states these axes."""
    leaf = states.leaf
    is_flat = states.field in STATES and leaf.rank == 1
    beside = [m.leaf for m in meanings if m.leaf.files == leaf.files and m.leaf.path[:-1] == leaf.path[:-1]]
    for axes, extents in _possible_extents(beside) if is_flat else ():
        if spots := _reshaped(leaf, extents):
            states.leaf = replace(leaf, rank=len(spots[0].dims), spots=spots)
            for meaning in meanings if axes else ():
                meaning.field *= meaning.leaf not in extents  # they bind no items
            return axes, extents
    return (), []


def _possible_extents(leaves: list[Leaf]) -> Iterator[tuple[Axes, list[Leaf]]]:
    """Yield lists whose names say that they are shapes, then each three numbers whose names say their axes."""
    yield from (((), [one]) for one in leaves if one.rank == 1 and "shape" in words_of(one.key))
    numbers = [one for one in leaves if not one.rank and one.number_kind == "i"]
    named = [(a, one) for one in numbers for a, words in _WORDS_OF_AXES.items() if words & {*words_of(one.key)}]
    for sizes in map(dict, itertools.combinations(named, 3)):
        if len({*sizes.values()}) == 3 and [*sizes][2:] == ["D"]:
            yield (*sizes,), [*sizes.values()]


def _reshaped(leaf: Leaf, extents: list[Leaf]) -> list[Spot]:
    """Return the values of a leaf with the extents that lists or numbers next to them say; [] if one has another size."""
    found = []
    for spot, *others in zip(leaf.spots, *(one.spots for one in extents), strict=False):
        values = [other.value for other in others if other.where == spot.where and other.value is not None]
        shape = tuple(n for value in values for n in (value if isinstance(value, list) else [int(value)]))
        if len(values) == len(extents) and math.prod(shape) == spot.dims[0]:
            found.append(replace(spot, dims=shape))
    is_whole = len(found) == len(leaf.spots) and len({len(one.dims) for one in found}) == 1
    return found if is_whole else []
