"""The tree of .safetensors files, and of an index of several."""

from collections.abc import Mapping
from functools import cache
from pathlib import PurePath
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.files.byte_source import check_regular, map_file
from tracestore.ingest.files.json_text import parse_json
from tracestore.ingest.files.safetensors import StoredTensor, is_locked, stored_tensors
from tracestore.ingest.readers.content import Content
from tracestore.ingest.tree import (
    Array,
    Charge,
    Folder,
    Group,
    MappingGroup,
    Selection,
    Value,
    array_value,
    dtype_name,
    nested,
)
from tracestore.process import paused_collection

INDEX_SUFFIX = ".safetensors.index.json"


class TableArray(Array):
    """An array whose values are looked up in a table of 256, such as 8-bit floats."""

    def __init__(self, codes: np.ndarray, table: np.ndarray, charge: Charge) -> None:
        self._codes, self._table, self._charge = codes, table, charge
        self.shape, self.dtype = codes.shape, dtype_name(table.dtype)

    def read(self, selection: Selection = ()) -> np.ndarray:
        """Return the values of a selection."""
        values: np.ndarray = self._table[self._codes[selection]]
        self._charge(0, values.nbytes, 0)
        return values


def read_safetensors(content: Content) -> Value:
    """Return the tensors of a file by name; the metadata of its header are attributes."""
    if is_locked(f"{content.path}.lock"):
        raise InvalidInputError("another program is still writing this file and holds its lock; convert it later")
    with paused_collection():
        tensors, metadata = stored_tensors(content.mapped)
        names = nested(tensors)
    return _group(names, content.limits.charge, metadata)


def _group(tensors: Mapping[str, Any], charge: Charge, metadata: Mapping[str, Value]) -> Group:
    def opened(value: Any) -> Value:
        if isinstance(value, Folder):
            return MappingGroup(value, opened)
        charge()
        tensor: StoredTensor = value() if callable(value) else value
        codes, table = tensor.codes, tensor.table
        if table is not None and codes.ndim:
            return TableArray(codes, table, charge)
        return array_value(codes if table is None else table[codes], charge)

    return MappingGroup(tensors, opened, metadata, is_ordered=False)  # the library sorts tensors by dtype and name


def read_index(content: Content) -> Value:
    """Return the tensors of the files that an index names by name, each mapped when its first tensor is used.

    Raises
    ------
    InvalidInputError
        If the index is no index, or names a file outside of its folder.
    """
    found = parse_json(content.mapped.read(0, len(content.mapped)), "damaged index of .safetensors files")
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise InvalidInputError('damaged index of .safetensors files: expected a dict "weight_map" of file names')
    for name in set(names.values()):
        if PurePath(name).name != name or not name.endswith(".safetensors"):
            raise InvalidInputError(f"the index names {name[:60]!r}, expected a .safetensors file next to it")
    folder = content.path.absolute().parent

    @cache
    def tensors_of(name: str) -> dict[str, StoredTensor]:
        path = folder / name
        try:
            check_regular(path)
            return stored_tensors(map_file(path))[0]
        except InvalidInputError as error:
            raise InvalidInputError(f"{name[:60]}: {error.reason}") from None

    def tensor_of(tensor: str, name: str) -> StoredTensor:
        found = tensors_of(name).get(tensor)
        if found is None:
            raise InvalidInputError(f"{name[:60]} has no tensor {tensor[:60]!r}, which the index says")
        return found

    lazy = {tensor: (lambda tensor=tensor, name=name: tensor_of(tensor, name)) for tensor, name in names.items()}
    metadata = found.get("metadata")
    attributes = (
        {key: value for key, value in metadata.items() if value is None or type(value) in (str, int, float, bool)}
        if isinstance(metadata, dict)
        else {}
    )
    return _group(nested(lazy), content.limits.charge, attributes)
