"""Patterns of names: literal text, `{name}`, `{name:d}`, `{layer:-d}`, `*` and `**`, matched in linear time."""

import itertools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from tracestore.errors import InvalidInputError, UsageError

# Names that bind a place on an axis of a trace. The others belong to the key of a trace.
AXIS_NAMES = {"layer": "L", "token": "S", "step": "P", "head": "H", "dim": "D"}
# Names and letters that tell parts of one trace apart.
INNER_NAMES = frozenset((*AXIS_NAMES, *"LSTGPHDE"))
# The name of the value of the field, where a key says it.
VALUE = "value"
NUMBER_NAMES = frozenset((*AXIS_NAMES, "chunk", "sample"))
_TOKEN = r"\\(?P<escaped>.)|(?P<wild>%s)|\{(?P<name>[^{}:]+)(?P<form>:(?:(?P<end>-)|0(?P<width>\d\d?))?d)?\}|(?P<literal>[^{*\\]+)"
_PATH_TOKEN, _KEY_TOKEN = (re.compile(_TOKEN % wild, re.DOTALL) for wild in (r"\*\*/?|\*", r"\*"))

_SPECIAL = re.compile(r"[\\*{/,]|^[\[@]")


class PatternPart(NamedTuple):
    """A part of a pattern: literal text, a name that binds text, or a wildcard."""

    kind: Literal["literal", "name", "star", "deep"]
    text: str = ""
    is_plain: bool = False  # a number without a sign, whose leading zeros do not count
    is_from_end: bool = False  # a number that counts from the end, with or without its sign
    width: int = 0  # the fewest digits of a plain number, with zeros in front

    @property
    def is_number(self) -> bool:
        """Return whether the part binds a number."""
        return self.kind == "name" and (
            self.is_plain or self.is_from_end or self.text.partition(".")[0] in NUMBER_NAMES
        )


class Match(NamedTuple):
    """Values that a pattern binds in a name, and the texts of its wildcards."""

    bound: dict[str, str | int]
    wild: list[str]


@dataclass(frozen=True)
class Pattern:
    """A pattern of names.

    Parameters
    ----------
    text : str
        ``layer_{layer}.npy``; a backslash makes the next character literal.
    is_path : bool
        Whether `/` separates names: a name and `*` then match within one of them, `**` matches any number of them.

    Raises
    ------
    UsageError
        If the text is no pattern.
    """

    text: str
    is_path: bool = False

    def __post_init__(self) -> None:
        _parse(self.text, self.is_path)

    @cached_property
    def parts(self) -> tuple[PatternPart, ...]:
        """The parts of the pattern."""
        return _parse(self.text, self.is_path)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the pattern binds, in their order."""
        return tuple(part.text for part in self.parts if part.kind == "name")

    @property
    def num_literals(self) -> int:
        """Number of literal characters: the pattern with the most of them gets a name that several match."""
        return sum(len(part.text) for part in self.parts if part.kind == "literal")

    @cached_property
    def literal(self) -> str | None:
        """The only name that the pattern matches; None if it has names or wildcards."""
        if all(part.kind == "literal" for part in self.parts):
            return "".join(part.text for part in self.parts)
        return None

    def fill(self, values: Mapping[str, object]) -> str:
        """Return the pattern with values instead of its names."""
        return "".join(_filled(p, str(values[p.text])) if p.kind == "name" else p.text for p in self.parts)

    def match(self, name: str) -> Match | None:
        """Return what the pattern binds in a name, None if the name is another one.

        Raises
        ------
        InvalidInputError
            If the pattern binds different values in two ways.
        """
        if self.literal is not None:
            return Match({}, []) if name == self.literal else None
        last = self.parts[-1]
        if last.kind == "literal" and not name.endswith(last.text):
            return None  # most names are told apart by their ends
        spans = [_Spans(part, name, self.is_path) for part in self.parts]
        # For each part, the positions behind it from which the other parts match.
        ends = [len(name)]
        for one in reversed(spans):
            ends = one.begins(ends)
            if not ends:
                return None
        if ends[0] != 0:
            return None
        # Of all ways, one begins and ends every part first, and one last: if these bind the same, so do the others.
        at = late = 0
        match = Match({}, [])
        for one in spans:
            begin, late_begin = at, late
            at, late = one.ends(begin)[0], one.ends(late_begin)[1]
            if one.part.kind == "name":
                value = match.bound[one.part.text] = one.value(begin, at)
                if (at, value) != (late, other := one.value(late_begin, late)):
                    two = f"{one.part.text} is {value} or {other}"
                    raise InvalidInputError(f"{name}: {self.text} matches it in two ways: {two}")
            elif one.part.kind != "literal":
                match.wild.append(name[begin:at])
        return match


class _Spans:
    """The places that a part of a pattern may take in a name, found in linear time.

    Parameters
    ----------
    part : PatternPart
    name : str
    is_path : bool
    """

    def __init__(self, part: PatternPart, name: str, is_path: bool) -> None:
        self.part, self._name = part, name
        self._ends: list[int] = []  # behind which the rest of the pattern matches, in their order
        # For each position, the end of the characters that the part takes from there on.
        self._stops = [len(name)] * (len(name) + 1)
        for k in range(len(name) - 1, -1, -1) if part.kind != "literal" else ():
            is_digit = name[k].isascii() and name[k].isdigit()
            is_taken = is_digit if part.is_number else part.kind == "deep" or not is_path or name[k] != "/"
            self._stops[k] = self._stops[k + 1] if is_taken else k

    def begins(self, ends: list[int]) -> list[int]:
        """Return the positions from which the part matches, if the rest does behind one of `ends`."""
        is_deep = self.part.text == "/" and self.part.kind == "deep"  # it ends where a name begins
        self._ends = [end for end in ends if not is_deep or end == 0 or self._name[end - 1] == "/"]
        if self.part.kind == "literal":
            places = (end - len(self.part.text) for end in ends)
            return [begin for begin in places if begin >= 0 and self._name.startswith(self.part.text, begin)]
        return [begin for begin in range(len(self._name) + 1) if self.ends(begin)]

    def value(self, begin: int, end: int) -> str | int:
        """Return what the part binds at a place."""
        text = self._name[begin:end]
        if self.part.is_from_end:
            return -abs(int(text))
        is_integer = self.part.kind == "name" and self.part.text.partition(".")[0] in NUMBER_NAMES
        return int(text) if is_integer else (text.lstrip("0") or "0") if self.part.is_plain else text

    def ends(self, begin: int) -> list[int]:
        """Return the first and the last end of the part from a position on, none if the rest does not match."""
        part, name = self.part, self._name
        if part.kind == "literal":
            low = begin + len(part.text)
            high = low if name.startswith(part.text, begin) else low - 1
        elif part.kind == "name":
            first = begin + (part.is_number and not part.is_plain and name.startswith("-", begin))
            low, high = first + max(1, part.width), self._stops[first]
        else:
            low, high = begin, self._stops[begin]
        first, last = bisect_left(self._ends, low), bisect_right(self._ends, high)
        return [self._ends[first], self._ends[last - 1]] if first < last else []


def _filled(part: PatternPart, value: str) -> str:
    """Return the text of a name; InvalidInputError if it has a width and is no number."""
    if part.width and not (value.isascii() and value.isdecimal()):
        raise InvalidInputError(f"{part.text} is {value[:40]!r}, expected a number of {part.width} digits")
    return value.zfill(part.width)


# The built-in layouts repeat most of their patterns.
@lru_cache(maxsize=1024)
def _parse(text: str, is_path: bool) -> tuple[PatternPart, ...]:
    """Return the parts of a pattern; UsageError if it is not one."""
    parts: list[PatternPart] = []
    at, token = 0, _PATH_TOKEN if is_path else _KEY_TOKEN
    while at < len(text):
        match = token.match(text, at)
        if match is None:
            found = "expected a name such as {id} or {n:d}"
            if text[at] == "\\":
                found = "a backslash at the end makes no character literal"
            raise UsageError(f"{text}: {found}")
        literal, wild = match["escaped"] or match["literal"], match["wild"]
        if literal and parts and parts[-1].kind == "literal":
            parts[-1] = PatternPart("literal", parts[-1].text + literal)
        elif literal:
            parts.append(PatternPart("literal", literal))
        elif wild:  # `**/x` matches `x`, too
            parts.append(PatternPart("deep" if wild.startswith("**") else "star", "/" if wild.endswith("/") else ""))
        else:
            is_plain, width = bool(match["form"]) and not match["end"], int(match["width"] or 0)
            parts.append(PatternPart("name", match["name"], is_plain, bool(match["end"]), width))
        at = match.end()
    _check_names(text, parts)
    return tuple(parts)


def _check_names(text: str, parts: list[PatternPart]) -> None:
    """Raise UsageError for what is no name, a name that occurs twice, or two without a character between."""
    names = [part.text for part in parts if part.kind == "name"]
    if wrong := next((name for name in names if not is_name(name)), None):
        raise UsageError(f"{text}: {{{wrong}}} is no name such as {{id}} or {{n:d}}")
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{text}: {{{repeated}}} occurs twice")
    for one, two in itertools.pairwise(parts):
        is_signed = two.is_number and not two.is_plain and not two.is_from_end
        if is_signed and one.kind == "literal" and re.search(r"(?<![^\W_])-$", one.text):
            raise UsageError(f"{text}: the - is the sign of the number, which {{{two.text}}} binds: leave it out")
        if one.kind == "name" and two.kind == "name":
            raise UsageError(f"{text}: {{{one.text}}}{{{two.text}}} needs a character between the names")


def is_name(text: str) -> bool:
    """Return whether a text can be the name of a bound value: letters, digits, `_` and `.`."""
    return bool(text) and text.replace(".", "_").isidentifier() and text.isascii()


def literal_key(text: str) -> str:
    """Return the step of a path that matches this key alone."""
    return text if text.isidentifier() else _SPECIAL.sub(r"\\\g<0>", text)


def split_escaped(text: str, separator: str) -> list[str]:
    """Split a text at a separator of one character, except where a backslash or brackets protect it."""
    pieces, piece, depth, quoted, k = [], "", 0, False, 0
    while k < len(text):
        char = text[k]
        if char == "\\":
            piece, k = piece + text[k : k + 2], k + 2
            continue
        quoted ^= char == '"' and depth > 0
        depth += 0 if quoted else (char == "[") - (char == "]")
        if char == separator and depth == 0:
            pieces.append(piece)
            piece = ""
        else:
            piece += char
        k += 1
    return [*pieces, piece]
