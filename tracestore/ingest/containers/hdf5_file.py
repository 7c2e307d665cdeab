"""Read HDF5 files with h5py: arrays inside the file only, with the filters that every build of HDF5 has.

It runs in the process of `hdf5_process`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.columns import Column, Unit
from tracestore.ingest.containers.grouping import natural_key
from tracestore.ingest.containers.keys import GROUPS_OF_TRACES, LISTS_OF_LAYERS, SECTIONS, is_step, locate
from tracestore.ingest.readers.hdf5_server import (
    MAX_TEXT_BYTES,
    Groups,
    check_dataset,
    open_file,
    page_of,
    parts_of,
    shape_of,
    size_of,
    text_of,
)

_MAX_DEPTH = 8
_MAX_FIELDS = 100_000  # of one trace, or of a stack of traces
_MAX_SPLITS = 16
# The arrays of a frame of pandas with one type, and of a series.
_MEMBERS = {"frame": ("block0_values", "axis1"), "series": ("values", "index")}
_OF_PANDAS = "found a table of pandas that is no array of numbers below a name; save it with DataFrame.to_parquet"


class HDF5Column(Column):
    """An array of a file, read in parts."""

    def __init__(self, dataset: Any, name: str, field: str | None = None) -> None:
        self._name, self._chunks = name, dataset.chunks
        self._dataset = dataset if field is None else dataset.fields(field)  # of a compound type
        dtype = dataset.dtype if field is None else dataset.dtype[field]
        self.shape, self.dtype = (*dataset.shape, *dtype.shape), dtype.base

    def objects(self, selection: tuple[Any, ...]) -> np.ndarray:
        """Return texts, or the values of variable length at one position; `selection` is () or a row."""
        return _objects(self._dataset, selection, self._name)

    def shape_of(self, selection: tuple[Any, ...]) -> tuple[int, ...]:
        """Return the shape of the values at a row, or in slices of the first axes."""
        return shape_of(self.shape, selection)

    def parts(self, selection: tuple[Any, ...]) -> Iterator[np.ndarray]:
        """Yield the values at a row, or in slices of the first axes, in parts along their first axis."""
        return parts_of(self._dataset, self.shape, selection, self.dtype, self._chunks)


def groups_of_file(path: Path) -> Iterator[Unit]:
    """Yield the arrays and values of each group that holds a trace or several, by their names below the group."""
    import h5py

    with open_file(path) as file:
        yield from _Reader(h5py, path).groups(file)


class _Reader:
    """The groups of one file."""

    def __init__(self, h5py: Any, path: Path) -> None:
        self._h5py, self._groups = h5py, Groups(path.stat().st_size)

    def groups(self, group: Any, trace: str = "", depth: int = 0) -> Iterator[Unit]:
        """Yield a group with arrays of a trace or of a stack of traces, or the groups in it that have them."""
        children = self._children(group, depth)
        if "pandas_type" in group.attrs:
            raise InvalidInputError(
                f"{_OF_PANDAS}, or write a key such as layer_8 for each layer", field=group.name[:60]
            )
        groups = [name for name, child in children.items() if isinstance(child, self._h5py.Group)]
        is_section = [name.lower() in SECTIONS for name in groups]
        is_unit = any(_is_of_unit(name) for name in children) or all(is_section) or sum(is_section) > 1
        if is_unit:
            yield Unit(self._flatten(group, children, "", depth), trace)
            return
        shared = self._groups.attributes(group)
        for name, child in children.items():
            if not isinstance(child, self._h5py.Group):
                shared |= self._columns(child, name)
        is_first, is_stack = True, self._are_stacks(children)
        for name in sorted(children, key=natural_key):
            child = children.pop(name)
            if isinstance(child, self._h5py.Group):
                inner = trace if name.lower() in GROUPS_OF_TRACES else "/".join(filter(None, (trace, name)))
                for unit in self.groups(child, inner, depth + 1):
                    if is_first or any(isinstance(v, Column) and v.dtype.kind == "f" for v in unit.fields.values()):
                        unit.fields, unit.is_stack = shared | unit.fields, unit.is_stack or is_stack
                        yield unit
                        is_first = False

    def _are_stacks(self, children: dict[str, Any]) -> bool:
        """Return whether groups, such as splits, hold stacks of traces: columns as long as the states next to them.

        A stack of one trace is recognized by the others.
        """
        groups = [child for child in children.values() if isinstance(child, self._h5py.Group)]
        if not 1 < len(groups) <= _MAX_SPLITS:
            return False
        lengths: list[int] = []
        for group in groups:
            # Ids of tokens are as many as the states of one trace.
            if any((key := locate(name)) is not None and key.field == "tokens" for name in group):
                return False
            shapes = [child.shape for child in group.values() if isinstance(child, self._h5py.Dataset) and child.shape]
            sizes, ranks = {shape[0] for shape in shapes}, {len(shape) > 1 for shape in shapes}
            if len(sizes) != 1 or ranks != {False, True}:
                return False
            lengths += sizes
        return max(lengths) > 1

    def _children(self, group: Any, depth: int) -> dict[str, Any]:
        """Return the objects of a group by name after checking that all of them are in this file."""
        if depth > _MAX_DEPTH:
            raise InvalidInputError("groups nested deeper than those of a trace file", field=group.name[:60])
        children = {name: self._groups.child(group, name) for name in group}
        return {name: child for name, child in children.items() if child is not None}

    def _flatten(self, group: Any, children: dict[str, Any], prefix: str, depth: int) -> dict[str, Any]:
        """Return the arrays and attributes of a group, and of the groups in it, by path."""
        fields = {prefix + name: value for name, value in self._groups.attributes(group).items()}
        for name, child in children.items():
            path = prefix + name
            if "pandas_type" in child.attrs:
                fields |= self._frame(child, path, fields.get("question_ids"))
            elif isinstance(child, self._h5py.Group):
                fields |= self._flatten(child, self._children(child, depth + 1), f"{path}/", depth + 1)
            else:
                fields |= self._columns(child, path)
                if locate(path) is None and len(child.shape or ()) > 1:  # an array with the name of a trace
                    fields |= {f"{path}/{key}": value for key, value in self._groups.attributes(child).items()}
            if len(fields) > _MAX_FIELDS:
                raise InvalidInputError(f"found more than {_MAX_FIELDS:,} arrays in one group", field=group.name[:60])
        return fields

    def _frame(self, group: Any, name: str, ids: Any) -> dict[str, Any]:
        """Return the values of a frame or series of pandas (`to_hdf`), and its index of texts as ids; all have one index."""
        kind = bytes(group.attrs["pandas_type"]).decode("utf-8", "replace")
        values, index = _MEMBERS.get(kind, ("", ""))
        children = self._children(group, _MAX_DEPTH)
        arrays = [children.get(member) for member in (values, index)]
        if "block1_values" in children or not all(isinstance(array, self._h5py.Dataset) for array in arrays):
            raise InvalidInputError(_OF_PANDAS, field=name[:60])
        found = self._columns(children[values], name)
        if children[index].dtype.kind == "S":
            found |= self._columns(children[index], "question_ids")
            if ids is not None and not np.array_equal(ids.objects(()), found["question_ids"].objects(())):
                raise InvalidInputError("found another index than that of the frame before", field=name[:60])
        return found

    def _columns(self, dataset: Any, name: str) -> dict[str, HDF5Column]:
        """Return an array, or the fields of one of a compound type, by name.

        Raises
        ------
        InvalidInputError
            If reading it would leave this file or exceed memory.
        """
        check_dataset(dataset, name)
        dtype = dataset.dtype
        if not dtype.names:
            return {name: HDF5Column(dataset, name)}
        prefix = name.rpartition("/")[0]
        return {f"{prefix}/{field}".lstrip("/"): HDF5Column(dataset, name, field) for field in dtype.names}


def _is_of_unit(name: str) -> bool:
    """Return whether the name of an object in a group is that of a part of a trace."""
    is_part = is_step(name) or LISTS_OF_LAYERS.fullmatch(name) is not None or name.lower() in ("prompt", "prefill")
    return is_part or locate(name) is not None


def _objects(dataset: Any, selection: tuple[int, ...], name: str) -> np.ndarray:
    """Return texts as an array of str, or the values of variable length at one position."""
    if selection or not dataset.shape:
        value = dataset[selection]
    else:
        pages: list[Any] = []
        size = 0
        while len(pages) < dataset.shape[0]:
            page = page_of(dataset, len(pages), dataset.shape[0])
            pages += page
            size += sum(map(size_of, page))
            if size > MAX_TEXT_BYTES:
                raise InvalidInputError(f"found texts of more than {MAX_TEXT_BYTES:,} characters", field=name[:60])
        value = np.empty(len(pages), object)
        value[:] = pages
        value = np.array(pages, dtype=object).reshape(dataset.shape) if pages and len(dataset.shape) > 1 else value
    if isinstance(value, bytes):
        value = text_of(value, name)
    elif isinstance(value, np.ndarray) and value.dtype.kind == "O":
        if not all(isinstance(item, bytes) for item in value.flat):
            raise InvalidInputError("found a list of arrays for one trace, expected numbers or texts", field=name[:60])
        texts = [text_of(item, name) for item in value.flat]
        if sum(map(len, texts)) > MAX_TEXT_BYTES or max(map(len, texts), default=0) * len(texts) > MAX_TEXT_BYTES:
            raise InvalidInputError(f"found texts of more than {MAX_TEXT_BYTES:,} characters", field=name[:60])
        value = np.array(texts, dtype=str).reshape(value.shape)
    return np.asarray(value)
