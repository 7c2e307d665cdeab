"""Dumps whose meaning is known: their files as values, their layout and the expected traces."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tests.ingest.corpus.changed.files import Opaque, read_file, write_file
from tracestore.ingest.layout.addresses import ItemsStep, KeyStep
from tracestore.ingest.layout.language import parse_layout
from tracestore.ingest.layout.patterns import Pattern
from tracestore.ingest.layout.places import plan_of


@dataclass(eq=False)
class Slot:
    """The place of a value: the container that holds it, its key, what the layout binds there, and its axes."""

    file: str
    parent: object
    key: object
    bound: dict
    axes: tuple

    @property
    def value(self):
        """The value."""
        return self.parent[self.key]

    def put(self, value):
        """Put another value here; return whether the container can be changed."""
        if isinstance(self.parent, tuple | Opaque):
            return False
        self.parent[self.key] = value
        return True

    def array(self):
        """Return the value as an array of numbers, None for another."""
        return array_of(self.value)

    def set(self, array):
        """Put an array here, in the type that the value has."""
        return self.put(like(self.value, array))


def array_of(value):
    """Return a tensor, an array, or nested lists of them as an array of numbers; None for another value."""
    if isinstance(value, list | tuple):
        parts = [array_of(item) if not isinstance(item, bool | int | float) else np.asarray(item) for item in value]
        is_array = bool(parts) and all(part is not None and part.shape == parts[0].shape for part in parts)
        return np.stack(parts) if is_array else None
    if hasattr(value, "detach"):
        if "strided" not in str(value.layout):
            return None
        value = (value.float() if "bfloat16" in str(value.dtype) else value).detach().numpy()
    return value if isinstance(value, np.ndarray) and value.ndim and value.dtype.kind in "biuf" else None


def like(old, array):
    """Return an array as the type of another value: a tensor, an array, or lists of them."""
    if isinstance(old, list | tuple):
        inner = old[0] if len(old) else 0
        items = [like(inner, part) for part in array]
        return tuple(items) if type(old) is tuple else items
    if hasattr(old, "detach"):
        import torch

        return torch.from_numpy(np.ascontiguousarray(array))
    if isinstance(old, bool | int | float):
        return array.item()
    return array


@dataclass
class Dump:
    """A folder: values by file name, the layout, and the traces that it means."""

    name: str
    files: dict
    layout: dict
    expected: list
    layers: list | None = None  # their numbers in the model, where names say them

    @classmethod
    def of_folder(cls, name, folder, layout, expected):
        """Return the dump of a folder that a kind of the corpus wrote."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        return cls(name, {p.relative_to(folder).as_posix(): read_file(p) for p in paths}, dict(layout), expected)

    def write(self, folder):
        """Write the files."""
        folder.mkdir()
        for name, value in self.files.items():
            write_file(folder / name, value)

    @cached_property
    def plan(self):
        """The plan of the layout."""
        return plan_of(parse_layout(self.layout))

    def states(self):
        """Return the slots of the states."""
        return self.slots(self.plan.layout.states)

    def slots(self, name):
        """Return the slots of a field, those of all its addresses."""
        found = []
        for place in self.plan.places:
            if place.name == name:
                for file in self.owned(place):
                    match = Pattern(place.address.files.text, is_path=True).match(file)
                    found += _below(file, self.files, file, place.address.path, dict(match.bound), place.axes)
        return found

    def owned(self, place):
        """Return the names of the files of a place: each belongs to the pattern with most literal characters."""
        own = Pattern(place.address.files.text, is_path=True)
        rivals = [Pattern(text, is_path=True) for text in self.plan.files if text != own.text]
        better = [rival for rival in rivals if rival.num_literals > own.num_literals]
        return [n for n in self.files if own.match(n) and not any(rival.match(n) for rival in better)]

    def tables(self):
        """Return (file, rows, is_by_name) of tables whose rows are joined to the states."""
        found = {}
        states = {place.address.files.text for place in self.plan.states}
        for place in self.plan.others:
            step = place.address.path[0] if place.address.path else None
            if place.address.files.text in states or not isinstance(step, ItemsStep) or place.rule.kind == "known":
                continue
            for file in self.owned(place):
                rows = self.files[file]
                if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
                    is_by_name = step.letter is None and not any(value_of.path == ("#",) for value_of in step.values)
                    found[file] = (file, rows, is_by_name)
        return list(found.values())


def _below(file, parent, key, steps, bound, axes):
    value = parent[key]
    if not steps:
        yield Slot(file, parent, key, bound, axes)
        return
    step, rest = steps[0], steps[1:]
    if isinstance(value, Opaque):
        return
    if isinstance(step, KeyStep) and isinstance(value, dict) and len(step.parts) == 1:
        for inner in list(value):
            if not isinstance(inner, tuple) and (match := step.parts[0].match(str(inner))):
                yield from _below(file, value, inner, rest, {**bound, **match.bound}, axes)
    elif isinstance(step, ItemsStep) and isinstance(value, list | tuple):
        for k, item in enumerate(value):
            names = {step.letter: k} if step.letter else {}
            if isinstance(item, dict):
                for value_of in step.values:
                    found = item.get(value_of.path[0])
                    match = value_of.pattern and value_of.pattern.match(str(found))
                    names |= match.bound if match else {value_of.name: found}
            yield from _below(file, value, k, rest, {**bound, **names}, axes)
