"""Assign roles to the keys of a trace. The conversion and `convert --dry-run` both use this module."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.keys import ID_NAME, layer_kind, outputs_of_layers, parse_key
from tracestore.ingest.layouts.records import other_texts
from tracestore.ingest.layouts.values import joined_passes
from tracestore.ingest.pickles.pickled_objects import PickledObject
from tracestore.ingest.roles.candidates import ids_in, keys_found
from tracestore.ingest.roles.columns import is_id
from tracestore.ingest.roles.keys import (
    COUNTERS,
    INDEX_KEYS,
    INPUTS_PAGE,
    JUDGMENTS,
    LABELS,
    MAPPABLE,
    OTHER_NAMES,
    SAME,
    SPELLED,
    TOKENS_KEYS,
    WORD_COLUMNS,
    KeyOptions,
    direction_of,
    fields_of_nested,
    known_name,
    normalized,
)
from tracestore.store.vocabulary import FIELDS, SCORES, score_of_word
from tracestore.store.write.values import are_arrays, as_array, describe

OWN_KEYS = frozenset((*MAPPABLE, *TOKENS_KEYS, "global_example_id", "layers", "labels")) - {"label"}
# Nesting of values that are searched for what is not data.
_MAX_DEPTH = 64


@dataclass
class Assignment:
    """The values of a trace by role.

    Attributes
    ----------
    fields : dict[str, Any]
        Values by the names of the schema; every other key is an extra.
    roles : dict[str, str]
        The role of each key that is not an extra: the name of a field, "score", "label" or "dropped".
    dropped : list[str]
        Keys, or paths in nested values, that cannot be stored.
    scores : dict[str, float]
        Values of named scores.
    label : float or None
        1: hallucinated, 0: correct.
    """

    fields: dict[str, Any]
    roles: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)
    label: float | None = None


def assign(trace: Any, options: KeyOptions, *, has_objects: bool = False) -> Assignment:
    """Assign a role to each key of a trace, the value found where a dict is expected.

    `has_objects`: the trace may contain objects that are not data. Raises InvalidInputError if the value is not a dict,
    or a mapped key is missing.
    """
    if not isinstance(trace, Mapping):
        raise InvalidInputError(
            f"found {describe(trace)}, expected a dict; {INPUTS_PAGE}#files lists what a file may hold"
        )
    found = Assignment(dict(trace))
    values = found.fields
    others, spellings = _other_spellings(tuple(values))
    for key in others:
        del values[key]
        found.dropped.append(f"{key!r:.60}")
    for name, key in options.renamed:
        value = _take(values, key)
        if value is _MISSING:
            if name not in values:
                raise InvalidInputError(f"missing key, named by --map; found {keys_found(trace)}", field=key)
            continue
        values[name] = value
        found.roles[key] = name
    if has_objects:
        _remove_objects(found)
    for key, name in spellings:
        if values.get(name) is None and key in values:
            values[name] = values.pop(key)
            found.roles[key] = name
    if not are_arrays(attention := values.get("attentions")) and _is_nothing(attention):
        values.pop("attentions", None)
    _move_texts_of_tokens(found)
    if "sequences" in values and "input_ids" in values and "tokens" not in values:
        # generate() returns the prompt and the answer in `sequences`; `input_ids` is the prompt.
        values["tokens"] = values.pop("sequences")
        found.roles["sequences"] = "tokens"
    _find_other_names(found, options)
    if isinstance(values.get("hidden_states"), list | tuple | Mapping):
        values["hidden_states"] = joined_passes(values["hidden_states"])
    if not options.has_scores_file:
        _find_scores(found, options)
    return found


def _is_nothing(value: Any) -> bool:
    """Return whether a value is None or a nested list of None, as models without eager attention return it."""
    return value is None or (isinstance(value, list | tuple) and all(map(_is_nothing, value)))


def _move_texts_of_tokens(found: Assignment) -> None:
    """Move texts under the name of token ids to tokens_decoded."""
    texts = found.fields.get("tokens")
    if isinstance(texts, np.ndarray) and texts.dtype.kind == "U":
        texts = texts.tolist()
    if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
        del found.fields["tokens"]
        found.fields.setdefault("tokens_decoded", texts)
        found.roles["tokens"] = "tokens_decoded"


def role_of(key: str, found: Assignment) -> str:
    """Return the role of a key of the trace: a field, "score", "label", "extra" or "dropped"."""
    if key in found.dropped:
        return "dropped"
    if key in found.roles:
        return found.roles[key]
    if key in TOKENS_KEYS:
        used = next(name for name in TOKENS_KEYS if name in found.fields)
        return "tokens" if key == used else "extra"
    return ("layer_ids" if key == "layers" else key) if key in OWN_KEYS else "extra"


@lru_cache(maxsize=1 << 10)
def _other_spellings(keys: tuple[Any, ...]) -> tuple[list[Any], list[tuple[str, str]]]:
    """Return the keys that are no texts, and those that are names of fields in another spelling, such as hiddenStates."""
    texts = [key for key in keys if isinstance(key, str)]
    spellings = [(key, normalized(key)) for key in texts if key not in OWN_KEYS]
    return [key for key in keys if not isinstance(key, str)], [pair for pair in spellings if pair[1] in SPELLED]


def _is_batch_of_one(values: Mapping[str, Any]) -> bool:
    """Return whether the states have a batch dimension of one: (1, S, D) per layer, or (L, 1, S, D)."""
    hidden = values.get("hidden_states")
    first = hidden[0] if isinstance(hidden, list | tuple) and hidden else hidden
    shape: tuple[int, ...] = getattr(as_array(first), "shape", ())
    return (len(shape) == 3 and shape[0] == 1) or (len(shape) == 4 and 1 in shape[:2])


def _find_other_names(found: Assignment, options: KeyOptions) -> None:
    """Give missing fields the values of keys that other programs use for them."""
    values = found.fields
    if not _has_states(values):
        _merge_nested(found)
    if not _has_states(values) or "attentions" not in values:
        _find_arrays(found)
    if options.id_key in values and not any(values.get(key) is not None for key in SAME["question_id"]):
        assert options.id_key is not None
        if isinstance(values[options.id_key], str | int | np.integer):
            values["question_id"] = values.pop(options.id_key)
            found.roles[options.id_key] = "question_id"
    if _is_batch_of_one(values) and isinstance(ids := values.get("question_id"), list) and len(ids) == 1:
        values["question_id"] = ids[0]
    for name, known in _other_keys(tuple(values)):
        if any(values.get(key) is not None for key in SAME.get(name, (name,))):
            continue
        if name == "question_id" and _is_batch_of_one(values):
            values |= {k: v[0] for k in known if isinstance(v := values[k], list) and len(v) == 1 and is_id(v[0])}
        key = next((k for k in known if k in values and _is_value(name, k, values[k], options)), None)
        if key is not None:
            values[name] = values.pop(key)
            found.roles[key] = name
    if not any(values.get(key) for key in SAME["generated_answer"]):
        for name, (key, text) in other_texts(values).items():
            values[name] = text
            values.pop(key, None)
            found.roles |= {key: name} if key else {}
    if values.get("question_id") is None and values.get("global_example_id") is None:
        ids = [key for key in ids_in(values) if ID_NAME.fullmatch(normalized(key))]
        ids += [key for key, value in values.items() if _is_number_of_question(normalized(key), value, options)]
        if len(ids) == 1:
            values["question_id"] = values.pop(ids[0])
            found.roles[ids[0]] = "question_id"


@lru_cache(maxsize=1 << 10)
def _other_keys(keys: tuple[str, ...]) -> list[tuple[str, list[str]]]:
    """Return the keys that are other names of a field, for each field that has some.

    A batch has ids and texts under a plural, which each of its answers keeps.
    """
    given = _by_name(keys)
    if {"correct_answers", "incorrect_answers"} & given.keys():  # of TruthfulQA, whose best_answer is one, too
        given = {key: value for key, value in given.items() if key != "best_answer"}
    names = {name: (*others, *(f"{n}s" for n in (name, *others))) for name, others in OTHER_NAMES.items()}
    return [(name, found) for name, others in names.items() if (found := [given[k] for k in others if k in given])]


def _is_number_of_question(name: str, value: Any, options: KeyOptions) -> bool:
    """Return whether an integer has the name of an id in tables; a count such as question_idx only if it continues in each file."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or name in OWN_KEYS:
        return False
    is_count = name.endswith(INDEX_KEYS) or name in ("example", "sample", *COUNTERS)
    is_name = ID_NAME.fullmatch(name) is not None or name in ("item", "problem", "instance", "question")
    return is_name and (options.is_index_id or not is_count)


def _is_value(field_name: str, key: str, value: Any, options: KeyOptions) -> bool:
    """Return whether a key of another name holds a value of a field."""
    if field_name in ("tokens", "tokens_decoded"):
        is_texts = isinstance(value, list) and len(value) > 0 and isinstance(value[0], str)
        is_texts = is_texts or (isinstance(value, np.ndarray) and value.dtype.kind == "U")
        return is_texts == (field_name == "tokens_decoded") and (as_array(value) is not None or isinstance(value, list))
    if field_name == "question_id" and isinstance(value, int | np.integer):
        is_id = normalized(key) not in COUNTERS or (normalized(key) in INDEX_KEYS and options.is_index_id)
        return is_id and not isinstance(value, bool)
    return isinstance(value, str) and value != ""


def _has_states(values: Mapping[str, Any]) -> bool:
    return values.get("hidden_states") is not None or values.get("last_token") is not None


def _merge_nested(found: Assignment) -> None:
    """Merge the only nested dict with hidden states, such as the output of a model, into its trace.

    The other nested dicts, such as the output of a tokenizer, give the fields that are named as in a trace.
    """
    values = found.fields
    nested = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    inner = [key for key, value in nested.items() if _has_states(value)]
    inner = inner or [key for key, value in nested.items() if any(map(_is_array_of_states, value.items()))]
    if len(inner) != 1:
        return
    del values[inner[0]]
    for name, value in nested[inner[0]].items():
        if isinstance(name, str) and value is not None:
            values.setdefault(name, value)
    found.fields |= fields_of_nested(values) | values
    found.roles[inner[0]] = "hidden_states"


def _is_array_of_states(item: tuple[Any, Any]) -> bool:
    """Return whether an item of a dict has a name and a value of hidden states."""
    key, value = item
    parsed = parse_key(normalized(key)) if isinstance(key, str) else None
    is_states = parsed is not None and parsed.field in ("hidden_states", "last_token") and not parsed.trace
    return is_states and not isinstance(value, str | int | float | type(None))


@lru_cache(maxsize=1 << 10)
def _names_of_arrays(keys: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Return the keys that are names of arrays of the trace, and what they name."""
    parsed = [(key, parse_key(normalized(key))) for key in keys]
    return [(key, name) for key, name in parsed if name is not None and not name.trace]


def _find_arrays(found: Assignment) -> None:
    """Find hidden states, attention and tokens by the names that containers know, such as layer_3."""
    layers: dict[str, dict[str, dict[int, str]]] = {}
    wholes: dict[str, str] = {}
    values = found.fields
    names = _names_of_arrays(tuple(values))
    if _has_states(values):
        names = [(key, parsed) for key, parsed in names if parsed.field == "attentions"]
    for key, parsed in names:
        if isinstance(values[key], str | int | float | type(None)):
            continue
        if parsed.number is None:
            wholes.setdefault(parsed.field, key)
        else:
            layers.setdefault(parsed.field, {}).setdefault(layer_kind(parsed), {})[parsed.number] = key
    if not _has_states(values) and not {"hidden_states", "last_token"} & {*layers, *wholes}:
        return
    for name, key in wholes.items():
        if name not in values and not (name == "tokens" and any(k in values for k in TOKENS_KEYS)):
            values[name] = values.pop(key)
            found.roles[key] = name
    for name, kinds in layers.items():
        if name not in values:
            chosen = outputs_of_layers(kinds)
            values[name] = {number: values.pop(key) for number, key in chosen.items()}
            found.roles |= dict.fromkeys(chosen.values(), name)


_MISSING = object()


def _take(values: dict[str, Any], path: str) -> Any:
    """Remove and return the value of a key, or of a path through nested dicts."""
    if path in values:
        return values.pop(path)
    head, dot, rest = path.partition(".")
    inner = values.get(head)
    if not dot or not isinstance(inner, Mapping):
        return _MISSING
    values[head] = copy = dict(inner)
    value = _take(copy, rest)
    if not copy:
        del values[head]
    return value


def _remove_objects(found: Assignment) -> None:
    """Remove the objects that are not data from extras; a field of the schema keeps them and is refused."""
    for key in list(found.fields):
        if key in OWN_KEYS and isinstance(found.fields[key], PickledObject):
            raise InvalidInputError(f"found an object of {found.fields[key].name}, which is not data", field=key)
        if key in OWN_KEYS and not isinstance(found.fields[key], dict):
            continue
        value = _without_objects(found.fields[key], key, found.dropped)
        if value is _MISSING:
            del found.fields[key]
        else:
            found.fields[key] = value


def _without_objects(value: Any, path: str, dropped: list[str], depth: int = 0) -> Any:
    if isinstance(value, PickledObject):
        dropped.append(path)
        return _MISSING
    if depth > _MAX_DEPTH or not isinstance(value, dict | list):
        return value
    if isinstance(value, dict):
        pairs = [(k, _without_objects(v, f"{path}.{k}"[:200], dropped, depth + 1)) for k, v in value.items()]
        return {k: v for k, v in pairs if v is not _MISSING}
    items = [_without_objects(v, f"{path}[]"[:200], dropped, depth + 1) for v in value]
    return [None if v is _MISSING else v for v in items]


def _number(value: Any) -> float | None:
    """Return a finite number of any library as a float; None for every other value."""
    array = as_array(value)
    if array is not None and array.size == 1 and array.dtype.kind in "biuf":
        value = array.reshape(-1)[0].item()
    if isinstance(value, int | float | np.number | np.bool_) and math.isfinite(value):
        return float(value)
    return None


def _score(key: str, value: Any) -> float | None:
    """Return a number or the word of a judge as a score; None for every other value."""
    return score_of_word(value, direction_of(key)) if isinstance(value, str) else _number(value)


@lru_cache(maxsize=1 << 10)
def _score_keys(keys: tuple[Any, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the keys with the names of scores, and those with the names of words of judges, in the order of the names."""
    given = {known_name(key): key for key in reversed(keys) if isinstance(key, str)}
    scores, words = ([given[name] for name in names if name in given] for names in (SCORES, WORD_COLUMNS))
    return tuple(scores), tuple(words)


@lru_cache(maxsize=1 << 10)
def _by_name(keys: tuple[str, ...]) -> dict[str, str]:
    """Return the first key of each name, as `normalized` returns it."""
    return {normalized(key): key for key in reversed(keys)}


def _find_scores(found: Assignment, options: KeyOptions) -> None:
    """Find scores and the label."""
    values = found.fields
    owners: dict[Any, str] = {}
    for key, inner in found.fields.items():
        if isinstance(inner, Mapping) and normalized(key) in JUDGMENTS:
            owners |= dict.fromkeys(inner, key)
            values = dict(inner) | values
    names, words = _score_keys(tuple(values))
    for name in names if options.score_key is None else (options.score_key,):
        if options.score_key is None and name in FIELDS and (value := found.fields.get(name)) is not None:
            # The table of fields checks it.
            if _score(name, value) is not None or not FIELDS[name].may_be_other:
                found.roles[name] = "score"
        elif name in values and (score := _score(name, values[name])) is not None:
            found.scores[name] = score
            found.roles[name if name in found.fields else owners[name]] = "score"
            found.fields.pop(name, None)
    for name in words if "score" not in found.roles.values() and options.score_key is None else ():
        text = found.fields.get(name)
        if isinstance(text, str) and (score := score_of_word(text, None)) is not None:
            found.scores[name] = score
            found.roles[name] = "score"
            del found.fields[name]
            break
    for key in ("label", "labels", LABELS):
        if key in found.fields and options.score_key != key and (label := _number(found.fields[key])) in (0, 1):
            found.roles[key] = "label"
            if options.score_key is not None:  # Otherwise the table of fields takes it.
                found.label = label
                del found.fields[key]
            break
