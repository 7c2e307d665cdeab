"""Records of layouts whose fields are keys of one item each: what keys mean is worked out once for each set of keys.

The result is that of `TraceBuilder`, without columns and joins.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.execute.arrays import check_attention_values, check_ids
from tracestore.ingest.execute.axes import Block, layer_ids_of, settle_dtype
from tracestore.ingest.execute.nodes import Node
from tracestore.ingest.execute.tokens import check_no_padding, check_prompt, check_zero_tokens
from tracestore.ingest.execute.values import (
    check_agreement,
    check_spans,
    describe,
    id_text,
    json_value,
    key_text,
    label_value,
    plain_of,
    score_value,
    typed_value,
)
from tracestore.ingest.layout.addresses import Address, ItemsStep, KeyStep, Step
from tracestore.ingest.layout.fields import LABELS, score_of
from tracestore.ingest.layout.patterns import AXIS_NAMES
from tracestore.ingest.layout.places import RECORDS, Place, Plan
from tracestore.ingest.tree import Array, Group, Items, NumpyArray, Value, as_array
from tracestore.store.format.schema import ANSWER_FIELDS
from tracestore.store.write.record import TraceRecord, record_from_dict

_AXES: dict[str, list[tuple[str, ...]]] = {
    "hidden_states": [("L", "S", "D")],
    "last_token": [("L", "D")],
    "attentions": [("L", "H", "S", "Q")],
    "tokens": [("S",), ("T",)],
    "tokens_decoded": [("S",), ("T",)],
    "L.ids": [("L",)],
}
_RANKS = {"hidden_states": 2, "attentions": 3, "last_token": 1}
_SETTINGS = ("duplicates", "L.what", "L.size")
_EXTRAS = (str, int, float)
_PLAIN = frozenset((str, int, float, bool, type(None)))


class _Key(NamedTuple):
    """A key of an item, and how its value is read."""

    key: Any
    name: str
    read: Callable[[Any, str], Any]
    node: Node


@dataclass(frozen=True)
class _Keys:
    """The keys of items that are fields, those that are scores, and those that no line names."""

    fields: list[_Key]
    names: list[Any]  # of the fields
    scores: list[_Key]
    rest: list[Any]


def direct_step(plan: Plan) -> ItemsStep | bool | None:
    """Return the step to the items that hold all fields of the traces; None for whole files, False for other layouts."""
    if len(plan.states) != 1 or plan.layout.templates:
        return False
    if not all(map(_is_simple, plan.layout.settings.items())):
        return False
    state = plan.states[0].address
    step = state.path[0] if len(state.path) == 2 else None
    if not isinstance(step, ItemsStep | None) or len(state.path) not in (1, 2):
        return False
    if step is not None and (step.letter not in (None, "N") or not AXIS_NAMES.keys().isdisjoint(step.names)):
        return False
    if not AXIS_NAMES.keys().isdisjoint(state.files.names) or "chunk" in plan.names:
        return False
    is_one = all(_is_beside(place, state, step) for place in plan.places)
    return step if is_one and all(_is_key(address, state, step) for address in plan.ignored) else False


def _is_simple(setting: tuple[str, Any]) -> bool:
    return setting[0] in _SETTINGS or setting[0].startswith("words.") or setting == ("S.padding", "none")


def _is_beside(place: Place, state: Address, step: ItemsStep | None) -> bool:
    if place.name == RECORDS:
        path: tuple[Step, ...] = (step,) if step else ()
        return place.address.files == state.files and place.address.path == path
    if place.name in _AXES:
        has_axes = place.axes in _AXES[place.name]
    else:
        has_axes = place.address.axes is None and place.rule.kind != "known"
    return has_axes and place.part == 0 and _is_key(place.address, state, step)


def _is_key(address: Address, state: Address, step: ItemsStep | None) -> bool:
    """Return whether an address is a key of the item behind a step."""
    before = (step,) if step else ()
    last = address.path[-1] if address.path else None
    return (
        address.files == state.files
        and address.path[:-1] == before
        and isinstance(last, KeyStep)
        and len(last.parts) == 1
        and last.parts[0].literal is not None
        and not last.parts[0].literal.lstrip("-").isdecimal()
    )


class DirectReader:
    """Read the records of the items of one source.

    Parameters
    ----------
    plan : Plan
        For which `direct_step` returns no False.
    node : Node
        The node of the items, for `on_unclaimed`.
    source_name : str
    need_attention : bool or None
        As for `record_from_dict`.
    on_unclaimed : callable
        Called with the node, key and value of each key that no line names.
    has_scores_file : bool
        Whether a scores file replaces labels and scores, which then are extras.
    """

    def __init__(
        self,
        plan: Plan,
        node: Node,
        source_name: str,
        need_attention: bool | None,
        on_unclaimed: Callable[[Node, str, Value], None],
        *,
        has_scores_file: bool = False,
    ) -> None:
        self._has_scores_file = has_scores_file
        self._plan, self._node, self._source = plan, node, source_name
        self._need_attention, self._on_unclaimed = need_attention, on_unclaimed
        self._settings, self._states = plan.layout.settings, plan.layout.states
        self._words = {n.partition(".")[2]: v for n, v in self._settings.items() if n.startswith("words.")}
        self._places: dict[str, list[Place]] = {}
        for place in plan.places:
            if place.name != RECORDS:
                self._places.setdefault(_key_of(place), []).append(place)
        self._ignored = {_literal(address): node.child(address.path[-1]) for address in plan.ignored}
        self._known = self._ignored.keys() | {key for key in node.keys if key not in self._places}
        self._has_records = any(place.name == RECORDS for place in plan.others)
        self._has_more_ids = any(
            place.axes == ("T",) or (place.address.axes is None and _key_of(place) == "sequences")
            for place in plan.others
            if place.name == "tokens"
        )
        self._seen: dict[tuple[Any, ...], _Keys] = {}

    def record(self, item: Value, bound: Mapping[str, Any], position: int) -> TraceRecord:
        """Return the record of an item."""
        if isinstance(item, str):
            item = json_value(item, self._states)
        if not isinstance(item, Group):
            raise InvalidInputError(f"found {describe(item)}, expected a mapping", field=self._states)
        self._node.is_found = True
        keys = self._keys_of(tuple(item))
        values: dict[str, Any] = {}
        for (key, name, read, node), value in zip(keys.fields, item.at_hand(keys.names), strict=True):
            if value is NotImplemented:
                value = item[key]
            if value is None:
                continue
            node.is_found = True
            if (found := read(value, name)) is None:
                continue
            if name in values and not _is_same(values[name], found):
                raise InvalidInputError(f"found two values that differ, one as {key}", field=name)
            values[name] = found
        check_spans(values.get("spans"), [values[name] for name in ANSWER_FIELDS if name in values])
        extras = self._extras(item, keys.rest) if keys.rest else {}
        self._set_key(values, bound)
        stated_ids = None if (found := values.pop("L.ids", None)) is None else found.tolist()
        record = self._made(values, position, is_row="N" in bound)
        if extras:
            record.extras.update(extras)
        num_layers, has_left_out = record.num_layers, record.is_without_embeddings
        size = self._settings.get("L.size")
        record.layer_ids = layer_ids_of(None, stated_ids, size, num_layers, is_without_embeddings=has_left_out)
        if keys.scores:
            self._set_scores(record, item, keys.scores)
        return record

    def _keys_of(self, names: tuple[Any, ...]) -> _Keys:
        if (known := self._seen.get(names)) is None:
            known = self._seen[names] = self._worked_out(names)
        return known

    def _worked_out(self, names: tuple[Any, ...]) -> _Keys:
        fields: list[_Key] = []
        scores: list[_Key] = []
        rest: list[Any] = []
        for key in names:
            text = key_text(key)
            for place in self._places.get(text, ()):
                kind, node = place.rule.kind, self._node.child(place.address.path[-1])
                (scores if kind == "score" else fields).append(_Key(key, place.name, self._reader_of(place), node))
            if text in self._ignored:
                self._ignored[text].is_found = True
            if text not in self._places and text not in self._known:
                rest.append(key)
        return _Keys(fields, [entry.key for entry in fields], scores, rest)

    def _reader_of(self, place: Place) -> Callable[[Any, str], Any]:
        if place.name in ("hidden_states", "attentions", "last_token"):
            if place.name == "attentions":
                return _skipped if self._need_attention is False else _attention
            return _layers
        if place.rule.kind == "texts":
            return _texts
        if place.rule.kind in ("array", "known"):
            return _numbers
        if place.rule.kind == "json":
            return _plain
        return _number if place.rule.kind == "number" else _text if place.rule.kind == "text" else _scalar

    def _extras(self, item: Group, rest: list[Any]) -> dict[str, Any]:
        """Return the texts and numbers that no line names, if `records` takes them."""
        found = {}
        for key in rest:
            value = item[key]
            self._on_unclaimed(self._node, key, value)
            if self._has_records and isinstance(value, _EXTRAS):
                found[str(key)] = value
        return found

    def _set_key(self, values: dict[str, Any], bound: Mapping[str, Any]) -> None:
        if (given := values.get("question_id")) is not None:
            values["question_id"] = id_text(given)
        elif any(place.name == "question_id" and not place.is_optional for place in self._plan.others):
            raise InvalidInputError("the trace has no id where the layout says", field="question_id")
        elif values.get("global_example_id") is None and bound.get("id") is not None:
            values["question_id"] = key_text(bound["id"])
        sample = values.get("sample", bound.get("sample"))
        if sample is not None:
            text = key_text(sample)
            if not text.isdecimal():
                raise InvalidInputError(f"found {text[:40]!r}, expected the number of an answer", field="sample")
            values["sample"] = int(text)

    def _made(self, values: dict[str, Any], position: int, *, is_row: bool) -> TraceRecord:
        states = values.get(self._states)
        if states is None:
            raise InvalidInputError("missing key", field=self._states)
        if states[0].dtype.kind != "f":
            settle_dtype(Block(states, None), self._states, self._settings)
        need = self._need_attention
        if self._states == "last_token" or (need is None and "attentions" not in values):
            need = False
        if (tokens := values.get("tokens")) is not None and self._states == "hidden_states":
            check_ids(tokens, len(states[0]), is_wider=self._has_more_ids)
            if is_row and "S.padding" not in self._settings:
                check_no_padding(tokens[: len(states[0])])
        record = record_from_dict(values, source_name=self._source, position=position, need_attention=need)
        record.dropped = []
        rows = states if self._states == "hidden_states" else [layer.reshape(1, -1) for layer in states]
        check_zero_tokens(rows, self._states)
        if record.attention is not None:
            check_attention_values(record.attention[0])
        if self._states == "hidden_states":
            check_prompt(record.prompt_length, record.num_tokens)
        return record

    def _set_scores(self, record: TraceRecord, item: Group, keys: list[_Key]) -> None:
        found: dict[str, float] = {}
        for key, name, _, node in keys:
            value = item[key]
            node.is_found |= value is not None
            if self._has_scores_file:
                record.extras |= {key: value} if isinstance(value, _EXTRAS) else {}
                continue
            _scalar(value, name)
            direction = self._plan.layout.rule(name).direction or ""
            is_label = name in LABELS
            number = label_value(value, name, direction, self._words) if is_label else score_value(value, name)
            found[name] = number
            if math.isnan(number):
                continue
            if name == "label":
                record.label = number
            else:
                record.scores[score_of(name)] = number
        check_agreement(found)


def _literal(address: Address) -> str:
    last = address.path[-1]
    assert isinstance(last, KeyStep)
    return last.parts[0].literal or ""


def _key_of(place: Place) -> str:
    return _literal(place.address)


def _layers(value: Any, name: str) -> list[np.ndarray]:
    """Return the layers of a list of arrays, or of one array whose first axis is L."""
    rank = _RANKS[name]
    if type(value) is list:  # of arrays, which the record compares with each other
        if {getattr(layer, "ndim", None) for layer in value} != {rank}:
            found = next(
                (getattr(layer, "shape", "a text") for layer in value if getattr(layer, "ndim", 0) != rank), ""
            )
            raise InvalidInputError(f"found the shape {found}, expected {rank} axes as the layout says", field=name)
        return value
    if type(value) is np.ndarray:
        value = NumpyArray(value)
    if isinstance(value, str):
        value = json_value(value, name)
    if isinstance(value, Items) and not value.is_stream:
        if not value.length:
            raise InvalidInputError("found zero layers, expected at least one", field=name)
        arrays = [as_array(part) for part in value]
        if None in arrays:
            raise InvalidInputError(f"found {describe(value[arrays.index(None)])}, expected an array", field=name)
        layers = [array.read() for array in arrays if array is not None]
    elif isinstance(value, Array):
        layers = list(value.read()) if value.ndim > 1 else [value.read()]
    else:
        raise InvalidInputError(f"found {describe(value)}, expected the axes of {name}", field=name)
    shape, dtype = layers[0].shape, layers[0].dtype
    for k, layer in enumerate(layers):
        if layer.ndim != rank:
            raise InvalidInputError(
                f"found the shape {layer.shape} in layer {k}, expected {rank} axes as the layout says", field=name
            )
        if layer.shape != shape or layer.dtype != dtype:
            raise InvalidInputError(
                f"found {layer.dtype} {layer.shape} in one layer, expected {dtype} {shape} as in the first", field=name
            )
    return layers


def _attention(value: Any, name: str) -> list[np.ndarray] | None:
    """Return the layers of attention; None where the model gave none."""
    if isinstance(value, Items) and not value.is_stream and all(part is None for part in value):
        return None
    return _layers(value, name)


def _numbers(value: Any, name: str) -> np.ndarray:
    if type(value) is np.ndarray:
        return value
    array = None if type(value) is list else as_array(json_value(value, name) if isinstance(value, str) else value)
    if array is None:
        raise InvalidInputError(f"found {describe(value)}, expected numbers", field=name)
    return array.read()


def _texts(value: Any, name: str) -> list[str]:
    if type(value) is list and type(value[0]) is str:
        return value
    texts = list(value) if isinstance(value, Items) and not value.is_stream else None
    if texts is None or set(map(type, texts)) != {str}:
        raise InvalidInputError(f"found {describe(value)}, expected the text of each token", field=name)
    return texts  # type: ignore[return-value]


def _scalar(value: Any, name: str) -> Any:
    if type(value) not in _PLAIN:
        raise InvalidInputError(f"found {describe(value)}, expected one value per trace", field=name)
    return value


def _text(value: Any, name: str) -> Any:
    return value if type(value) is str else typed_value(name, _scalar(value, name))


def _number(value: Any, name: str) -> Any:
    return value if type(value) is int else typed_value(name, _scalar(value, name))


def _plain(value: Any, name: str) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value if type(value) is list else plain_of(value)


def _is_same(one: Any, two: Any) -> bool:
    if isinstance(one, list | np.ndarray) or isinstance(two, list | np.ndarray):
        return np.array_equal(np.asarray(one), np.asarray(two))
    return bool(one == two)


def _skipped(value: Any, name: str) -> None:
    return None
