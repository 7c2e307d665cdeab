"""Mutations that follow the structure of a file: opcodes, zip entries, gzip members.

Checksums are recomputed; otherwise most mutations would end at a checksum.
"""

import io
import pickletools
import random
import struct
import zipfile
import zlib

from tests.malicious_inputs.files import containers
from tests.malicious_inputs.files.case import NDARRAY, RECONSTRUCT, dtype, glob, nums, raw, tup, uni
from tests.malicious_inputs.files.opcodes import ARGUMENTS, CODES

INTERESTING = (0, 1, -1, 2, 127, 128, 255, 256, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31, -(1 << 31), 1 << 32)
INTERESTING += ((1 << 62), (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63))
TEXTS = ("", "x", "hidden_states", "attentions", "tokens", "tokens_decoded", "question_id", "sequences", "graphs")
TEXTS += ("labels", "question_ids", "_store", "_mapping", "_parent", "storage", "f2", "<f4", "O", "U3", "S0", "V2")
TEXTS += ("\ud800",)
SNIPPETS = [
    *(code + ARGUMENTS.get(op.arg.name, b"") if op.arg else code for code, op in CODES.items()),
    *map(uni, TEXTS),
    *(glob("torch", name) for name in ("HalfStorage", "LongStorage", "ByteStorage", "float16", "Size", "device")),
    *(glob("torch._utils", f"_rebuild_{name}") for name in ("tensor_v2", "tensor_v3", "parameter")),
    glob("torch.storage", "_load_from_bytes"),
    glob("torch.storage", "UntypedStorage"),
    glob("numpy._core.multiarray", "scalar"),
    glob("numpy._core.numeric", "_frombuffer"),
    glob("collections", "OrderedDict"),
    glob("_codecs", "encode"),
    glob("builtins", "bytes"),
    containers.DATA,
    containers.GLOBAL_STORAGE,
    NDARRAY,
    RECONSTRUCT,
    dtype("f2"),
    dtype("U2"),
    nums(2, 2),
    nums(0, 1 << 40),
    tup(),
    raw(bytes(8)),
]


# Pieces of lines of layouts.
WORDS = (" : ", " -> ", "{id}", "{layer}", "{n:d}", "[]", "[id=q]", "[chunk]", "**", "*", "/", "@", "\\", '"', "=")
WORDS += ("\n",)
WORDS += ("hidden_states = ", "tokens = ", "is_correct = ", "S.mask = ", "words.ja = ", "ignore = ", "records = ")
WORDS += ("N", "L S D", "(N S)", "T", "0", "-1", "#", ",", ".", " ", "é", "true", "[1, 2]")


def mutate(mode: str, data: bytes, rng: random.Random, other: bytes = b"") -> bytes:
    """Return a mutation of `data`, possibly with pieces of `other`."""
    if mode == "store":
        return _bytes(data, rng)
    if mode == "layout":
        return _lines(data, rng, other)
    if mode == "gzip":
        return _gzip(data, rng, other)
    if mode == "zip":
        return _zip(data, rng, other) if data[:2] == b"PK" else _pickle(data, rng, other)
    return _pickle(data, rng, other)


def _lines(data: bytes, rng: random.Random, other: bytes) -> bytes:
    """Insert, remove and copy pieces of lines."""
    if rng.random() < 0.2:
        return _bytes(data, rng)
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            out[at:at] = rng.choice(WORDS).encode()
        elif kind == 1:
            del out[at : at + rng.choice((1, 2, 8, 40))]
        elif kind == 2:
            begin = rng.randrange(len(other) + 1)
            out[at:at] = other[begin : begin + rng.choice((4, 20, 80))]
        else:
            out[at:at] = out[at : at + rng.choice((1, 4, 20))] * rng.choice((1, 2, 9))
    return bytes(out)


def _interesting(rng: random.Random) -> int:
    return rng.choice(INTERESTING) + rng.choice((0, 0, 0, -1, 1))


def _bytes(data: bytes, rng: random.Random) -> bytes:
    """Flip bits, set numbers, remove and copy bytes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(6)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = rng.randrange(256)
        elif kind == 2:
            width = rng.choice((1, 2, 4, 8))
            out[at : at + width] = (_interesting(rng) % (1 << (8 * width))).to_bytes(
                width, rng.choice(("little", "big"))
            )
        elif kind == 3:
            del out[at : at + rng.choice((1, 2, 8, 64))]
        elif kind == 4:
            out[at:at] = out[at : at + rng.choice((1, 4, 32))]
        else:
            out[at:at] = rng.randbytes(rng.choice((1, 2, 4)))
    return bytes(out)


def _opcodes(data: bytes) -> tuple[list[bytes], bytes]:
    """Split `data` into the opcodes of its pickles, with their arguments, and the rest."""
    pieces: list[bytes] = []
    stream = io.BytesIO(data)
    begin = 0
    try:
        while begin < len(data):
            for op, _, at in pickletools.genops(stream):
                if at > begin:
                    pieces.append(data[begin:at])
                begin = at
                if op.name == "STOP":
                    pieces.append(b".")
                    begin = at + 1
    except Exception:
        # pickletools raises exceptions of many types; keep the rest unchanged.
        pass
    return pieces, data[begin:]


def _operand(piece: bytes, rng: random.Random) -> bytes:
    """Return the opcode with another number or length."""
    code, argument = piece[:1], piece[1:]
    op = CODES.get(code)
    if op is None or op.arg is None:
        return rng.choice(SNIPPETS)
    value, kind = _interesting(rng), op.arg.name
    fixed = {"uint1": 1, "uint2": 2, "int4": 4, "uint4": 4, "uint8": 8}
    if kind in fixed:
        return code + (value % (1 << (8 * fixed[kind]))).to_bytes(fixed[kind], "little")
    if kind.startswith("decimalnl"):
        return code + str(value).encode() + b"\n"
    if kind == "float8":
        return code + struct.pack(">d", rng.choice((0.0, -0.0, 1e308, float("nan"), float("inf"), float(value))))
    if kind == "floatnl":
        return code + rng.choice((b"nan", b"-inf", b"1e999", b"0x1", b"")) + b"\n"
    if kind[-1] in "148" and argument:
        width = int(kind[-1])
        if rng.random() < 0.3:
            return code + (value % (1 << (8 * width))).to_bytes(width, "little") + argument[width:]
        body = _bytes(argument[width:], rng)[: (1 << (8 * min(width, 2))) - 1]
        return code + len(body).to_bytes(width, "little") + body
    return code + _bytes(argument, rng)


def _pickle(data: bytes, rng: random.Random, other: bytes) -> bytes:
    if rng.random() < 0.15:
        return _bytes(data, rng)
    pieces, rest = _opcodes(data)
    if not pieces:
        return _bytes(data, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        at = rng.randrange(len(pieces) or 1)
        kind = rng.randrange(8)
        if not pieces or kind == 0:
            pieces.insert(at, rng.choice(SNIPPETS))
        elif kind == 1:
            del pieces[at : at + rng.choice((1, 1, 2, 5, 20))]
        elif kind == 2:
            pieces[at:at] = pieces[at : at + rng.choice((1, 1, 3, 10, 40))]
        elif kind == 3:
            other_at = rng.randrange(len(pieces))
            pieces[at], pieces[other_at] = pieces[other_at], pieces[at]
        elif kind in (4, 5):
            pieces[at] = _operand(pieces[at], rng)
        elif kind == 6:
            pieces[at] = rng.choice(SNIPPETS)
        else:
            theirs, _ = _opcodes(other)
            if theirs:
                begin = rng.randrange(len(theirs))
                pieces[at : at + rng.choice((0, 1, 10))] = theirs[begin : begin + rng.choice((1, 5, 30))]
    if rest and rng.random() < 0.3:
        rest = _bytes(rest, rng)
    return b"".join(pieces) + rest


def _zip(data: bytes, rng: random.Random, other: bytes) -> bytes:
    if rng.random() < 0.3:
        return _bytes(data, rng)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = [
                containers.Entry(i.filename.encode("utf-8", "surrogateescape"), archive.read(i), flags=i.flag_bits & 8)
                for i in archive.infolist()
            ]
    except Exception:
        # zipfile cannot read the archive.
        return _bytes(data, rng)
    if not entries:
        return _bytes(data, rng)
    for entry in entries:
        if entry.flags & 8:
            entry.descriptor = b"PK\x07\x08" + struct.pack("<III", zlib.crc32(entry.data), *[len(entry.data)] * 2)
    chosen = rng.choice(entries)
    pickles = [e for e in entries if e.name.endswith(b"data.pkl")]
    kind = rng.randrange(8)
    if pickles and kind < 4:
        chosen = pickles[0]
        chosen.data = _pickle(chosen.data, rng, _inner(other))
    elif kind == 4:
        chosen.data = _bytes(chosen.data, rng)
    elif kind == 5:
        field = rng.choice(("crc", "packed", "full", "method", "flags"))
        limit = 1 << (16 if field in ("method", "flags") else 32)
        change = {field: _interesting(rng) % limit}
        for side in rng.choice(((chosen.local,), (chosen.central,), (chosen.local, chosen.central))):
            side.update(change)
    elif kind == 6:
        entries.insert(rng.randrange(len(entries) + 1), rng.choice(entries)) if rng.random() < 0.5 else entries.remove(
            chosen
        )
    else:
        chosen.name = _bytes(chosen.name, rng)[:200]
    return containers.archive(entries, align=rng.choice((1, 64)))


def _inner(other: bytes) -> bytes:
    """Return the pickle inside an archive, or `other` itself if it is no archive."""
    try:
        with zipfile.ZipFile(io.BytesIO(other)) as archive:
            return next(archive.read(n) for n in archive.namelist() if n.endswith("data.pkl"))
    except Exception:
        return other


def inflated(data: bytes, limit: int = 1 << 20) -> bytes:
    """Return the content of the first member, up to the first error."""
    try:
        return zlib.decompressobj(31).decompress(data, limit)
    except zlib.error:
        return b""


def _gzip(data: bytes, rng: random.Random, other: bytes) -> bytes:
    if rng.random() < 0.25:
        return _bytes(data, rng)
    inner = inflated(data)
    if not inner:
        return _bytes(data, rng)
    if rng.random() < 0.8:
        inner = _pickle(inner, rng, inflated(other))
    level = rng.choice((0, 1, 9))
    cut = rng.randrange(len(inner) + 1)
    kind = rng.randrange(8)
    if kind == 0:
        return containers.gz(inner[:cut], level=level) + containers.gz(inner[cut:], level=level)
    if kind == 1:
        return containers.gz(inner, level=level, flags=rng.randrange(256))
    if kind == 2:
        return containers.gz(inner, level=level, size=_interesting(rng))
    if kind == 3:
        return containers.gz(inner[:cut]) + bytes(rng.choice((1, 8, 512))) + containers.gz(inner[cut:])
    return containers.gz(inner, level=level)
