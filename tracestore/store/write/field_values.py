"""Values of a trace's fields: errors, conversion to NumPy and JSON, and validation of schema.OPTIONAL_FIELDS."""

import base64
import json
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError, UsageError, escape_unprintable
from tracestore.store import vocabulary
from tracestore.store.format import schema
from tracestore.store.format.labels import HALLUCINATION
from tracestore.store.format.lens_attribute import MAX_VOCABULARY, NORMS
from tracestore.store.lens import LensArrays, block_rows

# Limits on the JSON values of a trace's extra fields, which have no array of their own. A list that is
# referenced several times counts each time.
MAX_EXTRA_NODES = 200_000
MAX_EXTRA_DEPTH = 64


def field_error(field_name: str, found: str, expected: str) -> InvalidInputError:
    """Return the error for a field that does not conform to the schema."""
    return InvalidInputError(f"found {found}, expected {expected}", field=field_name)


def is_masked(value: Any) -> bool:
    """Return whether a value is a masked array. Importing numpy.ma takes as long as a small file; without it there is none."""
    ma = sys.modules.get("numpy.ma")
    return ma is not None and type(value) is not np.ndarray and isinstance(value, ma.MaskedArray)


def as_array(value: Any) -> np.ndarray | None:
    """Return a NumPy array or torch tensor as a NumPy array, and None for other values.

    bfloat16 tensors, and arrays of ml_dtypes.bfloat16, become arrays of dtype schema.BFLOAT16. Tensors that NumPy cannot
    represent, and masked arrays that hide values, are other values.
    """
    if is_masked(value):
        value = None if value.mask.any() else value.data
    if isinstance(value, np.ndarray):
        is_brain = value.dtype.kind == "V" and value.dtype.name == "bfloat16"
        return value.view(schema.BFLOAT16) if is_brain else value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.is_meta or value.is_nested or value.layout is not torch.strided:
            return None
        value = value.detach().cpu().resolve_conj().resolve_neg()
        if value.dtype == torch.bfloat16:
            value = value.contiguous().view(torch.int16)
            bits: np.ndarray = value.numpy().view(schema.BFLOAT16)
            return bits
        try:
            array: np.ndarray = value.numpy()
        except TypeError:  # float8 and quantized numbers
            return None
        return array
    return None


def lens_arrays(unembedding: Any, small: Mapping[str, Any], norm: str, eps: float) -> LensArrays:
    """Return a lens from NumPy arrays or torch tensors; `small` has those of schema.LENS_ARRAYS, or None.

    UsageError if `norm` or `eps` is not valid, InvalidInputError if an array has the wrong shape or dtype.
    """
    if norm not in NORMS:
        raise UsageError(f"norm: found {norm!r}, expected one of {', '.join(NORMS)}")
    if not 0 <= eps <= 1:
        raise UsageError(f"eps: found {eps!r}, expected 0 to 1")
    shape, first = tuple(getattr(unembedding, "shape", ())), None
    if len(shape) == 2 and 0 < shape[0] <= MAX_VOCABULARY and 0 < shape[1] <= schema.MAX_DIMENSION:
        first = as_array(unembedding[:1])
    dtype = _float_name(first)
    if first is None or dtype is None:
        raise field_error("unembedding", describe(unembedding), "floating-point numbers of shape (V, D)")
    lengths = {name: shape[0] if name == "unembedding_bias" else shape[1] for name in schema.LENS_ARRAYS}
    found = {}
    for name, value in small.items():
        if value is None:
            continue
        array = as_array(value)
        kind = _float_name(array)
        if array is None or kind is None or array.shape != (lengths[name],):
            raise field_error(name, describe(value), f"floating-point numbers of shape ({lengths[name]},)")
        bits = array.view("<u2") if kind == "bfloat16" else array
        found[name] = np.ascontiguousarray(schema.as_float32(bits, kind))
    if norm == "none" and found.keys() - {"unembedding_bias"}:
        raise UsageError("found a weight or bias of the norm and the norm 'none'; pass 'rms' or 'layer'")

    def blocks() -> Iterator[np.ndarray]:
        step = block_rows(shape[1])
        for begin in range(0, shape[0], step):
            block = as_array(unembedding[begin : begin + step])
            assert block is not None
            yield block

    return LensArrays((int(shape[0]), int(shape[1])), dtype, blocks, norm, float(eps), found)


def _float_name(array: np.ndarray | None) -> str | None:
    try:
        return None if array is None else schema.dtype_name(array.dtype)
    except ValueError:
        return None


def describe(value: Any) -> str:
    """Return the type of a value, or dtype and shape of an array, for error messages."""
    array = as_array(value)
    if array is not None:
        return f"{array.dtype.name if array.dtype != schema.BFLOAT16 else 'bfloat16'} of shape {array.shape}"
    name = type(value).__name__
    if is_masked(value):
        return f"{name} whose mask hides values"
    return f"{name} of {value.dtype}, {value.layout} on {value.device}" if hasattr(value, "layout") else name


def integer(value: Any, name: str) -> int:
    """Return an integer of any library as an int; raise InvalidInputError for any other value."""
    array = as_array(value)
    if array is not None and array.ndim == 0 and array.dtype.kind in "iu":
        return int(array)
    if isinstance(value, np.integer) or (isinstance(value, int) and not isinstance(value, bool)):
        return int(value)
    raise field_error(name, describe(value), "an integer")


def _number(value: Any) -> float | None:
    """Return a number or a boolean of any library as a float; None for any other value."""
    array = as_array(value)
    if array is not None and array.ndim == 0:
        value = schema.as_float32(array.view("<u2"), "bfloat16") if array.dtype == schema.BFLOAT16 else array[()]
    try:
        return float(value) if isinstance(value, int | float | np.number | np.bool_) else None
    except OverflowError:  # an integer
        return math.inf


def label_value(value: Any, name: str) -> float | None:
    """Return a label: 1 for a hallucinated answer, 0 for a correct one, None for NaN.

    InvalidInputError unless it is a number 0 or 1, or a word that means one of them, such as "hallucinated".
    """
    number = vocabulary.score_of_word(value, HALLUCINATION) if isinstance(value, str) else _number(value)
    if isinstance(value, str) and vocabulary.score_of_word(value, None) is None:
        number = None  # yes or no: to what?
    if number is None or number not in (0, 1, number if math.isnan(number) else 0):
        raise field_error(name, _shown(value), "1 for a hallucinated answer or 0 for a correct one")
    return None if math.isnan(number) else number


def score_value(value: Any, name: str) -> float | None:
    """Return the value of a score, None for NaN; `name` is that of a score of the vocabulary, or any other.

    InvalidInputError unless it is a finite number or, of a field with a direction, a word of a judge. A field whose
    name reads as a claim has 0 or 1.
    """
    known = vocabulary.FIELDS.get(name)
    direction = None if known is None else known.direction or None
    number = vocabulary.score_of_word(value, direction) if isinstance(value, str) and direction else _number(value)
    is_claim = known is not None and known.is_claim
    if number is None or math.isinf(number) or (is_claim and number not in (0, 1) and not math.isnan(number)):
        raise field_error(name, _shown(value), "True or False" if is_claim else "a finite number")
    return None if math.isnan(number) else number


def _shown(value: Any) -> str:
    """Return a number or text, or the type of another value, for error messages."""
    return repr(value)[:40] if isinstance(value, str | int | float | np.generic) else describe(value)


def encode_value(value: Any, name: str, budget: list[int], depth: int = 0) -> Any:
    """Return a value of the field `name` as JSON; `budget` is the number of values that a trace may still have.

    Arrays become ``{"$array": [dtype, shape, base64]}``, NaN and infinities ``{"$float": text}``.
    """
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
        return value if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, bytes):
        budget[0] -= len(value) // 16
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.generic) and value.dtype.kind in "biufSU":
        return encode_value(value.item(), name, budget, depth + 1)
    array = as_array(value)
    if array is not None and (array.dtype.kind in "biufcSU" or array.dtype == schema.BFLOAT16):
        return _encode_array(array, name, budget)
    if isinstance(value, list | tuple):
        return [encode_value(v, name, budget, depth + 1) for v in value]
    if isinstance(value, Mapping):
        return _encode_mapping(value, name, budget, depth + 1)
    raise field_error(name, describe(value), "strings, numbers, lists, dicts or arrays")


def _encode_array(array: np.ndarray, name: str, budget: list[int]) -> dict[str, Any]:
    budget[0] -= array.nbytes // 16
    if budget[0] < 0:
        raise field_error(name, f"an array of {array.nbytes:,} bytes", "less than 3.2 MB without a field of its own")
    dtype = "bfloat16" if array.dtype == schema.BFLOAT16 else array.dtype.str
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"$array": [dtype, list(array.shape), data]}


def _encode_mapping(value: Mapping[Any, Any], name: str, budget: list[int], depth: int) -> dict[str, Any]:
    """Return a mapping as JSON: a list of pairs if it has keys that are no texts or look like these encodings."""
    if all(isinstance(k, str) and not k.startswith("$") for k in value):
        return {k: encode_value(v, name, budget, depth) for k, v in value.items()}
    for k in value:
        if not isinstance(k, str | bytes | int | float | np.generic | None):
            raise field_error(name, f"a key of type {type(k).__name__}", "strings, numbers or bytes as keys")
    return {"$dict": [[encode_value(part, name, budget, depth) for part in pair] for pair in value.items()]}


def _to_json(value: Any) -> str:
    """Return encoded values as JSON text with sorted keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def extras_json(extras: Mapping[str, Any], dropped: list[str] | None = None) -> str:
    """Return the fields without an array of their own as JSON, "" if there are none.

    The names of fields that cannot be stored are added to `dropped`. Without that list they are an error.
    """
    budget, encoded = [MAX_EXTRA_NODES], {}
    for name, value in extras.items():
        before = budget[0]
        try:
            encoded[name] = encode_value(value, name, budget)
        except InvalidInputError:
            if dropped is None:
                raise
            budget[0] = before
            dropped.append(name)
    return _to_json(encoded) if encoded else ""


def optional_fields(values: Mapping[str, Any], num_tokens: int, answer: str | None = None) -> dict[str, Any]:
    """Return the fields of schema.OPTIONAL_FIELDS in `values` in their stored dtype.

    Fields that are None or unknown are left out. Numbers per token become arrays, others Python numbers or tuples;
    JSON becomes text.

    Parameters
    ----------
    values : Mapping[str, Any]
        Fields by name.
    num_tokens : int
        Number of tokens, T.
    answer : str, optional
        The answer, whose characters the spans count.

    Raises
    ------
    InvalidInputError
        If a field does not conform to the schema, or its value is impossible.
    """
    found: dict[str, Any] = {}
    first_wide = ""
    for name, field in schema.OPTIONAL_FIELDS.items():
        if values.get(name) is None:
            continue
        if field.shape == schema.JSON:
            found[name] = _spans(values[name], name, answer)
            continue
        array = _numbers(values[name], name, field, num_tokens)
        if field.shape == schema.PER_TRACE:
            known = field.known(array.reshape(-1).tolist())
            if known is not None:
                found[name] = known
            continue
        if field.shape == schema.TOP_K:
            first_wide = first_wide or name
            shape = found.get(first_wide, array).shape
            if array.shape != shape:
                raise field_error(name, f"shape {array.shape}", f"{shape} as {first_wide}")
        found[name] = array
    begin, end = found.get("answer_span", (-1, -1))
    if max(begin, end) > num_tokens or -1 < end < begin:
        raise field_error("answer_span", f"{(begin, end)}", f"positions in order from 0 to {num_tokens}")
    return found


def spans_of_labels(labels: Any) -> list[dict[str, Any]] | None:
    """Return the field `labels` of RAGTruth as spans; None for any other value."""
    if not isinstance(labels, list | tuple):
        return None
    for label in labels:
        if not isinstance(label, Mapping) or not {"start", "end", "label_type"} <= label.keys() or "type" in label:
            return None
    return [{"type" if key == "label_type" else key: value for key, value in label.items()} for label in labels]


def _spans(value: Any, name: str, answer: str | None) -> str:
    if not isinstance(value, list | tuple):
        raise field_error(name, describe(value), "a list of dicts with start, end and type")
    spans = []
    for k, span in enumerate(value):
        if not isinstance(span, Mapping) or not {"start", "end", "type"} <= span.keys():
            raise field_error(f"{name}[{k}]", describe(span), "a dict with start, end and type")
        begin, end = (integer(span[key], f"{name}[{k}].{key}") for key in ("start", "end"))
        if not 0 <= begin <= end:
            raise field_error(f"{name}[{k}]", f"start {begin}, end {end}", "offsets in order from 0")
        if answer is not None and end > len(answer):
            raise field_error(f"{name}[{k}]", f"end {end}", f"at most {len(answer)}, the characters of the answer")
        if not isinstance(span["type"], str):
            raise field_error(f"{name}[{k}].type", describe(span["type"]), "a string")
        spans.append({**span, "start": begin, "end": end})
    return _to_json(encode_value(spans, name, [MAX_EXTRA_NODES]))


def _numbers(value: Any, name: str, field: schema.OptionalField, num_tokens: int) -> np.ndarray:
    """Return a copy of the numbers of a field in their stored dtype."""
    dtype, count = np.dtype(field.dtype), len(field.parts)
    kinds, number = ("fiu", "number") if dtype.kind == "f" else ("biu", "integer")
    expected = f"{count} {number}s" if count else f"one {number}"
    if field.shape != schema.PER_TRACE:
        expected = f"{number}s of shape {field.shape.replace('T', str(num_tokens))}"
    try:
        array = np.asarray(_plain(value))
        if array.dtype == object and dtype.kind == "f":
            array = array.astype("<f8")  # None becomes NaN.
    except (TypeError, ValueError, OverflowError):
        raise field_error(name, describe(value), expected) from None
    shapes = {
        schema.PER_TOKEN: (num_tokens,),
        schema.TOP_K: (num_tokens, array.size // max(1, num_tokens)),
        schema.PER_TRACE: (count,) if count else (),
    }
    if array.dtype.kind not in kinds or array.shape != shapes[field.shape] or array.size == 0:
        raise field_error(name, describe(array), expected)
    low, high = field.fill if field.minimum is None else field.minimum, field.maximum
    least, most = np.fmin.reduce(array, axis=None), np.fmax.reduce(array, axis=None)
    if least.item() < low or most.item() > high:  # not for NaN: unknown
        raise field_error(name, f"values from {least} to {most}", f"{low} to {high}")
    with np.errstate(over="ignore"):
        return np.array(array, dtype, order="C")


def _plain(value: Any, depth: int = 0) -> Any:
    """Return a number, an array of numbers or nested lists of these; raise TypeError for any other value.

    NumPy would give every text in a list the size of the longest one.
    """
    if value is None or isinstance(value, int | float | np.number | np.bool_):
        return value
    if isinstance(value, list | tuple) and depth < 2:
        return [_plain(item, depth + 1) for item in value]
    array = as_array(value)
    if array is not None and array.dtype == schema.BFLOAT16:
        return schema.as_float32(array.view("<u2"), "bfloat16")
    if array is None or array.dtype.kind not in "biuf":
        raise TypeError
    return array


def check_agreement(scores: Mapping[str, float], question_id: str = "") -> None:
    """Rule 14: `is_correct`, `is_hallucinated` and `label` agree wherever two have a value; an id is that of a stored trace."""
    found = {name: scores[name] for name in ("label", *vocabulary.JUDGMENTS) if scores.get(name) in (0, 1)}
    if len({value == (name == "is_correct") for name, value in found.items()}) > 1:
        stored = "one of them stored (lines for both judge again, --overwrite begins again; score --name keeps both)"
        of = f" of {escape_unprintable(question_id, 60)}, {stored}" if question_id else ""
        shown = " and ".join(f"{name} {value:g}" for name, value in found.items())
        raise InvalidInputError(f"found {shown}{of}, expected that they agree")
