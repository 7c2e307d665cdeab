"""Stores from and to Hugging Face datasets."""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from tracestore.errors import MissingFieldError, UsageError
from tracestore.extras import needs
from tracestore.store.format import schema
from tracestore.store.format.extra_fields import decode_extras, decode_list
from tracestore.store.format.labels import CORRECT, DEFAULT_SCORE_NAME, SCORE_COLUMNS
from tracestore.store.format.ragged import without_surrogates
from tracestore.store.read.store import TraceStore
from tracestore.store.read.subset import TraceSubset
from tracestore.store.vocabulary import SCORES
from tracestore.store.write.create import create

with needs("bridges"):
    import datasets

Array = Literal["last_token", "hidden_states", "attention"]
ARRAYS: tuple[Array, ...] = get_args(Array)
# Attributes of a Trace that are columns, and their types.
_TYPES = {"question_id": "string", "sample": "int64", "label": "float64", "group": "string", "num_tokens": "int64"}
_TYPES |= {"has_nonfinite": "bool", "question": "string", "answer": "string"}
# Fields of the pickle schema that from_datasets needs as columns.
_REQUIRED = ("question_id", "hidden_states")


def to_datasets(store: TraceStore | TraceSubset, arrays: Sequence[Array] = ("last_token",)) -> "datasets.Dataset":
    """Return the traces of a store or subset as a Dataset with one row per trace.

    All values are written into the cache directory of datasets, so this suits small stores and last
    tokens.

    Parameters
    ----------
    store : TraceStore or TraceSubset
        The store, or a subset of one.
    arrays : sequence of {"last_token", "hidden_states", "attention"}
        Arrays to include as float32: last_token (L, D), hidden_states (L, S, D), attention
        (L, S, S) or (L, H, S, S).

    Returns
    -------
    datasets.Dataset
        The columns of ``store.to_pandas(texts=True)``, tokens, tokens_decoded and the arrays.

    Raises
    ------
    MissingFieldError
        If the store lacks an array.
    UsageError
        For another name in `arrays`.

    Examples
    --------
    >>> import tracestore
    >>> from tracestore.bridges.huggingface import to_datasets
    >>> with tracestore.open("store.zarr") as store:
    ...     rows = to_datasets(store)
    >>> rows[4]["question_id"]
    'q4'
    """
    for name in arrays:
        if name not in ARRAYS:
            raise UsageError(f"found array {name!r}, expected one of {', '.join(ARRAYS)}")
    whole: TraceStore = store.store if isinstance(store, TraceSubset) else store
    if set(arrays) & {"hidden_states", "attention"} and not store.num_tokens.all():
        raise MissingFieldError(f"{store.path}: some traces hold last tokens only: ask for last_token alone")
    if "attention" in arrays and len(store) and store[0].attention_layout is None:
        raise MissingFieldError(f"{store.path}: no attention is stored")
    score, others = SCORE_COLUMNS[whole.score_direction], sorted({*whole.score_fields} - {whole.score_name})
    features = _features(whole, [score, *(f"score_{name}" for name in others)], arrays)
    if not len(store):  # a generator of no rows is an error
        return datasets.Dataset.from_dict({name: [] for name in features}, features)

    def rows() -> Iterator[dict[str, Any]]:
        for trace in store:
            row = {name: getattr(trace, name) for name in _TYPES} | {score: trace.score}
            row |= {f"score_{name}": trace.scores.get(name, math.nan) for name in others}
            row["source"], row["source_position"] = trace.source
            row = {name: without_surrogates(value) for name, value in row.items()}
            row["tokens"] = None if trace.tokens is None else trace.tokens.tolist()
            row["tokens_decoded"] = without_surrogates(trace.tokens_decoded) if trace.tokens_decoded else None
            for name in arrays:
                dtype = whole.attention_dtype if name == "attention" else whole.hidden_dtype
                array = schema.as_float32(getattr(trace, f"{name}_bits"), dtype)
                row[name] = array if name == "last_token" else array.tolist()
            yield row

    # datasets reuses cached rows of a generator with the same fingerprint. By default it hashes the
    # path, where another store may be by now.
    identity = repr((whole.internals.manifest, whole.score_name, tuple(arrays), datasets.__version__)).encode()
    fingerprint = hashlib.blake2b(identity + store.indices.tobytes(), digest_size=16).hexdigest()
    return datasets.Dataset.from_generator(rows, features=features, fingerprint=fingerprint)


def _features(store: TraceStore, scores: Sequence[str], arrays: Sequence[Array]) -> "datasets.Features":
    """Return the types of the columns."""
    value, sequence = datasets.Value, datasets.Sequence
    types = {name: value(kind) for name, kind in _TYPES.items()}
    types |= {name: value("float64") for name in scores}
    types |= {"source": value("string"), "source_position": value("int64")}
    types |= {"tokens": sequence(value("int32")), "tokens_decoded": sequence(value("string"))}
    for name in arrays:
        if name == "last_token":
            types[name] = datasets.Array2D((store.num_layers, store.hidden_dim), "float32")
        else:
            types[name] = value("float32")
            for _ in range(4 if name == "attention" and store.attention_mode == "heads" else 3):
                types[name] = sequence(types[name])
    return datasets.Features(types)


def from_datasets(
    rows: "datasets.Dataset | datasets.IterableDataset",
    path: str | os.PathLike[str],
    *,
    attention: Literal["mean", "heads", "none"] = "mean",
    score_directions: Mapping[str, str] = {},
) -> int:
    """Write a store from rows whose columns are the fields of the pickle schema.

    A streamed dataset is read once, row by row.

    Parameters
    ----------
    rows : datasets.Dataset or datasets.IterableDataset
        Required columns are question_id, hidden_states (L, S, D) and, unless `attention` is "none",
        attentions (L, H, S, S). Optional ones are tokens (T,), tokens_decoded, question,
        answers, score or hallucination_score, score_NAME, label, group and others, which are kept as extras.
    path : str or PathLike
        The new store.
    attention : {"mean", "heads", "none"}
        What to store of the attention.
    score_directions : Mapping[str, str]
        What a high value of each score NAME means, "correct" or "hallucination", if there are columns score_NAME.

    Returns
    -------
    int
        The number of traces.

    Raises
    ------
    InvalidInputError
        If a row does not follow the schema. The rows before it stay in the store.
    UsageError
        If a required column or the direction of a score is missing, or if there are both score and
        hallucination_score.

    Examples
    --------
    >>> import datasets
    >>> from tracestore.bridges.huggingface import from_datasets
    >>> row = {"question_id": "q0", "hidden_states": [[[0.5, 1.0]]], "tokens": [7]}
    >>> from_datasets(datasets.Dataset.from_list([row]), "from_datasets.zarr", attention="none")
    1
    """
    required = _REQUIRED if attention == "none" else (*_REQUIRED, "attentions")
    found = {d: name for d, name in SCORE_COLUMNS.items() if name in (rows.column_names or ())}
    if len(found) > 1:
        raise UsageError(f"found columns {' and '.join(found.values())}: keep one of them")
    direction = next(iter(found), CORRECT)
    columns = [name for name in rows.column_names or () if name.startswith("score_") and name not in SCORES]
    named = {name: name.removeprefix("score_") for name in columns}
    if unknown := [name for name in named.values() if name not in score_directions]:
        raise UsageError(
            f"found scores {', '.join(unknown)}: pass the meaning of their high values as score_directions"
        )
    not_in_trace = {*SCORE_COLUMNS.values(), *named, "label", "group"}
    count = 0
    with create(path, attention=attention, score_direction=direction) as writer:
        if found:
            writer.define_score(DEFAULT_SCORE_NAME, direction=direction)  # the default, which the first one is
        for name in named.values():
            writer.define_score(name, direction=score_directions[name])
        for row in rows:
            missing = [name for name in required if row.get(name) is None]
            if missing:
                raise UsageError(f"row {count}: no {', '.join(missing)}; columns are {', '.join(map(str, row))}")
            writer.append(
                _trace_of_row({k: v for k, v in row.items() if v is not None and k not in not_in_trace}),
                score=row.get(SCORE_COLUMNS[direction]),
                scores={name: row[column] for column, name in named.items()},
                label=row.get("label"),
                group=row.get("group"),
            )
            count += 1
    return count


def _trace_of_row(trace: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a row as a dict of the pickle schema."""
    for name in ("hidden_states", "attentions"):
        if name in trace:
            trace[name] = [np.asarray(layer, "f4") for layer in trace[name]]
    if "tokens" in trace:
        trace["tokens"] = np.asarray(trace["tokens"])
    # `tracestore export --format datasets` writes these as JSON.
    if isinstance(trace.get("spans"), str):
        trace["spans"] = decode_list(trace["spans"])
    if isinstance(trace.get("extras"), str):
        trace = decode_extras(json.loads(trace.pop("extras"))) | trace
    return trace
