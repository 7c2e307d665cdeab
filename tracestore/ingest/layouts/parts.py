"""Join values that are a part of a trace each: a field, a layer, a token, a step of generate(), prompt or response.

A path of names (folders and file, or keys of nested dicts) states the place of a value.
"""

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.keys import ID_KEYS, LENGTHS, column_name, parse_key
from tracestore.ingest.roles.keys import MAPPABLE, OTHER_NAMES, normalized
from tracestore.ingest.roles.layout import opened

_TOKEN = re.compile(
    r"(?:generation_|gen_|decod(?:e|ing)_)?(?:steps?|tokens?|tok|positions?|pos)[_.\-]?(\d+)", re.IGNORECASE
)
_PROMPTS = ("prompt", "context", "instruction", "query")
_RESPONSES = ("response", "completion", "generated", "generation", "continuation", "answer_tokens")
# Endings of the names of parts of one field, and what they mean: states of prompt and response, ids of tokens.
_SEGMENTS = {**dict.fromkeys(_PROMPTS, "prompt"), **dict.fromkeys(_RESPONSES, "response")}
_OTHERS = frozenset((*MAPPABLE, *(n for names in OTHER_NAMES.values() for n in names), *ID_KEYS, *LENGTHS))
_OTHERS |= {"head_wise", "meta", "metadata", "info", "logits", "logprobs", "text", "texts", "mask"}
_FIELDS = frozenset((*_OTHERS, *(f"{name}s" for name in _OTHERS)))
# Names of hidden states in folders and files, which mean less elsewhere.
_STATES = frozenset(("states", "layers", "vectors", "embeddings", "reps"))
# Fields whose names may begin the name of a file: hidden_3, but question_3 is an id.
ARRAYS = frozenset(("", "hidden_states", "attentions", "tokens", "last_token"))
# A folder of a partition, such as layer=3.
_PARTITION = re.compile(r"^(layers?|blocks?|steps?|tokens?|positions?)=", re.IGNORECASE)
_MARK = re.compile(r"[._\- ]")


class Place(NamedTuple):
    """Name the trace, field, layer and token of a value.

    Attributes
    ----------
    trace : str
        The part of the names that is left, which may be the id of the trace.
    field : str
        Name of the field; "" if only a layer or token is stated.
    layer, token : int or None
        The layer and token.
    segment : str
        "prompt" or "response", if the value belongs to one of them.
    """

    trace: str = ""
    field: str = ""
    layer: int | None = None
    token: int | None = None
    segment: str = ""

    @property
    def has_role(self) -> bool:
        """Return whether the names state more than an id."""
        return self[1:] != Place()[1:]

    @property
    def is_states(self) -> bool:
        """Return whether the value holds hidden states, or a part of them."""
        is_part = self.field == "" and (self.layer is not None or self.token is not None)
        return is_part or self.field in ("hidden_states", "last_token")


@lru_cache(maxsize=1 << 16)
def parse_path(*names: str) -> Place:
    """Return the place that names from the outside to the inside state.

    Examples
    --------
    >>> parse_path("hidden", "q1")
    Place(trace='q1', field='hidden_states', layer=None, token=None, segment='')
    >>> parse_path("q1_attn_layer_3").layer, parse_path("q1", "step_2").token
    (3, 2)
    """
    place = Place()
    for name in names:
        inner = _parse(_PARTITION.sub(r"\1_", name))
        # A folder may be called states although it holds attention, too: the inner name counts.
        place = _joined(place, inner) or _joined(Place(place.trace), inner) or inner
    return place


def _parse(name: str) -> Place:
    """Return the place that one name states: its ending first, then its beginning, names the field or layer."""
    if (place := parse_atom(name)) is not None:
        return place
    first, mark, rest = name.partition("__")  # hidden_states__model_gpt2__split_test
    if mark and (place := parse_atom(first)) is not None and (joined := _joined(place, Place(trace=rest))):
        return joined
    marks = list(_MARK.finditer(name))
    for match in marks:
        ending = parse_atom(name[match.end() :])
        if ending is not None and match.start() and (joined := _joined(_parse(name[: match.start()]), ending)):
            return joined
    for match in reversed(marks):
        beginning = parse_atom(name[: match.start()])
        if beginning is None or (beginning.segment or beginning.field not in ARRAYS):
            continue
        if name[match.end() :] and (joined := _joined(beginning, _parse(name[match.end() :]))):
            return joined
    key = parse_key(name)
    if key is not None and key.trace and key.number is not None:
        return Place(key.trace, key.field, key.number)
    return Place(trace=name)


def parse_atom(name: str) -> Place | None:
    """Return the place of a name that is no id at all; None for another one."""
    text = normalized(name)
    if match := _TOKEN.fullmatch(text):
        return Place(token=int(match[1]))
    if (segment := _SEGMENTS.get(text)) is not None:
        return Place(field="", segment=segment)
    if text in _STATES:
        return Place(field="hidden_states")
    key = parse_key(text)
    if key is not None and not key.trace and (key.number is None or key.is_layer):
        is_layer_alone = key.field == "hidden_states" and key.is_layer and not text.startswith(("h", "a"))
        return Place(field="" if is_layer_alone else key.field, layer=key.number)
    return Place(field=text) if text in _FIELDS or column_name(text) == text else None


def _joined(one: Place, other: Place) -> Place | None:
    """Return both places as one; None if they differ in a field, layer, token or segment."""
    pairs = list(zip(one[1:], other[1:], strict=True))
    if any(a not in ("", None) and b not in ("", None) and a != b for a, b in pairs):
        return None
    values: list[Any] = [a if a not in ("", None) else b for a, b in pairs]
    return Place("/".join(filter(None, (one.trace, other.trace))), *values)


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
            owner = f" of {str(trace)[:60]!r}" if trace else ""
            raise InvalidInputError(f"found two values for {_text(number)}{owner}", field=field)
        by_number[number] = value
    found: dict[Hashable, dict[str, Any]] = {}
    for trace, fields in cells.items():
        values = found[trace] = {}
        for (field, segment), by_number in fields.items():
            values[f"{segment}_{field}" if segment else field] = _field(field, by_number)
    return found


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, also arrays and values that hold arrays."""
    one, other = opened(one), opened(other)
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
