"""A trace in memory, and validation of its fields."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.store.format import schema
from tracestore.store.read.segment import SegmentReader
from tracestore.store.write.values import (
    as_array,
    describe,
    field_error,
    integer,
    optional_fields,
    spans_of_labels,
)

_OWN_FIELDS = frozenset(
    ("hidden_states", "attentions", "tokens", "tokens_decoded", "question_id", "prompt_length", *schema.TEXT_FIELDS)
)
# Ids are short. A field of a CSV file, which has an end, holds them.
MAX_ID_CHARACTERS = 1 << 20
# Keys of the token ids: that of this schema, of a tokenizer, and of the output of generate().
_TOKENS_KEYS = ("tokens", "input_ids", "sequences")
# With "labels", the name of `spans` in RAGTruth.
_OPTIONAL_KEYS = frozenset((*schema.OPTIONAL_FIELDS, "labels"))


@dataclass
class TraceRecord:
    """A validated trace, whose arrays may be views of a mapped file.

    Attributes
    ----------
    position : int
        Position of the trace in its source, from 0.
    hidden : sequence of np.ndarray or None
        L arrays of shape ``(S, D)``.
    attention : sequence of np.ndarray or None
        L arrays of shape ``(H, S, S)``.
    edges : sequence of (np.ndarray, np.ndarray) or None
        L pairs of node indices ``(2, E)``, sources then targets, and weights ``(E,)``.
    last_token : np.ndarray or None
        Array of shape ``(L, D)`` if the source has it instead of hidden states.
    strings : dict[str, str]
        Values of schema.TEXT_FIELDS that the source has.
    optional : dict[str, Any]
        Fields of schema.OPTIONAL_FIELDS that the source has: arrays, numbers, tuples of numbers, JSON texts.
    has_own_id : bool
        Whether the source has a `question_id`; otherwise it is derived.
    is_without_embeddings : bool
        Whether the source had the embeddings in front of the hidden states of L layers.
    is_head_mean : bool
        Whether `attention` is the mean over heads, with one head.
    is_label_of_path : bool
        Whether the path of the source names the label.
    layer_ids : tuple of int, optional
        The layer of the model that each layer comes from.
    scores : dict[str, float]
        Named scores that the source has.
    deferred_scores : dict[str, float]
        Scores and labels of a table, by the field of a layout: they are stored when the run's accounts close.
    dropped : list of str, optional
        Keys whose values cannot be stored. None: such a value is an error.
    is_borrowed : bool
        Whether arrays may be views of much larger buffers, which must not be kept alive for long.
    """

    question_id: str
    sample: int = 0
    position: int = 0
    hidden: Sequence[np.ndarray] | None = None
    attention: Sequence[np.ndarray] | None = None
    edges: Sequence[tuple[np.ndarray, np.ndarray]] | None = None
    last_token: np.ndarray | None = None
    tokens: np.ndarray | None = None
    tokens_decoded: Sequence[str] | None = None
    strings: dict[str, str] = field(default_factory=dict)
    prompt_length: int | None = None
    optional: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    label: float | None = None
    is_label_of_path: bool = False
    has_own_id: bool = True
    is_without_embeddings: bool = False
    is_head_mean: bool = False
    layer_ids: tuple[int, ...] | None = None
    scores: dict[str, float] = field(default_factory=dict)
    deferred_scores: dict[str, float] = field(default_factory=dict)
    dropped: list[str] | None = None
    is_borrowed: bool = False

    @property
    def num_layers(self) -> int:
        """Number of layers, L."""
        if self.hidden is not None:
            return len(self.hidden)
        assert self.last_token is not None
        return len(self.last_token)

    @property
    def hidden_dim(self) -> int:
        """Hidden size, D."""
        return int((self.hidden[0] if self.hidden is not None else self.last_token).shape[-1])  # type: ignore[union-attr]

    @property
    def num_tokens(self) -> int:
        """Number of tokens, S; 0 without hidden states of all tokens."""
        return len(self.hidden[0]) if self.hidden is not None else 0


def _layers(value: Any, name: str, ndim: int, shape_text: str) -> list[np.ndarray]:
    """Return the layers of a field as arrays of `ndim` dimensions and one dtype.

    `value` may be a list of L arrays, one stacked array, nested lists of numbers, or what generate() returns: a list
    of passes, each a list of L arrays. A batch dimension of one is removed.
    """
    array = as_array(value)
    if array is not None and array.ndim in (ndim + 1, ndim + 2):
        if 0 in array.shape:
            raise field_error(name, f"shape {array.shape}", f"a list of L non-empty arrays {shape_text}")
        value = list(array)
    if _is_list_of_passes(value):
        return _join_passes(value, name, ndim, shape_text)
    if not isinstance(value, list | tuple):
        raise field_error(name, describe(value), f"a list of L arrays {shape_text}")
    if len(value) == 0:
        raise field_error(name, "zero layers", "at least one")
    layers: list[np.ndarray] = []
    for k, item in enumerate(value):
        layer = item if type(item) is np.ndarray else as_array(item)
        if layer is None and isinstance(item, list | tuple):
            layer = _array_of_lists(item)
        if layer is not None and layer.ndim == ndim + 1 and len(layer) == 1:
            layer = layer[0]
        if layer is None or layer.ndim != ndim:
            is_batch = layer is not None and layer.ndim == ndim + 1
            advice = "; save each answer of a batch as a trace" if is_batch else ""
            raise field_error(f"{name}[{k}]", describe(item), f"an array {shape_text}{advice}")
        # The layers of a pickle share one dtype object, which is checked once.
        if not layers or layer.dtype is not layers[0].dtype:
            try:
                schema.dtype_name(layer.dtype)
            except ValueError:
                raise field_error(f"{name}[{k}]", f"dtype {layer.dtype.name}", "float16, float32 or bfloat16") from None
            if not layer.dtype.isnative:
                layer = layer.astype(layer.dtype.newbyteorder("="))
            if layers and layer.dtype != layers[0].dtype:
                raise field_error(f"{name}[{k}]", f"dtype {layer.dtype.name}", f"{layers[0].dtype.name} as in layer 0")
        layers.append(layer)
    return layers


def _array_of_lists(value: Sequence[Any]) -> np.ndarray | None:
    """Return nested lists of numbers as a float32 array; None for other lists."""
    try:
        return np.asarray(value, "<f4")
    except (ValueError, TypeError, OverflowError):
        return None


def _is_list_of_passes(value: Any) -> bool:
    """Return whether the first item is a list of arrays, as for each pass of generate()."""
    if not isinstance(value, list | tuple) or not value or not isinstance(value[0], list | tuple) or not value[0]:
        return False
    return as_array(value[0][0]) is not None


def _join_passes(passes: Sequence[Any], name: str, ndim: int, shape_text: str) -> list[np.ndarray]:
    """Return the layers of all tokens from the layers of each forward pass of generate().

    A pass computes the states (s, D) of its s new tokens, and their attention (H, s, k) to the k tokens so far.
    """
    parts = [_layers(layers, f"{name}[{k}]", ndim, shape_text) for k, layers in enumerate(passes)]
    for k, layers in enumerate(parts):
        if len(layers) != len(parts[0]):
            raise field_error(f"{name}[{k}]", f"{len(layers)} layers", f"{len(parts[0])} as in the first pass")
    joined, num_tokens = [], sum(layers[0].shape[-2] for layers in parts)
    for number, of_layer in enumerate(zip(*parts, strict=True)):
        seen, blocks = 0, []
        for k, block in enumerate(of_layer):
            seen += block.shape[-2]
            if ndim == 3:
                if block.shape[-1] != seen:
                    raise field_error(f"{name}[{k}][{number}]", f"shape {block.shape}", f"(H, s, {seen})")
                block = np.pad(block, ((0, 0), (0, 0), (0, num_tokens - seen)))
            blocks.append(block)
        try:
            joined.append(np.concatenate(blocks, axis=-2))
        except ValueError:
            raise field_error(f"{name}[0][{number}]", f"shape {of_layer[0].shape}", "that of later passes") from None
    return joined


def _tokens(value: Any, num_tokens: int) -> np.ndarray:
    if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], list | tuple):
        value = value[0]
    array = as_array(value)
    if array is not None and array.ndim == 2 and len(array) == 1:
        array = array[0]
    if array is None:
        if not isinstance(value, list | tuple) or not all(
            isinstance(v, int | np.integer) and not isinstance(v, bool) for v in value
        ):
            raise field_error("tokens", describe(value), "(T,) integers")
        try:
            array = np.array(value, "<i8").reshape(-1)
        except OverflowError:
            raise field_error("tokens", "an integer that exceeds 64 bits", "int32") from None
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise field_error("tokens", describe(array), "(T,) integers")
    if len(array) not in (num_tokens, num_tokens + 1):
        expected = f"{num_tokens}, the rows of hidden_states, or one more"
        raise field_error("tokens", f"{len(array)} tokens", expected)
    tokens = array.astype("<i4")
    # Comparing bytes takes a quarter of the time of minimum and maximum for a few tokens.
    is_negative = array.dtype.kind == "u" and bool((tokens < 0).any())  # 2**32 - 1 becomes -1 and back
    if is_negative or tokens.astype(array.dtype).tobytes() != array.tobytes():
        raise field_error("tokens", f"values from {array.min()} to {array.max()}", "int32")
    return tokens


def question_id_text(value: Any, name: str = "question_id") -> str:
    """Return a question id as text: a str unchanged, an integer in decimal."""
    if isinstance(value, str):
        if not value:
            raise field_error(name, "an empty string", "an id")
        if len(value) > MAX_ID_CHARACTERS:
            raise field_error(name, f"{len(value):,} characters", f"at most {MAX_ID_CHARACTERS:,}")
        return value
    return str(integer(value, name))


def record_from_dict(
    trace: Any, *, source_name: str, position: int, need_attention: bool | None = True, need_tokens: bool = True
) -> TraceRecord:
    """Validate one dict of the pickle schema.

    Parameters
    ----------
    trace : Any
        The value found where a dict is expected.
    source_name : str
        Name of the source, for traces without an id.
    position : int
        Position of the trace in its source.
    need_attention : bool or None
        Whether the trace must have attention. False ignores it; None uses it if it is present.
    need_tokens : bool
        Whether the trace must have token ids.

    Raises
    ------
    InvalidInputError
        If a field is missing or invalid.
    """
    if not isinstance(trace, Mapping):
        raise InvalidInputError(f"found {describe(trace)}, expected a dict")
    for key in trace:
        if not isinstance(key, str):
            raise InvalidInputError(f"found a key of type {type(key).__name__}, expected str")
    if need_attention is None:
        need_attention = "attentions" in trace
    tokens_key = next((key for key in _TOKENS_KEYS if key in trace), "tokens")
    for key, is_needed in (("hidden_states", True), ("attentions", need_attention), (tokens_key, need_tokens)):
        if is_needed and key not in trace:
            advice = "; to convert traces without attention: --attention none" if key == "attentions" else ""
            raise InvalidInputError(f"missing key{advice}", field=key)
    hidden = _layers(trace["hidden_states"], "hidden_states", 2, "(S, D)")
    num_tokens, dim = hidden[0].shape
    if num_tokens == 0 or dim == 0:
        raise field_error("hidden_states[0]", f"shape {hidden[0].shape}", "at least one token and one dimension")
    for k, layer in enumerate(hidden):
        if layer.shape != (num_tokens, dim):
            raise field_error(f"hidden_states[{k}]", f"shape {layer.shape}", f"{(num_tokens, dim)} as in layer 0")
    attention, is_with_embeddings = None, False
    if need_attention:
        attention = _layers(trace["attentions"], "attentions", 3, "(H, S, S)")
        is_with_embeddings = len(attention) == len(hidden) - 1
        if is_with_embeddings:
            hidden = hidden[1:]  # output_hidden_states: the embeddings, then each layer
        if len(attention) != len(hidden):
            raise field_error("attentions", f"{len(attention)} layers", f"{len(hidden)} as in hidden_states")
        expected = (attention[0].shape[0], num_tokens, num_tokens)
        if expected[0] == 0:
            raise field_error("attentions[0]", "zero heads", "at least one")
        for k, layer in enumerate(attention):
            if layer.shape != expected:
                raise field_error(f"attentions[{k}]", f"shape {layer.shape}", f"{expected}")
    record = TraceRecord(question_id="", position=position, hidden=hidden, attention=attention)
    record.is_without_embeddings = is_with_embeddings
    if need_tokens or trace.get(tokens_key) is not None:
        record.tokens = _tokens(trace[tokens_key], num_tokens)
    num_ids = num_tokens if record.tokens is None else len(record.tokens)
    decoded = trace.get("tokens_decoded")
    if isinstance(decoded, np.ndarray) and len(decoded) == num_ids:
        decoded = decoded.tolist()
    if decoded is not None:
        if not isinstance(decoded, list | tuple) or not all(isinstance(s, str) for s in decoded):
            raise field_error("tokens_decoded", describe(decoded), "a list of T strings")
        if len(decoded) != num_ids:
            raise field_error("tokens_decoded", f"{len(decoded)} strings", f"{num_ids} as in tokens")
        record.tokens_decoded = [str(s) for s in decoded]
    for key in schema.TEXT_FIELDS:
        value = trace.get(key)
        if value is not None:
            if not isinstance(value, str):
                raise field_error(key, describe(value), "a string")
            record.strings[key] = str(value)
    if trace.get("prompt_length") is not None:
        record.prompt_length = integer(trace["prompt_length"], "prompt_length")
        if not 0 <= record.prompt_length <= 2**31 - 1:
            raise field_error("prompt_length", str(record.prompt_length), "a number of tokens below 2^31")
    record.extras = {key: value for key, value in trace.items() if key not in _OWN_FIELDS and key != tokens_key}
    if not _OPTIONAL_KEYS.isdisjoint(record.extras):
        _move_optional(record, num_ids)
    if "sample" in trace:
        record.sample = integer(record.extras.pop("sample"), "sample")
        if not 0 <= record.sample < 2**31:
            raise field_error("sample", str(record.sample), "an integer from 0 to 2^31 - 1")
    if trace.get("question_id") is not None:
        record.question_id = question_id_text(trace["question_id"])
    else:
        record.has_own_id = False
        if trace.get("global_example_id") is not None:
            record.question_id = question_id_text(trace["global_example_id"], "global_example_id")
        else:
            record.question_id = f"{source_name}:{position}"
    return record


def _move_optional(record: TraceRecord, num_tokens: int) -> None:
    """Move the fields of schema.OPTIONAL_FIELDS from the extras of a record to their own place."""
    values = {name: record.extras.pop(name) for name in schema.OPTIONAL_FIELDS if name in record.extras}
    if values.get("spans") is None and (spans := spans_of_labels(record.extras.get("labels"))) is not None:
        values["spans"] = spans
        del record.extras["labels"]
    record.optional = optional_fields(values, num_tokens)


def read_record(segment: SegmentReader, row: int) -> TraceRecord:
    """Return the texts and scalars of a row of a segment as a record without arrays and extras."""
    bits = segment.scalar("fields", row)
    prompt_length = segment.scalar("prompt_length", row)
    return TraceRecord(
        segment.string("question_id", row),
        sample=segment.scalar("sample", row),
        position=segment.scalar("source_position", row),
        tokens=segment.tokens(row) if bits & schema.FIELD_BITS["tokens"] else None,
        tokens_decoded=segment.tokens_decoded(row) if bits & schema.FIELD_BITS["tokens_decoded"] else None,
        strings={n: segment.string(n, row) for n in schema.TEXT_FIELDS if bits & schema.FIELD_BITS[n]},
        prompt_length=None if prompt_length < 0 else prompt_length,
        optional=segment.optional_fields(row, decode=False),
        has_own_id=bool(bits & schema.FIELD_BITS["question_id"]),
    )
