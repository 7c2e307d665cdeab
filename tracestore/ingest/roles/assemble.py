"""Make records of a trace in any accepted layout."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.grouping import natural_key
from tracestore.ingest.roles.assign import Assignment, assign
from tracestore.ingest.roles.batches import batch_size, split_batch, with_beams
from tracestore.ingest.roles.edges import set_attention
from tracestore.ingest.roles.keys import DEFAULT_KEYS, INPUTS_PAGE, KeyOptions, normalized
from tracestore.store.format import schema
from tracestore.store.vocabulary import UnknownVerdictError
from tracestore.store.write.record import TraceRecord, layer_ids_of, record_from_dict
from tracestore.store.write.values import are_arrays, as_array, describe, field_error

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
    # A scores file, or a key that the user chose, has the labels.
    has_verdict = not options.has_scores_file and options.score_key is None
    read = partial(_record, source_name=source_name, need_attention=need_attention, has_verdict=has_verdict)
    try:
        return [read(each, position=position + k, is_batch=count > 1) for k, each in enumerate(given)]
    except UnknownVerdictError as error:
        error.reason += f"; --map label={error.field} or --score-column {error.field} decides"
        raise


def _num_tokens(fields: Mapping[str, Any]) -> int | None:
    """Return the number of tokens of the first layer of hidden states; None if the layers are no arrays."""
    value = fields.get("hidden_states")
    layers = list(value.values()) if isinstance(value, Mapping) else value
    first = as_array(layers) if as_array(layers) is not None else as_array(layers[0]) if layers else None
    return None if first is None or first.ndim < 2 else first.shape[-2]


def _record(found: Assignment, *, is_batch: bool, **options: Any) -> TraceRecord:
    """Return the record of a trace; `options` are those of `record_from_dict`."""
    fields, need_attention = found.fields, options["need_attention"]
    others: dict[str, Any] = {}  # what is not a field by its value
    if not is_batch and not _is_mask(fields.get("attention_mask")):
        _move(fields, "attention_mask", others)
    if not is_batch and not isinstance(fields.get("lengths"), int):
        _move(fields, "lengths", others)
    if isinstance(fields.get("scores"), Mapping):
        _move(fields, "scores", others)
    given_ids = fields.pop("layer_ids", None)
    if fields.get("hidden_states") is None and fields.get("last_token") is not None:
        ids = _set_last_token(fields, given_ids)
        record = record_from_dict(fields, **options | {"need_attention": False})
    else:
        if isinstance(fields.get("hidden_states"), np.ndarray):
            fields["hidden_states"] = list(fields["hidden_states"])  # axes that are known
        ids = _layers_by_id(fields, "hidden_states")
        if need_attention is not False and "attentions" in fields:
            attention_ids = _layers_by_id(fields, "attentions")
            if ids is not None and attention_ids is not None:
                # Attention that is numbered from 0 as models return it, next to embeddings as layer 0.
                is_shifted = ids == list(range(len(ids))) and attention_ids == ids[:-1]
                if attention_ids not in (ids, ids[1:]) and not is_shifted:
                    raise field_error("attentions", f"layers {attention_ids}", f"{ids} as in hidden_states")
        record = _validated(found, options)
    record.extras |= others
    layers: Any = record.extras.get("layers")
    if given_ids is None and ids is None and _is_list_of_integers(layers) and len(layers) == record.num_layers:
        given_ids = layers  # a list of another length has another meaning
    given_ids = ids if given_ids is None else given_ids
    record.layer_ids = None if given_ids is None else layer_ids_of(given_ids, record)
    record.dropped, record.scores = found.dropped, record.scores | found.scores
    record.label = record.label if found.label is None else found.label
    return record


def _move(fields: dict[str, Any], name: str, others: dict[str, Any]) -> None:
    if name in fields:
        others[name] = fields.pop(name)


def _validated(found: Assignment, options: Mapping[str, Any]) -> TraceRecord:
    """Return the record of the fields. Tokens of another name that do not fit to the hidden states are an extra."""
    try:
        return record_from_dict(found.fields, **options)
    except InvalidInputError as error:
        if error.field == "attentions" and error.reason.startswith("missing key"):
            # What else is wrong would remain after --attention none.
            record_from_dict(found.fields, **{**options, "need_attention": None})
        field = error.field or ""
        names = {role: key for key, role in found.roles.items() if key not in _PER_TOKEN}
        if field not in ("tokens", "tokens_decoded") or field not in names:
            raise
    found.fields[names[field]] = found.fields.pop(field)
    del found.roles[names[field]]
    return _validated(found, options)


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


def _set_last_token(fields: dict[str, Any], layer_ids: Any) -> list[int] | None:
    """Make the hidden states of the last token a list of layers, and return the numbers of the layers."""
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
    fields["last_token"] = [layer.reshape(-1) for layer in _behind_each_other(layers, fields, layer_ids)]
    fields.pop("attentions", None)
    return ids
