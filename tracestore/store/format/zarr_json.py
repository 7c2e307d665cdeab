"""Generate the zarr.json documents of arrays and groups, byte for byte as zarr-python writes them.

zarr-python needs 0.3 s for its import and 1.5 ms per array while it holds the GIL: more than
everything else that is written once per segment. A test compares every kind of document with
the output of zarr-python.
"""

import functools
import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from tracestore._core.kernels import crc32c
from tracestore.store.format.codecs import BLOSC_LEVEL, ZSTD_LEVEL


def _codec(name: str, **configuration: Any) -> dict[str, Any]:
    return {"name": name} | ({"configuration": configuration} if configuration else {})


def _bytes_codec(itemsize: int) -> dict[str, Any]:
    return _codec("bytes", endian="little") if itemsize > 1 else _codec("bytes")


def _compressors(name: str, itemsize: int) -> list[dict[str, Any]]:
    if name == "none":
        return []
    if name == "zstd":
        return [_codec("zstd", level=ZSTD_LEVEL, checksum=False)]
    cname = name.removeprefix("blosc-")
    return [_codec("blosc", typesize=itemsize, cname=cname, clevel=BLOSC_LEVEL, shuffle="shuffle", blocksize=0)]


def _document(values: dict[str, Any], indent: int | None = 2) -> bytes:
    return json.dumps(values, indent=indent).encode()


def _array(
    shape: Sequence[int],
    chunk_shape: Sequence[int],
    dtype: np.dtype,
    codecs: list[dict[str, Any]],
    attributes: dict[str, Any],
) -> dict[str, Any]:
    return {
        "shape": list(shape),
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk_shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0.0 if dtype.kind == "f" else 0,
        "codecs": codecs,
        "attributes": attributes,
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }


def sharded_array(
    shape: Sequence[int], chunk_rows: int, dtype: np.dtype, codec: str, attributes: dict[str, Any]
) -> dict[str, Any]:
    """Return the metadata of an array with one shard, split along axis 0 into inner chunks of `chunk_rows` rows."""
    shard_rows = max(1, -(-shape[0] // chunk_rows)) * chunk_rows
    sharding = _codec(
        "sharding_indexed",
        chunk_shape=[chunk_rows, *shape[1:]],
        codecs=[_bytes_codec(dtype.itemsize), *_compressors(codec, dtype.itemsize)],
        index_codecs=[_bytes_codec(8), _codec("crc32c")],
        index_location="end",
    )
    return _array(shape, (shard_rows, *shape[1:]), dtype, [sharding], attributes)


def array_metadata(
    shape: Sequence[int], chunk_rows: int, dtype: np.dtype, codec: str, attributes: dict[str, Any]
) -> bytes:
    """Return the zarr.json of a sharded array."""
    return _document(sharded_array(shape, chunk_rows, dtype, codec, attributes))


@functools.lru_cache(maxsize=256)
def small_array_metadata(num_items: int, dtype: np.dtype) -> bytes:
    """Return the zarr.json of a one-dimensional array of one uncompressed chunk."""
    return _document(_array([num_items], [max(1, num_items)], dtype, [_bytes_codec(dtype.itemsize)], {}), None)


def group_metadata(attributes: dict[str, Any]) -> bytes:
    """Return the zarr.json of a group."""
    return _document({"attributes": attributes, "zarr_format": 3, "node_type": "group"})


def shard_index(chunks: Sequence[tuple[int, int]] | np.ndarray) -> bytes:
    """Return the end of a shard: the index, which has the offset and the size of each inner chunk, and its CRC-32C."""
    index = np.asarray(chunks, "<u8").tobytes()
    return index + struct.pack("<I", crc32c(index))


def contiguous_index(num_chunks: int, chunk_bytes: int) -> bytes:
    """Return the end of a shard whose inner chunks have this size."""
    return shard_index(np.stack([np.arange(num_chunks) * chunk_bytes, np.full(num_chunks, chunk_bytes)], axis=1))
