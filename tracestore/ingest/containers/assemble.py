"""Make traces of the units that a container holds, and of the rows of a table next to them."""

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from tracestore._core import kernels
from tracestore.errors import InvalidInputError, error_location
from tracestore.ingest.containers.columns import Column, Input, Unit, plain, whole
from tracestore.ingest.containers.grouping import (
    check_one_trace,
    count_by_axes,
    row_fields,
    set_by_axes,
    stacked_count,
)
from tracestore.ingest.containers.keys import ID_KEYS, LENGTHS, id_of_name, question_of, split_sample
from tracestore.ingest.containers.tables import TableRows
from tracestore.ingest.layouts.ragged import ragged
from tracestore.ingest.layouts.rows import has_answer, id_column
from tracestore.ingest.layouts.values import has_vectors, open_texts, set_arrays, with_mask
from tracestore.ingest.roles.columns import singular
from tracestore.ingest.roles.keys import KeyOptions, label_of_path
from tracestore.store.format import schema
from tracestore.store.io.scratch import Scratch
from tracestore.store.write.values import field_error

_BLOCK_BYTES = 4 << 20
_MAX_ID = 200
_SCALES = "hidden_states_scales"  # of FP8HiddenStatesConnector
_ID_NAME = re.compile(r"(?:q|question|example|sample|prompt)_?(?:ids|idxs?|ind(?:ex|ices))")


def traces_of(
    source: Input, units: Iterator[Unit], rows: TableRows | None, keys: KeyOptions, *, is_alone: bool
) -> Iterator[tuple[dict[str, Any] | InvalidInputError, bool]]:
    """Yield the values of each trace of some units, by the keys of the pickle schema.

    Parameters
    ----------
    source : Input
        The container.
    units : iterator of Unit
        What it holds.
    rows : TableRows or None
        Values of the traces from a table next to the container.
    keys : KeyOptions
        Names of the fields in the container, and axes of the hidden states.
    is_alone : bool
        Whether the folder of the source has no other file of this kind, so that it hardly holds one trace alone.

    Yields
    ------
    values : dict or InvalidInputError
        The values, or why the trace is refused.
    is_borrowed : bool
        Whether the arrays may alias memory that the reader uses again.
    """
    name, renamed, axes = source.name, keys.renamed, keys.axes
    position, is_numbered = 0, False
    while True:
        with error_location(position=position or None):
            unit = next(units, None)
        if unit is None:
            if is_numbered and rows is not None and len(rows) != position:
                raise InvalidInputError(f"{rows.path.name} has {len(rows)} rows for {position} traces")
            return
        is_numbered = rows is not None and rows.number_of(unit.trace, None) is not None
        group = None if rows is None or unit.is_trace else rows.group(unit.trace)
        own_rows = group if rows is None or rows.is_by_id or unit.trace or unit.is_trace else rows
        _rename(unit.fields, renamed)
        unit.fields = with_mask(unit.fields)
        with error_location(position=position):
            parts = None if unit.is_trace or axes else ragged(unit.fields, own_rows)
            if axes is not None:
                count, kind = count_by_axes(unit, axes)
            else:
                count, kind = stacked_count(unit, None if own_rows is None else len(own_rows))
            if parts is not None:
                count, kind = len(parts.bounds), "trace"
            elif axes is None and kind == "trace":
                _set_padded_axis(unit)
            is_mapped = any(field in ("hidden_states", "last_token") for field, _ in renamed)
            if is_alone and count is None and axes is None and not is_mapped and own_rows is None:
                check_one_trace(unit)
            if own_rows is not None and len(own_rows) != (count or 1) and not _are_joined(unit, own_rows):
                raise InvalidInputError(f"{own_rows.path.name} has {len(own_rows)} rows for {count or 1} traces")
        for k in range(count or 1):
            try:
                if parts is not None:
                    values = parts.fields(unit.fields, k)
                else:
                    values = row_fields(unit.fields, count or -1, k) if count is not None else _whole(unit.fields)
                values = {field: plain(value) for field, value in values.items()}
                open_texts(values, unit.trace, k, count or 1)
                id_name = _id_name(values)
                key = values.get(id_name)
                if group is not None:
                    row = dict(group.of("", k, key) or {})
                else:
                    row = dict(rows.of(unit.trace, position, key) or {}) if rows is not None else {}
                _rename(row, renamed)
                if row and rows is not None and rows.number_of("", key) is not None:
                    del values[id_name]
                values = row | values
                if "label" not in values and (label := label_of_path(unit.trace)) is not None:
                    values["label"] = label
                trace = unit.trace
                if isinstance(values.get("text"), str) and split_sample(trace) and not has_answer(values):
                    values["generated_answer"] = values.pop("text")
                if (count or 1) > 1 and (question := question_of(trace or name)):
                    trace = question
                    values.setdefault("sample", k)
                elif trace and (count or 1) > 1:
                    trace = f"{trace}/{k}"
                _set_id(values, trace, name, is_only=(count or 1) == 1 and trace == "" and not unit.is_trace)
                set_arrays(values)
                if "hidden_states" not in values and "last_token" not in values:
                    pass  # refused with advice
                elif axes is not None:
                    set_by_axes(values, kind)
                elif kind in ("last_token", "sequences") or _is_last_token(values, unit):
                    _set_last_token(values)
                else:
                    hidden = values["hidden_states"]
                    if count is not None:
                        _check_padding(hidden, values)
                    if kind == "layer" or (parts is not None and isinstance(hidden, np.ndarray) and hidden.ndim == 2):
                        values["hidden_states"] = [hidden]
                    _prepare(
                        values, unit.is_token_major or (parts is not None and parts.is_token_major), source.scratch
                    )
            except InvalidInputError as error:
                yield error, False
            else:
                # Values of a row are views of a batch of rows.
                yield values, unit.is_trace
                del values
            position += 1


def _check_padding(hidden: Any, values: Mapping[str, Any]) -> None:
    """Raise InvalidInputError if the states of stacked traces end with a token of zeros, and nothing states the padding."""
    if not isinstance(hidden, np.ndarray) or hidden.ndim != 3 or hidden.dtype.kind != "f" or 1 in hidden.shape[:2]:
        return
    if "attention_mask" in values or any(name in values for name in LENGTHS):
        return
    if not (hidden[:, -1].any() and hidden[-1].any() and hidden[:, 0].any()) and hidden.any():
        raise InvalidInputError(
            "found tokens of zeros, which look like padding; add attention_mask, or the numbers of tokens as lengths",
            field="hidden_states",
        )


def _set_padded_axis(unit: Unit) -> None:
    """Find the axis of tokens of padded traces (N, L, S, D) or (N, S, L, D): the longest trace fills it."""
    states = unit.fields.get("hidden_states")
    name = next((n for n in (*LENGTHS, "n_tokens") if n in unit.fields), "")
    lengths = unit.fields.get(name)
    if not isinstance(states, Column) or states.ndim != 4 or not isinstance(lengths, Column):
        return
    if lengths.shape != states.shape[:1] or lengths.dtype.kind not in "iu" or not lengths.shape[0]:
        return
    longest = int(lengths.whole().max())
    if states.shape[1:3].count(longest) == 1:
        unit.is_token_major = states.shape[1] == longest
        unit.fields["num_tokens"] = unit.fields.pop(name)


def _are_joined(unit: Unit, rows: TableRows) -> bool:
    """Return whether the rows of a table belong to stacked traces by their ids."""
    ids = next((v for k, v in unit.fields.items() if singular(k) in ID_KEYS or _ID_NAME.fullmatch(k)), None)
    ids = plain(whole(ids)) if ids is not None else None
    ids = ids.tolist() if isinstance(ids, np.ndarray) else ids if isinstance(ids, list) else [ids]
    known = rows.by_id
    return bool(known) and all(str(key) in known for key in ids)


def _id_name(values: Mapping[str, Any]) -> str:
    """Return the name of the id among the values of a trace; "" without one."""
    names = [name for name in values if singular(name) in ID_KEYS or _ID_NAME.fullmatch(name)]
    return next((name for name in names if isinstance(values[name], str | int)), "")


def _is_last_token(values: Mapping[str, Any], unit: Unit) -> bool:
    """Return whether the states of a trace are those of one token: a vector in a row of a table, or one per layer.

    vLLM leaves out the tokens of a cached prefix, so that one token of several is the last one.
    """
    hidden, tokens = values.get("hidden_states"), values.get("tokens")
    if unit.is_token_major and isinstance(hidden, np.ndarray) and len(hidden) == 1 and tokens is not None:
        return np.size(tokens) > 1
    return has_vectors(values) and (unit.is_trace or isinstance(hidden, dict))


def _rename(values: dict[str, Any], renamed: tuple[tuple[str, str], ...]) -> None:
    for field, key in renamed:
        if key in values:
            values[field] = values.pop(key)


def _whole(fields: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict) and name in ("hidden_states", "attentions", "last_token"):
            values[name] = {k: whole(layer) for k, layer in value.items()}
        else:
            values[name] = whole(value)
    return values


def _set_id(values: dict[str, Any], trace: str, name: str, *, is_only: bool) -> None:
    """Set question_id: an id among the values, else the name of the trace in the container, else of its file."""
    has_id = any(key in values for key in (*ID_KEYS, "ids", "question_ids"))
    for plural in [name for name in values if name not in LENGTHS]:
        single = "id" if _ID_NAME.fullmatch(plural) and not has_id and singular(plural) == plural else singular(plural)
        if single not in values and not isinstance(values[plural], list | np.ndarray):
            values[single] = values.pop(plural)
    for key in ID_KEYS:
        value = values.get(key)
        if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
            if key != "question_id":
                del values[key]
                values["question_id"] = value
            if (found := split_sample(trace)) is not None and found[0].rpartition("/")[2] == str(value):
                values.setdefault("sample", found[1])
            return
    name_of_id = id_column(values)
    # An integer may count something else than traces, unless it is the name of the file.
    is_id = name_of_id is not None and isinstance(values[name_of_id], str) and len(values[name_of_id]) <= _MAX_ID
    if name_of_id is not None and (is_id or str(values[name_of_id]) == PurePosixPath(name).stem):
        values["question_id"] = values.pop(name_of_id)
    elif trace or is_only:
        named = id_of_name(trace or str(PurePosixPath(name).with_suffix("")))
        values |= named if "sample" not in values else {"question_id": named["question_id"]}


def _prepare(values: dict[str, Any], is_token_major: bool, scratch: Scratch) -> None:
    """Bring the arrays of a trace into the form of the pickle schema."""
    tokens = values.get("tokens")
    if isinstance(tokens, np.ndarray) and tokens.ndim == 2 and len(tokens) == 1:
        tokens = values["tokens"] = tokens[0]
    num_tokens = len(tokens) if isinstance(tokens, np.ndarray | list | tuple) else None
    hidden = values["hidden_states"]
    if isinstance(hidden, np.ndarray):
        if hidden.ndim == 2:
            if hidden.shape[0] not in _token_counts(values, num_tokens):
                raise field_error(
                    "hidden_states",
                    f"shape {hidden.shape}{'' if num_tokens is None else f' and {num_tokens} tokens'}",
                    "(L, S, D); choose --axes LD for the last_token of each layer, --axes SD for the tokens of one layer",
                )
            values["hidden_states"] = [hidden]
        elif hidden.ndim == 3:
            mask = values.get("attention_mask")
            if isinstance(mask, np.ndarray):
                num_tokens = mask.size
            elif any(name in values for name in LENGTHS):
                num_tokens = None  # the rows are padded, to a number that is not known
            values["hidden_states"] = _layers(hidden, num_tokens, is_token_major, values.pop(_SCALES, None), scratch)
    length = next((name for name in LENGTHS if isinstance(values.get(name), int)), None)
    if length is None:
        return
    if isinstance(tokens, np.ndarray | list | tuple) and len(tokens) == values[length]:  # the arrays alone are padded
        end = slice(values.pop(length))
        values["hidden_states"] = _of_layers(values["hidden_states"], (..., end, slice(None)))
        if values.get("attentions") is not None:
            values["attentions"] = _of_layers(values["attentions"], (..., end, end))
    else:
        values["lengths"] = values.pop(length)


def _token_counts(values: Mapping[str, Any], num_ids: int | None) -> set[Any]:
    """Return how many rows the states of one layer may have, by the ids of tokens or the counts of a service."""
    counts = {num_ids, num_ids - 1} if num_ids is not None else {values.get(name) for name in LENGTHS}
    usage = values.get("usage")
    return counts | {usage.get("total_tokens"), usage.get("prompt_tokens")} if isinstance(usage, dict) else counts


def _of_layers(layers: Any, index: tuple[Any, ...]) -> Any:
    """Return a part of each layer of a list or dict of arrays; other values are refused later."""
    if isinstance(layers, dict):
        return {number: _of_layers([layer], index)[0] for number, layer in layers.items()}
    return [layer[index] if isinstance(layer, np.ndarray) and layer.ndim >= 2 else layer for layer in layers]


def _layers(
    hidden: np.ndarray, num_tokens: int | None, is_token_major: bool, scales: np.ndarray | None, scratch: Scratch
) -> list[np.ndarray]:
    """Return the layers of one array: (L, S, D), or (S, L, D) as vLLM writes it."""
    if is_token_major and num_tokens is not None and len(hidden) != num_tokens:
        raise field_error(
            "hidden_states",
            f"{len(hidden)} tokens",
            f"{num_tokens} as in token_ids; vLLM leaves out tokens of a cached prefix: record again with "
            "--no-enable-prefix-caching",
        )
    if not is_token_major and num_tokens is not None and len(hidden) != hidden.shape[1]:
        is_token_major = len(hidden) in (num_tokens, num_tokens - 1) and hidden.shape[1] != num_tokens
    if not is_token_major:
        return list(hidden)
    if scales is None:
        return list(_transposed(hidden, scratch))
    factors = np.asarray(scales, "<f4").reshape(-1, 1)
    if len(factors) not in (1, len(hidden)):
        raise field_error(_SCALES, f"{len(factors)} scales", f"1 or {len(hidden)}, one per token")
    return [hidden[:, k].astype("<f4") * factors for k in range(hidden.shape[1])]


def _transposed(hidden: np.ndarray, scratch: Scratch) -> np.ndarray:
    """Return (S, L, D) as a copy (L, S, D)."""
    try:
        code = schema.dtype_code(schema.dtype_name(hidden.dtype))
    except ValueError:
        return hidden.transpose(1, 0, 2)  # refused later
    out = scratch.empty((hidden.shape[1], len(hidden), hidden.shape[2]), hidden.dtype)
    rows = max(1, _BLOCK_BYTES // max(1, hidden[:1].nbytes))
    for begin in range(0, len(hidden), rows):
        # The kernel reports a file that is truncated meanwhile; reading its map with NumPy would end the process.
        block = np.ascontiguousarray(hidden[begin : begin + rows])
        copy = np.empty_like(block)
        kernels.checksum_scan([block], code, block.size, copy)
        out[:, begin : begin + rows] = copy.transpose(1, 0, 2)
    return out


def _set_last_token(values: dict[str, Any]) -> None:
    """Set last_token of a trace of which only the last token is known, and remove the fields of other tokens."""
    last = values.pop("hidden_states", None)
    last = values.get("last_token", last)
    last = last[0] if isinstance(last, np.ndarray) and last.ndim == 3 and len(last) == 1 else last
    values["last_token"] = last[None] if isinstance(last, np.ndarray) and last.ndim == 1 else last
    for name in ("tokens", "attentions"):
        values.pop(name, None)
