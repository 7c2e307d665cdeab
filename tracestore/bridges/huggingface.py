"""Stores from and to Hugging Face datasets."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tracestore.errors import MissingFieldError, UsageError
from tracestore.extras import needs
from tracestore.store.format import schema
from tracestore.store.format.labels import CORRECT, SCORE_COLUMNS
from tracestore.store.read.store import TraceStore
from tracestore.store.read.table import metadata
from tracestore.store.write.create import create

with needs("bridges"):
    import datasets

ARRAYS = ("last_token", "hidden_states", "attention")
# Fields of the pickle schema, which from_datasets takes from columns of the same names.
_REQUIRED = ("question_id", "hidden_states", "tokens")


def to_datasets(store: TraceStore, arrays: Sequence[str] = ("last_token",)) -> "datasets.Dataset":
    """A row a trace: the columns of `store.to_pandas(texts=True)`, tokens, tokens_decoded and the
    arrays asked for, as float32: last_token (L, D), hidden_states (L, S, D), attention (L, S, S) or
    (L, H, S, S). It is written into the cache folder of datasets, in full: a store of 800 GB is
    better given to others as it is. UsageError for other arrays, MissingFieldError where the store
    lacks one."""
    for name in arrays:
        if name not in ARRAYS:
            raise UsageError(f"found array {name!r}, expected one of {', '.join(ARRAYS)}")
    if set(arrays) & {"hidden_states", "attention"} and len(store) and not store.num_tokens.all():
        raise MissingFieldError(f"{store.path}: some traces hold last tokens only: ask for last_token alone")
    if "attention" in arrays and len(store) and store[0].attention_layout is None:
        raise MissingFieldError(f"{store.path}: no attention is stored")
    columns = metadata(store, texts=True)
    value, sequence = datasets.Value, datasets.Sequence
    kinds = {name: value("string") for name in ("question_id", "group", "source", "question", "answer")}
    kinds |= {name: value("int64") for name in ("sample", "num_tokens", "source_position")}
    score = SCORE_COLUMNS[store.score_direction]
    kinds |= {score: value("float64"), "label": value("float64"), "has_nonfinite": value("bool")}
    kinds |= {"tokens": sequence(value("int32")), "tokens_decoded": sequence(value("string"))}
    heads = (store.num_stored_heads,) if store.attention == "heads" else ()
    for name in arrays:
        if name == "last_token":
            kinds[name] = datasets.Array2D((store.num_layers, store.hidden_dim), "float32")
        else:
            depth = 3 + (name == "attention" and len(heads))
            kinds[name] = sequence(value("float32"))
            for _ in range(depth - 1):
                kinds[name] = sequence(kinds[name])

    def rows() -> Iterator[dict[str, Any]]:
        for k, trace in enumerate(store):
            row = {name: _plain(values[k]) for name, values in columns.items()}
            row[score] = row.pop("score")
            tokens = trace.tokens
            row["tokens"] = [] if tokens is None else tokens.tolist()
            row["tokens_decoded"] = trace.tokens_decoded or []
            for name in arrays:
                dtype = store.attention_dtype if name == "attention" else store.hidden_dtype
                array = schema.as_float32(getattr(trace, name), dtype)
                row[name] = array if name == "last_token" else array.tolist()
            yield row

    # datasets takes a generator's rows from its cache where it knows the fingerprint; its own one
    # is made of the path, at which another store may lie by now.
    known = repr((store._manifest, tuple(arrays), datasets.__version__))
    fingerprint = hashlib.blake2b(known.encode(), digest_size=16).hexdigest()
    return datasets.Dataset.from_generator(rows, features=datasets.Features(kinds), fingerprint=fingerprint)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def from_datasets(
    rows: "datasets.Dataset | datasets.IterableDataset", path: str | os.PathLike[str], *, attention: str = "mean"
) -> int:
    """Writes a store from rows with the fields of the pickle schema as columns: question_id,
    hidden_states (L, S, D), tokens (S,), attentions (L, H, S, S) unless `attention` is "none", and
    where they are there tokens_decoded, question, answers, score or hallucination_score, label, group and others. Streamed
    datasets are read once, row by row. -> the number of traces. UsageError for missing columns;
    InvalidInputError where a row is not of the schema: what was appended before it stays."""
    required = _REQUIRED if attention == "none" else (*_REQUIRED, "attentions")
    count = 0
    names = list(SCORE_COLUMNS.values())
    found = [name for name in names if name in (rows.column_names or ())]
    direction = next((d for d, name in SCORE_COLUMNS.items() if name in found), CORRECT)
    if len(found) > 1:
        raise UsageError(f"found columns {' and '.join(found)}: keep one of them")
    with create(path, attention=attention, score_direction=direction) as writer:
        for row in rows:
            missing = [name for name in required if row.get(name) is None]
            if missing:
                raise UsageError(f"row {count}: no {', '.join(missing)}; columns are {', '.join(map(str, row))}")
            trace = {k: v for k, v in row.items() if v is not None and k not in (*names, "label", "group")}
            for name in ("hidden_states", "attentions"):
                if name in trace:
                    trace[name] = [np.asarray(layer, "f4") for layer in trace[name]]
            trace["tokens"] = np.asarray(trace["tokens"])
            writer.append(
                trace, score=row.get(SCORE_COLUMNS[direction]), label=row.get("label"), group=row.get("group") or ""
            )
            count += 1
    return count
