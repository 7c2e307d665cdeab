"""The keys and members that the steps of a path follow."""

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from tracestore.ingest.execute.values import key_text
from tracestore.ingest.layout.addresses import ItemsStep, KeyStep, Step

T = TypeVar("T")


class KeySteps(Generic[T]):
    """The steps of keys behind a place, with the places behind them.

    Attributes
    ----------
    by_key : dict
        They by the only key that they match; None: those with names or wildcards.
    """

    def __init__(self, children: Iterable[tuple[Step, T]]) -> None:
        self.by_key: dict[str | None, list[tuple[KeyStep, T]]] = {}
        for step, child in children:
            if isinstance(step, KeyStep):
                self.by_key.setdefault(step.literal, []).append((step, child))

    def followed(self, key: Any) -> list[tuple[KeyStep, T, dict[str, Any]]]:
        """Return the steps that match a key with the most literal characters, and what they bind."""
        near = (*self.by_key.get(key_text(key), ()), *self.by_key.get(None, ()))
        found = [(step, child, match) for step, child in near if (match := match_key(step, key)) is not None]
        lengths = [sum(part.num_literals for part in step.parts) for step, _, _ in found]
        return [entry for entry, length in zip(found, lengths, strict=True) if length == max(lengths)]


def member_number(step: Step) -> int | None:
    """Return the number of the member that a step names, None for other names."""
    text = step.literal if isinstance(step, KeyStep) else None
    return int(text) if text is not None and text.lstrip("-").isdecimal() else None


def match_key(step: KeyStep, key: Any) -> dict[str, Any] | None:
    """Return what a step binds in a key, None if the key is another one."""
    members = key if isinstance(key, tuple) else (key,)
    if len(members) != len(step.parts) or isinstance(key, tuple) != (len(step.parts) > 1):
        return None
    found = [part.match(key_text(member)) for part, member in zip(step.parts, members, strict=True)]
    return None if None in found else {name: value for match in found if match for name, value in match.bound.items()}


def lacking_keys(children: Sequence[tuple[Step, T]], keys: Iterable[Any]) -> list[T]:
    """Return the places of steps that no key follows."""
    steps = [(step, child) for step, child in children if isinstance(step, KeyStep)]
    return [child for step, child in steps if all(match_key(step, key) is None for key in keys)]


def column_names(items: Sequence[tuple[ItemsStep, Any]]) -> set[str]:
    """Return the names of the columns that items bind, or that lie below their nodes."""
    bound = {value_of.path[0] for step, _ in items for value_of in step.values} - {"#"}
    return bound | {step.text for _, item in items for step, _ in item.children if isinstance(step, KeyStep)}
