"""The paths of a layout as a tree: steps behind each other, and the places at their ends."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tracestore.ingest.layout.addresses import Address, DeepStep, ItemsStep, KeyStep, Step
from tracestore.ingest.layout.patterns import AXIS_NAMES
from tracestore.ingest.layout.places import RECORDS, Place


@dataclass
class Node:
    """The steps behind a common beginning of paths, and the places that end there."""

    prefix: str
    children: list[tuple[Step, "Node"]] = field(default_factory=list)
    leaves: list[Place] = field(default_factory=list)
    ignores: bool = False
    is_unit: bool = False  # each of its values is a whole trace, or several
    keys: frozenset[str] = frozenset()  # keys whose values an item binds
    is_deep: bool = False  # below `**`, which also tries what holds none of its keys
    has_unit_items: bool = False  # so is each item along the axis N of its value
    is_found: bool = False  # a file had a value there

    def child(self, step: Step) -> "Node":
        """Return the node behind a step, a new one if there is none."""
        for known, node in self.children:
            if known == step:
                return node
        node = Node(f"{self.prefix}{step.text}/", is_deep=self.is_deep or isinstance(step, DeepStep))
        if isinstance(step, ItemsStep):
            node.keys = frozenset(value_of.path[0] for value_of in step.values)
        self.children.append((step, node))
        return node

    @property
    def has_records(self) -> bool:
        """Return whether items of `records` end here."""
        return any(place.name == RECORDS for place in self.leaves)


def tree_of(text: str, places: Iterable[Place], ignored: Iterable[Address], states: list[Place]) -> Node:
    """Return the root of the paths of the places whose FILES are `text`."""
    root = Node(f"{text} : ")
    for place in places:
        if place.address.files.text == text:
            is_cut = bool(set(place.address.files.names) & set(AXIS_NAMES) or place.crossed)
            node, has_unit = root, False
            for step in place.address.path:
                node = node.child(step)
                names = set(step.names) | ({step.letter} if isinstance(step, ItemsStep) else set())
                is_cut |= bool(names & {*AXIS_NAMES, *"LSTGPHDE"})
                if place in states and len(states) == 1 and not is_cut and not has_unit and _tells_traces(step):
                    node.is_unit = has_unit = True
            node.leaves.append(place)
            if place in states and len(states) == 1 and not is_cut and not has_unit:
                node.has_unit_items = place.axes[:1] == ("N",)
    for address in ignored:
        if address.files.text == text:
            node = root
            for step in address.path:
                node = node.child(step)
            node.ignores = True
    return root


def _tells_traces(step: Step) -> bool:
    if isinstance(step, ItemsStep):
        return step.letter in (None, "N", "K", "chunk")
    return bool(step.names) or (isinstance(step, KeyStep) and "*" in step.text)


def leads_to_unit(node: Node) -> bool:
    """Return whether items of the traces lie at or below a node."""
    return node.is_unit or node.has_unit_items or any(leads_to_unit(child) for _, child in node.children)


def column_names(items: Sequence[tuple[Step, Node]]) -> set[str]:
    """Return the names of the columns that items bind, or that lie below them."""
    bound = {v.path[0] for step, _ in items if isinstance(step, ItemsStep) for v in step.values} - {"#"}
    return bound | {step.text for _, child in items for step, _ in child.children if isinstance(step, KeyStep)}
