"""Tables next to sources, above them or apart from them: which rows belong to which source."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import NamedTuple

from tracestore.errors import InvalidInputError, UsageError
from tracestore.ingest.containers import tables
from tracestore.ingest.containers.arrow_files import is_table as is_arrow_table
from tracestore.ingest.containers.keys import column_name
from tracestore.ingest.containers.tables import Table, TableReference, load_table
from tracestore.ingest.exports.manifest import ExportedFile
from tracestore.ingest.layouts.joined_files import place_of
from tracestore.ingest.layouts.parts import ARRAYS

# JSON files of a folder that describe something else than its traces.
NO_TABLES = ("provenance.json", "data_config.json", "dataset_info.json", "state.json", "dataset_dict.json")
_TABLE_STEMS = ("metadata", "meta", "traces", "samples", "questions", "index", "data", "manifest")
_MAX_APART = 16


class FoundSource(NamedTuple):
    """A source of a folder: a file, or the folder and the files in it that are read together."""

    path: Path
    parts: tuple[Path, ...] = ()
    table: TableReference | None = None
    is_trace: bool = False  # the name that the parts share is that of one trace
    export: ExportedFile | None = None

    @property
    def name(self) -> str:
        """The name of the file without its suffix, or that of the folder."""
        return self.path.name if self.parts else self.path.stem


def is_table(path: Path) -> bool:
    """Return whether a file may be a table with values of traces, by its name; scores files are none."""
    name = path.name
    if not path.is_file() or name in NO_TABLES:
        return False
    if is_arrow_table(path):
        return True
    is_text = name.endswith(".txt") and column_name(name.removesuffix(".txt")) is None
    return name.endswith(tables.SUFFIXES) and not is_text and "scores" not in name


def named_files(folder: Path, candidates: list[str]) -> set[str]:
    """Return the names of files that the only table of a folder names."""
    if len(candidates) != 1:
        return set()
    table = loaded(folder / candidates[0])
    return set() if table is None else set(table.by_file)


def tables_of_pickles(folder: Path, sources: list[FoundSource]) -> list[FoundSource]:
    """Return the pickles of a folder with the tables that their names, or the usual names of tables, state."""
    names = [p.name for p in folder.iterdir() if is_table(p)]
    stems = _stems(sources)
    chosen = [n for n in names if Path(n).stem in (*_TABLE_STEMS, "labels") or _owner(n, stems)[0] is not None]
    chosen = chosen or [n for n in names if len(names) == 1 and (t := loaded(folder / n)) is not None and t.has_texts]
    found = [source._replace(table=_rows_of_file(folder, sorted(names), source.path)) for source in sources]
    rest = [source for source in found if source.table is None]
    added = {source.path: source for source in with_tables(folder, chosen, rest)} if chosen else {}
    return [added.get(source.path, source) for source in found]


def add_tables_elsewhere(top: Path, found: list[FoundSource], apart: list[Path]) -> list[FoundSource]:
    """Return sources with the tables in folders above them, or in folders without a source, if they have none.

    Parameters
    ----------
    top : Path
        The folder that was searched.
    found : list of FoundSource
        Its sources.
    apart : list of Path
        The tables of the folders without a source.
    """
    listings: dict[Path, list[str]] = {}
    orders = _orders(found)

    def complete(find: Callable[[FoundSource], TableReference | None]) -> list[FoundSource]:
        return [source if source.table is not None else source._replace(table=find(source)) for source in found]

    is_only = len(found) == 1
    found = complete(lambda s: _table_above(top, s, listings, orders.get(s.path), is_only=is_only))
    names = Counter(source.name for source in found)
    stems = Counter(path.stem for path in apart)
    same = {path.stem: path for path in apart if stems[path.stem] == names[path.stem] == 1}
    tables_of = {name: TableReference(path) for name, path in same.items() if loaded(path) is not None}
    found = complete(lambda s: tables_of.get(s.name))
    apart = [path for path in apart if path.stem not in same]
    if all(source.table is not None for source in found) or not 0 < len(apart) <= _MAX_APART:
        return found
    if sum(path.stat().st_size for path in apart) > tables.MAX_BYTES:
        return found
    known = [table for path in apart if (table := loaded(path)) is not None]
    folders = Counter(source.path.parent for source in found)
    return complete(
        lambda s: _table_apart(
            s, known, orders.get(s.path), is_named=names[s.name] == 1, is_alone=folders[s.path.parent] == 1
        )
    )


def _table_apart(
    source: FoundSource, known: list[Table], order: tuple[int, int] | None, *, is_named: bool, is_alone: bool
) -> TableReference | None:
    """Return the row that has the name of a source as its id, all rows of the table of its name, or tables with ids.

    `is_named`: no other source has its name. `is_alone`: no other source is in its folder, whose name counts too. The
    only table has the row of the number of a source that is one of `order` = (number, count).
    """
    name, folder = source.name, source.path.parent.name
    if is_named:
        by_id = [table for table in known if name in table.by_id]
        by_id = [table for table in by_id if folder in table.path.stem] if len(by_id) > 1 else by_id
        if len(by_id) == 1:
            return TableReference(by_id[0].path, (by_id[0].by_id[name],))
    named = [t for t in known if t.path.stem == name or (is_alone and t.path.stem == folder)]
    if len(named) == 1 and len(named[0]) > 1:
        return TableReference(named[0].path)
    if len(known) == 1 and (numbered := _row_by_order(known[0], order)) is not None:
        return numbered
    paths = [table.path for table in known if len(table) > 1 and table.by_id]
    return TableReference(paths[0], is_by_id=True, others=tuple(paths[1:]), is_apart=True) if paths else None


def _row_by_order(table: Table, order: tuple[int, int] | None) -> TableReference | None:
    """Return the row of the number of a source, `order` = (number, count), if the table has as many rows; else None."""
    if order is None or not len(table) == order[1] > 1 or table.by_file:
        return None
    return TableReference(table.path, (order[0],))


def _orders(found: list[FoundSource]) -> dict[Path, tuple[int, int]]:
    """Return (number, count) of the sources that count from 0 or 1 in their folder: hidden_0.pt, hidden_1.pt."""
    numbers: dict[Path, dict[int, Path]] = defaultdict(dict)
    counts: dict[Path, int] = defaultdict(int)
    for source in found:
        counts[source.path.parent] += 1
        if match := re.fullmatch(r"(?:.*\D)?(\d{1,9})", source.name):
            numbers[source.path.parent][int(match[1])] = source.path
    orders: dict[Path, tuple[int, int]] = {}
    for folder, paths in numbers.items():
        first = min(paths)
        if len(paths) == counts[folder] and first in (0, 1) and max(paths) - first + 1 == len(paths):
            orders |= {path: (number - first, len(paths)) for number, path in paths.items()}
    return orders


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
            listings[folder] = sorted(p.name for p in folder.iterdir() if is_table(p))
        names = listings[folder]
        if (found := _rows_of_file(folder, names, source.path)) is not None:
            return found
        found_tables = [table for name in names if (table := loaded(folder / name)) is not None]
        if len(names) > 1:
            named = [t for t in found_tables if source.name in t.by_id]
            if named:
                row = named[0].by_id[source.name]
                return TableReference(named[0].path, (row,), others=tuple(t.path for t in named[1:]))
            continue
        for table in found_tables:
            if (own := table.row_of(source.name)) is not None:
                return TableReference(table.path, (own,))
            if (numbered := _row_by_order(table, order)) is not None:
                return numbered
            if is_only and len(table) > 1 and not table.by_file:
                return TableReference(table.path)
    return None


def _rows_of_file(folder: Path, names: list[str], path: Path) -> TableReference | None:
    """Return the rows of the first table in a folder that names a file by its path or name; None without one."""
    relative = path.relative_to(folder).as_posix()
    for name in names:
        table = loaded(folder / name)
        if table is not None and (rows := table.rows_of(relative, path.name)):
            return TableReference(table.path, tuple(rows))
    return None


def with_tables(folder: Path, candidates: list[str], sources: list[FoundSource]) -> list[FoundSource]:
    """Add to each source the table of its name, or its row of the only table of the folder."""
    stems = _stems(sources)
    named: dict[int, list[str]] = defaultdict(list)
    for name in candidates:
        owner, rest_of_name = _owner(name, stems)
        if owner is not None and (rest_of_name in ("", "meta", "metadata") or _has_ids(folder / name)):
            named[owner].append(name)
    own = {k: _largest(folder, group) for k, group in named.items()}
    known = {name for group in named.values() for name in group}
    rest = [name for name in candidates if name not in known]
    others: tuple[Path, ...] = ()
    columns = _columns_of_rows(folder, rest)
    if columns:
        rest = [columns[0].name]
    elif len(rest) > 1 and not any(Path(n).stem.lower() in _TABLE_STEMS for n in rest):
        by_id = [folder / n for n in rest if _has_ids(folder / n)]
        rest, others = [path.name for path in by_id[:1]], tuple(by_id[1:])
    elif len(rest) > 1:
        rest = [n for n in rest if Path(n).stem.lower() in _TABLE_STEMS]
        rest = [_largest(folder, rest)] if rest else []
    shared = folder / rest[0] if len(rest) == 1 and len(own) < len(sources) else None
    try:
        tables_of = [
            TableReference(folder / own[k]) if k in own else _shared_rows(shared, source, k, len(sources), others)
            for k, source in enumerate(sources)
        ]
    except InvalidInputError as error:
        raise UsageError(f"{shared}: {error}") from None
    if len(columns) > 1:
        tables_of = [
            replace(table, others=columns[1:], are_columns=True) if table and table.path == shared else table
            for table in tables_of
        ]
    return [source._replace(table=table) for source, table in zip(sources, tables_of, strict=True)]


def _columns_of_rows(folder: Path, names: list[str]) -> tuple[Path, ...]:
    """Return several files with one column each of the same rows, that with ids first: questions.txt and labels.json."""
    found = {}
    for path in (folder / name for name in names):
        table = loaded(path) if path.suffix in (".txt", ".json") else None
        if table is not None and len(table) and list(table[0]) == [path.stem]:
            found[path] = table
    is_same = len(found) > 1 and len({len(table) for table in found.values()}) == 1
    return tuple(sorted(found, key=lambda path: not found[path].by_id)) if is_same else ()


def _stems(sources: list[FoundSource]) -> dict[str, int]:
    """Return the numbers of sources by their names, and by what is left of these without a field, if one source has it."""
    stems = {source.name: k for k, source in enumerate(sources)}
    traces = [place_of(PurePath(source.path.name)).trace for source in sources]
    return {trace: k for k, trace in enumerate(traces) if trace and traces.count(trace) == 1} | stems


def _owner(name: str, stems: Mapping[str, int]) -> tuple[int | None, str]:
    """Return the number of the source that the name of a table begins with, or has around a field, and the rest of the name."""
    stem, rest_of_name = Path(name).stem, ""
    place = place_of(PurePath(name))
    if stem not in stems and place.trace in stems and place.field not in ARRAYS:
        stem = place.trace  # llama-answers-nq.csv next to llama-hidden_states-nq.pt
    while stem not in stems and (mark := max(stem.rfind("."), stem.rfind("_"))) > 0:
        stem, rest_of_name = stem[:mark], stem[mark + 1 :] + rest_of_name
    return stems.get(stem), rest_of_name


def loaded(path: Path) -> Table | None:
    """Return a table; None for a file that is none."""
    try:
        return load_table(path)
    except InvalidInputError:
        return None


def _has_ids(path: Path) -> bool:
    table = loaded(path)
    return table is not None and bool(table.by_id)


def _largest(folder: Path, names: list[str]) -> str:
    """Return the table with the most rows: others describe the whole file, as an object of JSON does."""
    if len(names) == 1:
        return names[0]
    return max(names, key=lambda name: len(loaded(folder / name) or ()))


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


def unread_tables(folders: set[Path], used: set[Path]) -> list[Path]:
    """Return the tables in some folders, with more than one row, that are not among the files that are used."""
    files = sorted(path for folder in folders for path in folder.iterdir() if path not in used)
    suffixes = tuple(suffix for suffix in tables.SUFFIXES if suffix != ".txt")
    files = [p for p in files if p.name.endswith(suffixes) and p.name not in NO_TABLES and p.is_file()]
    return [path for path in files[:_MAX_APART] if len(loaded(path) or ()) > 1]
