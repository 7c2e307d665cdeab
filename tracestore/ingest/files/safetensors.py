"""Headers of .safetensors files, and the tensors as views of the mapped file.

The library's reader for NumPy has neither bfloat16, which vLLM writes, nor views.
"""

import math
from typing import Any

import numpy as np

from tracestore._core.mapping import MappedFile
from tracestore.errors import InvalidInputError
from tracestore.ingest.files.json_text import parse_json
from tracestore.store.format import schema

_MAX_HEADER_BYTES = 100_000_000  # the limit of the library
_MAX_TENSORS = 1_000_000
_DTYPES: dict[str, Any] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1", "C64": "<c8",
    "BF16": schema.BFLOAT16,
}  # fmt: skip


def is_safetensors(head: bytes, size: int) -> bool:
    """Return whether a file of `size` bytes begins like a .safetensors file."""
    return head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= min(_MAX_HEADER_BYTES, max(2, size))


def stored_tensors(data: MappedFile) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the tensors of a file as views of it, and its metadata.

    Raises
    ------
    InvalidInputError
        Unless the header describes consecutive tensors that fill the file.
    """
    size = len(data)
    header, begin = _header(data)
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InvalidInputError("damaged .safetensors header: metadata that are not texts")
    spans = {name: _span(name, entry) for name, entry in header.items()}
    position = 0
    for name, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        if first != position:
            raise InvalidInputError("damaged .safetensors header: overlaps another tensor or unknown data", field=name)
        position = last
    if begin + position != size:
        kind = "truncated" if begin + position > size else "trailing bytes"
        raise InvalidInputError(f"{kind}: found {size:,} bytes, expected {begin + position:,}")
    values = np.frombuffer(memoryview(data), "u1", offset=begin) if position else np.empty(0, "u1")
    return {
        name: values[first:last].view(_DTYPES[header[name]["dtype"]]).reshape(header[name]["shape"])
        for name, (first, last) in spans.items()
    }, metadata


def _header(data: MappedFile) -> tuple[dict[str, Any], int]:
    """Return the header of a file, and where its tensors begin."""
    header_bytes = int.from_bytes(data.read(0, 8), "little") if len(data) >= 8 else 0
    begin = 8 + header_bytes
    if not 2 <= header_bytes <= _MAX_HEADER_BYTES or begin > len(data):
        raise InvalidInputError("truncated or damaged .safetensors file: its header ends beyond the file")
    header = parse_json(data.read(8, begin), "damaged .safetensors header")
    if not isinstance(header, dict) or len(header) > _MAX_TENSORS:
        raise InvalidInputError("damaged .safetensors header: expected a dict of tensors")
    return header, begin


def _span(name: str, entry: Any) -> tuple[int, int]:
    """Return where the bytes of a tensor begin and end after checking its description."""
    name = name[:60]
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise InvalidInputError("damaged .safetensors header: a tensor without dtype, shape and offsets", field=name)
    shape, offsets = entry["shape"], entry["data_offsets"]
    are_lists = isinstance(shape, list) and isinstance(offsets, list) and len(shape) <= 8 and len(offsets) == 2
    if not are_lists or not all(type(n) is int and 0 <= n < 1 << 48 for n in (*shape, *offsets)):
        raise InvalidInputError("damaged .safetensors header: wrong shape or offsets", field=name)
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise InvalidInputError(f"found dtype {str(dtype)[:20]}, which is not supported", field=name)
    expected = math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize
    if offsets[1] - offsets[0] != expected:
        found = f"{offsets[1] - offsets[0]:,} bytes, expected {expected:,}"
        raise InvalidInputError(f"damaged .safetensors header: {found} for shape {shape}", field=name)
    return offsets[0], offsets[1]
