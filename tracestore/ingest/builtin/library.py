"""The built-in layouts: one TOML file a tool."""

import itertools
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

_KEYS = frozenset(("what", "defined", "instead_of", "vary", "reader", "layout", "signature"))


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
    instead_of : tuple of str
        Tools whose files these are too, in a special case.
    """

    name: str
    entries: Mapping[str, Any]
    reader: str | None
    signatures: Mapping[str, Signature] = field(default_factory=dict)
    instead_of: tuple[str, ...] = ()

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
        return Builtin(self.name, {**self.entries, **added}, self.reader, signatures, self.instead_of)


def parse_builtin(name: str, text: str) -> list[Builtin]:
    """Return the built-in layouts of a TOML file: one for each combination of what `vary` lists.

    Raises
    ------
    UsageError
        If an entry is wrong.
    """
    try:
        entries = tomllib.loads(text)
        if unknown := entries.keys() - _KEYS:
            raise UsageError(f"unknown {', '.join(sorted(unknown))}")
        if not entries.get("what") or not entries.get("defined") or not entries.get("signature"):
            raise UsageError("needs what its states are, where its tool defines them, and a signature")
        found = []
        for chosen in itertools.product(*entries.get("vary", ())):
            values = {f"<{key}>": value for choice in chosen for key, value in choice.items()}
            lines, tables = _filled(entries.get("layout", {}), values), _filled(entries["signature"], values)
            signatures = {files: Signature.parse(table) for files, table in tables.items()}
            builtin = Builtin(name, lines, entries.get("reader"), signatures, tuple(entries.get("instead_of", ())))
            if builtin.reader is None and (rest := set(plan_of(builtin.layout).files) ^ signatures.keys()):
                raise UsageError(f"lines and signatures differ in {', '.join(sorted(rest))}")
            found.append(builtin)
    except (ValueError, UsageError) as error:
        raise UsageError(f"built-in layout {name}: {error}") from None
    return found


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    """Return a value of TOML with what varies in its texts and keys."""
    if isinstance(value, Mapping):
        return {_filled(key, values): _filled(entry, values) for key, entry in value.items()}
    if isinstance(value, list):
        return [_filled(entry, values) for entry in value]
    if isinstance(value, str):
        for key, text in values.items():
            value = value.replace(key, text)
    return value


@cache
def builtins() -> Sequence[Builtin]:
    """Return the built-in layouts, in the order of their names."""
    found: list[Builtin] = []
    for entry in sorted(files("tracestore.ingest.builtin").joinpath("tools").iterdir(), key=lambda e: e.name):
        name, _, suffix = entry.name.rpartition(".")
        if suffix == "toml":
            found += parse_builtin(name, entry.read_text("utf-8"))
    return found
