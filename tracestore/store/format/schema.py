"""Names, dtypes and sizes of format version 1. docs/format.md is the same in prose."""

from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from tracestore._core import kernels
from tracestore.store.format.labels import DIRECTIONS

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
# The arrays of a segment: shape behind axis 0 and dtype; None: as the store's attributes say.
ROWS, OFFSETS, VALUES = "rows", "offsets", "values"
SEGMENT_ARRAYS: dict[str, tuple[str, str | None]] = {
    "hidden_states": (VALUES, None),
    "last_token": (VALUES, None),
    "attention": (VALUES, None),
    "edge_ptr": (VALUES, "<i8"),
    "edge_index": (VALUES, "<i4"),
    "edge_weight": (VALUES, None),
    "num_tokens": (ROWS, "<i4"),
    "attention_layout": (ROWS, "|u1"),
    "attention_start": (ROWS, "<i8"),
    "last_token_row": (ROWS, "<i4"),
    "sample": (ROWS, "<i4"),
    "source_position": (ROWS, "<i4"),
    "prompt_length": (ROWS, "<i4"),
    "num_nonfinite": (ROWS, "<i8"),
    "fields": (ROWS, "<u4"),
    "edges_reversed": (ROWS, "|u1"),
    "tokens": (VALUES, "<i4"),
    "tokens_offsets": (OFFSETS, "<i8"),
    "tokens_decoded": (VALUES, "|u1"),
    "tokens_decoded_offsets": (VALUES, "<i8"),
    "tokens_decoded_ptr": (OFFSETS, "<i8"),
    **dict.fromkeys(STRING_FIELDS, (VALUES, "|u1")),
    **{f"{name}_offsets": (OFFSETS, "<i8") for name in STRING_FIELDS},
}
# Those that a segment has where a row of it needs them.
OPTIONAL_ARRAYS = frozenset({"hidden_states", "last_token", "attention", "edge_ptr", "edge_index", "edge_weight"})
COLUMN_ARRAYS: dict[str, tuple[str, str]] = {
    "scores": (ROWS, "<f8"),
    "labels": (ROWS, "<f8"),
    "groups": (VALUES, "|u1"),
    "groups_offsets": (OFFSETS, "<i8"),
}
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
# The fields that a manifest lists.
STORED_FIELDS = frozenset({"hidden_states", "last_token", "attention", "edges"})
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


# No model is larger in any of L, D and H.
MAX_DIMENSION = 1 << 20
# L D: a compressed inner chunk holds at least one row of last_token, decoded at once.
MAX_ROW_VALUES = 1 << 24
_ATTRIBUTE_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_dtype": (None, *DTYPE_NAMES),
    "attention_dtype": (None, *DTYPE_NAMES),
    "attention": ATTENTION_MODES,
    "attention_layout": (None, *LAYOUT_NAMES.values()),
    "format_version": (FORMAT_VERSION,),
    "score_direction": (None, *DIRECTIONS),
}
_OPTION_VALUES: dict[str, tuple[str, ...]] = {
    "attention": ATTENTION_MODES,
    "dtype": ("float16", "keep"),
    "codec": CODECS,
}


@dataclass(frozen=True)
class Attributes:
    """`attributes.tracestore` of the root zarr.json. None: not known yet, because no
    source with that field has been committed; it is filled in later, never changed, but that
    attention_layout may go from causal to square, and that score_direction is that of the scores
    which replace all others."""

    num_layers: int | None = None
    hidden_dim: int | None = None
    num_heads: int | None = None
    hidden_dtype: str | None = None
    attention_dtype: str | None = None
    attention: str = "mean"
    attention_layout: str | None = None
    score_direction: str | None = None
    format_version: int = FORMAT_VERSION
    options: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return values | {"options": dict(sorted(self.options.items()))}

    @classmethod
    def from_json(cls, data: object) -> "Attributes":
        """Return the attributes in a JSON document; ValueError where they are not of this format."""
        if not isinstance(data, dict) or data.keys() != {f.name for f in fields(cls)}:
            raise ValueError("attributes: not those of this format")
        for name, allowed in _ATTRIBUTE_VALUES.items():
            if data[name] not in allowed or isinstance(data[name], bool | float):
                raise ValueError(f"attributes: {name}: found {data[name]!r:.40}")
        for name in ("num_layers", "hidden_dim", "num_heads"):
            if data[name] is not None and (type(data[name]) is not int or not 0 < data[name] <= MAX_DIMENSION):
                raise ValueError(f"attributes: {name}: found {data[name]!r:.40}")
        if (data["num_layers"] or 0) * (data["hidden_dim"] or 0) > MAX_ROW_VALUES:
            raise ValueError("attributes: num_layers times hidden_dim: more than a model has")
        options = data["options"]
        if not isinstance(options, dict) or options.keys() != _OPTION_VALUES.keys():
            raise ValueError("attributes: options: not those of this format")
        for name, allowed in _OPTION_VALUES.items():
            if options[name] not in allowed:
                raise ValueError(f"attributes: options: {name}: found {options[name]!r:.40}")
        if options["attention"] != data["attention"]:
            raise ValueError("attributes: options: another attention than the store's")
        return cls(**data)

    def with_values(self, **values: Any) -> "Attributes":
        return replace(self, **values)

    @property
    def allowed_layouts(self) -> int:
        """Which layouts a trace's attention may have: bit k for layout k."""
        found = {
            None: (),
            "causal": (LAYOUT_CAUSAL,),
            "square": (LAYOUT_CAUSAL, LAYOUT_SQUARE),
            "edges": (LAYOUT_EDGES,),
        }
        return sum(1 << layout for layout in (LAYOUT_NONE, *found[self.attention_layout]))

    @property
    def num_stored_heads(self) -> int:
        """H where every head is stored, else 1: rows of A values a layer."""
        return (self.num_heads or 1) if self.attention == "heads" else 1
