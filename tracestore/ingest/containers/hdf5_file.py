"""Read HDF5 files with h5py: arrays inside the file only, with the filters that every build of HDF5 has.

It runs in the process of `hdf5_process`.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.columns import Column, Unit
from tracestore.ingest.containers.grouping import natural_key
from tracestore.ingest.containers.keys import GROUPS_OF_TRACES, LISTS_OF_LAYERS, SECTIONS, is_step, locate
from tracestore.ingest.files.byte_source import INFLATE_ALLOWANCE_BYTES, MAX_INFLATE_RATIO
from tracestore.ingest.files.npy import DTYPE_KINDS, check_dtype

_MAX_DEPTH = 8
_MAX_OBJECTS = 2_000_000
_MAX_FIELDS = 100_000  # of one trace, or of a stack of traces
_MAX_SPLITS = 16
# A chunk is inflated as a whole.
_MAX_CHUNK_BYTES = 256 << 20
_MAX_TEXT_BYTES = 16 << 20
_PART_BYTES = 16 << 20  # of an array, which are read and sent together
# deflate, shuffle, fletcher32, szip, nbit, scaleoffset; LZF, which h5py contains. Others are plugins: libraries that
# HDF5 would load from a folder.
_FILTERS = frozenset((1, 2, 3, 4, 5, 6, 32000))
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
        extents = [k.stop - k.start for k in selection if isinstance(k, slice)]
        return (*extents, *self.shape[len(selection) :])

    def parts(self, selection: tuple[Any, ...]) -> Iterator[np.ndarray]:
        """Yield the values at a row, or in slices of the first axes, in parts along their first axis."""
        shape = self.shape_of(selection)
        if not math.prod(shape):
            return
        if not shape:
            yield np.asarray(self._dataset[selection], self.dtype)
            return
        axis = 0 if selection and isinstance(selection[0], slice) else len(selection)
        first = selection[0].start if axis == 0 and selection else 0
        chunk = self._chunks[axis] if self._chunks is not None and axis < len(self._chunks) else 1
        row_bytes = math.prod(shape[1:]) * self.dtype.itemsize
        rows = max(1, _PART_BYTES // (row_bytes * chunk)) * chunk
        for begin in range(first, first + shape[0], rows):
            end = min(begin + rows, first + shape[0])
            yield self._dataset[(*selection[:axis], slice(begin, end), *selection[axis + 1 :])]


def groups_of_file(path: Path) -> Iterator[Unit]:
    """Yield the arrays and values of each group that holds a trace or several, by their names below the group."""
    import h5py

    try:
        file = h5py.File(path, "r", locking=False)
    except OSError as error:
        raise InvalidInputError(f"truncated or damaged HDF5 file: {' '.join(str(error).split())[:200]}") from None
    with file:
        yield from _Reader(h5py, path).groups(file)


class _Reader:
    """The groups of one file."""

    def __init__(self, h5py: Any, path: Path) -> None:
        self._h5py, self._size = h5py, path.stat().st_size
        self._seen: set[Any] = set()
        self._texts = 0

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
        shared = self._attributes(group)
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
        children = {}
        for name in group:
            link = group.get(name, getlink=True)
            if not isinstance(link, self._h5py.HardLink):
                raise InvalidInputError(
                    f"found {'an external' if isinstance(link, self._h5py.ExternalLink) else 'a soft'} link, "
                    "expected data in this file; copy it with h5copy or h5repack",
                    field=name[:60],
                )
            child = group[name]
            if isinstance(child, self._h5py.Datatype):
                continue
            info = self._h5py.h5o.get_info(child.id)
            if isinstance(child, self._h5py.Group):
                if (info.fileno, info.addr) in self._seen:
                    raise InvalidInputError("found a group twice", field=name[:60])
                self._seen.add((info.fileno, info.addr))
                if len(self._seen) > _MAX_OBJECTS:
                    raise InvalidInputError(f"found more than {_MAX_OBJECTS:,} groups")
            children[name] = child
        return children

    def _flatten(self, group: Any, children: dict[str, Any], prefix: str, depth: int) -> dict[str, Any]:
        """Return the arrays and attributes of a group, and of the groups in it, by path."""
        fields = {prefix + name: value for name, value in self._attributes(group).items()}
        for name, child in children.items():
            path = prefix + name
            if "pandas_type" in child.attrs:
                fields |= self._frame(child, path, fields.get("question_ids"))
            elif isinstance(child, self._h5py.Group):
                fields |= self._flatten(child, self._children(child, depth + 1), f"{path}/", depth + 1)
            else:
                fields |= self._columns(child, path)
                if locate(path) is None and len(child.shape or ()) > 1:  # an array with the name of a trace
                    fields |= {f"{path}/{key}": value for key, value in self._attributes(child).items()}
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

    def _attributes(self, group: Any) -> dict[str, Any]:
        """Return the attributes that hold texts and numbers."""
        values = {}
        for name in group.attrs:
            attribute = group.attrs.get_id(name)
            if attribute.shape is None:
                continue  # without a value
            if self._h5py.check_string_dtype(attribute.dtype) is None and attribute.dtype.kind not in DTYPE_KINDS:
                continue  # references between objects, as netCDF and pandas write them
            self._texts += attribute.get_storage_size()
            if self._texts > _MAX_TEXT_BYTES + self._size:
                raise InvalidInputError("attributes that exceed the file many times", field=name[:60])
            value = group.attrs[name]
            values[name] = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        return values

    def _columns(self, dataset: Any, name: str) -> dict[str, HDF5Column]:
        """Return an array, or the fields of one of a compound type, by name.

        Raises
        ------
        InvalidInputError
            If reading it would leave this file or exceed memory.
        """
        create = dataset.id.get_create_plist()
        if dataset.is_virtual or dataset.external:
            raise InvalidInputError(
                "found an array whose values are in other files; copy it into this one with h5repack", field=name[:60]
            )
        filters = {create.get_filter(k)[0] for k in range(create.get_nfilters())}
        if filters - _FILTERS:
            raise InvalidInputError(
                f"compressed by filter {min(filters - _FILTERS)}, a plugin that is not loaded; use h5repack -f GZIP=4",
                field=name[:60],
            )
        if dataset.shape is None:
            raise InvalidInputError("found an empty array without a shape", field=name[:60])
        dtype = dataset.dtype
        if dtype.kind == "O":
            if self._h5py.check_string_dtype(dtype) is None and self._h5py.check_vlen_dtype(dtype) is None:
                raise InvalidInputError("found references to objects, expected numbers or texts", field=name[:60])
        else:
            check_dtype(name[:60], dtype)
        stored = dataset.id.get_storage_size()
        if math.prod(dataset.shape) * dtype.itemsize > stored * MAX_INFLATE_RATIO + INFLATE_ALLOWANCE_BYTES:
            raise InvalidInputError(
                f"found shape {dataset.shape} in {stored:,} bytes, too many values for them", field=name[:60]
            )
        if dataset.chunks is not None and math.prod(dataset.chunks) * dtype.itemsize > _MAX_CHUNK_BYTES:
            raise InvalidInputError(
                f"found chunks {dataset.chunks}, expected at most {_MAX_CHUNK_BYTES >> 20} MiB each; use h5repack",
                field=name[:60],
            )
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
    value = dataset[selection]
    if isinstance(value, bytes):
        value = _text(value, name)
    elif isinstance(value, np.ndarray) and value.dtype.kind == "O":
        if not all(isinstance(item, bytes) for item in value.flat):
            raise InvalidInputError("found a list of arrays for one trace, expected numbers or texts", field=name[:60])
        texts = [_text(item, name) for item in value.flat]
        if sum(map(len, texts)) > _MAX_TEXT_BYTES or max(map(len, texts), default=0) * len(texts) > _MAX_TEXT_BYTES:
            raise InvalidInputError(f"found texts of more than {_MAX_TEXT_BYTES:,} characters", field=name[:60])
        value = np.array(texts, dtype=str).reshape(value.shape)
    return np.asarray(value)


def _text(value: bytes, name: str) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidInputError("found bytes that are not UTF-8 text", field=name[:60]) from None
