"""Files with one array each, named by layer: layer_8.pt, layer_8_0.pt (rows from 0), layer8_activations.pt."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tracestore._core.pickle import BufferReader
from tracestore.errors import InvalidInputError
from tracestore.ingest import torch_file
from tracestore.ingest.byte_source import check_regular, map_file
from tracestore.ingest.containers.keys import parse_key
from tracestore.ingest.decompress import compression_of
from tracestore.ingest.pickles.joblib_arrays import JoblibArray
from tracestore.ingest.pickles.pickle_reader import pickle_reader
from tracestore.ingest.pickles.pickled_torch import PickledTensor
from tracestore.ingest.pickles.pickled_values import PickledArray

_PART = re.compile(r"(.+?)(?:[_-](\d+))?")
_MAX_IDS_BYTES = 64 << 20


def layer_of(stem: str) -> tuple[int, int] | None:
    """Return layer and first row that the name of a file states; None for other names."""
    if not re.search("layer|block", stem, re.IGNORECASE):
        return None
    for name, first in ((stem, None), _PART.fullmatch(stem).groups()):  # type: ignore[union-attr]
        key = parse_key(name)
        if key is not None and key.number is not None and not key.trace and key.field == "hidden_states":
            return key.number, int(first or 0)
    return None


def read_layer_files(parts: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield the arrays of all layers by number, one dict for each range of rows, with ids if there are any.

    Raises
    ------
    InvalidInputError
        If a file does not hold one array, or a layer lacks rows.
    """
    chunks: dict[int, dict[int, Any]] = {}
    for path in parts:
        found = layer_of(path.stem)
        assert found is not None
        chunks.setdefault(found[1], {})[found[0]] = _array(path)
    layers = sorted(next(iter(chunks.values())))
    ids, offset = _ids(parts[0].parent), 0
    for first in sorted(chunks):
        chunk = chunks[first]
        if sorted(chunk) != layers:
            raise InvalidInputError(f"found layers {sorted(chunk)} of rows from {first}, expected {layers}")
        values: dict[str, Any] = {"hidden_states": {k: chunk[k] for k in layers}}
        end = offset + len(chunk[layers[0]])
        if ids is not None:
            if len(ids) < end:
                raise InvalidInputError(f"found {len(ids)} ids for at least {end} rows")
            values["question_ids"] = ids[offset:end]
        offset = end
        yield values


def _array(path: Path) -> np.ndarray:
    check_regular(path)
    mapped = map_file(path)
    view = memoryview(mapped)
    if compression_of(bytes(view[:8])) is not None:
        raise InvalidInputError(f"{path.name} is compressed; inflate the files of layers")
    if bytes(view[:4]) == b"PK\x03\x04":
        value = torch_file.read_zip(mapped)
    elif torch_file.is_legacy(view):
        value = torch_file.read_legacy(view)
    else:
        value = pickle_reader(BufferReader(mapped), load_bytes=torch_file.load_bytes).load()
    array = value.resolve() if isinstance(value, PickledTensor | PickledArray | JoblibArray) else None
    if not isinstance(array, np.ndarray) or array.ndim == 0:
        raise InvalidInputError(f"{path.name}: found no array, expected one in each file that is named by a layer")
    return array


def _ids(folder: Path) -> list[Any] | None:
    """Return the only list of ids in the JSON files of a folder whose names end with "ids"."""
    found: list[list[Any]] = []
    for path in sorted(folder.glob("*ids.json")):
        check_regular(path)
        if path.stat().st_size > _MAX_IDS_BYTES:
            raise InvalidInputError(f"{path.name}: found more than {_MAX_IDS_BYTES:,} bytes of ids")
        try:
            ids = json.loads(path.read_text("utf-8"))
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"{path.name}: not JSON: {str(error)[:100]}") from None
        if not isinstance(ids, list) or not all(isinstance(k, str | int) for k in ids):
            raise InvalidInputError(f"{path.name}: found {type(ids).__name__}, expected a list of ids")
        if found and ids != found[0]:
            raise InvalidInputError(f"{path.name}: found other ids than for the first layer")
        found.append(ids)
    return found[0] if found else None
