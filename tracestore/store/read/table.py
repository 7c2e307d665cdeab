"""Traces as rows of a table and of a feature matrix, and keys that select rows."""

import hashlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tracestore._core.gather import CopyJob
from tracestore.errors import UnknownTraceError, UsageError
from tracestore.extras import needs
from tracestore.store.format import schema
from tracestore.store.read.batch_sources import (
    GRAPH_ROW,
    GRAPH_SEGMENT,
    SEQUENCE_ROW,
    SEQUENCE_SEGMENT,
    sequence_sources,
)
from tracestore.store.read.index import grouped
from tracestore.store.read.internals import StoreInternals
from tracestore.store.read.trace import Trace

# Traces whose last tokens are gathered at once.
_BLOCK = 256


def column_names(store: StoreInternals) -> list[str]:
    """Return the names of the columns of a store, in the order of `metadata`."""
    named = [f"score_{name}" for name in sorted(store.attributes.scores) if name != store.score_name]
    columns = ["label", "group", "num_tokens", "has_nonfinite", "source", "source_position"]
    return ["question_id", "sample", "score", *named, *columns]


def column(store: StoreInternals, name: str, indices: np.ndarray) -> np.ndarray:
    """Return a column (n,) of some traces; strings have dtype object.

    UsageError if the store has no such column.
    """
    index, columns = store.index, store.columns
    if name == "question_id":
        return np.array(index.question_ids(indices), object)
    if name == "group":
        return np.array([columns.group(k) for k in indices.tolist()], object)
    values: np.ndarray
    if name in ("sample", "num_tokens", "source_position"):
        values = index.read_column(name)
    elif name == "has_nonfinite":
        values = index.read_column("nonfinite").astype(bool)
    elif name == "source":
        paths = np.array([entry.path for entry in index.sources()], object)
        values = paths[index.read_column("source")]
    elif name in ("score", "label"):
        values = store.scores if name == "score" else columns.labels
    elif name.removeprefix("score_") in store.attributes.scores:
        values = columns.score(name.removeprefix("score_"))
    else:
        expected = ", ".join(column_names(store))
        raise UsageError(f"{store.files.location}: found column {name!r}, expected one of {expected} or y")
    chosen: np.ndarray = values[indices]
    return chosen


def matches(values: np.ndarray, wanted: Any, name: str) -> np.ndarray:
    """Return which values of a column (n,) meet a condition of `TraceCollection.filter`, as a mask (n,).

    UsageError if a callable returns something else than a mask, or for a value that no value of the column can equal.
    """
    if callable(wanted):
        mask = np.asarray(wanted(values))
        if mask.dtype != bool or mask.shape != values.shape:
            raise UsageError(
                f"the condition on {name} returned {mask.dtype} of shape {mask.shape}, expected a mask of shape "
                f"{values.shape}: it gets the whole column as an array"
            )
        return mask
    if wanted is None:
        missing: np.ndarray = values == "" if values.dtype == object else values != values
        return missing
    is_one = isinstance(wanted, str | bytes) or not hasattr(wanted, "__len__") or getattr(wanted, "ndim", 1) == 0
    members = [wanted] if is_one else list(wanted)
    found = np.array(members)
    is_valid, expected = found.dtype.kind in "biuf", "numbers"
    if values.dtype == object:  # numpy would make texts of the numbers in a list of both
        is_valid, expected = all(isinstance(member, str) for member in members), "texts"
    if members and (not is_valid or (found != found).any()):
        raise UsageError(f"the condition on {name}: found {wanted!r:.80}, expected {expected}, or None for no value")
    if values.dtype == object:
        chosen = set(members)
        return np.array([value in chosen for value in values.tolist()], bool)
    return np.isin(values, found)


def positions(key: Any, count: int, question_ids: Callable[[], list[str]]) -> np.ndarray:
    """Return the positions (n,) int64, none of them negative, that a key selects from `count` traces.

    See `TraceCollection.select`; `question_ids` returns the ids of the traces.
    """
    if isinstance(key, slice):
        return np.arange(*key.indices(count))
    values = np.asarray(key)
    if values.ndim != 1:
        raise IndexError(f"found an index of {values.ndim} dimensions, expected 1")
    if values.dtype == bool:
        if len(values) != count:
            raise IndexError(f"found a mask of {len(values)} values, expected one for each of {count} traces")
        return np.flatnonzero(values)
    if values.dtype.kind in "iu" or len(values) == 0:
        wanted = values.astype(np.int64)
        outside = (wanted < -count) | (wanted >= count)
        if outside.any():
            raise IndexError(f"trace {wanted[outside][0]} of {count}")
        return np.where(wanted < 0, wanted + count, wanted)
    if not all(isinstance(value, str) for value in key):
        raise TypeError(f"found an index of {values.dtype}, expected positions, booleans or question ids")
    found: dict[str, list[int]] = {question_id: [] for question_id in key}
    for position, question_id in enumerate(question_ids()):
        if question_id in found:
            found[question_id].append(position)
    for question_id, samples in found.items():
        if not samples:
            raise UnknownTraceError(question_id)
    return np.array([position for samples in found.values() for position in samples], np.int64)


def data_frame(store: StoreInternals, indices: np.ndarray, *, texts: bool = False) -> Any:
    """Return what the store holds of some traces besides their arrays, as a pandas DataFrame.

    `texts` adds question and answer, which are read trace by trace.
    """
    with needs("bridges"):
        import pandas
    columns: dict[str, Any] = {name: column(store, name, indices) for name in column_names(store)}
    if texts:
        traces = [Trace(store, k) for k in indices.tolist()]
        columns["question"] = [trace.question for trace in traces]
        columns["answer"] = [trace.answer for trace in traces]
    # The string type of pandas 3 is UTF-8, which has no lone surrogates.
    return pandas.DataFrame(
        {name: pandas.Series(v, dtype=object) if _has_surrogates(v) else v for name, v in columns.items()}
    )


def _has_surrogates(values: Sequence[Any] | np.ndarray) -> bool:
    if isinstance(values, np.ndarray) and values.dtype != object:
        return False
    try:
        "".join(value for value in values if isinstance(value, str)).encode()
    except UnicodeEncodeError:
        return True
    return False


def digest(store: StoreInternals, indices: np.ndarray) -> str:
    """Return a digest of the ids, samples and arrays of some traces; see `TraceStore.digest`."""
    rows = _identities(store, indices)
    # Sorted by key, so that the order in the store does not matter.
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    return hashlib.blake2b(rows.astype("<u8").tobytes(), digest_size=16).hexdigest()


def hashes(store: StoreInternals, indices: np.ndarray) -> np.ndarray:
    """Return a hash ``(n,)`` uint64 of the id, sample and arrays of each trace, the same in every store."""
    keys, content = _identities(store, indices).T
    return np.asarray(keys * np.uint64(0x9E3779B97F4A7C15) ^ content)


def _identities(store: StoreInternals, indices: np.ndarray) -> np.ndarray:
    """Return ``(n, 2)`` uint64: of each trace a checksum of its id with its sample, and those of its arrays."""
    locations = store.index.locations(indices)
    sums = np.zeros((len(indices), 2), np.uint64)
    places = ((GRAPH_SEGMENT, GRAPH_ROW, "graph_crc32c"), (SEQUENCE_SEGMENT, SEQUENCE_ROW, "sequence_crc32c"))
    for k, (segment, row, name) in enumerate(places):
        for number, chosen in grouped(locations[:, segment]):
            if number >= 0:
                sums[chosen, k] = store.segment(number).row_values(name, locations[chosen, row])
    ids = (zlib.crc32(question.encode("utf-8", "surrogatepass")) for question in store.index.question_ids(indices))
    keys = np.fromiter(ids, np.uint64, len(indices)) << np.uint64(32)
    keys |= store.index.read_column("sample")[indices].astype(np.uint64)
    return np.stack([keys, sums[:, 0] << np.uint64(32) | sums[:, 1]], axis=1)


def facts(store: StoreInternals) -> dict[str, Any]:
    """Return what is known about the whole store, as ``tracestore info --json`` prints it."""
    manifest, attributes, lens = store.manifest, store.attributes, None
    if attributes.lens is not None:
        lens = {name: getattr(attributes.lens, name) for name in ("num_tokens", "dtype", "norm", "eps", "provenance")}
    return {
        "path": str(store.files.location),
        "format_version": attributes.format_version,
        "generation": manifest.generation,
        "num_traces": manifest.num_traces,
        "num_tokens": manifest.num_tokens,
        "num_layers": attributes.num_layers,
        "hidden_dim": attributes.hidden_dim,
        "num_heads": attributes.num_heads,
        "hidden_dtype": attributes.hidden_dtype or "float16",
        "attention": attributes.attention,
        "attention_layout": attributes.attention_layout,
        "attention_dtype": attributes.attention_dtype,
        "codec": attributes.options["codec"],
        "fields": list(manifest.fields),
        "num_segments": manifest.num_segments,
        "num_sources": manifest.num_sources,
        "bytes": manifest.num_bytes,
        "num_scored": manifest.num_scored,
        "num_labeled": manifest.num_labeled,
        "score": store.score_name,
        "scores": {name: field.to_json() for name, field in sorted(attributes.scores.items())},
        "lens": lens,
        "provenance": [p.to_json() for p in attributes.provenance],
    } | ({} if len(store.members) == 1 else {"stores": [_identity(member) for member in store.members]})


def _identity(store: StoreInternals) -> dict[str, Any]:
    """Return what identifies a store that is opened as one with others."""
    manifest = store.manifest
    names = {name: getattr(manifest, name) for name in ("generation", "num_traces", "content")}
    return {"path": str(store.files.location), **names}


def features(store: StoreInternals, layer: int, indices: np.ndarray) -> np.ndarray:
    """Return the last token's hidden states (n, D) of some traces in one layer; see TraceCollection.features."""
    stored_dtype, hidden_dim = store.attributes.hidden_dtype or "float16", store.attributes.hidden_dim or 0
    is_bits, num_traces = stored_dtype == "bfloat16", len(indices)
    dtype = np.dtype("<f4") if is_bits else schema.DTYPE_NAMES[stored_dtype]
    out = np.empty((num_traces, hidden_dim), dtype)
    if num_traces == 0:
        return out
    count, layer = store.num_layers, store.layer_number(layer)
    view = _one_view(store, layer, indices)
    if view is not None:
        return view
    code = schema.dtype_code(stored_dtype)
    stored = np.empty((_BLOCK, count, hidden_dim), "<u2" if is_bits else dtype)
    for begin in range(0, num_traces, _BLOCK):
        block = indices[begin : begin + _BLOCK]
        # The core reports a file that is truncated meanwhile as an error; numpy would end in a signal.
        job = CopyJob(sequence_sources(store, block), code, code)
        job.set_output(stored)
        job.run()
        rows = stored[: len(block), layer]
        out[begin : begin + len(block)] = schema.as_float32(rows, "bfloat16") if is_bits else rows
    return out


def _one_view(store: StoreInternals, layer: int, indices: np.ndarray) -> np.ndarray | None:
    """Return a view of the rows if they follow each other in one uncompressed array."""
    if store.attributes.options.get("codec", "none") != "none" or store.attributes.hidden_dtype == "bfloat16":
        return None
    segments = store.index.read_column("sequence_segment")[indices]
    rows = store.index.read_column("sequence_row")[indices]
    if segments[0] < 0 or (segments != segments[0]).any():
        return None
    segment = store.segment(int(segments[0]))
    if rows.max() >= segment.num_rows:
        return None
    stored = segment.values("last_token_row")[rows]
    if (np.diff(stored) != 1).any():
        return None
    return segment.array("last_token").rows(int(stored[0]), int(stored[-1]) + 1)[:, layer]
