"""Decoding of the fields of a trace without an array of their own, which are stored as JSON."""

import base64
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np


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
    decoded: list[Any] = decode_extras({"": found})[""]
    return decoded


def decode_extras(extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that extras_json() encoded, with bfloat16 arrays as float32.

    Raises
    ------
    ValueError, TypeError, RecursionError
        If an encoded value is invalid.
    """

    def value(item: Any) -> Any:
        if isinstance(item, list):
            return [value(v) for v in item]
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
                if dtype != "bfloat16" and re.fullmatch(r"[<>|=]?[biufcSU]\d+", dtype) is None:
                    raise ValueError(f"dtype {dtype}")
                if dtype == "bfloat16":
                    bits = np.frombuffer(data, "<u2").astype("<u4") << 16
                    return bits.view("<f4").reshape(shape)
                return np.frombuffer(data, dtype).reshape(shape).copy()
            case {"$dict": list(pairs)} if len(item) == 1:
                return {value(k): value(v) for k, v in pairs}
        return {k: value(v) for k, v in item.items()}

    return {name: value(item) for name, item in extras.items()}
