"""Find the axes of hidden states that count traces, layers and tokens, by shapes and by the values next to them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.roles.columns import counts_of, has_one_id, lengths_of, num_tokens, singular
from tracestore.ingest.roles.layout import Shape, is_counted_from_last, is_ragged, layers_of, opened, shape_of

# More layers than any model has: an axis of this size counts something else.
_MAX_LAYERS = 256
_BARE = {"hidden_states"}


def trace_axis(fields: Mapping[Any, Any], key: Any, value: Any, shape: Shape, is_last: bool) -> int | None:
    """Return the axis of hidden states that counts traces; None for one trace, or a batch that `batches` splits."""
    rank, counts = len(shape), counts_of(fields, key)
    if isinstance(value, dict):
        if rank == 4 and shape[1] != 1 and shape[2] is None:
            return 1  # a list over traces for each layer
        if rank == 3 and shape[1] in counts and shape[1] != 1:
            return 1
        if rank == 3 and key and fields.keys() <= _BARE:
            raise _ambiguous(shape, "LND", "LSD")
        return None
    has_rows = shape[0] in counts
    if is_last:
        if rank == 3 and not has_rows and shape[1] in counts and shape[1] != 1:
            return 1
        return 0 if (rank == 3 and (shape[1] != 1 or has_rows)) or (rank == 2 and has_rows and shape[0] != 1) else None
    if rank <= 3:
        is_stack = rank == 3 and shape[1] is None and not has_one_id(fields)
        if rank == 3 and not has_rows and shape[1] != 1 and shape[1] in counts_of(fields, key, is_named=True):
            # As many ids as the second axis has items: one trace has as many tokens, else the states of tokens are missing.
            if shape[0] in {_count(fields.get(name)) for name in ("layers", "layer_ids")}:
                return 1
            if shape[1] not in num_tokens(fields):
                raise _ambiguous(shape, "LND", "LSD")
        return 0 if is_stack or (rank > 1 and has_rows and shape[0] != 1) else None
    if _are_passes(value):
        return None
    if shape[0] == 1:
        return None if shape[1] in counts and shape[1] != 1 else 0
    if is_ragged(shape[1:-1]):
        return 0
    if rank > 4 or shape[1] == 1:
        return 0 if has_rows else None
    if has_rows and shape[1] in counts:
        return _axis_of_padding(fields, value, shape)
    return 0 if has_rows else None


def without_time_first(fields: dict[Any, Any]) -> dict[Any, Any]:
    """Return fields in which states (S, N, D), as torch's pad_sequence stacks them, are a list of traces without padding.

    The numbers of tokens next to them tell both axes.
    """
    value, sizes = opened(fields.get("hidden_states")), np.asarray(opened(lengths_of(fields)))
    if not isinstance(value, np.ndarray) or value.ndim != 3 or sizes.ndim != 1 or sizes.dtype.kind not in "iu":
        return fields
    counts = sizes.tolist()
    if len(counts) != value.shape[1] or len(counts) in (1, len(value)) or min(counts) < 1 or max(counts) != len(value):
        return fields
    rest = {name: v for name, v in fields.items() if singular(name) != "lengths"}
    return rest | {"hidden_states": [[value[:size, k]] for k, size in enumerate(counts)]}


def _axis_of_padding(fields: Mapping[Any, Any], value: Any, shape: Shape) -> int | None:
    """Return which of two axes of one size counts traces: padding with zeros belongs to one of them."""
    mask, lengths = opened(fields.get("attention_mask")), lengths_of(fields)
    is_batch = mask is not None or "lengths" in fields  # a batch as models return it has layers first
    if isinstance(value, np.ndarray) and (mask is not None or lengths is not None):
        tokens = np.arange(value.shape[2])
        kept = np.asarray(mask) != 0 if mask is not None else tokens < np.reshape(np.asarray(lengths), (-1, 1))
        if kept.shape == (value.shape[0], value.shape[2]) and not kept.all():
            k = int(np.flatnonzero(~kept.all(axis=1))[0])
            parts = value[k, :, ~kept[k]], value[:, k, ~kept[k]]
            rows, layers = (not part.astype("<f4").any() if part.dtype.kind == "f" else False for part in parts)
            if rows != layers:
                return 0 if rows else None
    if is_batch or not isinstance(value, np.ndarray):
        return None
    raise _ambiguous(shape, "NLSD", "LNSD")


def _are_passes(value: Any) -> bool:
    """Return whether a list holds the passes of generate(): after the first, one token each."""
    if not isinstance(value, list | tuple) or len(value) < 2 or not isinstance(value[0], list | tuple):
        return False
    return all(shape_of(item)[-2:-1] == (1,) for item in value[1:])


def letters_of_trace(
    trace: Mapping[Any, Any],
    value: Any,
    shape: Shape,
    is_last: bool,
    stack: Shape | None = None,
) -> str | None:
    """Return the axes of the hidden states of one trace; None for those that the schema has.

    `stack` is the shape of the traces of which this is one.
    """
    rank, sizes = len(shape), num_tokens(trace)
    if is_last:
        return "D" if rank == 1 else None
    if isinstance(value, dict):
        return "LD" if rank == 2 else None
    if rank == 1:
        return "D"
    if rank == 2:
        if shape[0] in sizes:
            return "SD"
        if any(_count(trace.get(name)) == shape[0] for name in ("layers", "layer_ids")):
            return "LD"
        if stack is not None:
            # Layers last, as CCS writes them, are fewer than the hidden size.
            fits = ("NDL",) if (shape[0] or 0) > (shape[1] or 0) else ()
            raise _ambiguous(stack, "NLD", "NSD", *fits)
        raise _ambiguous(shape, "SD", "LD", *(["ND"] if trace.keys() == _BARE else []))
    if rank == 3 and shape[0] != 1 and shape[0] in sizes and shape[1] not in sizes and not is_ragged(shape):
        return "SLD"
    if rank == 3 and (shape[0] or 0) > _MAX_LAYERS:
        raise _ambiguous(shape, "NLD", "SLD", "NSD")
    return None


def _count(value: Any) -> int | None:
    shape = shape_of(value, "i")
    return shape[0] if len(shape) == 1 else None


def with_states(fields: dict[Any, Any], key: Any, value: Any, letters: str | None) -> dict[Any, Any]:
    """Return a trace with these hidden states, whose axes are `letters`; None for those that the schema has."""
    value = opened(value)
    if isinstance(value, dict):
        layers = layers_of(value)
        value = list(layers.values()) if is_counted_from_last(value) else layers
    if letters is None or letters == "LSD":
        return fields | {key or "hidden_states": value}
    rest = {name: v for name, v in fields.items() if name != key}
    if letters == "SLD":
        return rest | {"hidden_states": _stacked(value).transpose(1, 0, 2)}
    if letters == "DL":
        value = _stacked(value).T
    elif letters in ("SD", "D"):
        value = [value]
    return rest | {"hidden_states" if "S" in letters else "last_token": value}


def _stacked(value: Any) -> np.ndarray:
    """Return nested lists of arrays as one array."""
    value = opened(value)
    return value if isinstance(value, np.ndarray) else np.stack([_stacked(item) for item in value])


def answers_of(values: Sequence[Any]) -> list[list[np.ndarray]] | None:
    """Return lists of arrays (L, S, D), whose S differ within a list as those of layers do not; None for other values."""
    lists = [[opened(item) for item in value] if isinstance(value, list | tuple) else [] for value in values]
    if not all(items and all(isinstance(a, np.ndarray) and a.ndim == 3 for a in items) for items in lists):
        return None
    shapes = [[a.shape for a in items] for items in lists]
    is_one_model = len({(shape[0], shape[2]) for group in shapes for shape in group}) == 1
    return lists if is_one_model and any(len(set(group)) > 1 for group in shapes) and shapes[0][0][0] > 1 else None


def shape_text(shape: Shape) -> str:
    """Return a shape for a message, with "?" for sizes that differ."""
    return str(tuple("?" if n is None else n for n in shape)).replace("'", "")


def _ambiguous(shape: Shape, *fits: str) -> InvalidInputError:
    choices = " or ".join(f"--axes {letters}" for letters in fits)
    return InvalidInputError(
        f"found shape {shape_text(shape)}, whose axes may count traces N, layers L or tokens S; choose {choices}",
        field="hidden_states",
    )
