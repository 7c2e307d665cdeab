"""The tree of .safetensors files."""

from collections.abc import Mapping
from typing import Any

from tracestore.errors import InvalidInputError
from tracestore.ingest.files.safetensors import is_locked, stored_tensors
from tracestore.ingest.readers.content import Content
from tracestore.ingest.tree import Charge, Folder, Group, MappingGroup, Value, array_value, nested
from tracestore.process import paused_collection


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
        return array_value(value.values, charge)

    return MappingGroup(tensors, opened, metadata)
