# cython: language_level=3, binding=True, boundscheck=False, wraparound=False
"""A pickle's opcodes as a machine over inert values; what a name means is the caller's policy.

The machine is the one that the standard library's pickletools describes, for the
opcodes that files of traces have. It never imports, calls or makes anything a file
names: `lookup` turns a name into a `builder` of the caller's, whose call(args) and new(args)
say what becomes of it; a `draft` is what build(state) completes, `persistent` what a
persistent id stands for.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.list cimport PyList_AsTuple, PyList_GetSlice, PyList_SetSlice
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int32_t, uint8_t, uint64_t
from libc.string cimport memchr, memcpy

from tracestore.errors import InvalidInputError

include "sigbus_guard.pxi"

# Opcodes, named as in pickletools.
cdef enum:
    MARK = 40, EMPTY_TUPLE = 41, STOP = 46, POP = 48, POP_MARK = 49
    BINBYTES = 66, SHORT_BINBYTES = 67, FLOAT = 70, BINFLOAT = 71, INT = 73, BININT = 74, BININT1 = 75
    LONG = 76, BININT2 = 77, NONE = 78, BINPERSID = 81, REDUCE = 82, STRING = 83, BINSTRING = 84
    SHORT_BINSTRING = 85, UNICODE = 86, BINUNICODE = 88, EMPTY_LIST = 93, APPEND = 97, BUILD = 98
    GLOBAL = 99, DICT = 100, APPENDS = 101, GET = 103, BINGET = 104, LONG_BINGET = 106, LIST = 108
    PUT = 112, BINPUT = 113, LONG_BINPUT = 114, SETITEM = 115, TUPLE = 116, SETITEMS = 117
    EMPTY_DICT = 125, PROTO = 128, NEWOBJ = 129, TUPLE1 = 133, TUPLE2 = 134, TUPLE3 = 135
    NEWTRUE = 136, NEWFALSE = 137, LONG1 = 138, LONG4 = 139, SHORT_BINUNICODE = 140, BINUNICODE8 = 141
    BINBYTES8 = 142, STACK_GLOBAL = 147, MEMOIZE = 148, FRAME = 149, BYTEARRAY8 = 150

# The limits are constants of C: looked at with every opcode.
cdef uint64_t MAX_OPCODES = 1 << 31
cdef enum:
    MAX_DEPTH = 1_000
    MAX_STACK = 1_000_000
    MAX_LONG_BYTES = 64
    MAX_DIGITS = 160
    MAX_FLOAT_DIGITS = 64
    MAX_NAME_BYTES = 1_000
    # Memo entries a file may have, and one more for so many of its bytes: real ones hold
    # one for some thousand bytes.
    MAX_MEMO = 2_000_000
    MEMO_PER_BYTES = 256
MUCH_TEXT = "the pickle holds more text than a file of traces does"
LONG_INTEGER = "found an integer of more than 512 bits"
LONG_NAME = "names a class by more than 1,000 letters"
# Payloads below this are bytes of their own, larger ones views where they can be.
cdef enum:
    SMALL_BYTES = 4096
    # Below this a copy takes less time than another thread needs to take the lock.
    GIL_BYTES = 1 << 18
    WINDOW_BYTES = 4096
    MAX_WINDOW_BYTES = 1 << 20
    # What the values of one trace may take beside its arrays: so much, and so much for a byte
    # of the file. A trace of 100,000 tokens takes 13 MB.
    LIVE_BYTES = 24 << 20
    LIVE_PER_BYTE = 4
SHARED = "two traces far apart share one object; save them apart, or as an uncompressed pickle of protocol 4"


cdef class EvictedMemo:
    """Stands where an object was that went with its trace."""

cdef EvictedMemo _RELEASED = EvictedMemo()
cdef object _UNSET = object()


def _refuse(reason):
    return InvalidInputError(reason)


cdef object _truncated():
    return InvalidInputError("truncated: the file ends inside a value")


cdef class ByteReader:
    """Where a machine reads: bytes one behind the other, small ones through a window."""
    cdef const uint8_t *cursor
    cdef const uint8_t *limit
    cdef object window  # owns cursor .. limit
    # Bytes on disk behind this reader: what a file may ask for grows with it.
    cdef readonly uint64_t disk_bytes
    cdef readonly uint64_t consumed  # all before the window's end

    cdef int refill(self, size_t count) except -1:
        """Makes at least `count` (up to WINDOW_BYTES) bytes contiguous at the cursor."""
        raise NotImplementedError

    cdef inline const uint8_t *need(self, size_t count) except NULL:
        cdef const uint8_t *at
        if <size_t>(self.limit - self.cursor) < count:
            self.refill(count)
        at = self.cursor
        self.cursor += count
        return at

    cdef object payload(self, uint64_t count):
        """`count` bytes as bytes or a memoryview."""
        raise NotImplementedError

    cdef uint64_t start_trace(self) except? 0xFFFFFFFFFFFFFFFF:
        """Between two traces. -> bytes of payloads in memory that the last one has."""
        return 0

    cpdef read(self, uint64_t count):
        """Exactly `count` bytes; InvalidInputError where there are fewer."""
        return self.payload(count)

    cdef bytes line(self, uint64_t max_bytes, str refusal):
        cdef const uint8_t *found
        cdef size_t have
        cdef list pieces = []
        cdef uint64_t total = 0
        while True:
            have = self.limit - self.cursor
            found = <const uint8_t *>memchr(self.cursor, 10, have) if have else NULL
            if found != NULL:
                have = found - self.cursor
            total += have
            if total > max_bytes:
                raise _refuse(refusal)
            pieces.append(PyBytes_FromStringAndSize(<const char *>self.cursor, have))
            self.cursor += have
            if found != NULL:
                self.cursor += 1
                return <bytes>pieces[0] if len(pieces) == 1 else b"".join(pieces)
            self.refill_line(len(pieces))

    cdef int refill_line(self, size_t step) except -1:
        self.refill(1)
        return 0

    def at_end(self):
        raise NotImplementedError


cdef struct _Copy:
    void *out
    const void *source
    size_t count


cdef int do_copy(void *context) noexcept nogil:
    cdef _Copy *c = <_Copy *>context
    memcpy(c.out, c.source, c.count)
    return 0


cdef class BufferReader(ByteReader):
    """A buffer read from `begin` to `end`; payloads are views of it."""
    cdef Py_buffer buffer
    cdef object view
    cdef uint64_t position  # of the window's end
    cdef uint64_t end

    def __cinit__(self, buffer, begin=0, end=None):
        PyObject_GetBuffer(buffer, &self.buffer, PyBUF_SIMPLE)
        self.view = memoryview(buffer).cast("B")
        cdef uint64_t size = self.buffer.len
        self.end = size if end is None else min(<uint64_t>end, size)
        self.position = min(<uint64_t>begin, self.end)
        self.disk_bytes = self.end - self.position
        self.window = bytearray(WINDOW_BYTES)
        self.cursor = self.limit = <const uint8_t *>PyByteArray_AS_STRING(self.window)

    def __dealloc__(self):
        PyBuffer_Release(&self.buffer)

    cdef int load(self, size_t wanted) except -1:
        """A window of `wanted` bytes, or what is left, from the cursor on."""
        cdef uint64_t at = self.position - <uint64_t>(self.limit - self.cursor)
        cdef size_t count = min(<uint64_t>wanted, self.end - at)
        cdef uint8_t *out
        if <size_t>len(self.window) < count:
            self.window = bytearray(count)
        out = <uint8_t *>PyByteArray_AS_STRING(self.window)
        # Copied, not read in place: what is looked at twice cannot change in between.
        cdef _Copy copy = _Copy(out, <const uint8_t *>self.buffer.buf + at, count)
        if ts_sigbus_guard(do_copy, &copy) == TS_ERR_FAULT:
            raise_fault(ts_sigbus_fault())
        self.cursor = out
        self.limit = out + count
        self.position = at + count
        self.consumed = self.position
        return 0

    cdef int refill(self, size_t count) except -1:
        self.load(WINDOW_BYTES)
        if <size_t>(self.limit - self.cursor) < count:
            raise _truncated()
        return 0

    cdef int refill_line(self, size_t step) except -1:
        # Protocol 0 writes a whole array as one line.
        self.load(min(<size_t>WINDOW_BYTES << min(step, <size_t>8), <size_t>MAX_WINDOW_BYTES))
        if self.limit == self.cursor:
            raise _truncated()
        return 0

    cdef object payload(self, uint64_t count):
        cdef uint64_t at = self.position - <uint64_t>(self.limit - self.cursor)
        if count > self.end - at:
            raise _truncated()
        if count < SMALL_BYTES:
            return PyBytes_FromStringAndSize(<const char *>self.need(count), count)
        self.cursor = self.limit
        self.position = self.consumed = at + count
        return self.view[at:at + count]

    def at_end(self):
        return self.cursor == self.limit and self.position >= self.end


cdef class ChunkReader(ByteReader):
    """Pieces of bytes one behind the other, as next_piece() gives them; b"" ends them.

    A payload that lies in one piece is a view of it, one across pieces is copied out: both up
    to max_memory of a trace, where a view counts as its whole piece, which it keeps alive.
    Beyond that they go into spill(count), which gives an object with write(piece) and
    finish() -> memoryview. One of more than max_payload bytes is refused.
    """
    cdef object next_piece, spill, view
    cdef uint64_t max_memory, max_payload, in_memory
    cdef bint ended, is_charged

    def __init__(self, next_piece, spill, *, uint64_t disk_bytes, uint64_t max_memory, uint64_t max_payload):
        self.next_piece, self.spill = next_piece, spill
        self.disk_bytes, self.max_memory, self.max_payload = disk_bytes, max_memory, max_payload
        self.set_window(b"")

    cdef uint64_t start_trace(self) except? 0xFFFFFFFFFFFFFFFF:
        cdef uint64_t held = self.in_memory
        self.in_memory = 0
        self.is_charged = False
        return held

    cdef bint advance(self) except -1:
        """Loads the next piece; False at the end. The window is used up."""
        cdef bytes piece
        if self.ended:
            return False
        piece = self.next_piece()
        self.ended = len(piece) == 0
        self.set_window(piece)
        self.consumed += len(piece)
        return not self.ended

    cdef int set_window(self, bytes window) except -1:
        self.window, self.view, self.is_charged = window, None, False
        self.cursor = <const uint8_t *>PyBytes_AS_STRING(window)
        self.limit = self.cursor + len(window)
        return 0

    cdef int refill(self, size_t count) except -1:
        cdef bytes head = PyBytes_FromStringAndSize(<const char *>self.cursor, self.limit - self.cursor)
        cdef bytes joined
        while True:
            if not self.advance():
                raise _truncated()
            if not head:
                if <size_t>(self.limit - self.cursor) >= count:
                    return 0
                head = self.window
                continue
            joined = head + <bytes>self.window
            self.set_window(joined)
            if <size_t>len(joined) >= count:
                return 0
            head = joined

    cdef object payload(self, uint64_t count):
        cdef bytes whole
        if count < SMALL_BYTES:
            return PyBytes_FromStringAndSize(<const char *>self.need(count), count)
        if count > self.max_payload:
            raise _refuse(f"a value of {count:,} bytes inside gzip, at most {self.max_payload:,}")
        if count <= <uint64_t>(self.limit - self.cursor) and self.charge():
            return self.viewed(count)
        if self.in_memory + count > self.max_memory:
            return self.spilled(count)
        # Asked for at once up to max_memory only: no file makes it larger by what it says.
        whole = PyBytes_FromStringAndSize(NULL, count)
        self.copy(<uint8_t *>PyBytes_AS_STRING(whole), count)
        self.in_memory += count
        return whole

    cdef bint charge(self) except -1:
        """Whether there is room for a view, and so for the whole window."""
        cdef uint64_t size = len(<bytes>self.window)
        if not self.is_charged and self.in_memory + size <= self.max_memory:
            self.in_memory += size
            self.is_charged = True
        return self.is_charged

    cdef object viewed(self, uint64_t count):
        cdef uint64_t begin = self.cursor - <const uint8_t *>PyBytes_AS_STRING(self.window)
        if self.view is None:
            self.view = memoryview(self.window)
        self.cursor += count
        return self.view[begin:begin + count]

    cdef object spilled(self, uint64_t count):
        cdef uint64_t left = count, take, begin
        room = self.spill(count)
        while left:
            if self.cursor == self.limit and not self.advance():
                raise _truncated()
            take = min(left, <uint64_t>(self.limit - self.cursor))
            begin = self.cursor - <const uint8_t *>PyBytes_AS_STRING(self.window)
            room.write(memoryview(self.window)[begin:begin + take])
            self.cursor += take
            left -= take
        return room.finish()

    cdef int copy(self, uint8_t *out, uint64_t count) except -1:
        cdef uint64_t done = 0, take
        cdef const uint8_t *piece
        while done < count:
            if self.cursor == self.limit and not self.advance():
                raise _truncated()
            take = min(count - done, <uint64_t>(self.limit - self.cursor))
            piece = self.cursor
            if take < GIL_BYTES:
                memcpy(out + done, piece, take)
            else:
                with nogil:
                    memcpy(out + done, piece, take)
            self.cursor += take
            done += take
        return 0

    def at_end(self):
        return self.cursor == self.limit and not self.advance()


cdef class SafeUnpickler:
    """Reads one pickle; refuses by InvalidInputError.

    Iterating gives the items of a list at the top one by one as they become complete;
    afterwards `result` is the object (a list whose
    items were handed on is empty). `load()` gives the whole object. Of what finished items
    have put into the memo, about retained_bytes stay for later ones to refer to, and small
    values and those of the types `kept` for ever.
    """
    cdef ByteReader source
    cdef object lookup, builder, draft, persistent
    cdef list stack
    cdef list marks
    cdef Py_ssize_t mark  # index of the innermost mark on the stack, or -1
    cdef list memo
    cdef dict sparse  # memo keys that are not dense
    cdef bytearray used  # whether a memo entry was asked for again
    cdef Py_ssize_t swept  # memo entries below this were looked at
    cdef list charges  # (first memo key after a trace, bytes its entries retain), oldest first
    cdef uint64_t retained, retained_limit, live, live_limit
    cdef uint64_t num_opcodes
    cdef tuple kept
    cdef list root
    cdef list ready
    cdef bint streaming, finished
    cdef readonly object result
    cdef readonly Py_ssize_t num_streamed

    def __init__(self, ByteReader source, *, lookup, type builder, type draft, persistent,
                 uint64_t retained_bytes, tuple kept):
        self.source = source
        self.lookup, self.builder, self.draft, self.persistent = lookup, builder, draft, persistent
        self.retained_limit, self.kept = retained_bytes, kept
        self.stack, self.marks, self.memo, self.sparse = [], [], [], {}
        self.used = bytearray()
        self.charges, self.ready = [], []
        self.live_limit = LIVE_BYTES + LIVE_PER_BYTE * source.disk_bytes
        self.mark = -1

    # Interface

    def load(self):
        """The whole object."""
        self.streaming = False
        self._run()
        return self.result

    def __iter__(self):
        self.streaming = True
        return self

    def __next__(self):
        while not self.ready:
            if self.finished:
                raise StopIteration
            self._run()
        self.num_streamed += 1
        return self.ready.pop()

    def _run(self):
        cdef int code = 0
        try:
            while True:
                code = self.source.need(1)[0]
                if self.step(code):
                    return
        except InvalidInputError:
            raise
        except (IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise _refuse(f"not a well-formed pickle: {type(error).__name__} at opcode 0x{code:02x}") from None

    # Stack, marks, memo

    cdef inline int push(self, value, uint64_t num_bytes) except -1:
        self.live += num_bytes
        if self.live > self.live_limit or len(self.stack) >= MAX_STACK:
            raise _refuse("the pickle nests or piles up more than a file of traces does")
        self.stack.append(value)
        return 0

    cdef inline object pop(self):
        # Not beyond the innermost mark: what lies below belongs to another value.
        if len(self.stack) <= self.mark + 1 and self.mark >= 0 or len(self.stack) == 0:
            raise _refuse("not a well-formed pickle: it takes what is not there")
        return self.stack.pop()

    cdef inline object top(self):
        if len(self.stack) <= self.mark + 1 and self.mark >= 0 or len(self.stack) == 0:
            raise _refuse("not a well-formed pickle: it takes what is not there")
        return self.stack[len(self.stack) - 1]

    cdef inline int cut(self, Py_ssize_t size) except -1:
        """Takes all off the stack but the lowest `size`."""
        return PyList_SetSlice(self.stack, size, len(self.stack), <list>NULL)

    cdef list pop_mark(self):
        cdef list items
        if self.mark < 0:
            raise _refuse("not a well-formed pickle: it goes back to a mark that is not there")
        items = PyList_GetSlice(self.stack, self.mark + 1, len(self.stack))
        self.cut(self.mark)
        self.marks.pop()
        self.mark = self.marks[len(self.marks) - 1] if self.marks else -1
        return items

    cdef int put(self, uint64_t key) except -1:
        cdef Py_ssize_t count = len(self.memo)
        value = self.top()
        if <uint64_t>(count + len(self.sparse)) >= MAX_MEMO + self.source.consumed // MEMO_PER_BYTES:
            raise _refuse("the pickle's memo grows beyond what a file of traces needs")
        if key == <uint64_t>count:
            self.memo.append(value)
            self.used.append(0)
        elif key < <uint64_t>count:
            self.memo[<Py_ssize_t>key] = value
        else:
            self.live += 100
            self.sparse[key] = value
        return 0

    cdef int get(self, uint64_t key) except -1:
        if key < <uint64_t>len(self.memo):
            value = self.memo[<Py_ssize_t>key]
            if self.streaming and value is self.root and value is not None:
                raise _refuse("a trace holds the list that it is in")
            if value is _RELEASED:
                raise _refuse(SHARED)
            self.used[<Py_ssize_t>key] = 1
        else:
            value = self.sparse.get(key, _UNSET)
            if value is _UNSET:
                raise _refuse("the pickle refers to an object that is not there")
        self.push(value, 8)
        return 0

    # Handing traces on

    cdef bint above_root(self):
        """Whether the stack is the root list and complete items of it."""
        if self.root is None or len(self.stack) == 0 or self.stack[0] is not self.root:
            return False
        if self.mark < 0:
            return len(self.stack) == 2
        return self.mark == 1 and len(self.marks) == 1

    cdef int emit(self) except -1:
        """Takes the complete items above the root list off the stack."""
        cdef Py_ssize_t first = 1 if self.mark < 0 else 2
        cdef list items = self.stack[first:]
        if not items:
            return 0
        self.cut(first)
        items.reverse()
        self.ready = items
        self.live += self.source.start_trace()
        self.charges.append((len(self.memo), self.live))
        self.retained += self.live
        self.live = 0
        self.sweep()
        return 1

    cdef int sweep(self) except -1:
        """Gives up what old traces hold and no later one has asked for; not of the last
        one, whose dtypes and texts nobody has had the time to ask for."""
        cdef Py_ssize_t end, k
        while self.retained > self.retained_limit and len(self.charges) > 1:
            end, held = self.charges.pop(0)
            for k in range(self.swept, end):
                if not self.used[k] and not self.is_small(self.memo[k]):
                    self.memo[k] = _RELEASED
            self.swept = max(self.swept, end)
            self.retained -= held
        return 0

    cdef bint is_small(self, value) except -1:
        kind = type(value)
        if kind is tuple:  # most of them are
            return False
        if kind is str or kind is bytes:
            return len(value) < SMALL_BYTES
        return value is None or kind in (int, float, bool) or isinstance(value, self.kept)

    # Values

    cdef str text(self, uint64_t count):
        cdef const uint8_t *at
        cdef object data
        if count <= SMALL_BYTES:
            at = self.source.need(count)
            return self.decoded(<const char *>at, count)
        # Counted before it is made, twice: as utf-8 and as text.
        self.live += 2 * count
        if self.live > self.live_limit:
            raise _refuse(MUCH_TEXT)
        data = self.source.payload(count)
        try:
            return str(data, "utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise _refuse("found text that is not utf-8") from None

    cdef str decoded(self, const char *data, Py_ssize_t count):
        try:
            return PyUnicode_DecodeUTF8(data, count, "surrogatepass")
        except UnicodeDecodeError:
            raise _refuse("found text that is not utf-8") from None

    cdef uint64_t little(self, size_t size) except? 0xFFFFFFFFFFFFFFFF:
        cdef const uint8_t *at = self.source.need(size)
        cdef uint64_t value = 0
        cdef size_t k
        for k in range(size):
            value |= <uint64_t>at[k] << (8 * k)
        return value

    cdef object decimal(self, bint is_long):
        cdef bytes line = self.source.line(MAX_DIGITS, LONG_INTEGER)
        if not is_long and (line == b"00" or line == b"01"):
            return line == b"01"  # how protocol 0 writes False and True
        return int(line.rstrip(b"L") if is_long else line)

    cdef uint64_t key_line(self) except? 0xFFFFFFFFFFFFFFFF:
        value = self.decimal(False)
        if not 0 <= value < 1 << 62:
            raise _refuse("not a well-formed pickle: a memo key out of range")
        return value

    cdef object long_(self, uint64_t count):
        if count > MAX_LONG_BYTES:
            raise _refuse(LONG_INTEGER)
        if count == 0:
            return 0
        return int.from_bytes(PyBytes_FromStringAndSize(<const char *>self.source.need(count), count), "little", signed=True)

    cdef bytes text_line(self):
        # Counted as pieces, as bytes and as text.
        cdef bytes line = self.source.line((self.live_limit - self.live) // 4, MUCH_TEXT)
        self.live += 4 * <uint64_t>len(line)
        return line

    cdef int push_text(self, uint64_t count) except -1:
        cdef str value = self.text(count)
        return self.push(value, 64 + count)

    cdef int push_latin1(self, uint64_t count) except -1:
        self.live += 2 * count
        if self.live > self.live_limit:
            raise _refuse(MUCH_TEXT)
        return self.push(str(self.source.payload(count), "latin1"), 64)

    cdef int push_bytes(self, uint64_t count) except -1:
        value = self.source.payload(count)
        return self.push(value, 64 + count if count < SMALL_BYTES else 256)

    cdef int push_tuple(self, Py_ssize_t count) except -1:
        cdef Py_ssize_t size = len(self.stack)
        cdef tuple items
        if size - (self.mark + 1 if self.mark >= 0 else 0) < count:
            raise _refuse("not a well-formed pickle: a tuple of what is not there")
        items = PyList_AsTuple(PyList_GetSlice(self.stack, size - count, size))
        self.cut(size - count)
        return self.push(items, 64 + 8 * count)

    cdef int push_dict(self, list items) except -1:
        cdef dict value = {}
        self.fill(value, items)
        return self.push(value, 256)

    cdef int fill(self, dict target, list items) except -1:
        cdef Py_ssize_t k
        if len(items) % 2:
            raise _refuse("not a well-formed pickle: a key without a value")
        for k in range(0, len(items), 2):
            check_key(items[k])
            target[items[k]] = items[k + 1]
        self.live += 50 * len(items)
        return 0

    cdef int step(self, int code) except -1:
        """Executes one opcode; 1 where there is something for the caller, or the end."""
        cdef const uint8_t *at
        cdef list items
        cdef uint64_t key
        cdef double number
        self.num_opcodes += 1
        if self.num_opcodes > MAX_OPCODES:
            raise _refuse("the pickle has more opcodes than a file of traces")
        if code == BINGET:
            self.get(self.source.need(1)[0])
        elif code == MEMOIZE:
            self.put(len(self.memo) + len(self.sparse))
        elif code == BINPUT:
            self.put(self.source.need(1)[0])
        elif code == LONG_BINPUT:
            self.put(self.little(4))
        elif code == LONG_BINGET:
            self.get(self.little(4))
        elif code == BININT1:
            self.push(self.source.need(1)[0], 8)
        elif code == BININT2:
            self.push(self.little(2), 32)
        elif code == BININT:
            self.push(<int32_t>self.little(4), 32)
        elif code == NONE:
            self.push(None, 8)
        elif code == NEWTRUE:
            self.push(True, 8)
        elif code == NEWFALSE:
            self.push(False, 8)
        elif code == SHORT_BINUNICODE:
            self.push_text(self.little(1))
        elif code == BINUNICODE:
            self.push_text(self.little(4))
        elif code == BINUNICODE8:
            self.push_text(self.little(8))
        elif code == BINBYTES:
            self.push_bytes(self.little(4))
        elif code == SHORT_BINBYTES:
            self.push_bytes(self.little(1))
        elif code == BINBYTES8 or code == BYTEARRAY8:
            self.push_bytes(self.little(8))
        elif code == TUPLE1 or code == TUPLE2 or code == TUPLE3:
            self.push_tuple(code - TUPLE1 + 1)
        elif code == EMPTY_TUPLE:
            self.push((), 8)
        elif code == MARK:
            if len(self.marks) >= MAX_DEPTH:
                raise _refuse("the pickle nests or piles up more than a file of traces does")
            self.marks.append(len(self.stack))
            self.mark = len(self.stack)
            # A place of its own keeps what lies below out of reach.
            self.push(_RELEASED, 8)
        elif code == TUPLE:
            items = self.pop_mark()
            self.push(PyList_AsTuple(items), 64 + 8 * len(items))
        elif code == REDUCE:
            args = self.pop()
            target = self.pop()
            if not isinstance(target, self.builder) or type(args) is not tuple:
                raise _refuse("the pickle calls something that is not a class it may name")
            value = target.call(args)
            self.push(value, 200 + (len(<bytes>value) if type(value) is bytes else 0))
        elif code == BUILD:
            state = self.pop()
            target = self.top()
            if not isinstance(target, self.draft):
                raise _refuse(f"the pickle gives a state to a {type(target).__name__}")
            target.build(state)
        elif code == EMPTY_LIST:
            self.push_list([])
        elif code == LIST:
            self.push_list(self.pop_mark())
        elif code == APPEND:
            value = self.pop()
            target = self.top()
            if type(target) is not list:
                raise _refuse(f"not a well-formed pickle: items are added to a {type(target).__name__}")
            if self.streaming and target is self.root and len(self.stack) == 1:
                self.stack.append(value)
                return self.emit()
            self.live += 8
            (<list>target).append(value)
        elif code == APPENDS:
            if self.streaming and self.above_root() and self.mark == 1 and self.emit():
                self.pop_mark()
                return 1
            items = self.pop_mark()
            target = self.top()
            if type(target) is not list:
                raise _refuse(f"not a well-formed pickle: items are added to a {type(target).__name__}")
            self.live += 8 * len(items)
            (<list>target).extend(items)
        elif code == EMPTY_DICT:
            # Beside a complete dict in the list at the top: that one is whole.
            if self.streaming and self.mark == 1 and self.above_root():
                last = self.stack[len(self.stack) - 1]
                if type(last) is dict and last:
                    self.emit()
                    self.push({}, 256)
                    return 1
            self.push({}, 256)
        elif code == DICT:
            self.push_dict(self.pop_mark())
        elif code == SETITEM:
            items = [self.pop(), None]
            items[1] = items[0]
            items[0] = self.pop()
            target = self.top()
            if type(target) is not dict:
                raise _refuse(f"not a well-formed pickle: items are added to a {type(target).__name__}")
            self.fill(<dict>target, items)
        elif code == SETITEMS:
            items = self.pop_mark()
            target = self.top()
            if type(target) is not dict:
                raise _refuse(f"not a well-formed pickle: items are added to a {type(target).__name__}")
            self.fill(<dict>target, items)
        elif code == BINFLOAT:
            number = unpack_double(self.source.need(8))
            self.push(number, 32)
        elif code == LONG1:
            self.push(self.long_(self.little(1)), 100)
        elif code == LONG4:
            self.push(self.long_(self.little(4)), 100)
        elif code == STACK_GLOBAL:
            name = self.pop()
            module = self.pop()
            self.push(self.lookup(module, name), 8)
        elif code == GLOBAL:
            module = self.source.line(MAX_NAME_BYTES, LONG_NAME)
            name = self.source.line(MAX_NAME_BYTES, LONG_NAME)
            self.push(self.lookup(module.decode("utf-8", "replace"), name.decode("utf-8", "replace")), 8)
        elif code == NEWOBJ:
            args = self.pop()
            target = self.pop()
            if not isinstance(target, self.builder) or type(args) is not tuple:
                raise _refuse("the pickle makes an object of something that is not a class it may name")
            self.push(target.new(args), 200)
        elif code == BINPERSID:
            if self.persistent is None:
                raise _refuse("a persistent id outside a torch file")
            self.push(self.persistent(self.pop()), 200)
        elif code == GET:
            self.get(self.key_line())
        elif code == PUT:
            self.put(self.key_line())
        elif code == INT:
            self.push(self.decimal(False), 100)
        elif code == LONG:
            self.push(self.decimal(True), 100)
        elif code == FLOAT:
            line = self.source.line(MAX_FLOAT_DIGITS, "found a number of more than 64 digits")
            self.push(float(line), 32)
        elif code == STRING:
            line = self.text_line()
            if len(line) < 2 or line[:1] != line[len(line) - 1:] or line[:1] not in b"'\"":
                raise _refuse("found a string without quotes")
            # Escapes of Python 2 strings, bytes above 127 as latin1.
            self.push(line[1:len(line) - 1].decode("unicode_escape"), 64 + len(line))
        elif code == BINSTRING:
            self.push_latin1(self.little(4))
        elif code == SHORT_BINSTRING:
            self.push_latin1(self.little(1))
        elif code == UNICODE:
            line = self.text_line()
            self.push(line.decode("raw_unicode_escape"), 64 + len(line))
        elif code == POP:
            if self.stack and self.mark == len(self.stack) - 1:
                self.pop_mark()
            else:
                self.pop()
        elif code == POP_MARK:
            self.pop_mark()
        elif code == PROTO:
            at = self.source.need(1)
            if at[0] > 5:
                raise _refuse(f"pickle protocol {at[0]}, expected 0 to 5")
        elif code == FRAME:
            self.source.need(8)
        elif code == STOP:
            return self.stop()
        else:
            raise _refuse(f"pickle opcode 0x{code:02x} is not one a file of traces has")
        return 0

    cdef int push_list(self, list value) except -1:
        if self.root is None and not self.stack and not value:
            self.root = value
        return self.push(value, 64 + 8 * len(value))

    cdef int stop(self) except -1:
        if len(self.stack) != 1 or self.mark >= 0:
            raise _refuse("not a well-formed pickle: it does not end with one object")
        self.result = self.stack[0]
        self.finished = True
        if self.num_streamed and self.result is not self.root:
            raise _refuse("a list of traces with something around it")
        if self.streaming and self.root is not None and self.result is self.root:
            # What other opcodes have put into the list.
            self.ready = self.root[::-1]
            self.root.clear()
        return 1


cdef double unpack_double(const uint8_t *at) noexcept:
    cdef uint64_t bits = 0
    cdef double value
    cdef int k
    for k in range(8):
        bits = bits << 8 | at[k]
    memcpy(&value, &bits, 8)
    return value


cdef int check_key(key) except -1:
    # A tuple nested a million deep ends the interpreter when it is hashed.
    if key is not None and type(key) not in (str, int, float, bool, bytes):
        raise _refuse(f"found a dict key of type {type(key).__name__}, expected a string or number")
    return 0
