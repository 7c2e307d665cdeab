"""Traces behind each other in one array, which offsets, lengths or ranges of rows take apart."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.columns import Column
from tracestore.ingest.containers.keys import LENGTHS
from tracestore.ingest.containers.tables import TableRows

# Names of N + 1 offsets; of N lengths: LENGTHS. Whether the values fit decides, not the name alone.
_OFFSETS = re.compile(
    r"(?:.*_)?(?:offsets?|indptr|ptr|row_?splits|cu_?(?:seq_?)?lens?|cum(?:ulative|sum)?_?(?:lengths?|lens?))", re.I
)
# Names of the id of the trace of each token, not those of parts of a text. prompt_ids means tokens where no others are.
_IDS_OF_TOKENS = re.compile(
    r"(?:example|sample|question|doc(?:ument)?|seq|trace|item|prompt)_?(?:ids?|idxs?|ind(?:ex|ices))", re.I
)
# Names of the first row of a trace and of the row after its last one, in a table. Names without "row" may mean other
# ranges, such as that of the answer: these have to follow each other without gaps.
_RANGES = (
    *(("row_start", "row_end"), ("row_begin", "row_end"), ("start_row", "end_row")),
    *(("start", "end"), ("begin", "end"), ("start_idx", "end_idx"), ("token_start", "token_end")),
)
# Names of both in a list of two.
_SPANS = ("row_range", "row_span", "rows", "token_range", "span", "range", "bounds")
_STATES = ("hidden_states", "attentions", "last_token")


@dataclass(frozen=True)
class Ragged:
    """Traces behind each other.

    Attributes
    ----------
    bounds : tuple of (int, int)
        First token of each trace, and the token after its last one.
    num_tokens : int
        Number of tokens of all traces.
    is_token_major : bool
        Whether tokens are the first axis of hidden states.
    """

    bounds: tuple[tuple[int, int], ...]
    num_tokens: int
    is_token_major: bool

    def fields(self, fields: Mapping[str, Any], k: int) -> dict[str, Any]:
        """Return the fields of trace `k`: its tokens, its value of those with one value per trace, and all others."""
        values: dict[str, Any] = {}
        for name, value in fields.items():
            if isinstance(value, dict) and name in _STATES:
                values[name] = {number: self._part(layer, k, is_array=True) for number, layer in value.items()}
            elif isinstance(value, Column):
                values[name] = self._part(value, k, is_array=name in _STATES)
            else:
                values[name] = value
        return values

    def _part(self, column: Column, k: int, *, is_array: bool) -> np.ndarray:
        if self.num_tokens in column.shape[: 2 if is_array else 1]:
            return column.part(column.shape.index(self.num_tokens), *self.bounds[k])
        if column.ndim and column.shape[0] == len(self.bounds) and not is_array:
            return column.row(k)
        return column.whole()


def ragged(fields: dict[str, Any], rows: TableRows | None) -> Ragged | None:
    """Return how the tokens of an array belong to traces; None if each row of it is one trace, or all are.

    Arrays of offsets and lengths are removed from `fields`.

    Parameters
    ----------
    fields : dict[str, Any]
        Fields of a unit.
    rows : TableRows, optional
        Rows of a table next to the unit, which may hold ranges of rows or lengths.

    Raises
    ------
    InvalidInputError
        If offsets or ranges do not fit the hidden states.
    """
    hidden = fields.get("hidden_states")
    first = next(iter(hidden.values()), None) if isinstance(hidden, dict) else hidden
    if not isinstance(first, Column) or first.ndim not in (2, 3):
        return None
    extents = first.shape[:-1]
    found = _find(fields, extents, rows)
    if found is not None and "attentions" in fields:
        raise InvalidInputError(
            "found attention of several traces in one array; save one array per trace", field="attentions"
        )
    return found


def is_bounds(name: str) -> bool:
    """Return whether a name is that of offsets or lengths of traces."""
    return name in LENGTHS or _OFFSETS.fullmatch(name) is not None


def _find(fields: dict[str, Any], extents: tuple[int, ...], rows: TableRows | None) -> Ragged | None:
    for name in [n for n in fields if _OFFSETS.fullmatch(n)]:
        values = _integers(fields[name])
        if values is None or len(values) in extents or len(values) < 2:
            continue  # such as the offset of each token in the text
        return _checked(list(pairwise(values)), extents, name, fields, is_whole=True)
    for name in [n for n in fields if n in LENGTHS]:
        values = _integers(fields[name])
        if values is not None and len(values) > 1 and sum(values) in extents and min(values) > 0:
            ends = np.cumsum([0, *values]).tolist()
            return _checked(list(pairwise(ends)), extents, name, fields, is_whole=True)
    for names in (*_RANGES, *((f"{begin}s", f"{end}s") for begin, end in _RANGES)):
        begins, ends = (_integers(fields.get(name)) for name in names)
        if begins and ends and begins == [0, *ends[:-1]] and ends[-1] in extents:
            fields.pop(names[0])
            return _checked(list(zip(begins, ends, strict=True)), extents, names[1], fields, is_whole=True)
    return _from_ids(fields, extents) or (_from_rows(rows, extents, fields) if rows is not None and len(rows) else None)


def _from_ids(fields: dict[str, Any], extents: tuple[int, ...]) -> Ragged | None:
    """Return the traces that an id for each token tells, and keep one id for each trace."""
    for name in [n for n in fields if _IDS_OF_TOKENS.fullmatch(n)]:
        values = np.array(_integers(fields[name]) or [], "i8")
        begins = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist()]
        ids = values[begins] if len(values) else values
        if not 1 < len(ids) < len(values) or len(values) not in extents or len(np.unique(ids)) < len(ids):
            continue
        if "tokens" in fields or ((np.diff(ids) > 0).all() and not name.lower().startswith("prompt")):
            bounds = list(pairwise([*begins, len(values)]))
            found = _checked(bounds, extents, name, fields, is_whole=True)
            fields[name] = Column(ids)
            return found
    return None


def _from_rows(rows: TableRows, extents: tuple[int, ...], fields: dict[str, Any]) -> Ragged | None:
    row = rows[0]
    span = next((name for name in _SPANS if isinstance(row.get(name), list) and len(row[name]) == 2), None)
    if span is not None:
        pairs: list[Any] = [r.get(span) for r in rows]
        is_regular = all(isinstance(pair, list) and list(map(type, pair)) == [int, int] for pair in pairs)
        if is_regular and all(b[0] == a[1] for a, b in pairwise([[0, 0], *pairs, [extents[0], 0]])):
            return _checked([(first, end) for first, end in pairs], extents, span, fields, is_whole=False)
    for begin, end in _RANGES:
        if type(row.get(begin)) is int and type(row.get(end)) is int:
            bounds = [(r.get(begin), r.get(end)) for r in rows]
            if not all(type(b) is int and type(e) is int for b, e in bounds):
                raise InvalidInputError(f"rows without {begin} or {end}", field="hidden_states")
            follow = all(end == begin for (_, end), (begin, _) in pairwise([(0, 0), *bounds, (extents[0], 0)]))
            if "row" not in begin and not follow:
                continue
            return _checked(bounds, extents, f"{begin} and {end}", fields, is_whole=False)
    name = next((n for n in LENGTHS if type(row.get(n)) is int), None)
    if name is None or len(rows) < 2:
        return None
    lengths = [r[name] for r in rows if type(r.get(name)) is int and r[name] > 0]
    if len(lengths) == len(rows) and sum(lengths) in extents:
        return _checked(list(pairwise(np.cumsum([0, *lengths]).tolist())), extents, name, {}, is_whole=True)
    return None


def _integers(value: Any) -> list[int] | None:
    if isinstance(value, Column) and value.ndim == 1 and value.dtype.kind in "iu":
        return [int(n) for n in value.whole()]
    return None


def _checked(
    bounds: list[Any], extents: tuple[int, ...], name: str, fields: dict[str, Any], *, is_whole: bool
) -> Ragged:
    """Return the traces between bounds after comparing them with the extents of hidden_states without its last one."""
    last = bounds[-1][1] if is_whole else max(end for _, end in bounds)
    axes = [n for n in extents if n == last] if is_whole else [n for n in extents[:1] if n >= last]
    is_ordered = all(0 <= begin < end for begin, end in bounds) and bounds[0][0] >= 0
    if len(axes) != 1 or not is_ordered or (is_whole and bounds[0][0] != 0):
        raise InvalidInputError(
            f"found {name[:60]} from {bounds[0][0]} to {last}, expected increasing numbers of tokens up to the "
            f"tokens of hidden_states, one of {extents}; write them again from the lengths of the traces",
            field=name[:60],
        )
    fields.pop(name, None)
    return Ragged(tuple((int(b), int(e)) for b, e in bounds), axes[0], extents[0] == axes[0])
