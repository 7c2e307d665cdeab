# cython: language_level=3, binding=True, boundscheck=False, wraparound=False
"""Assembly of batches in place, in the calling thread or in a pool of threads.

A job takes C-contiguous buffers. `set_output` validates their sizes before anything is written; the
work itself needs no GIL. Element types are the codes of `kernels`; the output has the stored type or
F32.

One module of over 400 lines, because its jobs share C-level classes that Cython inlines within a module.
"""
cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint16_t, uint64_t
from libc.stdlib cimport free, malloc
from posix.unistd cimport getpid

from tracestore._core.csrc cimport (
    TS_ERR_BOUNDS, TS_ERR_FAULT, TS_ERR_NODE, TS_ERR_NOMEM, TS_F16, TS_F32, TS_F64, ts_dtype, ts_dtype_bytes, ts_map,
    ts_map_is_intact, ts_sigbus_fault, ts_sigbus_guard_again
)
from tracestore._core.mapping cimport MappedFile, _View, allocate, raise_error, raise_fault

from tracestore.errors import CorruptStoreError

cdef extern from "gather.h" nogil:
    struct ts_edge_rule:
        double attention_threshold
        double top_k
    struct ts_copy:
        const unsigned char *src
        unsigned char *dst
        size_t items
    int ts_copy_many(const ts_copy *copies, size_t n, ts_dtype dtype, ts_dtype out, int num_threads)
    struct ts_graph:
        const unsigned char *weights
        size_t num_tokens
        int causal
        size_t num_heads
        const int32_t *pairs
        int64_t first_node
        int64_t first_edge
        int64_t num_edges
    struct ts_edge_options:
        ts_dtype dtype "in"
        ts_dtype out
        ts_edge_rule rule
        int mask_diagonal
        size_t mask_sinks
    size_t ts_num_pairs(const ts_graph *graph)
    int ts_average_heads(ts_graph *graphs, size_t n, ts_dtype dtype, size_t H, uint16_t *out, int num_threads)
    int ts_count_edges(ts_graph *graphs, size_t n, const ts_edge_options *options, int num_threads)
    int ts_fill_edges(const ts_graph *graphs, size_t n, const ts_edge_options *options, int num_threads,
                      int64_t *source, int64_t *target, unsigned char *weight)
    int ts_pack_graphs(const ts_graph *graphs, size_t n, const ts_edge_options *options, int num_threads, unsigned char *out,
                       int32_t *degree)

cdef extern from "rows.h" nogil:
    struct ts_rows:
        const unsigned char **arrays
        const int32_t *array
        const int64_t *row
        const int64_t *target
        size_t row_items
        ts_dtype dtype "in"
        ts_dtype out
        unsigned char *dst
    int ts_gather_rows(const ts_rows *rows, size_t n, int num_threads)
    void ts_find_runs(const int64_t *first, size_t num_runs, const int64_t *numbers, size_t n, int64_t *run)
    int ts_sort_roughly(const int64_t *numbers, size_t n, uint64_t total, int64_t *order)

cdef extern from "thread_pool.h" nogil:
    struct ts_thread_pool:
        pass
    struct ts_job:
        void (*run)(void *context) noexcept nogil
        void *context
    ts_thread_pool *ts_thread_pool_start(int num_threads)
    void ts_thread_pool_submit(ts_thread_pool *pool, ts_job *job)
    int ts_thread_pool_wait(ts_thread_pool *pool, ts_job *job, int64_t timeout_ms)
    void ts_thread_pool_cancel(ts_thread_pool *pool, ts_job *job)
    void ts_thread_pool_stop(ts_thread_pool *pool)

cdef extern from "map.h" nogil:
    void ts_map_prefetch(const void *start, size_t num_bytes)
    void ts_map_evict(const void *start, size_t num_bytes)

cdef extern from "platform.h" nogil:
    int64_t ts_major_faults()


@cython.no_gc
cdef class ThreadPool:
    """Threads that run jobs in the order of submission, until `close`.

    A pool belongs to the process that created it. In a forked child every use raises RuntimeError, and
    nothing is freed.
    """
    cdef ts_thread_pool *native
    cdef int pid

    def __cinit__(self, int num_threads):
        self.pid = getpid()
        self.native = ts_thread_pool_start(num_threads)
        if self.native == NULL:
            raise MemoryError("cannot start a thread")

    def __dealloc__(self):
        self._stop()

    cdef void _stop(self) noexcept:
        cdef ts_thread_pool *pool = self.native
        self.native = NULL
        if pool != NULL and self.pid == getpid():
            with nogil:
                ts_thread_pool_stop(pool)

    def close(self) -> None:
        """Cancel the queued jobs, wait for the running ones and join the threads."""
        self._stop()

    cdef int require_usable(self) except -1:
        if self.native == NULL:
            raise RuntimeError("the thread pool is closed")
        if self.pid != getpid():
            raise RuntimeError("the thread pool belongs to the parent process")
        return 0


@cython.no_gc
cdef class Job:
    """Work that needs no GIL. A job runs once: in `run`, or in a pool between `submit` and `wait`.

    Attributes
    ----------
    major_faults : int
        How often the job waited for a disk; known after `wait`.
    """
    cdef ts_job native
    cdef ThreadPool pool
    cdef int status
    cdef const void *fault
    cdef list sources  # the MappedFiles that the job reads, without repetition
    cdef const ts_map **maps
    cdef size_t num_maps
    cdef bint has_output
    cdef int num_threads
    cdef readonly int64_t major_faults

    cdef int work(self) noexcept nogil:
        return 0

    cdef int track_maps(self, list owners) except -1:
        """Record the mappings that the RowRanges and ArrayViews among `owners` read from."""
        cdef MappedFile mapped, last = None
        cdef size_t i
        self.sources = []
        for source in owners:
            if type(source) is RowRange or type(source) is ArrayView:
                mapped = ((<RowRange>source).array if type(source) is RowRange else <ArrayView>source).mapped
                # Neighbors in a batch are often in the same file.
                if mapped is not None and mapped is not last and mapped not in self.sources:
                    self.sources.append(mapped)
                last = mapped
        self.num_maps = len(self.sources)
        self.maps = <const ts_map **>allocate(self.num_maps, sizeof(ts_map *))
        for i in range(self.num_maps):
            self.maps[i] = &(<MappedFile>self.sources[i]).map
        return 0

    cdef int check_result(self, int ret) noexcept nogil:
        """Return the status of finished work: TS_ERR_FAULT also if a truncated file did not fault but
        gave zeros."""
        if ret == TS_ERR_FAULT:
            self.fault = ts_sigbus_fault()
        elif ts_sigbus_guard_again(_check_maps, <void *>self) != 0:
            ret = TS_ERR_FAULT
        return ret

    cdef int raise_error(self, int status) except -1:
        if status == TS_ERR_FAULT:
            raise_fault(self.fault)
        if status == TS_ERR_NODE:
            raise CorruptStoreError("edge_index: an edge leaves its graph; run tracestore verify to find the file")
        return raise_error(status)

    def run(self, int num_threads=1) -> None:
        """Run the job now. Raises CorruptStoreError if a source file was truncated."""
        if not self.has_output:
            raise ValueError("call set_output before the job runs")
        self.num_threads = num_threads
        with nogil:
            self.status = self.check_result(self.work())
        if self.status != 0:
            self.raise_error(self.status)

    def submit(self, ThreadPool pool, int num_threads=1) -> None:
        """Queue the job. Deleting it cancels it, or waits until it is done."""
        pool.require_usable()
        if not self.has_output or self.pool is not None:
            raise ValueError("call set_output once and submit the job once")
        self.num_threads = num_threads
        self.native.run = _run_job
        self.native.context = <void *>self
        self.pool = pool
        ts_thread_pool_submit(pool.native, &self.native)

    def wait(self) -> None:
        """Wait until the job is done. Raises as `run`; a signal handler may raise too."""
        cdef int is_done = 0
        if self.pool is None:
            raise ValueError("the job was not submitted")
        while not is_done:
            self.pool.require_usable()
            with nogil:
                is_done = ts_thread_pool_wait(self.pool.native, &self.native, 100)
            PyErr_CheckSignals()
        self.pool = None
        if self.status != 0:
            self.raise_error(self.status)

    cdef void detach(self) noexcept:
        """Cancel the job or wait for it, before its memory is freed."""
        cdef ts_thread_pool *pool
        if self.pool is not None and self.pool.native != NULL and self.pool.pid == getpid():
            pool = self.pool.native
            with nogil:
                ts_thread_pool_cancel(pool, &self.native)
        self.pool = None
        free(self.maps)
        self.maps = NULL


cdef int _check_maps(void *context) noexcept nogil:
    cdef size_t i
    for i in range((<Job>context).num_maps):
        (<Job>context).fault = (<Job>context).maps[i].base
        if not ts_map_is_intact((<Job>context).maps[i]):
            return 1
    (<Job>context).fault = NULL
    return 0


cdef void _run_job(void *context) noexcept nogil:
    cdef int64_t before = ts_major_faults()
    (<Job>context).status = (<Job>context).check_result((<Job>context).work())
    (<Job>context).major_faults = ts_major_faults() - before


@cython.no_gc
cdef class ArrayView:
    """An array of `num_rows` rows of `row_bytes` in a buffer, or at the beginning of a MappedFile."""
    cdef _View view
    cdef MappedFile mapped
    cdef readonly size_t num_rows, row_bytes

    def __cinit__(self, source, size_t num_rows, size_t row_bytes):
        self.view = _View(source)
        self.num_rows, self.row_bytes = num_rows, row_bytes
        if type(source) is MappedFile:
            self.mapped = source
        if <size_t>self.view.view.len < num_rows * row_bytes or self.mapped is None:
            self.view.require_size(num_rows * row_bytes, "array")

    def rows(self, size_t begin, size_t end) -> RowRange:
        """Return the rows begin .. end. Raises IndexError outside the array."""
        cdef RowRange rows
        if begin > end or end > self.num_rows:
            raise IndexError(f"rows {begin} .. {end} are outside 0 .. {self.num_rows}")
        rows = RowRange.__new__(RowRange)
        rows.array = self
        rows.data = <const unsigned char *>self.view.view.buf + begin * self.row_bytes
        rows.num_bytes = (end - begin) * self.row_bytes
        return rows


@cython.no_gc
cdef class RowRange:
    """Consecutive rows of an ArrayView, which this object keeps alive."""
    cdef ArrayView array
    cdef const unsigned char *data
    cdef readonly size_t num_bytes

    def __getitem__(self, bytes_) -> RowRange:
        """Return a slice of the bytes."""
        cdef RowRange part = RowRange.__new__(RowRange)
        cdef size_t begin, end
        begin, end, _ = bytes_.indices(self.num_bytes)
        part.array, part.data, part.num_bytes = self.array, self.data + begin, max(begin, end) - begin
        return part


cdef struct _Bytes:
    const unsigned char *data
    size_t num_bytes


cdef _Bytes _bytes_of(source, list owners):
    """Return the bytes of a RowRange or of any buffer. Append the object that keeps them alive to `owners`."""
    cdef _Bytes found
    cdef _View v
    if type(source) is RowRange:
        owners.append(source)
        found.data, found.num_bytes = (<RowRange>source).data, (<RowRange>source).num_bytes
    else:
        v = _View(source)
        owners.append(v)
        found.data, found.num_bytes = <const unsigned char *>v.view.buf, <size_t>v.view.len
    return found


cdef _check_dtypes(int dtype, int out_dtype):
    if dtype == <int>TS_F64 or (out_dtype != dtype and out_dtype != <int>TS_F32):
        raise ValueError(f"cannot convert element type {dtype} to {out_dtype}")


cdef unsigned char *_output_at(_View out, size_t offset, size_t num_bytes) except NULL:
    """Return the address of `num_bytes` at an offset of a buffer."""
    if offset % 8:
        raise ValueError(f"out: offset {offset} is not a multiple of 8")
    if offset > <size_t>out.view.len or num_bytes > <size_t>out.view.len - offset:
        raise ValueError(f"out: expected {num_bytes} bytes at offset {offset}, found {out.view.len} bytes in all")
    return <unsigned char *>out.view.buf + offset


@cython.no_gc
cdef class CopyJob(Job):
    """Concatenate the items of `sources`, a list of buffers and RowRanges, in a buffer.

    Attributes
    ----------
    out_bytes : int
        Size of the output.
    """
    cdef list owners
    cdef ts_copy *copies
    cdef size_t n
    cdef ts_dtype dtype, out_dtype
    cdef _View out
    cdef readonly size_t out_bytes

    def __cinit__(self, list sources, int dtype, int out_dtype):
        cdef size_t i
        cdef _Bytes b
        _check_dtypes(dtype, out_dtype)
        self.owners = []
        self.dtype, self.out_dtype = <ts_dtype>dtype, <ts_dtype>out_dtype
        self.n = len(sources)
        self.copies = <ts_copy *>allocate(self.n, sizeof(ts_copy))
        for i in range(self.n):
            b = _bytes_of(sources[i], self.owners)
            self.copies[i].src = b.data
            self.copies[i].items = b.num_bytes // ts_dtype_bytes(self.dtype)
            self.out_bytes += self.copies[i].items * ts_dtype_bytes(self.out_dtype)
        self.track_maps(self.owners)

    def __dealloc__(self):
        self.detach()
        free(self.copies)

    def set_output(self, out, size_t offset=0) -> None:
        """Write `out_bytes` at an offset of a buffer. Raises ValueError if they do not fit."""
        self.set_output_view(_View(out, True), offset)

    cdef int set_output_view(self, _View o, size_t offset) except -1:
        cdef size_t i
        cdef unsigned char *dst = _output_at(o, offset, self.out_bytes)
        for i in range(self.n):
            self.copies[i].dst = dst
            dst += self.copies[i].items * ts_dtype_bytes(self.out_dtype)
        self.out, self.has_output = o, True
        return 0

    cdef int work(self) noexcept nogil:
        return ts_copy_many(self.copies, self.n, self.dtype, self.out_dtype, self.num_threads)


@cython.no_gc
cdef class RowJob(Job):
    """Gather rows of several arrays into a buffer.

    Parameters
    ----------
    arrays : list of ArrayView or None
        Arrays of rows of equal size. None: no row comes from this one.
    array : int32 (n,)
        The array of each row.
    row : int64 (n,)
        The number of each row in its array.
    dtype, out_dtype : int
        Stored type and output type.
    target : int64 (n,), optional
        The number of each row in the output. By default rows are written one after another.
    num_targets : int
        Rows of the output. Required by `target`.

    Attributes
    ----------
    out_bytes : int
        Size of the output.

    Raises
    ------
    ValueError
        If a row is outside its array or the output, or sizes disagree.
    """
    cdef list owners
    cdef ts_rows rows
    cdef const unsigned char **arrays
    cdef const int32_t[::1] array
    cdef const int64_t[::1] row
    cdef const int64_t[::1] target
    cdef _View out
    cdef readonly size_t out_bytes

    def __cinit__(self, list arrays, const int32_t[::1] array, const int64_t[::1] row, int dtype, int out_dtype,
                  const int64_t[::1] target=None, size_t num_targets=0):
        cdef size_t i, num_arrays = len(arrays), n = <size_t>array.shape[0], row_bytes = 0
        cdef ArrayView view
        _check_dtypes(dtype, out_dtype)
        self.rows.dtype, self.rows.out = <ts_dtype>dtype, <ts_dtype>out_dtype
        self.owners, self.array, self.row, self.target = [], array, row, target
        self.arrays = <const unsigned char **>allocate(num_arrays, sizeof(unsigned char *))
        for i in range(num_arrays):
            self.arrays[i] = NULL
        if <size_t>row.shape[0] != n or (target is not None and <size_t>target.shape[0] != n):
            raise ValueError("array, row and target must have one entry per row")
        for i in range(n):
            if array[i] < 0 or <size_t>array[i] >= num_arrays:
                raise ValueError(f"array {array[i]} of {num_arrays}")
            view = <ArrayView?>arrays[array[i]]
            if self.arrays[array[i]] == NULL:
                self.arrays[array[i]] = <const unsigned char *>view.view.view.buf
                self.owners.append(view)
                row_bytes = row_bytes or view.row_bytes
                if view.row_bytes != row_bytes or row_bytes % ts_dtype_bytes(self.rows.dtype):
                    raise ValueError(f"rows of {view.row_bytes} bytes, expected {row_bytes}")
            if row[i] < 0 or <size_t>row[i] >= view.num_rows:
                raise ValueError(f"row {row[i]} of {view.num_rows}")
            if target is not None and (target[i] < 0 or <size_t>target[i] >= num_targets):
                raise ValueError(f"target {target[i]} of {num_targets}")
        self.rows.arrays, self.rows.row_items = self.arrays, row_bytes // ts_dtype_bytes(self.rows.dtype)
        if n > 0:
            self.rows.array, self.rows.row = &array[0], &row[0]
            self.rows.target = &target[0] if target is not None else NULL
        self.out_bytes = (n if target is None else num_targets) * self.rows.row_items * ts_dtype_bytes(self.rows.out)
        self.track_maps(self.owners)

    def __dealloc__(self):
        self.detach()
        free(self.arrays)

    def set_output(self, out, size_t offset=0) -> None:
        """Write `out_bytes` at an offset of a buffer. Raises ValueError if they do not fit."""
        cdef _View o = _View(out, True)
        self.rows.dst = _output_at(o, offset, self.out_bytes)
        self.out, self.has_output = o, True

    cdef int work(self) noexcept nogil:
        return ts_gather_rows(&self.rows, <size_t>self.array.shape[0], self.num_threads)


cdef int _require_numbers(const int64_t[::1] numbers, uint64_t total) except -1:
    cdef Py_ssize_t k
    for k in range(numbers.shape[0]):
        if numbers[k] < 0 or <uint64_t>numbers[k] >= total:
            raise ValueError(f"number {numbers[k]} is outside 0 .. {total - 1}")
    return 0


def sort_roughly(const int64_t[::1] numbers, uint64_t total, int64_t[::1] out) -> None:
    """Write an order of numbers below `total` in which numbers far apart ascend."""
    cdef int ret
    if out.shape[0] != numbers.shape[0]:
        raise ValueError("out must be as long as numbers")
    _require_numbers(numbers, total)
    if numbers.shape[0]:
        with nogil:
            ret = ts_sort_roughly(&numbers[0], <size_t>numbers.shape[0], total, &out[0])
        if ret != 0:
            raise_error(ret)


def find_runs(const int64_t[::1] first, const int64_t[::1] numbers, int64_t[::1] out) -> None:
    """Write the last run that begins at or before each number, where `first` ascends from 0."""
    if out.shape[0] != numbers.shape[0] or first.shape[0] == 0 or first[0] != 0:
        raise ValueError("first must begin with 0, and out must be as long as numbers")
    _require_numbers(numbers, 1 << 63)
    if numbers.shape[0]:
        with nogil:
            ts_find_runs(&first[0], <size_t>first.shape[0], &numbers[0], <size_t>numbers.shape[0], &out[0])


cdef int _require_size(_Bytes found, size_t num_bytes) except -1:
    if found.num_bytes != num_bytes:
        raise ValueError(f"weights: expected {num_bytes} bytes, found {found.num_bytes}")
    return 0


cdef int64_t _no_pairs = 0


@cython.no_gc
cdef class GraphBatchJob(Job):
    """Assemble a batch of graphs: B traces of L layers, G = B L graphs.

    Parameters
    ----------
    hidden : CopyJob
        The hidden states of the traces, items of (L, S, D).
    weights : list of B buffers or RowRanges
        For each trace, the packed triangles (causal) or squares of L layers, each with `num_heads`
        heads. Several heads are averaged to float16 first, unless `every_head` is set.
    weight_dtype, weight_out : int
        Stored type and output type of the weights.
    num_tokens : int64 (B,)
    causal : uint8 (B,)
    num_layers, num_heads : int
    attention_threshold : float
        Pairs with a larger weight are edges.
    top_k : float
        If positive: instead, this fraction of the pairs of each graph, largest weights first.
    packed : bool
        Write the weights of all pairs instead of edges. Pairs that a top-k rule drops become NaN.
    edges : list of B tuples, optional
        For traces that store edges only: ptr, int64 (L + 1,), and edge_index, a buffer or RowRange of
        int32 (E, 2) with source and target. All of them are written; `weights` holds theirs.
    every_head : bool
        Write the packed weights of every head.
    masks : tuple of (bool, int), optional
        For packed weights of one head: set the pairs of each token with itself to NaN if the bool is true, and
        those whose source is one of so many first tokens, and count the edges into each node.

    Attributes
    ----------
    num_graphs, num_nodes : int
    num_pairs : int
        Number of stored weights, an upper bound of `num_edges`.
    num_edges : int
        Known after `count_edges` or when the job is done.
    """
    cdef CopyJob hidden
    cdef list owners
    cdef ts_graph *graphs
    cdef uint16_t *means
    cdef ts_edge_options options
    cdef size_t heads
    cdef bint packed, is_counted
    cdef _View out
    cdef int64_t *owner
    cdef int64_t *ptr
    cdef int64_t *edge_ptr
    cdef int64_t *edge_index
    cdef unsigned char *weights
    cdef int32_t *degree
    cdef bint has_degree
    cdef readonly size_t num_graphs, num_nodes, num_pairs
    cdef readonly int64_t num_edges

    def __cinit__(self, CopyJob hidden, list weights, int weight_dtype, int weight_out, const int64_t[::1] num_tokens,
                  const unsigned char[::1] causal, size_t num_layers, size_t num_heads,
                  double attention_threshold, double top_k, bint packed, list edges=None, bint every_head=False,
                  masks=None):
        cdef size_t b, k, g = 0, pairs, itemsize = ts_dtype_bytes(<ts_dtype>weight_dtype), num_traces = len(weights)
        cdef const int64_t[::1] ptr
        cdef _Bytes bytes_, index
        self.hidden, self.packed, self.heads = hidden, packed, 1 if every_head else num_heads
        if <size_t>num_tokens.shape[0] != num_traces or <size_t>causal.shape[0] != num_traces or num_heads < 1:
            raise ValueError("weights, num_tokens and causal must have one entry per trace")
        if edges is not None and (packed or num_heads != 1 or <size_t>len(edges) != num_traces):
            raise ValueError("stored edges cannot be packed and have no heads")
        if every_head and (not packed or top_k > 0):
            raise ValueError("every_head requires packed and no top-k rule")
        if masks is not None:
            if not packed or (every_head and num_heads > 1):
                raise ValueError("masks require packed weights of one head")
            self.has_degree = True
            self.options.mask_diagonal, self.options.mask_sinks = masks
        _check_dtypes(weight_dtype if self.heads == 1 else <int>TS_F16, weight_out)
        self.options.dtype, self.options.out = <ts_dtype>weight_dtype, <ts_dtype>weight_out
        self.options.rule.attention_threshold, self.options.rule.top_k = attention_threshold, top_k
        self.num_graphs = num_traces * num_layers
        self.graphs = <ts_graph *>allocate(self.num_graphs, sizeof(ts_graph))
        self.owners = []
        for b in range(num_traces):
            bytes_ = _bytes_of(weights[b], self.owners)
            if num_tokens[b] < 0:
                raise ValueError("num_tokens must not be negative")
            if edges is not None:
                ptr = edges[b][0]
                index = _bytes_of(edges[b][1], self.owners)
                if <size_t>ptr.shape[0] != num_layers + 1 or ptr[0] != 0 or ptr[num_layers] < 0 or (
                        <size_t>ptr[num_layers] != index.num_bytes // 8) or index.num_bytes % 8:
                    raise ValueError("edge offsets do not match the edges")
                _require_size(bytes_, index.num_bytes // 8 * itemsize)
            for k in range(num_layers):
                self.graphs[g].num_tokens = <size_t>num_tokens[b]
                self.graphs[g].causal = causal[b]
                self.graphs[g].num_heads = num_heads if every_head else 1
                if edges is not None:
                    if ptr[k + 1] < ptr[k]:
                        raise ValueError("edge offsets decrease")
                    # NULL would mean weights of all pairs, so an empty list needs some other address.
                    self.graphs[g].pairs = <const int32_t *>&_no_pairs
                    if ptr[k + 1] > ptr[k]:
                        self.graphs[g].pairs = <const int32_t *>index.data + 2 * ptr[k]
                    self.graphs[g].num_edges = ptr[k + 1] - ptr[k]
                    self.graphs[g].weights = bytes_.data + ptr[k] * <int64_t>itemsize
                    pairs = <size_t>self.graphs[g].num_edges
                else:
                    pairs = ts_num_pairs(&self.graphs[g])
                    if k == 0:
                        _require_size(bytes_, num_layers * self.heads * pairs * itemsize)
                    self.graphs[g].weights = bytes_.data + k * self.heads * pairs * itemsize
                self.graphs[g].first_node = <int64_t>self.num_nodes
                self.num_nodes += self.graphs[g].num_tokens
                self.num_pairs += pairs
                g += 1
        self.track_maps(self.owners + hidden.owners)

    def __dealloc__(self):
        self.detach()
        free(self.graphs)
        free(self.means)

    def count_edges(self, int num_threads=1) -> int:
        """Count the edges before the job runs. Returns `num_edges`."""
        cdef int ret
        self.num_threads = num_threads
        with nogil:
            ret = self.check_result(self.find_edges())
        if ret != 0:
            self.raise_error(ret)
        return self.num_edges

    cdef int average_heads(self) noexcept nogil:
        cdef int ret = 0
        if self.heads > 1 and self.means == NULL:
            self.means = <uint16_t *>malloc(self.num_pairs * 2 + 1)
            if self.means == NULL:
                return TS_ERR_NOMEM
            ret = ts_average_heads(self.graphs, self.num_graphs, self.options.dtype, self.heads, self.means, self.num_threads)
            self.options.dtype = TS_F16
        return ret

    cdef int find_edges(self) noexcept nogil:
        cdef int ret
        if self.is_counted:
            return 0
        ret = self.average_heads()
        if ret == 0 and not self.packed:
            ret = ts_count_edges(self.graphs, self.num_graphs, &self.options, self.num_threads)
        if ret == 0:
            self.set_edge_offsets(self.packed)
            self.is_counted = True
        return ret

    cdef void set_edge_offsets(self, bint all_pairs) noexcept nogil:
        """Set the first edge of each graph, for all pairs or for the counted edges."""
        cdef size_t g
        self.num_edges = 0
        for g in range(self.num_graphs):
            if all_pairs:
                self.graphs[g].num_edges = <int64_t>ts_num_pairs(&self.graphs[g])
            self.graphs[g].first_edge = self.num_edges
            self.num_edges += self.graphs[g].num_edges

    cdef int fill_edges(self) noexcept nogil:
        if self.num_edges == 0:
            return 0
        if self.packed:
            return ts_pack_graphs(self.graphs, self.num_graphs, &self.options, self.num_threads, self.weights, self.degree)
        return ts_fill_edges(self.graphs, self.num_graphs, &self.options, self.num_threads, self.edge_index,
                             self.edge_index + self.num_edges, self.weights)

    def max_edges(self) -> int:
        """Return the number of edges that the output must hold: `num_edges` if counted, else `num_pairs`."""
        return self.num_edges if self.is_counted else self.num_pairs

    def set_output(
        self, out, size_t x, size_t edge_index, size_t weights, size_t owner, size_t ptr, size_t edge_ptr, size_t degree=0
    ) -> None:
        """Set the offsets in `out` of the arrays to write, in bytes and multiples of 8. E is `max_edges()`.

        Parameters
        ----------
        x : int
            (num_nodes, D).
        edge_index : int
            int64 (2 E,). The first 2 num_edges values become (2, num_edges), source j and target i.
            Not written if packed.
        weights : int
            (E,), of which the first num_edges are written.
        owner : int
            int64 (num_nodes,), the graph of each node.
        ptr : int
            int64 (G + 1,), the first node of each graph.
        edge_ptr : int
            int64 (G + 1,), the first edge of each graph.
        degree : int
            int32 (num_nodes,), the edges into each node, at least 1. Only with `masks`.

        Raises
        ------
        ValueError
            If an array does not fit.
        """
        cdef _View o = _View(out, True)
        cdef size_t max_edges = self.max_edges()
        self.hidden.set_output_view(o, x)
        self.weights = _output_at(o, weights, max_edges * ts_dtype_bytes(self.options.out))
        self.edge_index = <int64_t *>_output_at(o, edge_index, 0 if self.packed else 16 * max_edges)
        self.owner = <int64_t *>_output_at(o, owner, 8 * self.num_nodes)
        self.ptr = <int64_t *>_output_at(o, ptr, 8 * (self.num_graphs + 1))
        self.edge_ptr = <int64_t *>_output_at(o, edge_ptr, 8 * (self.num_graphs + 1))
        self.degree = <int32_t *>_output_at(o, degree, 4 * self.num_nodes) if self.has_degree else NULL
        self.out, self.has_output = o, True

    cdef int work(self) noexcept nogil:
        cdef size_t g, v
        cdef int64_t node = 0
        cdef int ret = self.average_heads()
        if ret != 0:
            return ret
        self.hidden.num_threads = self.num_threads
        ret = self.hidden.work()
        if ret != 0:
            return ret
        ret = TS_ERR_BOUNDS
        if not self.is_counted and self.options.rule.attention_threshold <= 0 and not self.options.rule.top_k > 0:
            # Softmax weights are usually all positive, so try without counting. The first graph with
            # another weight ends the attempt, and the edges are counted.
            self.set_edge_offsets(True)
            ret = self.fill_edges()
        if ret == TS_ERR_BOUNDS:
            ret = self.find_edges()
            if ret == 0:
                ret = self.fill_edges()
        if ret != 0:
            return ret
        for g in range(self.num_graphs):
            self.ptr[g], self.edge_ptr[g] = node, self.graphs[g].first_edge
            for v in range(self.graphs[g].num_tokens):
                self.owner[node + <int64_t>v] = <int64_t>g
            node += <int64_t>self.graphs[g].num_tokens
        self.ptr[self.num_graphs], self.edge_ptr[self.num_graphs] = node, self.num_edges
        return 0


@cython.no_gc
cdef class PrefetchJob(Job):
    """Load the pages of RowRanges into memory or, with `evict`, drop them. Sources without a file are ignored.

    Attributes
    ----------
    num_bytes : int
        Total size of the RowRanges.
    """
    cdef list row_ranges
    cdef _Bytes *ranges
    cdef size_t n
    cdef bint evict
    cdef readonly size_t num_bytes

    def __cinit__(self, list sources, bint evict=False):
        cdef size_t i
        self.row_ranges = [s for s in sources if type(s) is RowRange]
        self.n = len(self.row_ranges)
        self.evict, self.has_output = evict, True
        self.ranges = <_Bytes *>allocate(self.n, sizeof(_Bytes))
        for i in range(self.n):
            self.ranges[i].data = (<RowRange>self.row_ranges[i]).data
            self.ranges[i].num_bytes = (<RowRange>self.row_ranges[i]).num_bytes
            self.num_bytes += self.ranges[i].num_bytes

    def __dealloc__(self):
        self.detach()
        free(self.ranges)

    cdef int work(self) noexcept nogil:
        cdef size_t i
        for i in range(self.n):
            if self.evict:
                ts_map_evict(self.ranges[i].data, self.ranges[i].num_bytes)
            else:
                ts_map_prefetch(self.ranges[i].data, self.ranges[i].num_bytes)
        return 0
