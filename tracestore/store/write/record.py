"""A trace in memory: validation of its fields, and conversion of extra fields from and to JSON."""

import base64
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.store.format import schema
from tracestore.store.read.segment import SegmentReader

# Limits on the JSON values of a trace's extra fields, which have no array of their own. A list that is
# referenced several times counts each time.
MAX_EXTRA_NODES = 200_000
MAX_EXTRA_DEPTH = 64

_OWN_FIELDS = frozenset(
    ("hidden_states", "attentions", "tokens", "tokens_decoded", "question_id", "prompt_length", *schema.TEXT_FIELDS)
)


def field_error(field_name: str, found: str, expected: str) -> InvalidInputError:
    """Return the error for a field that does not conform to the schema."""
    return InvalidInputError(f"found {found}, expected {expected}", field=field_name)


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
    has_own_id : bool
        Whether the source has a `question_id`; otherwise it is derived.
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
    extras: dict[str, Any] = field(default_factory=dict)
    label: float | None = None
    has_own_id: bool = True
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


def as_array(value: Any) -> np.ndarray | None:
    """Return a NumPy array or torch tensor as a NumPy array, and None for other values.

    bfloat16 tensors become arrays of dtype schema.BFLOAT16.
    """
    if isinstance(value, np.ndarray):
        return value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().cpu().resolve_conj().resolve_neg()
        if value.dtype == torch.bfloat16:
            value = value.contiguous().view(torch.int16)
            bits: np.ndarray = value.numpy().view(schema.BFLOAT16)
            return bits
        array: np.ndarray = value.numpy()
        return array
    return None


def _describe(value: Any) -> str:
    array = as_array(value)
    if array is not None:
        return f"{array.dtype.name if array.dtype != schema.BFLOAT16 else 'bfloat16'} of shape {array.shape}"
    return type(value).__name__


def _layers(value: Any, name: str, ndim: int, shape_text: str) -> list[np.ndarray]:
    array = as_array(value)
    if array is not None and array.ndim == ndim + 1:
        if 0 in array.shape:
            raise field_error(name, f"shape {array.shape}", f"a list of L non-empty arrays {shape_text}")
        value = list(array)
    if not isinstance(value, list | tuple):
        raise field_error(name, _describe(value), f"a list of L arrays {shape_text}")
    if len(value) == 0:
        raise field_error(name, "zero layers", "at least one")
    layers: list[np.ndarray] = []
    for k, item in enumerate(value):
        layer = item if type(item) is np.ndarray else as_array(item)
        if layer is None or layer.ndim != ndim:
            raise field_error(f"{name}[{k}]", _describe(item), f"an array {shape_text}")
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


def _integer(value: Any, name: str) -> int:
    array = as_array(value)
    if array is not None and array.ndim == 0 and array.dtype.kind in "iu":
        return int(array)
    if isinstance(value, np.integer) or (isinstance(value, int) and not isinstance(value, bool)):
        return int(value)
    raise field_error(name, _describe(value), "an integer")


def _tokens(value: Any, num_tokens: int) -> np.ndarray:
    array = as_array(value)
    if array is None:
        if not isinstance(value, list | tuple) or not all(
            isinstance(v, int | np.integer) and not isinstance(v, bool) for v in value
        ):
            raise field_error("tokens", _describe(value), "(S,) integers")
        try:
            array = np.array(value, "<i8").reshape(-1)
        except OverflowError:
            raise field_error("tokens", "an integer that exceeds 64 bits", "int32") from None
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise field_error("tokens", _describe(array), "(S,) integers")
    if len(array) != num_tokens:
        raise field_error("tokens", f"{len(array)} tokens", f"{num_tokens}, the rows of hidden_states")
    if len(array) and (array.min() < -(2**31) or array.max() >= 2**31):
        raise field_error("tokens", f"values from {array.min()} to {array.max()}", "int32")
    return array.astype("<i4")


def question_id_text(value: Any, name: str = "question_id") -> str:
    """Return a question id as text: a str unchanged, an integer in decimal."""
    if isinstance(value, str):
        if not value:
            raise field_error(name, "an empty string", "an id")
        return value
    return str(_integer(value, name))


def record_from_dict(trace: Any, *, source_name: str, position: int, need_attention: bool | None = True) -> TraceRecord:
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

    Raises
    ------
    InvalidInputError
        If a field is missing or invalid.
    """
    if not isinstance(trace, Mapping):
        raise InvalidInputError(f"found {_describe(trace)}, expected a dict")
    for key in trace:
        if not isinstance(key, str):
            raise InvalidInputError(f"found a key of type {type(key).__name__}, expected str")
    if need_attention is None:
        need_attention = "attentions" in trace
    for key in ("hidden_states", "attentions", "tokens") if need_attention else ("hidden_states", "tokens"):
        if key not in trace:
            raise InvalidInputError("missing key", field=key)
    hidden = _layers(trace["hidden_states"], "hidden_states", 2, "(S, D)")
    num_tokens, dim = hidden[0].shape
    if num_tokens == 0 or dim == 0:
        raise field_error("hidden_states[0]", f"shape {hidden[0].shape}", "at least one token and one dimension")
    for k, layer in enumerate(hidden):
        if layer.shape != (num_tokens, dim):
            raise field_error(f"hidden_states[{k}]", f"shape {layer.shape}", f"{(num_tokens, dim)} as in layer 0")
    attention = None
    if need_attention:
        attention = _layers(trace["attentions"], "attentions", 3, "(H, S, S)")
        if len(attention) != len(hidden):
            raise field_error("attentions", f"{len(attention)} layers", f"{len(hidden)} as in hidden_states")
        expected = (attention[0].shape[0], num_tokens, num_tokens)
        if expected[0] == 0:
            raise field_error("attentions[0]", "zero heads", "at least one")
        for k, layer in enumerate(attention):
            if layer.shape != expected:
                raise field_error(f"attentions[{k}]", f"shape {layer.shape}", f"{expected}")
    record = TraceRecord(question_id="", position=position, hidden=hidden, attention=attention)
    record.tokens = _tokens(trace["tokens"], num_tokens)
    decoded = trace.get("tokens_decoded")
    if isinstance(decoded, np.ndarray) and len(decoded) == num_tokens:
        decoded = decoded.tolist()
    if decoded is not None:
        if not isinstance(decoded, list | tuple) or not all(isinstance(s, str) for s in decoded):
            raise field_error("tokens_decoded", _describe(decoded), "a list of S strings")
        if len(decoded) != num_tokens:
            raise field_error("tokens_decoded", f"{len(decoded)} strings", f"{num_tokens}, the rows of hidden_states")
        record.tokens_decoded = [str(s) for s in decoded]
    for key in schema.TEXT_FIELDS:
        value = trace.get(key)
        if value is not None:
            if not isinstance(value, str):
                raise field_error(key, _describe(value), "a string")
            record.strings[key] = str(value)
    if trace.get("prompt_length") is not None:
        record.prompt_length = _integer(trace["prompt_length"], "prompt_length")
        if not 0 <= record.prompt_length <= 2**31 - 1:
            raise field_error("prompt_length", str(record.prompt_length), "a number of tokens below 2^31")
    record.extras = {key: value for key, value in trace.items() if key not in _OWN_FIELDS}
    if "sample" in trace:
        record.sample = _integer(record.extras.pop("sample"), "sample")
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
        has_own_id=bool(bits & schema.FIELD_BITS["question_id"]),
    )


def extras_json(extras: Mapping[str, Any]) -> str:
    """Return the fields without an array of their own as JSON with sorted keys.

    Arrays become ``{"$array": [dtype, shape, base64]}``, NaN and infinities ``{"$float": text}``.
    """
    budget = [MAX_EXTRA_NODES]

    def plain(value: Any, name: str, depth: int) -> Any:
        budget[0] -= 1
        if budget[0] < 0 or depth > MAX_EXTRA_DEPTH:
            raise field_error(name, "too many or too deeply nested values", f"at most {MAX_EXTRA_NODES:,} per trace")
        if isinstance(value, str):
            budget[0] -= len(value) // 64
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int):
            return value if abs(value) < 2**63 else {"$int": str(value)}
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, bytes):
            budget[0] -= len(value) // 16
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, np.generic) and value.dtype.kind in "biufSU":
            return plain(value.item(), name, depth + 1)
        array = as_array(value)
        if array is not None and (array.dtype.kind in "biufcSU" or array.dtype == schema.BFLOAT16):
            budget[0] -= array.nbytes // 16
            if budget[0] < 0:
                raise field_error(
                    name, f"an array of {array.nbytes:,} bytes", "less than 3.2 MB without a field of its own"
                )
            dtype = "bfloat16" if array.dtype == schema.BFLOAT16 else array.dtype.str
            data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
            return {"$array": [dtype, list(array.shape), data]}
        if isinstance(value, list | tuple):
            return [plain(v, name, depth + 1) for v in value]
        if isinstance(value, Mapping):
            # A dict with keys that look like these encodings is stored as a list of pairs.
            if not all(isinstance(k, str) and not k.startswith("$") for k in value):
                return {"$dict": [[plain(k, name, depth + 1), plain(v, name, depth + 1)] for k, v in value.items()]}
            return {k: plain(v, name, depth + 1) for k, v in value.items()}
        raise field_error(name, _describe(value), "strings, numbers, lists, dicts or arrays")

    if not extras:
        return ""
    return json.dumps({k: plain(v, k, 0) for k, v in extras.items()}, sort_keys=True, separators=(",", ":"))
