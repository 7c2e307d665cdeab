"""The rows of each trace on an axis along which the tokens of all traces lie behind each other (rule 9)."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.execute.join import Column
from tracestore.ingest.execute.row_numbers import key_words
from tracestore.ingest.execute.values import describe, number
from tracestore.ingest.layout.places import Plan
from tracestore.ingest.readers.tree import Items, as_array
from tracestore.store.vocabulary import SYNONYMS

# What gives the rows of each trace.
RANGES = ("S.offsets", "S.starts", "S.owner", "S.ends", "S.lengths")
_NAMES = {name: field for field in ("S.offsets", "S.starts", "S.ends") for name in SYNONYMS[field]}
_MAX_DIGITS = 18
Spans = list[tuple[int, int]]


def rows_along_n(column: Column, environment: Mapping[str, Any]) -> np.ndarray:
    """Return the values of a column along N."""
    cells = column.cells(environment)
    if cells and (array := as_array(cells[0].value)) is not None:
        return array.read()
    if cells and column.place.name in ("S.offsets", "S.owner"):
        values = cells[0].value if isinstance(cells[0].value, Items) else [cells[0].value]
        other = next((value for value in values if not isinstance(value, int)), None)
        raise InvalidInputError(f"found {describe(other)}, expected integers", field=column.place.name)
    count = column.num_rows(environment) or 0
    values = [column.scalar({**environment, "N": n, "N*": n}, {"N": n}) for n in range(count)]
    if any(type(value) is str for value in values):  # a table of texts
        values = [number(value, "row") for value in values]
    return np.asarray(values)


class RowStarts:
    """Compare integers of rows that no line names with the rows that `S.lengths` alone give (rule 9).

    Parameters
    ----------
    plan : Plan
    tables : RowStarts, optional
        The rows of tables, which are compared next to those of one source.
    """

    def __init__(self, plan: Plan, tables: "RowStarts | None" = None) -> None:
        self._is_needed = plan.layout.addresses.keys() & set(RANGES) == {"S.lengths"}
        # By path and key: what joins the rows, and their values.
        self._columns: dict[tuple[str, str], tuple[list[str], dict[tuple[Any, ...], int]]] = {}
        self._tables = tables

    def add(self, prefix: str, key: str, value: Any, bound: Mapping[str, Any]) -> None:
        """Add a value of the next row of a list or table."""
        is_text = type(value) is str and value.isdecimal() and len(value) <= _MAX_DIGITS
        if self._is_needed and "N" in bound and (type(value) is int or is_text):
            names = [name for name in bound if name != "file" and name[0] != "*"]
            _, values = self._columns.setdefault((prefix, key), (names, {}))
            values[tuple(map(bound.get, names))] = int(value)

    def checked(self, spans: Spans, environment: Mapping[str, Any]) -> Spans:
        """Return the rows of each trace; refuse those that a column contradicts [rows in the order of workers].

        By its name, or because such rows cover the axis, too, it gives the first or the last row of each trace.
        """
        of_tables = {} if self._tables is None else self._tables._columns
        for (prefix, key), (names, values) in [*self._columns.items(), *of_tables.items()]:
            rows = [tuple(n if name == "N" else environment.get(name) for name in names) for n in range(len(spans))]
            pairs = [(values[row], span) for row, span in zip(rows, spans, strict=True) if row in values]
            wrong = [next((pair for pair in pairs if pair[0] != pair[1][at]), None) for at in (0, 1)]
            if wrong[0] is None or wrong[1] is None:
                continue
            starts = [(value, value + end - begin) for value, (begin, end) in pairs]
            ends = [(value - end + begin, value) for value, (begin, end) in pairs]
            field = _NAMES.get(" ".join(key_words(key)), "")
            field = "S.ends" if covers(ends) else "S.starts" if covers(starts) else field
            if field:
                value, (begin, end) = wrong[0]
                raise InvalidInputError(
                    f"{prefix}{key}: found {value} where S.lengths in the order of the rows give the rows {begin} to {end}; "
                    f'{field.replace("offsets", "starts")} = "{prefix}{key}" next to S.lengths if it gives the rows '
                    f'of each trace, ignore = ["{prefix}{key}"] if not',
                    field="S.lengths",
                )
        return spans


def covers(spans: Spans) -> bool:
    """Return whether ranges cover an axis in some order."""
    ordered = sorted(spans)
    return [begin for begin, _ in ordered] == [0, *(end for _, end in ordered)][: len(ordered)]


def ranges_of(known: dict[str, np.ndarray], total: int) -> Spans:
    """Return the tokens of each trace on an axis along which all lie behind each other (rule 9).

    Parameters
    ----------
    known : dict
        Arrays by their fields: S.offsets, S.lengths, S.owner, or two of S.starts, S.ends and S.lengths.
    total : int
        Extent of the axis.

    Raises
    ------
    InvalidInputError
        If the ranges do not cover the axis, or overlap.
    """
    name = next((name for name in RANGES if name in known), "")
    values: dict[str, Any] = {name: _integers(array, name) for name, array in known.items()}
    spans = _spans_of(name, values)
    _check_cover(spans, total, name)
    if "S.owner" in values:
        values["S.owner"] = _runs(values["S.owner"])
    for of, own in (
        ("S.lengths", [end - begin for begin, end in spans]),
        ("S.starts", [span[0] for span in spans]),
        ("S.ends", [span[1] for span in spans]),
        ("S.owner", spans),
    ):
        if values.get(of, own) != own:
            raise InvalidInputError(f"found other rows than {name}: rows in another order?", field=of)
    return spans


def _spans_of(name: str, values: Mapping[str, list[int]]) -> Spans:
    """Return the rows of each trace as a field gives them, S.starts and S.ends also next to S.lengths."""
    starts, ends, lengths = (values.get(of, []) for of in ("S.starts", "S.ends", "S.lengths"))
    if name == "S.starts" and "S.ends" not in values and len(lengths) == len(starts):
        ends = [*map(sum, zip(starts, lengths, strict=True))]
    if name == "S.ends" and len(lengths) == len(ends):
        starts = [end - length for end, length in zip(ends, lengths, strict=True)]
    if not name or (name in ("S.starts", "S.ends") and len(starts) != len(ends)):
        needed = "S.offsets, S.lengths, S.owner, or two of S.starts, S.ends and S.lengths, as many of each"
        raise InvalidInputError(f"traces behind each other need {needed}")
    if name == "S.offsets":
        return list(itertools.pairwise([0] * (values[name][:1] != [0]) + values[name]))
    if name == "S.lengths":
        return list(itertools.pairwise(itertools.accumulate(lengths, initial=0)))
    if name == "S.owner":
        if values[name] != sorted(values[name]):
            raise InvalidInputError("found owners that are not sorted", field=name)
        return _runs(values[name])
    return list(zip(starts, ends, strict=True))


def _runs(owners: list[int]) -> list[tuple[int, int]]:
    """Return the run of each owner, in the order of the owners."""
    runs: dict[int, tuple[int, int]] = {}
    begin = 0
    for owner, run in itertools.groupby(owners):
        if owner in runs:
            raise InvalidInputError("found rows of one trace in several places", field="S.owner")
        runs[owner] = begin, begin + len(list(run))
        begin = runs[owner][1]
    return [runs[owner] for owner in sorted(runs)]


def _check_cover(spans: Spans, total: int, name: str) -> None:
    """Rule 9: ranges are disjoint and cover the axis; each has a token."""
    position = 0
    for k, (begin, end) in enumerate(sorted(spans)):
        if begin != position:
            what = "overlap" if begin < position else "leave a gap"
            raise InvalidInputError(f"ranges {what} at row {min(begin, position):,}", field=name)
        if end <= begin:
            raise InvalidInputError(f"trace {k} has no tokens: {begin} to {end}", field=name)
        position = end
    if position != total:
        raise InvalidInputError(
            f"ranges end at {position:,}, expected {total:,} rows; cut rows behind the last trace", field=name
        )


def _integers(array: np.ndarray, name: str) -> list[int]:
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidInputError(f"found {array.dtype.name} {array.shape}, expected integers", field=name)
    return [int(value) for value in array.tolist()]
