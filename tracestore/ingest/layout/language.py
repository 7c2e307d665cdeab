"""Layouts: the fields of a folder of dumps, parsed from TOML and from lines, and written as TOML."""

import itertools
import json
import math
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from tracestore.errors import UsageError, escape_unprintable, nearest
from tracestore.ingest.layout.addresses import Address, KeyStep, parse_address
from tracestore.ingest.layout.fields import (
    DTYPES,
    FIELDS,
    LABELS,
    MISSING_WORD,
    RECORD_FIELDS,
    SCORE_LINES,
    SETTINGS,
    SETTINGS_OF,
    STATES,
    FieldRule,
    rule_of,
    score_of,
)
from tracestore.ingest.layout.patterns import AXIS_NAMES, INNER_NAMES, NUMBER_NAMES, Pattern, is_name
from tracestore.store.format.labels import CORRECT, HALLUCINATION
from tracestore.store.vocabulary import COUNTED as COUNTED_WORDS
from tracestore.store.vocabulary import JUDGMENTS, SCORES, SYNONYMS, WORDS, direction_of

_MAX_BYTES = 1 << 20
_MAX_AXES = 4  # of states
_LISTS = ("records", "ignore")
# States that are those of no token, such as a mean over tokens. A store does not hold them, so they are left out.
_OTHER_STATES = "vector"
# Names besides fields that a template or a list of literals may state.
_TEMPLATES = ("id", "sample")
# What `sample` states where answers are numbered in the order of their rows.
COUNTED = "#"
# Entries that state what the numbers of a label mean.
_NUMBER_WORDS = ("words.0", "words.1")
_QUOTED_NAME = re.compile(r'\s*(\w+)\.("(?:[^"\\]|\\.)*")\s*=(.*)', re.DOTALL)
# A word behind a name, a folder or the beginning.
_WORD_BEFORE = re.compile(r"(?:^|/)[\W_]*([A-Za-z]+)[_\-. =]*$")
_AXIS_WORDS = {word: name for word, name in COUNTED_WORDS.items() if name in AXIS_NAMES and len(word) > 1}
_BARE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


@dataclass(frozen=True)
class Layout:
    """The lines of a layout.

    Parameters
    ----------
    addresses : Mapping
        Addresses of each field; two are prompt and answer behind each other.
    templates : Mapping
        Values that are made of bound names, by field. Next to addresses: that of a first token, in front of theirs.
    records : tuple of Address
        Items whose keys are names of fields.
    ignore : tuple of Address
        What is left out.
    settings : Mapping
        What is known of axes and words.
    """

    addresses: Mapping[str, tuple[Address, ...]]
    templates: Mapping[str, Pattern] = field(default_factory=dict)
    records: tuple[Address, ...] = ()
    ignore: tuple[Address, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def states(self) -> str:
        """The field whose values are the traces: hidden_states, else last_token."""
        return next((name for name in STATES if name in self.addresses), STATES[0])

    @property
    def words(self) -> dict[str, bool | str]:
        """The meaning of further words of labels."""
        return {n.partition(".")[2]: v for n, v in self.settings.items() if n.startswith("words.")}

    @property
    def is_filter(self) -> bool:
        """Return whether the layout states only what is left out, and nothing of the other files."""
        return bool(self.ignore) and not (self.addresses or self.templates or self.records or self.settings)

    def rule(self, name: str) -> FieldRule:
        """Return the rule of a field that the layout states."""
        rule = rule_of(name)
        assert rule is not None, name
        return rule

    def directions(self) -> dict[str, str]:
        """Return what a high value of each score that has a line means, by the name of its field."""
        rules = {name: self.rule(name) for name in (*self.addresses, *self.templates) if name != "id"}
        return {name: rule.direction for name, rule in rules.items() if rule.direction is not None}

    def known_directions(self) -> dict[str, str]:
        """Return `directions`, and those of all names of scores if a line for `scores` may give them."""
        lines = self.directions()
        others = SCORES.keys() - map(score_of, lines) if "scores" in self.addresses else ()
        return lines | {SCORE_LINES[name]: SCORES[name] for name in SCORES if name in others}

    def to_entries(self) -> dict[str, Any]:
        """Return the entries from which `parse_layout` makes an equal layout."""
        lines = {name: [str(a) for a in found] for name, found in self.addresses.items()}
        lines |= {name: [f"={pattern.text}", *lines.get(name, ())] for name, pattern in self.templates.items()}
        entries: dict[str, Any] = {n: found[0] if len(found) == 1 else found for n, found in lines.items()}
        entries |= {name: [str(a) for a in getattr(self, name)] for name in _LISTS if getattr(self, name)}
        return entries | dict(self.settings)

    def to_toml(self) -> str:
        """Return the layout as TOML, from which `parse_layout` makes an equal one."""
        entries = self.to_entries().items()
        return "".join(f"{_key(name)} = {_text(value)}\n" for name, value in entries)

    def flags(self) -> Iterator[str]:
        """Yield the `--field` lines of the layout."""
        for name, value in self.to_entries().items():
            for one in value if name in _LISTS else [value]:
                yield field_line(name, one)


def field_line(name: str, value: Any) -> str:
    """Return the `--field` line of an entry."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"--field {shlex.quote(escape_unprintable(f'{name} = {text}'))}"


def read_layout(path: Path | None, lines: Iterable[str] = ()) -> Layout:
    """Return the layout of a TOML file and of `--field` lines, which replace those of the file.

    Raises
    ------
    UsageError
        If the file cannot be read, or an entry is wrong.
    """
    entries: dict[str, Any] = {}
    if path is not None:
        try:
            with open(path, "rb") as file:
                text = file.read(_MAX_BYTES + 1)
            if len(text) > _MAX_BYTES:
                raise UsageError(f"--layout {path}: larger than {_MAX_BYTES:,} bytes")
            entries = tomllib.loads(text.decode())
        except OSError as error:
            raise UsageError(f"--layout {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"--layout {path.name}: {escape_unprintable(str(error), 200)}") from None
        if not entries and not lines:
            raise UsageError(f"--layout {path.name}: all lines are comments; remove the # of the lines that are right")
    where = "--field" if path is None else f"--layout {path.name}"
    return parse_layout(_flat(entries) | fields_of_lines(lines), where)


def fields_of_lines(lines: Iterable[str]) -> dict[str, Any]:
    """Return the entries that `--field` lines state: `NAME = ADDRESS`, the value as TOML or without quotes."""
    entries: dict[str, Any] = {}
    for line in lines:
        name, equals, text = (part.strip() for part in line.partition("="))
        if quoted := _QUOTED_NAME.match(line):  # words."yes" = true
            name, equals, text = f"{quoted[1]}.{_value_of(quoted[2])}", "=", quoted[3].strip()
        if not equals or not name or not text:
            raise UsageError(f'--field {line!r}: expected "FIELD = FILES : PATH -> AXES"')
        if name in entries and name not in _LISTS:
            raise UsageError(f"--field {name}: stated twice; a list of two addresses is prompt and answer")
        value = _value_of(text)
        if name in _LISTS:
            value = entries.get(name, []) + (value if isinstance(value, list) else [value])
        entries[name] = value
    return entries


def _value_of(text: str) -> Any:
    """Return a value in the syntax of TOML; a text may lack its quotes."""
    if text[0] in "\"'[" or text in ("true", "false") or text.lstrip("-").isdecimal():
        with suppress(ValueError, RecursionError):
            return tomllib.loads(f"x = {text}")["x"]
    return text


def _flat(entries: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one, with dots between their keys."""
    flat: dict[str, Any] = {}
    for name, value in entries.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def parse_layout(entries: Mapping[str, Any], where: str = "layout") -> Layout:
    """Return the layout of entries by name; raise UsageError with the entry that is wrong.

    Parameters
    ----------
    entries : Mapping
        ``{"hidden_states": "*.pkl : []/hs -> L S D", "S.pad": [0, 2]}``; nested mappings are names with dots.
    where : str
        What holds the entries, for messages.
    """
    addresses: dict[str, tuple[Address, ...]] = {}
    templates: dict[str, Pattern] = {}
    settings: dict[str, Any] = {}
    lists: dict[str, tuple[Address, ...]] = dict.fromkeys(_LISTS, ())
    for name, value in _flat(entries).items():
        listed = value if isinstance(value, list | tuple) and value else [value]
        try:
            if name in _LISTS:
                lists[name] += _addresses(value, 1 << 10)
            elif _is_setting(name, value):
                settings[name] = value
            elif name == _OTHER_STATES:
                lists["ignore"] += _addresses(value, 2)
            elif str(listed[0]).startswith("="):
                templates[name] = _template(name, listed[0], is_in_front=listed is value)
                if listed is value:
                    addresses[name] = _addresses(value[1:], _most_addresses(name))
            else:
                _check_name(name, FIELDS)
                addresses[name] = _addresses(value, _most_addresses(name))
                for address in addresses[name]:
                    _check_words(address)
        except UsageError as error:
            raise UsageError(f"{where}: {name}: {error}") from None
    if lists["records"] and addresses.keys().isdisjoint(STATES):
        addresses[STATES[0]] = (lists["records"][0].below(STATES[0]),)  # under their own name
    layout = Layout(addresses, templates, lists["records"], lists["ignore"], settings)
    if layout.is_filter and _OTHER_STATES not in entries:
        return layout
    if addresses.keys().isdisjoint(STATES):
        only = f"{_OTHER_STATES}: mean-pooled states cannot be stored; " * (_OTHER_STATES in entries)
        raise UsageError(f"{where}: {only}states no hidden_states or last_token; a line for one of them is needed")
    _check_scores(layout, where)
    return layout


def _check_scores(layout: Layout, where: str) -> None:
    """Raise UsageError for two lines of one stored score, and for a judgment that would mean its opposite."""
    of_stored: dict[str, str] = {}
    for name, direction in layout.directions().items():
        other = of_stored.setdefault(score_of(name), name)
        if other != name:
            raise UsageError(
                f"{where}: {name}: the score of {other} has the same name; remove one, or name it otherwise"
            )
        if score_of(name) in JUDGMENTS and layout.rule(score_of(name)).direction != direction:
            raise UsageError(f"{where}: {name}: 1 means the opposite under {score_of(name)}; name it otherwise")
        key = _last_name(layout.addresses.get(name, ()))
        means = direction_of(key) or (None if key not in WORDS else CORRECT if WORDS[key] else HALLUCINATION)
        if name in LABELS and means not in (None, direction) and layout.settings.keys().isdisjoint(_NUMBER_WORDS):
            raise UsageError(
                f"{where}: {name}: 1 means the opposite under {key}; name the line {JUDGMENTS[means == HALLUCINATION]}, "
                f"or state both numbers: {' and '.join(_NUMBER_WORDS)}"
            )


def _check_words(address: Address) -> None:
    """Raise UsageError for a word in front of a name that names another axis: `layer_{token}`."""
    for pattern in (address.files, *(p for step in address.path if isinstance(step, KeyStep) for p in step.parts)):
        for before, part in itertools.pairwise(pattern.parts):
            match = _WORD_BEFORE.search(before.text) if before.kind == "literal" and part.kind == "name" else None
            word = "" if match is None else match[1]
            meant = _AXIS_WORDS.get(word.lower())
            is_other = meant not in (None, part.text) and "layer" in (meant, part.text)
            if is_other and part.text in NUMBER_NAMES - {"chunk"}:
                raise UsageError(
                    f"{address}: {word} in front of {{{part.text}}} reads as the number of a {meant}, which {{{meant}}} "
                    f"binds; * instead of {word} if it is none"
                )


def _last_name(addresses: tuple[Address, ...]) -> str:
    """Return the name of the values of a line as the vocabulary spells it: the last key, else that of the files."""
    if not addresses:
        return ""
    text = addresses[0].path[-1].text if addresses[0].path else PurePath(addresses[0].files.text).stem
    return re.sub(r"[\s-]+|(?<=[a-z])(?=[A-Z])", "_", text.lstrip("@")).lower()


def _most_addresses(name: str) -> int:
    """Return of how many addresses a field may be: the numbers of a shape, or prompt and answer along S."""
    rule = rule_of(name)
    return _MAX_AXES if name.startswith("shape.") else 2 if rule is not None and "S" in rule.axes else 1


def _addresses(value: Any, most: int) -> tuple[Address, ...]:
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value) or not 0 < len(value) <= most:
        alone = ", one address: a list is prompt and answer along S" * (most == 1)
        raise UsageError(f"found {str(value)[:60]!r}, expected FILES : PATH -> AXES{alone}")
    return tuple(parse_address(text) for text in value)


def _template(name: str, text: str, *, is_in_front: bool) -> Pattern:
    """Return what makes a value of a field, or that of a first token, which is in front of the values of an address."""
    _check_name(name, (*FIELDS, *_TEMPLATES))
    rule = rule_of(name)
    kind, axes = ("id", ()) if rule is None else (rule.kind, rule.axes)
    if kind != "number" and axes != ("S",) if is_in_front else kind in ("array", "texts"):
        wanted = "FILES : PATH -> AXES: = makes texts and numbers, in a list the value of a first token"
        raise UsageError(f"found {text!r}, expected {wanted}")
    return Pattern(text[1:])


def _check_name(name: str, names: Iterable[str]) -> None:
    if name in names or rule_of(name) is not None:
        return
    meant = (field for field, words in SYNONYMS.items() if name.replace("_", " ") in words)
    near = next(meant, None) or nearest(name, [*names, *SETTINGS, *_LISTS])
    hint = f"; did you mean {near}?" if near else f"; the fields are {', '.join(RECORD_FIELDS[:9])}, ..."
    raise UsageError(f"no such field{hint}")


def _is_setting(name: str, value: Any) -> bool:
    """Return whether an entry states a value; raise UsageError if it is another one than it takes."""
    if name.partition(".")[0] in SETTINGS_OF:
        _check_setting_of(name, value)
        return True
    if name == "sample":
        return isinstance(value, str) and value == COUNTED
    if name == "L.ids" and isinstance(value, list) and value and all(type(v) is int for v in value):
        return True
    allowed = SETTINGS.get(name)
    if allowed is None:
        return False
    # A number pads, too: S.padding = -100.
    is_known = value in allowed if isinstance(allowed[0], str) else type(value) in allowed
    if not is_known and not (name == "S.padding" and type(value) is int):
        expected = " or ".join(a if isinstance(a, str) else a.__name__ for a in allowed)
        raise UsageError(f"found {value!r}, expected {expected}")
    if name == "S.pad" and isinstance(value, list) and [type(v) for v in value] != [int, int]:
        raise UsageError(f"found {value!r}, expected the id that fills rows and the one that ends a sequence")
    return True


def _check_setting_of(name: str, value: Any) -> None:
    """Raise UsageError unless the value of a setting of a field or a word is one that it takes."""
    head, _, tail = name.partition(".")
    kinds = SETTINGS_OF[head]
    if not tail or not isinstance(value, kinds):
        raise UsageError(f"found {value!r}, expected {head}.NAME = {' or '.join(kind.__name__ for kind in kinds)}")
    if head == "words" and isinstance(value, str) and value != MISSING_WORD:
        raise UsageError(f'found {value!r}, expected true, false or "{MISSING_WORD}"')
    if head == "dtype" and value not in DTYPES:
        raise UsageError(f"found {value!r}, expected one of {', '.join(DTYPES)}")
    if head == "scale" and (value is True or not 0 < value < math.inf):  # type: ignore[operator]
        raise UsageError(f"found {value!r}, expected a positive number")
    if head in ("dtype", "scale") and tail not in (*STATES, "attentions"):
        raise UsageError(f"expected {head}.{STATES[0]}, {head}.{STATES[1]} or {head}.attentions")
    if head == "keep" and not _names_values(tail, value):
        raise UsageError(f"found {value!r}, expected keep.NAME = VALUE or [VALUE, ...] for a name such as status")
    if head == "share" and rule_of(tail) is None:
        raise UsageError("no such field")


def _names_values(name: str, value: Any) -> bool:
    """Return whether the name and the values of an entry `keep` are ones that it takes."""
    values = value if value and isinstance(value, list) else [value]
    return is_name(name) and name not in INNER_NAMES and all(isinstance(v, str | int) for v in values)


def _text(value: Any) -> str:
    """Return a value in the syntax of TOML, whose texts are those of JSON without the character DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def ignore_line(address: str) -> str:
    """Return the line that leaves out what is at an address."""
    return f"ignore = [{_text(address)}]"


def _key(name: str) -> str:
    """Return a name as a key of TOML, with quotes around the parts that need them."""
    head, dot, tail = name.partition(".")
    return head + (dot + (tail if set(tail) <= _BARE else _text(tail)) if dot else "")
