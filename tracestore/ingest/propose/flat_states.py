"""Flat states next to what gives their shape: a list of extents, or a number for each axis."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from tracestore.ingest.propose.leaves import Leaf, Spot
from tracestore.ingest.propose.meanings import STATES, Meaning
from tracestore.ingest.propose.names import words_of

# Words of the numbers of layers and tokens, and of the hidden size.
_WORDS_OF_AXES = {
    "L": frozenset(("layer", "layers", "block", "blocks")),
    "S": frozenset(("seq", "seqlen", "len", "length", "token", "tokens", "toks")),
    "D": frozenset(("dim", "d", "width", "size", "hidden", "channels")),
}


def shape_of(states: Meaning, meanings: Sequence[Meaning]) -> Meaning | None:
    """Return the list of extents next to flat states, and give the states these axes; None without such a list."""
    leaf = states.leaf
    if states.field not in STATES or leaf.rank != 1:
        return None
    for meaning in meanings:
        is_beside = meaning.leaf.files == leaf.files and meaning.leaf.path[:-1] == leaf.path[:-1]
        if is_beside and meaning.leaf.rank == 1 and "shape" in words_of(meaning.leaf.key):
            pairs = list(zip(leaf.spots, meaning.leaf.spots, strict=False))
            ranks = {spot.dims for _, spot in pairs}
            is_shape = all(
                one.where == spot.where and math.prod(spot.value or ()) == one.dims[0] for one, spot in pairs
            )
            if len(ranks) == 1 and is_shape:
                spots = [replace(one, dims=tuple(spot.value)) for one, spot in pairs]
                states.leaf = replace(leaf, rank=len(spots[0].dims), spots=spots)
                return meaning
    return None


def sizes_of(states: Meaning, meanings: Sequence[Meaning]) -> dict[str, Leaf]:
    """Return the numbers next to flat states that are their extents, by the axis; give the states these axes."""
    leaf = states.leaf
    if states.field not in STATES or leaf.rank != 1:
        return {}
    beside = (m.leaf for m in meanings if m.leaf.files == leaf.files and m.leaf.path[:-1] == leaf.path[:-1])
    numbers = [one for one in beside if not one.rank and one.number_kind == "i"]
    named = [(a, one) for one in numbers for a, words in _WORDS_OF_AXES.items() if words & {*words_of(one.key)}]
    for three in itertools.combinations(named, 3):
        sizes = dict(three)
        is_named = len({*sizes.values()}) == 3 and [*sizes][2:] == ["D"]
        if is_named and (spots := _reshaped(leaf, [*sizes.values()])):
            states.leaf = replace(leaf, rank=3, spots=spots)
            for meaning in meanings:
                meaning.field *= meaning.leaf not in sizes.values()  # they bind no items
            return sizes
    return {}


def _reshaped(leaf: Leaf, sizes: list[Leaf]) -> list[Spot]:
    """Return the values of a leaf with the extents that numbers next to them say; [] if one has another size."""
    found = []
    for spot, *numbers in zip(leaf.spots, *(one.spots for one in sizes), strict=False):
        shape = tuple(int(number.value) for number in numbers if number.where == spot.where)
        if len(shape) == len(sizes) and math.prod(shape) == spot.dims[0]:
            found.append(replace(spot, dims=shape))
    return found if len(found) == len(leaf.spots) else []
