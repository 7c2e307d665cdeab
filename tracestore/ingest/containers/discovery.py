"""Find the sources of a folder that consist of several files, and the tables next to containers."""

import os
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tracestore.errors import InvalidInputError, UsageError
from tracestore.ingest.containers import tables
from tracestore.ingest.containers.arrow_files import is_table as is_arrow_table
from tracestore.ingest.containers.grouping import natural_key
from tracestore.ingest.containers.keys import column_name, parse_key, split_key
from tracestore.ingest.containers.registry import SUFFIXES
from tracestore.ingest.containers.tables import Table, TableReference, load_table
from tracestore.ingest.layouts import text_rows
from tracestore.ingest.layouts.joined_files import are_rows, file_groups, names_one, place_of
from tracestore.ingest.layouts.parts import parse_path
from tracestore.store.io import fsio

# JSON files of a folder that describe something else than its traces.
_NO_TABLES = ("provenance.json", "data_config.json", "dataset_info.json", "state.json", "dataset_dict.json")
_MAX_STATE_BYTES = 16 << 20
_TABLE_STEMS = ("metadata", "meta", "traces", "samples", "questions", "index", "data", "manifest")


class FoundSource(NamedTuple):
    """A source of a folder: a file, or the folder and the files in it that are read together."""

    path: Path
    parts: tuple[Path, ...] = ()
    table: TableReference | None = None
    is_trace: bool = False  # the name that the parts share is that of one trace


def sources_of_folder(
    folder: Path, names: list[str], is_other: Callable[[str], bool], *, is_text: bool = False
) -> list[FoundSource]:
    """Return the sources among the files of a folder.

    Parameters
    ----------
    folder : Path
        The folder.
    names : list of str
        Names of the files directly in it.
    is_other : callable
        Return whether a file of this name is a source that is no container.
    is_text : bool
        Whether files of text that hold arrays are sources, too.

    Raises
    ------
    UsageError
        If a table next to the containers cannot be read.
    """
    names = sorted((n for n in names if not n.startswith(".")), key=natural_key)
    found = [FoundSource(folder / n) for n in names if is_other(n)]
    containers = [n for n in names if n.endswith(SUFFIXES)]
    if is_text:
        texts = [n for n in names if n.endswith(text_rows.SUFFIXES) and n not in _NO_TABLES]
        containers += [n for n in texts if text_rows.holds_arrays(folder / n)]
    tables_alone = [n for n in containers if is_arrow_table(folder / n)]
    containers = [n for n in containers if n not in tables_alone]
    if {"state.json", "dataset_info.json"} <= set(names):
        containers = [n for n in containers if not n.endswith(".arrow")]
        # The data set from which speculators computed the hidden states has none.
        if not any((folder / "hidden_states").glob("*.safetensors")):
            found.append(FoundSource(folder, _data_files(folder)))
    candidates = [n for n in names if _is_table(folder / n) and n not in containers]
    named = _named_files(folder, candidates)
    arrays = [n for n in containers if n.endswith(".npy") and n not in named]
    groups = {n: [n] for n in containers if n not in arrays} | _groups_of_fields(arrays)
    sources = [_grouped(folder, prefix, group) for prefix, group in groups.items()]
    if not any(source.parts for source in sources):
        sources.sort(key=lambda source: natural_key(source.path.name))
    found += _with_tables(folder, candidates, sources)
    return found + [FoundSource(folder / n) for n in tables_alone]


def _grouped(folder: Path, name: str, group: list[str]) -> FoundSource:
    """Return the source of a group of files; `name` is "" for the fields of a trace without a name."""
    if name in group:
        return FoundSource(folder / name)
    return FoundSource(folder / name if name else folder, tuple(folder / n for n in group))


def _groups_of_fields(names: list[str]) -> dict[str, list[str]]:
    """Return the arrays of NumPy that are fields of the same traces by the name before the fields, others alone.

    A file without the name of a field belongs to the fields that its name begins like, or, if it has no number, to
    those without a name.
    """
    keys = {n: parse_key(n.removesuffix(".npy")) for n in names}
    groups: dict[str, list[str]] = defaultdict(list)
    for name, key in keys.items():
        if key is not None:
            groups[key.trace].append(name)
    for name in (n for n, key in keys.items() if key is None):
        stem = name.removesuffix(".npy")
        trace, _ = split_key(stem, groups)
        if not trace and ("" not in groups or (column_name(stem) is None and re.search(r"\d", stem))):
            trace = name
        groups[trace].append(name)
    for trace, group in list(groups.items()):
        if trace != group[0] and len(group) == 1 and len(groups) > 1:
            groups[group[0]] = groups.pop(trace)
    return {trace: sorted(group, key=natural_key) for trace, group in groups.items()}


def _is_table(path: Path) -> bool:
    name = path.name
    if not path.is_file() or name in _NO_TABLES:
        return False
    if is_arrow_table(path):
        return True
    is_text = name.endswith(".txt") and column_name(name.removesuffix(".txt")) is None
    return name.endswith(tables.SUFFIXES) and not is_text and "scores" not in name


def _named_files(folder: Path, candidates: list[str]) -> set[str]:
    """Return the names of files that the only table of a folder names."""
    if len(candidates) != 1:
        return set()
    try:
        return set(load_table(folder / candidates[0]).by_file)
    except InvalidInputError:
        return set()


def join_folders(top: Path, found: list[FoundSource]) -> list[FoundSource]:
    """Join what belongs together in different folders: a folder per layer, columns of ids or scores, and tables above.

    Parameters
    ----------
    top : Path
        The folder that was searched.
    found : list of FoundSource
        Its sources.
    """
    # A table of Arrow or Parquet without arrays is a source where nothing else is.
    found = [s for s in found if s.parts or not is_arrow_table(s.path)] or found
    found = _joined(top, found)
    columns = [s for s in found if not s.parts and s.path.suffix == ".npy" and column_name(s.path.stem)]
    others = [s for s in found if s not in columns]
    if columns and len(others) == 1 and all(p.suffix == ".npy" for p in others[0].parts or (others[0].path,)):
        parts = others[0].parts or (others[0].path,)
        found = [others[0]._replace(parts=(*parts, *(s.path for s in columns)))]
    listings: dict[Path, list[str]] = {}
    orders = _orders(found)
    return [
        source
        if source.table
        else source._replace(
            table=_table_above(top, source, listings, orders.get(source.path), is_only=len(found) == 1)
        )
        for source in found
    ]


def _orders(found: list[FoundSource]) -> dict[Path, tuple[int, int]]:
    """Return (number, count) of the sources that count from 0 or 1 in their folder: hidden_0.pt, hidden_1.pt."""
    numbers: dict[Path, dict[int, Path]] = defaultdict(dict)
    counts: dict[Path, int] = defaultdict(int)
    for source in found:
        name = source.path.name if source.parts else source.path.stem
        counts[source.path.parent] += 1
        if match := re.fullmatch(r"(?:.*\D)?(\d{1,9})", name):
            numbers[source.path.parent][int(match[1])] = source.path
    orders: dict[Path, tuple[int, int]] = {}
    for folder, paths in numbers.items():
        first = min(paths)
        if len(paths) == counts[folder] and first in (0, 1) and max(paths) - first + 1 == len(paths):
            orders |= {path: (number - first, len(paths)) for number, path in paths.items()}
    return orders


def _joined(top: Path, found: list[FoundSource]) -> list[FoundSource]:
    """Join the files whose names state the same trace and another field, layer or token, and add the tables next to them."""
    found = _with_joined_data_sets(found)
    single = {source.path.relative_to(top): source for source in found if not source.parts}
    groups: dict[Path, list[Path]] = {}
    names: dict[Path, str] = {}
    for name, paths in file_groups(list(single)).items():
        folder = Path(os.path.commonpath([top / path.parent for path in paths]))
        own = name.rpartition("/")[2]
        is_folder = not own or (
            folder.name == own and all(place_of(p.relative_to(folder.relative_to(top))).trace == "" for p in paths)
        )
        path = folder if is_folder else folder / own
        groups.setdefault(path, []).extend(top / p for p in paths)
        names[path] = name
    by_folder: dict[Path, list[Path]] = defaultdict(list)
    for path, parts in groups.items():
        if all(part.parent == path.parent for part in parts):
            by_folder[path.parent].append(path)
    for folder, members in by_folder.items():
        if are_rows([path.name for path in members]):
            groups[folder] = [part for path in members for part in groups.pop(path)]
    taken = {part for parts in groups.values() for part in parts}
    sources: dict[Path, list[FoundSource]] = defaultdict(list)
    for path, parts in groups.items():
        folder = Path(os.path.commonpath([part.parent for part in parts]))
        lists = _lists_of(top, {part.parent for part in parts}, names.get(path))
        own = names.get(path, "").rpartition("/")[2]
        sources[folder].append(FoundSource(path, (*parts, *lists), is_trace=names_one(own)))
    joined = [
        source
        for folder, group in sources.items()
        for source in _with_tables(folder, [p.name for p in folder.iterdir() if _is_table(p)], group)
    ]
    return [source for source in found if source.path not in taken] + joined


def _with_joined_data_sets(found: list[FoundSource]) -> list[FoundSource]:
    """Join the data sets of Arrow whose folders, next to each other, are named by a layer each."""
    layers: dict[tuple[Path, str], list[FoundSource]] = defaultdict(list)
    for source in found:
        place = parse_path(source.path.name)
        if source.parts and all(p.suffix == ".arrow" for p in source.parts) and place.layer is not None:
            layers[source.path.parent, place.trace].append(source)
    for (folder, _), group in layers.items():
        if len(group) > 1:
            parts = tuple(p for source in sorted(group, key=lambda s: natural_key(s.path.name)) for p in source.parts)
            found = [s for s in found if s not in group] + [group[0]._replace(path=folder, parts=parts)]
    return found


def _lists_of(top: Path, folders: set[Path], group: str | None) -> list[Path]:
    """Return the files with a list of ids, labels or texts whose names state the same traces as a group of files."""
    found = []
    for path in sorted(p for folder in folders for p in folder.iterdir() if _is_table(p)):
        place = place_of(path.relative_to(top))
        if place.trace == group and place.field and path.suffix in (".json", ".txt"):
            table = _loaded(path)
            if table is not None and len(table) > 1 and list(table[0]) == [path.stem]:
                found.append(path)
    return found


def tables_of_pickles(folder: Path, sources: list[FoundSource]) -> list[FoundSource]:
    """Return the pickles of a folder with the tables that their names, or the usual names of tables, state."""
    names = [p.name for p in folder.iterdir() if _is_table(p)]
    stems = {source.path.stem for source in sources}
    chosen = [n for n in names if Path(n).stem in _TABLE_STEMS or _owner(Path(n).stem) in stems]
    chosen = chosen or [n for n in names if len(names) == 1 and (t := _loaded(folder / n)) is not None and t.has_texts]
    found = [source._replace(table=_rows_of_file(folder, sorted(names), source.path)) for source in sources]
    rest = [source for source in found if source.table is None]
    added = {source.path: source for source in _with_tables(folder, chosen, rest)} if chosen else {}
    return [added.get(source.path, source) for source in found]


def _owner(stem: str) -> str:
    """Return the name of a table without what such names end with: q1_meta, traces.info."""
    return re.sub(r"[._-](?:meta|metadata|info|ids|labels|annotations)$", "", stem)


def _table_above(
    top: Path,
    source: FoundSource,
    listings: dict[Path, list[str]],
    order: tuple[int, int] | None,
    *,
    is_only: bool,
) -> TableReference | None:
    """Return the rows that name a source by its path or id, of a table in a folder above that of the source.

    The row of an id is that of the only table of a folder. Of a table without such names, the source that is one of
    `order` = (number, count) has the row of its number, and the only source all rows.
    """
    folder = source.parts[0].parent if source.parts else source.path.parent
    while folder != top and top in folder.parents:
        folder = folder.parent
        if folder not in listings:
            listings[folder] = sorted(p.name for p in folder.iterdir() if _is_table(p))
        names = listings[folder]
        if (found := _rows_of_file(folder, names, source.path)) is not None:
            return found
        if len(names) > 1:
            stem = source.path.name if source.parts else source.path.stem
            named = [t for t in map(_loaded, (folder / name for name in names)) if t is not None and stem in t.by_id]
            if named:
                return TableReference(named[0].path, (named[0].by_id[stem],), others=tuple(t.path for t in named[1:]))
        if len(names) != 1:
            continue
        if (table := _loaded(folder / names[0])) is None:
            continue
        row = table.row_of(source.path.name if source.parts else source.path.stem)
        if row is not None:
            return TableReference(table.path, (row,))
        if order is not None and len(table) == order[1] > 1 and not table.by_file:
            return TableReference(table.path, (order[0],))
        if is_only and len(table) > 1 and not table.by_file:
            return TableReference(table.path)
    return None


def _rows_of_file(folder: Path, names: list[str], path: Path) -> TableReference | None:
    """Return the rows of the first table in a folder that names a file by its path or name; None without one."""
    relative = path.relative_to(folder).as_posix()
    for name in names:
        table = _loaded(folder / name)
        if table is not None and (rows := table.rows_of(relative, path.name)):
            return TableReference(table.path, tuple(rows))
    return None


def _data_files(folder: Path) -> tuple[Path, ...]:
    """Return the files of a data set that `datasets` saved, in the order of its state."""
    path = folder / "state.json"
    try:
        state = fsio.read_json(path, _MAX_STATE_BYTES)
        names = [entry["filename"] for entry in state["_data_files"]]
        if not names or any(Path(name).name != name for name in names):
            raise ValueError("expected the names of its files")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path}: not the state of a data set: {' '.join(str(error).split())[:100]}") from None
    return tuple(folder / name for name in names)


def _with_tables(folder: Path, candidates: list[str], sources: list[FoundSource]) -> list[FoundSource]:
    """Add to each source the table of its name, or its row of the only table of the folder."""
    stems = {source.path.name if source.parts else source.path.stem: k for k, source in enumerate(sources)}
    named: dict[int, list[str]] = defaultdict(list)
    for name in candidates:
        stem, rest_of_name = Path(name).stem, ""
        while stem not in stems and (mark := max(stem.rfind("."), stem.rfind("_"))) > 0:
            stem, rest_of_name = stem[:mark], stem[mark + 1 :] + rest_of_name
        if stem in stems and (rest_of_name in ("", "meta", "metadata") or _has_ids(folder / name)):
            named[stems[stem]].append(name)
    own = {k: _largest(folder, group) for k, group in named.items()}
    known = {name for group in named.values() for name in group}
    rest = [name for name in candidates if name not in known]
    others: tuple[Path, ...] = ()
    if len(rest) > 1 and not any(Path(n).stem.lower() in _TABLE_STEMS for n in rest):
        by_id = [folder / n for n in rest if _has_ids(folder / n)]
        rest, others = [path.name for path in by_id[:1]], tuple(by_id[1:])
    elif len(rest) > 1:
        rest = [n for n in rest if Path(n).stem.lower() in _TABLE_STEMS]
        rest = [_largest(folder, rest)] if rest else []
    shared = folder / rest[0] if len(rest) == 1 and len(own) < len(sources) else None
    try:
        return [
            source._replace(
                table=TableReference(folder / own[k])
                if k in own
                else _shared_rows(shared, source, k, len(sources), others)
            )
            for k, source in enumerate(sources)
        ]
    except InvalidInputError as error:
        raise UsageError(f"{shared}: {error}") from None


def _loaded(path: Path) -> Table | None:
    """Return a table; None for a file that is none."""
    try:
        return load_table(path)
    except InvalidInputError:
        return None


def _has_ids(path: Path) -> bool:
    table = _loaded(path)
    return table is not None and bool(table.by_id)


def _largest(folder: Path, names: list[str]) -> str:
    """Return the table with the most rows: others describe the whole file, as an object of JSON does."""
    if len(names) == 1:
        return names[0]
    return max(names, key=lambda name: len(_loaded(folder / name) or ()))


def _shared_rows(
    path: Path | None, source: FoundSource, k: int, count: int, others: tuple[Path, ...]
) -> TableReference | None:
    """Return the rows of a table for the k-th of `count` sources: the row with its name, else all, or the k-th."""
    if path is None:
        return None
    table = load_table(path)
    if others:
        return TableReference(path, is_by_id=True, others=others)
    name, stem = source.path.name, source.path.stem
    if rows := table.rows_of(name, stem):
        return TableReference(path, tuple(rows))
    if (row := table.row_of(stem, name)) is not None:
        return TableReference(path, (row,))
    if count == 1:
        return TableReference(path)
    if table.by_file:
        return None
    if len(table) == count:
        return TableReference(path, (k,))
    return TableReference(path, is_by_id=True) if table.by_id else None
