"""Make records of a trace in any accepted layout."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.grouping import natural_key
from tracestore.ingest.layouts.values import array_of, leaf_of
from tracestore.ingest.roles.assign import Assignment, assign
from tracestore.ingest.roles.batches import batch_size, crop, split_batch, valid_span, with_beams
from tracestore.ingest.roles.edges import set_attention
from tracestore.ingest.roles.keys import DEFAULT_KEYS, INPUTS_PAGE, KeyOptions, normalized
from tracestore.store.format import schema
from tracestore.store.write.record import TraceRecord, record_from_dict
from tracestore.store.write.values import are_arrays, as_array, describe, field_error, integer

_LAYER_KEY = re.compile(r"(?:layers?[._-]?)?(\d{1,6})", re.IGNORECASE)
_STEP_KEY = re.compile(r"steps?[._-]?\d{1,6}", re.IGNORECASE)
_HIDDEN_SIZE = re.compile(r"(?:hidden|embed(?:ding)?|model)_(?:dim|size)|hidden_dimension|d_model|n_embd")
_PER_TOKEN = ("tokens", "input_ids", "sequences", "tokens_decoded", *schema.TOKEN_FIELDS, "answer_span")


def records_of_trace(
    trace: Any,
    *,
    source_name: str,
    position: int,
    need_attention: bool | None = True,
    options: KeyOptions = DEFAULT_KEYS,
    has_objects: bool = False,
) -> list[TraceRecord]:
    """Return the records of a dict: one, or one for each answer of a batch.

    Parameters
    ----------
    trace : Any
        The value found where a dict is expected.
    source_name : str
        Name of the source, for traces without an id.
    position : int
        Position of the first record in its source.
    need_attention : bool or None
        As for `record_from_dict`.
    options : KeyOptions
        Names of the fields in this file.
    has_objects : bool
        Whether the trace may contain objects that are not data.

    Raises
    ------
    InvalidInputError
        If a field is missing or invalid.
    """
    found = assign(trace, options, has_objects=has_objects)
    if "beam_indices" in found.fields:
        with_beams(found.fields)
    count = batch_size(found.fields)
    if count == 1 and need_attention is not False and not are_arrays(found.fields.get("attentions")):
        set_attention(found.fields, _num_tokens(found.fields))
    if count > 1:
        answers = split_batch(found.fields, count, has_padding=not options.has_no_padding)
        given = [assign(answer, replace(options, renamed=())) for answer in answers]
        counts: Counter[Any] = Counter()
        for each in given:
            each.dropped = found.dropped
            # Several answers to one question.
            question = str(each.fields.get("question_id", each.fields.get("global_example_id")))
            each.fields.setdefault("sample", counts[question])
            counts[question] += 1
    else:
        given = [found]
    return [_record(each, source_name, position + k, need_attention, count > 1) for k, each in enumerate(given)]


def _num_tokens(fields: Mapping[str, Any]) -> int | None:
    """Return the number of tokens of the first layer of hidden states; None if the layers are no arrays."""
    value = fields.get("hidden_states")
    layers = list(value.values()) if isinstance(value, Mapping) else value
    first = as_array(layers) if as_array(layers) is not None else as_array(layers[0]) if layers else None
    return None if first is None or first.ndim < 2 else first.shape[-2]


def _record(
    found: Assignment, source_name: str, position: int, need_attention: bool | None, is_batch: bool
) -> TraceRecord:
    fields = found.fields
    mask = fields.pop("attention_mask", None) if is_batch or _is_mask(fields.get("attention_mask")) else None
    length = fields.pop("lengths", None) if is_batch or isinstance(fields.get("lengths"), int) else None
    given_ids = fields.pop("layer_ids", None)
    if fields.get("hidden_states") is None and fields.get("last_token") is not None:
        record, ids = _last_token_record(fields, source_name, position, given_ids)
    else:
        ids = _layers_by_id(fields, "hidden_states")
        if need_attention is not False and "attentions" in fields:
            attention_ids = _layers_by_id(fields, "attentions")
            if ids is not None and attention_ids is not None:
                # Attention that is numbered from 0 as models return it, next to embeddings as layer 0.
                is_shifted = ids == list(range(len(ids))) and attention_ids == ids[:-1]
                if attention_ids not in (ids, ids[1:]) and not is_shifted:
                    raise field_error("attentions", f"layers {attention_ids}", f"{ids} as in hidden_states")
        is_head_mean = need_attention is not False and _add_head_axis(fields)
        record = _validated(found, source_name, position, need_attention)
        record.is_head_mean = is_head_mean
        if mask is not None or length is not None:
            num_tokens = record.num_tokens if record.tokens is None else len(record.tokens)
            begin, end = valid_span(mask, length, num_tokens)
            crop(record, begin, end)
            if mask is not None and (begin, end) == (0, num_tokens):
                record.extras["attention_mask"] = mask
    layers: Any = record.extras.get("layers")
    if given_ids is None and ids is None and _is_list_of_integers(layers) and len(layers) == record.num_layers:
        given_ids = layers  # a list of another length has another meaning
    given_ids = ids if given_ids is None else given_ids
    record.layer_ids = None if given_ids is None else _layer_ids(given_ids, record)
    record.dropped, record.scores = found.dropped, found.scores
    record.label = found.label
    return record


def _validated(found: Assignment, source_name: str, position: int, need_attention: bool | None) -> TraceRecord:
    """Return the record of the fields. Tokens of another name that do not fit to the hidden states are an extra."""
    given: dict[str, Any] = {"source_name": source_name, "position": position, "need_attention": need_attention}
    try:
        return record_from_dict(found.fields, need_tokens=False, **given)
    except InvalidInputError as error:
        if error.field == "attentions" and error.reason.startswith("missing key"):
            # What else is wrong would remain after --attention none.
            record_from_dict(found.fields, need_tokens=False, **given | {"need_attention": None})
        field = error.field or ""
        names = {role: key for key, role in found.roles.items() if key not in _PER_TOKEN}
        if field not in ("tokens", "tokens_decoded") or field not in names:
            raise
    found.fields[names[field]] = found.fields.pop(field)
    del found.roles[names[field]]
    return _validated(found, source_name, position, need_attention)


def _is_mask(value: Any) -> bool:
    """Return whether a value is a mask of the tokens of one answer."""
    if isinstance(value, list) and value:
        value = value[0] if len(value) == 1 and isinstance(value[0], list) else value
        return all(isinstance(item, int) for item in value)
    array = as_array(value)
    return array is not None and array.dtype.kind in "biuf" and (array.ndim == 1 or array.shape[:-1] == (1,))


def _is_list_of_integers(value: Any) -> bool:
    array = as_array(value)
    if array is not None:
        return array.ndim == 1 and array.dtype.kind in "iu"
    return isinstance(value, list | tuple) and bool(value) and all(type(k) is int for k in value)


def _layers_by_id(fields: dict[str, Any], name: str) -> list[int] | None:
    """Replace a dict of layers by their list in the order of the layers; return their numbers."""
    value = fields.get(name)
    if type(value) is list or not isinstance(value, Mapping):
        return None
    if value and all(isinstance(key, str) and _STEP_KEY.fullmatch(key) for key in value):
        # The passes of generate(), each with its layers.
        steps = {f"{name}[{n}]": value[key] for n, key in enumerate(sorted(value, key=natural_key))}
        found = [_layers_by_id(steps, step) for step in list(steps)]
        fields[name] = list(steps.values())
        return found[0] if found.count(found[0]) == len(found) else None
    layers: dict[int, Any] = {}
    for key, layer in value.items():
        match = _LAYER_KEY.fullmatch(str(key)) if isinstance(key, int | str) else None
        if match is None or int(match[1]) in layers:
            raise field_error(
                name, f"a dict with the key {str(key)[:40]!r}", "a dict of arrays by the number of the layer"
            )
        layers[int(match[1])] = layer
    ids = sorted(layers)
    fields[name] = [layers[k] for k in ids]
    return ids


def _layer_ids(value: Any, record: TraceRecord) -> tuple[int, ...]:
    """Return the layer of the model that each stored layer comes from."""
    if not _is_list_of_integers(value):
        raise field_error("layer_ids", describe(value), "a list of L integers")
    ids = [integer(k, "layer_ids") for k in value]
    if record.is_without_embeddings and len(ids) == record.num_layers + 1:
        ids = ids[1:]
    if len(ids) != record.num_layers or min(ids) < 0 or len(set(ids)) < len(ids):
        raise field_error("layer_ids", f"{str(ids)[:80]}", f"{record.num_layers} different numbers of layers from 0")
    return tuple(ids)


def _add_head_axis(fields: dict[str, Any]) -> bool:
    """Give attention that is averaged over heads, (S, S) per layer, an axis of one head; return whether it was."""
    value: Any = fields.get("attentions")
    if (array := as_array(value)) is not None:
        value = list(array) if array.ndim == 3 else []
    elif leaf_of(value)[1] == 3:  # nested lists (S, S) per layer
        value = [array_of(layer) for layer in value]
    layers = list(map(as_array, value)) if isinstance(value, list | tuple) else []
    squares = [layer[None] for layer in layers if layer is not None and layer.ndim == 2 and len(set(layer.shape)) == 1]
    if not layers or len(squares) < len(layers):
        return False
    fields["attentions"] = squares
    return True


def _behind_each_other(layers: list[np.ndarray], fields: Mapping[str, Any], layer_ids: Any) -> list[np.ndarray]:
    """Return the layers that a single vector holds behind each other, if their size or their numbers are given."""
    groups = [fields, *(value for value in fields.values() if isinstance(value, Mapping))]
    sizes = {
        int(v)
        for group in groups
        for k, v in group.items()
        if isinstance(k, str) and isinstance(v, int | np.integer) and _HIDDEN_SIZE.fullmatch(normalized(k))
    }
    numbers = fields.get("layers") if layer_ids is None else layer_ids
    size = layers[0].size
    count = len(numbers) if numbers is not None and _is_list_of_integers(numbers) else 0
    dim = sizes.pop() if len(sizes) == 1 else size // count if count else size
    return list(layers[0].reshape(-1, 1, dim)) if len(layers) == 1 and 0 < dim < size and size % dim == 0 else layers


def _last_token_record(
    fields: dict[str, Any], source_name: str, position: int, layer_ids: Any
) -> tuple[TraceRecord, list[int] | None]:
    """Return the record of a trace that has the hidden states of the last token alone, and the numbers of its layers."""
    ids = _layers_by_id(fields, "last_token")
    value = fields.pop("last_token")
    array = as_array(value)
    rows = list(array) if array is not None and array.ndim in (2, 3) else value
    if not isinstance(rows, list | tuple) or not rows:
        raise field_error("last_token", describe(value), "an array (L, D)")
    layers = []
    for k, row in enumerate(rows):
        layer = as_array(row)
        if layer is None or layer.ndim == 0 or layer.size != layer.shape[-1]:
            raise field_error(f"last_token[{k}]", describe(row), f"an array (D,); see {INPUTS_PAGE}#keys")
        layers.append(layer.reshape(1, -1))
    layers = _behind_each_other(layers, fields, layer_ids)
    # Values per token belong to tokens that have no hidden states here.
    others = {name: fields.pop(name) for name in _PER_TOKEN if name in fields}
    fields.pop("attentions", None)
    try:
        record = record_from_dict(
            fields | {"hidden_states": layers},
            source_name=source_name,
            position=position,
            need_attention=False,
            need_tokens=False,
        )
    except InvalidInputError as error:
        name = (error.field or "").replace("hidden_states", "last_token") or None
        raise InvalidInputError(error.reason, source=error.source, position=error.position, field=name) from None
    record.last_token = np.concatenate(record.hidden or [])
    record.hidden = None
    record.extras |= others
    return record, ids
