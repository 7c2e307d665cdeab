"""Signatures: the keys, kinds of values and axes by which a file is recognized, told from its first item alone."""

import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import islice
from typing import Any, NamedTuple

from tracestore.errors import InvalidInputError, UsageError, escape_unprintable
from tracestore.ingest.execute.accounts import OWN_LINES, looks_like_label
from tracestore.ingest.execute.values import describe, key_text, member
from tracestore.ingest.layout.patterns import AXIS_NAMES, Pattern
from tracestore.ingest.readers.looks import RepeatedItems
from tracestore.ingest.readers.tree import Array, Group, Items, Value

# Items of a stream that may show what a condition states; the first one mostly does.
_MAX_LOOKS = 3
_MAX_DEPTH = 8
# Words of keys that number parts of a trace: an item with one of them may be no whole trace.
_PARTS = frozenset(
    ["step", "layer", "token", "position", "pos", "head", "part", "rank", "idx", "index", "turn", "chunk"]
)
_KINDS = {"number": ("int", "float", "bool"), "id": ("text", "int"), "flag": ("int", "bool")}
_PLAIN = frozenset(("text", "int", "float", "bool", "group", "array", "none", "any", "zero", "ones"))
_COMPARISONS = {"!=": operator.ne, "<": operator.lt}
_CONDITION = re.compile(r"(\w) (!=|<) (\w)(?: unless (\S+))?|needs (.+)")
_DTYPE = re.compile(r"(bfloat|float|uint|int|bool)\d*")
# Axes that differ from another one by at most one: T ids are S states or one more, A layers of attention L or one less,
# R are the tokens of a second pass that repeats those of the first.
_NEAR = {"T": ("S", (0, 1)), "A": ("L", (0, -1)), "R": ("S", (1,))}


class Form(NamedTuple):
    """A kind of values, and the letters of their axes."""

    kinds: frozenset[str]
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{'/'.join(sorted(self.kinds))} ({', '.join(self.axes)})" if self.axes else "/".join(sorted(self.kinds))


@cache
def parse_form(text: str) -> tuple[Form, ...]:
    """Return the forms of ``"float L S D | float S D"``; raise UsageError if the text is none."""
    forms = []
    for part in text.split("|"):
        kind, *axes = part.split()
        kinds = frozenset(_KINDS.get(kind, (kind,)))
        if not kinds <= _PLAIN:
            raise UsageError(
                f"{text!r}: found the kind {kind}, expected one of {', '.join(sorted({*_PLAIN, *_KINDS}))}"
            )
        forms.append(Form(kinds, tuple(axes)))
    return tuple(forms)


def facts_of(value: Value) -> tuple[str, tuple[int, ...]]:
    """Return the kind and the shape of a value, told from the first of nested items.

    The kind is "text", "int", "float", "bool", "group", "none", or "array" for numbers of another kind.
    """
    shape: list[int] = []
    while isinstance(value, Items) and len(shape) < _MAX_DEPTH:
        if value.is_stream or not value.length:
            return "none", (*shape, 0)
        shape.append(value.length)
        value = value[0]
    if isinstance(value, Array):
        match = _DTYPE.fullmatch(value.dtype)
        kind = {"bfloat": "float", "uint": "int"}.get(match[1], match[1]) if match else "array"
        return kind, (*shape, *value.shape)
    names = {str: "text", bool: "bool", int: "int", float: "float"}
    return "group" if isinstance(value, Group) else names.get(type(value), "none"), tuple(shape)


@dataclass(frozen=True)
class Signature:
    """Describe files of one kind.

    Parameters
    ----------
    at : str
        Path of the item that is looked at: "" the whole file, "[]" the first item of a list, "{}" the first value of a
        mapping by id.
    must, may : Mapping
        Forms by key; a key may be a path, or a pattern such as ``layer_{layer}``.
    others : frozenset of str
        Kinds of values that further keys may have; a key that looks like a label, or numbers parts of a trace, is never
        one of them.
    others_beside : tuple of str
        Keys of which one is there wherever there are further keys: of ids, which could be any of those.
    conditions : tuple
        Comparisons of extents, such as ``L != T unless attentions``, and keys of which there is one, such as
        ``needs tokens attentions``. Of a list, one of the first items fulfills them. Both kinds that name keys are also
        fulfilled if S alone differs between the items (rule 16).
    class_name : str
        Pattern of the class of a pickled object; "" for other values.
    """

    at: str = ""
    must: Mapping[str, tuple[Form, ...]] = field(default_factory=dict)
    may: Mapping[str, tuple[Form, ...]] = field(default_factory=dict)
    others: frozenset[str] = frozenset()
    others_beside: tuple[str, ...] = ()
    conditions: tuple[tuple[Any, ...], ...] = ()  # the groups of _CONDITION
    class_name: str = ""

    @classmethod
    def parse(cls, entries: Mapping[str, Any]) -> "Signature":
        """Return the signature of a table of TOML."""
        forms = {part: {k: parse_form(str(v)) for k, v in entries.get(part, {}).items()} for part in ("must", "may")}
        unknown = entries.keys() - {"at", "must", "may", "others", "others_beside", "conditions", "class"}
        conditions = {text: _CONDITION.fullmatch(text) for text in entries.get("conditions", ())}
        wrong = [text for text, match in conditions.items() if match is None]
        if unknown or wrong:
            raise UsageError(f"signature: unknown {', '.join([*sorted(unknown), *wrong])}")
        return cls(
            entries.get("at", ""),
            forms["must"],
            forms["may"],
            frozenset(entries.get("others", "").split()),
            tuple(entries.get("others_beside", "").split()),
            tuple(match.groups() for match in conditions.values() if match is not None),
            entries.get("class", ""),
        )

    @cached_property
    def _patterns(self) -> list[tuple[str, Pattern, tuple[Form, ...], bool]]:
        parts = ((self.must, True), (self.may, False))
        return [(key, Pattern(key), forms, is_must) for part, is_must in parts for key, forms in part.items()]

    @cached_property
    def _by_key(self) -> dict[str | None, list[tuple[str, Pattern, tuple[Form, ...], bool]]]:
        """The patterns by the only key that they match; None: those with names or wildcards."""
        found: dict[str | None, list[tuple[str, Pattern, tuple[Form, ...], bool]]] = {}
        for entry in self._patterns:
            found.setdefault(entry[1].literal, []).append(entry)
        return found

    @cached_property
    def _plain_keys(self) -> frozenset[str]:
        """The keys without wildcards that the item itself must have."""
        return frozenset(p.literal for key, p, _, is_must in self._patterns if is_must and p.literal and "/" not in key)

    def has_first(self, root: Value) -> bool:
        """Return whether the first item of a file has the keys and values of the signature, whatever its conditions."""
        first = next(self._items(root), None)
        if first is None or not (self.must or self.class_name):
            return False
        # Most signatures are told apart by a key that is not there.
        is_near = not isinstance(first, Group) or self._plain_keys <= {key_text(name) for name in first}
        return is_near and self._compare(first)[0] is None

    def difference(self, root: Value, *, is_ordered: bool = False) -> str | None:
        """Return what in the first item of a file is another thing than the signature says, None if nothing is.

        Extents that may be equal where `is_ordered`: other files show the order of the axes.
        """
        if not self.must and not self.class_name:
            return None  # a file that is left out, or a table whose rows the accounts check
        return self._difference(self._items(root), is_claim=True, is_ordered=is_ordered)

    def near_difference(self, root: Value) -> str | None:
        """Return what differs in a file whose first item has all that it must have; None for other files."""
        item, sizes = next(self._items(root), None), dict[str, int]()
        if not isinstance(item, Group) or not self.must:
            return None
        for key, forms in self.must.items():
            value = member(item, key.split("/"))
            if value is None or self._compare_value(key, value, forms, sizes) is not None:
                return None
        return self.difference(root)

    def checked(self, root: Value, name: str) -> Value:
        """Return the root of a file of the built-in layout `name` that is being read; check its first items."""
        if isinstance(root, Items) and root.is_stream and self.at == "[]":
            root = RepeatedItems(root)
        if (differs := self._difference(self._items(root), is_claim=False)) is not None:
            advice = f"not as the other files of the built-in layout {name}; --layout describes it"
            raise InvalidInputError(f"{differs}: {advice}")
        return root.rest() if isinstance(root, RepeatedItems) else root

    def _difference(self, items: Iterator[Value], *, is_claim: bool, is_ordered: bool = False) -> str | None:
        """Return what differs in the first item; None if one of the first items is as described.

        The conditions, and that there is an item, are those of a claim: a file that is read may have none of these.
        """
        first: str | None = None
        unmet: str | None = None
        found: list[dict[str, int]] = []
        for item in islice(items, _MAX_LOOKS):
            differs, sizes = self._compare(item)
            first = first or differs
            if differs is None:
                found.append(sizes)
                is_varying = _is_varying(found)
                unmet = self._unmet(sizes, item, is_varying=is_varying, is_ordered=is_ordered) if is_claim else None
                if unmet is None:
                    return None
        return unmet or first or ("holds no item" if is_claim else None)

    def _items(self, root: Value) -> Iterator[Value]:
        if self.at == "[]":
            if isinstance(root, Items):
                yield from root
        elif self.at == "{}":
            if isinstance(root, Group):
                yield from (root[key] for key in root)
        elif not (isinstance(root, Items) and root.is_stream):
            yield root

    def _compare(self, item: Value) -> tuple[str | None, dict[str, int]]:
        sizes: dict[str, int] = {}
        if self.class_name or "" in self.must:
            name = str(getattr(item, "attributes", {}).get("class", ""))
            if self.class_name and Pattern(self.class_name).match(name) is None:
                return f"found {describe(item)}, expected {self.class_name}", sizes
            if "" in self.must:
                return self._compare_value("", item, self.must[""], sizes), sizes
        if not isinstance(item, Group):
            return f"found {describe(item)}, expected a mapping of {', '.join(self.must)}", sizes
        counts: dict[str, int] = {}
        if (differs := self._compare_keys(item, "", sizes, counts)) is not None:
            return differs, sizes
        for key, pattern, forms, is_must in self._patterns:
            if is_must and not counts.get(key):
                # The walk over keys does not reach members of lists.
                if (value := member(item, key.split("/"))) is None:
                    return f"{key}: missing", sizes
                if (differs := self._compare_value(key, value, forms, sizes)) is not None:
                    return differs, sizes
            number = counts.get(key, 0)
            for name in pattern.names if number else ():
                letter = AXIS_NAMES.get(name)
                if letter is not None and sizes.setdefault(letter, number) != number:
                    return f"{key}: found {number}, expected {sizes[letter]} as {letter}", sizes
        for letter, (base, steps) in _NEAR.items():
            if letter in sizes and base in sizes and sizes[letter] - sizes[base] not in steps:
                return f"found {sizes[letter]} as {letter}, expected {sizes[base]} as {base}", sizes
        return None, sizes

    def _compare_keys(self, group: Group, prefix: str, sizes: dict[str, int], counts: dict[str, int]) -> str | None:
        for name in group:
            path, value = f"{prefix}{key_text(name)}", group[name]
            if value is None or (isinstance(value, Items) and facts_of(value)[0] == "none"):
                continue  # missing, as are layers of None
            near = (*self._by_key.get(path, ()), *self._by_key.get(None, ()))
            found = next(((key, forms) for key, p, forms, _ in near if p.match(path) is not None), None)
            if found is not None:
                if (differs := self._compare_value(path, value, found[1], sizes)) is not None:
                    return differs
                counts[found[0]] = counts.get(found[0], 0) + 1
            elif isinstance(value, Group) and any(key.startswith(f"{path}/") for key, *_ in self._patterns):
                if (differs := self._compare_keys(value, f"{path}/", sizes, counts)) is not None:
                    return differs
            elif not self._may_be_other(group, path, value):
                where = escape_unprintable(path, 60) or "the column without a name"
                return f"{where}: found {describe(value)}, which is no part of it"
        return None

    def _may_be_other(self, group: Group, path: str, value: Value) -> bool:
        """Return whether a value that no form describes may lie next to the others."""
        kind, shape = facts_of(value)
        is_part = not _PARTS.isdisjoint(re.split(r"[\W_]+", path.lower()))
        if kind not in self.others or shape or is_part or looks_like_label(path) or path.lower() in OWN_LINES:
            return False
        return not self.others_beside or any(group.get(key) is not None for key in self.others_beside)

    def _compare_value(self, path: str, value: Value, forms: tuple[Form, ...], sizes: dict[str, int]) -> str | None:
        kind, shape = facts_of(value)
        for form in forms:
            if "any" in form.kinds or ("zero" in form.kinds and value == 0):
                return None
            is_kind = kind in form.kinds
            if not is_kind and "ones" in form.kinds and isinstance(value, Array) and kind in ("int", "bool"):
                is_kind = bool((value.read() == 1).all())
            if not is_kind or len(shape) != len(form.axes):
                continue
            bound, pairs = dict(sizes), zip(form.axes, shape, strict=True)
            if all((a == str(n)) if a.isdigit() else bound.setdefault(a, n) == n for a, n in pairs):
                sizes |= bound
                return None
        expected = " or ".join(map(str, forms))
        known = ", ".join(f"{letter} {size}" for letter, size in sizes.items())
        return f"{path or 'the value'}: found {kind}{f' {shape}' if shape else ''}, expected {expected}" + (
            f" with {known}" if known else ""
        )

    def _unmet(self, sizes: Mapping[str, int], item: Value, *, is_varying: bool, is_ordered: bool) -> str | None:
        for one, sign, two, key, needed in self.conditions:
            keys = (key or needed or "").split()
            is_there = isinstance(item, Group) and any(facts_of(item.get(name))[0] != "none" for name in keys)
            if (keys and (is_varying or is_there)) or (is_ordered and sign == "!="):
                continue
            if needed is not None:
                return f"found none of {', '.join(keys)}"
            if one in sizes and two in sizes and not _COMPARISONS[sign](sizes[one], sizes[two]):
                return f"found {one} {sizes[one]} and {two} {sizes[two]}, expected {one} {sign} {two}"
        return None


def _is_varying(found: list[dict[str, int]]) -> bool:
    """Return whether only the number of tokens differs between items."""
    others = [{letter: size for letter, size in sizes.items() if letter in "LDH"} for sizes in found]
    return len({sizes.get("S") for sizes in found}) > 1 and all(sizes == others[0] for sizes in others)
