"""The tree of .safetensors files."""

from typing import Any

from tracestore.errors import InvalidInputError
from tracestore.ingest.files.safetensors import stored_tensors
from tracestore.ingest.readers.content import Content
from tracestore.ingest.readers.tree import Value, array_value, nested_group
from tracestore.process import paused_collection
from tracestore.store.io.locks import is_locked


def read_safetensors(content: Content) -> Value:
    """Return the tensors of a file by name; the metadata of its header are attributes."""
    if is_locked(f"{content.path}.lock"):
        raise InvalidInputError("another program is still writing this file and holds its lock; convert it later")
    charge = content.limits.charge

    def opened(tensor: Any) -> Value:
        charge()
        return array_value(tensor, charge)

    with paused_collection():
        tensors, metadata = stored_tensors(content.mapped)
        return nested_group(tensors, opened, metadata)
