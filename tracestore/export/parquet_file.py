"""Write traces as rows of Parquet files, which `datasets.load_dataset` reads."""

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from tracestore.errors import UsageError
from tracestore.export.trace_values import arrays_of, row_of, score_columns
from tracestore.extras import needs
from tracestore.store.format import schema
from tracestore.store.format.ragged import without_surrogates
from tracestore.store.read.store import TraceStore
from tracestore.store.read.trace import Trace

with needs("hub"):
    import pyarrow
    from pyarrow import parquet

# A row group is written when the arrays of its rows have this many bytes.
_ROW_GROUP_BYTES = 64 << 20
_MAX_LIST_ITEMS = (1 << 31) - 1
_TYPES = {
    **dict.fromkeys(("question_id", "source", "group", *schema.TEXT_FIELDS, "spans", "extras"), pyarrow.string()),
    **dict.fromkeys(
        ("sample", "num_tokens", "source_position", "provenance", "prompt_length", "seed"), pyarrow.int64()
    ),
    "edges_reversed": pyarrow.bool_(),
    "label": pyarrow.float64(),
    "temperature": pyarrow.float32(),
    "tokens_decoded": pyarrow.list_(pyarrow.string()),
    "answer_span": pyarrow.list_(pyarrow.int64()),
}
_DIMENSIONS = {"hidden_states": 3, "attentions": 4, "last_token": 2, "edge_ptr": 1, "edge_index": 2, "edge_weight": 1}


def write_traces(store: TraceStore, traces: Iterator[Trace], file: BinaryIO) -> None:
    """Write traces in the memory of one row group. bfloat16 becomes float32, which holds its values exactly.

    Raises
    ------
    UsageError
        If an array of a trace has more values than a list of Arrow can hold.
    """
    columns = _columns(store)
    texts = [field.name for field in columns if pyarrow.types.is_string(field.type)]
    # Dictionaries and statistics of floating-point arrays would take time and space.
    with parquet.ParquetWriter(file, columns, use_dictionary=texts, write_statistics=texts) as writer:
        rows: list[Any] = []
        num_bytes = 0
        for trace in traces:
            rows.append(_row(store, trace, columns))
            num_bytes += rows[-1].nbytes
            if num_bytes > _ROW_GROUP_BYTES:
                writer.write_table(pyarrow.Table.from_batches(rows, columns))
                rows, num_bytes = [], 0
        if rows:
            writer.write_table(pyarrow.Table.from_batches(rows, columns))


def _columns(store: TraceStore) -> Any:
    """Return the columns that a trace of the store may have."""
    internals, types = store.internals, dict(_TYPES)
    types |= dict.fromkeys(score_columns(store), pyarrow.float64())
    optional = {name for k in range(internals.manifest.num_segments) for name in internals.segment(k).optional_names}
    for name in schema.OPTIONAL_FIELDS.keys() - optional:
        types.pop(name, None)
    dtypes = dict.fromkeys(("hidden_states", "last_token"), store.hidden_dtype)
    dtypes |= dict.fromkeys(("attentions", "edge_weight"), store.attention_dtype) | {"edge_ptr": "int64"}
    names = {"attention": ["attentions"], "edges": ["edge_ptr", "edge_index", "edge_weight"]}
    for name in (name for field in internals.manifest.fields for name in names.get(field, [field])):
        types[name] = _list_type(dtypes.get(name, "int32"), _DIMENSIONS[name])
    types["tokens"] = _list_type("int32", 1)
    for name in schema.TOKEN_FIELDS.keys() & optional:
        field = schema.TOKEN_FIELDS[name]
        types[name] = _list_type(np.dtype(field.dtype).name, 2 if field.shape == schema.TOP_K else 1)
    return pyarrow.schema(types, metadata={"tracestore": json.dumps(internals.attributes.to_json())})


def _list_type(dtype: str, num_dimensions: int) -> Any:
    found = pyarrow.from_numpy_dtype("float32" if dtype == "bfloat16" else dtype)
    for _ in range(num_dimensions):
        found = pyarrow.list_(found)
    return found


def _row(store: TraceStore, trace: Trace, columns: Any) -> Any:
    """Return a trace as a record batch of one row, whose arrays are views where Arrow has their dtype."""
    arrays = {
        name: schema.as_float32(a, d) if d == "bfloat16" else a for name, (a, d) in arrays_of(store, trace).items()
    }
    values = row_of(store, trace)
    found = []
    for field in columns:
        if field.name in arrays:
            found.append(_nested(arrays[field.name], f"trace {trace.index} ({trace.question_id}), {field.name}"))
        else:
            found.append(pyarrow.array([without_surrogates(values.get(field.name))], field.type))
    return pyarrow.RecordBatch.from_arrays(found, schema=columns)


def _nested(array: np.ndarray, where: str) -> Any:
    """Return an array as one list of lists."""
    if array.size > _MAX_LIST_ITEMS:
        raise UsageError(
            f"{where}: found {array.size:,} values, expected at most {_MAX_LIST_ITEMS:,}: --format safetensors"
        )
    found = pyarrow.array(array.reshape(-1))
    for axis in reversed(range(array.ndim)):
        count = int(np.prod(array.shape[:axis]))
        offsets = np.arange(count + 1, dtype="<i4") * array.shape[axis]
        found = pyarrow.ListArray.from_arrays(pyarrow.array(offsets), found)
    return found
