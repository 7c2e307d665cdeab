# cython: language_level=3, binding=True, boundscheck=False, wraparound=False
"""A restricted unpickler: it executes opcodes on inert values and never imports or calls what a file names.

It implements the pickle machine that the standard module pickletools documents, for the opcodes that
files of traces contain. The caller decides the meaning of names: `find_class` maps a name to a
`global_type`, whose call(args) and new(args) return inert values; build(state) and add_items(items) complete a
`value_type`; `persistent_load` resolves a persistent id. Sets become lists.

One module of over 400 lines, because stack, memo and opcodes share C-level state within a module.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.memoryview cimport PyMemoryView_Check, PyMemoryView_GET_BUFFER
from cpython.list cimport PyList_AsTuple, PyList_GetSlice, PyList_SetSlice
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int32_t, uint8_t, uint64_t
from libc.string cimport memchr, memcpy

cdef extern from "Python.h":
    double PyFloat_Unpack8(const char *data, int is_little_endian) except? -1.0

from collections import deque

from tracestore.errors import InvalidInputError

import numpy as np

from tracestore._core.mapping cimport run_guarded

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
    BINBYTES8 = 142, EMPTY_SET = 143, ADDITEMS = 144, FROZENSET = 145, STACK_GLOBAL = 147, MEMOIZE = 148
    FRAME = 149, BYTEARRAY8 = 150

# The limits are C constants because every opcode checks them.
cdef uint64_t MAX_OPCODES = 1 << 31
cdef enum:
    MAX_DEPTH = 1_000
    MAX_STACK = 1_000_000
    MAX_LONG_BYTES = 64
    MAX_DIGITS = 160
    MAX_FLOAT_DIGITS = 64
    MAX_KEY_PARTS = 8
    MAX_NAME_BYTES = 1_000
    # Limit of memo entries, plus one per MEMO_PER_BYTES bytes of the file. Real files have one entry per
    # some thousand bytes.
    MAX_MEMO = 4_000_000
    MEMO_PER_BYTES = 256
TOO_MUCH_TEXT = "the pickle contains more text than a file of traces"
LONG_INTEGER = "found an integer of more than 512 bits"
LONG_NAME = "found a class name of more than 1,000 characters"
# Smaller payloads are copied to bytes, larger ones are views if possible.
cdef enum:
    SMALL_BYTES = 4096
    # A smaller copy takes less time than another thread needs to acquire the GIL.
    GIL_BYTES = 1 << 18
    WINDOW_BYTES = 4096
    MAX_WINDOW_BYTES = 1 << 20
    # Memory limit of the values of one trace without its arrays: a constant, plus LIVE_PER_BYTE for each
    # byte of the file. A trace of 100,000 tokens needs 13 MB.
    LIVE_BYTES = 24 << 20
    LIVE_PER_BYTE = 4
SHARED_OBJECT = "two distant traces share one object; save them separately, or as an uncompressed pickle of protocol 4"


cdef class EvictedMemo:
    """Placeholder for an object that was released with its trace."""

cdef EvictedMemo _EVICTED = EvictedMemo()
cdef object _UNSET = object()


cdef object _invalid(reason):
    return InvalidInputError(reason)


cdef object _truncated():
    return InvalidInputError("truncated: the file ends inside a value")


# No garbage collection: clearing a cycle would drop `BufferReader.buffer` without releasing it, and leave its memoryview
# exported. Neither the window nor a buffer refers back to a reader.
@cython.no_gc
cdef class ByteReader:
    """A stream of bytes for an unpickler; small reads go through a window."""
    cdef const uint8_t *cursor
    cdef const uint8_t *limit
    cdef object window  # owns cursor .. limit
    # Bytes of the file on disk, which scale the limits.
    cdef readonly uint64_t disk_bytes
    cdef readonly uint64_t consumed  # bytes up to the end of the window

    cdef int refill(self, size_t count) except -1:
        """Load at least `count` contiguous bytes, up to WINDOW_BYTES, at the cursor."""
        raise NotImplementedError

    cdef inline const uint8_t *next_bytes(self, size_t count) except NULL:
        """Return the address of the next `count` bytes and advance."""
        cdef const uint8_t *at
        if <size_t>(self.limit - self.cursor) < count:
            self.refill(count)
        at = self.cursor
        self.cursor += count
        return at

    cdef object payload(self, uint64_t count):
        """Return the next `count` bytes as bytes or a memoryview."""
        raise NotImplementedError

    cdef uint64_t start_trace(self) except? 0xFFFFFFFFFFFFFFFF:
        """Start the accounting of the next trace. Returns the payload bytes in memory of the last one."""
        return 0

    cpdef read(self, uint64_t count):
        """Return exactly `count` bytes. Raises InvalidInputError at the end of the stream."""
        return self.payload(count)

    cdef bytes line(self, uint64_t max_bytes, str message):
        """Return the next line without its newline. `message` is the error of a longer one."""
        cdef const uint8_t *found
        cdef size_t available
        cdef list chunks = []
        cdef uint64_t total = 0
        while True:
            available = self.limit - self.cursor
            found = <const uint8_t *>memchr(self.cursor, 10, available) if available else NULL
            if found != NULL:
                available = found - self.cursor
            total += available
            if total > max_bytes:
                raise _invalid(message)
            chunks.append(PyBytes_FromStringAndSize(<const char *>self.cursor, available))
            self.cursor += available
            if found != NULL:
                self.cursor += 1
                return <bytes>chunks[0] if len(chunks) == 1 else b"".join(chunks)
            self.refill_line(len(chunks))

    cdef int refill_line(self, size_t step) except -1:
        self.refill(1)
        return 0

    def is_eof(self):
        """Return whether the stream is exhausted."""
        raise NotImplementedError

    def peek(self):
        """Return the next byte without reading it. Raises InvalidInputError at the end of the stream."""
        cdef int value = self.next_bytes(1)[0]
        self.cursor -= 1
        return value


cdef struct _Copy:
    void *out
    const void *source
    size_t count


cdef int _copy(void *context) noexcept nogil:
    cdef _Copy *c = <_Copy *>context
    memcpy(c.out, c.source, c.count)
    return 0


@cython.no_gc
cdef class BufferReader(ByteReader):
    """A ByteReader of a buffer; payloads are views of it."""
    cdef Py_buffer buffer
    cdef object view
    cdef uint64_t position  # end of the window
    cdef uint64_t end

    def __cinit__(self, buffer):
        PyObject_GetBuffer(buffer, &self.buffer, PyBUF_SIMPLE)
        self.view = memoryview(buffer).cast("B")
        self.end = self.disk_bytes = self.buffer.len
        self.window = bytearray(WINDOW_BYTES)
        self.cursor = self.limit = <const uint8_t *>PyByteArray_AS_STRING(self.window)

    def __dealloc__(self):
        PyBuffer_Release(&self.buffer)

    cdef int load(self, size_t size) except -1:
        """Load a window of `size` bytes, or the rest, at the cursor."""
        cdef uint64_t begin = self.position - <uint64_t>(self.limit - self.cursor)
        cdef size_t count = min(<uint64_t>size, self.end - begin)
        cdef uint8_t *out
        if <size_t>len(self.window) < count:
            self.window = bytearray(count)
        out = <uint8_t *>PyByteArray_AS_STRING(self.window)
        # Copy instead of reading in place: a mapped file may change between two reads of a byte.
        cdef _Copy copy = _Copy(out, <const uint8_t *>self.buffer.buf + begin, count)
        run_guarded(_copy, &copy)
        self.cursor = out
        self.limit = out + count
        self.position = begin + count
        self.consumed = self.position
        return 0

    cdef int refill(self, size_t count) except -1:
        self.load(WINDOW_BYTES)
        if <size_t>(self.limit - self.cursor) < count:
            raise _truncated()
        return 0

    cdef int refill_line(self, size_t step) except -1:
        # Protocol 0 writes a whole array as one line, so the window grows.
        self.load(min(<size_t>WINDOW_BYTES << min(step, <size_t>8), <size_t>MAX_WINDOW_BYTES))
        if self.limit == self.cursor:
            raise _truncated()
        return 0

    cdef object payload(self, uint64_t count):
        cdef uint64_t begin = self.position - <uint64_t>(self.limit - self.cursor)
        if count > self.end - begin:
            raise _truncated()
        if count < SMALL_BYTES:
            return PyBytes_FromStringAndSize(<const char *>self.next_bytes(count), count)
        self.cursor = self.limit
        self.position = self.consumed = begin + count
        return self.view[begin:begin + count]

    def is_eof(self):
        return self.cursor == self.limit and self.position >= self.end


cdef class ChunkReader(ByteReader):
    """A ByteReader of the chunks that `next_chunk` returns, up to b"".

    A payload inside one chunk is a view of it; a payload across chunks is a copy. Both count against
    `max_memory` per trace, a view with its whole chunk, which it keeps alive. Further payloads are
    written to a file.

    Parameters
    ----------
    next_chunk : callable
        Returns the next bytes, or b"" at the end.
    spill : callable
        spill(count) returns an object with write(chunk) and finish(), which returns a memoryview.
    disk_bytes : int
        Size of the compressed file.
    max_memory : int
        Limit of payload bytes in memory per trace.
    max_payload : int
        Limit of the size of one payload; a larger one is refused.
    """
    cdef object next_chunk, spill, view
    cdef uint64_t max_memory, max_payload, in_memory
    cdef bint ended, is_charged

    def __init__(self, next_chunk, spill, *, uint64_t disk_bytes, uint64_t max_memory, uint64_t max_payload):
        self.next_chunk, self.spill = next_chunk, spill
        self.disk_bytes, self.max_memory, self.max_payload = disk_bytes, max_memory, max_payload
        self.set_window(b"")

    cdef uint64_t start_trace(self) except? 0xFFFFFFFFFFFFFFFF:
        cdef uint64_t last = self.in_memory
        self.in_memory = 0
        self.is_charged = False
        return last

    cdef bint advance(self) except -1:
        """Replace the exhausted window by the next chunk. Returns False at the end."""
        cdef bytes chunk
        if self.ended:
            return False
        chunk = self.next_chunk()
        self.ended = len(chunk) == 0
        self.set_window(chunk)
        self.consumed += len(chunk)
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
            return PyBytes_FromStringAndSize(<const char *>self.next_bytes(count), count)
        if count > self.max_payload:
            raise _invalid(f"found a value of {count:,} bytes in a compressed file, expected at most {self.max_payload:,}")
        if count <= <uint64_t>(self.limit - self.cursor) and self.charge():
            return self.view_of_window(count)
        if self.in_memory + count > self.max_memory:
            return self.spill_payload(count)
        # At most max_memory bytes are allocated at once, whatever size the file claims.
        whole = PyBytes_FromStringAndSize(NULL, count)
        self.copy(<uint8_t *>PyBytes_AS_STRING(whole), count)
        self.in_memory += count
        return whole

    cdef bint charge(self) except -1:
        """Count the whole window against max_memory, once. Returns False if it does not fit."""
        cdef uint64_t size = len(<bytes>self.window)
        if not self.is_charged and self.in_memory + size <= self.max_memory:
            self.in_memory += size
            self.is_charged = True
        return self.is_charged

    cdef object view_of_window(self, uint64_t count):
        cdef uint64_t begin = self.cursor - <const uint8_t *>PyBytes_AS_STRING(self.window)
        if self.view is None:
            self.view = memoryview(self.window)
        self.cursor += count
        return self.view[begin:begin + count]

    cdef object spill_payload(self, uint64_t count):
        cdef uint64_t left = count, step, begin
        scratch = self.spill(count)
        while left:
            if self.cursor == self.limit and not self.advance():
                raise _truncated()
            step = min(left, <uint64_t>(self.limit - self.cursor))
            begin = self.cursor - <const uint8_t *>PyBytes_AS_STRING(self.window)
            scratch.write(memoryview(self.window)[begin:begin + step])
            self.cursor += step
            left -= step
        return scratch.finish()

    cdef int copy(self, uint8_t *out, uint64_t count) except -1:
        cdef uint64_t done = 0, step
        cdef const uint8_t *src
        while done < count:
            if self.cursor == self.limit and not self.advance():
                raise _truncated()
            step = min(count - done, <uint64_t>(self.limit - self.cursor))
            src = self.cursor
            if step < GIL_BYTES:
                memcpy(out + done, src, step)
            else:
                with nogil:
                    memcpy(out + done, src, step)
            self.cursor += step
            done += step
        return 0

    def is_eof(self):
        return self.cursor == self.limit and not self.advance()


cdef class SafeUnpickler:
    """Read one pickle. Raises InvalidInputError for anything malformed or not allowed.

    Iterating yields the items of a top-level list one by one, as they become complete. Afterwards
    `result` is the object, without the yielded items. `load` returns the whole object instead.

    Parameters
    ----------
    source : ByteReader
    find_class : callable
        find_class(module, name) returns a `global_type` or raises InvalidInputError.
    global_type : type
        Type of the results of `find_class`, with the methods call(args) and new(args).
    value_type : type
        Type of the values that opcodes may complete: BUILD with the method build(state), SETITEMS with
        add_items(items), a list of keys and values.
    persistent_load : callable or None
        Resolves a persistent id. None refuses them.
    retained_bytes : int
        Memory for memo entries of finished items, which later items may refer to.
    retained_types : tuple of type
        Types whose memo entries are never released. Small values are not released either.

    Attributes
    ----------
    result : object
        The unpickled object, once it is complete.
    num_yielded : int
        Number of items yielded so far.
    root : list or None
        The first list of the pickle, without the yielded items.
    """
    cdef ByteReader source
    cdef object find_class, global_type, value_type, persistent_load
    cdef list stack
    cdef list marks
    cdef Py_ssize_t mark  # index of the innermost mark on the stack, or -1
    cdef list memo
    cdef dict sparse  # memo keys that are not dense
    cdef bytearray used  # flags of memo entries that were read
    cdef Py_ssize_t swept  # memo entries below this were examined
    cdef object charges  # (first memo key after a trace, bytes its entries retain), oldest first
    cdef uint64_t retained, retained_limit, live, live_limit
    cdef uint64_t num_opcodes
    cdef tuple retained_types
    cdef readonly list root
    cdef list completed  # items to yield, last one first
    cdef bint streaming, finished
    cdef readonly object result
    cdef readonly Py_ssize_t num_yielded

    def __init__(self, ByteReader source, *, find_class, type global_type, type value_type, persistent_load,
                 uint64_t retained_bytes, tuple retained_types):
        self.source = source
        self.find_class, self.global_type = find_class, global_type
        self.value_type, self.persistent_load = value_type, persistent_load
        self.retained_limit, self.retained_types = retained_bytes, retained_types
        self.stack, self.marks, self.memo, self.sparse = [], [], [], {}
        self.used = bytearray()
        self.charges, self.completed = deque(), []
        self.live_limit = LIVE_BYTES + LIVE_PER_BYTE * source.disk_bytes
        self.mark = -1

    # Interface

    def load(self):
        """Return the whole object."""
        self.streaming = False
        self._run()
        return self.result

    def __iter__(self):
        self.streaming = True
        return self

    def __next__(self):
        while not self.completed:
            if self.finished:
                raise StopIteration
            self._run()
        self.num_yielded += 1
        return self.completed.pop()

    def _run(self):
        cdef int code = 0
        try:
            while True:
                code = self.source.next_bytes(1)[0]
                if self.step(code):
                    return
        except InvalidInputError:
            raise
        except (IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise _invalid(f"not a well-formed pickle: {type(error).__name__} at opcode 0x{code:02x}") from None

    # Stack, marks, memo

    cdef inline int push(self, value, uint64_t num_bytes) except -1:
        self.live += num_bytes
        if self.live > self.live_limit or len(self.stack) >= MAX_STACK:
            raise _invalid("the pickle nests deeper or holds more values than a file of traces")
        self.stack.append(value)
        return 0

    cdef inline object top(self):
        # Stop at the innermost mark: values below it belong to another object.
        if len(self.stack) <= self.mark + 1:
            raise _invalid("not a well-formed pickle: the stack is empty")
        return self.stack[len(self.stack) - 1]

    cdef inline object pop(self):
        self.top()
        return self.stack.pop()

    cdef list top_list(self):
        value = self.top()
        if type(value) is not list:
            raise _invalid(f"not a well-formed pickle: items are added to a {type(value).__name__}")
        return <list>value

    cdef inline int shrink_stack(self, Py_ssize_t size) except -1:
        """Remove all but the lowest `size` values from the stack."""
        return PyList_SetSlice(self.stack, size, len(self.stack), <list>NULL)

    cdef list pop_mark(self):
        cdef list items
        if self.mark < 0:
            raise _invalid("not a well-formed pickle: no mark on the stack")
        items = PyList_GetSlice(self.stack, self.mark + 1, len(self.stack))
        self.shrink_stack(self.mark)
        self.marks.pop()
        self.mark = self.marks[len(self.marks) - 1] if self.marks else -1
        return items

    cdef int put(self, uint64_t key) except -1:
        cdef Py_ssize_t count = len(self.memo)
        value = self.top()
        if <uint64_t>(count + len(self.sparse)) >= MAX_MEMO + self.source.consumed // MEMO_PER_BYTES:
            raise _invalid("the memo of the pickle is larger than a file of traces needs")
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
                raise _invalid("a trace contains the list of traces that it is in")
            if value is _EVICTED:
                raise _invalid(SHARED_OBJECT)
            self.used[<Py_ssize_t>key] = 1
        else:
            value = self.sparse.get(key, _UNSET)
            if value is _UNSET:
                raise _invalid("the pickle refers to a memo entry that does not exist")
        self.push(value, 8)
        return 0

    # Yielding traces

    cdef bint above_root(self):
        """Return whether the stack holds the root list and complete items of it only."""
        if self.root is None or len(self.stack) == 0 or self.stack[0] is not self.root:
            return False
        if self.mark < 0:
            return len(self.stack) == 2
        return self.mark == 1 and len(self.marks) == 1

    cdef int emit(self) except -1:
        """Move the complete items above the root list from the stack to `completed`."""
        cdef Py_ssize_t first = 1 if self.mark < 0 else 2
        cdef list items = self.stack[first:]
        if not items:
            return 0
        self.shrink_stack(first)
        items.reverse()
        self.completed = items
        self.live += self.source.start_trace()
        self.charges.append((len(self.memo), self.live))
        self.retained += self.live
        self.live = 0
        self.sweep()
        return 1

    cdef int sweep(self) except -1:
        """Release the memo entries of earlier traces that no later trace has read. Entries of the last
        trace stay: the next one usually refers to its dtypes and strings."""
        cdef Py_ssize_t end, k
        while self.retained > self.retained_limit and len(self.charges) > 1:
            end, num_bytes = self.charges.popleft()
            for k in range(self.swept, end):
                if not self.used[k] and not self.is_small(self.memo[k]):
                    self.memo[k] = _EVICTED
            self.swept = max(self.swept, end)
            self.retained -= num_bytes
        return 0

    cdef bint is_small(self, value) except -1:
        kind = type(value)
        if kind is tuple:  # the most frequent type
            return False
        if kind is str or kind is bytes:
            return len(value) < SMALL_BYTES
        return value is None or kind in (int, float, bool) or isinstance(value, self.retained_types)

    # Values

    cdef str text(self, uint64_t count):
        try:
            if count <= SMALL_BYTES:
                return PyUnicode_DecodeUTF8(<const char *>self.source.next_bytes(count), count, "surrogatepass")
            # Counted before it is allocated, twice: as UTF-8 and as str.
            self.live += 2 * count
            if self.live > self.live_limit:
                raise _invalid(TOO_MUCH_TEXT)
            return str(self.source.payload(count), "utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise _invalid("found text that is not utf-8") from None

    cdef uint64_t read_uint(self, size_t size) except? 0xFFFFFFFFFFFFFFFF:
        cdef const uint8_t *at = self.source.next_bytes(size)
        cdef uint64_t value = 0
        cdef size_t k
        for k in range(size):
            value |= <uint64_t>at[k] << (8 * k)
        return value

    cdef object decimal(self, bint is_long):
        cdef bytes line = self.source.line(MAX_DIGITS, LONG_INTEGER)
        if not is_long and (line == b"00" or line == b"01"):
            return line == b"01"  # False and True in protocol 0
        return int(line.rstrip(b"L") if is_long else line)

    cdef uint64_t key_line(self) except? 0xFFFFFFFFFFFFFFFF:
        value = self.decimal(False)
        if not 0 <= value < 1 << 62:
            raise _invalid("not a well-formed pickle: a memo key out of range")
        return value

    cdef object long_(self, uint64_t count):
        if count > MAX_LONG_BYTES:
            raise _invalid(LONG_INTEGER)
        if count == 0:
            return 0
        return int.from_bytes(PyBytes_FromStringAndSize(<const char *>self.source.next_bytes(count), count), "little", signed=True)

    cdef bytes text_line(self):
        # Counted as chunks, as bytes and as str.
        cdef bytes line = self.source.line((self.live_limit - self.live) // 4, TOO_MUCH_TEXT)
        self.live += 4 * <uint64_t>len(line)
        return line

    cdef int push_text(self, uint64_t count) except -1:
        cdef str value = self.text(count)
        return self.push(value, 64 + count)

    cdef int push_latin1(self, uint64_t count) except -1:
        self.live += 2 * count
        if self.live > self.live_limit:
            raise _invalid(TOO_MUCH_TEXT)
        return self.push(str(self.source.payload(count), "latin1"), 64)

    cdef int push_bytes(self, uint64_t count) except -1:
        value = self.source.payload(count)
        return self.push(value, 64 + count if count < SMALL_BYTES else 256)

    cdef int push_tuple(self, Py_ssize_t count) except -1:
        cdef Py_ssize_t size = len(self.stack)
        cdef tuple items
        if size - (self.mark + 1) < count:
            raise _invalid("not a well-formed pickle: a tuple of missing items")
        items = PyList_AsTuple(PyList_GetSlice(self.stack, size - count, size))
        self.shrink_stack(size - count)
        return self.push(items, 64 + 8 * count)

    cdef int set_items(self, target, list items) except -1:
        cdef Py_ssize_t k
        if isinstance(target, self.value_type) and len(items) % 2 == 0:
            target.add_items(items)
            self.live += 50 * len(items)
            return 0
        if type(target) is not dict:
            raise _invalid(f"not a well-formed pickle: items are added to a {type(target).__name__}")
        if len(items) % 2:
            raise _invalid("not a well-formed pickle: a key without a value")
        for k in range(0, len(items), 2):
            check_key(items[k])
            (<dict>target)[items[k]] = items[k + 1]
        self.live += 50 * len(items)
        return 0

    cdef int step(self, int code) except -1:
        """Execute one opcode. Returns 1 if items are complete or the pickle ends, else 0."""
        cdef const uint8_t *at
        cdef list items
        self.num_opcodes += 1
        if self.num_opcodes > MAX_OPCODES:
            raise _invalid("the pickle has more opcodes than a file of traces")
        if code == BINGET:
            self.get(self.source.next_bytes(1)[0])
        elif code == MEMOIZE:
            self.put(len(self.memo) + len(self.sparse))
        elif code == BINPUT:
            self.put(self.source.next_bytes(1)[0])
        elif code == LONG_BINPUT:
            self.put(self.read_uint(4))
        elif code == LONG_BINGET:
            self.get(self.read_uint(4))
        elif code == BININT1:
            self.push(self.source.next_bytes(1)[0], 8)
        elif code == BININT2:
            self.push(self.read_uint(2), 32)
        elif code == BININT:
            self.push(<int32_t>self.read_uint(4), 32)
        elif code == NONE:
            self.push(None, 8)
        elif code == NEWTRUE:
            self.push(True, 8)
        elif code == NEWFALSE:
            self.push(False, 8)
        elif code == SHORT_BINUNICODE:
            self.push_text(self.read_uint(1))
        elif code == BINUNICODE:
            self.push_text(self.read_uint(4))
        elif code == BINUNICODE8:
            self.push_text(self.read_uint(8))
        elif code == BINBYTES:
            self.push_bytes(self.read_uint(4))
        elif code == SHORT_BINBYTES:
            self.push_bytes(self.read_uint(1))
        elif code == BINBYTES8 or code == BYTEARRAY8:
            self.push_bytes(self.read_uint(8))
        elif code == TUPLE1 or code == TUPLE2 or code == TUPLE3:
            self.push_tuple(code - TUPLE1 + 1)
        elif code == EMPTY_TUPLE:
            self.push((), 8)
        elif code == MARK:
            if len(self.marks) >= MAX_DEPTH:
                raise _invalid("the pickle nests deeper or holds more values than a file of traces")
            self.marks.append(len(self.stack))
            self.mark = len(self.stack)
            # The mark occupies a slot of the stack, which protects the values below it.
            self.push(_EVICTED, 8)
        elif code == TUPLE:
            items = self.pop_mark()
            self.push(PyList_AsTuple(items), 64 + 8 * len(items))
        elif code == REDUCE or code == NEWOBJ:
            args = self.pop()
            target = self.pop()
            if not isinstance(target, self.global_type) or type(args) is not tuple:
                verb = "calls" if code == REDUCE else "instantiates"
                raise _invalid(f"the pickle {verb} an object that is not an allowed class")
            value = target.call(args) if code == REDUCE else target.new(args)
            self.push(value, 200 + (len(<bytes>value) if type(value) is bytes else 0))
        elif code == BUILD:
            state = self.pop()
            target = self.top()
            if not isinstance(target, self.value_type):
                raise _invalid(f"the pickle sets the state of a {type(target).__name__}")
            target.build(state)
        elif code == EMPTY_LIST:
            self.push_list([])
        elif code == LIST:
            self.push_list(self.pop_mark())
        elif code == APPEND:
            value = self.pop()
            items = self.top_list()
            if self.streaming and items is self.root and len(self.stack) == 1:
                self.stack.append(value)
                return self.emit()
            self.live += 8
            items.append(value)
        elif code == APPENDS or code == ADDITEMS:
            if code == APPENDS and self.streaming and self.above_root() and self.mark == 1 and self.emit():
                self.pop_mark()
                return 1
            items = self.pop_mark()
            self.top_list().extend(items)
            self.live += 8 * len(items)
        elif code == EMPTY_DICT:
            # A new dict next to one in the root list: the previous one is complete.
            if self.streaming and self.mark == 1 and self.above_root():
                last = self.stack[len(self.stack) - 1]
                if type(last) is dict and last:
                    self.emit()
                    self.push({}, 256)
                    return 1
            self.push({}, 256)
        elif code == DICT:
            value = {}
            self.set_items(value, self.pop_mark())
            self.push(value, 256)
        elif code == SETITEM:
            items = [None, self.pop()]
            items[0] = self.pop()
            self.set_items(self.top(), items)
        elif code == SETITEMS:
            items = self.pop_mark()
            self.set_items(self.top(), items)
        elif code == BINFLOAT:
            self.push(PyFloat_Unpack8(<const char *>self.source.next_bytes(8), 0), 32)
        elif code == LONG1:
            self.push(self.long_(self.read_uint(1)), 100)
        elif code == LONG4:
            self.push(self.long_(self.read_uint(4)), 100)
        elif code == STACK_GLOBAL:
            name = self.pop()
            module = self.pop()
            self.push(self.find_class(module, name), 8)
        elif code == GLOBAL:
            module = self.source.line(MAX_NAME_BYTES, LONG_NAME)
            name = self.source.line(MAX_NAME_BYTES, LONG_NAME)
            self.push(self.find_class(module.decode("utf-8", "replace"), name.decode("utf-8", "replace")), 8)
        elif code == BINPERSID:
            if self.persistent_load is None:
                raise _invalid("found a persistent id outside a torch file")
            self.push(self.persistent_load(self.pop()), 200)
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
                raise _invalid("found a string without quotes")
            # Escapes of Python 2 strings; bytes above 127 are Latin-1.
            self.push(line[1:len(line) - 1].decode("unicode_escape"), 64 + len(line))
        elif code == BINSTRING:
            self.push_latin1(self.read_uint(4))
        elif code == SHORT_BINSTRING:
            self.push_latin1(self.read_uint(1))
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
            at = self.source.next_bytes(1)
            if at[0] > 5:
                raise _invalid(f"found pickle protocol {at[0]}, expected 0 to 5")
        elif code == FRAME:
            self.source.next_bytes(8)
        elif code == EMPTY_SET:
            self.push([], 64)
        elif code == FROZENSET:
            items = self.pop_mark()
            self.push(items, 64 + 8 * len(items))
        elif code == STOP:
            return self.stop()
        else:
            raise _invalid(f"found pickle opcode 0x{code:02x}, which a file of traces does not use")
        return 0

    cdef int push_list(self, list value) except -1:
        if self.root is None and not self.stack and not value:
            self.root = value
        return self.push(value, 64 + 8 * len(value))

    cdef int stop(self) except -1:
        if len(self.stack) != 1 or self.mark >= 0:
            raise _invalid("not a well-formed pickle: it does not end with exactly one object")
        self.result = self.stack[0]
        self.finished = True
        if self.streaming and self.root is not None and self.result is self.root:
            # Items that other opcodes have added to the list.
            self.completed = self.root[::-1]
            self.root.clear()
        return 1


cdef int check_key(key) except -1:
    # Hashing a tuple nested a million deep crashes the interpreter.
    cdef object part
    if type(key) is tuple and 2 <= len(key) <= MAX_KEY_PARTS:
        for part in key:
            if type(part) is not str and type(part) is not int:
                raise _invalid(f"found a dict key with a part of type {type(part).__name__}, expected a string or integer")
        return 0
    if isinstance(key, _integer):
        return 0
    if key is not None and type(key) not in (str, int, float, bool, bytes):
        raise _invalid(f"found a dict key of type {type(key).__name__}, expected a string or number")
    return 0


# Arrays

cdef object _ndarray = np.ndarray
cdef object _integer = np.integer
cdef enum:
    MAX_NDIM = 16
cdef Py_ssize_t MAX_ARRAY_BYTES = 1 << 62


def plain_array(tuple state, object dtype, Py_ssize_t itemsize):
    """Return the array of an ndarray state if it is a plain one, else None.

    This is the fast path of ingest.pickles.pickled_values, which reports errors for all other states.

    Parameters
    ----------
    state : tuple
        (version, shape, _, is_fortran, data). It is plain if the shape is a tuple of positive integers
        and data bytes, or a read-only memoryview, of exactly the required size.
    dtype : numpy.dtype
        Type of the values; every bit pattern must be valid.
    itemsize : int
        Size of a value in bytes.

    Returns
    -------
    numpy.ndarray or None
        A read-only view of data.
    """
    cdef Py_ssize_t needed = itemsize, n
    cdef tuple shape
    if len(state) != 5 or type(state[1]) is not tuple or type(state[3]) is not bool:
        return None
    if type(state[4]) is not bytes and not PyMemoryView_Check(state[4]):
        return None
    shape = <tuple> state[1]
    if len(shape) > MAX_NDIM or itemsize <= 0:
        return None
    for item in shape:
        if type(item) is not int or not 0 < item < MAX_ARRAY_BYTES:
            return None
        n = item
        if needed > MAX_ARRAY_BYTES // n:
            return None
        needed *= n
    if type(state[4]) is bytes:
        return _ndarray(shape, dtype, state[4], 0, None, "F" if state[3] else "C") if len(state[4]) == needed else None
    view = PyMemoryView_GET_BUFFER(state[4])
    if view.len != needed or not view.readonly or view.ndim != 1 or view.itemsize != 1:
        return None
    return _ndarray(shape, dtype, state[4], 0, None, "F" if state[3] else "C")
