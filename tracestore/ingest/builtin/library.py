"""The built-in layouts: one TOML file a tool."""

import itertools
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tracestore.errors import UsageError
from tracestore.ingest.builtin.signature import Form, Signature, parse_form
from tracestore.ingest.layout.fields import SCORE_LINES, score_of
from tracestore.ingest.layout.language import Layout, parse_layout
from tracestore.ingest.layout.patterns import Pattern
from tracestore.ingest.layout.places import Plan, plan_of
from tracestore.store.format import schema
from tracestore.store.vocabulary import FIELDS, SCORES

_NEEDED = ("files", "what", "defined", "signature")
_KEYS = frozenset((*_NEEDED, "instead_of", "suffixes", "vary", "reader", "layout"))


@dataclass(frozen=True, eq=False)
class Builtin:
    """The layout of a tool, for one combination of what varies in it; it is parsed when a file may belong to it.

    Parameters
    ----------
    name : str
        Name of the tool: that of its TOML file.
    source : Mapping
        The entries of the file.
    values : Mapping
        What takes the place of names in its texts.
    lines : Mapping
        Keys of further fields in the items of the states.
    settings : Mapping
        What else is known of its axes.
    """

    name: str
    source: Mapping[str, Any]
    values: Mapping[str, str] = field(default_factory=dict)
    lines: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reader(self) -> str | None:
        """Return the name of what reads the files, if no layout does."""
        return self.source.get("reader")

    @cached_property
    def patterns(self) -> dict[str, Pattern]:
        """The FILES of its signatures, as patterns of paths."""
        texts = (_filled(text, self.values) for text in self.source["signature"])
        return {text: Pattern(text, is_path=True) for text in texts}

    @cached_property
    def signatures(self) -> dict[str, Signature]:
        """The signature of each FILES; those of items know the keys of further fields, and of optional ones in records."""
        tables = _filled(self.source["signature"], self.values)
        forms = dict[str, tuple[Form, ...]]()
        if "records" in self.source.get("layout", {}):
            # The reading refuses a label or score of a wrong kind by its name.
            forms = _optional_forms() | dict.fromkeys(("label", *SCORES), parse_form("any"))
            forms["scores/*"] = parse_form("number | text")
        forms |= dict.fromkeys(self.lines.values(), parse_form("number | text"))
        found: dict[str, Signature] = {}
        for text, table in tables.items():
            try:
                found[text] = Signature.parse(table)
            except UsageError as error:
                raise UsageError(f"built-in layout {self.name}: {text}: {error}") from None
        return {text: replace(signature, may={**signature.may, **forms}) for text, signature in found.items()}

    @cached_property
    def layout(self) -> Layout:
        """The layout; items of records also have the further fields, labels and scores."""
        layout = parse_layout(_filled(self.source.get("layout", {}), self.values), self.name)
        layout = replace(layout, settings={**self.settings, **layout.settings})
        if not layout.records:
            return layout
        keys = {*self.lines.values(), *map(score_of, self.lines)}
        known = {"label": "label", "scores": "scores"} | {line: name for name, line in SCORE_LINES.items()}
        lines = {**self.lines} | {line: name for line, name in known.items() if name not in keys}
        addresses = {name: (layout.records[0].below(key),) for name, key in lines.items()}
        return replace(layout, addresses={**layout.addresses, **addresses})

    @cached_property
    def plan(self) -> Plan:
        """The plan of the layout."""
        return plan_of(self.layout)

    @cached_property
    def needed(self) -> frozenset[str]:
        """The FILES without which the layout does not hold: those of the states, and of each other line."""
        if self.reader is not None:
            return frozenset(self.patterns)
        return frozenset(place.address.files.text for place in self.plan.places if not place.is_optional)

    def extended(self, lines: Mapping[str, str], settings: Mapping[str, Any]) -> "Builtin":
        """Return the built-in with further fields, by their keys in the items of the states, and with further settings."""
        return replace(self, lines=lines, settings=settings) if lines or settings else self


def parse_builtin(name: str, text: str) -> list[Builtin]:
    """Return the built-in layouts of a TOML file: one for each of `suffixes` and combination of what `vary` lists.

    Raises
    ------
    UsageError
        If an entry is wrong.
    """
    try:
        entries = tomllib.loads(text)
        if unknown := entries.keys() - _KEYS:
            raise UsageError(f"unknown {', '.join(sorted(unknown))}")
        if missing := [name for name in _NEEDED if not entries.get(name)]:
            raise UsageError(f"needs {', '.join(missing)}")
        suffixes = [{"suffix": suffix} for suffix in entries.get("suffixes", ())]
        chosen = itertools.product(*entries.get("vary", ()), suffixes or [{}])
        return [
            Builtin(name, entries, {f"<{k}>": value for choice in choices for k, value in choice.items()})
            for choices in chosen
        ]
    except (ValueError, UsageError) as error:
        raise UsageError(f"built-in layout {name}: {error}") from None


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    """Return a value of TOML with what varies in its texts and keys."""
    if isinstance(value, dict):
        return {_filled(key, values): _filled(entry, values) for key, entry in value.items()}
    if isinstance(value, list):
        return [_filled(entry, values) for entry in value]
    if isinstance(value, str) and "<" in value:
        for key, text in values.items():
            value = value.replace(key, text)
    return value


@cache
def _optional_forms() -> dict[str, tuple[Form, ...]]:
    """Return the forms of the optional fields of a trace by their keys."""
    forms = {}
    for name, optional in schema.OPTIONAL_FIELDS.items():
        axes = FIELDS[name].shape
        kind = {"<f4": "float" if axes else "number", "|u1": "flag"}.get(optional.dtype, "int")
        forms[name] = parse_form("group N | none 0" if optional.shape == schema.JSON else f"{kind} {axes}")
    return forms


@cache
def builtins() -> Sequence[Builtin]:
    """Return the built-in layouts, in the order of their names."""
    paths = sorted(Path(__file__).with_name("tools").glob("*.toml"))
    return [builtin for path in paths for builtin in parse_builtin(path.stem, path.read_text("utf-8"))]


def builtins_near(names: Iterable[str]) -> list[Builtin]:
    """Return the built-in layouts whose FILES may match one of some names, by the ends of both."""
    ends = (*{name[name.rfind(".") :] for name in names}, "}", "*")
    return [builtin for builtin in builtins() if any(text.endswith(ends) for text in builtin.patterns)]
