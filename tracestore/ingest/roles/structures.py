"""Find the traces in a decoded object: a dict by id, columns, nested lists of records, arrays without names.

Each trace becomes a dict by the names in the file, whose roles `assign` finds. Where shapes do not show which axis
of the hidden states counts traces, layers or tokens, the object is refused with the values of --axes that fit.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.keys import id_of_name, is_question_name, parse_key
from tracestore.ingest.containers.tables import TableRows
from tracestore.ingest.layouts.neighbors import (
    join_segments,
    split_batches,
    split_ragged,
    spread_nested,
    spread_records,
    with_embedding,
    with_graph,
    with_weak_states,
)
from tracestore.ingest.layouts.partial import by_names, is_part, join_records, join_steps, joined_columns
from tracestore.ingest.layouts.values import with_mask
from tracestore.ingest.roles.axes import (
    answers_of,
    letters_of_trace,
    shape_text,
    trace_axis,
    with_states,
    without_time_first,
)
from tracestore.ingest.roles.columns import (
    are_ids,
    has_id,
    has_one_id,
    has_own_shape,
    id_of_key,
    is_common,
    is_header,
    labels_of_classes,
    named_columns,
    named_fields,
    row_of,
    with_columns_beside,
)
from tracestore.ingest.roles.keys import QUESTIONS, KeyOptions, fields_of_nested
from tracestore.ingest.roles.layout import Shape, is_ragged, layers_of, layout, opened, row, shape_of
from tracestore.ingest.roles.table_rows import axis_of_chunk, with_columns, with_rows

_MAX_DEPTH = 8
_STATES = ("hidden_states", "last_token")


class Found(NamedTuple):
    """Traces of a value.

    Attributes
    ----------
    traces : list of dict
        The traces.
    is_one : bool
        Whether the value is one trace, or one batch of traces.
    has_keys : bool
        Whether the ids are keys of dicts.
    is_question : bool
        Whether the traces are answers to one question without an id of its own.
    """

    traces: list[dict[Any, Any]]
    is_one: bool = False
    has_keys: bool = False
    is_question: bool = False


class Structures:
    """Find the traces in the objects of one file.

    Parameters
    ----------
    options : KeyOptions
        Names of the fields in the file, and the axes of its hidden states.
    name : str
        Path of the file without its suffix, for ids.
    """

    def __init__(self, options: KeyOptions, name: str) -> None:
        self._options, self.name = options, name
        self._num_questions = 0
        self._axis: int | None = None  # that counted traces
        self.rows: TableRows | None = None  # of a table: by id, else in the order of the traces

    def find(self, value: Any, *, is_item: bool = False) -> Found | None:
        """Return the traces of a whole file, or of an item of its list; None if there are none.

        A single trace without names gets the name of the file as its id.

        Raises
        ------
        InvalidInputError
            If the axes of hidden states can be understood in several ways.
        """
        rows = self.rows
        if rows is not None and not is_item:
            value = with_columns(value, rows)
        found = self._find(value, 0, is_item)
        if found is None:
            return None
        if rows is not None:
            found = found._replace(traces=with_rows(found.traces, rows, self._options, is_whole=not is_item))
        if not found.is_one or is_item:
            return found
        trace = found.traces[0]
        if not isinstance(opened(value), dict) and not has_id(trace):
            return found._replace(traces=[id_of_name(self.name) | trace])
        return found

    def _find(self, value: Any, depth: int, is_item: bool = False) -> Found | None:
        value = opened(value)
        if depth > _MAX_DEPTH:
            return None
        if isinstance(value, dict):
            return self._of_dict(value, depth, is_item)
        if isinstance(value, list | tuple) and value and any(isinstance(opened(item), dict) for item in value):
            return self._of_records(value, depth)
        if isinstance(value, list | tuple) and 1 < len(value) <= 4 and (named := named_fields(value)) is not None:
            return Found([named], is_one=True)
        shape = layout(value)
        if shape is None:
            return self._of_rows(value, depth) if isinstance(value, list | tuple) and value else None
        return self._of_bare(value, shape.shape) if shape.kind == "f" else None

    def is_trace(self, fields: Mapping[Any, Any]) -> bool:
        """Return whether a dict is one trace of the schema, which is certain without a search."""
        options = self._options
        return options.axes is None and not options.renamed and has_one_id(fields) and has_own_shape(fields)

    def _of_dict(self, fields: dict[Any, Any], depth: int, is_item: bool) -> Found | None:
        if self.is_trace(fields):
            return Found([fields], is_one=True)
        fields = with_mask(fields)
        if not self._options.renamed and not is_common(fields):
            fields = spread_nested(fields)
            if (traces := by_names(fields)) is not None:
                return self._of_records(traces, depth)
            if (traces := split_ragged(fields) or split_batches(fields)) is not None:
                return Found(traces)
            fields = join_segments(fields)
            fields = join_steps(fields) or spread_records(fields) or fields
            fields = without_time_first(with_weak_states(with_graph(with_embedding(fields))))
        if (labels := labels_of_classes(fields)) is not None and (found := self._of_classes(fields, labels, depth)):
            return found
        key, value = self._states(fields)
        if key is not None:
            shape = shape_of(value)
            if key in ("layer_wise", "last_token") and shape[2:-1] == (None,):
                # Different numbers of tokens, and not the last one of each trace.
                fields = {("hidden_states" if name == key else name): v for name, v in fields.items()}
                key = "hidden_states"
            found = self._of_states(fields, key, value, shape) if shape else None
            # `assign` finds layers by their names.
            return Found([fields], is_one=True) if found is None or (key == "" and found.is_one) else found
        if len(shape := shape_of(fields)) > 1:
            return self._of_bare(fields, shape)
        return self._of_children(fields, depth, is_item) or self._of_arrays_by_id(fields)

    def _of_classes(self, fields: Mapping[Any, Any], labels: Mapping[Any, float], depth: int) -> Found | None:
        """Return the traces of lists by the word of a judge, with its label; None if a value is no list of traces."""
        traces: list[dict[Any, Any]] = []
        for key, value in fields.items():
            items = opened(value)
            shape = layout(items)
            if shape is None:
                found = self._find(items, depth + 1) if isinstance(items, list | tuple) else None
            elif shape.kind == "f" and len(shape.shape) in (2, 4):
                found = self._of_bare(items, shape.shape, axis=0)
            else:
                found = None
            if found is None or found.is_one:
                return None
            traces += [{"label": labels[key]} | trace for trace in found.traces]
        return Found(traces)

    def _states(self, fields: Mapping[Any, Any]) -> tuple[Any, Any]:
        """Return key and value of the hidden states of a dict, "" as the key of layers; (None, None) without."""
        for name, path in self._options.renamed:
            if name in _STATES:
                if path in fields:
                    return path, opened(fields[path])
                if path.partition(".")[0] in fields:
                    return name, None
        for name in _STATES:
            if fields.get(name) is not None:
                return name, opened(fields[name])
        layers = {}
        for key, value in fields.items():
            parsed = parse_key(key) if isinstance(key, str) else None
            is_states = parsed is not None and not parsed.trace and parsed.field in _STATES
            if parsed is None or not is_states or isinstance(value, str | int | float | None):
                continue
            if parsed.number is not None:
                layers[key] = value
            elif layout(value) is not None or (isinstance(opened(value), dict) and layers_of(opened(value))):
                return key, opened(value)
        return ("", layers_of(layers)) if layers else (None, None)

    def _of_children(self, fields: dict[Any, Any], depth: int, is_item: bool) -> Found | None:
        """Return the traces below a dict without hidden states of its own."""
        if (batch := with_columns_beside(fields)) is not None:
            return self._find(batch, depth + 1)
        found: dict[Any, Found] = {}
        for key, value in fields.items():
            value = opened(value)
            if isinstance(value, dict) or (isinstance(value, list | tuple) and layout(value) is None):
                child = self._find(value, depth + 1)
                if child is not None:
                    found[key] = child
        if not found:
            return None
        others = {key: value for key, value in fields.items() if key not in found}
        ones = [child for child in found.values() if child.is_one]
        names = {name for child in ones for trace in child.traces for name in trace}
        dicts = {key: value for key, v in others.items() if isinstance(value := opened(v), dict)}
        similar = [key for key, value in dicts.items() if not names.isdisjoint(value)]
        if len(found) == len(ones) == 1 and others and not similar:
            # The output of a model, and values next to it.
            is_path = any("." in path for _, path in self._options.renamed)
            is_unchanged = ones[0].traces[0] is opened(fields[next(iter(found))])  # `assign` merges it
            if is_path or is_unchanged:
                return Found([fields], is_one=True)
            nested = fields_of_nested({key: opened(value) for key, value in others.items()})
            return Found([nested | ones[0].traces[0] | others], is_one=True)
        if is_item and len(found) == len(ones) > 1 and not are_ids(found):
            return None  # may be several outputs for one trace
        if len(ones) == len(found):
            # A record without hidden states is refused, not left out.
            found |= {key: Found([opened(others[key])], is_one=True) for key in similar}
        is_question = has_one_id(others)
        is_question |= any(isinstance(others.get(name), str) for name in QUESTIONS)
        if is_question:  # the text in a row of an answer is no id
            found = {key: _as_answers(child, fields[key]) for key, child in found.items()}
        answers = [trace for child in found.values() for trace in child.traces]
        if is_question and not any(child.has_keys for child in found.values()) and not any(map(has_id, answers)):
            return Found(self._samples(others, answers), is_question=not has_id(others))
        return _joined(found)

    def _samples(self, question: dict[Any, Any], answers: list[dict[Any, Any]]) -> list[dict[Any, Any]]:
        """Return the answers of one question with its values."""
        if not has_id(question):
            question = {"question_id": f"{self.name}:{self._num_questions}"} | question
            self._num_questions += 1
        # The text of an answer has no other name next to those of the question.
        named = ({"generated_answer" if key == "text" else key: v for key, v in answer.items()} for answer in answers)
        return [question | {"sample": k} | answer for k, answer in enumerate(named)]

    def _of_arrays_by_id(self, fields: dict[Any, Any]) -> Found | None:
        """Return the traces of a dict of hidden states by id, whose keys or shapes show that they are no fields."""
        values = list(fields.values())
        if all(is_question_name(str(key)) for key in fields) and (answers := answers_of(values)):
            pairs = zip(fields, answers, strict=True)
            return _joined({key: Found([{"hidden_states": item} for item in items]) for key, items in pairs})
        shape = shape_of(values)
        if len(values) < 2 or len(shape) < 3 or shape[-1] is None:
            return None
        if not are_ids(fields) and shape[-2] is not None:
            return None  # may be several outputs for one trace
        found = self._of_bare(values, shape, axis=0)
        return Found([{"question_id": str(k)} | t for k, t in zip(fields, found.traces, strict=True)], has_keys=True)

    # Lists

    def _of_records(self, items: Sequence[Any], depth: int) -> Found | None:
        """Return the traces of a list of dicts. Dicts before them that share no key with them are a header."""
        records = [opened(item) for item in items]
        if all(isinstance(r, dict) and is_part(r) for r in records) and (joined := join_records(records)) is not None:
            items = joined
        found = [self._find(item, depth + 1, is_item=True) for item in items]
        if (first := next((k for k, child in enumerate(found) if child is not None), None)) is None:
            return None
        traces: list[dict[Any, Any]] = []
        for k, (item, child) in enumerate(zip(items, found, strict=True)):
            if child is not None:
                traces += child.traces
            elif k > first or not is_header(item, items[first]):
                traces.append(opened(item))
        return Found(traces)

    def _of_rows(self, items: Sequence[Any], depth: int) -> Found | None:
        """Return the traces of rows such as (id, array), or of parallel lists such as (arrays, labels)."""
        items = [opened(item) for item in items]
        if not all(isinstance(i, list | tuple) or (isinstance(i, np.ndarray) and i.ndim) for i in items):
            return None
        if len({len(item) for item in items}) > 1 or not len(items[0]):
            return None
        for columns in (items, list(zip(*items, strict=True)) if len(items[0]) < 64 else []):
            if (by_id := self._of_numbered(columns)) is not None:
                return by_id
            named = named_columns(columns)
            if (records := named.pop("", None)) is not None:
                rows = [row_of(named, k, len(records)) | opened(record) for k, record in enumerate(records)]
                return self._of_records(rows, depth)
            if "hidden_states" in named:
                value = named["hidden_states"]
                return self._of_states(named, "hidden_states", value, shape_of(value), axis=0)
        return None

    def _of_numbered(self, columns: Sequence[Any]) -> Found | None:
        """Return the traces of columns of ids, numbers of layers or tokens, and arrays."""
        if len(columns) not in (3, 4):
            return None
        arrays = [k for k, column in enumerate(columns) if shape_of(column)]
        if len(arrays) != 1:
            return None
        others = [list(opened(column)) for k, column in enumerate(columns) if k not in arrays]
        traces = joined_columns(others, columns[arrays[0]])
        return None if traces is None else self._of_records(traces, 1)

    def _of_bare(self, value: Any, shape: Shape, axis: int | None = None) -> Found:
        """Return the traces of hidden states without a name."""
        return self._of_states({"hidden_states": value}, "hidden_states", value, shape, axis)

    def _of_states(self, fields: dict[Any, Any], key: Any, value: Any, shape: Shape, axis: int | None = None) -> Found:
        """Return the traces of a dict with hidden states: one, or one for each row of `axis`."""
        letters = self._letters(shape)
        if key == "":
            fields = {k: v for k, v in fields.items() if (p := parse_key(str(k))) is None or p.number is None}
        is_last = key == "last_token" or ((parsed := parse_key(str(key))) is not None and parsed.field == "last_token")
        if letters is not None:
            axis = letters.find("N") if "N" in letters else None
        elif axis is None:
            axis = axis_of_chunk(self.rows, self._axis, shape)
            axis = self._axis = trace_axis(fields, key, value, shape, is_last) if axis is None else axis
        if axis is None:
            rest = letters or letters_of_trace(fields, value, shape, is_last)
            return Found([with_states(fields, key, value, rest)], is_one=True)
        count = shape[axis]
        if count is None:
            raise InvalidInputError(f"found layers with different numbers of rows, {shape}", field="hidden_states")
        traces = []
        for k in range(count):
            part = row(value, k, axis)
            trace = row_of({name: v for name, v in fields.items() if name != key}, k, count, axis)
            if letters is None:
                size = shape_of(part)
                is_one_layer = len(size) == 2 and is_ragged(shape[axis + 1 : -1])
                rest = "SD" if is_one_layer else letters_of_trace(trace, part, size, is_last, shape)
            else:
                rest = letters.replace("N", "")
            traces.append(with_states(trace, key, part, rest))
        if count > 1 and has_one_id(fields):
            traces = [{"sample": k} | trace for k, trace in enumerate(traces)]
        return Found(traces, is_one=count == 1)

    def _letters(self, shape: Shape) -> str | None:
        """Return --axes for a value of this shape; in a list or dict of traces its N is not part of the value."""
        axes = self._options.axes
        if axes is None or len(axes) == len(shape):
            return axes
        if "N" not in axes and len(axes) + 1 == len(shape):
            return None if axes == "LSD" else f"N{axes}"
        if "N" in axes and len(axes) == len(shape) + 1:
            return axes.replace("N", "")
        raise InvalidInputError(
            f"found shape {shape_text(shape)}, expected the axes {axes} of --axes", field="hidden_states"
        )


def _as_answers(found: Found, value: Any) -> Found:
    """Return traces of rows without names, whose texts are answers and no ids."""
    items, names = opened(value), {"question_id": "generated_answer"}
    if not isinstance(items, list | tuple) or not isinstance(opened(next(iter(items), None)), list | tuple):
        return found
    return found._replace(traces=[{names.get(k, k): v for k, v in trace.items()} for trace in found.traces])


def _joined(found: Mapping[Any, Found]) -> Found:
    """Return the traces of several collections; ids that are keys get the keys around them if they repeat."""
    if all(child.is_one for child in found.values()):
        pairs = [(id_of_key(key), child.traces[0]) for key, child in found.items()]
        return Found([trace if has_id(trace) else key | trace for key, trace in pairs], has_keys=True)
    traces = [
        (key, k, trace | {"question_id": str(key)} if child.is_question else trace)
        for key, child in found.items()
        for k, trace in enumerate(child.traces)
    ]
    if not any(child.has_keys or child.is_question for child in found.values()):
        has_ids = set(map(str, found)) == {"0", "1"} or any(has_id(trace) for _, _, trace in traces)
        if has_ids or not all(is_question_name(str(key)) for key in found):
            return Found([trace for _, _, trace in traces])
        return Found([{"question_id": str(key), "sample": k} | t for key, k, t in traces], has_keys=True)
    named = [(id_of_name(f"{key}/{trace.get('question_id')}"), trace) for key, _, trace in traces]
    if all("sample" in name for name, _ in named):
        return Found([trace | name for name, trace in named], has_keys=True)
    if len({(t.get("question_id"), t.get("sample")) for _, t in named}) == len(named):
        return Found([trace for _, trace in named], has_keys=True)
    return Found([t | {"question_id": f"{key}/{t.get('question_id')}"} for key, _, t in traces], has_keys=True)
