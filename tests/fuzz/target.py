"""Functions that a fuzzer calls with an input: read a file, pack and touch every array; parse a layout, match names."""

import itertools
import tempfile
import tomllib
from pathlib import Path

import numpy as np

from tests.ingest.readers.trees import touch
from tracestore.errors import InvalidInputError, UsageError
from tracestore.ingest.builtin.parts import find_sources
from tracestore.ingest.files import byte_source
from tracestore.ingest.layout.addresses import parse_address
from tracestore.ingest.layout.language import fields_of_lines, parse_layout
from tracestore.ingest.layout.patterns import Pattern
from tracestore.ingest.layout.places import plan_of
from tracestore.ingest.readers.opening import open_tree
from tracestore.ingest.sources import read_traces
from tracestore.store.write.pack import pack_record
from tracestore.store.write.record import TraceRecord

# Small chunks: files of kilobytes then span several chunks as large files do, and the sanitizer
# need not clear megabytes for each file.
byte_source._CHUNK_BYTES = 1 << 10
_SUFFIXES = {"pickle": ".pkl", "zip": ".pt", "gzip": ".pkl.gz"}
_STATES = {"hidden_states": "**/{id}.pkl : hs -> L S D"}


def _touch(record: TraceRecord) -> None:
    arrays = [*(record.hidden or ()), *(record.attention or ())]
    for index, weight in record.edges or ():
        arrays += [index, weight]
    arrays += [a for a in (record.last_token, record.tokens) if a is not None]
    for array in arrays:
        # A copy walks the strides of the array.
        np.ascontiguousarray(array).view("u1").sum() if array.ndim else None


def _read_tree(path: Path) -> None:
    with open_tree(path) as root:
        touch(root)


def _read_records(path: Path, *, need_attention: bool) -> None:
    """Read the traces of the file by the built-in layouts, and pack them."""
    for source in find_sources([path], path.parent / "none"):
        for record in read_traces(source, need_attention):
            _touch(record)
            pack_record(record, attention="heads" if need_attention else "none", keep_dtype=need_attention)


def _is_accepted(work, *arguments, **options) -> bool:  # type: ignore[no-untyped-def]
    """Return whether a function returns. Raise unless a refusal is one line."""
    try:
        work(*arguments, **options)
    except (InvalidInputError, UsageError) as error:
        text = str(error)
        # What the user wrote may be repeated once.
        if "\n" in text or not text or len(text) > 600 + len(repr(arguments)):
            raise RuntimeError(f"a refusal that is not one line: {text!r}") from None
        return False
    return True


def _read_file(data: bytes, mode: str) -> bool:
    """Return whether the values of a file, or its traces, are read."""
    with tempfile.NamedTemporaryFile(suffix=_SUFFIXES[mode]) as file:
        file.write(data)
        file.flush()
        path = Path(file.name)
        # Each of them is read whatever the others end with.
        found = [_is_accepted(_read_tree, path)]
        found += [_is_accepted(_read_records, path, need_attention=need) for need in (True, False)]
    return any(found)


def _read_store(data: bytes) -> bool:
    from tests.fuzz.stores import read_store  # needs PyTorch, unlike the readers of files

    return read_store(data)


def _parse_lines(lines: list[str]) -> None:
    """Parse the lines of a layout, which survives as TOML."""
    layout = parse_layout(_STATES | fields_of_lines(lines))
    if parse_layout(tomllib.loads(layout.to_toml())) != layout:
        raise RuntimeError(f"another layout as TOML: {layout.to_toml()!r}")
    plan_of(layout)


def _match(pattern: str, name: str) -> None:
    for is_path in (False, True):
        Pattern(pattern, is_path=is_path).match(name)
    parse_address(pattern)


def _read_layout(data: bytes) -> bool:
    """Return whether lines are a layout; each line is a pattern for the next one, too."""
    lines = data.decode(errors="replace").split("\n")
    for pattern, name in itertools.pairwise(lines):
        _is_accepted(_match, pattern, name)
    return _is_accepted(_parse_lines, [line for line in lines if line])


# Function of each mode; it returns whether the input is accepted.
TARGETS = {
    "pickle": lambda data: _read_file(data, "pickle"),
    "zip": lambda data: _read_file(data, "zip"),
    "gzip": lambda data: _read_file(data, "gzip"),
    "layout": _read_layout,
    "store": _read_store,
}
