"""Find the built-in layout that owns a file: one at most, told from the name and the first item of the file."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tracestore.errors import InvalidInputError
from tracestore.ingest.builtin.library import Builtin
from tracestore.ingest.readers.looks import FirstLooks
from tracestore.ingest.readers.opening import COMPRESSED
from tracestore.ingest.readers.tree import Value
from tracestore.store.vocabulary import score_of_word

# Of files whose names differ in numbers alone, this many are looked at; each file is checked again when it is read.
_MAX_LOOKS = 64
_MAX_INFLATED = 2  # of compressed files; those that stay open are not inflated again
_WORD = re.compile(r"[^\W\d_]+")
_NUMBERS = re.compile(r"(?<![0-9a-zA-Z])[0-9a-f]{6,}(?![0-9a-zA-Z])|\d+")


class _Near(NamedTuple):
    """Hold why the nearest built-in layout does not read a file, and the one that does if others show the order of axes."""

    why: str
    if_ordered: Builtin | None


_Owner = Builtin | InvalidInputError | _Near | None


@dataclass
class Claims:
    """The files of each built-in layout by their names below SRC, and the files of none.

    Attributes
    ----------
    owned : dict
    rest : dict
        Why a file has no owner, by its name: an error if it cannot be read.
    near : dict
        Why the built-in layout whose keys a file has does not read it, by its name.
    """

    owned: dict[Builtin, dict[str, Path]] = field(default_factory=dict)
    rest: dict[str, InvalidInputError | None] = field(default_factory=dict)
    near: dict[str, str] = field(default_factory=dict)

    def explained(self, name: str, error: InvalidInputError) -> InvalidInputError:
        """Return the error of a file, with why the built-in layout whose keys it has does not read it."""
        return type(error)(f"{self.near[name]}; {error}") if name in self.near else error


def claim(files: Mapping[str, Path], known: Sequence[Builtin], looks: FirstLooks | None = None) -> Claims:
    """Return which built-in layout owns each file.

    Parameters
    ----------
    files : Mapping
        Paths by their names below SRC.
    known : sequence of Builtin
        The layouts.
    looks : FirstLooks, optional
        Keeps files open that have an owner. By default all are closed.

    Raises
    ------
    InvalidInputError
        If two of them match a file.
    """
    claims, opened = Claims(), looks or FirstLooks()
    in_classes = _in_classes(files)
    claims.rest |= dict.fromkeys(in_classes)
    owners = _owners({name: path for name, path in files.items() if name not in in_classes}, known, opened)
    owning = {owner for owner in owners.values() if isinstance(owner, Builtin)}
    for name, owner in owners.items():
        owner = owner.if_ordered if isinstance(owner, _Near) and owner.if_ordered in owning else owner
        if isinstance(owner, Builtin):
            claims.owned.setdefault(owner, {})[name] = files[name]
        elif isinstance(owner, _Near):
            claims.rest[name], claims.near[name] = None, owner.why
        else:
            claims.rest[name] = owner
    for builtin in list(claims.owned):
        _release_incomplete(claims, builtin)
    for name in files if looks is None else claims.rest:
        opened.drop(files[name])
    return claims


def _owners(files: Mapping[str, Path], known: Sequence[Builtin], opened: FirstLooks) -> dict[str, _Owner]:
    """Return the owner of each file; of names that differ in numbers alone, only some files are opened if one owns these."""
    alike: dict[str, list[str]] = defaultdict(list)
    owners: dict[str, _Owner] = {}
    for name in files:
        alike[_NUMBERS.sub("#", name)].append(name)
    for names in alike.values():
        most = _MAX_INFLATED if COMPRESSED.search(names[0]) else _MAX_LOOKS
        looked = names[:: -(-len(names) // most)]
        found = [_owner(name, files[name], known, opened) for name in looked]
        is_same = len({owner.if_ordered if isinstance(owner, _Near) else owner for owner in found}) == 1
        first = next((owner for owner in found if isinstance(owner, Builtin)), None) if is_same else None
        if first is None and len(looked) < len(names):
            looked, found = names, [_owner(name, files[name], known, opened) for name in names]
        owners.update(zip(looked, found, strict=True) if first is None else dict.fromkeys(names, first))
    return owners


def _in_classes(files: Iterable[str]) -> set[str]:
    """Return the names that say the class of an answer, as `correct/q0.pkl`: no built-in layout reads it."""
    found: dict[str, set[str]] = defaultdict(set)
    folders: set[str] = set()
    for name in files:
        for word in _WORD.findall(name.lower()):
            if score_of_word(word, None) is not None:
                found[word].add(name)
        if any(score_of_word(part, None) is not None for part in name.split("/")[:-1]):
            folders.add(name)
    return folders.union(*(found.values() if len(found) > 1 else ()))


def _owner(name: str, path: Path, known: Sequence[Builtin], looks: FirstLooks) -> _Owner:
    """Return the owner of a file; without one the nearest, or None; an error if it is unreadable."""
    matching = _matching(name, known)
    if not matching:
        return None
    found: dict[str, tuple[int, Builtin]] = {}
    near: _Near | None = None
    try:
        with looks.look(path) as root:
            # Where the first item is one of a signature, no other signature is that of the items behind it.
            first = [(b, text) for b, text in matching if b.signatures[text].has_first(root)]
            for builtin, text in first or matching:
                if builtin.signatures[text].difference(root) is None:
                    best = builtin.patterns[text].num_literals, builtin
                    found[builtin.name] = max(found.get(builtin.name, best), best, key=lambda pair: pair[0])
            if not found and (why := _near(root, matching)) is not None:
                near = _Near(
                    why, next((b for b, t in first if b.signatures[t].difference(root, is_ordered=True) is None), None)
                )
    except InvalidInputError as error:
        return error.with_location()  # a copy without the frames of the reader, which hold the file
    for _, builtin in list(found.values()):
        for other in builtin.source.get("instead_of", ()):  # a special case of its files
            found.pop(other, None)
    if len(found) > 1:
        raise InvalidInputError(
            f"the built-in layouts {' and '.join(sorted(found))} match it; --layout FILE states its fields", source=name
        )
    return next(iter(found.values()))[1] if found else near


def _matching(name: str, known: Sequence[Builtin]) -> list[tuple[Builtin, str]]:
    """Return the built-in layouts that have a pattern of a file's name, with the pattern."""
    # Built-in layouts share patterns: each is matched once.
    texts = {text: pattern for b in known for text, pattern in b.patterns.items()}
    fitting = {text for text, pattern in texts.items() if pattern.match(name) is not None}
    # Numbers of a tool that count from the end have no such word: layer_4 may count from the first layer.
    fitting = {text for text in fitting if "{layer:-d}" not in text or "layer" not in name.lower()}
    return [(b, text) for b in known for text in b.patterns if text in fitting]


def _near(root: Value, matching: Iterable[tuple[Builtin, str]]) -> str | None:
    """Return why the built-in layout with the most keys that the file has does not read it, None without such a one."""
    for builtin, text in sorted(matching, key=lambda pair: -len(pair[0].signatures[pair[1]].must)):
        if (differs := builtin.signatures[text].near_difference(root)) is not None:
            return f"the built-in layout {builtin.name} does not read it: {differs}"
    return None


def _release_incomplete(claims: Claims, builtin: Builtin) -> None:
    """Take the files from a built-in layout that has no states, or lacks files that it needs."""
    owned = claims.owned[builtin]
    texts = {t for t, p in builtin.patterns.items() if any(p.match(name) is not None for name in owned)}
    if not builtin.needed <= texts:
        claims.rest |= dict.fromkeys(claims.owned.pop(builtin))
