"""Compute what the pages of a Parquet file decode to, from their headers, before the library reads them.

Values take almost no bytes where they repeat: dictionaries and run lengths. The library allocates what the pages say,
and some damaged headers end the process in it.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tracestore._core.mapping import MappedFile
from tracestore.errors import InvalidInputError
from tracestore.ingest.files.limits import APPENDED

_MAX_FOOTER_BYTES = 64 << 20
_MAX_PAGE_BYTES = 128 << 20
# Values in one row that repeat: the library decodes at least one row at a time.
_MAX_REPEATED_BYTES = 96 << 20
_MAX_DEPTH = 16
_HEAD_BYTES = 256
_MAX_HEAD_BYTES = 1 << 20
_LEVEL_BYTES = 4
_WIDTHS = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8}  # bytes of a value by its physical type
_BYTE_ARRAY, _FIXED = 6, 7
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_DELTA_BYTE_ARRAY = 7
_DAMAGED = "truncated or damaged Parquet file"


@dataclass
class RowGroup:
    """Rows that are encoded together.

    Attributes
    ----------
    num_rows : int
        Number of rows.
    decoded_bytes : int
        Bytes of the decoded values; of a text in a dictionary, its place there.
    dictionary_columns : set of str
        Paths of columns of texts or bytes with a dictionary.
    """

    num_rows: int
    decoded_bytes: int
    dictionary_columns: set[str]


def row_groups(mapped: MappedFile) -> Iterator[RowGroup]:
    """Yield the row groups of a file after checking the sizes in the headers of their pages.

    Raises
    ------
    InvalidInputError
        If the file is damaged, or one row may decode to more than memory holds.
    """
    size = len(mapped)
    tail = mapped.read(max(0, size - 8), size)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != b"PAR1" or not 0 < length <= min(_MAX_FOOTER_BYTES, size - 12):
        raise InvalidInputError(f"{_DAMAGED}: no footer")
    try:
        footer, _ = _struct(mapped.read(size - 8 - length, size - 8), 0, 0)
        leaves = [element for element in footer[2] if 5 not in element]
        columns = [chunk[3] for group in footer.get(4, []) for chunk in group[1]]
        last = max([4, *((meta.get(11) or meta[9]) + meta[7] for meta in columns)])
        if b"PAR1PAR1" in mapped.read(last, size - 8 - length):  # where one file ends, and the next one begins
            raise InvalidInputError(APPENDED)
        for group in footer.get(4, []):
            yield _row_group(mapped, group, leaves)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, struct.error):
        raise InvalidInputError(f"{_DAMAGED}: its headers are wrong") from None


def _row_group(mapped: MappedFile, group: dict[int, Any], leaves: list[dict[int, Any]]) -> RowGroup:
    found = RowGroup(group[3], 0, set())
    if found.num_rows < 0 or len(group[1]) != len(leaves):
        raise ValueError
    for chunk, leaf in zip(group[1], leaves, strict=True):
        _add_chunk(mapped, chunk[3], leaf, found)
    return found


def _add_chunk(mapped: MappedFile, meta: dict[int, Any], leaf: dict[int, Any], found: RowGroup) -> None:
    """Add the values of the pages of one column."""
    path = b".".join(meta[3]).decode("utf-8", "replace")
    width = leaf[2] if meta[1] == _FIXED else 4 if meta[1] == _BYTE_ARRAY else _WIDTHS[meta[1]]
    position = min(meta[9], meta.get(11) or meta[9])
    end, expected = position + meta[7], meta[5]
    if not 0 <= position <= end <= len(mapped) or expected < 0 or width < 0:
        raise ValueError
    count = repeated = 0
    while position < end and count < expected:
        page, position = _page(mapped, position, end)
        if not 0 <= page[3] <= end - position or not 0 <= page[2] <= _MAX_PAGE_BYTES:
            raise InvalidInputError(f"found a page of {page[2]:,} bytes, expected at most {_MAX_PAGE_BYTES:,}")
        position += page[3]
        if page[1] == _DICTIONARY:
            found.dictionary_columns.update([path] * (meta[1] == _BYTE_ARRAY))
            found.decoded_bytes += page[2] + width * page[7][1]
            continue
        header = page.get(5) or page.get(8)
        if page[1] not in (_DATA, _DATA_V2) or header is None or header[1] < 0:
            continue
        encoding = header[2] if page[1] == _DATA else header[4]
        if encoding == _DELTA_BYTE_ARRAY:
            raise InvalidInputError(
                "found texts in the encoding DELTA_BYTE_ARRAY; write the file with the default encodings",
                field=path[:60],
            )
        count += header[1]
        decoded = header[1] * (width + _LEVEL_BYTES)
        found.decoded_bytes += decoded + (page[2] if meta[1] == _BYTE_ARRAY else 0)
        repeated += max(0, decoded - 8 * page[2])
    if repeated > _MAX_REPEATED_BYTES and count > found.num_rows:
        raise InvalidInputError(
            f"found {count:,} repeated values in {found.num_rows:,} rows; write smaller row groups", field=path[:60]
        )


def _page(mapped: MappedFile, position: int, end: int) -> tuple[dict[int, Any], int]:
    """Return the header of a page, and where its bytes begin."""
    size = _HEAD_BYTES
    while True:
        data = mapped.read(position, min(end, position + size))
        try:
            page, length = _struct(data, 0, 0)
            return page, position + length
        except IndexError:
            if len(data) < size or size >= _MAX_HEAD_BYTES:
                raise
            size *= 16  # statistics in a header hold texts


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError


def _struct(data: bytes, position: int, depth: int) -> tuple[dict[int, Any], int]:
    """Return the fields of a struct in Thrift's compact protocol by number, and where it ends."""
    if depth > _MAX_DEPTH:
        raise ValueError
    fields: dict[int, Any] = {}
    number = 0
    while (head := data[position]) != 0:
        position += 1
        if head >> 4:
            number += head >> 4
        else:
            raw, position = _varint(data, position)
            number = (raw >> 1) ^ -(raw & 1)
        kind = head & 0x0F
        if kind in (1, 2):
            fields[number] = kind == 1
        else:
            fields[number], position = _value(data, position, kind, depth)
    return fields, position + 1


def _value(data: bytes, position: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (4, 5, 6):
        raw, position = _varint(data, position)
        return (raw >> 1) ^ -(raw & 1), position
    if kind == 8:
        size, position = _varint(data, position)
        if position + size > len(data):
            raise IndexError
        return data[position : position + size], position + size
    if kind == 12:
        return _struct(data, position, depth + 1)
    if kind in (9, 10):
        head = data[position]
        position += 1
        size, inner = head >> 4, head & 0x0F
        if size == 15:
            size, position = _varint(data, position)
        if size > len(data) - position:
            raise IndexError
        items = []
        for _ in range(size):
            item, position = _value(data, position, inner, depth + 1)
            items.append(item)
        return items, position
    if kind in (1, 2, 3):
        return data[position], position + 1
    if kind == 7:
        return struct.unpack_from("<d", data, position)[0], position + 8
    raise ValueError
