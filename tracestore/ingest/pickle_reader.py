"""A pickle read as data: the opcodes of protocols 0 to 5, inert results, bounds.

The machine is the one that the standard library's pickletools describes; the
opcodes a file of traces never has are refused. Items of a list at the top are
handed on as they become complete, so that a file of any length is read in the
memory of one trace.
"""

import struct
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from tracestore.errors import InputRefusedError
from tracestore.ingest import builders
from tracestore.ingest.bytesource import ByteSource

MAX_OPCODES = 200_000_000
MAX_DEPTH = 1_000
MAX_STACK = 10_000_000
MAX_MEMO = 50_000_000
MAX_LONG_BYTES = 64
# Payloads smaller than this stay bytes of their own; larger ones are views where they can.
_SMALL_BYTES = 4096
# What finished traces may leave in memory because a later trace could refer to it.
_RETAINED_BYTES = 64 << 20

PersistentLoad = Callable[[Any], Any]


class _Released:
    """Stands in the memo for an object that went with its trace."""


_RELEASED = _Released()
# Stands in the root list for an item that was handed on.
_GONE = _Released()
_UNSET = object()


class PickleReader:
    """Reads one pickle from a byte source.

    persistent_load turns a persistent id (torch storages) into an object;
    load_bytes reads a legacy torch file held in bytes. Both are refused when None.
    """

    def __init__(
        self,
        source: ByteSource,
        *,
        persistent_load: PersistentLoad | None = None,
        load_bytes: Callable[[Any], Any] | None = None,
    ) -> None:
        self.source = source
        self._persistent_load, self._load_bytes = persistent_load, load_bytes
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        # What could be released: a memo key or a draft, and its bytes, oldest first.
        self._heavy: deque[tuple[int | builders.Draft, int]] = deque()
        self._heavy_bytes = 0
        self._root: list[Any] | None = None
        self.streamed = 0

    # Result

    def load(self) -> Any:
        """The whole object."""
        for _ in self.items(stream=False):
            pass
        return self.result

    def items(self, *, stream: bool = True) -> Iterator[Any]:
        """Yields the items of a list at the top as they become complete; afterwards
        `result` is the object (a list whose streamed items are gone). Every refusal
        is an InputRefusedError."""
        read, stack_limit = self.source.read, MAX_STACK
        dispatch = _DISPATCH
        for _ in range(MAX_OPCODES):
            code = read(1)[0]
            if code == _STOP:
                break
            handler = dispatch[code]
            if handler is None:
                raise InputRefusedError(f"pickle opcode 0x{code:02x} is not one a file of traces has")
            if stream and self._root is not None:
                # A new dict beside a complete one, or the list taking items in.
                if code == _EMPTY_DICT:
                    if len(self._marks) == 1 and self._stack and type(self._stack[-1]) is dict and self._stack[-1]:
                        yield from self._emit()
                elif (code in (_APPEND, _APPENDS)) and self._targets_root(code):
                    yield from self._emit()
            try:
                handler(self)
            except (IndexError, KeyError, TypeError, ValueError, struct.error, OverflowError) as error:
                if isinstance(error, InputRefusedError):
                    raise
                raise InputRefusedError(
                    f"not a well-formed pickle: {type(error).__name__} at opcode 0x{code:02x}"
                ) from None
            if len(self._stack) > stack_limit or len(self._marks) > MAX_DEPTH:
                raise InputRefusedError("the pickle nests or piles up more than a file of traces does")
        else:
            raise InputRefusedError("the pickle has more opcodes than a file of traces")
        if len(self._stack) != 1 or self._marks:
            raise InputRefusedError("not a well-formed pickle: it does not end with one object")
        self.result = self._stack[0]
        if stream and self.result is self._root:
            assert self._root is not None
            rest = [item for item in self._root if item is not _GONE]
            self._root.clear()
            for item in rest:
                self.streamed += 1
                yield item

    def _targets_root(self, code: int) -> bool:
        if code == _APPEND:
            return not self._marks and len(self._stack) == 2 and self._stack[0] is self._root
        return len(self._marks) == 1 and len(self._marks[0]) == 1 and self._marks[0][0] is self._root

    def _emit(self) -> Iterator[Any]:
        """Hands on the complete items of the root list that lie on the stack."""
        appending_one = not self._marks
        if not appending_one and (len(self._marks[0]) != 1 or self._marks[0][0] is not self._root):
            return
        items = self._stack[1:] if appending_one else self._stack
        for k, item in enumerate(items):
            if item is _GONE:
                continue
            self.streamed += 1
            yield item
            self._stack[k + appending_one] = _GONE
        while self._heavy_bytes > _RETAINED_BYTES:
            held, size = self._heavy.popleft()
            self._heavy_bytes -= size
            value = held if isinstance(held, builders.Draft) else self._memo[held]
            if isinstance(value, builders.Draft):
                value.release()
            else:
                assert isinstance(held, int)
                self._memo[held] = _RELEASED

    # Stack and memo

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._marks.pop()
        return items

    def _put(self, key: int) -> None:
        if key < 0 or len(self._memo) >= MAX_MEMO:
            raise InputRefusedError("the pickle's memo grows beyond what a file of traces needs")
        value = self._stack[-1]
        self._memo[key] = value
        self._hold(key, _memory_bytes(value))

    def _hold(self, held: int | builders.Draft, size: int) -> None:
        if size:
            self._heavy.append((held, size))
            self._heavy_bytes += size

    def _get(self, key: int) -> None:
        value = self._memo.get(key, _UNSET)
        if value is _UNSET:
            raise InputRefusedError("the pickle refers to an object that is not there")
        if value is _RELEASED:
            raise InputRefusedError(builders.SHARED)
        self._stack.append(value)

    # Values

    def _text(self, count: int) -> str:
        try:
            return str(self.source.read(count), "utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise InputRefusedError("found text that is not utf-8") from None

    def _bytes(self, count: int) -> Any:
        data = self.source.read(count)
        return bytes(data) if count < _SMALL_BYTES else data

    def _uint(self, size: int) -> int:
        return int.from_bytes(self.source.read(size), "little")

    # Opcodes

    def op_proto(self) -> None:
        protocol = self._uint(1)
        if protocol > 5:
            raise InputRefusedError(f"pickle protocol {protocol}, expected 0 to 5")

    def op_frame(self) -> None:
        self._uint(8)

    def op_mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def op_pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_mark()

    def op_pop_mark(self) -> None:
        self._pop_mark()

    def op_none(self) -> None:
        self._push(None)

    def op_true(self) -> None:
        self._push(True)

    def op_false(self) -> None:
        self._push(False)

    def op_int(self) -> None:
        line = self.source.read_line()
        if line in (b"00", b"01"):
            self._push(line == b"01")
        else:
            self._push(_decimal(line))

    def op_long(self) -> None:
        self._push(_decimal(self.source.read_line().rstrip(b"L")))

    def op_binint(self) -> None:
        self._push(int.from_bytes(self.source.read(4), "little", signed=True))

    def op_binint1(self) -> None:
        self._push(self._uint(1))

    def op_binint2(self) -> None:
        self._push(self._uint(2))

    def _long(self, count: int) -> None:
        if count > MAX_LONG_BYTES:
            raise InputRefusedError("found an integer of more than 512 bits")
        self._push(int.from_bytes(self.source.read(count), "little", signed=True))

    def op_long1(self) -> None:
        self._long(self._uint(1))

    def op_long4(self) -> None:
        self._long(self._uint(4))

    def op_float(self) -> None:
        line = self.source.read_line()
        if len(line) > 64:
            raise InputRefusedError("found a number of more than 64 digits")
        self._push(float(line))

    def op_binfloat(self) -> None:
        self._push(struct.unpack(">d", self.source.read(8))[0])

    def op_string(self) -> None:
        line = self.source.read_line()
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in b"'\"":
            raise InputRefusedError("found a string without quotes")
        # Escapes of Python 2 strings, bytes above 127 as latin1.
        self._push(line[1:-1].decode("latin1").encode("latin1").decode("unicode_escape"))

    def op_binstring(self) -> None:
        self._push(str(self.source.read(self._uint(4)), "latin1"))

    def op_short_binstring(self) -> None:
        self._push(str(self.source.read(self._uint(1)), "latin1"))

    def op_unicode(self) -> None:
        self._push(self.source.read_line().decode("raw_unicode_escape"))

    def op_binunicode(self) -> None:
        self._push(self._text(self._uint(4)))

    def op_short_binunicode(self) -> None:
        self._push(self._text(self._uint(1)))

    def op_binunicode8(self) -> None:
        self._push(self._text(self._uint(8)))

    def op_binbytes(self) -> None:
        self._push(self._bytes(self._uint(4)))

    def op_short_binbytes(self) -> None:
        self._push(self._bytes(self._uint(1)))

    def op_binbytes8(self) -> None:
        self._push(self._bytes(self._uint(8)))

    def op_empty_list(self) -> None:
        value: list[Any] = []
        if not self._stack and not self._marks and self._root is None:
            self._root = value
        self._push(value)

    def op_empty_dict(self) -> None:
        self._push({})

    def op_empty_tuple(self) -> None:
        self._push(())

    def op_list(self) -> None:
        items = self._pop_mark()
        if not self._stack and not self._marks and self._root is None and not items:
            self._root = items
        self._push(items)

    def op_dict(self) -> None:
        items = self._pop_mark()
        for key in items[::2]:
            _check_key(key)
        self._push(dict(zip(items[::2], items[1::2], strict=True)))

    def op_tuple(self) -> None:
        self._push(tuple(self._pop_mark()))

    def _tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise InputRefusedError("not a well-formed pickle: a tuple of what is not there")
        items = tuple(self._stack[-count:])
        del self._stack[-count:]
        self._push(items)

    def op_tuple1(self) -> None:
        self._tuple(1)

    def op_tuple2(self) -> None:
        self._tuple(2)

    def op_tuple3(self) -> None:
        self._tuple(3)

    def op_append(self) -> None:
        value = self._stack.pop()
        self._container(list).append(value)

    def op_appends(self) -> None:
        items = self._pop_mark()
        self._container(list).extend(items)

    def _container(self, kind: type) -> Any:
        target = self._stack[-1]
        if type(target) is not kind:
            raise InputRefusedError(f"not a well-formed pickle: items are added to a {type(target).__name__}")
        return target

    def op_setitem(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        _check_key(key)
        self._container(dict)[key] = value

    def op_setitems(self) -> None:
        items = self._pop_mark()
        for key in items[::2]:
            _check_key(key)
        self._container(dict).update(zip(items[::2], items[1::2], strict=True))

    def op_get(self) -> None:
        self._get(_decimal(self.source.read_line()))

    def op_binget(self) -> None:
        self._get(self._uint(1))

    def op_long_binget(self) -> None:
        self._get(self._uint(4))

    def op_put(self) -> None:
        self._put(_decimal(self.source.read_line()))

    def op_binput(self) -> None:
        self._put(self._uint(1))

    def op_long_binput(self) -> None:
        self._put(self._uint(4))

    def op_memoize(self) -> None:
        self._put(len(self._memo))

    def op_global(self) -> None:
        module, name = self.source.read_line(), self.source.read_line()
        self._push(builders.lookup(module.decode("utf-8", "replace"), name.decode("utf-8", "replace")))

    def op_stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._push(builders.lookup(module, name))

    def op_reduce(self) -> None:
        args, target = self._stack.pop(), self._stack.pop()
        if not isinstance(target, builders.Builder) or not isinstance(args, tuple):
            raise InputRefusedError("the pickle calls something that is not a class it may name")
        if isinstance(target, builders.LoadFromBytes):
            if self._load_bytes is None or len(args) != 1:
                raise InputRefusedError("a torch file inside a torch file inside a pickle")
            self._push(self._load_bytes(args[0]))
        else:
            self._push(target.call(args))

    def op_newobj(self) -> None:
        args, target = self._stack.pop(), self._stack.pop()
        if not isinstance(target, builders.Builder) or not isinstance(args, tuple):
            raise InputRefusedError("the pickle makes an object of something that is not a class it may name")
        self._push(target.new(args))

    def op_build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if not isinstance(target, builders.Draft):
            raise InputRefusedError(f"the pickle gives a state to a {type(target).__name__}")
        target.build(state)
        self._hold(target, target.payload_bytes())

    def op_binpersid(self) -> None:
        key = self._stack.pop()
        if self._persistent_load is None:
            raise InputRefusedError("a persistent id outside a torch file")
        self._push(self._persistent_load(key))


def _check_key(key: Any) -> None:
    # A tuple nested a million deep ends the interpreter when it is hashed.
    if key is not None and type(key) not in (str, int, float, bool, bytes):
        raise InputRefusedError(f"found a dict key of type {type(key).__name__}, expected a string or number")


def _memory_bytes(value: Any) -> int:
    """Bytes that the memo keeps alive through `value` and that are no range of a mapped file."""
    kind = type(value)
    if kind in (str, bytes, bytearray):
        # Short ones, such as the keys of the dicts, are what every trace shares.
        return len(value) if len(value) >= _SMALL_BYTES else 0
    if kind is tuple:
        # Its own members only: what nests deeper could be reached in exponentially many ways.
        members = (v for v in value if type(v) in (str, bytes, bytearray))
        return sum(map(_memory_bytes, members)) if len(value) < 8 else 0
    return value.payload_bytes() if isinstance(value, builders.Draft) else 0


def _decimal(line: bytes) -> int:
    if len(line) > 160:
        raise InputRefusedError("found an integer of more than 512 bits")
    return int(line)


_STOP, _EMPTY_DICT, _APPEND, _APPENDS = b".}ae"

_CODES: dict[bytes, Callable[[PickleReader], None]] = {
    b"\x80": PickleReader.op_proto,
    b"\x95": PickleReader.op_frame,
    b"(": PickleReader.op_mark,
    b"0": PickleReader.op_pop,
    b"1": PickleReader.op_pop_mark,
    b"N": PickleReader.op_none,
    b"\x88": PickleReader.op_true,
    b"\x89": PickleReader.op_false,
    b"I": PickleReader.op_int,
    b"L": PickleReader.op_long,
    b"J": PickleReader.op_binint,
    b"K": PickleReader.op_binint1,
    b"M": PickleReader.op_binint2,
    b"\x8a": PickleReader.op_long1,
    b"\x8b": PickleReader.op_long4,
    b"F": PickleReader.op_float,
    b"G": PickleReader.op_binfloat,
    b"S": PickleReader.op_string,
    b"T": PickleReader.op_binstring,
    b"U": PickleReader.op_short_binstring,
    b"V": PickleReader.op_unicode,
    b"X": PickleReader.op_binunicode,
    b"\x8c": PickleReader.op_short_binunicode,
    b"\x8d": PickleReader.op_binunicode8,
    b"B": PickleReader.op_binbytes,
    b"C": PickleReader.op_short_binbytes,
    b"\x8e": PickleReader.op_binbytes8,
    b"\x96": PickleReader.op_binbytes8,
    b"]": PickleReader.op_empty_list,
    b"}": PickleReader.op_empty_dict,
    b")": PickleReader.op_empty_tuple,
    b"l": PickleReader.op_list,
    b"d": PickleReader.op_dict,
    b"t": PickleReader.op_tuple,
    b"\x85": PickleReader.op_tuple1,
    b"\x86": PickleReader.op_tuple2,
    b"\x87": PickleReader.op_tuple3,
    b"a": PickleReader.op_append,
    b"e": PickleReader.op_appends,
    b"s": PickleReader.op_setitem,
    b"u": PickleReader.op_setitems,
    b"g": PickleReader.op_get,
    b"h": PickleReader.op_binget,
    b"j": PickleReader.op_long_binget,
    b"p": PickleReader.op_put,
    b"q": PickleReader.op_binput,
    b"r": PickleReader.op_long_binput,
    b"\x94": PickleReader.op_memoize,
    b"c": PickleReader.op_global,
    b"\x93": PickleReader.op_stack_global,
    b"R": PickleReader.op_reduce,
    b"\x81": PickleReader.op_newobj,
    b"b": PickleReader.op_build,
    b"Q": PickleReader.op_binpersid,
}
_DISPATCH: list[Callable[[PickleReader], None] | None] = [_CODES.get(bytes([code])) for code in range(256)]
