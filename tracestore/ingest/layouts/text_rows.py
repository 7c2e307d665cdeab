"""Read traces of JSON, JSON Lines and CSV files, one line at a time or, with a limit, a whole file."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.containers import tables
from tracestore.ingest.containers.columns import Arena, Column, Input, ObjectColumn, Unit
from tracestore.ingest.containers.grouping import units_of
from tracestore.ingest.containers.keys import ID_KEYS, column_name, parse_key
from tracestore.ingest.files.byte_source import InflatedChunks, check_regular
from tracestore.ingest.files.decompress import compression_of
from tracestore.ingest.layouts.array_names import MIN_DIMENSIONS
from tracestore.ingest.layouts.records import traces_of_record
from tracestore.ingest.layouts.rows import has_dimension, id_column, units_of_rows
from tracestore.ingest.layouts.values import STATES, array_of

SUFFIXES = tuple(
    f"{name}{packed}"
    for name in (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
    for packed in ("", ".gz", ".bz2", ".xz", ".zst")
)
_COMPRESSED = re.compile(r"\.(?:gz|bz2|xz|zst)$")
_HEAD_BYTES = 1 << 20
_BLOCK_BYTES = 4 << 20
# Numbers with a fraction behind each other, or the base64 text of some of them.
_ARRAY = re.compile(
    rb"\[\s*(?:-?\d+\.\d+(?:[eE][-+]?\d+)?\s*,\s*){3}|(?:-?\d+\.\d*(?:[eE][-+]?\d+)?[ \n]+){3}|\"[A-Za-z0-9+/]{256}"
)


def holds_arrays(path: Path) -> bool:
    """Return whether the beginning of a file of text holds arrays of numbers, or cannot be inflated."""
    try:
        head = _head(path, _HEAD_BYTES)
    except InvalidInputError:
        return True  # refused by name
    except OSError:
        return False
    header = re.split(rb"[,\t]", head.partition(b"\n")[0])
    is_csv = _COMPRESSED.sub("", path.name).endswith((".csv", ".tsv"))
    is_numbered = is_csv and sum(name.rstrip(b'\r"')[-1:].isdigit() for name in header) >= MIN_DIMENSIONS
    names = [name.strip(b'\r"').decode("latin1") for name in header]
    return is_numbered or (is_csv and has_dimension(names)) or _ARRAY.search(head) is not None


def read_text_rows(source: Input) -> Iterator[Unit]:
    """Yield the traces of a file: a row is a trace, a layer or token of one, or a batch with lists of ids, or of all traces."""
    rows = _records(source.path)
    first = list(islice(rows, 2))
    count = _count(first[0]) if len(first) == 1 or (first and _has_ids(first[0])) else None
    name = PurePosixPath(_COMPRESSED.sub("", source.name))
    if len(first) == 1 and count is None and name.suffix == ".json" and id_column(first[0]) is None:
        first = [{"question_id": str(name.with_suffix(""))} | first[0]]
    if count is None:
        yield from units_of_rows(chain(first, rows), lambda _: _records(source.path), Arena(source.scratch))
        return
    for row in chain(first, rows):
        count = _count(row)
        yield from units_of({name: _column(name, value, count) for name, value in row.items()})


def _has_ids(row: dict[str, Any]) -> bool:
    """Return whether a row has a list of ids."""
    return any(isinstance(row.get(name), list) for key in ID_KEYS for name in (key, f"{key}s"))


def _count(row: dict[str, Any]) -> int | None:
    """Return the number of ids, labels or other values per trace of a row that holds lists; None for one trace."""
    counts = {len(v) for k, v in row.items() if column_name(k) == k.lower() and isinstance(v, list)}
    return counts.pop() if len(counts) == 1 else None


def _column(name: str, value: Any, count: int | None) -> Any:
    """Return a list of one value per trace as a column, and other values unchanged."""
    if count is None or not isinstance(value, list) or len(value) != count:
        return value
    key = parse_key(name)
    if key is None or key.field not in STATES:
        return ObjectColumn(value, (count,))
    array = array_of(value)
    return Column(array) if isinstance(array, np.ndarray) else ObjectColumn([array_of(v) for v in value], (count,))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for row in _rows(path):
        yield from traces_of_record(row)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    name = _COMPRESSED.sub("", path.name)
    if name.endswith((".jsonl", ".ndjson")):
        for number, line in enumerate(filter(bytes.strip, _lines(path))):
            yield _object(line, number)
        return
    data = _head(path, tables.MAX_BYTES + 1)
    if len(data) > tables.MAX_BYTES:
        raise InvalidInputError(
            f"found more than {tables.MAX_BYTES:,} bytes, which are parsed together; write JSON Lines, one trace per line"
        )
    yield from tables.parse(data, name)


def _object(line: bytes, number: int) -> dict[str, Any]:
    try:
        row = tables.load_json(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"row {number}: not JSON: {str(error)[:100]}") from None
    if not isinstance(row, dict):
        raise InvalidInputError(f"row {number}: found {type(row).__name__}, expected an object")
    return row


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file, inflated if it is compressed."""
    check_regular(path)
    with ExitStack() as resources:
        file = resources.enter_context(open(path, "rb"))
        compression = compression_of(file.read(8))
        file.seek(0)
        read: Callable[[], bytes] = partial(file.read, _BLOCK_BYTES)
        if compression is not None:
            read = resources.enter_context(closing(InflatedChunks(path, lambda: False, compression)))
        yield from iter(read, b"")


def _head(path: Path, count: int) -> bytes:
    """Return the first `count` bytes of a file."""
    found = bytearray()
    with closing(_blocks(path)) as blocks:  # type: ignore[type-var]
        for block in blocks:
            found += block
            if len(found) >= count:
                break
    return bytes(found[:count])


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file."""
    pieces: list[bytes] = []
    size = 0
    with closing(_blocks(path)) as blocks:  # type: ignore[type-var]
        for block in blocks:
            first, *others = block.split(b"\n")
            pieces.append(first)
            size += len(first)
            for other in others:
                yield b"".join(pieces)
                pieces, size = [other], len(other)
            if size > tables.MAX_LINE_BYTES:
                raise InvalidInputError(
                    f"found a line of more than {tables.MAX_LINE_BYTES:,} bytes; save such traces as .npz or .safetensors"
                )
    yield b"".join(pieces)
