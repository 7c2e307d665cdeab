"""Follow the paths of a layout through the tree of a file, and yield the values at their ends."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tracestore.errors import InvalidInputError, escape_unprintable
from tracestore.ingest.execute.key_steps import KeySteps, column_names, lacking_keys, match_key, member_number
from tracestore.ingest.execute.values import (
    describe,
    id_text,
    item_value,
    json_value,
    key_text,
    list_value,
    number,
    rows_of,
    settled,
    table_of,
)
from tracestore.ingest.layout.addresses import Address, AttributeStep, ItemsStep, ItemValue, KeyStep, Step
from tracestore.ingest.layout.patterns import INNER_NAMES, NUMBER_NAMES, VALUE
from tracestore.ingest.layout.places import RECORDS, Place
from tracestore.ingest.readers.tree import Array, Group, Items, MappingGroup, Value
from tracestore.store.vocabulary import is_named_as_verdict, is_question_id

_MAX_SHAPE = 256  # keys of a group whose claims are kept
_OF_CONTAINERS = {"class", "format"}  # attributes; others have names in capitals


@dataclass
class Node:
    """The steps behind a common beginning of paths, and the places that end there."""

    prefix: str
    children: list[tuple[Step, "Node"]] = field(default_factory=list)
    leaves: list[Place] = field(default_factory=list)
    ignores: bool = False
    is_unit: bool = False  # each of its values is a whole trace, or several
    keys: frozenset[str] = frozenset()  # keys whose values an item binds
    rows: list["Node"] = field(default_factory=list, repr=False)  # of the items behind any brackets at this place
    has_unit_items: bool = False  # so is each item along the axis N of its value
    is_found: bool = False  # a file had a value there

    def child(self, step: Step) -> "Node":
        """Return the node behind a step, a new one if there is none."""
        for known, node in self.children:
            if known.text == step.text and type(known) is type(step):
                return node
        node = Node(f"{self.prefix}{step.text}/")
        if isinstance(step, ItemsStep):
            node.keys = frozenset(value_of.path[0] for value_of in step.values)
            node.rows = next((other.rows for known, other in self.children if isinstance(known, ItemsStep)), [])
            node.rows.append(node)
        self.children.append((step, node))
        return node

    @property
    def has_records(self) -> bool:
        """Return whether items of `records` end here."""
        return any(place.name == RECORDS for place in self.leaves)

    @property
    def leads_to_unit(self) -> bool:
        """Return whether items of the traces lie here or below."""
        return self.is_unit or self.has_unit_items or any(child.leads_to_unit for _, child in self.children)

    @functools.cached_property
    def key_steps(self) -> KeySteps["Node"]:
        """The steps of its keys."""
        return KeySteps(self.children)

    @functools.cached_property
    def left_out(self) -> dict[int, "Node"]:
        """The items, by number, that `ignore` leaves out next to those that lines read."""
        ignored = [(member_number(step), child) for step, child in self.children if child.ignores and not child.leaves]
        has_items = any(isinstance(step, ItemsStep) for step, _ in self.children)
        return {k: child for k, child in ignored if k is not None and has_items}

    @functools.cached_property
    def reads_items_again(self) -> bool:
        """Return whether the lines below read the items of a list by their number, or in more than one pass."""
        passes = {child.leads_to_unit for step, child in self.children if isinstance(step, ItemsStep)}
        keys = [(member_number(step), child.children) for step, child in self.children if isinstance(step, KeyStep)]
        return len(passes) + len(self.leaves) > 1 or any(k not in self.left_out or below for k, below in keys)

    def has_named(self, key: Any) -> bool:
        """Return whether the items bind a key, or lines with other brackets name it."""
        steps = (step for row in self.rows for step, _ in row.children)
        return str(key) in self.keys or any(isinstance(s, KeyStep) and match_key(s, key) is not None for s in steps)

    def at(self, path: Iterable[Step]) -> "Node":
        """Return the node at the end of a path."""
        node = self
        for step in path:
            node = node.child(step)
        return node


def tree_of(text: str, places: Iterable[Place], ignored: Iterable[Address], states: list[Place]) -> Node:
    """Return the root of the paths of the places whose FILES are `text`."""
    root = Node(f"{text} : ")
    for place in places:
        if place.address.files.text != text:
            continue
        # The first step that tells traces apart is that of the units, unless parts of a trace lie in several.
        may_be_unit = place in states and len(states) == 1 and not place.crossed
        may_be_unit &= INNER_NAMES.isdisjoint(place.address.files.names)
        node = root
        for step in place.address.path:
            node = node.child(step)
            may_be_unit &= INNER_NAMES.isdisjoint(step.names)
            if isinstance(step, ItemsStep):
                tells_traces = step.letter in (None, "N", "K", "chunk")
                may_be_unit &= step.letter not in INNER_NAMES
            else:
                tells_traces = bool(step.names) or (isinstance(step, KeyStep) and "*" in step.text)
            if may_be_unit and tells_traces:
                node.is_unit, may_be_unit = True, False
        node.leaves.append(place)
        node.has_unit_items |= may_be_unit and place.axes[:1] == ("N",)
    for address in ignored:
        if address.files.text == text:
            root.at(address.path).ignores = True
    return root


Bound = dict[str, Any]  # values by the names that are bound
Children = Sequence[tuple[Step, Node]]
# The steps that each key of a group follows, with what they bind, and the keys that none follows.
ClaimedKeys = tuple[dict[Any, list[tuple[Step, Node, Bound]]], list[Any]]

_COUNTED = ItemValue("sample", ("#",))


class Cell(NamedTuple):
    """A value at the end of a path.

    `bound` holds what files and path bind by name; `axes` are those of the value. `in_unit` is false for values
    next to the items of the traces, which may belong to all of them.
    """

    place: Place
    bound: Bound
    value: Value
    axes: tuple[str, ...]
    in_unit: bool


Cells = Iterator[Cell | None]  # None stands behind each unit


class Walk:
    """The walk through one file.

    Parameters
    ----------
    source : str
        Name of the file, for messages.
    on_unclaimed : callable
        Called with the node, key and value of each key that no line names, and what is bound there.
    keeps : callable, optional
        Called with what an item binds and the text of its place; returns whether it is kept. By default all are.
    """

    def __init__(
        self,
        source: str,
        on_unclaimed: Callable[[Node, str, Value, Bound], None],
        keeps: Callable[[Bound, str], bool] | None = None,
    ) -> None:
        self._source, self.on_unclaimed, self._keeps = source, on_unclaimed, keeps
        self._seen: dict[tuple[int, tuple[Any, ...]], ClaimedKeys] = {}
        self._attributed: set[int] = set()  # nodes whose first value had its attributes checked
        self._counts: dict[tuple[Any, ...], int] = {}  # the last number of an answer by what its items say

    def cells(self, node: Node, value: Value, bound: Bound, *, in_unit: bool = False) -> Cells:
        """Yield the cells at and below a node, and None behind each unit."""
        node.is_found |= value is not None
        value = settled(value) if node.reads_items_again else value
        for place in node.leaves:
            yield from self._leaf(node, place, value, bound, in_unit)
        self._add_attributes(node, value, bound)
        if not node.children or value is None:
            return
        if isinstance(value, str) and not all(isinstance(s, AttributeStep) for s, _ in node.children):
            value = self._parsed(node, value)
        rows, group = self._opened(node, value)
        # Values next to the units come first, because they may belong to all of them.
        for has_units in (False, True):
            children = [pair for pair in node.children if pair[1].leads_to_unit == has_units]
            yield from self._beside(node, children, value, bound, in_unit)
            items = [pair for pair in children if isinstance(pair[0], ItemsStep)]
            for k, item in enumerate(_kept(node, value, rows)) if items and rows is not None else ():
                yield from self._item(items, item, k, bound, in_unit)
            if group is not None:
                yield from self._keys(node, children, group, bound, in_unit)
        if group is not None and not node.ignores:
            for key in self.claims(node, group)[1]:
                self.on_unclaimed(node, key, group[key], bound)

    def _add_attributes(self, node: Node, value: Value, bound: Bound) -> None:
        """Report attributes at a place of traces that no line names: of the first value all, and of each the id."""
        if id(node) in self._attributed or value is None or node.ignores:
            return
        self._attributed.add(id(node))
        if any(name != "file" and name[0] != "*" and name not in INNER_NAMES for name in bound):
            claimed = {step.name for step, _ in node.children if isinstance(step, AttributeStep)}
            for name in getattr(value, "attributes", {}).keys() - claimed:
                held: Value = value.attributes[name]  # type: ignore[union-attr]
                is_id = is_question_id(name) and "{id" in node.prefix
                self._attributed -= {id(node)} if is_id else set()
                is_own = isinstance(held, str | int | float) and not name.isupper() and name not in _OF_CONTAINERS
                if is_own or is_id or is_named_as_verdict(name):
                    self.on_unclaimed(node, f"@{name}", held, bound)

    def _beside(self, node: Node, children: Children, value: Value, bound: Bound, in_unit: bool) -> Cells:
        """Follow steps to attributes and to members of a list."""
        for step, child in children:
            if isinstance(step, AttributeStep):
                found = getattr(value, "attributes", {}).get(step.name)
                yield from self.cells(child, found, bound, in_unit=in_unit)
            elif isinstance(step, KeyStep) and isinstance(value, Items | Array):
                yield from self._member(node, step, child, value, bound, in_unit)

    def _parsed(self, node: Node, text: str) -> Value:
        return json_value(text, f"{node.prefix}{node.children[0][0].text}", self._source)

    def _opened(self, node: Node, value: Value) -> tuple[Items | Array | None, Group | None]:
        """Return the rows and the group that the steps behind a node follow: lists of a mapping are columns of a table."""
        items = [(step, child) for step, child in node.children if isinstance(step, ItemsStep)]
        keys = [(step, child) for step, child in node.children if isinstance(step, KeyStep)]
        if isinstance(value, Group):
            names = column_names(items)
            if not items or (keys and names.isdisjoint(map(str, value))):
                return None, value
            rows, columns = table_of(value, names, dict(items), f"{node.prefix}{items[0][0].text}", self._source)
            others = {k: k for k in value if k not in columns or any(match_key(s, k) is not None for s, _ in keys)}
            return rows, MappingGroup(others, value.__getitem__)
        if not isinstance(value, Items | Array) and (keys or items):
            self._refuse(node, (keys or items)[0][0], f"{describe(value)}, expected keys or items")
        return (value, None) if isinstance(value, Items | Array) else (None, None)

    def _leaf(self, node: Node, place: Place, value: Value, bound: Bound, in_unit: bool) -> Cells:
        if place.name == RECORDS:
            if isinstance(value, Group):
                rest = {str(key): value[key] for key in self.claims(node, value)[1]}
                extras = {k: v for k, v in rest.items() if isinstance(v, str | int | float)}
                yield Cell(place, bound, MappingGroup(extras, lambda extra: extra), (), in_unit)
            return
        axes = place.axes
        if place.is_said_by_key:
            if not isinstance(value, str | int):
                raise InvalidInputError(f"found {describe(value)}, expected the id of an item", field=place.name)
            value = bound[VALUE]
        if isinstance(value, str) and axes and not {"N", "K"}.isdisjoint(axes[0]):  # such as an entry of a header
            value = list_value(value, axes[0], place.name, self._source)
        if isinstance(value, Items) and axes and axes[0] in ("N", "K", "P") and (value.is_stream or axes[0] != "P"):
            is_unit = node.has_unit_items and not in_unit
            for k, item in enumerate(value):
                yield Cell(place, {**bound, axes[0]: k}, settled(item), axes[1:], in_unit or is_unit)
                if is_unit:
                    yield None
        else:
            yield Cell(place, bound, settled(value), axes, in_unit)

    def _item(self, children: Children, item: Value, k: int, bound: Bound, in_unit: bool) -> Cells:
        has_unit = False
        for step, child in children:
            assert isinstance(step, ItemsStep)
            if (found := self.bind(step, child, item, k, bound)) is None:
                continue
            begins = child.is_unit and not in_unit
            yield from self.cells(child, item, found, in_unit=in_unit or begins or has_unit)
            if _COUNTED in step.values and isinstance(item, Group):  # a row without the key is a row without a value
                for lacking in lacking_keys(child.children, item):
                    yield from self.cells(lacking, None, found, in_unit=in_unit or begins or has_unit)
            has_unit |= begins
        if has_unit:
            yield None

    def bind(self, step: ItemsStep, node: Node, item: Value, k: int, bound: Bound) -> Bound | None:
        """Return what is bound so far, with what an item binds by a step; None for an item that is left out."""
        if step.letter is not None:
            return {**bound, step.letter: k}
        found = dict(bound)
        for value_of in step.values:
            value = k if value_of.path == ("#",) else item_value(item, value_of)
            if value is None:
                path = "/".join(value_of.path) or "value in the column without a name"
                raise InvalidInputError(f"item {k} of {step.text} has no {path}", source=self._source)
            if value_of.pattern is None:
                is_number = value_of.name in NUMBER_NAMES or value_of.name in ("N", "K", "L", "S", "P")
                text_of = id_text if value_of.name == "id" else key_text
                found[value_of.name] = number(value, value_of.name) if is_number else text_of(value)
                continue
            if (match := value_of.pattern.match(key_text(value))) is None:
                raise InvalidInputError(
                    f"item {k}: found {escape_unprintable(str(value), 60)!r}, expected {value_of.pattern.text}",
                    source=self._source,
                )
            found |= match.bound
        if self._keeps is not None and not self._keeps(found, node.prefix.removesuffix("/")):
            return None
        if _COUNTED in step.values:  # the number of the answer among the items that say the same otherwise
            key = (id(node), *(v for name, v in found.items() if name != _COUNTED.name))
            found[_COUNTED.name] = self._counts[key] = self._counts.get(key, -1) + 1
        return found

    def items(self, node: Node, step: ItemsStep | None, value: Value, bound: Bound) -> Iterator[tuple[Value, Bound]]:
        """Yield the items behind the only step of a node with what they bind; the value itself without a step."""
        if step is None:
            self._add_attributes(node, value, bound)
            yield value, bound
            return
        node.is_found = True
        rows, group = self._opened(node, self._parsed(node, value) if isinstance(value, str) else value)
        child = node.child(step)
        for k, item in enumerate(_kept(node, value, rows)) if rows is not None else ():
            if (found := self.bind(step, child, item, k, bound)) is not None:
                yield item, found
            item = None
        for key in group or ():
            self.on_unclaimed(node, key, group[key], bound)  # type: ignore[index]

    def _keys(self, node: Node, children: Children, value: Group, bound: Bound, in_unit: bool) -> Cells:
        wanted = {id(child) for _, child in children}
        for key, found in self.claims(node, value)[0].items():
            for _, child, match in found:
                if id(child) in wanted:
                    begins = child.is_unit and not in_unit
                    inner = {**bound, **match} if match else bound
                    yield from self.cells(child, value[key], inner, in_unit=in_unit or begins)
                    if begins:
                        yield None

    def claims(self, node: Node, value: Group) -> ClaimedKeys:
        """Return the steps that the keys of a group follow, and the keys that none does; once for each set of keys."""
        names = tuple(value)
        if (known := self._seen.get((id(node), names))) is None:
            known = self._claimed(node, names)
            if len(names) <= _MAX_SHAPE:
                self._seen[id(node), names] = known
        return known

    def _claimed(self, node: Node, names: tuple[Any, ...]) -> ClaimedKeys:
        """Return the steps that each key follows, and the keys that none does."""
        claimed, rest = dict[Any, list[tuple[Step, Node, Any]]](), list[Any]()
        for key in names:
            if len(best := node.key_steps.followed(key)) > 1 and not any(child.ignores for _, child, _ in best[:2]):
                raise InvalidInputError(
                    f"{best[0][0].text} and {best[1][0].text} match the key {key!s:.60} with equally many characters",
                    source=self._source,
                )
            for _, child, _ in best:
                child.is_found |= child.ignores
            if best:
                claimed[key] = [
                    (step, child, {**match, f"*{node.prefix}/{step.text}": str(key)} if "*" in step.text else match)
                    for step, child, match in best
                    if not child.ignores or child.children or child.leaves
                ]
            elif not node.has_named(key):
                rest.append(key)
        for key in claimed:
            if isinstance(key, int) and str(key) in claimed and str(key) in node.key_steps.by_key:
                raise InvalidInputError(f"the keys {key} and {str(key)!r} both exist", source=self._source)
        return claimed, rest

    def _member(
        self, node: Node, step: KeyStep, child: Node, value: Items | Array, bound: Bound, in_unit: bool
    ) -> Cells:
        if (k := member_number(step)) in node.left_out and not child.children:
            return
        if all(other.ignores for _, other in node.children):
            self._refuse(node, step, f"{describe(value)}: ignore leaves out all of it, or nothing")
        if k is not None:
            rows = settled(rows_of(value))
            if -(count := rows.length or 0) <= k < count:
                yield from self.cells(child, rows[k % count], bound, in_unit=in_unit)
        elif len(step.parts) == 1 and step.names and isinstance(value, Items) and not value.is_stream:
            for k, item in enumerate(value):  # {layer} of a list: the number of the member
                if (match := step.parts[0].match(str(k))) is not None:
                    yield from self.cells(child, item, {**bound, **match.bound}, in_unit=in_unit)
        else:
            self._refuse(node, step, f"{describe(value)}, expected keys (the axes of an array follow ->)")

    def _refuse(self, node: Node, step: Step, found: str) -> Any:
        raise InvalidInputError(f"{node.prefix}{step.text}: found {found}", source=self._source)


def _kept(node: Node, value: Value, rows: Items | Array) -> Iterator[Value]:
    """Yield the rows of a value but those whose number `ignore` names; in a mapping it names a key."""
    left_out = {} if isinstance(value, Group) else node.left_out
    for k, item in enumerate(rows_of(rows)):
        if (child := left_out.get(k)) is None:
            yield item
        else:
            child.is_found = True
