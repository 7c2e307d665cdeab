"""Find the sources of a folder that consist of several files, and the tables next to containers."""

import os
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from tracestore.errors import UsageError
from tracestore.ingest.containers.arrow_files import is_table as is_arrow_table
from tracestore.ingest.containers.grouping import natural_key
from tracestore.ingest.containers.keys import column_name, parse_key, split_key
from tracestore.ingest.containers.registry import SUFFIXES
from tracestore.ingest.containers.tables import TableReference
from tracestore.ingest.discovery.tables_beside import (
    NO_TABLES,
    FoundSource,
    add_tables_elsewhere,
    is_table,
    loaded,
    named_files,
    with_tables,
)
from tracestore.ingest.layouts import text_rows
from tracestore.ingest.layouts.joined_files import are_rows, chunks_of, count_rows, file_groups, names_one, place_of
from tracestore.ingest.layouts.parts import parse_path
from tracestore.store.io import fsio

_MAX_STATE_BYTES = 16 << 20
_MAX_CHUNKS = 1024


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
        texts = [n for n in names if n.endswith(text_rows.SUFFIXES) and n not in NO_TABLES]
        containers += [n for n in texts if text_rows.holds_arrays(folder / n)]
    tables_alone = [n for n in containers if is_arrow_table(folder / n)]
    containers = [n for n in containers if n not in tables_alone]
    if {"state.json", "dataset_info.json"} <= set(names):
        containers = [n for n in containers if not n.endswith(".arrow")]
        # The data set from which speculators computed the hidden states has none.
        if not any((folder / "hidden_states").glob("*.safetensors")):
            found.append(FoundSource(folder, _data_files(folder)))
    candidates = [n for n in names if is_table(folder / n) and n not in containers]
    named = named_files(folder, candidates)
    arrays = [n for n in containers if n.endswith(".npy") and n not in named]
    groups = {n: [n] for n in containers if n not in arrays} | _groups_of_fields(arrays)
    sources = [_grouped(folder, prefix, group) for prefix, group in groups.items()]
    if not any(source.parts for source in sources):
        sources.sort(key=lambda source: natural_key(source.path.name))
    found += with_tables(folder, candidates, sources)
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


def join_folders(top: Path, found: list[FoundSource], apart: list[Path]) -> list[FoundSource]:
    """Join what belongs together in different folders: a folder per layer, columns of ids or scores, and tables.

    Parameters
    ----------
    top : Path
        The folder that was searched.
    found : list of FoundSource
        Its sources.
    apart : list of Path
        The tables of the folders without a source.
    """
    # A table of Arrow or Parquet without arrays is a source where nothing else is.
    found = [s for s in found if s.parts or not is_arrow_table(s.path)] or found
    found = _joined(top, _with_chunks(found))
    columns = [s for s in found if not s.parts and s.path.suffix == ".npy" and column_name(s.path.stem)]
    others = [s for s in found if s not in columns]
    if columns and len(others) == 1 and all(p.suffix == ".npy" for p in others[0].parts or (others[0].path,)):
        parts = others[0].parts or (others[0].path,)
        found = [others[0]._replace(parts=(*parts, *(s.path for s in columns)))]
    return add_tables_elsewhere(top, found, apart)


def _with_chunks(found: list[FoundSource]) -> list[FoundSource]:
    """Join the numbered files of a folder that hold together as many rows as its only table: hidden_states_0.pt, ..."""
    folders: dict[Path, list[FoundSource]] = defaultdict(list)
    for source in found:
        folders[source.path if source.parts else source.path.parent].append(source)
    for folder, group in folders.items():
        chunks = chunks_of([p for source in group for p in source.parts or (source.path,)])
        names = [p for p in folder.iterdir() if is_table(p)] if chunks else []
        table = loaded(names[0]) if len(names) == 1 else None
        if table is None or not len(chunks) < len(table) or len(chunks) > _MAX_CHUNKS or table.by_file:
            continue
        if count_rows(chunks) == len(table):
            parts = tuple(path for _, chunk in sorted(chunks.items()) for path in chunk.values())
            joined = FoundSource(folder, parts, TableReference(table.path, is_in_turn=True))
            found = [source for source in found if source not in group] + [joined]
    return found


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
        for source in with_tables(folder, [p.name for p in folder.iterdir() if is_table(p)], group)
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
    for path in sorted(p for folder in folders for p in folder.iterdir() if is_table(p)):
        place = place_of(path.relative_to(top))
        if place.trace == group and place.field and path.suffix in (".json", ".txt"):
            table = loaded(path)
            if table is not None and len(table) > 1 and list(table[0]) == [path.stem]:
                found.append(path)
    return found


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
