"""Follow the paths of a layout through the tree of a file, and yield the values at their ends."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tracestore.errors import InvalidInputError, escape_unprintable
from tracestore.ingest.execute.nodes import Node, column_names, leads_to_unit, tree_of
from tracestore.ingest.execute.values import (
    columns_of,
    describe,
    id_text,
    item_value,
    json_value,
    key_text,
    number,
    rows_of,
    table_of,
)
from tracestore.ingest.layout.addresses import AttributeStep, DeepStep, ItemsStep, ItemValue, KeyStep, Step
from tracestore.ingest.layout.patterns import NUMBER_NAMES
from tracestore.ingest.layout.places import RECORDS, Place
from tracestore.ingest.tree import Array, Group, Items, ListItems, MappingGroup, Value

_MAX_DEPTH = 32
_MAX_SHAPE = 256  # keys of a group whose claims are kept

# The steps that each key of a group follows, with what they bind, and the keys that none follows.
ClaimedKeys = tuple[dict[Any, list[tuple["Step", "Node", dict[str, Any]]]], list[Any]]

_COUNTED = ItemValue("sample", ("#",))


class Cell(NamedTuple):
    """A value at the end of a path.

    `bound` holds what files and path bind by name; `axes` are those of the value. `in_unit` is false for values
    next to the items of the traces, which may belong to all of them.
    """

    place: Place
    bound: dict[str, Any]
    value: Value
    axes: tuple[str, ...]
    in_unit: bool


class Walk:
    """The walk through one file.

    Parameters
    ----------
    source : str
        Name of the file, for messages.
    on_unclaimed : callable
        Called with the node, key and value of each key that no line names.
    """

    def __init__(self, source: str, on_unclaimed: Callable[[Node, str, Value], None]) -> None:
        self._source, self._on_unclaimed = source, on_unclaimed
        self._seen: dict[tuple[int, tuple[Any, ...]], ClaimedKeys] = {}
        self._counts: dict[tuple[Any, ...], int] = {}  # the last number of an answer by what its items say

    def cells(self, node: Node, value: Value, bound: dict[str, Any], *, in_unit: bool = False) -> Iterator[Cell | None]:
        """Yield the cells at and below a node, and None behind each unit."""
        node.is_found |= value is not None
        for place in node.leaves:
            yield from self._leaf(node, place, value, bound, in_unit)
        if not node.children or value is None:
            return
        if isinstance(value, str) and not all(isinstance(s, AttributeStep) for s, _ in node.children):
            value = json_value(value, f"{node.prefix}{node.children[0][0].text}", self._source)
        # Values next to the units come first, because they may belong to all of them.
        for has_units in (False, True):
            children = [pair for pair in node.children if leads_to_unit(pair[1]) == has_units]
            if children:
                yield from self._children(
                    node, children, value, bound, in_unit, claims=has_units or len(children) == len(node.children)
                )

    def _children(
        self,
        node: Node,
        children: Sequence[tuple[Step, Node]],
        value: Value,
        bound: dict[str, Any],
        in_unit: bool,
        *,
        claims: bool,
    ) -> Iterator[Cell | None]:
        items = [(step, child) for step, child in children if isinstance(step, ItemsStep)]
        keys = [(step, child) for step, child in children if isinstance(step, KeyStep)]
        for step, child in children:
            if isinstance(step, AttributeStep):
                attributes = getattr(value, "attributes", {})
                yield from self.cells(child, attributes.get(step.name), bound, in_unit=in_unit)
            elif isinstance(step, DeepStep):
                yield from self._deep(child, value, bound, in_unit, 0)
        if isinstance(value, Group):
            names = column_names(items)
            if items and not (keys and names.isdisjoint(map(str, value))):
                columns = columns_of(value, names, f"{node.prefix}{items[0][0].text}", self._source)
                yield from self._items(items, table_of(columns), bound, in_unit)
                value = MappingGroup({k: k for k in value if k not in columns or _is_key(keys, k)}, value.__getitem__)
            yield from self._keys(node, keys, value, bound, in_unit, claims=claims)
        elif isinstance(value, Items | Array):
            if items:
                yield from self._items(items, value, bound, in_unit)
            for step, child in keys:
                yield from self._member(node, step, child, value, bound, in_unit)
        elif keys or items:
            self._refuse(node, (keys or items)[0][0], describe(value))

    def _leaf(
        self, node: Node, place: Place, value: Value, bound: dict[str, Any], in_unit: bool
    ) -> Iterator[Cell | None]:
        if place.name == RECORDS:
            if isinstance(value, Group):
                rest = {str(key): value[key] for key in self.claims(node, value)[1]}
                extras = {k: v for k, v in rest.items() if isinstance(v, str | int | float)}
                yield Cell(place, bound, MappingGroup(extras, lambda extra: extra), (), in_unit)
            return
        axes = place.axes
        if value is None:
            yield Cell(place, bound, None, axes, in_unit)
        elif isinstance(value, Items) and axes and axes[0] in ("N", "K", "P") and (value.is_stream or axes[0] != "P"):
            is_unit = node.has_unit_items and not in_unit
            for k, item in enumerate(value):
                yield Cell(place, {**bound, axes[0]: k}, settled(item), axes[1:], in_unit or is_unit)
                if is_unit:
                    yield None
        else:
            yield Cell(place, bound, settled(value), axes, in_unit)

    def _items(
        self, children: Sequence[tuple[Step, Node]], value: Items | Array, bound: dict[str, Any], in_unit: bool
    ) -> Iterator[Cell | None]:
        for k, item in enumerate(rows_of(value)):
            yield from self._item(children, item, k, bound, in_unit)

    def _item(
        self, children: Sequence[tuple[Step, Node]], item: Value, k: int, bound: dict[str, Any], in_unit: bool
    ) -> Iterator[Cell | None]:
        has_unit = False
        for step, child in children:
            assert isinstance(step, ItemsStep)
            found = self.bind(step, child, item, k, bound)
            begins = child.is_unit and not in_unit
            yield from self.cells(child, item, found, in_unit=in_unit or begins or has_unit)
            has_unit |= begins
        if has_unit:
            yield None

    def bind(self, step: ItemsStep, node: Node, item: Value, k: int, bound: dict[str, Any]) -> dict[str, Any]:
        """Return what is bound so far, with what an item binds by a step."""
        if step.letter is not None:
            return {**bound, step.letter: k}
        found = dict(bound)
        for value_of in step.values:
            value = k if value_of.path == ("#",) else item_value(item, value_of)
            if value is None:
                path = "/".join(value_of.path)
                raise InvalidInputError(f"item {k} of {step.text} has no {path}", source=self._source)
            if value_of.pattern is None:
                is_number = value_of.name in NUMBER_NAMES or value_of.name in ("N", "K")
                text_of = id_text if value_of.name == "id" else key_text
                found[value_of.name] = number(value, value_of.name) if is_number else text_of(value)
                continue
            match = value_of.pattern.match(key_text(value))
            if match is None:
                raise InvalidInputError(
                    f"item {k}: found {escape_unprintable(str(value), 60)!r}, expected {value_of.pattern.text}",
                    source=self._source,
                )
            found |= match.bound
        if _COUNTED in step.values:  # the number of the answer among the items that say the same otherwise
            key = (id(node), *(v for name, v in found.items() if name != _COUNTED.name))
            found[_COUNTED.name] = self._counts[key] = self._counts.get(key, -1) + 1
        return found

    def items(
        self, node: Node, step: ItemsStep | None, value: Value, bound: dict[str, Any]
    ) -> Iterator[tuple[Value, dict[str, Any]]]:
        """Yield the items behind the only step of a node with what they bind; the value itself without a step."""
        if step is None:
            yield value, bound
            return
        rest: list[tuple[Any, Value]] = []
        node.is_found = True
        where = f"{node.prefix}{step.text}"
        if isinstance(value, str):
            value = json_value(value, where, self._source)
        if isinstance(value, Group):
            columns = columns_of(value, column_names(node.children), where, self._source)
            rest = [(key, value[key]) for key in value if key not in columns]
            rows = table_of(columns)
        elif isinstance(value, Items | Array):
            rows = rows_of(value)
        else:
            self._refuse(node, step, describe(value))
        for k, item in enumerate(rows):
            yield item, self.bind(step, node.child(step), item, k, bound)
            item = None
        for key, other in rest:
            self._on_unclaimed(node, key, other)

    def _keys(
        self,
        node: Node,
        children: Sequence[tuple[Step, Node]],
        value: Group,
        bound: dict[str, Any],
        in_unit: bool,
        *,
        claims: bool,
    ) -> Iterator[Cell | None]:
        claimed, rest = self.claims(node, value)
        wanted = {id(child) for _, child in children}
        for key, found in claimed.items():
            for _, child, match in found:
                if id(child) not in wanted:
                    continue
                begins = child.is_unit and not in_unit
                inner = {**bound, **match} if match else bound
                yield from self.cells(child, value[key], inner, in_unit=in_unit or begins)
                if begins:
                    yield None
        if claims and not node.ignores and (claimed or not node.is_deep):
            for key in rest:
                self._on_unclaimed(node, key, value[key])

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
        claimed: dict[Any, list[tuple[Step, Node, Any]]] = {}
        rest = []
        steps = [(step, child) for step, child in node.children if isinstance(step, KeyStep)]
        for key in names:
            found = [(step, child, match) for step, child in steps if (match := _match_key(step, key)) is not None]
            best = _longest(found)
            if len(best) > 1 and not any(child.ignores for _, child, _ in best[:2]):
                raise InvalidInputError(
                    f"{best[0][0].text} and {best[1][0].text} match the key {key!s:.60} with equally many characters",
                    source=self._source,
                )
            for _, child, _ in best:
                child.is_found |= child.ignores
            if best:
                claimed[key] = [
                    (step, child, self._wild(node, step, key, match))
                    for step, child, match in best
                    if not child.ignores or child.children or child.leaves
                ]
            elif str(key) not in node.keys:
                rest.append(key)
        for step, _ in steps:
            if (k := _member_number(step)) is not None and {k, str(k)} <= claimed.keys():
                raise InvalidInputError(f"the keys {k} and {str(k)!r} both exist", source=self._source)
        return claimed, rest

    def _wild(self, node: Node, step: KeyStep, key: Any, match: dict[str, Any]) -> dict[str, Any]:
        return {**match, f"*{node.prefix}/{step.text}": str(key)} if "*" in step.text else match

    def _member(
        self, node: Node, step: KeyStep, child: Node, value: Items | Array, bound: dict[str, Any], in_unit: bool
    ) -> Iterator[Cell | None]:
        if (k := _member_number(step)) is not None:
            rows = rows_of(value)
            if isinstance(rows, Items) and rows.is_stream:
                rows = ListItems(list(rows), lambda item: item)
            count = len(rows)
            if not -count <= k < count:
                return
            yield from self.cells(child, rows[k % count], bound, in_unit=in_unit)
        elif len(step.parts) == 1 and step.names and isinstance(value, Items) and not value.is_stream:
            for k, item in enumerate(value):  # {layer} of a list: the number of the member
                match = step.parts[0].match(str(k))
                if match is not None:
                    yield from self.cells(child, item, {**bound, **match.bound}, in_unit=in_unit)
        else:
            self._refuse(node, step, describe(value))

    def _deep(
        self, node: Node, value: Value, bound: dict[str, Any], in_unit: bool, depth: int
    ) -> Iterator[Cell | None]:
        """Follow the steps behind `**` at every depth where they fit; an item that fits is not searched further."""
        if depth > _MAX_DEPTH:
            raise InvalidInputError("nested deeper than a trace file", source=self._source)
        if isinstance(value, Group):
            keys = [(step, child) for step, child in node.children if isinstance(step, KeyStep)]
            yield from self._keys(node, keys, value, bound, in_unit, claims=False)
            for key in self.claims(node, value)[1]:
                yield from self._deep(node, value[key], bound, in_unit, depth + 1)
        elif isinstance(value, Items):
            items = [(step, child) for step, child in node.children if isinstance(step, ItemsStep)]
            for k, item in enumerate(value):
                fitting = [pair for pair in items if isinstance(item, Group) and _has_all(pair[0], item)]
                if fitting:
                    yield from self._item(fitting, item, k, bound, in_unit)
                else:
                    yield from self._deep(node, item, bound, in_unit, depth + 1)

    def _refuse(self, node: Node, step: Step, found: str) -> Any:
        raise InvalidInputError(f"{node.prefix}{step.text}: found {found}", source=self._source)


def cells_of(place: Place, root: Value, states: Sequence[Place] = ()) -> Iterator[Cell | None]:
    """Yield the cells of one place of a file."""
    text = place.address.files.text
    return Walk(text, lambda *_: None).cells(tree_of(text, [place], [], list(states)), root, {})


def _has_all(step: Step, item: Value) -> bool:
    """Return whether an item says everything that a step binds by it."""
    return isinstance(step, ItemsStep) and all(
        value_of.path == ("#",) or item_value(item, value_of) is not None for value_of in step.values
    )


def _is_key(keys: Sequence[tuple[Step, Node]], key: Any) -> bool:
    return any(isinstance(step, KeyStep) and _match_key(step, key) is not None for step, _ in keys)


def settled(value: Value) -> Value:
    """Return a value that can be read more than once."""
    return ListItems(list(value), lambda item: item) if isinstance(value, Items) and value.is_stream else value


def _longest(found: list[Any]) -> list[Any]:
    """Return the entries whose steps have the most literal characters."""
    most = max((_num_literals(step) for step, _, _ in found), default=0)
    return [entry for entry in found if _num_literals(entry[0]) == most]


def _num_literals(step: KeyStep) -> int:
    return sum(part.num_literals for part in step.parts)


def _member_number(step: KeyStep) -> int | None:
    """Return the number of the member that a step names, None for other names."""
    text = step.parts[0].literal if len(step.parts) == 1 else None
    return int(text) if text is not None and text.lstrip("-").isdecimal() else None


def _match_key(step: KeyStep, key: Any) -> dict[str, Any] | None:
    """Return what a step binds in a key, None if the key is another one."""
    if len(step.parts) > 1:
        if not isinstance(key, tuple) or len(key) != len(step.parts):
            return None
        bound: dict[str, Any] = {}
        for part, member in zip(step.parts, key, strict=True):
            match = part.match(key_text(member))
            if match is None:
                return None
            bound |= match.bound
        return bound
    if isinstance(key, tuple):
        return None
    match = step.parts[0].match(key_text(key))
    return None if match is None else match.bound
