"""Names, dtypes and sizes of format version 1, which docs/format.md describes in prose.

One module of over 400 lines: the tables of the format and the checks of what a file holds of them are read together.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from tracestore import extras
from tracestore._core import kernels
from tracestore.errors import UsageError
from tracestore.store.format import labels
from tracestore.store.format.labels import ScoreField
from tracestore.store.format.lens_attribute import LensField
from tracestore.store.format.provenance import MAX_PROVENANCES, Provenance

FORMAT_VERSION = 1

SEGMENT_SPLIT_BYTES = 1024 << 20
INNER_CHUNK_BYTES = 256 << 10
MIN_CODED_CHUNK_BYTES = 64 << 10
# Upper limit for each of L, D and H; no model comes near it.
MAX_DIMENSION = 1 << 20
# Upper limit for S: offsets of the attention of a segment then fit into 64 bits.
MAX_TOKENS = 1 << 20
# Upper limit for L * D: a compressed inner chunk holds at least one row of last_token and is decoded at once.
MAX_ROW_VALUES = 1 << 24

# NumPy has no bfloat16. Arrays of a source have this dtype, whose single field holds the raw bits; stored arrays are
# uint16, and public arrays are what as_values() returns.
BFLOAT16 = np.dtype([("bfloat16", "<u2")])

DTYPE_NAMES = {"float16": np.dtype("<f2"), "bfloat16": BFLOAT16, "float32": np.dtype("<f4")}
_CODES = {"float16": kernels.F16, "bfloat16": kernels.BF16, "float32": kernels.F32, "float64": kernels.F64}

ANSWER_FIELDS = ("generated_answer_clean", "generated_answer", "generated_text")
# Optional texts of a trace, with one string array each.
TEXT_FIELDS = ("question", *ANSWER_FIELDS)
STRING_FIELDS = ("question_id", *TEXT_FIELDS, "extras")
# The large arrays of a segment, each a Zarr array of one shard file; Attributes.array_type() has their dtypes. A
# segment has those that one of its traces needs. Only they are compressed by --codec.
LARGE_ARRAYS = ("hidden_states", "last_token", "attention", "edge_index", "edge_weight", "unembedding")


class OptionalField(NamedTuple):
    """A field that few traces have. Its arrays in rows.zip are absent from a segment where no row has it.

    Attributes
    ----------
    shape : str
        PER_TOKEN or TOP_K: numbers per token; PER_TRACE: one number or, with `parts`, several; JSON: a
        list of objects.
    dtype : str
        Dtype of the stored values.
    doc : str
        Meaning, as the documentation of the attribute of a trace.
    fill : float
        Stored where the value is unknown.
    maximum : float
        Largest valid number.
    parts : tuple[str, ...]
        Names of the arrays if the field has one number in each of several.
    minimum : float or None
        Smallest valid number; None: `fill`, or any if that is NaN.
    title : str
        Name of a value per token on pages.
    """

    shape: str
    dtype: str
    doc: str
    fill: float = math.nan
    maximum: float = math.inf
    parts: tuple[str, ...] = ()
    minimum: float | None = None
    title: str = ""

    def arrays(self, name: str) -> dict[str, tuple[str, str]]:
        """Return the entries of ROW_ARRAYS for the field called `name`."""
        if self.shape == PER_TRACE:
            return dict.fromkeys(self.parts or (name,), (ROWS, self.dtype))
        return {name: (VALUES, self.dtype), f"{name}_offsets": (OFFSETS, "<i8")}

    def known(self, values: Sequence[float]) -> Any:
        """Return the stored numbers of a trace as a number or tuple; None if all of them are unknown."""
        if all(v == self.fill or v != v for v in values):
            return None
        return tuple(values) if self.parts else values[0]

    def shown(self, values: np.ndarray) -> np.ndarray:
        """Return the values for people, float64: NaN where a number that is no value stands for unknown."""
        return np.where(values == self.fill, np.nan, values) if self.fill < 0 else values.astype("f8")


# T: number of tokens; K: a number of most likely tokens, the same for all fields of a trace.
PER_TOKEN, TOP_K, PER_TRACE, JSON = "(T,)", "(T, K)", "()", "JSON"
ROWS, OFFSETS, VALUES = "rows", "offsets", "values"
# A log-probability is at most 0, and an entropy at least 0, up to rounding; the largest number of float32.
_ROUNDING, _LARGEST = 1e-3, 3.4028235e38
# Fields with one value, or K values, per token.
TOKEN_FIELDS: dict[str, OptionalField] = {
    "token_logprob": OptionalField(
        PER_TOKEN,
        "<f4",
        "Log-probability (T,) float32 of each token given the tokens before it; NaN: unknown.",
        maximum=_ROUNDING,
        title="log-probability",
    ),
    "token_entropy": OptionalField(
        PER_TOKEN,
        "<f4",
        "Entropy (T,) float32 in nats of the distribution of each token given the tokens before it; NaN: unknown.",
        maximum=_LARGEST,
        minimum=-_ROUNDING,
        title="entropy",
    ),
    "top_ids": OptionalField(
        TOP_K, "<i4", "Ids (T, K) int32 of the most likely tokens at each position; -1: none.", -1, 2**31 - 1
    ),
    "top_logprobs": OptionalField(
        TOP_K, "<f4", "Log-probabilities (T, K) float32 of `top_ids`; NaN: none.", maximum=_ROUNDING
    ),
    "generated_mask": OptionalField(
        PER_TOKEN, "|u1", "Mask (T,) uint8; 1: the model generated the token.", 0, 1, title="generated by the model"
    ),
    "special_mask": OptionalField(
        PER_TOKEN, "|u1", "Mask (T,) uint8; 1: a special token.", 0, 1, title="special token"
    ),
    "token_label": OptionalField(
        PER_TOKEN,
        "|i1",
        "Label (T,) int8 of each token; 1: hallucinated, 0: supported, -1: unknown.",
        -1,
        1,
        title="label of the token",
    ),
}
PER_TOKEN_FIELDS = {name: field for name, field in TOKEN_FIELDS.items() if field.shape == PER_TOKEN}
OPTIONAL_FIELDS: dict[str, OptionalField] = {
    **TOKEN_FIELDS,
    "answer_span": OptionalField(
        PER_TRACE,
        "<i4",
        "First token of the answer and the token after its last one; -1: unknown.",
        -1,
        MAX_TOKENS + 1,
        ("answer_begin", "answer_end"),
    ),
    "temperature": OptionalField(PER_TRACE, "<f4", "Sampling temperature of the answer.", maximum=_LARGEST, minimum=0),
    "seed": OptionalField(PER_TRACE, "<i8", "Seed of the random generator that sampled the answer.", -1, 2**63 - 1),
    "spans": OptionalField(
        JSON, "|u1", "Character spans of the answer: dicts with start, end (exclusive), type and other keys."
    ),
}
OPTIONAL_ARRAYS = {name: field.arrays(name) for name, field in OPTIONAL_FIELDS.items()}
# The small arrays of the segment that the attribute `lens` names.
LENS_ARRAYS = dict.fromkeys(("final_norm_weight", "final_norm_bias", "unembedding_bias"), (VALUES, "<f4"))
# Large array -> the small array with the CRC-32C of each of its layers, row after row. A segment has it if the large
# array is not compressed and its layers have this many bytes on average.
LAYER_CRCS = {name: f"{name}_crc32c" for name in ("hidden_states", "attention", "edge_index", "edge_weight")}
MIN_LAYER_BYTES = 16 << 10
# The arrays in the file rows.zip of a segment by name: (length, dtype). The length is one per trace
# (ROWS), one more than that (OFFSETS), or any (VALUES). They are written in the order of this table.
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
    **{name: array for arrays in OPTIONAL_ARRAYS.values() for name, array in arrays.items()},
    **LENS_ARRAYS,
    **dict.fromkeys(LAYER_CRCS.values(), (VALUES, "<u4")),
}
OPTIONAL_ROW_ARRAYS = frozenset(
    {"edge_ptr", *LENS_ARRAYS, *LAYER_CRCS.values(), *(name for arrays in OPTIONAL_ARRAYS.values() for name in arrays)}
)
ROW_DTYPES = {name: dtype for name, (_, dtype) in ROW_ARRAYS.items()}
COLUMN_DTYPES = {"labels": "<f8", "groups": "|u1", "groups_offsets": "<i8"}
# A named score is the column with this prefix and its name.
SCORE_PREFIX, SCORE_DTYPE = "score_", "<f8"
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


def as_values(array: np.ndarray, name: str) -> np.ndarray:
    """Return a stored array, whose dtype is called `name`, as numbers: bfloat16 of ml_dtypes or, without it, float32."""
    dtype = extras.bfloat16_dtype() if name == "bfloat16" else array.dtype
    return as_float32(array, name) if dtype is None else array.view(dtype)


def num_pairs(num_tokens: int, layout: int) -> int:
    """Return the number of stored attention values per layer and head."""
    if layout == LAYOUT_CAUSAL:
        return num_tokens * (num_tokens + 1) // 2
    return num_tokens * num_tokens if layout == LAYOUT_SQUARE else 0


_ATTRIBUTE_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_dtype": (None, *DTYPE_NAMES),
    "attention_dtype": (None, *DTYPE_NAMES),
    "attention": ATTENTION_MODES,
    "attention_layout": (None, *LAYOUT_NAMES.values()),
    "format_version": (FORMAT_VERSION,),
}
OPTION_VALUES: dict[str, tuple[Any, ...]] = {
    "attention": ATTENTION_MODES,
    "dtype": ("float16", "keep"),
    "codec": CODECS,
}


# Limits, because a store may come from an untrusted source.
MAX_LAYOUTS, MAX_LAYOUT_CHARACTERS = 64, 1 << 14
_OPTIONAL_LISTS = {"layouts", "open_sources"}


@dataclass(frozen=True)
class Attributes:
    """The attributes `tracestore` of the root zarr.json.

    None means "not known yet": no source with that field has been committed. A known value never
    changes, except that `attention_layout` may change from causal to square. `scores` describes the
    named scores; `default_score` is the one that is used where none is chosen. `lens` names the segment
    that holds the final norm and the unembedding matrix of the language model. `layouts` holds the layouts that were
    stated for sources, as TOML; files that are added later are read by them. `open_sources` holds the first number and
    the number after the last one of sources whose labels and scores are not all stored: the conversion that adds them
    has not ended. They are read again.
    """

    num_layers: int | None = None
    hidden_dim: int | None = None
    num_heads: int | None = None
    hidden_dtype: str | None = None
    attention_dtype: str | None = None
    attention: str = "mean"
    attention_layout: str | None = None
    scores: dict[str, ScoreField] = field(default_factory=dict)
    default_score: str | None = None
    format_version: int = FORMAT_VERSION
    options: dict[str, Any] = field(default_factory=dict)
    provenance: tuple[Provenance, ...] = ()
    lens: LensField | None = None
    layouts: tuple[str, ...] = ()
    open_sources: tuple[tuple[int, int], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the attributes as a JSON object, without `layouts` and `open_sources` where there are none."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= {name: list(found) for name in _OPTIONAL_LISTS if (found := values.pop(name))}
        scores = {name: score.to_json() for name, score in sorted(self.scores.items())}
        provenance = [p.to_json() for p in self.provenance]
        options = dict(sorted(self.options.items()))
        lens = None if self.lens is None else asdict(self.lens)
        return values | {"options": options, "scores": scores, "provenance": provenance, "lens": lens}

    def open_numbers(self) -> list[int]:
        """Return the numbers of the open sources."""
        return [number for first, end in self.open_sources for number in range(first, end)]

    @classmethod
    def from_json(cls, data: object) -> "Attributes":
        """Return the attributes in a JSON object; raise ValueError if they are not valid in this format."""
        if not isinstance(data, dict) or data.keys() | _OPTIONAL_LISTS != {f.name for f in fields(cls)}:
            raise ValueError("attributes: the keys are not those of this format")
        layouts, open_sources = _layouts(data.get("layouts", [])), _ranges(data.get("open_sources", []))
        _require_values("attributes", data, _ATTRIBUTE_VALUES)
        for name in ("num_layers", "hidden_dim", "num_heads"):
            if data[name] is not None and (type(data[name]) is not int or not 0 < data[name] <= MAX_DIMENSION):
                raise ValueError(f"attributes: {name}: found {data[name]!r:.40}")
        if (data["num_layers"] or 0) * (data["hidden_dim"] or 0) > MAX_ROW_VALUES:
            raise ValueError(f"attributes: num_layers * hidden_dim exceeds {MAX_ROW_VALUES}")
        options = data["options"]
        if not isinstance(options, dict) or options.keys() != OPTION_VALUES.keys():
            raise ValueError("attributes: options: the keys are not those of this format")
        _require_values("attributes: options", options, OPTION_VALUES)
        if options["attention"] != data["attention"]:
            raise ValueError("attributes: options: attention differs from the store's")
        scores = labels.score_fields(data["scores"])
        if data["default_score"] not in (scores or (None,)):
            raise ValueError(f"attributes: default_score: found {data['default_score']!r:.40}")
        provenance = _provenances(data["provenance"], data["num_layers"])
        lens = LensField.from_json(data["lens"], len(provenance))
        if lens is not None and data["hidden_dim"] is None:
            raise ValueError("attributes: lens: hidden_dim is null")
        lists = {"layouts": layouts, "open_sources": open_sources}
        return cls(**data | {"scores": scores, "provenance": provenance, "lens": lens} | lists)

    def with_score(self, name: str, field: ScoreField, *, is_default: bool = False) -> "Attributes":
        """Return the attributes with a named score added; the first one is the default in any case."""
        scores = self.scores | {name: field}
        if not labels.is_score_name(name) or len(scores) > labels.MAX_SCORE_NAMES:
            expected = f'{labels.MAX_SCORE_NAMES} names of letters, digits, "_", "-" and "."'
            raise UsageError(f"found the score name {name!r}, expected at most {expected}")
        default = name if is_default or not self.scores else self.default_score
        return replace(self, scores=scores, default_score=default)

    def with_provenance(self, provenance: Provenance | None) -> tuple["Attributes", int]:
        """Return the attributes of a store that has this provenance, and its position; -1 for None.

        Raises
        ------
        UsageError
            If the store has too many provenances.
        """
        if provenance is None:
            return self, -1
        if provenance in self.provenance:
            return self, self.provenance.index(provenance)
        if len(self.provenance) == MAX_PROVENANCES:
            raise UsageError(f"a store can hold {MAX_PROVENANCES} provenances; write the traces to another store")
        return replace(self, provenance=(*self.provenance, provenance)), len(self.provenance)

    def with_layout(self, text: str) -> "Attributes":
        """Return the attributes with this layout as the newest; UsageError if a store would have too many."""
        others = tuple(layout for layout in self.layouts if layout != text)
        if len(others) == MAX_LAYOUTS or len(text) > MAX_LAYOUT_CHARACTERS:
            raise UsageError(
                f"a store keeps {MAX_LAYOUTS} layouts of {MAX_LAYOUT_CHARACTERS:,} characters; write the traces to another store"
            )
        return replace(self, layouts=(*others, text))

    def array_type(self, name: str) -> tuple[np.dtype, tuple[int, ...], bool]:
        """Return the dtype on disk of a large array, its shape after axis 0, and whether it holds bfloat16.

        ValueError if the store has no such array yet.
        """
        if name == "edge_index":
            return np.dtype("<i4"), (2,), False
        stored: dict[str, tuple[str | None, tuple[int | None, ...]]] = {
            "hidden_states": (self.hidden_dtype, (self.hidden_dim,)),
            "last_token": (self.hidden_dtype, (self.num_layers, self.hidden_dim)),
            "attention": (self.attention_dtype, ()),
            "edge_weight": (self.attention_dtype, ()),
            "unembedding": (self.lens.dtype if self.lens is not None else None, (self.hidden_dim,)),
        }
        dtype, columns = stored[name]
        known = tuple(extent for extent in columns if extent is not None)
        if dtype is None or len(known) < len(columns):
            raise ValueError("the attributes of the store define no such array")
        return storage_dtype(dtype), known, dtype == "bfloat16"

    @cached_property
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


def _layouts(data: object) -> tuple[str, ...]:
    """Return the layouts of a JSON value; ValueError if it is none of them."""
    texts = data if isinstance(data, list) and len(data) <= MAX_LAYOUTS else [None]
    if not all(isinstance(t, str) and 0 < len(t) <= MAX_LAYOUT_CHARACTERS for t in texts) or len(set(texts)) < len(
        texts
    ):
        raise ValueError("attributes: layouts: expected different texts")
    return tuple(texts)


def _ranges(data: object) -> tuple[tuple[int, int], ...]:
    """Return the ranges of a JSON value; ValueError if it is none of them, or they are not in order."""
    ranges: list[Any] = data if isinstance(data, list) else [None]
    if not all(isinstance(r, list) and len(r) == 2 and all(type(n) is int for n in r) for r in ranges):
        raise ValueError("attributes: open_sources: expected pairs of numbers")
    numbers = [0, *(number for pair in ranges for number in pair)]
    if any(a > b for a, b in itertools.pairwise(numbers)) or any(a == b for a, b in ranges):
        raise ValueError("attributes: open_sources: the ranges are not in order")
    return tuple((a, b) for a, b in ranges)


def _require_values(where: str, data: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    for name, values in allowed.items():
        if data[name] not in values or isinstance(data[name], bool | float):
            raise ValueError(f"{where}: {name}: found {data[name]!r:.40}")


def _provenances(data: object, num_layers: int | None) -> tuple[Provenance, ...]:
    """Return the provenances in the attribute `provenance`; raise ValueError if they are not valid in this format."""
    if not isinstance(data, list) or len(data) > MAX_PROVENANCES:
        raise ValueError(f"attributes: provenance: found {data!r:.40}, expected at most {MAX_PROVENANCES} objects")
    found = tuple(map(Provenance.from_json, data))
    if [p.to_json() for p in found] != data:
        raise ValueError("attributes: provenance: the keys are not those of this format")
    if any(p in found[:k] for k, p in enumerate(found)):
        raise ValueError("attributes: provenance: found an entry twice")
    for ids in (p.layer_ids for p in found):
        if ids is not None and num_layers is not None and len(ids) != num_layers:
            raise ValueError(f"attributes: provenance: found {len(ids)} layer_ids, expected {num_layers}")
    return found
