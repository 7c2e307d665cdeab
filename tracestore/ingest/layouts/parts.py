"""Join values that are a part of a trace each: a field, a layer, a token, a step of generate(), prompt or response."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.layouts.names import Place

STATES = ("hidden_states", "attentions", "last_token")


class Part(NamedTuple):
    """A value and its place; `trace` is the id of its trace."""

    trace: Hashable
    place: Place
    value: Any


def join_parts(parts: Iterable[Part]) -> dict[Hashable, dict[str, Any]]:
    """Return the fields of each trace, with layers as a dict by number and with tokens in one array.

    Raises
    ------
    InvalidInputError
        If two values have the same place, or a layer or token between others is missing.
    """
    cells: dict[Hashable, dict[tuple[str, str], dict[tuple[int | None, int | None], Any]]] = {}
    for trace, place, value in parts:
        field = place.field or "hidden_states"
        by_number = cells.setdefault(trace, {}).setdefault((field, place.segment), {})
        number = (place.layer, place.token)
        if number in by_number:
            if field not in STATES and number == (None, None):
                if not is_same(by_number[number], value):
                    raise InvalidInputError(
                        f"{field[:60]} differs between files or records that are read together; they hold other traces, "
                        "or in another order",
                        field=field,
                    )
                continue
            raise InvalidInputError(f"found two values for {_text(number)} of {str(trace)[:60]!r}", field=field)
        by_number[number] = value
    found: dict[Hashable, dict[str, Any]] = {}
    for trace, fields in cells.items():
        values = found[trace] = {}
        for (field, segment), by_number in fields.items():
            values[f"{segment}_{field}" if segment else field] = _field(field, by_number)
    return found


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, also arrays and values that hold arrays."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and np.array_equal(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    return bool(one == other)


def _text(number: tuple[int | None, int | None]) -> str:
    names = [f"{name} {n}" for name, n in zip(("layer", "token"), number, strict=True) if n is not None]
    return " and ".join(names) or "one field"


def _field(field: str, cells: Mapping[tuple[int | None, int | None], Any]) -> Any:
    layers, tokens = ({number[k] for number in cells} for k in (0, 1))
    if None in layers and len(layers) > 1:
        layers.discard(None)
        raise InvalidInputError(f"found layers {_listed(layers)} and a value of all layers", field=field)
    if None in tokens and len(tokens) > 1:
        tokens.discard(None)
        raise InvalidInputError(f"found tokens {_listed(tokens)} and a value of all tokens", field=field)
    if len(cells) != len(layers) * len(tokens):
        raise InvalidInputError(
            f"found {len(cells)} values of layers {_listed(layers)} and tokens {_listed(tokens)}, expected each "
            "token of each layer",
            field=field,
        )
    if tokens != {None}:
        order = sorted(n for n in tokens if n is not None)
        if any(b != a + 1 for a, b in pairwise(order)):
            raise InvalidInputError(f"found tokens {_listed(tokens)}, expected numbers without gaps", field=field)
        steps = {layer: [cells[layer, n] for n in order] for layer in layers}
        joined = {layer: join_tokens(values, field, has_layers=layer is not None) for layer, values in steps.items()}
    else:
        joined = {layer: cells[layer, None] for layer in layers}
    if layers == {None}:
        return joined[None]
    return {n: joined[n] for n in sorted(n for n in layers if n is not None)}


def _listed(numbers: Iterable[int | None]) -> str:
    return ", ".join(map(str, sorted(n for n in numbers if n is not None)))[:60]


def join_tokens(values: Sequence[Any], field: str = "hidden_states", *, has_layers: bool = False) -> Any:
    """Return the states of consecutive tokens, or of the passes of generate(), as those of all tokens.

    Parameters
    ----------
    values : sequence of arrays or lists
        For each token or pass a vector (D,), vectors (L, D), layers (L, n, D), a list of layers, with an optional
        batch dimension of one, or one layer (n, D). Passes as lists of layers are returned unchanged.
    field : str
        Name of the field in messages.
    has_layers : bool
        Whether all values belong to one layer: (D,) or (n, D).

    Returns
    -------
    array (L, S, D), (S, D) with `has_layers`, or a list of passes
    """
    if all(isinstance(v, list | tuple | dict) and not _is_vector(v) for v in values):
        layers = [list(v.values()) if isinstance(v, dict) else v for v in values]
        if not all(_is_vector(layer) for value in layers for layer in value):
            return layers
    arrays = [np.asarray(v, None if isinstance(v, np.ndarray) else "f4") for v in values]
    shapes = {array.shape for array in arrays}
    ranks = {len(shape) for shape in shapes}
    if len(ranks) > 1 or not 1 <= min(ranks) <= 4 or field != "hidden_states":
        raise InvalidInputError(
            f"found values of shapes {str(sorted(shapes))[:60]} of single tokens; join them before saving", field=field
        )
    rank = ranks.pop()
    if has_layers:
        return np.concatenate([a.reshape(-1, a.shape[-1]) for a in arrays])
    if rank == 1:
        return np.stack(arrays)[None]
    if rank == 4:
        arrays = [a[:, 0] if a.shape[1] == 1 else a[0] for a in arrays]
    elif rank == 2 and len(shapes) > 1:
        arrays = [a[None] for a in arrays]  # passes of one layer
    elif rank == 2:
        arrays = [a[:, None] for a in arrays]
    if len({(a.shape[0], a.shape[-1]) for a in arrays}) > 1:
        raise InvalidInputError(
            f"found values of shapes {str(sorted(shapes))[:60]} of the steps of a trace", field=field
        )
    return np.concatenate(arrays, axis=1)


def _is_vector(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == 1
    return isinstance(value, list | tuple) and len(value) > 0 and isinstance(value[0], float | np.floating)
