"""Names, dtypes and sizes of format version 1. docs/format.md is the same in prose."""

from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from tracestore._core import kernels

FORMAT_VERSION = 1
MIB = 1 << 20

SEGMENT_CLOSE_BYTES = 128 * MIB
SEGMENT_SPLIT_BYTES = 1024 * MIB
INNER_CHUNK_BYTES = MIB
MIN_CODED_CHUNK_BYTES = 64 << 10

# NumPy has no bfloat16. Inside the package such arrays carry this dtype, whose
# one field holds the raw bits; on disk and in public arrays they are uint16.
BFLOAT16 = np.dtype([("bfloat16", "<u2")])

DTYPE_NAMES = {"float16": np.dtype("<f2"), "bfloat16": BFLOAT16, "float32": np.dtype("<f4")}
_CODES = {"float16": kernels.F16, "bfloat16": kernels.BF16, "float32": kernels.F32, "float64": kernels.F64}

STRING_FIELDS = ("question_id", "question", "generated_answer_clean", "generated_answer", "generated_text", "extras")
ANSWER_FIELDS = ("generated_answer_clean", "generated_answer", "generated_text")
# Arrays large enough that --codec pays; everything else is always uncompressed.
CODED_ARRAYS = frozenset({"hidden_states", "attention", "last_token", "edge_index", "edge_weight"})
CODECS = ("none", "blosc-zstd", "blosc-lz4", "zstd")
ATTENTION_MODES = ("mean", "heads", "none")

# Bits of the segment array `fields`: what the source trace had.
FIELD_BITS = {
    name: 1 << bit
    for bit, name in enumerate(
        (
            "hidden_states",
            "attentions",
            "edges",
            "last_token",
            "tokens",
            "tokens_decoded",
            "question_id",
            "question",
            "generated_answer_clean",
            "generated_answer",
            "generated_text",
            "prompt_length",
            "label",
        )
    )
}

LAYOUT_NONE, LAYOUT_CAUSAL, LAYOUT_SQUARE, LAYOUT_EDGES = range(4)
LAYOUT_NAMES = {LAYOUT_CAUSAL: "causal", LAYOUT_SQUARE: "square", LAYOUT_EDGES: "edges"}


@lru_cache(maxsize=64)  # numpy takes microseconds for a name, and every layer is asked for it
def dtype_name(dtype: np.dtype) -> str:
    """float16, bfloat16, float32 or float64; ValueError for another dtype."""
    if dtype == BFLOAT16:
        return "bfloat16"
    name = dtype.newbyteorder("=").name
    if name not in _CODES:
        raise ValueError(name)
    return name


def dtype_code(name: str) -> int:
    """The C core's code of a dtype name."""
    return _CODES[name]


def storage_dtype(name: str) -> np.dtype:
    """The dtype as stored: bfloat16 is uint16 on disk."""
    return np.dtype("<u2") if name == "bfloat16" else DTYPE_NAMES[name]


def as_float32(array: np.ndarray, name: str) -> np.ndarray:
    """An array of a store as float32; `name` is its dtype's, bfloat16 being stored as raw bits."""
    if name == "bfloat16":
        return (array.astype("<u4") << 16).view("<f4")
    return array.astype("<f4", copy=False)


def num_pairs(num_tokens: int, layout: int) -> int:
    """A: stored attention values of one layer and head."""
    if layout == LAYOUT_CAUSAL:
        return num_tokens * (num_tokens + 1) // 2
    return num_tokens * num_tokens if layout == LAYOUT_SQUARE else 0


@dataclass(frozen=True)
class Attributes:
    """`attributes.tracestore` of the root zarr.json. None: not known yet, because no
    source with that field has been committed; it is filled in later, never changed
    (attention_layout may go from causal to square once)."""

    num_layers: int | None = None
    hidden_dim: int | None = None
    num_heads: int | None = None
    hidden_dtype: str | None = None
    attention_dtype: str | None = None
    attention: str = "mean"
    attention_layout: str | None = None
    format_version: int = FORMAT_VERSION
    options: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return values | {"options": dict(sorted(self.options.items()))}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Attributes":
        return cls(**{f.name: data[f.name] for f in fields(cls)})

    def with_values(self, **values: Any) -> "Attributes":
        return replace(self, **values)

    @property
    def attention_rows(self) -> int:
        """H where every head is stored, else 1: rows of A values a layer."""
        return (self.num_heads or 1) if self.attention == "heads" else 1
