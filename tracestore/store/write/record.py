"""A trace in memory, and validation of its fields."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.store import vocabulary
from tracestore.store.format import schema
from tracestore.store.read.segment import SegmentReader
from tracestore.store.write.field_values import (
    as_array,
    describe,
    field_error,
    integer,
    label_value,
    optional_fields,
    score_value,
    spans_of_labels,
)
from tracestore.store.write.states import edges_of, last_token_of, layers_of, token_ids, valid_span, with_head_axis

# Ids are short. A field of a CSV file, which has an end, holds them.
MAX_ID_CHARACTERS = 1 << 20
# Fields with values per token, and those of answers and their tokens.
PER_TOKEN = ("tokens", "tokens_decoded", "attention_mask", "lengths", *schema.TOKEN_FIELDS, "answer_span")
_OPTIONAL = frozenset(schema.OPTIONAL_FIELDS)
_STATES, _ATTENTION = (vocabulary.FIELDS[name].of_layer for name in ("hidden_states", "attentions"))
# Two names for one claim.
_CLAIMS = ("is_correct", "is_hallucinated")
MISSING_ATTENTION = "missing key; for traces without attention: --attention none"


@dataclass(slots=True)
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
    edges_reversed : bool or None
        Whether `edges` run from target to source: None if only they can tell.
    has_own_id : bool
        Whether the source has a `question_id`; otherwise it is derived.
    is_without_embeddings : bool
        Whether the source had the embeddings in front of the hidden states of L layers.
    is_head_mean : bool
        Whether `attention` is the mean over heads, with one head.
    layer_ids : tuple of int, optional
        The layer of the model that each layer comes from.
    scores : dict[str, float]
        Named scores that the source has.
    group : str
        Group for splits that the source has, "" if missing.
    extra_names : tuple of str
        Keys of the extras, which stay after the trace is packed.
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
    edges_reversed: bool | None = False
    has_own_id: bool = True
    is_without_embeddings: bool = False
    is_head_mean: bool = False
    layer_ids: tuple[int, ...] | None = None
    scores: dict[str, float] = field(default_factory=dict)
    group: str = ""
    extra_names: tuple[str, ...] = ()
    deferred_scores: dict[str, float] = field(default_factory=dict)
    dropped: list[str] | None = None
    is_borrowed: bool = False

    @property
    def num_layers(self) -> int:
        """Number of layers, L."""
        return len(self.hidden if self.hidden is not None else self.last_token)  # type: ignore[arg-type]

    @property
    def hidden_dim(self) -> int:
        """Hidden size, D."""
        return int((self.hidden[0] if self.hidden is not None else self.last_token).shape[-1])  # type: ignore[union-attr]

    @property
    def num_tokens(self) -> int:
        """Number of tokens, S; 0 without hidden states of all tokens."""
        return len(self.hidden[0]) if self.hidden is not None else 0

    @property
    def num_ids(self) -> int:
        """Number of token ids, T; S without them."""
        return self.num_tokens if self.tokens is None else len(self.tokens)

    @property
    def answer(self) -> str | None:
        """The answer, as Trace.answer."""
        return next((self.strings[name] for name in schema.ANSWER_FIELDS if name in self.strings), None)


def question_id_text(value: Any, name: str = "question_id") -> str:
    """Return the id of a question or group as text: a str unchanged, an integer in decimal."""
    if isinstance(value, str):
        if not value:
            raise field_error(name, "an empty string", "an id")
        if len(value) > MAX_ID_CHARACTERS:
            raise field_error(name, f"{len(value):,} characters", f"at most {MAX_ID_CHARACTERS:,}")
        return value
    return str(integer(value, name))


def record_from_dict(
    trace: Any,
    *,
    source_name: str,
    position: int,
    need_attention: bool | None = True,
) -> TraceRecord:
    """Check a trace, a dict of the fields of `store.vocabulary`, and return its record.

    Parameters
    ----------
    trace : Any
        The value found where a dict is expected.
    source_name : str
        Name of the source, for traces without an id.
    position : int
        Position of the trace in its source.
    need_attention : bool or None
        Whether the trace must have attention if it has hidden states of all tokens. False ignores it; None uses it if
        it is present.

    Raises
    ------
    InvalidInputError
        If a field is missing, invalid or impossible, or a key looks like a label or score and is no field.
    """
    if type(trace) is not dict and not isinstance(trace, Mapping):
        raise InvalidInputError(f"found {describe(trace)}, expected a dict")
    fields, extras = vocabulary.split_fields(trace)
    record = TraceRecord(question_id="", position=position, extras=extras)
    if "hidden_states" in fields:
        _set_states(record, fields, need_attention)
        _set_tokens(record, fields)
    elif "last_token" in fields:
        # Values per token belong to tokens that have no hidden states here.
        extras |= {name: fields.pop(name) for name in PER_TOKEN if name in fields}
    else:
        raise InvalidInputError("missing key", field="hidden_states")
    if "last_token" in fields:
        _set_last_token(record, fields)
    for name in schema.TEXT_FIELDS:
        if name in fields:
            record.strings[name] = _text(fields[name], name)
    _set_key(record, fields, source_name)
    if "labels" in fields:
        _set_spans(fields, extras)
    if not _OPTIONAL.isdisjoint(fields):
        record.optional = optional_fields(fields, record.num_ids, record.answer)
    if "prompt_length" in fields:
        record.prompt_length = integer(fields["prompt_length"], "prompt_length")
    if "attention_mask" in fields or "lengths" in fields:
        _remove_padding(record, fields.get("attention_mask"), fields.get("lengths"))
    require_possible(record)
    if not vocabulary.VERDICTS.isdisjoint(fields):
        _set_verdict(record, fields)
    if fields.get("group", "") != "":
        record.group = question_id_text(fields["group"], "group")
    if "layer_ids" in fields:
        record.layer_ids = layer_ids_of(fields["layer_ids"], record)
    return record


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise field_error(name, describe(value), "a string")
    return str(value)


def _set_states(record: TraceRecord, fields: Mapping[str, Any], need_attention: bool | None) -> None:
    """Set hidden states of all tokens, and attention or edges."""
    has_attention, has_edges = "attentions" in fields, "edges" in fields
    if need_attention and not (has_attention or has_edges):
        raise InvalidInputError(MISSING_ATTENTION, field="attentions")
    hidden = layers_of(fields["hidden_states"], "hidden_states", *_STATES)
    num_tokens, dim = hidden[0].shape
    if num_tokens == 0 or dim == 0:
        raise field_error("hidden_states[0]", f"shape {hidden[0].shape}", "at least one token and one dimension")
    for k, layer in enumerate(hidden):
        if layer.shape != (num_tokens, dim):
            raise field_error(f"hidden_states[{k}]", f"shape {layer.shape}", f"{(num_tokens, dim)} as in layer 0")
    record.hidden = hidden
    if need_attention is False:
        return
    if has_edges and has_attention:
        raise field_error("edges", "edges and attentions", "one of them")
    if has_edges:
        record.edges = edges_of(fields["edges"], len(hidden))
    if not has_attention:
        return
    value, record.is_head_mean = with_head_axis(fields["attentions"])
    attention = layers_of(value, "attentions", *_ATTENTION)
    record.is_without_embeddings = len(attention) == len(hidden) - 1
    if record.is_without_embeddings:
        record.hidden = hidden[1:]  # output_hidden_states: the embeddings, then each layer
    if len(attention) != len(record.hidden):
        raise field_error("attentions", f"{len(attention)} layers", f"{len(hidden)} as in hidden_states")
    expected = (attention[0].shape[0], num_tokens, num_tokens)
    if expected[0] == 0:
        raise field_error("attentions[0]", "zero heads", "at least one")
    for k, layer in enumerate(attention):
        if layer.shape != expected:
            raise field_error(f"attentions[{k}]", f"shape {layer.shape}", f"{expected}")
    record.attention = attention


def _set_last_token(record: TraceRecord, fields: Mapping[str, Any]) -> None:
    states = last_token_of(fields["last_token"])
    if record.is_without_embeddings and len(states) == record.num_layers + 1:
        states = states[1:]
    if record.hidden is not None:
        expected = np.broadcast_to(record.hidden[0][0], (record.num_layers, record.hidden_dim))
        if (states.shape, states.dtype) != (expected.shape, expected.dtype):
            raise field_error("last_token", describe(states), f"{describe(expected)} as in hidden_states")
    record.last_token = states


def _set_tokens(record: TraceRecord, fields: Mapping[str, Any]) -> None:
    if "tokens" in fields:
        # Attention shows the axes of states in one array.
        states = as_array(fields["hidden_states"]) if record.attention is None else None
        shape = None if states is None or states.ndim != 3 else states.shape
        record.tokens = token_ids(fields["tokens"], record.num_tokens, shape)
    decoded = fields.get("tokens_decoded")
    if isinstance(decoded, np.ndarray) and len(decoded) == record.num_ids:
        decoded = decoded.tolist()
    if decoded is not None:
        if not isinstance(decoded, list | tuple) or not all(issubclass(kind, str) for kind in set(map(type, decoded))):
            raise field_error("tokens_decoded", describe(decoded), "a list of T strings")
        if len(decoded) != record.num_ids:
            other = "tokens" if record.tokens is not None else "hidden_states"
            raise field_error("tokens_decoded", f"{len(decoded)} strings", f"{record.num_ids} as in {other}")
        record.tokens_decoded = list(map(str, decoded))


def _set_key(record: TraceRecord, fields: Mapping[str, Any], source_name: str) -> None:
    if "sample" in fields:
        record.sample = integer(fields["sample"], "sample")
    name = "question_id" if "question_id" in fields else "global_example_id" if "global_example_id" in fields else None
    record.has_own_id = name == "question_id"
    record.question_id = f"{source_name}:{record.position}" if name is None else question_id_text(fields[name], name)


def layer_ids_of(value: Any, record: TraceRecord) -> tuple[int, ...]:
    """Return the layer of the model that each stored layer comes from."""
    array = as_array(value)
    values = value if array is None else array.tolist()
    if not isinstance(values, list | tuple):
        raise field_error("layer_ids", describe(value), "a list of L integers")
    ids = [integer(k, "layer_ids") for k in values]
    if record.is_without_embeddings and len(ids) == record.num_layers + 1:
        ids = ids[1:]
    if len(ids) != record.num_layers or min(ids) < 0 or len(set(ids)) < len(ids):
        raise field_error("layer_ids", f"{str(ids)[:80]}", f"{record.num_layers} different numbers of layers from 0")
    return tuple(ids)


def _set_verdict(record: TraceRecord, fields: Mapping[str, Any]) -> None:
    """Set the label and the scores."""
    labels = {label_value(fields[name], name) for name in ("label", "labels") if name in fields} - {None}
    if len(labels) > 1:
        raise field_error("labels", "another label than in label", "one label")
    record.label = next(iter(labels), None)
    given = {name: value for name, value in fields.items() if name in vocabulary.SCORES}
    for name, value in list(given.items()):
        if vocabulary.is_other_value(name, value):
            record.extras[name] = given.pop(name)
    scores = fields.get("scores", {})
    if isinstance(scores, list | tuple) and scores and as_array(scores[0]) is not None:
        record.extras["scores"], scores = scores, {}  # logits, as generate() returns them
    if not isinstance(scores, Mapping):
        raise field_error("scores", describe(scores), "a dict of numbers by name")
    for name, value in (*scores.items(), *given.items()):
        if (score := score_value(value, name)) is not None and record.scores.setdefault(name, score) != score:
            raise field_error(name, f"{score:g}", f"{record.scores[name]:g} as in scores")
    correct, hallucinated = (record.scores.get(name) if name in given else None for name in _CLAIMS)
    if correct is not None and correct == hallucinated:
        raise field_error(_CLAIMS[0], f"{bool(correct)} as in {_CLAIMS[1]}", "the opposite")


def _set_spans(fields: dict[str, Any], extras: dict[str, Any]) -> None:
    """Move `labels` that are spans to spans, and lists that are no labels, such as token ids, to the extras."""
    if fields.get("spans") is None and (spans := spans_of_labels(fields["labels"])) is not None:
        fields["spans"] = spans
        del fields["labels"]
    elif isinstance(fields["labels"], list | tuple | np.ndarray) and not vocabulary.is_verdict(fields["labels"]):
        extras["labels"] = fields.pop("labels")


def require_possible(record: TraceRecord) -> None:
    """Raise InvalidInputError if the record has a value that no trace can have; `optional_fields` checks the others."""
    if not 0 <= record.sample < 2**31:
        raise field_error("sample", str(record.sample), "an integer from 0 to 2^31 - 1")
    # The high byte of a number below 2^31 is ASCII: faster than a minimum.
    if record.tokens is not None and not record.tokens.tobytes()[3::4].isascii():
        raise field_error("tokens", f"the token id {record.tokens.min()}", "0 or greater; leave padding out")
    most = record.num_ids or schema.MAX_TOKENS
    if record.prompt_length is not None and not 0 <= record.prompt_length <= most:
        raise field_error("prompt_length", str(record.prompt_length), f"0 to {most}, the number of tokens")


def _remove_padding(record: TraceRecord, mask: Any, length: Any) -> None:
    """Remove the tokens that a mask or a length leaves out. A mask that leaves out none is an extra."""
    begin, end = valid_span(mask, length, record.num_ids)
    if (begin, end) != (0, record.num_ids):
        _crop(record, begin, end)
    elif mask is not None:
        record.extras["attention_mask"] = mask


def _crop(record: TraceRecord, begin: int, end: int) -> None:
    """Keep the tokens from `begin` to `end` of a record; its states may have one token less."""
    assert record.hidden is not None
    last = min(end, record.num_tokens)
    if begin >= last:
        raise field_error("attention_mask", "no token with hidden states", "at least one")
    record.hidden = [layer[begin:last] for layer in record.hidden]
    if record.attention is not None:
        record.attention = [layer[:, begin:last, begin:last] for layer in record.attention]
    if record.tokens is not None:
        record.tokens = record.tokens[begin:end]
    if record.tokens_decoded is not None:
        record.tokens_decoded = list(record.tokens_decoded)[begin:end]
    for name in schema.TOKEN_FIELDS.keys() & record.optional.keys():
        record.optional[name] = np.ascontiguousarray(record.optional[name][begin:end])
    if record.prompt_length:  # 0 is no prompt
        record.prompt_length = moved_position("prompt_length", record.prompt_length, begin, end)
    if "answer_span" in record.optional:
        first, after = record.optional["answer_span"]
        # The answer may end in padding behind the tokens; -1 is unknown.
        span = (at if at < 0 else moved_position("answer_span", at, begin, end) for at in (first, min(after, end)))
        record.optional["answer_span"] = tuple(span)


def moved_position(name: str, position: int, begin: int, end: int) -> int:
    """Return a position of the tokens from `begin` to `end`."""
    if not begin <= position <= end:
        raise field_error(name, str(position), f"{begin} to {end}, where the tokens without padding are")
    return position - begin


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
