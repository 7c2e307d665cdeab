"""torch.save files: the zip archive of today and the legacy stream, as data."""

import io
import struct
import zipfile
from typing import Any

from tracestore._core.mapping import MappedFile
from tracestore._core.pickle import BufferReader
from tracestore.errors import InvalidInputError
from tracestore.ingest import pickled_values
from tracestore.ingest.pickle_reader import pickle_reader

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
MAX_ENTRIES = 10_000_000
_LOCAL = struct.Struct("<4s5H3I2H")
_BIT_DESCRIPTOR = 8
_KNOWN_FLAGS = _BIT_DESCRIPTOR | 0x800  # 0x800: names are utf-8
_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ZIP64_COUNT = 0xFFFF  # the number then stands in a record of its own
_ZIP64 = 0xFFFFFFFF  # the size then stands in an extra field


class _Window(io.RawIOBase):
    """A seekable, read-only file over a map, for the central directory."""

    def __init__(self, mapped: MappedFile) -> None:
        self._mapped, self._position = mapped, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._position, len(self._mapped))[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, out: Any) -> int:
        size = len(self._mapped)
        piece = self._mapped.read(min(self._position, size), min(self._position + len(out), size))
        out[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)


def _entries(mapped: MappedFile) -> dict[str, memoryview]:
    """Name -> bytes of every stored entry, local headers checked against the central ones."""
    view = memoryview(mapped)
    try:
        infos = zipfile.ZipFile(_Window(mapped)).infolist()
    except (zipfile.BadZipFile, ValueError, struct.error, OSError, NotImplementedError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"truncated or damaged .pt archive: {error}") from None
    if len(infos) > MAX_ENTRIES:
        raise InvalidInputError("the archive has more entries than a file of traces")
    if len(infos) != _num_entries(view):
        raise InvalidInputError("damaged .pt archive: its directory has another number of entries than it says")
    entries: dict[str, memoryview] = {}
    free = 0  # where the next entry may begin
    for info in sorted(infos, key=lambda info: info.header_offset):
        if info.filename in entries:
            raise InvalidInputError(f"entry {info.filename[:100]!r} is there twice")
        if info.flag_bits & ~_KNOWN_FLAGS or info.filename != info.orig_filename:
            raise InvalidInputError(f"entry {info.filename[:100]!r} is not one that torch writes")
        if info.header_offset < free or (free == 0 and info.header_offset != 0):
            raise InvalidInputError(f"entry {info.filename[:100]!r} begins where another one or something else lies")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise InvalidInputError(f"entry {info.filename[:100]!r} is compressed, torch stores them")
        begin = info.header_offset
        if begin < 0 or begin + _LOCAL.size > len(view):
            raise InvalidInputError("an entry lies outside the archive")
        magic, _, flags, method, _, _, crc, size, full, name_bytes, extra = _LOCAL.unpack_from(view, begin)
        name = bytes(view[begin + _LOCAL.size : begin + _LOCAL.size + name_bytes])
        data = begin + _LOCAL.size + name_bytes + extra
        same = magic == b"PK\x03\x04" and flags == info.flag_bits and method == info.compress_type
        if not same or name != info.orig_filename.encode("utf-8" if flags & 0x800 else "cp437"):
            raise InvalidInputError(f"entry {info.filename[:100]!r}: its two headers differ")
        end = data + info.file_size
        if end > len(view):
            raise InvalidInputError(f"truncated: entry {info.filename[:100]!r} ends after the file")
        free = end
        if flags & _BIT_DESCRIPTOR:
            _check_descriptor(view, end, info)
        elif crc != info.CRC or (size, full) not in ((info.file_size, info.file_size), (_ZIP64, _ZIP64)):
            raise InvalidInputError(f"entry {info.filename[:100]!r}: its two headers differ")
        entries[info.filename] = view[data:end]
    return entries


def _num_entries(view: memoryview) -> int:
    """As the end of the archive says, which torch writes without a comment."""
    end = bytes(view[-_END.size :])
    count = _END.unpack(end)[4] if len(end) == _END.size and end[:4] == b"PK\5\6" and end[-2:] == b"\0\0" else -1
    if count != _ZIP64_COUNT:
        return int(count)
    locator = bytes(view[-_END.size - _LOCATOR.size : -_END.size])
    if len(locator) == _LOCATOR.size and locator[:4] == b"PK\6\7":
        at = _LOCATOR.unpack(locator)[2]
        record = bytes(view[at : at + _END64.size])
        if len(record) == _END64.size and record[:4] == b"PK\6\6":
            return int(_END64.unpack(record)[7])
    return count


def _check_descriptor(view: memoryview, end: int, info: zipfile.ZipInfo) -> None:
    body = bytes(view[end : end + 24])
    if body[:4] == b"PK\x07\x08":
        body = body[4:]
    wide = body[:20] == struct.pack("<IQQ", info.CRC, info.file_size, info.file_size)
    narrow = info.file_size < 1 << 32 and body[:12] == struct.pack("<III", info.CRC, info.file_size, info.file_size)
    if not wide and not narrow:
        raise InvalidInputError(f"entry {info.filename[:100]!r}: its data descriptor differs from the directory")


def _storage_key(key: Any) -> tuple[pickled_values.StorageType, str, int]:
    """('storage', type, key, location, numel, ...) of a persistent id, checked."""
    if (
        not isinstance(key, tuple)
        or len(key) < 5
        or key[0] != "storage"
        or not isinstance(key[1], pickled_values.StorageType)
        or not isinstance(key[2], str)
        or not isinstance(key[4], int)
        or key[4] < 0
    ):
        raise InvalidInputError("a persistent id that is not a torch storage")
    return key[1], key[2], key[4]


def read_zip(mapped: MappedFile) -> Any:
    """The object of a zip archive; its tensors are byte ranges of the map."""
    entries = _entries(mapped)
    pickles = [name for name in entries if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise InvalidInputError("a zip archive that torch.save did not write: no data.pkl")
    prefix = pickles[0].removesuffix("data.pkl")
    order = entries.get(f"{prefix}byteorder")
    if order is not None and bytes(order[:8]) != b"little":
        raise InvalidInputError(f"byte order {bytes(order[:8])!r}, expected little")
    storages: dict[str, pickled_values.PickledStorage] = {}

    def load(key: Any) -> pickled_values.PickledStorage:
        kind, name, numel = _storage_key(key)
        if name not in storages:
            data = entries.get(f"{prefix}data/{name}")
            if data is None:
                raise InvalidInputError(f"storage {name[:40]!r} is not in the archive")
            draft = pickled_values.PickledStorage(kind.dtype, numel, data)
            if draft.num_bytes != len(data):
                raise InvalidInputError(
                    f"storage {name[:40]!r}: {len(data):,} bytes where {draft.num_bytes:,} are needed"
                )
            storages[name] = draft
        if storages[name].dtype != kind.dtype or storages[name].numel != numel:
            raise InvalidInputError(f"storage {name[:40]!r} is described in two ways")
        return storages[name]

    source = BufferReader(entries[pickles[0]])
    result = pickle_reader(source, persistent_load=load).load()
    if not source.at_end():
        raise InvalidInputError("trailing bytes after the pickle")
    return result


def is_legacy(view: memoryview) -> bool:
    """Whether the bytes start with the magic number of a legacy torch file."""
    head = bytes(view[:32])
    magic = LEGACY_MAGIC.to_bytes(10, "little")
    return b"\x8a\x0a" + magic in head


def read_legacy(view: Any) -> Any:
    """The object of a legacy torch stream: magic, protocol, system, object, keys, storages."""
    source = BufferReader(view)
    storages: dict[str, pickled_values.PickledStorage] = {}

    def load(key: Any) -> pickled_values.PickledStorage:
        kind, name, numel = _storage_key(key)
        if len(key) > 5 and key[5] is not None:
            raise InvalidInputError("a view of a storage, as only very old torch files have")
        if kind.dtype is None:
            raise InvalidInputError("an untyped storage in a legacy torch file")
        draft = storages.setdefault(name, pickled_values.PickledStorage(kind.dtype, numel))
        if draft.dtype != kind.dtype or draft.numel != numel:
            raise InvalidInputError(f"storage {name[:40]!r} is described in two ways")
        return draft

    magic = pickle_reader(source).load()
    if type(magic) is not int or magic != LEGACY_MAGIC:
        raise InvalidInputError("not a legacy torch file")
    protocol = pickle_reader(source).load()
    if type(protocol) is not int or protocol != 1001:
        raise InvalidInputError("another torch protocol than 1001")
    system = pickle_reader(source).load()
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise InvalidInputError("a torch file of a big-endian machine")
    result = pickle_reader(source, persistent_load=load).load()
    keys = pickle_reader(source).load()
    if not isinstance(keys, list) or not all(type(k) is str for k in keys) or len(keys) != len(set(keys)):
        raise InvalidInputError("a legacy torch file without its storage keys")
    for name in keys:
        draft = storages.get(name)
        if draft is None or draft.data is not None:
            raise InvalidInputError("a storage that no tensor uses")
        count = int.from_bytes(source.read(8), "little")
        if count != draft.numel:
            raise InvalidInputError(f"storage {name[:40]!r}: {count:,} elements where {draft.numel:,} are named")
        draft.data = source.read(draft.num_bytes)
    if any(draft.data is None for draft in storages.values()):
        raise InvalidInputError("truncated: a tensor's storage is not in the file")
    if not source.at_end():
        raise InvalidInputError("trailing bytes after the last storage")
    return result


def load_bytes(data: Any) -> Any:
    """torch.storage._load_from_bytes, one level deep: the tensor's storage."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InvalidInputError("a torch storage that is not bytes")
    result = read_legacy(data)
    if not isinstance(result, pickled_values.PickledStorage):
        raise InvalidInputError(f"found {type(result).__name__} in place of a torch storage")
    return result
