"""Names, dtypes and sizes of format version 1, which docs/format.md describes in prose."""

from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

import numpy as np

from tracestore._core import kernels
from tracestore.store.format.labels import DIRECTIONS

FORMAT_VERSION = 1

SEGMENT_SPLIT_BYTES = 1024 << 20
INNER_CHUNK_BYTES = 256 << 10
MIN_CODED_CHUNK_BYTES = 64 << 10

# NumPy has no bfloat16. Inside the package such arrays have this dtype, whose
# single field holds the raw bits; on disk and in public arrays they are uint16.
BFLOAT16 = np.dtype([("bfloat16", "<u2")])

DTYPE_NAMES = {"float16": np.dtype("<f2"), "bfloat16": BFLOAT16, "float32": np.dtype("<f4")}
_CODES = {"float16": kernels.F16, "bfloat16": kernels.BF16, "float32": kernels.F32, "float64": kernels.F64}

ANSWER_FIELDS = ("generated_answer_clean", "generated_answer", "generated_text")
# Optional texts of a trace, with one string array each.
TEXT_FIELDS = ("question", *ANSWER_FIELDS)
STRING_FIELDS = ("question_id", *TEXT_FIELDS, "extras")
# The large arrays of a segment, each a Zarr array of one shard file. Their dtypes; None is given by the
# store's attributes. A segment has those that one of its traces needs. Only they are compressed by --codec.
LARGE_ARRAYS: dict[str, str | None] = {
    "hidden_states": None,
    "last_token": None,
    "attention": None,
    "edge_index": "<i4",
    "edge_weight": None,
}
# The arrays in the file rows.zip of a segment by name: (length, dtype). The length is one per trace
# (ROWS), one more than that (OFFSETS), or any (VALUES). They are written in the order of this table.
ROWS, OFFSETS, VALUES = "rows", "offsets", "values"
ROW_ARRAYS: dict[str, tuple[str, str]] = {
    "num_tokens": (ROWS, "<i4"),
    "sample": (ROWS, "<i4"),
    "source_position": (ROWS, "<i4"),
    "prompt_length": (ROWS, "<i4"),
    "attention_layout": (ROWS, "|u1"),
    "last_token_row": (ROWS, "<i4"),
    "num_nonfinite": (ROWS, "<i8"),
    "fields": (ROWS, "<u4"),
    "edges_reversed": (ROWS, "|u1"),
    "graph_crc32c": (ROWS, "<u4"),
    "sequence_crc32c": (ROWS, "<u4"),
    "edge_ptr": (VALUES, "<i8"),
    "tokens": (VALUES, "<i4"),
    "tokens_offsets": (OFFSETS, "<i8"),
    "tokens_decoded": (VALUES, "|u1"),
    "tokens_decoded_offsets": (VALUES, "<i8"),
    "tokens_decoded_ptr": (OFFSETS, "<i8"),
    **dict.fromkeys(STRING_FIELDS, (VALUES, "|u1")),
    **{f"{name}_offsets": (OFFSETS, "<i8") for name in STRING_FIELDS},
}
OPTIONAL_ROW_ARRAYS = frozenset({"edge_ptr"})
ROW_DTYPES = {name: dtype for name, (_, dtype) in ROW_ARRAYS.items()}
COLUMN_DTYPES = {"scores": "<f8", "labels": "<f8", "groups": "|u1", "groups_offsets": "<i8"}
CODECS = ("none", "blosc-zstd", "blosc-lz4", "zstd")
ATTENTION_MODES = ("mean", "heads", "none")

# Bits of the segment array `fields`: the fields that the source trace had.
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
            *TEXT_FIELDS,
            "prompt_length",
            "label",
        )
    )
}

LAYOUT_NONE, LAYOUT_CAUSAL, LAYOUT_SQUARE, LAYOUT_EDGES = range(4)
# Values of the list `fields` of a manifest.
STORED_FIELDS = frozenset({"hidden_states", "last_token", "attention", "edges"})
LAYOUT_NAMES = {LAYOUT_CAUSAL: "causal", LAYOUT_SQUARE: "square", LAYOUT_EDGES: "edges"}


@lru_cache(maxsize=64)  # NumPy takes microseconds to build a name, and this runs for every layer.
def dtype_name(dtype: np.dtype) -> str:
    """Return "float16", "bfloat16", "float32" or "float64"; raise ValueError for any other dtype."""
    if dtype == BFLOAT16:
        return "bfloat16"
    name = dtype.newbyteorder("=").name
    if name not in _CODES:
        raise ValueError(name)
    return name


def dtype_code(name: str) -> int:
    """Return the C core's code of a dtype name."""
    return _CODES[name]


def storage_dtype(name: str) -> np.dtype:
    """Return the dtype on disk, which is uint16 for bfloat16."""
    return np.dtype("<u2") if name == "bfloat16" else DTYPE_NAMES[name]


def as_float32(array: np.ndarray, name: str) -> np.ndarray:
    """Return a stored array, whose dtype is called `name`, as float32; bfloat16 is stored as raw bits."""
    if name == "bfloat16":
        return (array.astype("<u4") << 16).view("<f4")
    return array.astype("<f4", copy=False)


def num_pairs(num_tokens: int, layout: int) -> int:
    """Return the number of stored attention values per layer and head."""
    if layout == LAYOUT_CAUSAL:
        return num_tokens * (num_tokens + 1) // 2
    return num_tokens * num_tokens if layout == LAYOUT_SQUARE else 0


# Upper limit for each of L, D and H; no model comes near it.
MAX_DIMENSION = 1 << 20
# Upper limit for S: offsets of the attention of a segment then fit into 64 bits.
MAX_TOKENS = 1 << 20
# Upper limit for L * D: a compressed inner chunk holds at least one row of last_token and is decoded at once.
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
    """The attributes `tracestore` of the root zarr.json.

    None means "not known yet": no source with that field has been committed. A known value never
    changes, with two exceptions: `attention_layout` may change from causal to square, and
    `score_direction` changes when new scores replace all old ones.
    """

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
        """Return the attributes as a JSON object."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return values | {"options": dict(sorted(self.options.items()))}

    @classmethod
    def from_json(cls, data: object) -> "Attributes":
        """Return the attributes in a JSON object; raise ValueError if they are not valid in this format."""
        if not isinstance(data, dict) or data.keys() != {f.name for f in fields(cls)}:
            raise ValueError("attributes: the keys are not those of this format")
        for name, allowed in _ATTRIBUTE_VALUES.items():
            if data[name] not in allowed or isinstance(data[name], bool | float):
                raise ValueError(f"attributes: {name}: found {data[name]!r:.40}")
        for name in ("num_layers", "hidden_dim", "num_heads"):
            if data[name] is not None and (type(data[name]) is not int or not 0 < data[name] <= MAX_DIMENSION):
                raise ValueError(f"attributes: {name}: found {data[name]!r:.40}")
        if (data["num_layers"] or 0) * (data["hidden_dim"] or 0) > MAX_ROW_VALUES:
            raise ValueError(f"attributes: num_layers * hidden_dim exceeds {MAX_ROW_VALUES}")
        options = data["options"]
        if not isinstance(options, dict) or options.keys() != _OPTION_VALUES.keys():
            raise ValueError("attributes: options: the keys are not those of this format")
        for name, allowed in _OPTION_VALUES.items():
            if options[name] not in allowed:
                raise ValueError(f"attributes: options: {name}: found {options[name]!r:.40}")
        if options["attention"] != data["attention"]:
            raise ValueError("attributes: options: attention differs from the store's")
        return cls(**data)

    @property
    def allowed_layouts(self) -> int:
        """Bit mask of the layouts that the attention of a trace may have; bit k stands for layout k."""
        allowed = {
            None: (),
            "causal": (LAYOUT_CAUSAL,),
            "square": (LAYOUT_CAUSAL, LAYOUT_SQUARE),
            "edges": (LAYOUT_EDGES,),
        }
        return sum(1 << layout for layout in (LAYOUT_NONE, *allowed[self.attention_layout]))

    @property
    def num_stored_heads(self) -> int:
        """Number of attention matrices stored per layer: H if every head is stored, otherwise 1."""
        return (self.num_heads or 1) if self.attention == "heads" else 1
