"""The tree of JSON, JSON Lines, CSV, TSV and text files."""

import csv
import io
import re
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.files.byte_source import InflatedChunks
from tracestore.ingest.files.json_text import parse_json
from tracestore.ingest.readers.tree import ListItems, MappingGroup, NumpyArray, StreamItems, Value

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
MAX_LINE_BYTES = 64 << 20
_MAX_COLUMNS = 500_000
_BUFFER_BYTES = 1 << 20
_SEPARATORS, _MAX_HEADER = ",;\t|", 1 << 16  # characters of a first line that show its separator
_NUMBER = re.compile(r"\s*[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?\s*|nan|[-+]?inf", re.IGNORECASE)


def read_text(path: Path, name: str, compression: str | None, resources: ExitStack) -> Value:
    """Return the tree of a file with one of SUFFIXES.

    Lines, and rows of a table, are items that come one by one. A row is a group by the names of the first row, and its
    cells are str, or None where they are empty. Without a header, the rows are arrays of numbers. JSON is one value.
    """
    file = _opened(path, compression, resources)
    if name.endswith((".jsonl", ".ndjson")):
        return StreamItems(_json_lines(_lines(file)))
    if name.endswith(".json"):
        return json_tree(parse_json(_whole(file), "not JSON"))
    lines = _decoded(_lines(file))
    if name.endswith(".txt"):
        return StreamItems(line.rstrip("\r\n") for line in lines)
    return StreamItems(_rows(lines, "\t" if name.endswith(".tsv") else ","))


def _separator(header: str, usual: str) -> str:
    """Return the character that separates the cells of a first line: the usual one, or the only other that does."""
    try:
        found = [char for char in _SEPARATORS if len(next(csv.reader([header], delimiter=char), ())) > 1]
    except csv.Error:
        return usual  # refused where it is read
    if usual in found or not found:
        return usual
    if len(found) > 1:
        raise InvalidInputError(f"the first row may be separated by {' or '.join(map(repr, found))}; write commas")
    return found[0]


class _Inflated(io.RawIOBase):
    """The bytes of a compressed file."""

    def __init__(self, chunks: InflatedChunks) -> None:
        self._chunks, self._rest = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._rest = self._rest or memoryview(self._chunks())
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def _opened(path: Path, compression: str | None, resources: ExitStack) -> io.BufferedReader:
    """Open a file, whose bytes are inflated if it is compressed."""
    if compression is None:
        return resources.enter_context(open(path, "rb"))
    chunks = resources.enter_context(closing(InflatedChunks(path, lambda: False, compression)))
    return io.BufferedReader(_Inflated(chunks), _BUFFER_BYTES)


def _whole(file: io.BufferedReader) -> bytes:
    found = file.read(MAX_LINE_BYTES + 1)
    if len(found) > MAX_LINE_BYTES:
        raise InvalidInputError(
            f"found more than {MAX_LINE_BYTES:,} bytes, which are parsed together; write JSON Lines, one trace per line"
        )
    return found


def _lines(file: io.BufferedReader) -> Iterator[bytes]:
    """Yield the lines of a file with their ends."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise InvalidInputError(
                f"found a line of more than {MAX_LINE_BYTES:,} bytes; save such traces as .npz or .safetensors"
            )
        yield line


def _decoded(lines: Iterator[bytes]) -> Iterator[str]:
    for number, line in enumerate(lines):
        try:
            yield line.decode("utf-8" if number else "utf-8-sig", "surrogatepass")  # as our own tables write them
        except UnicodeDecodeError:
            raise InvalidInputError(f"line {number + 1}: found bytes that are not UTF-8 text") from None


def _json_lines(lines: Iterator[bytes]) -> Iterator[Value]:
    for number, line in enumerate(filter(bytes.strip, lines)):
        end = "" if line.endswith(b"\n") else " or a last line that is cut off"
        yield json_tree(parse_json(line, f"row {number}: not JSON{end}"))


def json_tree(value: Any) -> Value:
    """Return a value of JSON as a value of the tree."""
    if isinstance(value, dict):
        return MappingGroup(value, json_tree)
    return ListItems(value, json_tree) if isinstance(value, list) else value


def _rows(lines: Iterator[str], usual: str) -> Iterator[Value]:
    csv.field_size_limit(MAX_LINE_BYTES)
    first = next((line for line in lines if line.strip()), "")
    if first.startswith("#"):
        raise InvalidInputError("the first row begins with #; remove comments, and the mark in front of a header")
    lines = chain((first,), lines)
    delimiter = _separator(first[:_MAX_HEADER], usual)
    size = count = width = 0  # of the row

    def counted() -> Iterator[str]:
        nonlocal size, count
        for line in lines:
            size, count = size + len(line), count + 1 + line.count(delimiter)
            if size > MAX_LINE_BYTES or count > _MAX_COLUMNS:
                raise InvalidInputError(
                    f"found a row of more than {MAX_LINE_BYTES:,} bytes, or {_MAX_COLUMNS:,} lines and columns"
                )
            yield line

    header: list[str] | None = None
    try:
        for number, cells in enumerate(filter(None, csv.reader(counted(), delimiter=delimiter, strict=True))):
            if count > len(cells) and _are_rows(cells, delimiter):
                raise InvalidInputError(
                    f"row {number}: a text in quotes holds the ends of rows: a quote without its pair? Write each quote of a "
                    "text twice, or write JSON Lines"
                )
            size = count = 0
            width = width if number else len(cells)
            if number == 0 and not _is_numbers(cells):
                header = _checked(cells)
                continue
            if len(cells) != width:
                raise InvalidInputError(
                    f"row {number} has {len(cells)} values, the first row {width}; a text that holds {delimiter!r} is "
                    "written in quotes"
                )
            if header is None:
                yield _vector(cells, number)
            else:
                yield MappingGroup(dict(zip(header, cells, strict=True)), _cell)
    except csv.Error as error:
        raise InvalidInputError(f"not a table: {' '.join(str(error).split())[:200]}") from None


def _are_rows(cells: list[str], delimiter: str) -> bool:
    """Return whether the lines of a row are as wide as it, and, as texts have separators, begin alike except for numbers."""
    lines = delimiter.join(cells).split("\n")
    first = {re.sub(r"\d+", "0", line.partition(delimiter)[0]) for line in lines}
    are_wide = {line.count(delimiter) for line in lines} == {len(cells) - 1}
    return len(lines) > 1 < len(cells) and are_wide and (delimiter == "\t" or len(first) == 1)


def _cell(text: str) -> Value:
    return text or None


def _vector(cells: list[str], number: int) -> Value:
    try:
        return NumpyArray(np.array(cells, "<f8"))
    except ValueError:
        raise InvalidInputError(f"row {number}: expected numbers, as in the first row, which is no header") from None


def _is_numbers(cells: list[str]) -> bool:
    """Return whether a first row is no header: all of it are numbers, some of them with a fraction."""
    return all(map(_NUMBER.fullmatch, cells)) and not all(cell.strip().isdecimal() for cell in cells)


def _checked(header: list[str]) -> list[str]:
    if len(set(header)) != len(header):
        raise InvalidInputError("expected a header with different names")
    if value := next((cell for cell in header if _NUMBER.fullmatch(cell) and not cell.strip(" +-").isalnum()), None):
        raise InvalidInputError(f"the first row holds the number {value.strip()}; the first row names the columns")
    is_integers = all(cell.strip().isdecimal() for cell in header)
    if is_integers and header not in ([str(k + n) for k in range(len(header))] for n in (0, 1)):
        raise InvalidInputError(
            "found a first row of integers, which may be values; give the columns a header of names"
        )
    return header
