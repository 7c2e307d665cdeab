"""Files that belong together: they hold fields, layers or tokens of the same traces, as their names and folders state."""

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from tracestore._core.pickle import BufferReader
from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.columns import Column, Input, plain
from tracestore.ingest.containers.grouping import natural_key
from tracestore.ingest.containers.keys import ID_KEYS, MODEL_NUMBER, column_name
from tracestore.ingest.containers.registry import reader_of
from tracestore.ingest.files.byte_source import InflatedChunks, check_regular
from tracestore.ingest.layouts.parts import ARRAYS, Part, Place, join_parts, parse_atom, parse_path
from tracestore.ingest.layouts.values import array_of
from tracestore.ingest.pickles import torch_file
from tracestore.ingest.pickles.pickle_reader import pickle_reader
from tracestore.ingest.roles.keys import normalized
from tracestore.ingest.roles.layout import opened, shape_of
from tracestore.store.io.scratch import Scratch

_TEXTS = {"question": "prompt", "answer": "response", "output": "response"}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_TEXT = (".json", ".txt")
_SHARD = re.compile(r"(?:shard|batch|part|chunk|fold|split|file|rank|worker|data)s?[_\-.]?\d", re.IGNORECASE)
_RANGE = re.compile(r"(?:rows?_)?(\d+)(?:_to_|[_\-])(\d+)", re.IGNORECASE)
_CHUNK = re.compile(r"(.+?)[._\-]?(?:shard|batch|part|chunk)?[._\-]?(\d{1,6})", re.IGNORECASE)
_SUFFIXES_OF_CHUNKS = (".pt", ".pth", ".npy", ".pkl", ".pickle", ".p")
_IDS = frozenset((*ID_KEYS, *(f"{name}s" for name in ID_KEYS)))
_MAX_TEXT_BYTES = 64 << 20
_MAX_DEPTH = 4


def place_of(path: PurePath) -> Place:
    """Return the place that the names of a relative path state."""
    name = path.name.removesuffix(path.suffix) if path.suffix in _COMPRESSED else path.name
    name = name.rpartition(".")[0] or name
    place = parse_path(*path.parts[:-1], name)
    # The name of a folder such as output is that of a field by chance.
    if place.has_role and (place.field in ARRAYS or parse_path(name).has_role):
        return place
    return _with_field_between(name, path.parts[:-1]) or place


def _with_field_between(name: str, folders: tuple[str, ...]) -> Place | None:
    """Return the place of a file with the name of a field between others: llama-hidden_states-nq; None for another one."""
    marks = list(re.finditer(r"[._\- ]", name))
    spans = [
        (one, other) for k, one in enumerate(marks) for other in marks[k + 1 :] if one.start() and name[other.end() :]
    ]
    for one, other in sorted(spans, key=lambda pair: pair[0].end() - pair[1].start()):
        place = parse_atom(name[one.end() : other.start()])
        if place is not None and place.field and not place.segment:
            return place._replace(trace="/".join((*folders, name[: one.end()] + name[other.end() :])))
    return None


def file_groups(paths: Sequence[PurePath]) -> dict[str, list[PurePath]]:
    """Return the files that hold parts of the same traces, by what is left of their names.

    Parameters
    ----------
    paths : sequence of PurePath
        Paths relative to the folder that was searched.

    Returns
    -------
    dict of str to list of PurePath
        Groups of at least two files in different places, one of which holds hidden states.
    """
    groups: dict[str, dict[Place, PurePath]] = defaultdict(dict)
    several: set[str] = set()
    for path in paths:
        place = place_of(path)
        if place.has_role:
            several |= {place.trace} if place in groups[place.trace] else set()
            groups[place.trace][place] = path
    found = {}
    for trace, places in groups.items():
        fields = {place.field for place in places}
        is_whole = any(p.is_states or (p.segment and p.field == "") for p in places) and not fields & {
            "meta",
            "metadata",
        }
        is_range = is_whole and _RANGE.fullmatch(trace.rpartition("/")[2]) is not None
        if (len(places) > 1 or is_range) and is_whole and trace not in several:
            found[trace] = sorted(places.values(), key=lambda path: natural_key(path.as_posix()))
    ranges = [trace for trace, paths in found.items() if len(paths) == 1]
    if ranges and not are_rows([trace.rpartition("/")[2] for trace in ranges]):
        found = {trace: paths for trace, paths in found.items() if len(paths) > 1}
    return found


def rows_of_name(name: str) -> range | None:
    """Return the rows that a name such as 0_4 or 0-4 states; None for another name."""
    match = _RANGE.fullmatch(name)
    return None if match is None else range(int(match[1]), int(match[2]))


def are_rows(groups: Sequence[str]) -> bool:
    """Return whether names are those of ranges of rows of one array: layer_8_0.pt and layer_8_25.pt, not _0 and _1."""
    ranges = sorted((r for name in groups if (r := rows_of_name(name)) is not None), key=lambda r: r.start)
    if ranges and len(ranges) == len(groups):
        return len(ranges) > 1 and ranges[0].start == 0 and all(a.stop == b.start for a, b in pairwise(ranges))
    numbers = sorted(int(name) for name in groups if name.isdecimal())
    return len(numbers) == len(groups) > 1 and numbers[0] == 0 and numbers != list(range(len(numbers)))


def is_joined(parts: Sequence[Path]) -> bool:
    """Return whether the files of a source are joined by their names; Arrow data sets and arrays of NumPy are not."""
    if all(part.suffix == ".arrow" for part in parts):
        return False
    if any(part.suffix != ".npy" for part in parts):
        return True
    folder = parts[0].parent
    if any(part.parent != folder and not column_name(part.stem) for part in parts):
        return True
    places = [parse_path(part.stem) for part in parts]
    if any(place.token is not None or place.segment or rows_of_name(place.trace) for place in places):
        return True
    if any("__" in part.stem for part in parts):  # FIELD__SETTINGS
        return True
    return not any(place.has_role for place in places) and all(place_of(PurePath(p.name)).has_role for p in parts)


def names_one(name: str) -> bool:
    """Return whether the name that files share is that of one trace: it has a digit, and is none of a shard, batch or settings."""
    return "__" not in name and re.search(r"\d", MODEL_NUMBER.sub("", name)) is not None and _SHARD.match(name) is None


def chunks_of(paths: Sequence[Path]) -> dict[int, dict[str, Path]]:
    """Return the files such as hidden_states_0.pt and attention_mask_0.pt by number and field; empty if they are no chunks.

    The numbers have no gaps, and each has the same fields, with hidden states or last tokens.
    """
    found: dict[int, dict[str, Path]] = defaultdict(dict)
    for path in paths:
        match = _CHUNK.fullmatch(path.stem)
        place = None if match is None else parse_atom(match[1])
        if match is None or place is None or not place.field or path.suffix not in _SUFFIXES_OF_CHUNKS:
            return {}
        found[int(match[2])][place.field] = path
    fields = {frozenset(group) for group in found.values()}
    is_whole = len(fields) == 1 and bool({"hidden_states", "last_token"} & next(iter(fields)))
    is_counted = len(found) > 1 and min(found) < 2 and max(found) - min(found) == len(found) - 1
    return found if is_whole and is_counted and sum(map(len, found.values())) == len(paths) else {}


def count_rows(chunks: Mapping[int, Mapping[str, Path]]) -> int:
    """Return the number of rows of states in all chunks; 0 if a file is refused."""
    with ExitStack() as resources:
        try:
            return sum(
                _num_rows({field: _value(path, Input(path, path.name, (), Scratch()), resources)})
                for chunk in chunks.values()
                for field, path in chunk.items()
                if field in ("hidden_states", "last_token")
            )
        except (InvalidInputError, ValueError, TypeError, OSError):
            return 0


def read_joined(
    source: Input, resources: ExitStack, *, is_in_turn: bool = False
) -> Iterator[tuple[dict[str, Any], range | None]]:
    """Yield the values of the files of a source by field, and the rows of a table that they have.

    Parameters
    ----------
    source : Input
        The files; `resources` holds what keeps their arrays readable.
    is_in_turn : bool
        Whether the files are `chunks_of` rows. Otherwise names may state the rows.

    Raises
    ------
    InvalidInputError
        If a file is refused, or a layer or token is missing.
    """
    base = Path(os.path.commonpath([part.parent for part in source.parts]))
    numbered = chunks_of(source.parts) if is_in_turn else {}
    places = {path: Place(str(k), field) for k, chunk in numbered.items() for field, path in chunk.items()}
    places = places or {path: place_of(path.relative_to(base)) for path in source.parts}
    chunks: dict[str, list[Path]] = defaultdict(list)
    for path, place in places.items():
        chunks[place.trace].append(path)
    if len(chunks) > 1 and not is_in_turn and not are_rows(list(chunks)):
        chunks = {"": list(places)}
    ids = _shared_ids(source.parts[0].parent)
    offset = 0
    for name in sorted(chunks, key=natural_key):
        parts: list[Part] = []
        order: list[Any] | None = None
        for path in chunks[name]:
            found = list(_parts_of(path, places[path], source, resources))
            own = next((p.value for p in found if p.place.field in _IDS and isinstance(p.value, list)), None)
            parts += found if order is None or own is None else _in_order(found, own, order)
            order = order or own
        values = join_parts(parts)[""]
        count = _num_rows(values)
        if ids is not None:
            if len(ids) < offset + count:
                raise InvalidInputError(f"found {len(ids)} ids for at least {offset + count} rows")
            values.setdefault("question_ids", ids[offset : offset + count])
        is_next = is_in_turn or name == str(offset)  # the first row in the name: layer_8_25.pt
        rows = range(offset, offset + count) if is_next and len(chunks) > 1 else rows_of_name(name)
        if rows is not None and count != len(rows):
            raise InvalidInputError(f"found {count} rows in a file of rows {name}")
        offset += count
        yield values, rows


def _in_order(parts: list[Part], ids: list[Any], order: list[Any]) -> list[Part]:
    """Return the rows of a file in the order of the ids of another one, if both have the same ids."""
    rows = {key: k for k, key in enumerate(ids) if isinstance(key, str | int)}
    if ids == order or len(rows) != len(order) or any(not isinstance(k, str | int) or k not in rows for k in order):
        return parts
    numbers = [rows[key] for key in order]
    return [p._replace(value=_rows(p.value, numbers)) for p in parts]


def _rows(value: Any, numbers: list[int]) -> Any:
    if isinstance(value, np.ndarray) and value.ndim and len(value) == len(numbers):
        return value[numbers]
    return [value[k] for k in numbers] if isinstance(value, list) and len(value) == len(numbers) else value


def _num_rows(values: dict[str, Any]) -> int:
    """Return the number of rows of the first layer."""
    hidden = values.get("hidden_states", values.get("last_token"))
    first = opened(next(iter(hidden.values())) if isinstance(hidden, dict) and hidden else hidden)
    return len(first) if isinstance(first, np.ndarray | list | tuple) else 0


def _parts_of(path: Path, place: Place, source: Input, resources: ExitStack) -> Iterator[Part]:
    """Yield the value of a file at its place; of a dict of fields, the value of its field and all others."""
    value = opened(_value(path, source, resources))
    if place.field in _TEXTS and len(shape_of(value)) > 1:
        place = place._replace(field="", segment=_TEXTS[place.field])  # states of a text in a folder of its name
    place, field = place._replace(trace=""), place.field or "hidden_states"
    fields = _columns(value)
    names = [k for k in fields if isinstance(k, str)] if isinstance(fields, dict) else []
    inside = {name: parse_path(normalized(name)) for name in names}
    own = [n for n in names if not inside[n].trace and (inside[n].field or "hidden_states") == field]
    own = [n for n in own if inside[n].has_role]
    if not own:
        if place.is_states and not _has_array(value):
            raise InvalidInputError(f"{path.name}: found no array, expected one in each file that is named by a layer")
        if fields is not value and any(name in _IDS for name in names) and not place.is_states:
            yield from (Part("", Place(field=n), v) for n, v in fields.items())  # a table
            return
        yield Part("", place, value)
        return
    whole = [n for n in own if inside[n].layer is None and inside[n].token is None]
    yield Part("", place, fields[whole[0]] if whole else {n: fields[n] for n in own})
    yield from (Part("", Place(field=n), v) for n, v in fields.items() if n not in own)


def _columns(value: Any) -> Any:
    """Return a list of records with the same keys as columns, and other values unchanged."""
    records = [opened(item) for item in value] if isinstance(value, list) else []
    if not records or not all(isinstance(r, dict) and r.keys() == records[0].keys() for r in records):
        return value
    return {key: _stacked([record[key] for record in records]) for key in records[0]}


def _stacked(values: list[Any]) -> Any:
    """Return vectors of one length as one array, and other values unchanged."""
    values = [array_of(value) for value in values]
    is_regular = all(isinstance(v, np.ndarray) and v.ndim == 1 for v in values) and len({v.shape for v in values}) == 1
    return np.stack(values) if is_regular else values


def _has_array(value: Any, depth: int = 0) -> bool:
    value = opened(value)
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple) and depth < _MAX_DEPTH:
        return shape_of(value) != () or any(_has_array(item, depth + 1) for item in value[:64])
    return False


def _value(path: Path, source: Input, resources: ExitStack) -> Any:
    """Return what a file holds: an array, or lists and dicts of arrays and plain values."""
    check_regular(path)
    if path.suffix in _TEXT:
        return _text_value(path)
    mapped, compression = torch_file.map_content(path, source.scratch)
    if (reader := reader_of(mapped, path)) is not None:
        # A reader of HDF5 reads the arrays of one unit until the next one.
        units = reader(replace(source, path=path, parts=()))
        return _of_units([(unit.trace, {k: _plain(v) for k, v in unit.fields.items()}) for unit in units], path)
    view = memoryview(mapped)
    if compression is not None:
        chunks = resources.enter_context(closing(InflatedChunks(path, lambda: False, compression)))
        return pickle_reader(chunks.reader(source.scratch), load_bytes=torch_file.load_bytes).load()
    if bytes(view[:4]) == b"PK\x03\x04":
        return torch_file.read_zip(mapped)
    if torch_file.is_legacy(view):
        return torch_file.read_legacy(view)
    return pickle_reader(BufferReader(mapped), load_bytes=torch_file.load_bytes).load()


def _of_units(units: list[tuple[str, dict[str, Any]]], path: Path) -> Any:
    """Return the arrays of a container: by field for one trace, by trace and field for several."""
    named = dict(units)
    if len(named) < len(units):
        return [fields for _, fields in units]  # rows of a table
    values: Any = named[""] if list(named) == [""] else named
    if path.suffix == ".npy" and isinstance(values, dict) and len(values) == 1:
        return next(iter(values.values()))
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    value = plain(value)
    value = value.whole() if isinstance(value, Column) else value
    return value.tolist() if isinstance(value, np.ndarray) and value.dtype.kind in "SU" else value


def _text_value(path: Path) -> Any:
    if path.stat().st_size > _MAX_TEXT_BYTES:
        raise InvalidInputError(f"{path.name}: found more than {_MAX_TEXT_BYTES:,} bytes of text")
    try:
        text = path.read_text("utf-8-sig")
        return text.splitlines() if path.suffix == ".txt" else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path.name}: not JSON: {str(error)[:100]}") from None


def _shared_ids(folder: Path) -> list[Any] | None:
    """Return the only list of ids in the JSON files of a folder that name the ids of a layer."""
    found: list[list[Any]] = []
    for path in sorted(folder.glob("*ids.json")):
        check_regular(path)
        ids = _text_value(path)
        if not isinstance(ids, list) or not all(isinstance(k, str | int) for k in ids):
            continue
        if found and ids != found[0]:
            if re.search(r"layer|block", path.stem, re.IGNORECASE):
                raise InvalidInputError(f"{path.name}: found other ids than for the first layer")
            return None
        found.append(ids)
    return found[0] if found else None
