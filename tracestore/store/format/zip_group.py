"""Zarr groups of small arrays in one file: a ZIP archive without compression, which can be mapped.

zarr-python and tensorstore open such an archive as a Zarr v3 group. Each array is one-dimensional and
one uncompressed chunk, ``<name>/c/0``, that begins at a multiple of 64 bytes; an array without items
has no chunk. The archive has no comment, no ZIP64 records and constant times.
"""

import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tracestore._core.mapping import MappedFile
from tracestore.errors import escape_unprintable
from tracestore.store.format.ragged import decode_strings
from tracestore.store.format.zarr_json import group_metadata, small_array_metadata

_ALIGN = 64
# An extra field that holds padding only; readers skip fields that they do not know.
_PADDING_ID = 0xD935
_EXTRA = struct.Struct("<HH")
_END = struct.Struct("<IHHHHIIH")
_DIRECTORY = struct.Struct("<IHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_END_MAGIC, _DIRECTORY_MAGIC, _LOCAL_MAGIC = 0x06054B50, 0x02014B50, 0x04034B50
_VERSION, _MADE_BY = 20, 3 << 8 | 20  # of ZIP: needed to extract; of a file of Unix
_DATE = 1 << 5 | 1  # 1980-01-01
_ATTRIBUTES = 0o444 << 16  # read by all
_MAX_OFFSET = (1 << 32) - 1
_MAX_METADATA_BYTES = 1 << 16  # of the zarr.json of an array


def pack_group(arrays: Mapping[str, np.ndarray], attributes: Mapping[str, Any]) -> bytes:
    """Return the archive of a group of one-dimensional arrays.

    Raises
    ------
    ValueError
        If the archive would exceed 4 GiB.
    """
    files: dict[str, Any] = {"zarr.json": group_metadata(dict(attributes))}
    for name, array in arrays.items():
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        files[f"{name}/zarr.json"] = small_array_metadata(array.size, array.dtype)
        if array.size:
            files[f"{name}/c/0"] = array.reshape(-1).view("u1").data
    return _archive(files)


def _archive(files: Mapping[str, Any]) -> bytes:
    """Return a ZIP archive of files, with the bytes of the module zipfile, which takes five times as long."""
    parts, directory, at = list[Any](), list[bytes](), 0
    for name, data in files.items():
        encoded = name.encode("ascii")
        padding = -(at + _LOCAL.size + len(encoded) + _EXTRA.size + 4) % _ALIGN + 4  # tensorstore refuses one of 0
        extra = _EXTRA.pack(_PADDING_ID, padding) + bytes(padding)
        facts = _VERSION, 0, 0, 0, _DATE, zlib.crc32(data), len(data), len(data), len(encoded), len(extra)
        entry = _DIRECTORY.pack(_DIRECTORY_MAGIC, _MADE_BY, *facts, 0, 0, 0, _ATTRIBUTES, at)
        directory.append(entry + encoded + extra)
        parts += _LOCAL.pack(_LOCAL_MAGIC, *facts), encoded, extra, data
        at += _LOCAL.size + len(encoded) + len(extra) + len(data)
        if at > _MAX_OFFSET:
            raise ValueError("more than 4 GiB of small arrays in one file")
    size = sum(map(len, directory))
    end = _END.pack(_END_MAGIC, 0, 0, len(files), len(files), size, at, 0)
    return b"".join([*parts, *directory, end])


class ZipGroup:
    """A mapped group, with arrays of exactly the names and dtypes of `dtypes`.

    `views` holds zero-copy arrays for code of the core, which reads them under its SIGBUS guard. `read`
    and `strings` return copies and raise CorruptStoreError if the file was truncated after it was mapped.
    The directory is validated here, the metadata of an array on its first use, contents where they are used.

    Parameters
    ----------
    mapped : MappedFile
    dtypes : Mapping
        Name -> dtype string.
    optional : frozenset
        Names that may be absent.

    Raises
    ------
    ValueError
        If the archive is not valid.
    """

    def __init__(self, mapped: MappedFile, dtypes: Mapping[str, str], optional: frozenset[str] = frozenset()) -> None:
        self.mapped, self._dtypes = mapped, dtypes
        self._entries = _directory(mapped)
        names = {name.partition("/")[0] for name in self._entries} - {"zarr.json"}
        expected = {"zarr.json", *(f"{name}/zarr.json" for name in names)}
        if wrong := (names - dtypes.keys()) | (dtypes.keys() - optional - names):
            raise ValueError(f"the arrays are not those of this format: {sorted(wrong)}")
        if not expected <= self._entries.keys() <= expected | {f"{name}/c/0" for name in names}:
            raise ValueError("the files are not those of this format")
        self.names = frozenset(names)
        self._views: dict[str, np.ndarray[Any, Any]] = {}

    def attributes(self) -> Any:
        """Return the attributes of the group.

        Raises
        ------
        ValueError
            If its zarr.json is not that of a group.
        """
        document = json.loads(self._bytes("zarr.json", len(self.mapped)))
        found = document.pop("attributes", None)
        if document != {"zarr_format": 3, "node_type": "group"} or not isinstance(found, dict):
            raise ValueError("zarr.json: not the metadata of a group")
        return found

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def _bytes(self, path: str, max_bytes: int) -> bytes:
        offset, size = self._entries[path]
        if size > max_bytes:
            raise ValueError(f"{path}: {size} bytes")
        return self.mapped.read(offset, offset + size)

    def view(self, name: str) -> np.ndarray[Any, Any]:
        """Return an array without a copy, for code that reads it under the guard.

        Raises
        ------
        ValueError
            If the metadata of the array is not that of this format.
        """
        found = self._views.get(name)
        if found is None:
            dtype = np.dtype(self._dtypes[name])
            offset, size = self._entries.get(f"{name}/c/0", (0, 0))
            metadata = self._bytes(f"{name}/zarr.json", _MAX_METADATA_BYTES)
            expected = small_array_metadata(size // dtype.itemsize, dtype)
            if metadata != expected and json.loads(metadata) != json.loads(expected):
                raise ValueError(f"{name}: not the metadata of this array")
            if size % dtype.itemsize or offset % dtype.itemsize:
                raise ValueError(f"{name}: {size} bytes of {dtype} at {offset}")
            found = self._views[name] = np.frombuffer(memoryview(self.mapped), dtype, size // dtype.itemsize, offset)
        return found

    def views(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return all arrays without a copy; see view()."""
        return {name: self.view(name) for name in self.names}

    def num_items(self, name: str) -> int:
        """Return the number of items of an array."""
        return len(self.view(name))

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray[Any, Any]:
        """Return a copy of the items `begin` to `end` of an array; raise ValueError if they are out of bounds."""
        view = self.view(name)
        end = len(view) if end is None else end
        if not 0 <= begin <= end <= len(view):
            raise ValueError(f"{name}: items {begin} to {end} of {len(view)}")
        if begin == end:
            return np.zeros(0, view.dtype)
        offset, size = self._entries[f"{name}/c/0"][0], view.itemsize
        return np.frombuffer(self.mapped.read(offset + begin * size, offset + end * size), view.dtype)

    def strings(self, name: str, begin: int, end: int) -> list[str]:
        """Return the strings `begin` to `end` of a ragged array; raise ValueError if they are invalid."""
        if begin > end:
            raise ValueError(f"{name}_offsets: items {begin} to {end}")
        offsets = self.read(f"{name}_offsets", begin, end + 1)
        first, last = int(offsets[0]), int(offsets[-1])
        if not 0 <= first <= last <= self.num_items(name):
            raise ValueError(f"{name}_offsets: out of bounds")
        return decode_strings(self.read(name, first, last), offsets - first)


def _directory(mapped: MappedFile) -> dict[str, tuple[int, int]]:
    """Return offset and size of each file of an archive in the form that pack_group writes."""
    size = len(mapped)
    if size < _END.size:
        raise ValueError("not a ZIP archive, or truncated")
    magic, disk, first_disk, here, count, directory_size, begin, comment = _END.unpack(
        mapped.read(size - _END.size, size)
    )
    if magic != _END_MAGIC or disk or first_disk or here != count or comment:
        raise ValueError("not a ZIP archive, or truncated")
    if begin + directory_size + _END.size != size:
        raise ValueError("the ZIP directory does not end the file")
    directory = mapped.read(begin, begin + directory_size)
    entries: dict[str, tuple[int, int]] = {}
    at = 0
    for _ in range(count):
        named = at + _DIRECTORY.size
        if named > directory_size:
            raise ValueError("the ZIP directory is truncated")
        magic, _, _, flags, method, _, _, _, stored, length, name_size, extra, note, _, _, _, local = (
            _DIRECTORY.unpack_from(directory, at)
        )
        name = directory[named : named + name_size].decode("ascii", "replace")
        at = named + name_size + extra + note
        if magic != _DIRECTORY_MAGIC or flags or method or stored != length or name in entries:
            raise ValueError(f"{escape_unprintable(name, 80)}: not a plain file in a ZIP archive")
        data = local + _LOCAL.size
        if data > begin:
            raise ValueError("a file of the ZIP archive is beyond its directory")
        header = _LOCAL.unpack(mapped.read(local, data))
        if header[0] != _LOCAL_MAGIC:
            raise ValueError("a file of the ZIP archive has no header")
        data += header[9] + header[10]
        if data + length > begin:
            raise ValueError(f"{escape_unprintable(name, 80)}: beyond the archive")
        entries[name] = data, length
    if at != directory_size:
        raise ValueError("the ZIP directory has other entries")
    return entries
