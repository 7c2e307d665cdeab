"""Addresses: `FILES : PATH -> AXES`, where the values of a field lie."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tracestore.errors import UsageError
from tracestore.ingest.layout.patterns import AXIS_NAMES, Pattern, is_name, split_escaped

LETTERS = frozenset("NKLSTGPHDE1")
# Items by position: what the letters in brackets bind.
_POSITIONS = frozenset((*"NKLSTGPHDE", "chunk"))
_LINE = re.compile(
    r"(?P<files>(?:\\.|(?! : | -> ).)*)(?: : (?P<path>.*?))?(?: -> (?P<axes>(?:(?! -> ).)*))?", re.DOTALL
)
_AXIS = re.compile(r"\(([^()]*)\)|([^\s()]+)")

Axis = str  # one letter, or several for an axis along which others lie behind each other: "NS"


@dataclass(frozen=True)
class KeyStep:
    """A key of a mapping, a column, or the number of a member; `parts` are those of a tuple."""

    parts: tuple[Pattern, ...]
    text: str

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the step binds."""
        return tuple(name for part in self.parts for name in part.names)

    @cached_property
    def literal(self) -> str | None:
        """The text of the only key that the step matches; None for tuples, and with names or wildcards."""
        return self.parts[0].literal if len(self.parts) == 1 else None


@dataclass(frozen=True)
class AttributeStep:
    """An attribute of a container, or an entry of its header."""

    name: str
    text: str  # the name behind an @
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class ItemValue:
    """One name that an item binds by what it says: `id=qid`, or `request_id="{id}-0"`."""

    name: str
    path: tuple[str, ...]  # "#": the number of the item
    pattern: Pattern | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names that are bound."""
        return (self.name,) if self.pattern is None else self.pattern.names


@dataclass(frozen=True)
class ItemsStep:
    """Items by position (`letter`), or by what they say."""

    text: str
    letter: str | None = None
    values: tuple[ItemValue, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the step binds."""
        return tuple(name for value_of in self.values for name in value_of.names)

    @property
    def columns(self) -> set[str]:
        """The keys of the values that tell the items apart."""
        return {value_of.path[0] for value_of in self.values}


Step = KeyStep | AttributeStep | ItemsStep


@dataclass(frozen=True)
class Address:
    """The place of the values of a field.

    Parameters
    ----------
    files : Pattern
        Paths of the files below SRC.
    path : tuple of Step
        Steps inside the files.
    axes : tuple of str, optional
        The axes of each value; None: those of the field that nothing else binds.
    """

    files: Pattern
    path: tuple[Step, ...] = ()
    axes: tuple[Axis, ...] | None = None

    def __str__(self) -> str:
        path = "/".join(step.text for step in self.path)
        axes = " ".join(f"({' '.join(a)})" if len(a) > 1 else a for a in self.axes or ())
        return self.files.text + (f" : {path}" if path else "") + (f" -> {axes}" if axes else "")

    def below(self, key: str) -> "Address":
        """Return the address of a key of the items that this one names."""
        return Address(self.files, (*self.path, *_steps(key)))

    @cached_property
    def bound(self) -> frozenset[str]:
        """Names and letters that files and path bind, with `chunk`; letters of AXES are not among them."""
        letters = {s.letter for s in self.path if isinstance(s, ItemsStep) and s.letter}
        return frozenset((*self.files.names, *(name for step in self.path for name in step.names), *letters))

    def axes_of(self, default: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Return the axes of its values, which are `default` without those that the address binds."""
        if self.axes is not None:
            return self.axes
        bound = self.bound | {letter for name, letter in AXIS_NAMES.items() if name in self.bound}
        return tuple(axis for axis in default if axis not in bound)


def parse_address(text: str) -> Address:
    """Return the address that a line states; raise UsageError with the part that is wrong."""
    match = _LINE.fullmatch(text.strip())
    if match is None or not match["files"].strip() or match["files"].lstrip().startswith(("->", ": ")):
        raise UsageError(f"{text!r}: expected FILES : PATH -> AXES, with blanks around : and ->")
    files = Pattern(match["files"].strip(), is_path=True)
    path = () if match["path"] is None else tuple(_steps(match["path"].strip()))
    axes = None if match["axes"] is None else _axes(match["axes"], text)
    address = Address(files, path, axes)
    names = [*files.names, *(name for step in path for name in step.names)]
    letters = [s.letter for s in path if isinstance(s, ItemsStep) and s.letter]
    # Attention has the tokens twice, as rows and columns.
    letters += [letter for axis in axes or () for letter in axis if letter not in "1S"]
    letters += [AXIS_NAMES[name] for name in names if name in AXIS_NAMES]
    for given in (names, letters):
        if twice := next((n for n in given if given.count(n) > 1), None):
            raise UsageError(f"{text!r}: {twice} is bound twice")
    return address


def _axes(text: str, line: str) -> tuple[Axis, ...]:
    axes = []
    rest = _AXIS.sub("", text).strip()
    for match in _AXIS.finditer(text):
        letters = (match[2],) if match[1] is None else tuple(match[1].split())
        if not letters or not set(letters) <= LETTERS or (len(letters) > 1 and "1" in letters):
            raise UsageError(f"{line!r}: found the axis {match[0]}, expected letters of N K L S T G P H D E 1")
        axes.append("".join(letters))
    if rest:
        raise UsageError(f"{line!r}: found {rest!r} in the axes, expected letters such as N L S D or (N S) L D")
    return tuple(axes)


def _steps(text: str) -> Iterator[Step]:
    pieces = split_escaped(text, "/")
    for before, piece in zip(("", *pieces), pieces, strict=False):
        if not piece and not before.startswith("["):  # a column may lack a name
            raise UsageError(f"{text!r}: empty key between two /; \\/ is a / in a key")
        if piece == "**":
            raise UsageError(f"{text!r}: ** is any folders of FILES; a path has a name or * for each key")
        elif piece.startswith("@") and len(piece) > 1:
            yield AttributeStep(piece[1:], piece)
        elif piece.startswith("["):
            yield _items(piece)
        else:
            parts = (Pattern(part.strip() if "," in piece else part) for part in split_escaped(piece, ","))
            yield KeyStep(tuple(parts), piece)


def _items(piece: str) -> ItemsStep:
    inside = piece[1:-1].strip()
    if not piece.endswith("]"):
        raise UsageError(f"{piece!r}: expected ] at the end")
    if "=" not in inside:
        letter = inside or "N"
        if letter not in _POSITIONS:
            raise UsageError(f"{piece!r}: expected [], [K], [S], [P], [chunk], or names as in [id=key]")
        return ItemsStep(piece, letter=letter)
    values = []
    for pair in split_escaped(inside, ","):
        name, _, source = (part.strip() for part in pair.partition("="))
        if source.startswith('"') and source.endswith('"') and len(source) > 1:
            pattern = Pattern(source[1:-1])
            if not pattern.names:
                raise UsageError(f"{piece!r}: {source} binds no name")
            values.append(ItemValue("", tuple(split_escaped(name, "/")), pattern))
        elif is_name(name):  # a column without a name is empty
            values.append(ItemValue(name, tuple(split_escaped(source, "/"))))
        else:
            raise UsageError(f"{piece!r}: expected pairs such as id=key")
    return ItemsStep(piece, values=tuple(values))
