"""Read files of torch.save as data: the zip archive and the legacy stream."""

import struct
import zipfile
from collections.abc import Callable
from typing import IO, Any, cast

from tracestore._core.mapping import MappedFile
from tracestore._core.pickle import BufferReader
from tracestore.errors import InvalidInputError
from tracestore.ingest.files.byte_source import MappedStream
from tracestore.ingest.files.npy import ZIP_ENTRY
from tracestore.ingest.pickles.pickle_reader import pickle_reader
from tracestore.ingest.pickles.pickled_torch import PickledStorage, StorageType

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
MAX_ENTRIES = 10_000_000
_BIT_DESCRIPTOR = 8
_BIT_UTF8 = 0x800  # names are UTF-8
_KNOWN_FLAGS = _BIT_DESCRIPTOR | _BIT_UTF8
_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ZIP64_COUNT = 0xFFFF  # the real count is in the zip64 record
_ZIP64_SIZE = 0xFFFFFFFF  # the real size is in an extra field


def _entries(mapped: MappedFile) -> dict[str, memoryview]:
    """Return the bytes of every entry by name, after comparing local and central headers."""
    view = memoryview(mapped)
    try:
        infos = zipfile.ZipFile(cast(IO[bytes], MappedStream(mapped))).infolist()
    except (zipfile.BadZipFile, ValueError, struct.error, OSError, NotImplementedError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"truncated or damaged .pt archive: {error}") from None
    if len(infos) > MAX_ENTRIES:
        raise InvalidInputError("the archive has more entries than a trace file")
    if len(infos) != _num_entries(view):
        raise InvalidInputError(
            "damaged .pt archive: the number of entries in its directory differs from the recorded one"
        )
    entries: dict[str, memoryview] = {}
    free = 0  # smallest offset at which the next entry may begin
    for info in sorted(infos, key=lambda info: info.header_offset):
        entry = f"entry {info.filename[:100]!r}"
        if info.filename in entries:
            raise InvalidInputError(f"{entry} appears twice")
        if info.flag_bits & ~_KNOWN_FLAGS or info.filename != info.orig_filename:
            raise InvalidInputError(f"{entry} is not one that torch writes")
        if info.header_offset < free or (free == 0 and info.header_offset != 0):
            raise InvalidInputError(f"{entry} overlaps another entry or unknown data")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise InvalidInputError(f"{entry} is compressed; torch stores entries uncompressed")
        begin, free = _entry_bytes(view, info, entry)
        entries[info.filename] = view[begin:free]
    return entries


def _entry_bytes(view: memoryview, info: zipfile.ZipInfo, entry: str) -> tuple[int, int]:
    """Return where the bytes of an entry begin and end; InvalidInputError if its two headers differ."""
    begin = info.header_offset
    if begin < 0 or begin + ZIP_ENTRY.size > len(view):
        raise InvalidInputError("an entry is outside the archive")
    magic, _, flags, method, _, _, crc, size, full, name_bytes, extra = ZIP_ENTRY.unpack_from(view, begin)
    name = bytes(view[begin + ZIP_ENTRY.size : begin + ZIP_ENTRY.size + name_bytes])
    data = begin + ZIP_ENTRY.size + name_bytes + extra
    same = magic == b"PK\x03\x04" and flags == info.flag_bits and method == info.compress_type
    if not same or name != info.orig_filename.encode("utf-8" if flags & _BIT_UTF8 else "cp437"):
        raise InvalidInputError(f"{entry}: its two headers differ")
    end = data + info.file_size
    if end > len(view):
        raise InvalidInputError(f"truncated: {entry} ends beyond the file")
    if flags & _BIT_DESCRIPTOR:
        _check_descriptor(view, end, info)
    elif crc != info.CRC or (size, full) not in ((info.file_size, info.file_size), (_ZIP64_SIZE, _ZIP64_SIZE)):
        raise InvalidInputError(f"{entry}: its two headers differ")
    return data, end


def _num_entries(view: memoryview) -> int:
    """Return the number of entries in the end record, which torch writes without a comment; -1 if there is none."""
    end = bytes(view[-_END.size :])
    count = _END.unpack(end)[4] if len(end) == _END.size and end[:4] == b"PK\5\6" and end[-2:] == b"\0\0" else -1
    if count != _ZIP64_COUNT:
        return int(count)
    locator = bytes(view[-_END.size - _LOCATOR.size : -_END.size])
    if len(locator) == _LOCATOR.size and locator[:4] == b"PK\6\7":
        offset = _LOCATOR.unpack(locator)[2]
        record = bytes(view[offset : offset + _END64.size])
        if len(record) == _END64.size and record[:4] == b"PK\6\6":
            return int(_END64.unpack(record)[7])
    return count


def _check_descriptor(view: memoryview, end: int, info: zipfile.ZipInfo) -> None:
    """Compare the data descriptor after an entry with the directory."""
    body = bytes(view[end : end + 24])
    if body[:4] == b"PK\x07\x08":
        body = body[4:]
    wide = body[:20] == struct.pack("<IQQ", info.CRC, info.file_size, info.file_size)
    narrow = info.file_size < 1 << 32 and body[:12] == struct.pack("<III", info.CRC, info.file_size, info.file_size)
    if not wide and not narrow:
        raise InvalidInputError(f"entry {info.filename[:100]!r}: its data descriptor differs from the directory")


def _storage_key(key: Any) -> tuple[StorageType, str, int]:
    """Return type, key and numel of the persistent id ('storage', type, key, location, numel, ...)."""
    match key:
        case tuple(("storage", StorageType() as kind, str() as name, _, int() as numel, *_)) if numel >= 0:
            return kind, name, numel
    raise InvalidInputError("found a persistent id that is not a torch storage")


def _add_storage(storages: dict[str, PickledStorage], name: str, storage: PickledStorage) -> PickledStorage:
    """Return the storage of that name, which all persistent ids must describe alike."""
    known = storages.setdefault(name, storage)
    if known.dtype != storage.dtype or known.numel != storage.numel:
        raise InvalidInputError(f"storage {name[:40]!r} is described in two ways")
    return known


def open_zip(mapped: MappedFile) -> tuple[memoryview, Callable[[Any], PickledStorage]]:
    """Return the pickle in a zip archive, and what loads its storages: byte ranges of the mapped file."""
    entries = _entries(mapped)
    pickles = [name for name in entries if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise InvalidInputError(f"not a zip archive of torch.save: found {len(pickles)} data.pkl, expected one")
    prefix = pickles[0].removesuffix("data.pkl")
    order = entries.get(f"{prefix}byteorder")
    if order is not None and bytes(order[:8]) != b"little":
        raise InvalidInputError(f"byte order {bytes(order[:8])!r}, expected little")
    storages: dict[str, PickledStorage] = {}

    def load(key: Any) -> PickledStorage:
        kind, name, numel = _storage_key(key)
        data = entries.get(f"{prefix}data/{name}")
        if data is None:
            raise InvalidInputError(f"storage {name[:40]!r} is not in the archive")
        storage = _add_storage(storages, name, PickledStorage(kind.dtype, numel, data))
        if storage.num_bytes != len(data):
            raise InvalidInputError(f"storage {name[:40]!r}: found {len(data):,} bytes, expected {storage.num_bytes:,}")
        return storage

    return entries[pickles[0]], load


def is_legacy(view: memoryview) -> bool:
    """Return whether the bytes start with the magic number of a legacy torch file."""
    head = bytes(view[:32])
    magic = LEGACY_MAGIC.to_bytes(10, "little")
    return b"\x8a\x0a" + magic in head


def read_legacy(view: Any) -> Any:
    """Return the object in a legacy torch stream.

    The stream holds magic number, protocol, system, object, storage keys and storages.
    """
    source = BufferReader(view)
    storages: dict[str, PickledStorage] = {}

    def load(key: Any) -> PickledStorage:
        kind, name, numel = _storage_key(key)
        if len(key) > 5 and key[5] is not None:
            raise InvalidInputError("found a view of a storage, which only very old torch files have")
        if kind.dtype is None:
            raise InvalidInputError("found an untyped storage in a legacy torch file")
        return _add_storage(storages, name, PickledStorage(kind.dtype, numel))

    magic = pickle_reader(source).load()
    if type(magic) is not int or magic != LEGACY_MAGIC:
        raise InvalidInputError("not a legacy torch file")
    protocol = pickle_reader(source).load()
    if type(protocol) is not int or protocol != 1001:
        raise InvalidInputError("found a torch protocol other than 1001")
    system = pickle_reader(source).load()
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise InvalidInputError("found a torch file that is not little-endian")
    result = pickle_reader(source, persistent_load=load).load()
    keys = pickle_reader(source).load()
    if not isinstance(keys, list) or not all(type(k) is str for k in keys) or len(keys) != len(set(keys)):
        raise InvalidInputError("found a legacy torch file without its storage keys")
    for name in keys:
        storage = storages.get(name)
        if storage is None or storage.data is not None:
            raise InvalidInputError("found a storage that no tensor uses")
        count = int.from_bytes(source.read(8), "little")
        if count != storage.numel:
            raise InvalidInputError(f"storage {name[:40]!r}: found {count:,} elements, expected {storage.numel:,}")
        storage.data = source.read(storage.num_bytes)
    if any(storage.data is None for storage in storages.values()):
        raise InvalidInputError("truncated: a tensor's storage is not in the file")
    if not source.is_eof():
        raise InvalidInputError("trailing bytes after the last storage")
    return result


def load_bytes(data: Any) -> Any:
    """Return the storage in a legacy torch file held in bytes, as torch.storage._load_from_bytes does."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InvalidInputError("found a torch storage that is not bytes")
    result = read_legacy(data)
    if not isinstance(result, PickledStorage):
        raise InvalidInputError(f"found {type(result).__name__} instead of a torch storage")
    return result
