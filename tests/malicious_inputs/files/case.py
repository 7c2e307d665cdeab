"""A file of the corpus, and functions that write pickle opcodes."""

import struct
from typing import NamedTuple

PROTO = b"\x80\x04"
# Reason of files that are not like those of a tool, so that their fields are not known.
NO_LAYOUT = "no built-in layout describes it"


class Case(NamedTuple):
    """A malicious file.

    `word` occurs in the error message. If `runs`, pickle.load of the file creates the marker file. If `is_read`, what is
    odd means one thing, or is in no field, and the traces are read.
    """

    name: str
    suffix: str
    data: bytes
    word: str | None = None
    runs: bool = False
    is_read: bool = False


def uni(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return b"\x8c%c" % len(raw) + raw if len(raw) < 256 else b"X" + struct.pack("<I", len(raw)) + raw


def num(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K%c" % value
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a%c" % len(raw) + raw


def raw(data: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(data)) + data


def tup(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def lst(*items: bytes) -> bytes:
    return b"](" + b"".join(items) + b"e"


def dct(**items: bytes) -> bytes:
    return b"}(" + b"".join(uni(k) + v for k, v in items.items()) + b"u"


def glob(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def named(module: str, name: str) -> bytes:
    """Name a global with STACK_GLOBAL, which accepts dotted names."""
    return uni(module) + uni(name) + b"\x93"


def call(target: bytes, *args: bytes) -> bytes:
    return target + tup(*args) + b"R"


def build(target: bytes, state: bytes) -> bytes:
    return target + state + b"b"


def nums(*values: int) -> bytes:
    return tup(*map(num, values))


RECONSTRUCT = glob("numpy._core.multiarray", "_reconstruct")
NDARRAY = glob("numpy", "ndarray")


def dtype(text: str, order: str = "<", state: bytes | None = None) -> bytes:
    made = call(glob("numpy", "dtype"), uni(text), b"\x89", b"\x88")
    return build(made, state or tup(num(3), uni(order), b"N", b"N", b"N", num(-1), num(-1), num(0)))


def empty_array(kind: bytes = NDARRAY) -> bytes:
    return call(RECONSTRUCT, kind, nums(0), b"C\x01b")


def array(shape: bytes, kind: bytes, data: bytes, fortran: bytes = b"\x89") -> bytes:
    """Make an ndarray. The arguments are pickle code, except for `data`, the bytes of the array."""
    return build(empty_array(), tup(num(1), shape, kind, fortran, raw(data)))


def halves(*shape: int) -> bytes:
    count = 1
    for n in shape:
        count *= n
    return array(nums(*shape), dtype("f2"), b"\x00\x3c" * count)


def fields(**changes: bytes | None) -> dict[str, bytes]:
    """Return the fields of a valid trace of two tokens, with changes; None removes a field."""
    valid: dict[str, bytes | None] = {
        "hidden_states": lst(halves(2, 2)),
        "attentions": lst(halves(1, 2, 2)),
        "tokens": lst(num(1), num(2)),
        "question_id": uni("q0"),
    }
    return {k: v for k, v in (valid | changes).items() if v is not None}


def trace(**changes: bytes | None) -> bytes:
    return dct(**fields(**changes))


def whole(value: bytes) -> bytes:
    """Make a complete pickle."""
    return PROTO + value + b"."


def traces(*items: bytes) -> bytes:
    """Make a pickle of a list of traces."""
    return whole(lst(*items))
