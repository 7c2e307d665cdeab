"""Zip archives with inconsistent headers, directories or entries."""

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator

from tests.malicious_inputs.files.case import Case
from tests.malicious_inputs.files.containers import FOUR_HALVES, Entry, archive, pt_entries, sequences, storage, tensor

BIG = 0xFFFFFFFF


def base() -> list[Entry]:
    """Return the entries data.pkl, byteorder, data/0 and version."""
    return pt_entries(sequences(), {"0": FOUR_HALVES})


def changed(at: int, **change: object) -> bytes:
    """Return an archive with changed attributes of one entry."""
    entries = base()
    for name, value in change.items():
        setattr(entries[at], name, value)
    return archive(entries)


def headers() -> Iterator[Case]:
    """Yield local and central headers of the pickle and of a storage that differ in one field."""
    for at, entry in ((0, "pickle"), (2, "storage")):
        for field, value in {
            "name": b"archive/data/1",
            "method": 8,
            "flags": 1,
            "crc": 7,
            "packed": 3,
            "full": 9,
        }.items():
            for side in ("local", "central"):
                yield Case(f"zip_{entry}_{side}_{field}", ".pt", changed(at, **{side: {field: value}}))
        size = len(base()[at].data)
        both = {"packed": size + 1000, "full": size + 1000}
        yield Case(f"zip_{entry}_both_sizes", ".pt", changed(at, local=both, central=both))
        yield Case(
            f"zip_{entry}_size_4g",
            ".pt",
            changed(at, local={"packed": BIG - 1, "full": BIG - 1}, central={"packed": BIG - 1, "full": BIG - 1}),
        )
        for name, extra in {
            "wrong": struct.pack("<HHQQ", 1, 16, 1 << 62, 1 << 62),
            "short": struct.pack("<HHI", 1, 4, 1),
            "absent": b"",
            "negative": struct.pack("<HHQQ", 1, 16, (1 << 64) - 1, (1 << 64) - 1),
            "overlong": struct.pack("<HH", 1, 0xFFFF),
        }.items():
            yield Case(
                f"zip64_{entry}_{name}", ".pt", changed(at, central={"packed": BIG, "full": BIG, "extra": extra})
            )
        for name, flags in {"encrypted": 1, "patched": 32, "strong": 64, "masked": 1 << 13}.items():
            yield Case(f"zip_{entry}_{name}", ".pt", changed(at, flags=flags), None)
        for method in (1, 8, 9, 12, 14, 93, 99):
            yield Case(f"zip_{entry}_method_{method}", ".pt", changed(at, method=method))
        for name, offset in {"end": 1 << 20, "far": BIG - 1, "other": 0 if at else 200, "middle": 17}.items():
            yield Case(f"zip_{entry}_offset_{name}", ".pt", changed(at, offset=offset))
    for name, descriptor in {
        "zero": b"PK\7\x08" + bytes(12),
        "crc": b"PK\7\x08" + struct.pack("<III", 1, 8, 8),
        "size": b"PK\7\x08" + struct.pack("<III", zlib.crc32(FOUR_HALVES), 9, 8),
        "wide_size": b"PK\7\x08" + struct.pack("<IQQ", zlib.crc32(FOUR_HALVES), 8, 1 << 40),
        "absent": b"",
    }.items():
        yield Case(f"zip_descriptor_{name}", ".pt", changed(2, descriptor=descriptor, flags=8))


def directories() -> Iterator[Case]:
    """Yield directories that are missing, inconsistent or name unexpected entries."""
    good = archive(base())
    at = good.rindex(b"PK\5\6")
    begin = struct.unpack_from("<I", good, at + 16)[0]
    yield Case("zip_no_directory", ".pt", good[:begin])
    yield Case("zip_no_end", ".pt", good[:at])
    yield Case("zip_nothing_but_magic", ".pt", b"PK\3\4")
    yield Case("zip_empty", ".pt", b"PK\3\4" + bytes(30) + archive([]))
    for field, values in {"count": (0, 3, 5, 0xFFFF), "size": (0, 10, BIG), "begin": (0, 10, BIG - 1, BIG)}.items():
        for value in values:
            yield Case(f"zip_end_{field}_{value:x}", ".pt", archive(base(), end={field: value}))
    yield Case("zip_prefix_before", ".pt", b"PK\3\4" + bytes(60) + good)
    yield Case("zip_comment_hides_a_second", ".pt", good[:-2] + struct.pack("<H", 22) + b"PK\5\6" + bytes(18))
    entries = base()
    twin = Entry(entries[0].name, b"\x80\x02N.")
    yield Case("zip_pickle_twice", ".pt", archive([*entries, twin]), "twice")
    yield Case("zip_pickle_twice_first", ".pt", archive([twin, *entries]), "twice")
    yield Case("zip_storage_twice", ".pt", archive([*entries, Entry(entries[2].name, bytes(8))]), "twice")
    yield Case("zip_two_pickles", ".pt", archive([*entries, Entry(b"other/data.pkl", entries[0].data)]))
    yield Case("zip_pickle_at_the_top_too", ".pt", archive([*entries, Entry(b"data.pkl", entries[0].data)]))
    yield Case("zip_no_pickle", ".pt", archive(entries[1:]))
    yield Case("zip_no_storage", ".pt", archive([entries[0], entries[3]]), "storage")
    for order in (b"big", b"", b"little\n", b"LITTLE", b"little!", b"\0" * 8):
        yield Case(f"zip_byteorder_{order.hex()}", ".pt", changed(1, data=order), "order")
    for name, path in {
        "parent": b"../data.pkl/..",
        "nul": b"archive/data/0\0x",
        "case": b"archive/DATA/0",
        "backslash": b"archive\\data\\0",
        "dot": b"archive/./data/0",
    }.items():
        word = "one that torch writes" if name == "nul" else "storage"
        yield Case(f"zip_name_{name}", ".pt", changed(2, name=path), word)
    yield Case(
        "zip_key_traversal",
        ".pt",
        archive(pt_entries(sequences(tensor(storage("../data.pkl", 4))), {"0": FOUR_HALVES})),
        "storage",
    )
    yield Case(
        "zip_key_absolute",
        ".pt",
        archive(pt_entries(sequences(tensor(storage("/etc/passwd", 4))), {"0": FOUR_HALVES})),
        "storage",
    )
    for size in (1 << 10, 64 << 20):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as packed:
            for entry in base():
                packed.writestr(entry.name.decode(), entry.data)
            packed.writestr("archive/data/1", bytes(size))
        yield Case(f"zip_bomb_deflated_{size}", ".pt", out.getvalue(), "compressed")
    many = [Entry(b"archive/data/%d" % k, b"", offset=None) for k in range(1, 20_000)]
    yield Case("zip_many_entries", ".pt", archive([*base(), *many], align=1)[:-1])
    shared = [Entry(b"archive/data/%d" % k, FOUR_HALVES, offset=0) for k in range(1, 5_000)]
    yield Case("zip_all_entries_at_one_offset", ".pt", archive([*base(), *shared], align=1))
    yield Case("zip_of_numpy", ".pt", archive([Entry(b"hidden.npy", b"\x93NUMPY"), Entry(b"x.npy", bytes(10))]))
    yield Case("zip_torchscript", ".pt", archive([*base(), Entry(b"archive/constants.pkl", b"\x80\x02).")])[:-1])
    overlapping = base()
    inner = (
        b"PK\3\4"
        + struct.pack("<5H3I2H", 20, 0, 0, 0, 0x21, zlib.crc32(FOUR_HALVES), 8, 8, 14, 0)
        + b"archive/data/0"
        + FOUR_HALVES
    )
    overlapping[3] = Entry(b"archive/version", inner)
    overlapping[2].offset = archive(overlapping).index(inner)
    yield Case("zip_entry_inside_another", ".pt", archive(overlapping))


GROUPS = (headers, directories)
