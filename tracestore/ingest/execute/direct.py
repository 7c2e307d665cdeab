"""Records of layouts whose fields are keys of one item each: what keys mean is worked out once for each set of keys.

The result is that of `TraceBuilder`, without columns and joins.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.execute.arrays import check_ids, check_no_padding, is_of_sequences, settled_dtype
from tracestore.ingest.execute.axes import read, read_block
from tracestore.ingest.execute.records import RecordMaker, check_spans
from tracestore.ingest.execute.values import describe, json_value, one_value, plain_of, settled, typed_value
from tracestore.ingest.execute.walk import Cell, Node, Walk
from tracestore.ingest.layout.addresses import Address, ItemsStep, KeyStep, Step
from tracestore.ingest.layout.patterns import AXIS_NAMES
from tracestore.ingest.layout.places import RECORDS, Place, Plan
from tracestore.ingest.readers.tree import Group, Items, NumpyArray
from tracestore.store.vocabulary import SYNONYMS
from tracestore.store.write.field_values import field_error
from tracestore.store.write.record import TraceRecord

_AXES: dict[str, list[tuple[str, ...]]] = {
    "hidden_states": [("L", "S", "D")],
    "last_token": [("L", "D")],
    "attentions": [("L", "H", "S", "Q")],
    "tokens": [("S",), ("T",)],
    "tokens_decoded": [("S",), ("T",)],
    "L.ids": [("L",)],
}
_LETTERS = {"hidden_states": "SD", "attentions": "HSQ", "last_token": "D"}  # of a layer
_SETTINGS = ("duplicates", "L.what", "L.size")
_EXTRAS = (str, int, float)
_LENGTHS = frozenset(name.replace(" ", "_") for name in SYNONYMS["S.lengths"])


class _Key(NamedTuple):
    """A key of an item, and how its value is read."""

    key: Any
    place: Place
    read: Callable[[Any, Place], Any]
    plain: type | None  # of values that need no reading
    node: Node


class _Keys(NamedTuple):
    """The keys of items that are fields, those that are scores, and those that no line names."""

    fields: list[_Key]
    names: list[Any]  # of the fields
    scores: list[_Key]
    rest: list[Any]
    lengths: list[Any]  # of those that no line names


def direct_step(plan: Plan) -> ItemsStep | bool | None:
    """Return the step to the items that hold all fields of the traces; None for whole files, False for other layouts."""
    state = plan.states[0].address
    step = state.path[0] if len(state.path) == 2 else None
    if not isinstance(step, ItemsStep | None) or len(plan.states) > 1 or plan.files.keys() != {state.files.text}:
        return False
    before: tuple[Step, ...] = () if step is None else (step,)
    names = {*state.files.names, *getattr(step, "names", ())}
    is_direct = (
        not plan.layout.templates
        and all(map(_is_simple, plan.layout.settings.items()))
        and getattr(step, "letter", None) in (None, "N")
        and AXIS_NAMES.keys().isdisjoint(names)
        and "chunk" not in plan.names
        and all(map(_has_known_axes, plan.places))
        and all(p.address.path == before if p.name == RECORDS else _is_key(p.address, before) for p in plan.places)
        and all(_is_key(address, before) for address in plan.left_out)
    )
    return step if is_direct else False


def _is_simple(setting: tuple[str, Any]) -> bool:
    return setting[0] in _SETTINGS or setting[0].startswith("words.") or setting == ("S.padding", "none")


def _has_known_axes(place: Place) -> bool:
    if place.part or place.is_of_answer:
        return False
    has_none = place.address.axes is None and place.rule.kind != "known"
    return place.axes in _AXES[place.name] if place.name in _AXES else has_none


def _is_key(address: Address, before: tuple[Step, ...]) -> bool:
    """Return whether an address is a key of the item behind a step."""
    last = address.path[-1] if address.path else None
    literal = last.literal if isinstance(last, KeyStep) else None
    return address.path[:-1] == before and literal is not None and not literal.lstrip("-").isdecimal()


class DirectReader:
    """Read the records of the items of one file.

    Parameters
    ----------
    maker : RecordMaker
        Of a plan for which `direct_step` returns no False.
    node : Node
        The node of the items.
    walk : Walk
        The walk through the file.
    known : collection of str
        As of `Execution`.
    """

    def __init__(self, maker: RecordMaker, node: Node, walk: Walk, known: Collection[str]) -> None:
        self._maker, self._node, self._walk = maker, node, walk
        self._states = maker.plan.layout.states
        of_tokens = [place for place in maker.plan.others if place.name == "tokens"]
        has_more = any(place.axes == ("T",) or is_of_sequences(place) for place in of_tokens)
        self._more = (0, 1) if has_more else (0,)  # of ids than of states
        may_be_padded = self._states == "hidden_states" and "S.padding" not in known
        self._lengths = _LENGTHS if may_be_padded else frozenset[str]()
        self._seen: dict[tuple[Any, ...], _Keys] = {}
        self._kind: type | None = None  # of the item before: the check of an abstract class takes long

    def record(self, item: Any, bound: Mapping[str, Any], position: int) -> TraceRecord:
        """Return the record of an item."""
        if isinstance(item, str):
            item = json_value(item, self._states)
        if type(item) is not self._kind:
            if not isinstance(item, Group):
                raise InvalidInputError(f"found {describe(item)}, expected a mapping", field=self._states)
            self._kind = type(item)
        self._node.is_found = True
        names = tuple(item)
        if (keys := self._seen.get(names)) is None:
            keys = self._seen[names] = self._worked_out(item)
        values: dict[str, Any] = {}
        for (key, place, opened, plain, node), value in zip(keys.fields, item.at_hand(keys.names), strict=True):
            if type(value) is not plain:
                if value is NotImplemented:
                    value = item[key]
                if value is None:
                    continue
                node.is_found = True
                if (value := opened(value, place)) is None:
                    continue
            node.is_found = True
            name = place.name
            if name in values and not np.array_equal(np.asarray(values[name]), np.asarray(value)):
                raise InvalidInputError(
                    f"found two values that differ, one as {key}; ignore leaves one out", field=name
                )
            values[name] = value
        if "spans" in values:
            check_spans(values)
        extras = self._extras(item, keys.rest, bound) if keys.rest else None
        self._maker.set_id(values, bound)
        self._maker.set_sample(values, bound.get("sample"))
        stated = None if (found := values.pop("L.ids", None)) is None else found.tolist()
        self._check(values, is_row="N" in bound)
        for key in keys.lengths:
            self._check_length(item[key], values, key)
        ids = self._maker.layers.sort(values, {self._states: None, "attentions": None}, stated)
        record = self._maker.record(values, position, is_row="N" in bound)
        if extras:
            record.extras.update(extras)
        self._maker.set_layers(record, ids, stated)
        if keys.scores:
            self._maker.set_scores(record, self._scores(item, keys.scores))
        return record

    def _worked_out(self, item: Group) -> _Keys:
        claimed, rest = self._walk.claims(self._node, item)
        fields: list[_Key] = []
        scores: list[_Key] = []
        for key, steps in claimed.items():
            for _, node, _ in steps:
                for place in node.leaves:
                    read, plain = self._reader_of(place)
                    of_kind = scores if place.rule.kind == "score" else fields
                    of_kind.append(_Key(key, place, read, plain, node))
        lengths = [key for key in rest if str(key).lower() in self._lengths]
        return _Keys(fields, [entry.key for entry in fields], scores, rest, lengths)

    def _reader_of(self, place: Place) -> tuple[Callable[[Any, Place], Any], type | None]:
        """Return what reads the values of a place, and the type of those that need no reading."""
        if place.name == "attentions":
            return (_attention if self._maker.need_attention is not False else lambda *_: None), None
        if place.name in _LETTERS:
            return _layer_arrays, None
        if place.rule.kind in ("array", "known"):
            return _numbers, np.ndarray
        return {"texts": (_texts, None), "json": (_plain, None), "number": (_typed, int)}.get(
            place.rule.kind, (_typed, str)
        )

    def _extras(self, item: Group, rest: list[Any], bound: Mapping[str, Any]) -> dict[str, Any]:
        """Return the texts and numbers that no line names, if `records` takes them."""
        found, named = {}, {"id": bound["id"]} if "id" in bound else {}
        for key in rest:
            value = item[key]
            self._walk.on_unclaimed(self._node, key, value, named)
            if self._node.has_records and isinstance(value, _EXTRAS):
                found[str(key)] = value
        return found

    def _check(self, values: dict[str, Any], *, is_row: bool) -> None:
        """Check that the states are there, their dtype (rule 7) and the ids of their tokens (rule 3)."""
        states = values.get(self._states)
        if states is None:
            raise InvalidInputError("missing key", field=self._states)
        settings = self._maker.settings
        for name in (self._states, "attentions"):
            if (layers := values.get(name)) and layers[0].dtype.kind != "f":
                values[name] = settled_dtype(layers, name, settings)
        if self._states == "hidden_states" and (tokens := values.get("tokens")) is not None:
            check_ids(tokens, len(states[0]), values.get("prompt_length"), self._more)
            # Traces of a built-in layout may end with an id twice: EqualLengths compares them with each other.
            if is_row and "S.padding" not in settings and not self._maker.is_of_schema:
                check_no_padding(tokens[: len(states[0])])

    def _check_length(self, length: Any, values: Mapping[str, Any], key: str) -> None:
        """Refuse a length that leaves out one id or text alone, at one end: the item is padded, by its own words."""
        tokens = values.get("tokens", values.get("tokens_decoded", ()))[: len(values[self._states][0])]
        if type(length) is not int or not 0 < length < len(tokens):
            return
        if 1 in (len(set(tokens[length:])), len(set(tokens[:-length]))):
            raise InvalidInputError(
                f"found {length}, and the others of {len(tokens)} tokens are equal: padding? --padding none, or S.padding = "
                '"none" in a layout, states that they belong to the trace',
                field=key,
            )

    def _scores(self, item: Group, keys: list[_Key]) -> Iterator[tuple[str, Any, bool]]:
        for key, place, _, _, node in keys:
            value = item[key]
            node.is_found |= value is not None
            is_plain = value is None or isinstance(value, _EXTRAS)
            yield place.name, value if is_plain else plain_of(value, lambda array: array.read(), lambda key: key), False


def _layer_arrays(value: Any, place: Place) -> list[np.ndarray]:
    """Return the layers of a list of arrays, or of one array whose first axis is L."""
    letters = _LETTERS[place.name]
    if type(value) is list and type(value[0]) is np.ndarray:
        # The record compares their shapes.
        if wrong := [layer.ndim for layer in value if layer.ndim != len(letters)]:
            raise field_error(place.name, f"arrays of {wrong[0]} axes", f"{len(letters)} as the layout says")
        return value
    value = NumpyArray(value) if type(value) is np.ndarray else settled(value)
    if isinstance(value, str):
        value = json_value(value, place.name)
    return read_block([Cell(place, {}, value, place.axes, True)], letters, {}, {}, place.name)[0]


def _attention(value: Any, place: Place) -> list[np.ndarray] | None:
    """Return the layers of attention; None where the model gave none: ``()``, or None for each layer."""
    if isinstance(value, Items) and not value.is_stream and all(part is None for part in value):
        return None
    return _layer_arrays(value, place)


def _numbers(value: Any, place: Place) -> np.ndarray:
    return read(settled(value), place.axes, {}, place.name)[0]


def _texts(value: Any, place: Place) -> list[str]:
    texts = value if type(value) is list else _numbers(value, place).tolist()
    if {*map(type, texts)} != {str}:
        raise InvalidInputError(f"found {describe(value)}, expected the text of each token", field=place.name)
    return texts


def _typed(value: Any, place: Place) -> Any:
    return typed_value(place.name, one_value(value, place.name))


def _plain(value: Any, place: Place) -> Any:
    plain = value.tolist() if isinstance(value, np.ndarray) else value if type(value) is list else plain_of(value)
    return typed_value(place.name, plain)
