"""Give the traces of a file the values of the rows of a table next to it."""

from collections.abc import Mapping, Sequence
from typing import Any

from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.keys import ID_KEYS
from tracestore.ingest.containers.tables import TableRows
from tracestore.ingest.layouts.rows import id_column
from tracestore.ingest.roles.columns import counts_of, has_one_id
from tracestore.ingest.roles.keys import LABELS, QUESTIONS, WORD_COLUMNS, KeyOptions, direction_of, normalized
from tracestore.ingest.roles.layout import opened, shape_of


def with_columns(value: Any, rows: TableRows) -> Any:
    """Return arrays without ids together with the columns of a table that has a row for each of their traces."""
    fields = opened(value)
    if (len(rows) < 2 and not rows.is_chunk) or rows.is_by_id:
        return value
    fields = fields if isinstance(fields, dict) else {"hidden_states": value}
    hidden = next((fields[key] for key in ("hidden_states", "last_token") if fields.get(key) is not None), None)
    is_list = isinstance(items := opened(hidden), list) and len(items) == len(rows)
    if is_list and any(isinstance(opened(item), dict) for item in items):
        return value  # the traces
    if hidden is None or has_one_id(fields) or (counts_of(fields, "hidden_states") and _has_ids(fields)):
        return value
    if not is_list and len(rows) not in shape_of(hidden)[:2]:
        return value
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names if name not in fields}
    return dict(fields) | columns


def axis_of_chunk(rows: TableRows | None, axis: int | None, shape: Sequence[int | None]) -> int | None:
    """Return the axis that counted traces in the chunk before, if it does in the next one of this shape; else None."""
    is_same = rows is not None and rows.is_chunk and axis is not None and shape[axis : axis + 1] == (len(rows),)
    return axis if is_same else None


def _has_ids(fields: Mapping[Any, Any]) -> bool:
    return any(f"{name}s" in fields or name in fields for name in ID_KEYS)


def with_rows(
    traces: Sequence[dict[Any, Any]], rows: TableRows, options: KeyOptions, *, is_whole: bool
) -> list[dict[Any, Any]]:
    """Return traces with the values of their rows: by id, by question, or by position if there are as many rows.

    Values of a trace take precedence over those of its row. `is_whole`: these are all traces of the file.

    Raises
    ------
    InvalidInputError
        If scores or labels would be lost, because the traces are not known together and have nothing of a row.
    """
    by_id = rows.by_id
    names = (*(key for name, key in options.renamed if name == "question_id"), "global_example_id", *ID_KEYS)
    ids = [_id_of(trace, names) for trace in traces]
    if by_id and not any(ids):  # numbers that may count something else, unless they are the ids of the table
        numbers = [_id_of(trace, (id_column(trace) or "",)) for trace in traces]
        ids = numbers if len({*numbers} & by_id.keys()) == len(traces) else ids
    if by_id and any(key in by_id for key in ids):
        return _merged(traces, ids, by_id)
    texts = [_id_of(trace, QUESTIONS) for trace in traces]
    if not any(ids) and any(text in rows.by_question for text in texts):
        return _merged(traces, texts, rows.by_question)
    if len(rows) == len(traces) and is_whole and not rows.is_by_id and (len(traces) == 1 or not any(ids)):
        return [row | trace for row, trace in zip(rows, traces, strict=True)]
    if not is_whole and len(rows) > 1 and not (rows.is_by_id or by_id) and _has_label(rows[0]):
        raise InvalidInputError(
            f"the rows of {rows.path.name} have no ids, and a list of dicts is read one by one; give its rows the "
            "column question_id or question as in the traces"
        )
    return list(traces)


def _merged(
    traces: Sequence[dict[Any, Any]], keys: Sequence[str | None], rows: Mapping[Any, dict[str, Any]]
) -> list[dict[Any, Any]]:
    """Return each trace with the values of the row of its key, if there is one."""
    return [rows.get(key, {}) | trace for key, trace in zip(keys, traces, strict=True)]


def _has_label(row: Mapping[str, Any]) -> bool:
    return any(direction_of(name) is not None or normalized(name) in (*WORD_COLUMNS, LABELS) for name in row)


def _id_of(trace: Mapping[Any, Any], names: Sequence[str]) -> str | None:
    value = next((trace[name] for name in names if trace.get(name) is not None), None)
    return str(value) if isinstance(value, str | int) else None


def check_rows(count: int, rows: TableRows) -> None:
    """Raise InvalidInputError if a table has more rows than one, and another number of them than there are traces."""
    if len(rows) not in (1, count) and not rows.is_by_id:
        raise InvalidInputError(f"{rows.path.name} has {len(rows)} rows for {count} traces")
