"""Read .safetensors files: a JSON header and arrays, which are views of the mapped file.

The library's reader for NumPy has neither bfloat16, which vLLM writes, nor views.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tracestore._core.mapping import MappedFile
from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.columns import Column, Input, TableColumn, Unit
from tracestore.ingest.containers.grouping import units_of
from tracestore.ingest.files.byte_source import inflate, map_file
from tracestore.ingest.files.decompress import compression_of
from tracestore.ingest.files.safetensors import is_locked, stored_tensors
from tracestore.store.io.scratch import Scratch

# Tensors of ExampleHiddenStatesConnector of vLLM, and of FP8HiddenStatesConnector of speculators.
_CONNECTOR_TENSORS = {"hidden_states", "token_ids"}
COMPRESSED_SUFFIXES = (".safetensors.zst", ".safetensors.gz", ".safetensors.xz", ".safetensors.bz2")
_SCALES = "hidden_states_scales"
_INTEGERS = ("sample", "prompt_length", "seed")


def read_safetensors(source: Input) -> Iterator[Unit]:
    """Yield the traces of a file; those of vLLM and speculators have hidden states (S, L, D)."""
    if is_locked(f"{source.path}.lock"):
        raise InvalidInputError("another program is still writing this file and holds its lock; convert it later")
    tensors, metadata = safetensors_columns(_content(source.path, source.scratch))
    is_connector = tensors.keys() - {_SCALES} == _CONNECTOR_TENSORS
    for unit in units_of(tensors, is_token_major=is_connector):
        unit.fields = _values(metadata) | unit.fields
        yield unit


def _content(path: Path, scratch: Scratch) -> MappedFile:
    """Return the bytes of a file; those of a compressed one are inflated to an unnamed file."""
    mapped = map_file(path)
    if not path.name.endswith(COMPRESSED_SUFFIXES):
        return mapped
    compression = compression_of(mapped.read(0, min(8, len(mapped))))
    if compression is None:
        raise InvalidInputError("not compressed, as its name says")
    return inflate(path, compression, scratch)


def _values(metadata: dict[str, str]) -> dict[str, Any]:
    """Return the texts of a header, integers as such; "format" is the library that wrote the file."""
    values: dict[str, Any] = {key: text for key, text in metadata.items() if key != "format"}
    for key in _INTEGERS:
        if values.get(key, "").isdecimal() and len(values[key]) < 19:
            values[key] = int(values[key])
    return values


def is_being_written(path: Path) -> bool:
    """Return whether a .safetensors file is shorter than its header states, or the lock of its writer is held."""
    if path.suffix != ".safetensors":
        return False
    try:
        safetensors_columns(map_file(path))
    except InvalidInputError as error:
        return "truncated" in error.reason or is_locked(f"{path}.lock")
    return is_locked(f"{path}.lock")


def safetensors_columns(data: MappedFile) -> tuple[dict[str, Column], dict[str, str]]:
    """Return the tensors and the metadata of a file."""
    tensors, metadata = stored_tensors(data)
    return {
        name: Column(tensor.codes) if tensor.table is None else TableColumn(tensor.codes, tensor.table)
        for name, tensor in tensors.items()
    }, metadata
