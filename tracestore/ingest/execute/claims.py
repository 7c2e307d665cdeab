"""Assign files to the lines of a layout, and group the files that are read together as one source."""

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tracestore.errors import InvalidInputError, UsageError, escape_unprintable, some_of
from tracestore.ingest.execute.values import key_text
from tracestore.ingest.layout.patterns import AXIS_NAMES, Pattern
from tracestore.ingest.layout.places import Place, Plan, wild_prefixes
from tracestore.store.io.files import LocalFiles
from tracestore.store.io.provenance_file import PROVENANCE_FILE
from tracestore.store.vocabulary import score_of_word

_DIGITS = re.compile(r"(\d+)")
_SUFFIX = re.compile(r"\.[a-z]\w*$", re.IGNORECASE)
_SKIPPED = ("__MACOSX",)
# Files that hold no data of traces, whatever a layout says.
_OTHER_FILES = (PROVENANCE_FILE, "readme.txt", "license.txt", "requirements.txt")
_OTHER_SUFFIXES = (
    *(".md", ".py", ".ipynb", ".sh", ".log", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".png", ".pdf", ".svg", ".html"),
    *(".jpg", ".lock", ".rst", ".license", ".gitignore", ".sql", ".slurm", ".err"),
    ".refused.jsonl",  # lists of the traces that conversions have refused
)
_ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst", ".7z", ".rar")
_MAX_NAMES = 3


@dataclass(frozen=True)
class FoundFile:
    """A file that lines of a layout name.

    Attributes
    ----------
    path : Path
    name : str
        Its path below SRC.
    bound : dict
        What the pattern binds, with the texts of the wildcards by the pattern up to them.
    """

    path: Path
    name: str
    bound: dict[str, Any] = field(hash=False, compare=False)


@dataclass
class FileGroup:
    """The files of one source, by the FILES of the lines that read them."""

    name: str
    files: dict[str, list[FoundFile]]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files, each once."""
        return tuple(dict.fromkeys(file.path for found in self.files.values() for file in found))


Groups = dict[tuple[Any, ...], FileGroup]  # by what the names of their files bind
Claimed = dict[str, list[FoundFile]]  # by FILES


class FileKeys:
    """Tell the files of the states apart: `keys` are base names, or paths below SRC where base names repeat."""

    def __init__(self, plan: Plan, groups: Iterable[FileGroup]) -> None:
        names = [file.name for group in groups for p in plan.states for file in group.files[p.address.files.text]]
        bases = [name.rpartition("/")[2] for name in names]
        is_unique = len(set(bases)) == len(set(names))
        self.keys = dict(zip(names, bases if is_unique else names, strict=True))
        # A row may name a file without its folders, or without its suffixes.
        self._by_stem: dict[str, list[str]] = defaultdict(list)
        for name in self.keys:
            text = name.rpartition("/")[2]
            while name not in self._by_stem[text]:
                self._by_stem[text].append(name)
                text = _SUFFIX.sub("", text)

    def of_row(self, text: str, table: FoundFile) -> str:
        """Return the key of the file that a row of a table names: by its path below SRC or the table, else by the end of it."""
        folder = table.name.rpartition("/")[0]
        path = text.replace("\\", "/").removeprefix("./")
        for name in (path, f"{folder}/{path}"):
            if name in self.keys:
                return self.keys[name]
        *above, base = path.split("/")
        ends = ((name, zip(above[::-1], name.split("/")[-2::-1], strict=False)) for name in self._by_stem.get(base, ()))
        found = [name for name, pairs in ends if all(one == two for one, two in pairs)]
        return self.keys[found[0]] if len(found) == 1 else path


def natural_key(name: str) -> list[Any]:
    """Return a key that sorts numbers in names by their value."""
    return [int(part) if k % 2 else part for k, part in enumerate(_DIGITS.split(name))]


def list_files(arguments: list[Path], store: Path) -> dict[str, Path]:
    """Return the files by their paths below SRC; rule 10a: hidden names are left out, links to folders not followed."""
    found: dict[str, Path] = {}
    real: set[str] = set()
    for argument in arguments:
        if not os.path.lexists(argument):
            raise UsageError(f"{argument}: no such file or folder")
        if argument.is_dir() and LocalFiles(argument).has_root():
            raise UsageError(
                f"{argument}: a store; tracestore merge and subset copy stores, tracestore export writes files"
            )
        pairs = _walk(argument, store) if argument.is_dir() else [(argument.name, argument)]
        own: dict[str, Path] = {}
        # The name of a file is its own, not that of a link next to it such as latest.pt.
        for name, path in sorted(pairs, key=lambda pair: (_is_alias(pair[1]), natural_key(pair[0]))):
            if (resolved := os.path.realpath(path)) in real:
                continue
            real.add(resolved)
            if name in found:
                raise UsageError(f"{name}: lies below two of the sources; convert them one after the other")
            own[name] = path
        found |= dict(sorted(own.items(), key=lambda pair: natural_key(pair[0])))
    return found


def _is_alias(path: Path) -> bool:
    return path.is_symlink() and Path(os.path.realpath(path)).parent == Path(os.path.realpath(path.parent))


def _walk(top: Path, store: Path) -> Iterator[tuple[str, Path]]:
    def refuse(error: OSError) -> None:
        raise UsageError(f"{error.filename}: cannot be read: {error.strerror}")

    for here, folders, files in os.walk(top, onerror=refuse):
        inside = Path(here)
        folders[:] = [name for name in sorted(folders) if not (_is_hidden(name) or _is_store(inside / name, store))]
        yield from (((inside / f).relative_to(top).as_posix(), inside / f) for f in files if not _is_hidden(f))


def _is_store(folder: Path, store: Path) -> bool:
    """Return whether a folder is the store of the conversion, or another one."""
    return folder.resolve() == store.resolve() or (folder / "manifest").is_dir()


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "~")) or name in _SKIPPED


def claim_files(plan: Plan, files: Mapping[str, Path], owned: Iterable[Path], *, is_stated: bool) -> Claimed:
    """Return the files of each FILES of a layout: each belongs to the pattern with the most literal characters.

    Parameters
    ----------
    files : Mapping
        Paths by their names below SRC.
    owned : iterable of Path
        Files that are read for another purpose, such as the scores file.
    is_stated : bool
        Whether each entry of `ignore` leaves out a file.

    Raises
    ------
    InvalidInputError
        If two patterns of equal length match a file, no line names it (rule 8), or a line matches none.
    """
    claimed, skipped = named_files(plan, files), {os.path.realpath(path) for path in owned}
    named = {file.name for found in claimed.values() for file in found}
    others = [name for name in files if not (name in named or is_other(name))]
    unowned = [name for name in others if os.path.realpath(files[name]) not in skipped]
    needed = [place for place in plan.places if not place.is_optional]
    empty = next((place for place in needed if not claimed[place.address.files.text]), None)
    if unowned:
        lines = json.dumps(unowned[:_MAX_NAMES], ensure_ascii=False)
        way = f"add a line, {'pass --scores, ' * unowned[0].endswith(('.csv', '.tsv'))}or ignore = {lines}"
        way = "unpack it" if unowned[0].lower().endswith(_ARCHIVES) else way
        way = way if empty is None else _way_of_empty(empty.name, empty.address.files.text, way)
        raise InvalidInputError(f"no line of the layout names {some_of(unowned)}; {way}")
    if is_stated:
        _check_ignored(plan, claimed)
        for text in dict.fromkeys(place.address.files.text for place in plan.states):
            _check_wild(text, claimed[text])
    if empty is not None:
        reason = _taken(empty.address.files, claimed) or f"there are {some_of(list(files))}"
        found = f"no file matches {empty.address.files.text}; {reason}; without such a file, remove its lines"
        raise InvalidInputError(found, field=empty.name)
    return claimed


def named_files(plan: Plan, files: Mapping[str, Path]) -> Claimed:
    """Return the files of each FILES of a layout, without checks."""
    claimed: Claimed = {text: [] for text in plan.files}
    for name, path in files.items():
        if (owner := owner_of(name, plan)) is not None:
            claimed[owner[0]].append(FoundFile(path, name, owner[1]))
    return claimed


def _way_of_empty(name: str, text: str, way: str) -> str:
    """Return what to do where the FILES of a line match no file; `way` is for files that belong to no line."""
    if text.startswith(("[", "{}")):
        return f"{text} is the name of a file in its lines, expected FILES : {text}"
    blanks = ": a line is FILES : PATH -> AXES, with blanks around : and ->" if ":" in text or "->" in text else ""
    return f"the line for {name} matches no file: {text}{blanks}; or {way}"


def _check_wild(text: str, files: Iterable[FoundFile]) -> None:
    """Rule 8a: a folder or a part of a name that says the class of an answer is not left out by a wildcard."""
    for file in files:
        parts = (part for name, value in file.bound.items() if name[0] == "*" for part in str(value).split("/"))
        if (word := next((part for part in parts if score_of_word(part, None) is not None), None)) is not None:
            raise InvalidInputError(
                f"{word} in the name may be the label, and * of {text} leaves it out: {{verdict}} binds it, for "
                'is_correct = "={verdict}"; without that line it is left out',
                source=file.name,
            )


def _check_ignored(plan: Plan, claimed: Claimed) -> None:
    """Refuse entries of `ignore` that leave out no file, or of values in a file that no line reads."""
    for address in plan.left_out:
        text = address.files.text
        if text in plan.ignored_files and not claimed[text]:
            reason = _taken(plan.files[text], claimed) or "remove the entry"
            raise InvalidInputError(f"{address}: no file is left out by it; {reason}", field="ignore")
        if text in plan.ignored_files and address.path:
            name = claimed[text][0].name
            lines = (p.address.files.text for p in plan.places if p.address.files.match(name))
            line = next((f"the line of {name} has {line}" for line in lines), f'ignore = ["{text}"] leaves it out')
            raise InvalidInputError(f"{address}: no line reads {text}; {line}", field="ignore")


def _taken(pattern: Pattern, claimed: Claimed) -> str:
    """Return which line has a file that the pattern matches, with its name; empty if there is none."""
    pairs = ((text, file.name) for text, found in claimed.items() for file in found)
    text, name = next(((text, name) for text, name in pairs if pattern.match(name)), ("", ""))
    reason = f"is a file of {text}, whose line has more literal characters: a file has one line's FILES"
    return f"{escape_unprintable(name, 60)} {reason}" if text else ""


def owner_of(name: str, plan: Plan) -> tuple[str, dict[str, Any]] | None:
    """Return the FILES that a file belongs to and what they bind; a field beats `ignore` on ties."""
    matches = {text: match for text, pattern in plan.files.items() if (match := pattern.match(name)) is not None}
    ranks = {text: (plan.files[text].num_literals, text not in plan.ignored_files) for text in matches}
    best = [text for text, rank in ranks.items() if rank == max(ranks.values())]
    if len(best) > 1:
        raise InvalidInputError(f"{best[0]} and {best[1]} match it with equally many characters", source=name)
    if not best:
        return None
    bound = {n: key_text(v) if isinstance(v, str) else v for n, v in matches[best[0]].bound.items()}
    wild = zip(wild_prefixes(best[0]), matches[best[0]].wild, strict=True)
    return best[0], bound | {f"*{prefix}": value for prefix, value in wild}


def is_other(name: str) -> bool:
    """Return whether a file holds no data of traces, whatever a layout says."""
    base = name.rpartition("/")[2]
    return base.lower() in _OTHER_FILES or base.lower().endswith(_OTHER_SUFFIXES) or "." not in base


def group_files(plan: Plan, claimed: Claimed) -> tuple[list[FileGroup], list[str]]:
    """Return the sources, and the FILES of tables, which every source may use.

    Files whose names bind the same names of a trace are one source. Tables are files whose names do not tell all sources
    apart, or whose rows run on over chunks.
    """
    groups, texts = groups_of_states(plan, claimed), [place.address.files.text for place in plan.states]
    tables: set[str] = set()
    for place in plan.others:
        text = place.address.files.text
        if text not in texts and not _attach(place, claimed[text], groups, plan):
            tables.add(text)
    for group in groups.values():
        if missing := next((text for text in texts if text not in group.files), None):
            raise InvalidInputError(f"no file {missing} belongs to it", source=group.name, field=plan.layout.states)
    ordered = sorted(groups.values(), key=lambda g: natural_key(next(iter(g.files.values()))[0].name))
    return ordered, sorted(tables)


def groups_of_states(plan: Plan, claimed: Claimed) -> Groups:
    """Return the sources with their files of states alone."""
    groups: Groups = {}
    texts = [place.address.files.text for place in plan.states]
    for text in texts:
        for file in claimed[text]:
            key = tuple(file.bound.get(name) for name in plan.source_names)
            name = _source_name(plan.states[0].address.files, file) if text == texts[0] else file.name
            _add(groups.setdefault(key, FileGroup(name, {})), text, file)
    if len({group.name for group in groups.values()}) < len(groups):
        for group in groups.values():
            group.name = next(iter(group.files.values()))[0].name
    return groups


def _attach(place: Place, files: list[FoundFile], groups: Groups, plan: Plan) -> bool:
    """Add files to the sources whose names bind the same, and return true; false if they are a table.

    Rule 11: InvalidInputError if a file belongs to no source.
    """
    if not (shared := plan.shared_names(place)):
        return False
    owners: dict[tuple[Any, ...], list[FileGroup]] = defaultdict(list)
    for key, group in groups.items():
        values = dict(zip(plan.source_names, key, strict=True))
        owners[tuple(values[name] for name in shared)].append(group)
    found = [(owners.get(tuple(file.bound.get(name) for name in shared), []), file) for file in files]
    if unused := [file.name for own, file in found if not own]:
        raise InvalidInputError(f"{some_of(unused)}: files that belong to no states: {len(unused):,}", field=place.name)
    text = place.address.files.text
    runs_on = any("N*" in names for other, names in plan.keys.items() if other.address.files.text == text)
    if len(owners) < len(groups) or runs_on:
        return False
    for (group,), file in found:
        _add(group, text, file)
    return True


def _add(group: FileGroup, text: str, file: FoundFile) -> None:
    files = group.files.setdefault(text, [])
    if file not in files:
        files.append(file)


def _source_name(pattern: Pattern, file: FoundFile) -> str:
    """Return the name of a source: that of its file, with * where names of axes tell its files apart."""
    wild = iter(value for name, value in file.bound.items() if name.startswith("*"))
    name = ""
    for part in pattern.parts:
        if part.kind == "literal":
            name += part.text
        elif part.kind == "name":
            name += "*" if part.text in AXIS_NAMES else str(file.bound[part.text])
        else:
            name += next(wild)
    return name if any(n in AXIS_NAMES for n in pattern.names) else file.name
