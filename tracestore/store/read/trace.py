"""One trace of an open store."""

import math
from copy import copy
from dataclasses import dataclass, fields
from operator import methodcaller
from typing import Any

import numpy as np

from tracestore._core import kernels
from tracestore.errors import MissingFieldError
from tracestore.store.format import schema
from tracestore.store.format.provenance import Provenance
from tracestore.store.read.index import TraceRow
from tracestore.store.read.internals import StoreInternals
from tracestore.store.read.segment import SegmentReader
from tracestore.store.trace_fields import PackedEdges, TraceFields, dense_attention


class OptionalFields(TraceFields):
    """The fields of schema.OPTIONAL_FIELDS as attributes; each is None if the trace lacks it."""

    token_logprob: np.ndarray | None
    token_entropy: np.ndarray | None
    top_ids: np.ndarray | None
    top_logprobs: np.ndarray | None
    generated_mask: np.ndarray | None
    special_mask: np.ndarray | None
    token_label: np.ndarray | None
    answer_span: tuple[int, int] | None
    temperature: float | None
    seed: int | None
    spans: list[dict[str, Any]] | None


for _name, _field in schema.OPTIONAL_FIELDS.items():
    setattr(OptionalFields, _name, property(methodcaller("optional", _name), doc=_field.doc))


@dataclass(frozen=True)
class DetachedTrace(OptionalFields):
    """A trace in memory of its own, as Trace.copy returns it.

    Shapes and dtypes are those of Trace. A field that the trace lacks is None; a missing score or label is NaN.
    """

    index: int
    question_id: str
    sample: int
    source: tuple[str, int]
    provenance: Provenance | None
    score: float
    scores: dict[str, float]
    label: float
    group: str
    num_tokens: int
    has_nonfinite: bool
    prompt_length: int | None
    question: str | None
    answer: str | None
    extras: dict[str, Any]
    tokens: np.ndarray | None
    tokens_decoded: list[str] | None
    hidden_states_bits: np.ndarray  # None if the trace lacks them, as attention_packed_bits
    last_token_bits: np.ndarray
    attention_layout: str | None
    attention_packed_bits: "np.ndarray | PackedEdges"
    hidden_dtype: str
    attention_dtype: str
    optional_fields: dict[str, Any]

    def optional(self, name: str) -> Any:
        """Return a field of schema.OPTIONAL_FIELDS, or None."""
        return self.optional_fields.get(name)

    @property
    def attention_bits(self) -> np.ndarray:
        """Attention as in Trace.attention_bits. MissingFieldError if the trace has none."""
        if self.attention_layout is None:
            raise MissingFieldError(f"trace {self.index} ({self.question_id}) has no attention")
        layout = next(code for code, name in schema.LAYOUT_NAMES.items() if name == self.attention_layout)
        packed, where = self.attention_packed_bits, f"trace {self.index}"
        return dense_attention(packed, layout, len(self.last_token_bits), self.num_tokens, where)


class Trace(OptionalFields):
    """One answer of the model to one question. Fields are read when they are accessed.

    A field that the trace lacks raises MissingFieldError (arrays) or is None; a missing `score` or `label` is NaN.
    Fields are also found by name: ``trace["hidden_states"]``, `keys`.

    Examples
    --------
    >>> import tracestore
    >>> trace = tracestore.open("store.zarr")[3]
    >>> trace
    Trace(3, question_id='q3', num_tokens=4)
    >>> trace.hidden_states.shape, trace.attention.shape, trace["score"]
    ((3, 4, 8), (3, 4, 4), 1.0)

    Notes
    -----
    Arrays of an uncompressed store are read-only views of the mapped file and keep the map alive. Reading such a
    view after the file was truncated ends the process (SIGBUS); `copy()`, `attention` and texts raise
    CorruptStoreError instead. Stored bfloat16 values have dtype ml_dtypes.bfloat16 if the package ml_dtypes is
    installed, and are float32 copies otherwise; names that end with ``_bits`` give the raw bits, uint16.
    """

    def __init__(self, store: StoreInternals, index: int, *, private: bool = False) -> None:
        self._store = store
        self.index = index
        self._private = private  # Arrays are returned in memory of their own.
        self._row: TraceRow = store.index.row(index)

    def _repr_html_(self) -> str:
        from tracestore.store.html import trace_html  # in notebooks only

        return trace_html(self)

    def __repr__(self) -> str:
        return f"Trace({self.index}, question_id={self.question_id!r}, num_tokens={self.num_tokens})"

    @property
    def _primary_location(self) -> tuple[SegmentReader, int]:
        segment, row = self._row.primary_location
        return self._store.segment(segment), row

    def _graph(self, what: str) -> SegmentReader:
        if self._row.graph_segment < 0:
            raise MissingFieldError(
                f"trace {self.index} ({self.question_id}) has no {what}: its source holds last tokens only"
            )
        return self._store.segment(self._row.graph_segment)

    def _has(self, name: str) -> bool:
        segment, row = self._primary_location
        return bool(segment.scalar("fields", row) & schema.FIELD_BITS[name])

    def _rows(self, segment: SegmentReader, name: str, begin: int, end: int) -> np.ndarray:
        array = segment.array(name)
        return array.copy(begin, end) if self._private else array.rows(begin, end)

    def copy(self) -> "DetachedTrace":
        """Copy every field into memory of its own. The copy outlives the store.

        CorruptStoreError if a file was truncated meanwhile.
        """
        own = self._in_own_memory()
        arrays = {"hidden_states": "hidden_states_bits", "attention": "attention_packed_bits"}
        missing = [bits for name, bits in arrays.items() if not self._has_large(name)]
        values = {f.name: getattr(own, f.name) for f in fields(DetachedTrace) if f.name not in missing}
        return DetachedTrace(**values | dict.fromkeys(missing))

    def __reduce__(self) -> tuple[Any, ...]:
        return copy, (self.copy(),)  # it is pickled as its copy

    def _in_own_memory(self) -> "Trace":
        return self if self._private else Trace(self._store, self.index, private=True)

    # Keys and values

    @property
    def question_id(self) -> str:
        """The id of the question."""
        return self._store.index.question_id(self.index)

    @property
    def sample(self) -> int:
        """Number of this answer among the answers to the question, from 0."""
        return self._row.sample

    @property
    def score(self) -> float:
        """The default score or the one chosen at opening, NaN if missing. A missing score never becomes a label."""
        return float(self._store.scores[self.index])

    @property
    def scores(self) -> dict[str, float]:
        """The named scores that the trace has."""
        return self._store.columns.scores_of(self.index)

    @property
    def label(self) -> float:
        """The label that the source contained, NaN if missing."""
        return float(self._store.columns.labels[self.index])

    @property
    def group(self) -> str:
        """The group that the split keeps together, "" if missing."""
        return self._store.columns.group(self.index)

    @property
    def source(self) -> tuple[str, int]:
        """Path of the source file below SRC, and the position of the trace in it, from 0."""
        return self._store.index.source(self._row.source).path, self._row.source_position

    @property
    def provenance(self) -> Provenance | None:
        """Model, layers and prompt that the trace comes from, as its first source gives them; None if unknown."""
        return self._store.index.source(self._row.source).provenance

    @property
    def num_tokens(self) -> int:
        """S; 0 if the source holds last tokens only."""
        return self._row.num_tokens if self._row.graph_segment >= 0 else 0

    @property
    def has_nonfinite(self) -> bool:
        """True if the source had NaN or infinite values in its arrays."""
        return bool(self._row.nonfinite)

    # Arrays

    @property
    def hidden_dtype(self) -> str:
        """Stored dtype of hidden_states and last_token: float16, float32 or bfloat16."""
        return self._store.attributes.hidden_dtype or "float16"

    @property
    def attention_dtype(self) -> str:
        """Stored dtype of the attention: float16, float32 or bfloat16."""
        return self._store.attributes.attention_dtype or "float16"

    @property
    def hidden_states_bits(self) -> np.ndarray:
        """The same as hidden_states, with bfloat16 as its raw bits, uint16."""
        segment = self._graph("hidden states of all tokens")
        num_layers, num_tokens = self._store.num_layers, self._row.num_tokens
        begin = segment.begin("hidden_states", self._row.graph_row)
        rows = self._rows(segment, "hidden_states", begin, begin + num_layers * num_tokens)
        return rows.reshape(num_layers, num_tokens, -1)

    @property
    def last_token_bits(self) -> np.ndarray:
        """The same as last_token, with bfloat16 as its raw bits, uint16."""
        if self._row.sequence_segment < 0:
            return self.hidden_states_bits[:, -1]
        segment = self._store.segment(self._row.sequence_segment)
        begin = segment.begin("last_token", self._row.sequence_row)
        found: np.ndarray = self._rows(segment, "last_token", begin, begin + 1)[0]
        return found

    @property
    def attention_layout(self) -> str | None:
        """causal, square or edges; None if no attention is stored."""
        return schema.LAYOUT_NAMES.get(self._row.layout) if self._row.graph_segment >= 0 else None

    @property
    def has_reversed_edges(self) -> bool:
        """True if the edges of the source ran from the attending token i to j. Stored edges run from j to i."""
        return bool(self._graph("edges").scalar("edges_reversed", self._row.graph_row))

    @property
    def attention_packed_bits(self) -> np.ndarray | PackedEdges:
        """The same as attention_packed, with bfloat16 as its raw bits, uint16."""
        return self._packed(0, self._store.num_layers)

    def _packed(self, layer: int, num_layers: int) -> np.ndarray | PackedEdges:
        """Return the stored attention of some layers."""
        segment = self._graph("attention")
        row, store = self._row, self._store
        if row.layout == schema.LAYOUT_NONE:
            raise MissingFieldError(f"trace {self.index} ({self.question_id}) has no attention: it was not stored")
        if row.layout == schema.LAYOUT_EDGES:
            begin = segment.begin("edges", row.graph_row) + layer
            return PackedEdges(*segment.edges(begin, num_layers, row.num_tokens, self._private))
        heads, pairs = store.num_stored_heads, schema.num_pairs(row.num_tokens, row.layout)
        begin = segment.begin("attention", row.graph_row) + layer * heads * pairs
        values = self._rows(segment, "attention", begin, begin + num_layers * heads * pairs)
        shape = (num_layers, heads, pairs) if store.attributes.attention == "heads" else (num_layers, pairs)
        return values.reshape(shape)

    @property
    def attention_bits(self) -> np.ndarray:
        """The same as attention, with bfloat16 as its raw bits, uint16."""
        # The kernel reads the map under the SIGBUS guard; numpy needs a copy.
        kernel_reads = self._row.layout == schema.LAYOUT_CAUSAL and not self._private
        trace = self if kernel_reads else self._in_own_memory()
        dense = trace._dense(0, self._store.num_layers)
        if kernel_reads:
            self._graph("attention").array("attention").check_intact()
        return dense

    def _dense(self, layer: int, num_layers: int) -> np.ndarray:
        packed, where = self._packed(layer, num_layers), f"trace {self.index}"
        return dense_attention(packed, self._row.layout, num_layers, self._row.num_tokens, where)

    def attention_layer(self, layer: int) -> np.ndarray:
        """Return the dense attention of one layer, in memory of its own. UsageError if the store has no such layer.

        Parameters
        ----------
        layer : int
            Position of the layer in the store, 0 to L - 1; negative values count from the last layer.

        Returns
        -------
        np.ndarray
            (S, S), or (H, S, S) if every head is stored; bfloat16 as in hidden_states.
        """
        matrices: np.ndarray = self._in_own_memory()._dense(self._store.layer_number(layer), 1)[0]
        return schema.as_values(matrices, self.attention_dtype)

    @property
    def attention_mean(self) -> np.ndarray:
        """Head-averaged attention (L, A) float16, as stored or averaged on access.

        MissingFieldError for a store of edges.
        """
        packed = self.attention_packed_bits
        if isinstance(packed, PackedEdges):
            raise MissingFieldError(f"trace {self.index} ({self.question_id}) has edges, no dense attention")
        if packed.ndim == 2:
            return packed
        code = schema.dtype_code(self._store.attributes.attention_dtype or "float16")
        out = np.empty((packed.shape[0], packed.shape[2]), "<f2")
        for layer in range(len(packed)):
            source = packed[layer].reshape(-1).view("u1")
            kernels.mean_rows(source, code, packed.shape[1], packed.shape[2], out[layer].view("u1"))
        self._graph("attention").array("attention").check_intact()
        return out

    # Tokens and texts

    @property
    def tokens(self) -> np.ndarray | None:
        """Token ids (T,) int32, or None.

        Token i has the hidden states ``hidden_states[:, i]``. T is S, or S + 1 if the model generated a last
        token that it did not read.
        """
        segment, row = self._primary_location
        return segment.tokens(row) if self._has("tokens") else None

    @property
    def tokens_decoded(self) -> list[str] | None:
        """The text of each of the T tokens, or None."""
        segment, row = self._primary_location
        return segment.tokens_decoded(row) if self._has("tokens_decoded") else None

    def text(self, name: str) -> str | None:
        """Return a text, or None if the trace lacks it.

        Parameters
        ----------
        name : str
            A name of schema.TEXT_FIELDS: question, generated_answer_clean, generated_answer or generated_text.
        """
        segment, row = self._primary_location
        return segment.string(name, row) if self._has(name) else None

    @property
    def question(self) -> str | None:
        """The text of the question, or None."""
        return self.text("question")

    @property
    def answer(self) -> str | None:
        """generated_answer_clean, else generated_answer, else generated_text, else None."""
        return next((t for t in map(self.text, schema.ANSWER_FIELDS) if t is not None), None)

    @property
    def prompt_length(self) -> int | None:
        """Number of tokens of the prompt, or None."""
        segment, row = self._primary_location
        value = segment.scalar("prompt_length", row)
        return None if value < 0 else value

    @property
    def extras(self) -> dict[str, Any]:
        """Fields of the source without an array of their own."""
        segment, row = self._primary_location
        return segment.extras(row)

    def optional(self, name: str) -> Any:
        """Return an optional field, or None if the trace lacks it.

        Parameters
        ----------
        name : str
            A name of schema.OPTIONAL_FIELDS, such as token_logprob.
        """
        segment, row = self._primary_location
        return segment.optional(name, row)

    @property
    def optional_fields(self) -> dict[str, Any]:
        """The fields of schema.OPTIONAL_FIELDS that the trace has."""
        segment, row = self._primary_location
        return segment.optional_fields(row)

    def has_score(self) -> bool:
        """Return whether the trace has a score."""
        return not math.isnan(self.score)
