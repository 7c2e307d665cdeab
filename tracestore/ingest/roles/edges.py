"""Attention as lists of heads or of edges, as arrays."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.store.write.values import as_array, describe

_INDEX = ("edge_index", "edges", "indices")
_WEIGHT = ("edge_weight", "edge_weights", "edge_attr", "weight", "weights", "values")


def set_attention(fields: dict[str, Any], num_tokens: int | None) -> None:
    """Replace attention as lists of heads (S, S), or as pairs of edges (2, E) and weights (E,), by arrays.

    Parameters
    ----------
    fields : dict
        Fields of a trace; edges may have a key of their own each, with one item for each layer.
    num_tokens : int or None
        Number of tokens S; None if it is not known.

    Raises
    ------
    InvalidInputError
        If nothing shows which row of the edges is the token that attends.
    """
    edges = fields.get("edge_index")
    name = next((key for key in _WEIGHT[:3] if isinstance(fields.get(key), list)), "")
    if fields.get("attentions") is None and isinstance(edges, list) and name and len(edges) == len(fields[name]):
        pairs = list(zip(edges, fields[name], strict=True))
        if all(_pair(pair) is not None for pair in pairs):
            fields["attentions"] = pairs
            del fields["edge_index"], fields[name]
    value = fields.get("attentions")
    if isinstance(value, Mapping):
        fields["attentions"] = {key: _layer(layer, num_tokens) for key, layer in value.items()}
    elif isinstance(value, list | tuple):
        fields["attentions"] = [_layer(layer, num_tokens) for layer in value]


def is_list_of_edges(value: Any) -> bool:
    """Return whether a value is a list of links between nodes: {"source": 0, "target": 3, "weight": 0.2}."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, Mapping) and all(type(first.get(name)) is int for name in ("source", "target"))


def attention_of_edges(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return attention of one layer as edges, of the only list of links with weights; {} without one."""
    names = [name for name, value in fields.items() if is_list_of_edges(value)]
    if len(names) != 1 or fields.get("attentions") is not None:
        return {}
    try:
        edges = [(link["source"], link["target"], float(link["weight"])) for link in fields[names[0]]]
    except (TypeError, KeyError, ValueError):
        return {}
    index = np.array([edge[:2] for edge in edges]).T
    return {"attentions": [{"edge_index": index, "edge_weight": np.array([edge[2] for edge in edges], "f4")}]}


def _layer(value: Any, num_tokens: int | None) -> Any:
    """Return the attention of a layer, edges or a list of heads, as an array, and other values unchanged."""
    if (dense := _dense(value, num_tokens)) is not None:
        return dense
    items = value if isinstance(value, list | tuple) else []
    heads = [as_array(item) if (dense := _dense(item, num_tokens)) is None else dense for item in items]
    arrays = [head for head in heads if head is not None and head.ndim == 2 and head.dtype.kind == "f"]
    is_regular = len(arrays) == len(heads) and len({head.shape for head in arrays}) == 1
    return np.stack(arrays) if is_regular else value


def _pair(value: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Return edges (2, E) of integers and weights (E,) of floats; None for another value."""
    if isinstance(value, Mapping):
        index = next((value[key] for key in _INDEX if key in value), None)
        weight = next((value[key] for key in _WEIGHT if key in value), None)
    elif isinstance(value, list | tuple) and len(value) == 2:
        index, weight = value
    else:
        return None
    edges, weights = as_array(index), as_array(weight)
    if edges is None or weights is None or edges.dtype.kind not in "iu" or weights.dtype.kind not in "fV":
        return None
    weights = weights.reshape(-1) if weights.ndim == 2 and 1 in weights.shape else weights
    edges = edges.T if edges.ndim == 2 and edges.shape[0] != 2 and edges.shape[1] == 2 else edges
    return (edges, weights) if edges.ndim == 2 and len(edges) == 2 and weights.shape == edges.shape[1:] else None


def _dense(value: Any, num_tokens: int | None) -> np.ndarray | None:
    """Return edges and weights as attention (S, S), whose row i holds the weights of token i; None for another value."""
    pair = None if num_tokens is None else _pair(value)
    if num_tokens is None or pair is None:
        return None
    edges, weights = pair
    one, other = edges.astype("i8")
    if edges.size and not 0 <= int(edges.min()) <= int(edges.max()) < num_tokens:
        raise InvalidInputError(f"found edges beyond {num_tokens} tokens", field="attentions")
    if (one <= other).all() and (one < other).any():
        one, other = other, one
    elif not (one >= other).all() or not (one > other).any():
        raise InvalidInputError(
            f"found edges {describe(edges)} in both directions, whose attending token nothing shows; save the attention "
            "as an array (S, S)",
            field="attentions",
        )
    dense = np.zeros((num_tokens, num_tokens), weights.dtype if weights.dtype.kind == "f" else "<f4")
    dense[one, other] = weights
    return dense
