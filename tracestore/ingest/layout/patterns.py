"""Patterns of names: literal text, `{name}`, `{name:d}`, `{layer:-d}`, `*` and `**`, matched in linear time."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from tracestore.errors import InvalidInputError, UsageError

# Names that bind a place on an axis of a trace. The others belong to the key of a trace.
AXIS_NAMES = {"layer": "L", "token": "S", "step": "P", "head": "H", "dim": "D"}
NUMBER_NAMES = frozenset((*AXIS_NAMES, "chunk", "sample"))
_TOKEN = r"\\(?P<escaped>.)|(?P<wild>%s)|\{(?P<name>[^{}:]+)(?P<form>:-?d)?\}|(?P<literal>[^{*\\]+)"
_PATH_TOKEN, _KEY_TOKEN = (re.compile(_TOKEN % wild, re.DOTALL) for wild in (r"\*\*/?|\*", r"\*"))
_MAX_PARSES = 2  # a name with two parses is refused, so more need not be told apart

Spans = tuple[tuple[int, int], ...]  # of the names and wildcards so far, in their order
Parses = dict[int, list[Spans]]  # by the position behind them


class Part(NamedTuple):
    """A part of a pattern: literal text, a name that binds text, or a wildcard."""

    kind: Literal["literal", "name", "star", "deep"]
    text: str = ""
    is_strict: bool = False  # a number without leading zeros
    is_from_end: bool = False  # a number that counts from the end, with or without its sign

    @property
    def is_number(self) -> bool:
        """Return whether the part binds a number."""
        return self.kind == "name" and (
            self.is_strict or self.is_from_end or self.text.partition(".")[0] in NUMBER_NAMES
        )


class Match(NamedTuple):
    """Values that a pattern binds in a name, and the texts of its wildcards."""

    bound: dict[str, str | int]
    wild: tuple[str, ...]


@dataclass(frozen=True)
class Pattern:
    """A pattern of names.

    Parameters
    ----------
    text : str
        ``layer_{layer}.npy``; a backslash makes the next character literal.
    is_path : bool
        Whether `/` separates names: a name and `*` then match within one of them, `**` matches any number of them.
    """

    text: str
    is_path: bool = False

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the pattern; UsageError if it is not one."""
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
        return "".join(str(values[p.text]) if p.kind == "name" else p.text for p in self.parts)

    def match(self, name: str) -> Match | None:
        """Return what the pattern binds in a name, None if the name is another one.

        Raises
        ------
        InvalidInputError
            If the pattern binds different values in two ways.
        """
        if self.literal is not None:
            return Match({}, ()) if name == self.literal else None
        parses: Parses = {0: [()]}
        for part in self.parts:
            parses = self._step(part, name, parses)
            if not parses:
                return None
        values = [self._bound(name, spans) for spans in parses.get(len(name), [])]
        if not values:
            return None
        if len({tuple(v.bound.items()) for v in values}) > 1:
            one, two = (", ".join(f"{k}={v}" for k, v in value.bound.items()) for value in values[:2])
            raise InvalidInputError(f"{name}: {self.text} matches it in two ways: {one}; {two}")
        return values[0]

    def _step(self, part: Part, name: str, parses: Parses) -> Parses:
        """Return the spans of names so far by the position behind a part: at most two for each position."""
        if part.kind == "literal":
            size = len(part.text)
            return {at + size: spans for at, spans in parses.items() if name.startswith(part.text, at)}
        following: Parses = {}
        open_parses: list[tuple[int, Spans]] = []
        for at in range(min(parses), len(name) + 1):
            if at and open_parses:
                open_parses = [(b, s) for b, s in open_parses if self._continues(part, name, b, at - 1)]
            if part.kind != "name":
                # What a wildcard matches makes no difference, so that one of its spans is enough.
                open_parses += [(at, spans) for spans in parses.get(at, ())]
                if not part.text or at in parses or name[at - 1] == "/":
                    self._add(following, at, [(*spans, (begin, at)) for begin, spans in open_parses])
                open_parses = self._distinct(open_parses)
                continue
            if not part.is_number or _ends_number(name, at):
                self._add(following, at, [(*spans, (begin, at)) for begin, spans in open_parses])
            open_parses = [*open_parses, *((at, spans) for spans in parses.get(at, ()))][: 2 * _MAX_PARSES]
        return following

    def _continues(self, part: Part, name: str, begin: int, at: int) -> bool:
        """Return whether the character at a position may belong to a part that begins at `begin`."""
        char = name[at]
        if part.is_number:
            is_digit = char.isascii() and char.isdigit()
            if part.is_strict:
                return is_digit and not (at > begin and name[begin] == "0")
            return is_digit or (char == "-" and at == begin)
        return part.kind == "deep" or not self.is_path or char != "/"

    @cached_property
    def _variable(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.kind != "literal")

    def _spans_of_names(self, spans: Spans) -> Spans:
        return tuple(span for part, span in zip(self._variable, spans, strict=False) if part.kind == "name")

    def _distinct(self, found: list[tuple[int, Spans]]) -> list[tuple[int, Spans]]:
        kept: dict[Spans, tuple[int, Spans]] = {}
        for begin, spans in found:
            kept.setdefault(self._spans_of_names(spans), (begin, spans))
        return list(kept.values())[:_MAX_PARSES]

    def _add(self, following: Parses, at: int, found: list[Spans]) -> None:
        kept = following.setdefault(at, [])
        known = {self._spans_of_names(spans) for spans in kept}
        for spans in found:
            if len(kept) < _MAX_PARSES and self._spans_of_names(spans) not in known:
                known.add(self._spans_of_names(spans))
                kept.append(spans)
        if not kept:
            del following[at]

    def _bound(self, name: str, spans: Spans) -> Match:
        bound: dict[str, str | int] = {}
        wild: list[str] = []
        for part, (begin, end) in zip(self._variable, spans, strict=True):
            text = name[begin:end]
            if part.kind != "name":
                wild.append(text)
            else:
                is_axis = part.text.partition(".")[0] in NUMBER_NAMES
                value = int(text) if is_axis else text
                bound[part.text] = -abs(int(text)) if part.is_from_end else value
        return Match(bound, tuple(wild))


# The built-in layouts repeat most of their patterns.
@lru_cache(maxsize=1024)
def _parse(text: str, is_path: bool) -> tuple[Part, ...]:
    """Return the parts of a pattern; UsageError if it is not one."""
    parts: list[Part] = []
    at, token = 0, _PATH_TOKEN if is_path else _KEY_TOKEN
    while at < len(text):
        match = token.match(text, at)
        if match is None:
            found = "a backslash at the end makes no character literal"
            found = found if text[at] == "\\" else "expected a name such as {id} or {n:d} behind the brace"
            raise UsageError(f"{text}: {found}")
        literal, wild = match["escaped"] or match["literal"], match["wild"]
        if literal and parts and parts[-1].kind == "literal":
            parts[-1] = Part("literal", parts[-1].text + literal)
        elif literal:
            parts.append(Part("literal", literal))
        elif wild:  # `**/x` matches `x`, too
            parts.append(Part("deep" if wild.startswith("**") else "star", "/" if wild.endswith("/") else ""))
        else:
            parts.append(Part("name", match["name"], match["form"] == ":d", match["form"] == ":-d"))
        at = match.end()
    _check_names(text, parts)
    return tuple(parts)


def _check_names(text: str, parts: list[Part]) -> None:
    """Raise UsageError for what is no name, a name that occurs twice, or two without a character between."""
    names = [part.text for part in parts if part.kind == "name"]
    if wrong := next((name for name in names if not is_name(name)), None):
        raise UsageError(f"{text}: {{{wrong}}} is no name such as {{id}} or {{n:d}}")
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{text}: {{{repeated}}} occurs twice")
    for one, two in itertools.pairwise(parts):
        if one.kind == "name" and two.kind == "name":
            raise UsageError(f"{text}: {{{one.text}}}{{{two.text}}} needs a character between the names")


def is_name(text: str) -> bool:
    """Return whether a text can be the name of a bound value: letters, digits, `_` and `.`."""
    return bool(text) and text.replace(".", "_").isidentifier() and text.isascii()


def _ends_number(name: str, at: int) -> bool:
    """Return whether the character before a position is a digit."""
    return at > 0 and name[at - 1].isdigit()


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
