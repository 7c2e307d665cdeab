"""The place of a value in a trace, which a path of names states: folders and file, or keys of nested dicts."""

import re
from functools import lru_cache
from typing import NamedTuple

from tracestore.ingest.containers.keys import ID_KEYS, LENGTHS, column_name, parse_key
from tracestore.ingest.roles.keys import MAPPABLE, OTHER_NAMES, normalized

_TOKEN = re.compile(
    r"(?:generation_|gen_|decod(?:e|ing)_)?(?:steps?|tokens?|tok|positions?|pos)[_.\-]?(\d+)", re.IGNORECASE
)
_PROMPTS = ("prompt", "context", "instruction", "query")
_RESPONSES = ("response", "completion", "generated", "generation", "continuation", "answer_tokens")
# Endings of the names of parts of one field, and what they mean: states of prompt and response, ids of tokens.
_SEGMENTS = {**dict.fromkeys(_PROMPTS, "prompt"), **dict.fromkeys(_RESPONSES, "response")}
_OTHERS = frozenset((*MAPPABLE, *(n for names in OTHER_NAMES.values() for n in names), *ID_KEYS, *LENGTHS))
_OTHERS |= {"meta", "metadata", "info", "logits", "logprobs", "text", "texts", "mask"}
_FIELDS = frozenset((*_OTHERS, *(f"{name}s" for name in _OTHERS)))
# Names of hidden states in folders and files, which mean less elsewhere.
_STATES = frozenset(("states", "layers", "vectors", "embeddings", "reps"))
# Fields whose names may begin the name of a file: hidden_3, but question_3 is an id.
_ARRAYS = frozenset(("", "hidden_states", "attentions", "tokens", "last_token"))
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
    if (place := _atom(name)) is not None:
        return place
    marks = list(_MARK.finditer(name))
    for match in marks:
        ending = _atom(name[match.end() :])
        if ending is not None and match.start() and (joined := _joined(_parse(name[: match.start()]), ending)):
            return joined
    for match in reversed(marks):
        beginning = _atom(name[: match.start()])
        if beginning is None or (beginning.segment or beginning.field not in _ARRAYS):
            continue
        if name[match.end() :] and (joined := _joined(beginning, _parse(name[match.end() :]))):
            return joined
    key = parse_key(name)
    if key is not None and key.trace and key.number is not None:
        return Place(key.trace, key.field, key.number)
    return Place(trace=name)


def _atom(name: str) -> Place | None:
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
    values = [a if a not in ("", None) else b for a, b in pairs]
    return Place("/".join(filter(None, (one.trace, other.trace))), *values)
