"""Gzip members, zip archives and torch streams, written so that each field can be wrong."""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from isal import isal_zlib

from tests.malicious_inputs.files.case import call, dct, glob, lst, num, nums, tup, uni, whole

MAGIC = 0x1950A86A20F9469CFC6C
REBUILD = glob("torch._utils", "_rebuild_tensor_v2")
NO_HOOKS = glob("collections", "OrderedDict") + b")R"


def gz(data: bytes, *, level: int = 1, flags: int = 0, crc: int | None = None, size: int | None = None) -> bytes:
    packer = zlib.compressobj(level, zlib.DEFLATED, -15)
    body = packer.compress(data) + packer.flush()
    size = len(data) if size is None else size
    tail = struct.pack("<II", zlib.crc32(data) if crc is None else crc, size & 0xFFFFFFFF)
    return b"\x1f\x8b\x08%c\0\0\0\0\0\xff" % flags + body + tail


def gz_bomb(head: bytes, unit: bytes, count: int, tail: bytes = b"") -> bytes:
    """Return a gzip file of head, `count` units and tail, without compressing all units."""
    each = max(1, (1 << 20) // len(unit))
    chunk = unit * each
    rest = unit * (count % each)

    def deflate(data: bytes, flush: int) -> bytes:
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        return packer.compress(data) + packer.flush(flush)

    # After a full flush the output refers to nothing before it, and can be repeated.
    body = deflate(head, zlib.Z_FULL_FLUSH) + deflate(chunk, zlib.Z_FULL_FLUSH) * (count // each)
    body += deflate(rest + tail, zlib.Z_FINISH)
    crc = zlib.crc32(head)
    for _ in range(count // each):
        crc = isal_zlib.crc32(chunk, crc)
    crc = zlib.crc32(rest + tail, crc)
    size = len(head) + count * len(unit) + len(tail)
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + body + struct.pack("<II", crc, size & 0xFFFFFFFF)


@dataclass
class Entry:
    """A zip entry. `local` and `central` override fields of one header only."""

    name: bytes
    data: bytes
    method: int = 0
    flags: int = 0
    local: dict[str, object] = field(default_factory=dict)
    central: dict[str, object] = field(default_factory=dict)
    descriptor: bytes | None = None
    # Offset in the central directory; None for the real one.
    offset: int | None = None


def archive(entries: list[Entry], *, end: dict[str, int] | None = None, align: int = 64) -> bytes:
    """Return a zip archive as torch writes it: uncompressed entries, data aligned by an extra field."""
    out, directory = bytearray(), bytearray()
    for entry in entries:
        size = len(entry.data)
        header = {"crc": zlib.crc32(entry.data), "packed": size, "full": size, "name": entry.name}
        header |= {"method": entry.method, "flags": entry.flags}
        local, central = header | entry.local, header | entry.central
        begin = len(out)
        at = begin + 30 + len(entry.name)
        extra = b"FB" + struct.pack("<H", (-(at + 4)) % align) + b"Z" * ((-(at + 4)) % align)
        sizes = [0 if entry.descriptor is not None else local[field] for field in ("crc", "packed", "full")]
        lengths = len(local["name"]), len(extra)
        out += struct.pack("<4s5H", b"PK\3\4", 20, local["flags"], local["method"], 0, 0x21)
        out += struct.pack("<3I2H", *sizes, *lengths) + local["name"] + extra + entry.data + (entry.descriptor or b"")
        more = central.get("extra", b"")
        directory += struct.pack("<4s6H", b"PK\1\2", 20, 20, central["flags"], central["method"], 0, 0x21)
        directory += struct.pack("<3I", central["crc"], central["packed"], central["full"])
        directory += struct.pack("<5H", len(central["name"]), len(more), 0, 0, 0)
        directory += struct.pack("<2I", 0, begin if entry.offset is None else entry.offset) + central["name"] + more
    tail = {"count": len(entries), "size": len(directory), "begin": len(out)} | (end or {})
    closing = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, tail["count"], tail["count"], tail["size"], tail["begin"], 0)
    return bytes(out + directory + closing)


def storage(key: str, numel: int, kind: str = "HalfStorage", module: str = "torch") -> bytes:
    return tup(uni("storage"), glob(module, kind), uni(key), uni("cpu"), num(numel)) + b"Q"


def tensor(store: bytes, size: Sequence[int] = (2, 1, 2), stride: Sequence[int] = (2, 2, 1), offset: int = 0) -> bytes:
    return call(REBUILD, store, num(offset), nums(*size), nums(*stride), b"\x89", NO_HOOKS)


def sequences(value: bytes | None = None, **changes: bytes) -> bytes:
    """Return a dict of sequences: two traces of one layer and two columns in storage 0."""
    value = value or tensor(storage("0", 4))
    valid = {
        "sequences": value,
        "labels": lst(b"G" + bytes(8), b"G\x3f\xf0" + bytes(6)),
        "question_ids": lst(uni("a"), uni("b")),
    }
    return dct(**(valid | changes))


def pt_entries(value: bytes, storages: dict[str, bytes], prefix: str = "archive") -> list[Entry]:
    entries = [
        Entry(f"{prefix}/data.pkl".encode(), b"\x80\x02" + value + b"."),
        Entry(b"%s/byteorder" % prefix.encode(), b"little"),
    ]
    entries += [Entry(f"{prefix}/data/{k}".encode(), v) for k, v in storages.items()]
    return [*entries, Entry(f"{prefix}/version".encode(), b"3\n")]


FOUR_HALVES = b"\x00\x3c" * 4


def pt(value: bytes | None = None, storages: dict[str, bytes] | None = None) -> bytes:
    return archive(pt_entries(value or sequences(), {"0": FOUR_HALVES} if storages is None else storages))


def legacy(
    value: bytes,
    storages: dict[str, bytes] | None = None,
    *,
    keys: bytes | None = None,
    counts: dict[str, int] | None = None,
    item_bytes: int = 2,
    system: bytes | None = None,
    protocol: int = 1001,
) -> bytes:
    """Return a file as of torch.save(..., _use_new_zipfile_serialization=False)."""
    storages = {"0": FOUR_HALVES} if storages is None else storages
    out = b"\x80\x02\x8a\x0a" + MAGIC.to_bytes(10, "little") + b"." + b"\x80\x02" + num(protocol) + b"."
    out += system or b"\x80\x02" + dct(protocol_version=num(1001), little_endian=b"\x88", type_sizes=b"}") + b"."
    out += b"\x80\x02" + value + b"." + (keys or whole(lst(*(uni(k) for k in storages))))
    for key, data in storages.items():
        out += struct.pack("<q", (counts or {}).get(key, len(data) // item_bytes)) + data
    return out


def legacy_storage(key: str, numel: int, kind: str = "HalfStorage", view: bytes = b"N") -> bytes:
    return tup(uni("storage"), glob("torch", kind), uni(key), uni("cpu"), num(numel), view) + b"Q"


def legacy_sequences() -> bytes:
    return sequences(tensor(legacy_storage("0", 4)))


DATA = glob("torch_geometric.data.data", "Data")
GLOBAL_STORAGE = glob("torch_geometric.data.storage", "GlobalStorage")


def new(target: bytes) -> bytes:
    return target + b")\x81"


def graph_fields(**changes: bytes) -> bytes:
    """Return the fields of a graph: x (2, 2), one edge 0 -> 1."""
    valid = {
        "x": tensor(storage("x", 4), (2, 2), (2, 1)),
        "edge_index": tensor(storage("i", 2, "LongStorage"), (2, 1), (1, 1)),
        "edge_attr": tensor(storage("w", 1), (1, 1), (1, 1)),
    }
    return dct(**(valid | changes))


GRAPH_STORAGES = {"x": FOUR_HALVES, "i": struct.pack("<2q", 0, 1), "w": b"\x00\x3c"}


def graph(mapping: bytes | None = None) -> bytes:
    """Return a PyG Data. Memo entry 200 is the Data itself, which real files refer to."""
    store = new(GLOBAL_STORAGE) + dct(_mapping=mapping or graph_fields(), _parent=b"h\xc8") + b"b"
    return new(DATA) + b"q\xc8" + dct(_store=store) + b"b"


def graphs(layer: bytes | None = None, **changes: bytes) -> bytes:
    return dct(**({"graphs": lst(lst(layer or graph())), "question_ids": lst(uni("a"))} | changes))
