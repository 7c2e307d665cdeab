"""Hidden states, attention, edges, token ids and padding of a trace, as its dict holds them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tracestore.store.format import schema
from tracestore.store.write.field_values import as_array, describe, field_error, is_masked

_IDS = np.dtype("<i4")
_DTYPES = (np.dtype("f2"), np.dtype("f4"))


def layers_of(value: Any, name: str, ndim: int, shape_text: str) -> list[np.ndarray]:
    """Return the layers of a field as arrays of `ndim` dimensions and one dtype.

    `value` may be a list of L arrays, one stacked array, nested lists of numbers, or what generate() returns: a list
    of passes, each a list of L arrays. A batch dimension of one is removed.
    """
    if type(value) is list and _are_layers(value, ndim):
        return value
    array = as_array(value)
    if array is not None and array.ndim in (ndim + 1, ndim + 2):
        if 0 in array.shape:
            raise field_error(name, f"shape {array.shape}", f"a list of L non-empty arrays {shape_text}")
        value = list(array)
    if _is_list_of_passes(value):
        return _join_passes(value, name, ndim, shape_text)
    if not isinstance(value, list | tuple):
        raise field_error(name, describe(value), f"a list of L arrays {shape_text}")
    if len(value) == 0:
        raise field_error(name, "zero layers", "at least one")
    layers: list[np.ndarray] = []
    for k, item in enumerate(value):
        layer = item if type(item) is np.ndarray else as_array(item)
        if layer is None and isinstance(item, list | tuple):
            layer = _array_of_lists(item)
        if layer is not None and layer.ndim == ndim + 1 and len(layer) == 1:
            layer = layer[0]
        if layer is None or layer.ndim != ndim:
            is_batch = layer is not None and layer.ndim == ndim + 1
            advice = "; save each answer of a batch as a trace" if is_batch else ""
            raise field_error(f"{name}[{k}]", describe(item), f"an array {shape_text}{advice}")
        # The layers of a pickle share one dtype object, which is checked once.
        if not layers or layer.dtype is not layers[0].dtype:
            try:
                schema.dtype_name(layer.dtype)
            except ValueError:
                raise field_error(f"{name}[{k}]", f"dtype {layer.dtype.name}", "float16, float32 or bfloat16") from None
            if not layer.dtype.isnative:
                layer = layer.astype(layer.dtype.newbyteorder("="))
            if layers and layer.dtype != layers[0].dtype:
                raise field_error(f"{name}[{k}]", f"dtype {layer.dtype.name}", f"{layers[0].dtype.name} as in layer 0")
        layers.append(layer)
    return layers


def _are_layers(value: list[Any], ndim: int) -> bool:
    """Return whether a list holds arrays of `ndim` dimensions and one dtype of states, as most pickles do."""
    dtype = getattr(value[0], "dtype", None) if value else None
    if dtype not in _DTYPES or not dtype.isnative:
        return False
    return False not in [type(layer) is np.ndarray and layer.dtype is dtype and layer.ndim == ndim for layer in value]


def _array_of_lists(value: Sequence[Any]) -> np.ndarray | None:
    """Return nested lists of numbers as a float32 array; None for other lists."""
    if _holds_masked(value):
        return None  # NumPy would return what a mask hides
    try:
        return np.asarray(value, "<f4")
    except (ValueError, TypeError, OverflowError):
        return None


def _holds_masked(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return not isinstance(next(iter(value), 0), int | float) and any(map(_holds_masked, value))
    return is_masked(value)


def _is_list_of_passes(value: Any) -> bool:
    """Return whether the first item is a list of arrays, as for each pass of generate()."""
    if not isinstance(value, list | tuple) or not value or not isinstance(value[0], list | tuple) or not value[0]:
        return False
    return as_array(value[0][0]) is not None


def _join_passes(passes: Sequence[Any], name: str, ndim: int, shape_text: str) -> list[np.ndarray]:
    """Return the layers of all tokens from the layers of each forward pass of generate().

    A pass computes the states (s, D) of its s new tokens, and their attention (H, s, k) to the k tokens so far.
    """
    parts = [layers_of(layers, f"{name}[{k}]", ndim, shape_text) for k, layers in enumerate(passes)]
    for k, layers in enumerate(parts):
        if len(layers) != len(parts[0]):
            raise field_error(f"{name}[{k}]", f"{len(layers)} layers", f"{len(parts[0])} as in the first pass")
    joined, num_tokens = [], sum(layers[0].shape[-2] for layers in parts)
    for number, of_layer in enumerate(zip(*parts, strict=True)):
        seen, blocks = 0, []
        for k, block in enumerate(of_layer):
            seen += block.shape[-2]
            if ndim == 3:
                if block.shape[-1] != seen:
                    raise field_error(f"{name}[{k}][{number}]", f"shape {block.shape}", f"(H, s, {seen})")
                block = np.pad(block, ((0, 0), (0, 0), (0, num_tokens - seen)))
            blocks.append(block)
        try:
            joined.append(np.concatenate(blocks, axis=-2))
        except ValueError:
            raise field_error(f"{name}[0][{number}]", f"shape {of_layer[0].shape}", "that of later passes") from None
    return joined


def with_head_axis(value: Any) -> tuple[Any, bool]:
    """Return attention with an axis of heads, and whether it had none: (S, S) per layer, averaged over the heads."""
    if type(value) is list and value and type(value[0]) is np.ndarray and value[0].ndim != 2:
        return value, False
    array = as_array(value)
    layers = value if array is None else list(array) if array.ndim == 3 else []
    if not isinstance(layers, list | tuple) or _is_list_of_passes(layers):
        return value, False
    squares = []
    for item in layers:
        layer = as_array(item)
        layer = _array_of_lists(item) if layer is None and isinstance(item, list | tuple) else layer
        if layer is None or layer.ndim != 2 or layer.shape[0] != layer.shape[1]:
            return value, False
        squares.append(layer[None])
    return (squares, True) if squares else (value, False)


def last_token_of(value: Any) -> np.ndarray:
    """Return hidden states (L, D) from an array or a list of L vectors."""
    array = as_array(value)
    rows = value if array is None else list(array) if array.ndim == 2 else None
    if rows is None:
        raise field_error("last_token", describe(value), "an array (L, D)")
    layers = layers_of(rows, "last_token", 1, "(D,)")
    for k, layer in enumerate(layers):
        if layer.shape != layers[0].shape or not layer.size:
            raise field_error(f"last_token[{k}]", f"shape {layer.shape}", f"{layers[0].shape} as in layer 0")
    return np.array(layers)


def edges_of(value: Any, num_layers: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return edges (2, E) and weights (E,) of each layer."""
    expected = "a pair of nodes (2, E), source and target, and weights (E,)"
    if not isinstance(value, list | tuple) or len(value) != num_layers:
        found = f"{len(value)} layers" if isinstance(value, list | tuple) else describe(value)
        raise field_error("edges", found, f"{expected} for each of {num_layers} layers")
    edges = []
    for k, pair in enumerate(value):
        index, weight = map(as_array, pair) if isinstance(pair, list | tuple) and len(pair) == 2 else (None, None)
        if index is None or index.ndim != 2 or len(index) != 2 or index.dtype.kind not in "iu":
            raise field_error(f"edges[{k}]", describe(pair if index is None else index), expected)
        if weight is None or weight.shape not in (index.shape[1:], (index.shape[1], 1)):
            raise field_error(f"edges[{k}]", describe(pair if weight is None else weight), expected)
        edges.append((index, weight.reshape(-1)))
    weights = layers_of([weight for _, weight in edges], "edges", 1, "(E,)")
    return [(index, weight) for (index, _), weight in zip(edges, weights, strict=True)]


def token_ids(value: Any, num_tokens: int, stacked: tuple[int, ...] | None) -> np.ndarray:
    """Return token ids (T,); `stacked` is the shape of hidden states in one array (L, S, D)."""
    if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], list | tuple):
        value = value[0]
    array = as_array(value)
    if array is not None and array.ndim == 2 and len(array) == 1:
        array = array[0]
    if array is None:
        if not isinstance(value, list | tuple) or not all(
            isinstance(v, int | np.integer) and not isinstance(v, bool) for v in value
        ):
            raise field_error("tokens", describe(value), "(T,) integers")
        try:
            array = np.array(value, "<i8").reshape(-1)
        except OverflowError:
            raise field_error("tokens", "an integer that exceeds 64 bits", "int32") from None
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise field_error("tokens", describe(array), "(T,) integers")
    if len(array) not in (num_tokens, num_tokens + 1):
        shape = "hidden_states" if stacked is None else f"hidden_states (L, S, D) of shape {stacked}"
        raise field_error("tokens", f"{len(array)} tokens", f"{num_tokens}, the rows of {shape}, or one more")
    if stacked is not None and num_tokens < len(array) == stacked[0]:
        raise field_error(
            "hidden_states",
            f"shape {stacked} and {len(array)} tokens, which may be (S, L, D)",
            "(L, S, D); if its first axis counts layers, pass the list of its L arrays (S, D)",
        )
    tokens = array.astype(_IDS)
    # Comparing bytes takes a quarter of the time of minimum and maximum for a few tokens.
    is_negative = array.dtype.kind == "u" and bool((tokens < 0).any())  # 2**32 - 1 becomes -1 and back
    if is_negative or tokens.astype(array.dtype).tobytes() != array.tobytes():
        raise field_error("tokens", f"values from {array.min()} to {array.max()}", "int32")
    return tokens


def valid_span(mask: Any, length: Any, num_tokens: int) -> tuple[int, int]:
    """Return the first token that is not padding, and the one after the last.

    Parameters
    ----------
    mask : Any
        Attention mask (T,) or, of the prompt alone, of fewer tokens: the generated ones are no padding.
    length : Any
        Number of tokens without padding.
    num_tokens : int
        Number of tokens, T.
    """
    begin, end = 0, num_tokens
    if mask is not None:
        array = as_array(mask)
        if array is None:
            array = np.asarray(mask if isinstance(mask, list | tuple) else describe(mask))
        if array.ndim == 2 and len(array) == 1:
            array = array[0]
        if array.ndim != 1 or array.dtype.kind not in "biuf" or not 0 < len(array) <= num_tokens:
            found = describe(mask if array.dtype.kind == "U" else array)
            raise field_error("attention_mask", found, f"numbers of shape ({num_tokens},)")
        kept = np.flatnonzero(array)
        if len(kept) == 0:
            raise field_error("attention_mask", "only padding", "at least one token")
        begin, end = int(kept[0]), int(kept[-1]) + 1
        if end - begin != len(kept):
            raise field_error("attention_mask", "a gap between tokens", "padding at the ends")
        if end < len(array) < num_tokens:
            raise field_error("attention_mask", f"padding before token {len(array)}", f"{num_tokens} numbers")
        if end == len(array):
            end = num_tokens
    if length is not None:
        array = as_array(length)
        count = array.reshape(-1)[0] if array is not None and array.size == 1 else length
        if not isinstance(count, int | np.integer) or isinstance(count, bool) or not 0 < count <= num_tokens - begin:
            raise field_error("lengths", describe(length), f"a number of tokens from 1 to {num_tokens - begin}")
        end = begin + int(count)
    return begin, end
