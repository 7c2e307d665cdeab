"""Files of one layer each, which hold the same traces in the same order."""

import re
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.columns import Column, Unit
from tracestore.ingest.containers.keys import column_name
from tracestore.ingest.layouts.values import STATES, array_of

_LAYER = re.compile(r"(?:(?P<rest>.*)[_.\-])?layers?[_.\-]?(?P<number>\d+)", re.IGNORECASE)


def layer_of(path: Path) -> int | None:
    """Return the layer that the name of a file or folder ends with; None without one."""
    match = _LAYER.fullmatch(path.name.partition(".")[0])
    return None if match is None else int(match["number"])


def layer_group(name: str) -> str | None:
    """Return the name of a file without its layer, the same for all layers; None without a layer."""
    stem, dot, suffix = name.partition(".")
    match = _LAYER.fullmatch(stem)
    return None if match is None else f"{match['rest'] or 'layers'}{dot}{suffix}"


def joined_layers(layers: Mapping[int, Iterator[Unit]]) -> Iterator[Unit]:
    """Yield the units of files of one layer each, joined in the order of the files.

    Raises
    ------
    InvalidInputError
        If the files hold different traces, or other arrays than those of a layer.
    """
    numbers = sorted(layers)
    for units in zip_longest(*(layers[n] for n in numbers)):
        first = units[0]
        for number, unit in zip(numbers, units, strict=True):
            if unit is None or first is None or _ids(unit) != _ids(first):
                raise InvalidInputError(
                    f"layer {number} holds other traces than layer {numbers[0]}, or in another order; write the same "
                    "traces for each layer",
                    field="hidden_states",
                )
        fields = {name: value for name, value in first.fields.items() if name not in STATES}
        for name in STATES:
            if name in first.fields:
                fields[name] = {
                    n: _layer(unit.fields.get(name), n, name) for n, unit in zip(numbers, units, strict=True)
                }
        yield Unit(fields, first.trace, first.is_trace, first.is_token_major)


def _layer(value: Any, number: int, name: str) -> Any:
    value = next(iter(value.values())) if isinstance(value, dict) and len(value) == 1 else value
    value = array_of(value)
    if not isinstance(value, Column | np.ndarray):
        raise InvalidInputError(f"found no array of layer {number} alone in its file", field=name)
    return value


def _ids(unit: Unit) -> list[Any]:
    """Return what identifies the traces of a unit: names, ids and labels."""
    found: list[Any] = [unit.trace]
    for name, value in sorted(unit.fields.items()):
        if column_name(name):
            value = value.whole() if isinstance(value, Column) else value
            found.append((name, value.tolist() if isinstance(value, np.ndarray) else value))
    return found
