"""Leaves of a folder: places of values, with the names that their files and keys bind."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from tracestore.errors import InvalidInputError
from tracestore.ingest.execute.row_ranges import covers
from tracestore.ingest.execute.values import key_text
from tracestore.ingest.propose.looking import MAX_ITEMS, Seen, look, texts_of
from tracestore.ingest.propose.names import Family, escape, families, is_integer, without_names, words_of
from tracestore.ingest.readers.opening import open_tree
from tracestore.store.vocabulary import COUNTED, SAYING, is_question_id

ITEMS = "[]"
# The doubt of keys that are numbers, below a name that says no layers.
NUMBERS = "no word says that the numbers of keys are layers"
_MAX_FILES = 6  # files of one pattern that are opened
_MAX_FAMILY = 16  # keys of one pattern whose values are looked at
_KINDS = "bifsv"  # of two kinds of values in one place, the later one counts
Path_ = tuple[str, ...]
Contexts = list[tuple[dict[str, Any], Seen]]


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
        """The last key that is no pattern alone, or the name of the file or of its folder."""
        keys = [*reversed(self.path), *(name.partition(".")[0] for name in reversed(self.files.split("/")))]
        return next(filter(words_of, map(without_names, keys)), "")

    @cached_property
    def scalars(self) -> list[Any]:
        """The numbers and texts that were read, those of arrays one by one."""
        lists = [spot.value if isinstance(spot.value, list) else [spot.value] for spot in self.spots]
        return [value for values in lists for value in values if value is not None]

    @cached_property
    def bound(self) -> frozenset[str]:
        """The names that files and keys bind."""
        return frozenset(name for spot in self.spots[:1] for name in spot.where if name != "F" and name[0] != "[")

    @cached_property
    def number_kind(self) -> str:
        """The kind of values; cells of a table are numbers if all of them are."""
        values = self.scalars
        if self.kind != "s" or self.rank or not values or not all(isinstance(value, str) for value in values):
            return self.kind
        if all(value.strip().lstrip("-").isdecimal() for value in values):
            return "i"
        with suppress(ValueError):
            return "f" if [float(value) for value in values] else "s"
        return "s"

    @property
    def is_counter(self) -> bool:
        """Return whether the values are 0, 1, 2 and so on."""
        return self.number_kind == "i" and list(map(int, self.scalars)) == list(range(len(self.scalars)))

    def __str__(self) -> str:
        return self.files + (f" : {'/'.join(self.path)}" if self.path else "")


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

    def ids(self, without: str) -> set[str]:
        """Return what may be the ids of traces in all files but one: values under a name of ids, and what names bind."""
        leaves = [leaf for leaf in self.leaves if self.files[leaf.files] != [without] and is_question_id(leaf.key)]
        families = [family for (files, _), family in self.families.items() if self.files[files] != [without]]
        bound = {texts["id"] for family in families for texts in family.members.values() if "id" in texts}
        return bound | {text for leaf in leaves if leaf.kind in "is" for text in texts_of(leaf.scalars)}

    def counts_files(self, files: str, ids: list[str]) -> bool:
        """Return whether the numbers of answers in the names of files count these: each has another one, and other ids."""
        numbers = [bound.get("sample") for bound in self.families[files, ()].members.values()]
        return len(set(numbers)) == len(numbers) > 1 and len(set(ids)) == len(ids)

    def is_whole(self, leaf: Leaf) -> bool:
        """Return whether all values of a leaf were looked at, and not only those of some items or files."""
        return len(leaf.spots) < MAX_ITEMS if leaf.items_at else len(leaf.spots) == len(self.files[leaf.files])

    def has_batches(self, states: Leaf) -> bool:
        """Return whether the numbers of files may be those of batches, by the rows in them and in a table."""
        texts = {bound["id"] for bound in self.families[states.files, ()].members.values()}
        if states.rank < 2 or len(texts) < 2 or not all(text.isdecimal() for text in texts):
            return False
        numbers = sorted(map(int, texts))
        sizes = {int(spot.where["id"]): spot.dims[0] or 0 for spot in states.spots}
        full = sizes.get(numbers[0], 0)
        # The number of the first row, as in layer_0_4.pt.
        if numbers[0] == 0 and full > 1 and all(sizes.get(a, b - a) == b - a for a, b in pairwise(numbers)):
            return True
        are_alike = numbers == list(range(len(numbers))) and all(sizes.get(n, full) == full for n in numbers[:-1])
        total = full * (len(numbers) - 1) + sizes.get(numbers[-1], full)
        return are_alike and states.rank == 2 and "layer" in states.bound and self._has_rows(total, states.files)

    def _has_rows(self, count: int, without: str) -> bool:
        """Return whether a table or column of other files may have as many rows."""
        others = (leaf for leaf in self.leaves if leaf.files != without and len(leaf.items_at) + leaf.rank == 1)
        counts = {leaf.spots[0].dims[0] if leaf.rank else len(leaf.spots) for leaf in others}
        return count in counts or (MAX_ITEMS in counts and count > MAX_ITEMS)  # the first items alone are known


def observe(files: Mapping[str, Path]) -> Observation:
    """Return what the files hold: the first and last files of each pattern are opened."""
    found = Observation()
    for family in _families_of_files(files):
        seen = _opened(found, family, files)
        ranks = {len(one.dims) for one in seen.values() if one.kind in "fib"}
        # X.npy and y.npy are no ids: the states of traces have as many axes.
        is_one = len(ranks) < 2 or len(seen) < len(family.members)
        for one in [family] if is_one else [Family(escape(name), {name: {}}) for name in seen]:
            found.files[one.pattern] = list(one.members)
            found.families[one.pattern, ()] = one
            contexts = [({"F": n, **_texts(one.members[n])}, seen[n]) for n in one.members if n in seen]
            _walk(found, one.pattern, (), contexts)
    return found


def _families_of_files(files: Iterable[str]) -> Iterator[Family]:
    """Yield the names of files as patterns; config.json is no id next to answers.json, except next to config.npy."""
    stems = {name: name.lower().rpartition("/")[2].partition(".")[::2] for name in files}
    settings = SAYING["settings"] - {stem for stem, suffix in stems.values() if suffix != "json"}
    groups: dict[str, list[str]] = defaultdict(list)
    for name, (stem, _) in stems.items():
        groups[stem if stem in settings else ""].append(name)
    for names in groups.values():
        yield from families(names, is_path=True)


def _opened(found: Observation, family: Family, files: Mapping[str, Path]) -> dict[str, Seen]:
    """Return what the first and last files of a pattern hold."""
    seen: dict[str, Seen] = {}
    for name in _both_ends(list(family.members), _MAX_FILES):
        try:
            with open_tree(files[name]) as root:
                seen[name] = look(root)
        except InvalidInputError as error:
            found.unread[name] = str(error)
    return seen


def _both_ends(names: list[str], most: int) -> list[str]:
    return names if len(names) <= most else [*names[: most - 1], names[-1]]


def _texts(bound: Mapping[str, str]) -> dict[str, str]:
    return {name: key_text(value) for name, value in bound.items()}


def _key(key: Any) -> str:
    return ",".join(key_text(part) for part in key) if isinstance(key, tuple) else key_text(key)


def _walk(found: Observation, files: str, path: Path_, contexts: Contexts) -> None:
    """Add the leaves at and below a path to what was found."""
    if maps := [(where, seen) for where, seen in contexts if seen.keys]:
        _walk_keys(found, files, path, maps)
    if lists := [(where, seen) for where, seen in contexts if seen.kind == "list"]:
        name = f"[{len(path)}]{'/'.join(path)}"
        inner = [({**where, name: k}, item) for where, seen in lists for k, item in enumerate(seen.items)]
        _walk(found, files, (*path, ITEMS), inner)
    by_rank: dict[int, Leaf] = {}
    for where, seen in contexts:
        if seen.kind not in ("map", "list", "none"):
            leaf = by_rank.setdefault(len(seen.dims), Leaf(files, path, seen.kind, len(seen.dims)))
            leaf.spots.append(Spot(where, seen.dims, seen.value))
            leaf.kind = max(leaf.kind, seen.kind, key=_KINDS.index)
    found.leaves += by_rank.values()


def _walk_keys(found: Observation, files: str, path: Path_, maps: Contexts) -> None:
    by_name = [(where, {_key(key): value for key, value in seen.keys.items()}) for where, seen in maps]
    names = list(dict.fromkeys(name for _, keys in by_name for name in keys))
    tuples = {_key(key) for _, seen in maps for key in seen.keys if isinstance(key, tuple)}
    plain = [name for name in names if not name.startswith("@")]
    for family in _groups_of_keys(plain, maps, are_columns=path[-1:] == (ITEMS,)):
        family = _numbers_of_layers(family, path, maps)
        members = {name: _texts(family.members[name]) for name in _both_ends(list(family.members), _MAX_FAMILY)}
        step = (*path, _step(family.pattern, by_tuple=not tuples.isdisjoint(family.members)))
        if family.names:
            found.families[files, step] = family
        inner = [
            ({**_outer(where, bound), **bound}, keys[name])
            for where, keys in by_name
            for name, bound in members.items()
            if name in keys
        ]
        _walk(found, files, step, inner)
    for name in names:
        if name.startswith("@"):
            _walk(found, files, (*path, name), [(where, keys[name]) for where, keys in by_name if name in keys])


def _groups_of_keys(names: Iterable[str], maps: Contexts, *, are_columns: bool) -> Iterator[Family]:
    """Yield keys as patterns, where the values of a pattern are alike; the others by themselves."""
    kinds: dict[str, set[Any]] = defaultdict(set)
    for _, seen in maps:
        for key, value in seen.keys.items():
            if value.kind != "none":
                kinds[_key(key)].add((value.kind, len(value.dims)))
    for family in families(names):
        shapes = [kinds[name] for name in family.members]
        is_one = all(one == shapes[0] for one in shapes) or bool(set.intersection(*shapes))
        are_maps = all(one == {("map", 0)} for one in shapes)
        if family.names and is_one and (are_maps or not _are_fields(family, are_columns=are_columns)):
            yield family
        else:
            yield from (Family(escape(name), {name: {}}) for name in family.members)


def _are_fields(family: Family, *, are_columns: bool) -> bool:
    """Return whether a pattern is a word alone, rather the name of a field than an id: of two keys, or of columns."""
    have_digits = [any(char.isdigit() for char in name) for name in family.members]
    are_words = not all(have_digits) if are_columns else not any(have_digits) and len(have_digits) < 3
    return family.pattern == "{id}" and are_words


def _numbers_of_layers(family: Family, path: Path_, maps: Contexts) -> Family:
    """Return numbers that are keys of arrays inside a trace as those of layers."""
    texts = [bound.get("id", "") for bound in family.members.values()]
    if family.names != ("id",) or not all(map(is_integer, texts)):
        return family
    where, seen = maps[0]
    is_inside = any(name == "id" or name[0] == "[" for name in where)
    last = (words_of(path[-1]) if path else ()) or ("",)
    is_said = COUNTED.get(last[-1]) == "layer"
    shapes = [value.dims for key, value in seen.keys.items() if _key(key) in family.members]
    may_be_layers = all(0 < len(dims) < 3 or dims[:1] == (1,) for dims in shapes)  # each one layer, not all of them
    if last[-1] not in ("layers", "blocks") and not (is_inside and may_be_layers):
        return family
    members = {name: {"layer": bound["id"]} for name, bound in family.members.items()}
    return Family(family.pattern.replace("{id}", "{layer}"), members, "" if is_said else NUMBERS)


def _outer(where: dict[str, Any], bound: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the outer names bind, with another name for those that are bound again."""
    return {(f"{name}+" if name in bound else name): value for name, value in where.items()}


def _step(text: str, *, by_tuple: bool) -> str:
    """Return a pattern as a step of a path."""
    text = text.replace("/", "\\/")
    if not by_tuple:
        text = text.replace(",", "\\,")
    return "\\" + text if text.startswith(("[", "@")) else text


def rows_next_to(lengths: Leaf, leaf: Leaf) -> str:
    """Return what the integers of a leaf say next to lengths that give as many rows, "" if neither first nor last ones."""
    pairs = [(one.value, other.value) for one, other in zip(leaf.spots, lengths.spots, strict=False)]
    if any(not one or not other or len(one) != len(other) or None in (*one, *other) for one, other in pairs):
        return ""
    if all(covers([(k, k + n) for k, n in zip(*pair, strict=True)]) for pair in pairs):
        return "S.starts"
    return "S.ends" * all(covers([(k - n, k) for k, n in zip(*pair, strict=True)]) for pair in pairs)
