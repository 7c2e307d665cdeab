"""Records of JSON whose states are in nested lists of objects: answers, tokens, layers, responses of services."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tracestore.ingest.containers.keys import (
    GROUPS_OF_TRACES,
    ID_KEYS,
    LISTS_OF_LAYERS,
    LISTS_OF_TOKENS,
    is_question_name,
    is_state_name,
    locate,
)
from tracestore.ingest.layouts.array_names import is_list_of_floats
from tracestore.ingest.layouts.rows import Coordinates, coordinates_of, has_answer, joined, with_states
from tracestore.ingest.layouts.values import leaf_of
from tracestore.ingest.roles.columns import singular
from tracestore.ingest.roles.edges import attention_of_edges, is_list_of_edges
from tracestore.ingest.roles.keys import MAPPABLE, OTHER_NAMES, direction_of, fields_of_nested

_TOKEN_KEYS = ("token", "token_id", "token_text", "token_str", "position", "pos", "step", "tok", "word", "token_idx")
_LAYER_KEYS = ("layer", "layer_idx", "layer_id", "layer_index", "block")
_POSITION_KEYS = ("position", "pos", "step", "token_idx", "token_index", "token_position")
_INDEX = ("index", "idx", "id", "number", "i")
_ANSWERS = ("choices", "outputs", "answers", "generations", "responses", "completions", "candidates", "samples")
# Names of nested dicts of an answer.
_OUTPUTS = ("output", "response", "completion", "generation", "result")
_FIELDS = frozenset((*MAPPABLE, *(name for names in OTHER_NAMES.values() for name in names)))
_CHATS = ("messages", "conversation", "conversations", "chat", "dialog")
_MAX_DEPTH = 5
Row = dict[str, Any]


def traces_of_record(row: Row, depth: int = 0) -> Iterator[Row]:
    """Yield the traces that an object of JSON holds: itself, or those of nested lists and dicts of objects.

    Parameters
    ----------
    row : dict
        The object, or a row of a table with structs.
    depth : int
        Number of lists around it.

    Yields
    ------
    dict
        Fields of a trace, or a row of one. The values around a nested object belong to it, too.
    """
    row = _with_response(row)
    named = [key for key, value in row.items() if is_state_name(key) and not _is_list_of_objects(value)]
    if named:
        name = named[0]
        states = row[name]
        by_id = _by_id(states) if len(named) == 1 else None
        if by_id is None:
            yield _with_layers(with_texts(row), name)
            return
        rest = {key: value for key, value in row.items() if key != name}
        for key, value in by_id.items():
            own = {k: v[key] for k, v in rest.items() if isinstance(v, Mapping) and key in v}
            yield rest | own | {"question_id": key, name: value}
        return
    lists = [key for key, value in row.items() if _is_list_of_objects(value) and _has_states(value[0])]
    lists = [key for key in lists if not is_list_of_edges(row[key])]
    dicts = [k for k, v in row.items() if isinstance(v, dict) and _has_states(v) and not _are_layers(k, v)]
    if not lists and len(dicts) == 1 and depth <= _MAX_DEPTH:
        rest = {key: value for key, value in row.items() if key != dicts[0]}
        inner = row[dicts[0]]
        texts = with_texts(rest | {dicts[0]: {k: v for k, v in inner.items() if isinstance(v, str)}})
        del texts[dicts[0]]
        yield from traces_of_record(inner | texts, depth + 1)
        return
    if len(lists) != 1 or depth > _MAX_DEPTH:
        yield row
        return
    name, rest = lists[0], {key: value for key, value in row.items() if key != lists[0]}
    items: list[Row] = row[name]
    if _axis(name, items) is not None:
        rest |= attention_of_edges(rest)
        cells = [_named(with_states(cell)) for cell in _cells(items, name)]
        columns = (
            coordinates_of(cells[0])._replace(id=None)
            if all("hidden_states" in cell for cell in cells)
            else Coordinates()
        )
        yield rest | joined(cells, columns) if columns.names else row
        return
    has_id = any(key in rest for key in ID_KEYS)
    is_numbered = len(items) > 1 and (has_id or "request_id" in rest) and name.lower() in _ANSWERS
    for k, item in enumerate(items):
        own = {key: value for key, value in item.items() if not (key in ("index", "idx") and value == k)}
        if name.lower() in _ANSWERS and isinstance(own.get("text"), str) and "answer" not in own:
            own["answer"] = own.pop("text")
        sample = {"sample": k} if is_numbered and not any(key in own for key in ID_KEYS) else {}
        yield from traces_of_record(sample | rest | own, depth + 1)


def with_texts(row: Row) -> Row:
    """Return a row with the ids and texts in its nested dicts, where it has none itself: input.question, output.text."""
    if not any(isinstance(value, dict) for value in row.values()):
        return row
    texts = fields_of_nested(row)
    output = next(
        (v for k in _OUTPUTS if isinstance(v := row.get(k), Mapping) and isinstance(v.get("text"), str)), None
    )
    if output is not None and not has_answer(texts | row):
        texts["answer"] = output["text"]
    return texts | row


def _are_layers(name: str, value: Mapping[str, Any]) -> bool:
    """Return whether a dict holds layers by number or name, or one array with its dtype and shape."""
    is_array = {"dtype", "shape"} <= value.keys()
    return is_array or LISTS_OF_LAYERS.fullmatch(name) is not None or all(is_state_name(f"{name}/{k}") for k in value)


def _named(row: Row) -> Row:
    """Return a row whose only states of no layer are called hidden_states."""
    names = [key for key in row if is_state_name(key) and (place := locate(key)) is not None and place.number is None]
    return {("hidden_states" if key in names else key): v for key, v in row.items()} if len(names) == 1 else row


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _has_states(value: Any, depth: int = 0) -> bool:
    """Return whether an object holds a list of numbers with a fraction that is not about single tokens, at any depth."""
    if isinstance(value, dict):
        return depth < _MAX_DEPTH and any(
            _has_states(v, depth + 1) for k, v in value.items() if "prob" not in k and "score" not in k
        )
    if _is_list_of_objects(value):
        return depth < _MAX_DEPTH and _has_states(value[0], depth + 1)
    return is_list_of_floats(value) and np.size(value[0] if isinstance(value, list) else value) >= 1


def _axis(name: str, items: list[Row]) -> str | None:
    """Return what the items of a list count, "layer" or "token"; None for traces."""
    if LISTS_OF_LAYERS.fullmatch(name) or any(key in items[0] for key in _LAYER_KEYS):
        return "layer"
    is_token = LISTS_OF_TOKENS.fullmatch(name) or any(key in items[0] for key in _TOKEN_KEYS)
    return "token" if is_token and not any(key in items[0] for key in ("question_id", "question", "prompt")) else None


def _cells(items: list[Row], name: str) -> Iterator[Row]:
    """Yield a row for each layer and token of nested lists of objects, with `layer` and `position`."""
    axis = _axis(name, items)
    column = "layer" if axis == "layer" else "position"
    known = _LAYER_KEYS if axis == "layer" else _POSITION_KEYS
    numbers = [_number(item, known if axis == "token" else (*known, *_INDEX)) for item in items]
    numbers = numbers if None not in numbers and len(set(numbers)) == len(items) else list(range(len(items)))
    if axis == "layer" and _number(items[0], _POSITION_KEYS) is not None:
        for item in items:  # a list of cells
            place = {"layer": _number(item, _LAYER_KEYS), "position": _number(item, _POSITION_KEYS)}
            yield place | {k: v for k, v in item.items() if k not in (*_LAYER_KEYS, *_POSITION_KEYS)}
        return
    for number, item in zip(numbers, items, strict=True):
        nested = [k for k, v in item.items() if _is_list_of_objects(v) and _has_states(v[0])]
        skipped = {*known, *nested, *(_INDEX if axis == "layer" else ())}
        rest = {key: value for key, value in item.items() if key not in skipped}
        if axis == "token" and isinstance(item.get("id"), int):
            rest["token_id"] = rest.pop("id")
        rest = {column: number} | rest
        if len(nested) == 1 and _axis(nested[0], item[nested[0]]) is not None:
            for cell in _cells(item[nested[0]], nested[0]):
                yield rest | cell
        else:
            yield _with_layers(rest, next((key for key in rest if is_state_name(key)), None))


def _number(item: Row, names: tuple[str, ...]) -> int | None:
    return next((item[name] for name in names if type(item.get(name)) is int), None)


def _with_layers(row: Row, name: str | None) -> Row:
    """Return a row whose layers, a dict by number or name, are states by layer."""
    if name is None:
        name = next((k for k, v in row.items() if LISTS_OF_LAYERS.fullmatch(k) and isinstance(v, Mapping)), None)
    states = None if name is None else row[name]
    if not isinstance(states, Mapping) or not states or not all(isinstance(key, str) for key in states):
        return row
    keys = {key: locate(key if not key.isdecimal() else f"layer_{key}") for key in states}
    if not all(key is not None and key.number is not None and not key.trace for key in keys.values()):
        return row
    layers = {keys[key].number: value for key, value in states.items()}  # type: ignore[union-attr]
    return {key: value for key, value in row.items() if key != name} | {"hidden_states": layers}


def _by_id(states: Any) -> Mapping[str, Any] | None:
    """Return a dict of states by id; None for another value, such as a dict of layers."""
    if not isinstance(states, Mapping) or not states or not all(map(is_list_of_floats, states.values())):
        return None
    is_layer = [key.isdecimal() or locate(key) is not None for key in map(str, states)]
    return None if any(is_layer) or {"dtype", "shape", "data"} & states.keys() else states


def _with_response(row: Row) -> Row:
    """Return a response of a service, or output of an engine, with the text and the tokens of the answer as fields."""
    found = dict(row)
    answers = next((k for k in ("choices", "outputs") if _is_list_of_objects(row.get(k)) and len(row[k]) == 1), None)
    if answers is not None and not _has_states(row[answers][0]):
        del found[answers]
        inner = {key: value for key, value in row[answers][0].items() if key != "index"}
        prompt, generated = row.get("prompt_token_ids"), inner.get("token_ids")
        if isinstance(prompt, list) and isinstance(generated, list):
            del inner["token_ids"], found["prompt_token_ids"]
            inner |= {"tokens": prompt + generated, "prompt_length": len(prompt)}
        found = inner | found
    message = found.get("message")
    if isinstance(message, Mapping) and isinstance(message.get("content"), str):
        del found["message"]
        found.setdefault("answer", message["content"])
    found = texts_of_chat(found) | found
    if isinstance(found.get("custom_id"), str):
        found["question_id"] = found["custom_id"]  # next to the id of a response
    if any(name in row for name in ("choices", "outputs", "logprobs", "meta_info")):
        if isinstance(found.get("text"), str) and not any(key in found for key in ("answer", "response", "completion")):
            found["answer"] = found.pop("text")
        return _with_logprobs(found)
    return found


def other_texts(trace: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return (key, text) of the texts by field of a chat, or of `text` next to a question that it does not repeat.

    The key is "" for texts of a chat.
    """
    chat = texts_of_chat(trace)
    names = {"question": "question", "answer": "generated_answer"}
    if chat:
        return {name: ("", chat[key]) for key, name in names.items() if key in chat and trace.get(name) is None}
    question, text = trace.get("question"), trace.get("text")
    is_answer = isinstance(question, str) and isinstance(text, str) and question.strip() not in text
    return {"generated_answer": ("text", str(text))} if is_answer else {}


def texts_of_chat(row: Mapping[str, Any]) -> Row:
    """Return the last answer of a chat in a row, and the question before it."""
    found: Row = {}
    messages: list[Row] = next((row[name] for name in _CHATS if _is_list_of_objects(row.get(name))), [])
    for message in messages:
        role, text = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if isinstance(text, str) and role in ("user", "human"):
            found["question"] = text
        elif isinstance(text, str) and role in ("assistant", "gpt", "model"):
            found["answer"] = text
    return found


def _with_logprobs(row: Row) -> Row:
    """Return a response whose log-probabilities are values per token, if they are as many as the states."""
    logprobs = row.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    states = row.get("hidden_states")
    sizes = np.shape(states[0])[:1] if isinstance(states, list) and states else ()
    if content is None or not _is_list_of_objects(content) or sizes != (len(content),):
        return row
    rest = {key: value for key, value in row.items() if key != "logprobs"}
    return rest | {
        "tokens_decoded": [str(item.get("token", "")) for item in content],
        "token_logprob": [item.get("logprob") for item in content],
    }


def rows_of_json(value: Any, column: str) -> list[Row]:
    """Return the rows of a JSON list of objects or values, of {"traces": [...]}, of a dict by id, or of one object.

    `column` is the name of the column of plain values.
    """
    if isinstance(value, list) and value and not any(isinstance(row, dict | list) for row in value):
        return [{column: row} for row in value]
    value = _rows_of_columns(_frame(value))
    if isinstance(value, dict):
        inner = [v for k, v in value.items() if isinstance(v, dict) and k in GROUPS_OF_TRACES]
        if len(inner) == 1 and _is_by_id(inner[0]):
            value = inner[0]
        lists = [v for k, v in value.items() if isinstance(v, list) and v and all(isinstance(r, dict) for r in v)]
        is_trace = any(LISTS_OF_LAYERS.fullmatch(key) or LISTS_OF_TOKENS.fullmatch(key) for key in value)
        if _is_by_id(value):
            value = [{"question_id": key} | row for key, row in value.items()]
        elif (name := _name_of_values(column)) and all(type(v) in (str, int, float, bool) for v in value.values()):
            value = [{"question_id": key, name: field} for key, field in value.items()]
        elif len(lists) == len(value) > 1 and all(map(is_question_name, value)):
            value = [
                {"question_id": key, "sample": k} | row for key, rows in value.items() for k, row in enumerate(rows)
            ]
        elif _are_states_by_id(value):
            value = [{"question_id": key, "hidden_states": states} for key, states in value.items()]
        elif len(lists) == 1 and not is_trace and not {"question", "question_id", "id", "choices"} & value.keys():
            value = lists[0]
        else:
            value = [value]
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise ValueError("expected a list of objects")
    return value


def _name_of_values(column: str) -> str | None:
    """Return the name of a field or score at the end of the name of a file with values by id; None without one."""
    words = column.lower().removesuffix("s").split("_")
    names = ("_".join(words[k:]) for k in range(len(words)))
    return next((name for name in names if name in _FIELDS or direction_of(name) is not None), None)


def _rows_of_columns(value: Any) -> Any:
    """Return the rows of lists that are as long as a list of ids next to them; other values belong to every row."""
    if not isinstance(value, dict):
        return value
    ids = next((v for k, v in value.items() if k.endswith("s") and k[:-1] in ID_KEYS and isinstance(v, list)), [])
    is_list_of_ids = len(ids) > 1 and all(type(v) in (str, int) for v in ids) and len(set(ids)) == len(ids)
    names = [k for k, v in value.items() if isinstance(v, list) and len(v) == len(ids) and not k.startswith("layer")]
    if not is_list_of_ids or len(names) < 2:
        return value
    shared = {key: field for key, field in value.items() if key not in names}
    return [shared | {singular(key): value[key][k] for key in names} for k in range(len(ids))]


def _frame(value: Any) -> Any:
    """Return the rows of a data frame that pandas wrote: as lists of columns and rows, or as columns by number of the row."""
    if not isinstance(value, dict):
        return value
    names, rows = value.get("columns"), value.get("data")
    if (
        isinstance(names, list)
        and isinstance(rows, list)
        and all(isinstance(r, list) and len(r) == len(names) for r in rows)
    ):
        return [dict(zip(map(str, names), row, strict=True)) for row in rows]
    first = next(iter(value.values()), None)
    if not isinstance(first, dict) or list(first) != [str(k) for k in range(len(first))] or not first:
        return value
    if any(not isinstance(column, dict) or column.keys() != first.keys() for column in value.values()):
        return value
    is_column = any(locate(name) is not None or name in ID_KEYS for name in value)
    return [{name: column[k] for name, column in value.items()} for k in first] if is_column else value


def _are_states_by_id(value: Row) -> bool:
    """Return whether a dict holds nested lists (L, S, D) by id."""
    if not value or any(locate(key) is not None or key in ID_KEYS for key in value):
        return False
    return all(isinstance(leaf, float) and depth == 3 for leaf, depth in map(leaf_of, value.values()))


def _is_by_id(value: Row) -> bool:
    return bool(value) and all(isinstance(row, dict) for row in value.values())
