"""Leaves of a folder: places of values, with the names that their files and keys bind."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tracestore.errors import InvalidInputError
from tracestore.ingest.execute.values import key_text
from tracestore.ingest.propose.looking import Seen, look
from tracestore.ingest.propose.names import Family, escape, families, words_of
from tracestore.ingest.readers.opening import open_tree
from tracestore.store.vocabulary import COUNTED

ITEMS = "[]"
# The doubt of keys that are numbers, below a name that says no layers.
NUMBERS = "no word says that the numbers of keys are layers"
_MAX_FILES = 6  # files of one pattern that are opened
_MAX_MEMBERS = 8  # short lists of different values are members by number
_MAX_FAMILY = 16  # keys of one pattern whose values are looked at
Path_ = tuple[str, ...]


@dataclass(frozen=True)
class Spot:
    """One value of a leaf: the names that files, keys and items bind, its extents, and the value if it is small."""

    where: Mapping[str, Any]
    dims: tuple[int | None, ...]
    value: Any = None


@dataclass(eq=False)
class Leaf:
    """A place of values.

    Attributes
    ----------
    files : str
        Pattern of the files.
    path : tuple of str
        Steps, `[]` for items.
    kind : str
        As of `Seen`.
    rank : int
    spots : list of Spot
    """

    files: str
    path: Path_
    kind: str
    rank: int
    spots: list[Spot] = field(default_factory=list)

    @property
    def place(self) -> tuple[str, Path_]:
        """Files and path, which no other leaf has."""
        return self.files, self.path

    @property
    def items_at(self) -> list[int]:
        """Positions of items in the path."""
        return [k for k, step in enumerate(self.path) if step == ITEMS]

    @cached_property
    def key(self) -> str:
        """The last key that is no pattern alone, or the name of the file."""
        for step in reversed(self.path):
            if words_of(without_names(step)) and step != ITEMS:
                return without_names(step)
        return without_names(self.files.rpartition("/")[2].partition(".")[0])

    @cached_property
    def values(self) -> list[Any]:
        """The values that were read."""
        return [spot.value for spot in self.spots if spot.value is not None]

    @cached_property
    def scalars(self) -> list[Any]:
        """The numbers and texts that were read, those of arrays one by one."""
        lists = [value if isinstance(value, list) else [value] for value in self.values]
        return [value for values in lists for value in values if value is not None]

    @cached_property
    def bound(self) -> frozenset[str]:
        """The names that files and keys bind."""
        return frozenset(name for spot in self.spots[:1] for name in spot.where if name != "F" and name[0] != "[")

    @cached_property
    def number_kind(self) -> str:
        """The kind of values; cells of a table are numbers if all of them are."""
        if self.kind != "s" or self.rank or not self.values or not all(isinstance(v, str) for v in self.values):
            return self.kind
        if all(value.strip().lstrip("-").isdecimal() for value in self.values):
            return "i"
        with suppress(ValueError):
            return "f" if [float(value) for value in self.values] else "s"
        return "s"

    def __str__(self) -> str:
        return self.files + (f" : {'/'.join(self.path)}" if self.path else "")


def without_names(step: str) -> str:
    """Return a pattern without what it binds."""
    while "{" in step:
        begin = step.index("{")
        end = step.find("}", begin)
        if end < 0:
            break
        step = step[:begin] + " " + step[end + 1 :]
    return step.lstrip("@")


@dataclass
class Observation:
    """The result of a look at all files.

    Attributes
    ----------
    leaves : list of Leaf
    files : dict
        The names of the files of each pattern.
    families : dict
        The patterns of names, by files and path of the patterns.
    unread : dict
        Why files could not be read, by name.
    """

    leaves: list[Leaf] = field(default_factory=list)
    files: dict[str, list[str]] = field(default_factory=dict)
    families: dict[tuple[str, Path_], Family] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)


def observe(files: Mapping[str, Path]) -> Observation:
    """Return what the files hold: the first and last files of each pattern are opened."""
    found = Observation()
    for family in families(files, is_path=True, keep_single=False):
        names = list(family.members)
        opened = names if len(names) <= _MAX_FILES else [*names[: _MAX_FILES - 1], names[-1]]
        seen: dict[str, Seen] = {}
        for name in opened:
            try:
                with open_tree(files[name]) as root:
                    seen[name] = look(root)
            except InvalidInputError as error:
                found.unread[name] = str(error)
        for pattern, members in _alike(family, seen):
            bound = {name: _texts(family.members[name]) for name in members if name in seen}
            contexts = [({"F": name, **texts}, seen[name]) for name, texts in bound.items()]
            found.files[pattern] = members
            found.families[pattern, ()] = family
            _walk(found, pattern, (), contexts)
    return found


def _alike(family: Family, seen: dict[str, Seen]) -> Iterator[tuple[str, list[str]]]:
    """Yield the pattern of files with equal structures; each file by itself where one of a kind is among others."""
    groups: dict[Any, list[str]] = defaultdict(list)
    for name, one in seen.items():
        groups[_signature(one)].append(name)
    if len(groups) <= 1 or not family.names:
        yield family.pattern, list(family.members)
        return
    if all(len(names) == 1 for names in groups.values()):
        for name in family.members:
            yield escape(name), [name]
        return
    yield family.pattern, list(family.members)


def _signature(seen: Seen) -> Any:
    """Return what files of one pattern have in common."""
    if seen.kind == "map":
        patterns = families(map(_key, seen.keys))
        return "map", tuple(sorted(p.pattern for p in patterns))
    if seen.kind == "list" and seen.items:
        return "list", _signature(seen.items[0])
    return seen.kind, len(seen.dims)


def _texts(bound: Mapping[str, str]) -> dict[str, str]:
    return {name: key_text(value) for name, value in bound.items()}


def _key(key: Any) -> str:
    return ",".join(key_text(part) for part in key) if isinstance(key, tuple) else key_text(key)


Contexts = list[tuple[dict[str, Any], Seen]]


def _walk(found: Observation, files: str, path: Path_, contexts: Contexts) -> None:
    """Add the leaves at and below a path to what was found."""
    contexts = [(where, seen) for where, seen in contexts if seen.kind != "none"]
    maps = [(where, seen) for where, seen in contexts if seen.keys]
    lists = [(where, _as_members(seen)) for where, seen in contexts if seen.kind == "list"]
    maps += [(where, seen) for where, seen in lists if seen.kind == "map"]
    lists = [(where, seen) for where, seen in lists if seen.kind == "list"]
    if maps:
        _walk_keys(found, files, path, maps)
    if lists:
        inner = []
        for where, seen in lists:
            name = f"[{len(path)}]{'/'.join(path)}"
            inner += [({**where, name: k}, item) for k, item in enumerate(seen.items)]
        _walk(found, files, (*path, ITEMS), inner)
    kinds: dict[int, Leaf] = {}
    for where, seen in contexts:
        if seen.kind in ("map", "list"):
            continue
        rank = len(seen.dims)
        leaf = kinds.setdefault(rank, Leaf(files, path, seen.kind, rank))
        leaf.spots.append(Spot(where, seen.dims, seen.value))
        leaf.kind = _common(leaf.kind, seen.kind)
    found.leaves += kinds.values()


def _common(one: str, two: str) -> str:
    """Return the kind of values of two kinds."""
    if one == two:
        return one
    order = "bifsv"
    return max(one, two, key=order.index)


def _as_members(seen: Seen) -> Seen:
    """Return a short list of different values, such as a tuple of id and states, as a map by number."""
    if not seen.is_whole or not 1 < len(seen.items) <= _MAX_MEMBERS:
        return seen
    shapes = {(item.kind, len(item.dims)) for item in seen.items if item.kind != "none"}
    if len(shapes) < 2 or shapes <= {("i", 0), ("f", 0), ("b", 0)}:
        return seen
    return Seen("map", keys={str(k): item for k, item in enumerate(seen.items)})


def _walk_keys(found: Observation, files: str, path: Path_, maps: Contexts) -> None:
    keys: dict[str, set[Any]] = defaultdict(set)
    for _, seen in maps:
        for key in seen.keys:
            keys[_key(key)].add(key)
    plain = [name for name in keys if not name.startswith("@")]
    for family in _groups_of_keys(plain, maps):
        family = _numbers_of_layers(family, path, maps)
        inner: Contexts = []
        members = list(family.members)
        if len(members) > _MAX_FAMILY:
            members = [*members[: _MAX_FAMILY - 1], members[-1]]
        for where, seen in maps:
            by_name = {_key(key): value for key, value in seen.keys.items()}
            for name in members:
                if name in by_name:
                    bound = _texts(family.members[name])
                    inner.append(({**_outer(where, bound), **bound}, by_name[name]))
        inner_path = (*path, _step(family.pattern, by_tuple=_is_tuple(keys, family)))
        if family.names:
            found.families[files, inner_path] = family
        _walk(found, files, inner_path, inner)
    for name in keys:
        if name.startswith("@"):
            _walk(found, files, (*path, name), [(w, s.keys[name]) for w, s in maps if name in s.keys])


def _numbers_of_layers(family: Family, path: Path_, maps: Contexts) -> Family:
    """Return numbers that are keys of arrays inside a trace as those of layers."""
    where, seen = maps[0]
    is_inside = any(name == "id" or name[0] == "[" for name in where)
    values = [value for key, value in seen.keys.items() if _key(key) in family.members]
    texts = [bound.get("id", "") for bound in family.members.values()]
    last = (words_of(path[-1]) if path else ()) or ("",)
    is_said = COUNTED.get(last[-1]) == "layer"
    are_layers = is_said and last[-1] in ("layers", "blocks")
    if family.names != ("id",) or not all(text.isdecimal() for text in texts):
        return family
    if not are_layers and not (is_inside and all(value.dims for value in values)):
        return family
    members = {name: {"layer": bound["id"]} for name, bound in family.members.items()}
    doubt = "" if is_said else NUMBERS
    return Family(family.pattern.replace("{id}", "{layer}"), members, doubt)


def _outer(where: dict[str, Any], bound: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the outer names bind, with another name for those that are bound again."""
    return {(f"{name}+" if name in bound else name): value for name, value in where.items()}


def _step(text: str, *, by_tuple: bool) -> str:
    """Return a pattern as a step of a path."""
    text = text.replace("/", "\\/")
    if not by_tuple:
        text = text.replace(",", "\\,")
    return "\\" + text if text.startswith(("[", "@")) else text


def _is_tuple(keys: Mapping[str, set[Any]], family: Family) -> bool:
    return any(isinstance(key, tuple) for name in family.members for key in keys[name])


def _groups_of_keys(names: Iterable[str], maps: Contexts) -> list[Family]:
    """Return keys as patterns, where the values of a pattern are alike; the others by themselves."""
    kinds: dict[str, set[Any]] = defaultdict(set)
    for _, seen in maps:
        for key, value in seen.keys.items():
            if value.kind != "none":
                kinds[_key(key)].add((value.kind, len(value.dims)))
    found: list[Family] = []
    for family in families(names):
        shapes = {frozenset(kinds[name]) for name in family.members}
        is_one = len(shapes) == 1 or bool(set.intersection(*map(set, shapes)))
        if family.names and is_one and (shapes == {frozenset({("map", 0)})} or not _are_fields(family)):
            found.append(family)
        else:
            found += [Family(escape(name), {name: {}}) for name in family.members]
    return found


def _are_fields(family: Family) -> bool:
    """Return whether a pattern is a word alone without digits: rather the names of fields than ids."""
    if family.names != ("id",) or family.pattern != "{id}":
        return False
    return not any(any(c.isdigit() for c in name) for name in family.members) and len(family.members) < 3
