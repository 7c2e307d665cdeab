"""Split a batch of answers into traces, and remove padding."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.keys import SAMPLE_NAMES, split_sample
from tracestore.ingest.roles.keys import INPUTS_PAGE
from tracestore.store.format import schema
from tracestore.store.write.record import TraceRecord
from tracestore.store.write.values import are_arrays, as_array, describe, field_error

# Fields with one row per answer of a batch, although a single answer has a list of them too.
_NESTED = frozenset(("tokens", "input_ids", "sequences", "tokens_decoded", "spans", *schema.TOKEN_FIELDS))
_MAX_BATCH = 1 << 16


def batch_size(fields: Mapping[str, Any]) -> int:
    """Return the number of answers in the arrays of a trace; 1 for a trace without a batch dimension."""
    hidden = fields.get("hidden_states")
    array = as_array(hidden)
    if array is not None:
        return array.shape[1] if array.ndim == 4 else 1
    leaf = hidden[0] if are_arrays(hidden) else _first_leaf(hidden)
    return 1 if leaf is None or leaf.ndim != 3 else len(leaf)


def _first_leaf(value: Any) -> np.ndarray | None:
    """Return the first array of a list of layers, or of a list of passes of layers."""
    for _ in range(3):
        value = list(value.values()) if isinstance(value, Mapping) else value
        array = as_array(value)
        if array is not None:
            return array
        if not isinstance(value, list | tuple) or not value:
            return None
        value = value[0]
    return None


def with_beams(fields: dict[str, Any]) -> None:
    """Replace the rows of a beam search in each pass of generate() by those of its answer, which beam_indices (1, T) names.

    Raises
    ------
    InvalidInputError
        If the indices are those of several answers, or do not fit to the passes.
    """
    indices = as_array(fields.get("beam_indices"))
    for name in ("hidden_states", "attentions"):
        passes = fields.get(name)
        if indices is None or not isinstance(passes, list) or not all(isinstance(layers, list) for layers in passes):
            continue
        rows = indices.reshape(-1)
        arrays = [layer for layers in passes for layer in map(as_array, layers) if layer is not None and layer.ndim]
        num_rows = min((len(layer) for layer in arrays), default=0)
        if indices.ndim != 2 or len(indices) != 1 or not 0 <= rows.max() < num_rows:
            raise field_error(
                "beam_indices",
                describe(indices),
                f"the row of one answer, of {num_rows} in each pass; save the states of each answer from one pass over its "
                "tokens: model(sequences, output_hidden_states=True)",
            )
        # The answer may end before other beams do.
        kept = zip(rows[rows >= 0].tolist(), passes, strict=False)
        fields[name] = [[layer[k][None] for layer in layers] for k, layers in kept]


def split_batch(fields: Mapping[str, Any], count: int, *, has_padding: bool = True) -> list[dict[str, Any]]:
    """Return the fields of each answer of a batch.

    Parameters
    ----------
    fields : Mapping[str, Any]
        Fields of a trace whose arrays have a batch dimension, and `attention_mask` or `lengths`.
    count : int
        Number of answers, B.
    has_padding : bool
        Whether answers may be padded, so that a mask or lengths are needed.

    Raises
    ------
    InvalidInputError
        If there is neither an attention mask nor lengths, or an array has another batch dimension.
    """
    if count > _MAX_BATCH:
        raise field_error("hidden_states", f"a batch of {count:,}", f"at most {_MAX_BATCH:,} answers")
    if has_padding and fields.get("attention_mask") is None and fields.get("lengths") is None:
        raise InvalidInputError(
            f"found a batch of {count} answers, expected attention_mask or lengths (B,) with it; or save each answer of "
            f"a batch as a trace; if no answer is padded, choose --padding none; see {INPUTS_PAGE}#batches",
            field="hidden_states",
        )
    answers: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in fields.items():
        is_label = name == "labels" and "label" not in fields and getattr(as_array(value), "shape", ()) == (count,)
        for k, answer in enumerate(answers):
            answer["label" if is_label else name] = _of_answer(name, value, k, count)
    return answers


def _of_answer(name: str, value: Any, k: int, count: int) -> Any:
    """Return the part of a value that belongs to answer `k`."""
    array = as_array(value)
    if name in ("hidden_states", "attentions"):
        return _of_layers(name, value, k, count)
    if array is not None:
        return array[k] if array.ndim and len(array) == count else value
    if not isinstance(value, list | tuple) or len(value) != count:
        return value
    is_nested = isinstance(value[0], list | tuple) or as_array(value[0]) is not None
    return value[k] if is_nested or name not in _NESTED else value


def _of_layers(name: str, value: Any, k: int, count: int, axis: int = 1) -> Any:
    """Return the arrays of answer `k`; the batch dimension of one array of all layers is the second."""
    array = as_array(value)
    if array is not None:
        if array.ndim <= axis or array.shape[axis] != count:
            raise field_error(name, describe(value), f"a batch dimension of {count}")
        return array[:, k] if axis else array[k]
    if isinstance(value, Mapping):
        return {key: _of_layers(name, item, k, count, axis=0) for key, item in value.items()}
    if not isinstance(value, list | tuple):
        raise field_error(name, describe(value), f"arrays with a batch dimension of {count}")
    return [_of_layers(name, item, k, count, axis=0) for item in value]


class SampleNumbers:
    """Give the answers to one question the numbers that a key such as sample_id next to the id of the question has.

    Where each question has one answer, such a key may count all traces, and is no number of an answer.
    """

    def __init__(self) -> None:
        self._first: dict[str, int] = {}

    def set_sample(self, record: TraceRecord, name: str = "") -> None:
        """Set the sample of a record if its question has another answer before it, or the name of its file states it.

        Raises
        ------
        InvalidInputError
            If the answers are not numbered from 0.
        """
        if record.sample:
            return
        found = split_sample(name) if name else None
        if found is not None and (not record.has_own_id or found[0].rpartition("/")[2] == record.question_id):
            record.question_id, record.sample = record.question_id if record.has_own_id else found[0], found[1]
            return
        if record.extras.keys().isdisjoint(SAMPLE_NAMES):
            return
        key = next(name for name in SAMPLE_NAMES if name in record.extras)
        number = record.extras[key]
        if not isinstance(number, int | np.integer) or isinstance(number, bool):
            return
        first = self._first.setdefault(record.question_id, int(number))
        if first == number:
            return
        if first != 0:
            raise InvalidInputError(
                f"found answers {first} and {number} to one question, numbered by {key}; choose --map sample={key}",
                field=key,
            )
        record.sample = int(number)
