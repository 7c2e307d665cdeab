"""Small files that would cost much memory, depth or time, and files of wrong length."""

import struct
from collections.abc import Iterator

from tests.malicious_inputs.files.case import (
    PROTO,
    Case,
    call,
    dct,
    dtype,
    glob,
    halves,
    lst,
    num,
    nums,
    raw,
    trace,
    traces,
    tup,
    uni,
    whole,
)
from tests.malicious_inputs.files.containers import (
    GRAPH_STORAGES,
    archive,
    graphs,
    gz,
    gz_bomb,
    legacy,
    legacy_sequences,
    pt,
    pt_entries,
)


def both(name: str, data: bytes, word: str | None = None) -> Iterator[Case]:
    """Yield the pickle plain and compressed."""
    yield Case(name, ".pkl", data, word)
    yield Case(f"{name}_in_gzip", ".pkl.gz", gz(data), word)


def deep() -> Iterator[Case]:
    """Yield nested containers, for recursion in reading, resolving, hashing and freeing."""
    for depth in (1_100, 30_000, 1_000_000):
        kinds = {
            "tuples": b")" + b"\x85" * depth,
            "lists": b"]" * depth + b"a" * (depth - 1),
            "dicts": b"}K\x00" * depth + b"N" + b"s" * depth,
            "marks": b"(" * depth + b"t" * depth,
            "mark_lists": b"(" * depth + b"l" * depth,
        }
        for kind, code in kinds.items():
            yield Case(f"deep_{kind}_{depth}", ".pkl", whole(code))
            if depth < 1_000_000:
                data, is_read = traces(trace(note=code)), kind in ("tuples", "lists")
                yield Case(f"deep_{kind}_{depth}_in_a_field", ".pkl", data, is_read=is_read)
        yield Case(f"deep_tuple_key_{depth}", ".pkl", whole(b"})" + b"\x85" * depth + b"Ns"))
        yield Case(f"deep_tuple_shape_{depth}", ".pkl", whole(glob("torch", "Size") + b")" + b"\x85" * depth + b"R"))
    yield Case(
        "deep_ordered_dicts",
        ".pkl",
        whole((glob("collections", "OrderedDict") + b")RK\x00") * 20_000 + b"N" + b"s" * 20_000),
    )
    yield Case(
        "deep_graph_parents",
        ".pkl",
        whole((glob("torch_geometric.data.data", "Data") + b")\x81}K\x00") * 5_000 + b"N" + b"sb" * 5_000),
    )


def laughs() -> Iterator[Case]:
    """Yield exponential sharing through the memo."""
    for kind, (start, step) in {
        "tuples": (b")q\x00", b"h%ch%c\x86q%c"),
        "lists": (b"]q\x00", b"](h%ch%ceq%c"),
        "dicts": (b"}q\x00", b"}(K\x01h%cK\x02h%cuq%c"),
    }.items():
        steps = b"".join(step % (k, k, k + 1) for k in range(64))
        value = start + steps
        yield from both(f"laughs_{kind}", whole(value))
        yield from both(f"laughs_{kind}_in_a_field", traces(trace(note=value)))
        yield Case(f"laughs_{kind}_in_tokens", ".pkl", traces(trace(tokens=value)), None)
        yield Case(f"laughs_{kind}_in_hidden", ".pkl", traces(trace(hidden_states=value)))
        yield Case(f"laughs_{kind}_in_decoded", ".pkl", traces(trace(tokens_decoded=value)))
        yield Case(f"laughs_{kind}_in_pt", ".pt", pt(dct(sequences=value, labels=value, question_ids=value), {}))
    text = uni("x" * 200) + b"q\x000"
    yield Case("laughs_of_text", ".pkl", whole(text + lst(trace(note=lst(*[b"h\x00"] * 300_000)))))
    big = raw(bytes(500_000)) + b"q\x000"
    yield Case("laughs_of_bytes", ".pkl", whole(big + lst(trace(note=lst(*[b"h\x00"] * 100_000)))))
    array = halves(64, 512) + b"q\x000"
    many = lst(*[b"h\x00"] * 100_000)
    yield Case("one_array_a_hundred_thousand_times", ".pkl", whole(array + lst(trace(hidden_states=many))))
    yield Case("one_array_in_a_field", ".pkl", whole(array + lst(trace(note=many))))
    # Each item is a valid trace; only their sum exceeds the limits.
    few = lst(*[b"h\x01"] * 100)
    heavy = trace(note=lst(num(1)) + b"q\x010" + few + b"q\x020" + lst(*[b"h\x02"] * 100)) + b"q\x00"
    yield Case("one_trace_two_thousand_times", ".pkl", whole(lst(heavy, *[b"h\x00"] * 2_000)))
    yield Case("one_trace_two_thousand_times_in_gzip", ".pkl.gz", gz(whole(lst(heavy, *[b"h\x00"] * 2_000))))
    every = b"".join(uni(f"k{k}") + b"h\x00" for k in range(5_000))
    yield Case("one_array_under_many_names", ".pkl", whole(array + lst(trace()[:-1] + every + b"u")))


def cycles() -> Iterator[Case]:
    """Yield containers that contain themselves."""
    values = {
        "list": b"]q\x00h\x00a",
        "dict": b"}q\x00K\x01h\x00s",
        "pair": b"]q\x00]q\x01h\x00aah\x01a",
        "tuple": b"]q\x01h\x01\x85a",
    }
    for name, value in values.items():
        yield Case(f"cycle_{name}", ".pkl", whole(value))
        yield Case(f"cycle_{name}_in_a_field", ".pkl", traces(trace(note=value)), is_read=name != "dict")
        yield Case(f"cycle_{name}_in_hidden", ".pkl", traces(trace(hidden_states=value)))
        yield Case(f"cycle_{name}_in_tokens", ".pkl", traces(trace(tokens=value)))
        yield Case(f"cycle_{name}_in_pt", ".pt", pt(dct(sequences=value, labels=b"]", question_ids=b"]"), {}))
        yield Case(f"cycle_{name}_in_graphs", ".pt", pt(graphs(graphs=value), {}))
    yield Case("root_holds_itself", ".pkl", whole(b"]q\x00h\x00a"))
    yield Case("root_holds_itself_twice", ".pkl", whole(b"]q\x00(h\x00h\x00e"))
    yield Case("trace_holds_the_root", ".pkl", whole(b"]q\x00(" + trace(note=b"h\x00") + b"e"))
    yield Case("trace_holds_itself", ".pkl", whole(lst(b"}q\x00" + trace(note=b"h\x00")[1:])))


def piles() -> Iterator[Case]:
    """Yield many small values: one byte per value uncompressed, a thousandth of it in gzip."""
    n = 2_000_000
    for name, code in {
        "none": b"N" * n,
        "lists": b"]" * n,
        "dicts": b"}" * n,
        "tuples": b"N" + b"\x85" * n,
        "memo": b"N" + b"\x94" * n,
        "memo_lists": b"]\x94" * (n // 2),
        "texts": b"\x8c\x00" * (n // 2),
        "floats": b"G3333333" * (n // 9),
        "marks": b"(" * n,
        "appended": b"]" + b"(" + b"N" * n + b"e",
    }.items():
        yield Case(f"pile_{name}", ".pkl", whole(code))
    m = 60_000_000
    for name, (head, unit) in {
        "none": (b"", b"N"),
        "lists": (b"", b"]"),
        "dicts": (b"", b"}"),
        "memo": (b"N", b"\x94"),
        "popped": (b"", b"N0"),
        "marks_popped": (b"", b"(1"),
        "appended": (b"]", b"Na"),
        "texts": (b"", b"\x8c\x00"),
        "line": (b"V", b"a"),
        "decimal_line": (b"I", b"1"),
        "module_line": (b"c", b"a"),
        "frames": (b"", b"\x95" + bytes(8)),
        "traces": (b"](", b"}"),
        "tokens": (b"}" + uni("tokens") + b"](", b"K\x01"),
        "words": (b"}" + uni("tokens_decoded") + b"](", b"\x8c\x01a\x94"),
    }.items():
        yield Case(f"gzip_pile_{name}", ".pkl.gz", gz_bomb(PROTO + head, unit, m // len(unit), b"."))


def gzip_bombs() -> Iterator[Case]:
    """Yield gzip files that inflate to hundreds of megabytes."""
    size = 400 << 20
    for name, head in {
        "bytes8": b"\x80\x04\x8e" + struct.pack("<Q", size),
        "bytes4": b"\x80\x04B" + struct.pack("<I", size),
        "bytearray8": b"\x80\x05\x96" + struct.pack("<Q", size),
        "text4": b"\x80\x04X" + struct.pack("<I", size),
        "text8": b"\x80\x04\x8d" + struct.pack("<Q", size),
        "binstring": b"\x80\x02T" + struct.pack("<I", size),
        "more_than_there": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40),
    }.items():
        yield Case(f"gzip_bomb_{name}", ".pkl.gz", gz_bomb(head, b"\0", size))
    square = 1 << 28
    made = call(glob("numpy._core.multiarray", "_reconstruct"), glob("numpy", "ndarray"), tup(num(0)), b"C\x01b")
    state = b"(" + num(1) + nums(1 << 14, 1 << 14) + dtype("u1", "|") + b"\x89B" + struct.pack("<I", square)
    for name in ("hidden_states", "note"):
        before, after = traces(trace(**{name: lst(made + state + b"@@tb")})).split(b"@@")
        yield Case(f"gzip_bomb_array_in_{name}", ".pkl.gz", gz_bomb(before, b"\0", square, after))
    yield Case("gzip_bomb_trailing", ".pkl.gz", gz_bomb(traces(trace()), b"\0", size))
    yield Case("gzip_bomb_in_a_second_member", ".pkl.gz", gz(traces(trace())) + gz_bomb(b"", b"\0", size))
    yield Case("gzip_many_empty_members", ".pkl.gz", gz(b"") * 50_000)
    yield Case("gzip_of_gzip_of_gzip", ".pkl.gz", gz(gz(gz_bomb(b"", b"\0", size))))
    for name, (_, data) in valid_files().items():
        yield Case(f"gzip_bomb_behind_{name}", ".pkl.gz", gz_bomb(data, b"\0", size))
        yield Case(f"gzip_of_gzip_of_{name}", ".pkl.gz", gz(gz(data)))


def gzip_damage() -> Iterator[Case]:
    """Yield gzip files with damaged headers, checksums, sizes or members."""
    good = traces(trace(), trace(question_id=uni("q1")))
    packed = gz(good)
    yield Case("gzip_crc", ".pkl.gz", gz(good, crc=1))
    yield Case("gzip_size", ".pkl.gz", gz(good, size=len(good) + 1))
    yield Case("gzip_size_zero", ".pkl.gz", gz(good, size=0))
    yield Case("gzip_size_huge", ".pkl.gz", gz(good, size=0xFFFFFFFF))
    yield Case("gzip_garbage_after", ".pkl.gz", packed + b"garbage")
    yield Case("gzip_one_byte_after", ".pkl.gz", packed + b"\x01")
    yield Case("gzip_second_member_cut", ".pkl.gz", packed + packed[:20])
    yield Case("gzip_second_member_crc", ".pkl.gz", gz(good[:300]) + gz(good[300:], crc=5))
    yield Case("gzip_second_member_size", ".pkl.gz", gz(good[:300]) + gz(good[300:], size=5))
    yield Case("gzip_second_member_header", ".pkl.gz", gz(good[:300]) + b"\x1f\x8b\x07" + gz(good[300:])[3:])
    for bit in (5, 6, 7):
        yield Case(f"gzip_reserved_flag_{bit}", ".pkl.gz", gz(good, flags=1 << bit))
    for name, flag in {"crc": 2, "extra": 4, "name": 8, "comment": 16}.items():
        yield Case(f"gzip_flag_{name}_without_it", ".pkl.gz", gz(good, flags=flag))
    yield Case("gzip_method", ".pkl.gz", b"\x1f\x8b\x09" + packed[3:])
    yield Case("gzip_extra_too_long", ".pkl.gz", b"\x1f\x8b\x08\x04" + bytes(6) + b"\xff\xff" + packed[10:])
    yield Case("gzip_endless_name", ".pkl.gz", b"\x1f\x8b\x08\x08" + bytes(6) + b"a" * 100_000)
    yield Case("gzip_reserved_block", ".pkl.gz", packed[:10] + b"\x07" + packed[11:])
    yield Case("gzip_stored_block_lies", ".pkl.gz", packed[:10] + b"\x01\x05\x00\x00\x00hello" + packed[-8:])
    yield Case("gzip_distance_too_far", ".pkl.gz", packed[:10] + b"\x4b\x04\x12\x00" + packed[-8:])
    yield Case("gzip_magic_only", ".pkl.gz", b"\x1f\x8b")
    yield Case("gzip_of_nothing", ".pkl.gz", gz(b""))
    for cut in [3, 9, 10, 11, *range(20, len(packed), max(1, len(packed) // 12)), len(packed) - 8, len(packed) - 1]:
        yield Case(f"gzip_cut_{cut}", ".pkl.gz", packed[:cut])


def valid_files() -> dict[str, tuple[str, bytes]]:
    """Return suffix and bytes of a small valid file of each format."""
    list_of_two = traces(trace(), trace(question_id=uni("q1")))
    old = b"\x80\x02" + list_of_two[2:]
    return {
        "list": (".pkl", list_of_two),
        "bare": (".pkl", whole(trace())),
        "old": (".pkl", old),
        "zip_sequences": (".pt", pt()),
        "legacy_sequences": (".pt", legacy(legacy_sequences())),
        "zip_graphs": (".pt", archive(pt_entries(graphs(), GRAPH_STORAGES))),
    }


def cuts() -> Iterator[Case]:
    """Yield files of each format, truncated at many offsets or with trailing bytes."""
    for kind, (suffix, data) in valid_files().items():
        offsets = sorted({1, 2, 3, 5, 9, *range(11, len(data), len(data) // 14), len(data) - 2, len(data) - 1})
        for offset in offsets:
            yield Case(f"cut_{kind}_{offset}", suffix, data[:offset])
        if suffix == ".pkl":
            for name, rest in {"stop": b".", "newline": b"\n", "nul": b"\0", "zeros": bytes(4096)}.items():
                yield Case(f"{kind}_then_{name}", suffix, data + rest, "trailing")
            yield Case(f"{kind}_then_pickle", suffix, data + whole(b"]"), is_read=True)
            yield Case(f"{kind}_then_number", suffix, data + whole(b"K\x01"))
            yield Case(f"{kind}_after_none", suffix, b"N." + data)
            yield Case(f"{kind}_after_zeros", suffix, bytes(16) + data)
        yield Case(f"{kind}_backwards", suffix, data[::-1])
        yield (
            Case(f"{kind}_then_zip", suffix, data + pt())
            if kind != "zip_sequences" and suffix == ".pkl"
            else Case(f"{kind}_with_a_bom", suffix, b"\xef\xbb\xbf" + data)
        )
    yield Case("legacy_then_more", ".pt", valid_files()["legacy_sequences"][1] + b"x", "trailing")
    for name, data in {
        "empty": b"",
        "one_nul": b"\0",
        "nuls": bytes(100_000),
        "text": b"hello, this is no pickle\n",
        "csv": b"question_id,score\nq0,1\n",
        "json": b'[{"hidden_states": []}]',
        "html": b"<!DOCTYPE html><html>404</html>",
        "npy": b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
        "hdf5": b"\x89HDF\r\n\x1a\n" + bytes(100),
        "bzip2": b"BZh91AY&SY" + bytes(50),
        "xz": b"\xfd7zXZ\0" + bytes(50),
        "zstd": b"\x28\xb5\x2f\xfd" + bytes(50),
        "lz4": b"\x04\x22\x4d\x18" + bytes(50),
        "tar": b"data.pkl" + bytes(249) + b"ustar\x0000" + bytes(300),
        "safetensors": struct.pack("<Q", 1 << 60) + b'{"a":{}}',
        "elf": b"\x7fELF" + bytes(100),
        "script": b"#!/bin/sh\ntouch malicious-marker\n",
        "random": bytes((k * 73 + k // 7) % 256 for k in range(4096)),
    }.items():
        for suffix in (".pkl", ".pt"):
            yield Case(f"other_{name}_as_{suffix[1:]}", suffix, data)


# The other groups are large or slow to make.
SMALL_GROUPS = (cycles, gzip_damage, cuts)
GROUPS = (deep, laughs, piles, gzip_bombs, *SMALL_GROUPS)
