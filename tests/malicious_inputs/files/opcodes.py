"""All 256 opcodes misused, and all length fields with wrong values."""

import pickletools
import struct
from collections.abc import Iterator

from tests.malicious_inputs.files.case import (
    PROTO,
    Case,
    dtype,
    glob,
    halves,
    lst,
    num,
    raw,
    trace,
    traces,
    tup,
    uni,
    whole,
)
from tests.malicious_inputs.files.containers import gz

CODES = {op.code.encode("latin1"): op for op in pickletools.opcodes}
REFUSED = {"INST", "OBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID", "DUP", "NEXT_BUFFER", "READONLY_BUFFER"}
# A complete argument, by the name of its reader in pickletools.
ARGUMENTS = {
    "uint1": b"\x01",
    "uint2": b"\x01\x00",
    "int4": b"\x01\0\0\0",
    "uint4": b"\x01\0\0\0",
    "uint8": b"\x01" + bytes(7),
    "stringnl": b"'a'\n",
    "stringnl_noescape": b"a\n",
    "stringnl_noescape_pair": b"os\nsystem\n",
    "unicodestringnl": b"a\n",
    "string4": b"\x01\0\0\0a",
    "string1": b"\x01a",
    "bytes1": b"\x01a",
    "bytes4": b"\x01\0\0\0a",
    "bytes8": b"\x01" + bytes(7) + b"a",
    "bytearray8": b"\x01" + bytes(7) + b"a",
    "unicodestring1": b"\x01a",
    "unicodestring4": b"\x01\0\0\0a",
    "unicodestring8": b"\x01" + bytes(7) + b"a",
    "decimalnl_short": b"1\n",
    "decimalnl_long": b"1L\n",
    "floatnl": b"1.0\n",
    "float8": bytes(8),
    "long1": b"\x01\x01",
    "long4": b"\x01\0\0\0\x01",
}


def argument(code: bytes) -> bytes:
    """Return a valid argument of an opcode."""
    op = CODES[code]
    return ARGUMENTS[op.arg.name] if op.arg is not None else b""


def on_an_empty_stack() -> Iterator[Case]:
    """Yield every byte as the only opcode."""
    for value in range(256):
        code = bytes([value])
        known = CODES.get(code)
        word = f"0x{value:02x}" if known is None or known.name in REFUSED else None
        rest = argument(code) if known is not None else b""
        yield Case(f"opcode_{value:02x}_alone", ".pkl", PROTO + code + rest + b".", word)


def inside_a_trace() -> Iterator[Case]:
    """Yield refused opcodes with valid operands, where a value is expected."""
    operands = {
        "INST": b"(i" + b"os\nsystem\n",
        "OBJ": b"(" + glob("builtins", "bytes") + b"o",
        "NEWOBJ_EX": glob("builtins", "bytes") + b")}\x92",
        "EXT1": b"\x82\x01",
        "EXT2": b"\x83\x01\x00",
        "EXT4": b"\x84\x01\0\0\0",
        "PERSID": b"Pkey\n",
        "DUP": b"K\x012\x86",
        "NEXT_BUFFER": b"\x97",
        "READONLY_BUFFER": raw(b"a") + b"\x98",
    }
    for name, code in operands.items():
        yield Case(f"refused_{name}", ".pkl", traces(trace(note=code)))


def wrong_operands() -> Iterator[Case]:
    """Yield stack opcodes with operands of wrong types."""
    operands = {
        "int": num(7),
        "text": uni("os"),
        "list": b"]",
        "tuple": b")",
        "none": b"N",
        "class": glob("numpy", "dtype"),
    }
    users = {
        "APPEND": b"%sK\x01a",
        "APPENDS": b"%s(K\x01e",
        "SETITEM": b"%sK\x01K\x01s",
        "SETITEMS": b"%s(K\x01K\x01u",
        "BUILD": b"%s}b",
        "REDUCE": b"%s)R",
        "NEWOBJ": b"%s)\x81",
        "STACK_GLOBAL": b"%sK\x01\x93",
        "BINPERSID": b"%sQ",
        "TUPLE3": b"%s\x87",
        "SETITEM_key": b"}%sK\x01s",
    }
    for user, code in users.items():
        for operand, value in operands.items():
            yield Case(f"{user}_on_{operand}", ".pkl", whole(code % value))


def without_a_mark() -> Iterator[Case]:
    """Yield missing or superfluous marks and memo entries, and unknown protocols."""
    for name, code in {
        "TUPLE": b"t",
        "LIST": b"l",
        "DICT": b"d",
        "APPENDS": b"e",
        "SETITEMS": b"u",
        "POP_MARK": b"1",
    }.items():
        yield Case(f"{name}_without_mark", ".pkl", whole(b"]]K\x01" + code))
    yield Case("odd_dict", ".pkl", whole(b"(K\x01d"))
    yield Case("odd_setitems", ".pkl", whole(b"}(K\x01u"))
    yield Case("mark_left_over", ".pkl", whole(b"((N"))
    yield Case("two_objects_left", ".pkl", whole(b"NN"))
    yield Case("stop_only", ".pkl", b".")
    yield Case("proto_only", ".pkl", PROTO, "truncated")
    yield Case("get_before_put", ".pkl", whole(b"h\x07"))
    yield Case("put_of_nothing", ".pkl", whole(b"q\x00"))
    yield Case("negative_put", ".pkl", whole(b"Np-1\n"))
    yield Case("negative_get", ".pkl", whole(b"g-1\n"))
    for version in (6, 7, 127, 255):
        yield Case(f"protocol_{version}", ".pkl", b"\x80%c" % version + traces()[2:], f"protocol {version}")


def cut_arguments() -> Iterator[Case]:
    """Yield files that end inside the argument of an opcode."""
    for code, op in CODES.items():
        if op.arg is not None:
            name = op.name.lower()
            yield Case(f"cut_{name}", ".pkl", PROTO + code + argument(code)[:-1])
            yield Case(f"cut_{name}_inside_gzip", ".pkl.gz", gz(PROTO + code))


def huge_lengths() -> Iterator[Case]:
    """Yield lengths, memo keys and frames far beyond the size of the file."""
    widths = {"T": 4, "X": 4, "B": 4, "\x8b": 4, "\x8d": 8, "\x8e": 8, "\x96": 8}
    for text, width in widths.items():
        code = text.encode("latin1")
        name = CODES[code].name
        for bits in (31, 32, 40, 63, 64):
            if bits <= 8 * width:
                length = struct.pack("<Q", (1 << bits) - 1)[:width]
                yield Case(f"{name}_of_{bits}_bits", ".pkl", PROTO + code + length + b"abc.")
                yield Case(f"{name}_of_{bits}_bits_in_gzip", ".pkl.gz", gz(PROTO + code + length + b"abc."))
    for text in "UC\x8c\x8a":
        code = text.encode("latin1")
        yield Case(f"{CODES[code].name}_of_255", ".pkl", PROTO + code + b"\xffabc.")
    for code, name in ((b"r", "LONG_BINPUT"), (b"j", "LONG_BINGET")):
        for key in (1 << 20, 0x7FFFFFFF, 0xFFFFFFFF):
            yield Case(f"{name}_{key:x}", ".pkl", whole(b"N" + code + struct.pack("<I", key)))
    yield Case("PUT_of_many_digits", ".pkl", whole(b"Np" + b"9" * 5000 + b"\n"))
    yield Case("GET_of_many_digits", ".pkl", whole(b"g" + b"9" * 5000 + b"\n"))
    for length in (0, 1, 1 << 31, (1 << 63) - 1, (1 << 64) - 1):
        # The length of a frame must have no effect on the opcodes in it.
        yield Case(
            f"frame_{length:x}", ".pkl", PROTO + b"\x95" + struct.pack("<Q", length) + b"cos\nsystem\n)R.", "os.system"
        )


def numbers_and_text() -> Iterator[Case]:
    """Yield arguments that are not the expected number or text."""
    values = {
        "INT_words": b"Ihello\n",
        "INT_long": b"I" + b"9" * 500 + b"\n",
        "LONG_words": b"Lx\n",
        "LONG_long": b"L" + b"7" * 100_000 + b"L\n",
        "LONG4_long": b"\x8b" + struct.pack("<I", 1 << 20) + b"\1" * (1 << 20),
        "LONG1_long": b"\x8a\xff" + b"\1" * 255,
        "FLOAT_words": b"Fone\n",
        "FLOAT_long": b"F" + b"1" * 100_000 + b"\n",
        "FLOAT_hex": b"F0x1p3\n",
        "STRING_open": b"S'abc\n",
        "STRING_bare": b"Sabc\n",
        "STRING_quote": b"S'\n",
        "STRING_escape": b"S'\\x4'\n",
        "UNICODE_escape": b"V\\u12\n",
        "UNICODE_range": b"V\\U00110000\n",
        "BINUNICODE_broken": b"X\2\0\0\0\xff\xff",
        "SHORT_BINUNICODE_broken": b"\x8c\x01\xc3",
        "BINUNICODE8_broken": b"\x8d" + struct.pack("<Q", 3) + b"\xf8\x88\x80",
        "line_without_end": b"V" + b"a" * 100_000,
        "line_cr": b"I1\r\rI2",
        "unhashable_key_list": b"}]Ns",
        "unhashable_key_dict": b"}}Ns",
        "tuple_key": b"})Ns",
        "array_key": b"}" + halves(1) + b"Ns",
        "dtype_key": b"}" + dtype("f4") + b"Ns",
        "class_key": b"}" + glob("numpy", "ndarray") + b"Ns",
        "tuple_key_setitems": b"}(" + tup(num(1)) + b"Nu",
        "tuple_key_dict": b"(" + tup(num(1)) + b"Nd",
    }
    for name, code in values.items():
        yield Case(name, ".pkl", traces(trace(note=code)))


def roots() -> Iterator[Case]:
    """Yield valid pickles of other objects than traces."""
    values = {
        "none": b"N",
        "true": b"\x88",
        "number": b"K\x01",
        "long": num(1 << 100),
        "float": b"G" + bytes(8),
        "text": uni("traces"),
        "bytes": raw(b"traces"),
        "bytearray": b"\x96" + struct.pack("<Q", 3) + b"abc",
        "empty_tuple": b")",
        "tuple": tup(lst()),
        "empty_list": b"]",
        "empty_dict": b"}",
        "list_of_lists": lst(b"]", b"]"),
        "list_of_text": lst(uni("a")),
        "list_of_none": lst(b"N"),
        "array": halves(2, 2),
        "dtype": dtype("f4"),
        "class": glob("numpy", "ndarray"),
        "list_of_class": lst(glob("numpy", "ndarray")),
        "dict_of_int_keys": b"}K\x01Ns",
        "list_of_dict_of_int_keys": lst(b"}K\x01Ns"),
    }
    for name, code in values.items():
        yield Case(f"root_{name}", ".pkl", whole(code))


GROUPS = (on_an_empty_stack, inside_a_trace, wrong_operands, without_a_mark, cut_arguments, huge_lengths)
GROUPS += (numbers_and_text, roots)
