"""Small pictures of the attention of heads and layers."""

import struct
import zlib
from collections.abc import Mapping

import numpy as np

from tracestore.serve.forms import number_of
from tracestore.store.read.store import TraceStore
from tracestore.trace_view import downsample, read_attention

# Rows and columns of a picture.
PICTURE_SIDE = 96
# Colors of the pictures, from low to high: those of the heat maps (cividis), of which the pages have 256.
_COLORS = ((0, 32, 76), (64, 77, 107), (124, 123, 120), (188, 174, 108), (255, 233, 69))


def attention_picture(store: TraceStore, index: int, arguments: Mapping[str, str]) -> bytes:
    """Return a small PNG picture of the attention of a layer and head.

    UsageError if the store lacks the layer or head; KeyError for a trace without attention.
    """
    trace = store[index]
    layer = number_of(arguments, "layer", max(1, store.num_layers), store.num_layers // 2)
    head = number_of(arguments, "head", store.num_stored_heads, 0) if arguments.get("head") else None
    attention = read_attention(store, trace, layer, head)
    if attention is None:
        raise KeyError(index)
    values = np.sqrt(np.maximum(np.nan_to_num(attention, nan=0, posinf=0, neginf=0), 0))
    values = downsample(downsample(values, PICTURE_SIDE, 0), PICTURE_SIDE, 1)
    levels = (values / max(float(values.max()), 1e-30) * 255).astype("u1")
    steps = np.linspace(0, len(_COLORS) - 1, 256)
    palette = np.stack([np.interp(steps, range(len(_COLORS)), channel) for channel in zip(*_COLORS, strict=True)], 1)
    return png(levels, palette.astype("u1"))


def png(levels: np.ndarray, palette: np.ndarray) -> bytes:
    """Return a PNG picture of levels (rows, columns) uint8, whose colors are a palette (256, 3) uint8."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows, columns = levels.shape
    # 8 bits per pixel, with a palette; each row begins with the number of its filter, 0.
    header = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)
    data = zlib.compress(np.pad(levels, ((0, 0), (1, 0))).tobytes(), 1)
    chunks = (b"IHDR", header), (b"PLTE", palette.tobytes()), (b"IDAT", data), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, part) for kind, part in chunks)
