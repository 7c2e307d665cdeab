"""Answer requests about HDF5 files with h5py: data inside the file only, by the filters that every build of HDF5 has.

It runs in the process of `hdf5_process`.
"""

import math
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.files.limits import max_inflated
from tracestore.ingest.files.npy import check_dtype
from tracestore.ingest.readers.hdf5_process import Answer, serve

MAX_TEXT_BYTES = 16 << 20
_MAX_DEPTH = 32
_MAX_OBJECTS = 2_000_000
# A chunk is inflated as a whole.
_MAX_CHUNK_BYTES = 64 << 20
_PART_BYTES = 16 << 20  # of an array, which are read and sent together
_PAGE_BYTES = 1 << 20  # of values of variable length
_PAGE_ROWS = 4096
_LIST_ROWS = 4096
# deflate, shuffle, fletcher32, szip, nbit, scaleoffset; LZF, which h5py contains. Others are plugins: libraries that
# HDF5 would load from a folder.
_FILTERS = frozenset((1, 2, 3, 4, 5, 6, 32000))


def open_file(path: Path) -> Any:
    """Open a file with h5py; raise InvalidInputError if it is damaged."""
    try:
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        raise InvalidInputError(f"truncated or damaged HDF5 file: {' '.join(str(error).split())[:200]}") from None


class Groups:
    """The groups of one file, each of which is listed by one path only."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._paths: dict[Any, str] = {}
        self._texts = 0

    def child(self, group: Any, name: str) -> Any:
        """Return an object of a group after checking that it is in this file; None for a named type."""
        link = group.get(name, getlink=True)
        if not isinstance(link, h5py.HardLink):
            raise InvalidInputError(
                f"found {'an external' if isinstance(link, h5py.ExternalLink) else 'a soft'} link, "
                "expected data in this file; copy it with h5copy or h5repack",
                field=name[:60],
            )
        child = group[name]
        if isinstance(child, h5py.Datatype):
            return None
        if isinstance(child, h5py.Group):
            info = h5py.h5o.get_info(child.id)
            if self._paths.setdefault((info.fileno, info.addr), child.name) != child.name:
                raise InvalidInputError("found a group twice", field=name[:60])
            if len(self._paths) > _MAX_OBJECTS:
                raise InvalidInputError(f"found more than {_MAX_OBJECTS:,} groups")
        return child

    def attributes(self, item: Any) -> dict[str, Any]:
        """Return the attributes of a group or array that hold texts and real numbers, as JSON has them."""
        values = {}
        for name in item.attrs:
            attribute = item.attrs.get_id(name)
            if attribute.shape is None or name.startswith("DIMENSION_"):
                continue  # without a value; names of axes and their scales
            if h5py.check_string_dtype(attribute.dtype) is None and attribute.dtype.kind not in "biuf":
                continue  # complex numbers; references between objects, as netCDF and pandas write them
            self._texts += attribute.get_storage_size()
            value = item.attrs[name]
            if isinstance(value, np.ndarray) and value.dtype.kind == "O":
                self._texts += sum(len(text) for text in value.flat)
            if self._texts > MAX_TEXT_BYTES + self._size:
                raise InvalidInputError("attributes that exceed the file many times", field=name[:60])
            values[name] = _plain(value)
        return values


def _plain(value: Any) -> Any:
    value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def check_dataset(dataset: Any) -> None:
    """Raise InvalidInputError if reading an array would leave the file or exceed memory."""
    create = dataset.id.get_create_plist()
    if dataset.is_virtual or dataset.external:
        raise InvalidInputError("found an array whose values are in other files; copy it into this one with h5repack")
    filters = {create.get_filter(k)[0] for k in range(create.get_nfilters())}
    if filters - _FILTERS:
        raise InvalidInputError(
            f"compressed by filter {min(filters - _FILTERS)}, a plugin that is not loaded; use h5repack -f GZIP=4"
        )
    if dataset.shape is None:
        raise InvalidInputError("found an empty array without a shape")
    dtype = dataset.dtype
    if dtype.kind == "O":
        if h5py.check_string_dtype(dtype) is None and h5py.check_vlen_dtype(dtype) is None:
            raise InvalidInputError("found references to objects, expected numbers or texts")
    elif any(map(h5py.check_enum_dtype, (dtype, *(dtype[field] for field in dtype.names or ())))):
        raise InvalidInputError("found numbers that stand for names, expected numbers or texts")
    else:
        check_dtype(dataset.name, dtype)
    stored = dataset.id.get_storage_size()
    if math.prod(dataset.shape) * dtype.itemsize > max_inflated(stored):
        raise InvalidInputError(f"found shape {dataset.shape} in {stored:,} bytes, too many values for them")
    if dataset.chunks is not None and math.prod(dataset.chunks) * dtype.itemsize > _MAX_CHUNK_BYTES:
        raise InvalidInputError(
            f"found chunks {dataset.chunks}, expected at most {_MAX_CHUNK_BYTES >> 20} MiB each; use h5repack"
        )


def parts_of(dataset: Any, selection: tuple[Any, ...], shape: list[int]) -> Iterator[np.ndarray]:
    """Yield the values of a selection of all axes, which have this shape, in parts along the first axis that it keeps."""
    if not math.prod(shape):
        return
    if not shape:
        yield np.asarray(dataset[selection], dataset.dtype)
        return
    axis = next(k for k, part in enumerate(selection) if isinstance(part, slice))
    first = selection[axis].start
    chunk = 1 if dataset.chunks is None else dataset.chunks[axis]
    row_bytes = math.prod(shape[1:]) * dataset.dtype.itemsize
    rows = max(1, _PART_BYTES // (row_bytes * chunk)) * chunk
    if rows * row_bytes > _MAX_CHUNK_BYTES:
        rows = max(1, _MAX_CHUNK_BYTES // row_bytes)
    for begin in range(first, first + shape[0], rows):
        end = min(begin + rows, first + shape[0])
        yield np.asarray(dataset[(*selection[:axis], slice(begin, end), *selection[axis + 1 :])])


def page_of(dataset: Any, begin: int, end: int) -> list[Any]:
    """Return values of variable length from `begin` on: at least one, and as many as fit into a page.

    Values may share their bytes in the file. The number that is read at once follows the size of those before.
    """
    values: list[Any] = []
    size, step = 0, 16
    while begin < end and size < _PAGE_BYTES and len(values) < _PAGE_ROWS:
        stop = min(end, begin + step)
        try:
            part = dataset[begin:stop]
        except (OSError, RuntimeError, MemoryError):
            if step == 1:
                raise
            step = max(1, step // 8)
            continue
        values += list(part)
        largest = max((size_of(value) for value in part), default=0)
        size += sum(map(size_of, part))
        begin, step = stop, max(1, min(_PAGE_ROWS, 4 * step, _PAGE_BYTES // (largest + 1)))
    return values


def size_of(value: Any) -> int:
    """Return the bytes of a value of variable length."""
    if isinstance(value, np.ndarray):
        return value.nbytes if value.dtype.kind != "O" else sum(map(size_of, value.flat))
    return len(value)


def text_of(value: Any, name: str) -> Any:
    """Return bytes as text, also in nested arrays."""
    if isinstance(value, np.ndarray):
        return [text_of(item, name) for item in value]
    try:
        return value if isinstance(value, str) else value.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidInputError("found bytes that are not UTF-8 text", field=name[:60]) from None


def _description(dtype: np.dtype) -> Any:
    """Return the text of a dtype, or names, texts and shapes of the fields of records."""
    if dtype.names is None:
        return dtype.str
    return [(name, dtype[name].base.str, dtype[name].shape) for name in dtype.names]


class _Server:
    """Answer requests about one file at a time."""

    def __init__(self) -> None:
        self._file: Any = None
        self._groups = Groups(0)
        self._names: Iterator[str] = iter(())  # of the group that is being listed

    def answer(self, request: dict[str, Any]) -> Answer:
        """Return the answer to a request, and the arrays whose bytes follow it."""
        if "open" in request:
            path = Path(request["open"])
            self._file, self._groups = open_file(path), Groups(os.stat(path).st_size)
            return {}, iter(())
        if "close" in request:
            self._file.close()
            return {}, iter(())
        path = request["path"]
        item = self._file[path]
        if "list" in request:
            return self._list(item, request["list"]), iter(())
        if "attributes" in request:
            return {"attributes": self._groups.attributes(item)}, iter(())
        if "rows" in request:
            return self._rows(item, path, *request["rows"])
        selection = tuple(slice(*k) if isinstance(k, list) else k for k in request["selection"])
        shape = [part.stop - part.start for part in selection if isinstance(part, slice)]
        arrays = parts_of(item, selection, shape)
        if item.dtype.names:  # without the gaps that the fields may have in the file
            packed = np.dtype(_description(item.dtype))
            arrays = (array.astype(packed) for array in arrays)
        return {"shape": shape}, arrays

    def _list(self, group: Any, begin: int) -> dict[str, Any]:
        if group.name.count("/") > _MAX_DEPTH:
            raise InvalidInputError("groups nested deeper than those of a trace file", field=group.name[:60])
        if begin == 0:
            self._names = iter(group)
        names = list(islice(self._names, _LIST_ROWS))
        children = ((name, self._groups.child(group, name)) for name in names)
        entries = [[name, *self._entry(child)] for name, child in children if child is not None]
        return {"entries": entries, "next": begin + len(names) if len(names) == _LIST_ROWS else None}

    def _entry(self, child: Any) -> tuple[Any, ...]:
        """Return kind, shape and dtype of an object of a group."""
        if isinstance(child, h5py.Group):
            return ("group",)
        try:
            check_dataset(child)
        except InvalidInputError as error:
            return ("refused", error.reason)
        if child.dtype.kind == "O":  # values of variable length: texts or lists
            return "items", child.shape
        return "array", child.shape, _description(child.dtype)

    def _rows(self, dataset: Any, name: str, begin: int, end: int) -> Answer:
        values = page_of(dataset, begin, end) if dataset.shape else [dataset[()]]
        if h5py.check_string_dtype(dataset.dtype) is not None:
            return {"texts": [text_of(value, name) for value in values]}, iter(())
        arrays = [np.asarray(value) for value in values]
        if any(array.dtype.kind not in "biufc" or array.ndim != 1 for array in arrays):
            raise InvalidInputError("found nested lists of variable length, expected numbers", field=name[:60])
        return {"sizes": [array.size for array in arrays], "dtype": arrays[0].dtype.str}, iter(arrays)


if __name__ == "__main__":
    serve(_Server().answer)
