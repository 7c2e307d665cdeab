"""Find the sources of a folder that consist of several files, and the tables next to containers."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tracestore.errors import InvalidInputError, UsageError
from tracestore.ingest.containers import tables
from tracestore.ingest.containers.grouping import natural_key
from tracestore.ingest.containers.keys import parse_key
from tracestore.ingest.containers.registry import SUFFIXES
from tracestore.ingest.containers.tables import TableReference, load_table
from tracestore.ingest.pickles.layer_files import layer_of
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


def sources_of_folder(folder: Path, names: list[str], is_other: Callable[[str], bool]) -> list[FoundSource]:
    """Return the sources among the files of a folder.

    Parameters
    ----------
    folder : Path
        The folder.
    names : list of str
        Names of the files directly in it.
    is_other : callable
        Return whether a file of this name is a source that is no container.

    Raises
    ------
    UsageError
        If a table next to the containers cannot be read.
    """
    names = sorted((n for n in names if not n.startswith(".")), key=natural_key)
    others = [n for n in names if is_other(n)]
    layers = [n for n in others if layer_of(Path(n).stem) is not None]
    found = [FoundSource(folder / n) for n in others if n not in layers or len(layers) == 1]
    if len(layers) > 1:
        found.append(FoundSource(folder, tuple(folder / n for n in layers)))
    containers = [n for n in names if n.endswith(SUFFIXES)]
    if {"state.json", "dataset_info.json"} <= set(names):
        containers = [n for n in containers if not n.endswith(".arrow")]
        # The data set from which speculators computed the hidden states has none.
        if not any((folder / "hidden_states").glob("*.safetensors")):
            found.append(FoundSource(folder, _data_files(folder)))
    groups: dict[str, list[str]] = defaultdict(list)
    for name in containers:
        key = parse_key(name.removesuffix(".npy")) if name.endswith(".npy") else None
        groups[name if key is None else f"\0{key.trace}"].append(name)
    members = list(groups.values())
    sources = [FoundSource(folder / group[0]) for group in members]
    for k, (prefix, group) in enumerate(groups.items()):
        if prefix.startswith("\0") and (len(group) > 1 or len(members) == 1):
            others = [n for n in names if n.endswith(".npy") and n not in containers]
            path = folder / prefix[1:] if prefix[1:] else folder
            sources[k] = FoundSource(path, tuple(folder / n for n in sorted({*group, *others}, key=natural_key)))
    return found + _with_tables(folder, names, sources)


def rows_by_file(folder: Path) -> dict[str, TableReference]:
    """Return the rows of the tables of a folder that name a file, by the name of the file."""
    found: dict[str, TableReference] = {}
    for path in sorted(p for p in folder.iterdir() if p.name.endswith(tables.SUFFIXES) and p.is_file()):
        if path.name not in _NO_TABLES and "scores" not in path.name:
            try:
                rows = load_table(path).by_file
            except InvalidInputError:
                continue  # describes something else
            found = {name: TableReference(path, (row,)) for name, row in rows.items()} | found
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


def _with_tables(folder: Path, names: list[str], sources: list[FoundSource]) -> list[FoundSource]:
    """Add to each source the table of its name, or its row of the only table of the folder."""
    candidates = [n for n in names if n.endswith(tables.SUFFIXES) and n not in _NO_TABLES and "scores" not in n]
    own: dict[int, str] = {}
    for k, source in enumerate(sources):
        stem = source.path.name if source.parts else source.path.stem
        stems = {stem, f"{stem}_meta", f"{stem}_metadata", f"{stem}.meta", f"{stem}.metadata"}
        if named := [n for n in candidates if Path(n).stem in stems]:
            own[k] = named[0]
    rest = [n for n in candidates if n not in own.values()]
    if len(rest) > 1:
        rest = [n for n in rest if Path(n).stem.lower() in _TABLE_STEMS]
    shared = folder / rest[0] if len(rest) == 1 and len(own) < len(sources) else None
    try:
        return [
            source._replace(
                table=TableReference(folder / own[k]) if k in own else _shared_rows(shared, source, k, len(sources))
            )
            for k, source in enumerate(sources)
        ]
    except InvalidInputError as error:
        raise UsageError(f"{shared}: {error}") from None


def _shared_rows(path: Path | None, source: FoundSource, k: int, count: int) -> TableReference | None:
    """Return the rows of a table for the k-th of `count` sources: the row with its name, else all, or the k-th."""
    if path is None:
        return None
    table = load_table(path)
    name, stem = source.path.name, source.path.stem
    for rows, key in ((table.by_file, name), (table.by_file, stem), (table.by_id, stem), (table.by_id, name)):
        if key in rows:
            return TableReference(path, (rows[key],))
    if count == 1:
        return TableReference(path)
    return TableReference(path, (k,)) if len(table) == count else None
