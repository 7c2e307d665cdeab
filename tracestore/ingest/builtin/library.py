"""The built-in layouts: one TOML file a tool."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

from tracestore.errors import UsageError
from tracestore.ingest.builtin.signature import Signature
from tracestore.ingest.layout.language import Layout, parse_layout
from tracestore.ingest.layout.patterns import Pattern
from tracestore.ingest.layout.places import plan_of

_KEYS = frozenset(("what", "defined", "suffixes", "reader", "layout", "signature"))
# What a suffix takes the place of in the lines of a layout.
_SUFFIX = "$"


@dataclass(frozen=True, eq=False)
class Builtin:
    """The layout of a tool, for files of one suffix.

    Attributes
    ----------
    name : str
        Name of the tool: that of its TOML file.
    entries : Mapping
        Lines of the layout; empty if `reader` reads the files.
    reader : str or None
        What is no layout: a structure of the file, such as PyG graphs.
    signatures : Mapping
        By the FILES of the lines, or of what is left out.
    """

    name: str
    entries: Mapping[str, Any]
    reader: str | None
    signatures: Mapping[str, Signature] = field(default_factory=dict)

    @cached_property
    def patterns(self) -> dict[str, Pattern]:
        """The FILES, as patterns of paths."""
        return {text: Pattern(text, is_path=True) for text in self.signatures}

    @cached_property
    def layout(self) -> Layout:
        """The layout."""
        return parse_layout(self.entries, self.name)

    @cached_property
    def states(self) -> frozenset[str]:
        """The FILES that hold the states; other files belong to a tool only next to these."""
        if self.reader is not None:
            return frozenset(self.signatures)
        return frozenset(place.address.files.text for place in plan_of(self.layout).states)

    @cached_property
    def needed(self) -> frozenset[str]:
        """The other FILES without which the layout does not hold."""
        if self.reader is not None:
            return frozenset()
        plan = plan_of(self.layout)
        return frozenset(p.address.files.text for p in plan.others if not p.is_optional) - self.states

    def with_lines(self, lines: Mapping[str, str]) -> "Builtin":
        """Return the built-in with further lines: the key of each field in the items of the states.

        Its signature then knows the keys.
        """
        if self.reader is not None or not lines:
            return self
        item = str(self.layout.records[0] if self.layout.records else next(iter(self.layout.ignore), ""))
        if not item:
            return self
        added = {name: f"{item} : {key}" if " : " not in item else f"{item}/{key}" for name, key in lines.items()}
        keys = dict.fromkeys(lines.values(), Signature.parse({"may": {"x": "number | text | int"}}).may["x"])
        signatures = {text: signature.with_keys(keys) for text, signature in self.signatures.items()}
        return Builtin(self.name, {**self.entries, **added}, self.reader, signatures)


def parse_builtin(name: str, text: str) -> list[Builtin]:
    """Return the built-in layouts of a TOML file, one for each suffix of its files.

    Raises
    ------
    UsageError
        If an entry is wrong.
    """
    try:
        entries = tomllib.loads(text)
        if unknown := entries.keys() - _KEYS:
            raise UsageError(f"unknown {', '.join(sorted(unknown))}")
        if not entries.get("defined") or not entries.get("signature"):
            raise UsageError("needs defined, where its tool says what it writes, and a signature")
        found = []
        for suffix in entries.get("suffixes", [""]):
            lines = {n: _with_suffix(v, suffix) for n, v in entries.get("layout", {}).items()}
            signatures = {_with_suffix(t, suffix): Signature.parse(s) for t, s in entries["signature"].items()}
            builtin = Builtin(name, lines, entries.get("reader"), signatures)
            if builtin.reader is None and (rest := set(plan_of(builtin.layout).files) ^ signatures.keys()):
                raise UsageError(f"lines and signatures differ in {', '.join(sorted(rest))}")
            found.append(builtin)
    except (ValueError, UsageError) as error:
        raise UsageError(f"built-in layout {name}: {error}") from None
    return found


def _with_suffix(value: Any, suffix: str) -> Any:
    if isinstance(value, list):
        return [_with_suffix(entry, suffix) for entry in value]
    return value.replace(_SUFFIX, suffix) if isinstance(value, str) else value


@cache
def builtins() -> Sequence[Builtin]:
    """Return the built-in layouts, in the order of their names."""
    found: list[Builtin] = []
    for entry in sorted(files("tracestore.ingest.builtin").joinpath("tools").iterdir(), key=lambda e: e.name):
        name, _, suffix = entry.name.rpartition(".")
        if suffix == "toml":
            found += parse_builtin(name, entry.read_text("utf-8"))
    return found
