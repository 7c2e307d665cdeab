"""Decoding of the fields of a trace without an array of their own, which are stored as JSON."""

import base64
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tracestore.store.format.schema import as_float32


def decode_list(text: str) -> list[Any]:
    """Return the list that encode_value() encoded as JSON.

    Raises
    ------
    ValueError, TypeError, RecursionError
        If the text is no such list.
    """
    found = json.loads(text)
    if not isinstance(found, list):
        raise ValueError("not a JSON list")
    return [_decode(item) for item in found]


def decode_extras(extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that extras_json() encoded, with bfloat16 arrays as float32.

    Raises
    ------
    ValueError, TypeError, RecursionError
        If an encoded value is invalid.
    """
    return {name: _decode(item) for name, item in extras.items()}


def _decode(item: Any) -> Any:
    if isinstance(item, list):
        return [_decode(v) for v in item]
    if not isinstance(item, dict):
        return item
    match item:
        case {"$int": str(text)} if len(item) == 1:
            return int(text)
        case {"$float": str(text)} if len(item) == 1:
            return float(text)
        case {"$bytes": str(text)} if len(item) == 1:
            return base64.b64decode(text)
        case {"$array": [str(dtype), list(shape), str(text)]} if len(item) == 1:
            data = base64.b64decode(text)
            if dtype == "bfloat16":
                return as_float32(np.frombuffer(data, "<u2"), dtype).reshape(shape)
            if re.fullmatch(r"[<>|=]?[biufcSU]\d+", dtype) is None:
                raise ValueError(f"dtype {dtype}")
            return np.frombuffer(data, dtype).reshape(shape).copy()
        case {"$dict": list(pairs)} if len(item) == 1:
            return {_decode(k): _decode(v) for k, v in pairs}
    return {k: _decode(v) for k, v in item.items()}
