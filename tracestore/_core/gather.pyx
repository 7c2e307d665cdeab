# cython: language_level=3, binding=True, boundscheck=False, wraparound=False
"""Building batches in place, now or by a crew of threads.

A job takes C-contiguous buffers, checks their sizes before anything is written
(`aim`), and then needs no GIL. Element types are the codes of `kernels`; what is
written has the stored type or F32.
"""
cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint16_t
from libc.stdlib cimport calloc, free, malloc

import os

from tracestore._core.mapping cimport MappedFile, ts_map, ts_map_is_intact

from tracestore.errors import CorruptStoreError

include "buffer_view.pxi"
include "sigbus_guard.pxi"

cdef extern from "float_convert.h" nogil:
    ctypedef enum ts_dtype "enum ts_dtype":
        TS_F16
        TS_BF16
        TS_F32
        TS_F64
    size_t ts_dtype_bytes(ts_dtype dtype)

cdef extern from "gather.h" nogil:
    struct ts_edge_rule:
        double threshold
        double top_k_fraction
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
    size_t ts_num_pairs(const ts_graph *graph)
    int ts_average_heads(ts_graph *graphs, size_t n, ts_dtype dtype, size_t H, uint16_t *out, int num_threads)
    int ts_count_edges(ts_graph *graphs, size_t n, const ts_edge_options *form, int num_threads)
    int ts_fill_edges(const ts_graph *graphs, size_t n, const ts_edge_options *form, int num_threads,
                      int64_t *source, int64_t *target, unsigned char *weight)
    int ts_pack_graphs(const ts_graph *graphs, size_t n, const ts_edge_options *form, int num_threads, unsigned char *out)

cdef extern from "thread_pool.h" nogil:
    struct ts_thread_pool:
        pass
    struct ts_job:
        void (*run)(void *context) noexcept nogil
        void *context
    ts_thread_pool *ts_thread_pool_start(int num_threads)
    void ts_thread_pool_submit(ts_thread_pool *crew, ts_job *job)
    int ts_thread_pool_wait(ts_thread_pool *crew, ts_job *job, int64_t timeout_ms)
    void ts_thread_pool_cancel(ts_thread_pool *crew, ts_job *job)
    void ts_thread_pool_stop(ts_thread_pool *crew)

cdef extern from "map.h" nogil:
    void ts_map_prefetch(const void *start, size_t num_bytes)
    void ts_map_evict(const void *start, size_t num_bytes)

cdef extern from "platform.h" nogil:
    int64_t ts_major_faults()


@cython.no_gc
cdef class ThreadPool:
    """Threads that run jobs in the order in which they were submitted, until `close`.
    They belong to the process that made them: in a forked child every use is a
    RuntimeError, and nothing is freed."""
    cdef ts_thread_pool *crew
    cdef long pid

    def __cinit__(self, int num_threads):
        self.pid = os.getpid()
        self.crew = ts_thread_pool_start(num_threads)
        if self.crew == NULL:
            raise MemoryError("no thread could be started")

    def __dealloc__(self):
        self._stop()

    cdef void _stop(self) noexcept:
        cdef ts_thread_pool *crew = self.crew
        self.crew = NULL
        if crew != NULL and self.pid == <long>getpid():
            with nogil:
                ts_thread_pool_stop(crew)

    def close(self) -> None:
        """Cancels what is queued, waits for what runs, ends the threads."""
        self._stop()

    cdef int check(self) except -1:
        if self.crew == NULL:
            raise RuntimeError("the crew is closed")
        if self.pid != <long>getpid():
            raise RuntimeError("the crew belongs to the process that was forked")
        return 0


cdef extern from "unistd.h":
    int getpid()


@cython.no_gc
cdef class Job:
    """Work without the GIL. Runs once: by `run` or, submitted to a crew, until `wait`.
    major_faults: how often it waited for a disk, once it is done by a crew."""
    cdef ts_job native
    cdef ThreadPool crew
    cdef int status
    cdef const void *fault
    cdef list sources  # the MappedFiles that are read, each once
    cdef const ts_map **maps
    cdef size_t num_maps
    cdef bint aimed
    cdef int num_threads
    cdef readonly int64_t major_faults

    cdef int work(self) noexcept nogil:
        return 0

    cdef int watch(self, list held) except -1:
        """Sets the maps that `held` is read from."""
        cdef MappedFile mapped, last = None
        cdef size_t i
        self.sources = []
        for source in held:
            if type(source) is Span:
                mapped = (<Span>source).slab.mapped
                # Neighbours in a batch often lie in one file.
                if mapped is not None and mapped is not last and mapped not in self.sources:
                    self.sources.append(mapped)
                last = mapped
        self.num_maps = len(self.sources)
        self.maps = <const ts_map **>malloc((self.num_maps + 1) * sizeof(ts_map *))
        if self.maps == NULL:
            raise MemoryError()
        for i in range(self.num_maps):
            self.maps[i] = &(<MappedFile>self.sources[i]).map
        return 0

    cdef int finish(self, int ret) noexcept nogil:
        """How the work ended: with a fault also where a file was cut short without one, so
        that zeros were read."""
        if ret == TS_ERR_FAULT:
            self.fault = ts_sigbus_fault()
        elif ts_sigbus_guard_again(_check_maps, <void *>self) != 0:
            ret = TS_ERR_FAULT
        return ret

    cdef int fail(self, int status) except -1:
        if status == TS_ERR_FAULT:
            raise_fault(self.fault)
        if status == TS_ERR_NODE:
            raise CorruptStoreError("edge_index: an edge leaves its graph; tracestore verify names the file")
        return _raise(status)

    def run(self, int num_threads=1) -> None:
        """Does the work now. CorruptStoreError where a file of the sources was cut short."""
        if not self.aimed:
            raise ValueError("the job has no place to write to")
        self.num_threads = num_threads
        with nogil:
            self.status = self.finish(self.work())
        if self.status != 0:
            self.fail(self.status)

    def submit(self, ThreadPool crew, int num_threads=1) -> None:
        """Queues the work. The job stays alive until it is done or cancelled."""
        crew.check()
        if not self.aimed or self.crew is not None:
            raise ValueError("the job has no place to write to, or was submitted before")
        self.num_threads = num_threads
        self.native.run = _run_job
        self.native.context = <void *>self
        self.crew = crew
        ts_thread_pool_submit(crew.crew, &self.native)

    def wait(self) -> None:
        """Waits until the work is done; a signal's handler may raise meanwhile. Raises as `run`."""
        cdef int over = 0
        if self.crew is None:
            raise ValueError("the job was not submitted")
        while not over:
            self.crew.check()
            with nogil:
                over = ts_thread_pool_wait(self.crew.crew, &self.native, 100)
            PyErr_CheckSignals()
        self.crew = None
        if self.status != 0:
            self.fail(self.status)

    cdef void leave(self) noexcept:
        """Before its memory goes: out of the queue, or done."""
        cdef ts_thread_pool *crew
        if self.crew is not None and self.crew.crew != NULL and self.crew.pid == <long>getpid():
            crew = self.crew.crew
            with nogil:
                ts_thread_pool_cancel(crew, &self.native)
        self.crew = None
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
    (<Job>context).status = (<Job>context).finish((<Job>context).work())
    (<Job>context).major_faults = ts_major_faults() - before


@cython.no_gc
cdef class Slab:
    """The bytes of an array of num_rows rows, looked at many times: a buffer, or the
    beginning of a MappedFile."""
    cdef _View view
    cdef MappedFile mapped
    cdef readonly size_t num_rows, row_bytes

    def __cinit__(self, source, size_t num_rows, size_t row_bytes):
        self.view = _View(source)
        self.num_rows, self.row_bytes = num_rows, row_bytes
        if type(source) is MappedFile:
            self.mapped = source
        if <size_t>self.view.view.len < num_rows * row_bytes or self.mapped is None:
            self.view.need(num_rows * row_bytes, "slab")

    def span(self, size_t begin, size_t end) -> Span:
        """Rows begin .. end; IndexError where they are not all there."""
        cdef Span span
        if begin > end or end > self.num_rows:
            raise IndexError(f"rows {begin} to {end} of {self.num_rows}")
        span = Span.__new__(Span)
        span.slab = self
        span.data = <const unsigned char *>self.view.view.buf + begin * self.row_bytes
        span.num_bytes = (end - begin) * self.row_bytes
        return span


@cython.no_gc
cdef class Span:
    """Some rows of a slab, which it keeps."""
    cdef Slab slab
    cdef const unsigned char *data
    cdef readonly size_t num_bytes


cdef struct _Bytes:
    const unsigned char *data
    size_t num_bytes


cdef _Bytes _bytes_of(source, list held):
    """Where the bytes of a Span or of any buffer are; what keeps them goes into `held`."""
    cdef _Bytes found
    cdef _View v
    if type(source) is Span:
        held.append(source)
        found.data, found.num_bytes = (<Span>source).data, (<Span>source).num_bytes
    else:
        v = _View(source)
        held.append(v)
        found.data, found.num_bytes = <const unsigned char *>v.view.buf, <size_t>v.view.len
    return found


cdef _check_dtypes(int dtype, int out_dtype):
    if dtype == <int>TS_F64 or (out_dtype != dtype and out_dtype != <int>TS_F32):
        raise ValueError(f"element type {dtype} does not go into {out_dtype}")


cdef unsigned char *_place(_View out, size_t begin, size_t num_bytes) except NULL:
    """num_bytes of a buffer from byte `begin` on."""
    if begin % 8 or begin > <size_t>out.view.len or num_bytes > <size_t>out.view.len - begin:
        raise ValueError(f"out: {out.view.len} bytes where {num_bytes} are needed from byte {begin} on, a multiple of 8")
    return <unsigned char *>out.view.buf + begin


@cython.no_gc
cdef class Copies(Job):
    """Writes the items of `sources` (buffers or Spans) one behind the other into a buffer
    from a byte on; out_bytes in all."""
    cdef list held
    cdef ts_copy *copies
    cdef size_t n
    cdef ts_dtype dtype, out_dtype
    cdef _View out
    cdef readonly size_t out_bytes

    def __cinit__(self, list sources, int dtype, int out_dtype):
        cdef size_t i
        cdef _Bytes b
        _check_dtypes(dtype, out_dtype)
        self.held = []
        self.dtype, self.out_dtype = <ts_dtype>dtype, <ts_dtype>out_dtype
        self.n = len(sources)
        self.copies = <ts_copy *>calloc(self.n + 1, sizeof(ts_copy))
        if self.copies == NULL:
            raise MemoryError()
        for i in range(self.n):
            b = _bytes_of(sources[i], self.held)
            self.copies[i].src = b.data
            self.copies[i].items = b.num_bytes // ts_dtype_bytes(self.dtype)
            self.out_bytes += self.copies[i].items * ts_dtype_bytes(self.out_dtype)
        self.watch(self.held)

    def __dealloc__(self):
        self.leave()
        free(self.copies)

    def aim(self, out, size_t begin=0) -> None:
        """Sets where to write: out_bytes of a buffer from byte `begin` on. ValueError where they do not fit."""
        self.aim_at(_View(out, True), begin)

    cdef int aim_at(self, _View o, size_t begin) except -1:
        cdef size_t i
        cdef unsigned char *at = _place(o, begin, self.out_bytes)
        for i in range(self.n):
            self.copies[i].dst = at
            at += self.copies[i].items * ts_dtype_bytes(self.out_dtype)
        self.out, self.aimed = o, True
        return 0

    cdef int work(self) noexcept nogil:
        return ts_copy_many(self.copies, self.n, self.dtype, self.out_dtype, self.num_threads)


cdef int _need(_Bytes found, size_t num_bytes) except -1:
    if found.num_bytes != num_bytes:
        raise ValueError(f"weights: {found.num_bytes} bytes where {num_bytes} are needed")
    return 0


cdef int64_t _no_pairs = 0


@cython.no_gc
cdef class GraphGather(Job):
    """A graph batch on its way: B traces of L layers, G = B L graphs.

    hidden: Copies of the traces' (L, S, D) items. weights: B buffers or Spans of weight_dtype,
    each the L layers' packed triangles (causal) or squares one behind the other,
    num_heads of them a layer where that is more than 1: their mean (float16) is then
    made first, or, every_head, all of them are written, packed. num_tokens int64 (B,),
    causal uint8 (B,). The pairs above `threshold` are edges, or, where top_k_fraction > 0,
    that fraction of each graph's pairs with the largest weights. packed: all pairs are written, those that top-k drops as NaN.
    edges: where only edges are stored, B tuples (ptr int64 (L + 1,), edge_index a buffer or
    Span of int32 (E, 2) source and target); all of them are written, weights has theirs.

    num_nodes; num_pairs: the weights of all pairs, once or, every_head, for each head,
    which num_edges never exceeds;
    num_edges: known after `count` or when the work is done.
    """
    cdef Copies hidden
    cdef list held
    cdef ts_graph *graphs
    cdef uint16_t *means
    cdef ts_edge_options form
    cdef size_t heads
    cdef bint packed, counted
    cdef _View out
    cdef int64_t *owner
    cdef int64_t *ptr
    cdef int64_t *edge_ptr
    cdef int64_t *edge_index
    cdef unsigned char *weights
    cdef readonly size_t num_graphs, num_nodes, num_pairs
    cdef readonly int64_t num_edges

    def __cinit__(self, Copies hidden, list weights, int weight_dtype, int weight_out, const int64_t[::1] num_tokens,
                  const unsigned char[::1] causal, size_t num_layers, size_t num_heads, double threshold,
                  double top_k_fraction, bint packed, list edges=None, bint every_head=False):
        cdef size_t b, k, g = 0, pairs, itemsize = ts_dtype_bytes(<ts_dtype>weight_dtype), num_traces = len(weights)
        cdef const int64_t[::1] ptr
        cdef _Bytes bytes_, index
        self.hidden, self.packed, self.heads = hidden, packed, 1 if every_head else num_heads
        if <size_t>num_tokens.shape[0] != num_traces or <size_t>causal.shape[0] != num_traces or num_heads < 1:
            raise ValueError("another number of traces in weights, num_tokens and causal")
        if edges is not None and (packed or num_heads != 1 or <size_t>len(edges) != num_traces):
            raise ValueError("stored edges are neither packed nor of heads")
        if every_head and (not packed or top_k_fraction > 0):
            raise ValueError("every head is packed, without top-k")
        _check_dtypes(weight_dtype if self.heads == 1 else <int>TS_F16, weight_out)
        self.form.dtype, self.form.out = <ts_dtype>weight_dtype, <ts_dtype>weight_out
        self.form.rule.threshold, self.form.rule.top_k_fraction = threshold, top_k_fraction
        self.num_graphs = num_traces * num_layers
        self.graphs = <ts_graph *>calloc(self.num_graphs + 1, sizeof(ts_graph))
        if self.graphs == NULL:
            raise MemoryError()
        self.held = []
        for b in range(num_traces):
            bytes_ = _bytes_of(weights[b], self.held)
            if num_tokens[b] < 0:
                raise ValueError("a negative number of tokens")
            if edges is not None:
                ptr = edges[b][0]
                index = _bytes_of(edges[b][1], self.held)
                if <size_t>ptr.shape[0] != num_layers + 1 or ptr[0] != 0 or ptr[num_layers] < 0 or (
                        <size_t>ptr[num_layers] != index.num_bytes // 8) or index.num_bytes % 8:
                    raise ValueError("edge offsets do not fit the edges")
                _need(bytes_, index.num_bytes // 8 * itemsize)
            for k in range(num_layers):
                self.graphs[g].num_tokens = <size_t>num_tokens[b]
                self.graphs[g].causal = causal[b]
                self.graphs[g].num_heads = num_heads if every_head else 1
                if edges is not None:
                    if ptr[k + 1] < ptr[k]:
                        raise ValueError("edge offsets decrease")
                    # Never NULL, which would say that there are weights of all pairs.
                    self.graphs[g].pairs = <const int32_t *>&_no_pairs
                    if ptr[k + 1] > ptr[k]:
                        self.graphs[g].pairs = <const int32_t *>index.data + 2 * ptr[k]
                    self.graphs[g].num_edges = ptr[k + 1] - ptr[k]
                    self.graphs[g].weights = bytes_.data + ptr[k] * <int64_t>itemsize
                    pairs = <size_t>self.graphs[g].num_edges
                else:
                    pairs = ts_num_pairs(&self.graphs[g])
                    if k == 0:
                        _need(bytes_, num_layers * self.heads * pairs * itemsize)
                    self.graphs[g].weights = bytes_.data + k * self.heads * pairs * itemsize
                self.graphs[g].first_node = <int64_t>self.num_nodes
                self.num_nodes += self.graphs[g].num_tokens
                self.num_pairs += pairs
                g += 1
        self.watch(self.held + hidden.held)

    def __dealloc__(self):
        self.leave()
        free(self.graphs)
        free(self.means)

    def count(self, int num_threads=1) -> int:
        """num_edges, before there is a place to write to."""
        cdef int ret
        self.num_threads = num_threads
        with nogil:
            ret = self.finish(self.find_edges())
        if ret != 0:
            self.fail(ret)
        return self.num_edges

    cdef int make_means(self) noexcept nogil:
        cdef int ret = 0
        if self.heads > 1 and self.means == NULL:
            self.means = <uint16_t *>malloc(self.num_pairs * 2 + 1)
            if self.means == NULL:
                return TS_ERR_NOMEM
            ret = ts_average_heads(self.graphs, self.num_graphs, self.form.dtype, self.heads, self.means, self.num_threads)
            self.form.dtype = TS_F16
        return ret

    cdef int find_edges(self) noexcept nogil:
        cdef int ret
        if self.counted:
            return 0
        ret = self.make_means()
        if ret == 0 and not self.packed:
            ret = ts_count_edges(self.graphs, self.num_graphs, &self.form, self.num_threads)
        if ret == 0:
            self.line_up(self.packed)
            self.counted = True
        return ret

    cdef void line_up(self, bint all_pairs) noexcept nogil:
        """Places the graphs' edges one behind the other, all pairs or those that were counted."""
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
            return ts_pack_graphs(self.graphs, self.num_graphs, &self.form, self.num_threads, self.weights)
        return ts_fill_edges(self.graphs, self.num_graphs, &self.form, self.num_threads, self.edge_index,
                             self.edge_index + self.num_edges, self.weights)

    def room(self) -> int:
        """Edges to make room for: num_edges where it was counted, else num_pairs."""
        return self.num_edges if self.counted else self.num_pairs

    def aim(self, out, size_t x, size_t edge_index, size_t weights, size_t owner, size_t ptr, size_t edge_ptr) -> None:
        """Sets where the work goes: bytes of `out`, each a multiple of 8, at which begin
        x (num_nodes, D); edge_index int64, room for (2, E), of which the first 2 num_edges
        become (2, num_edges), source j and target i (not written if packed); weights, room
        for (E,), of which the first num_edges are written; owner int64 (num_nodes,), the
        graph of each node; ptr int64 (G + 1,), the first node of each graph; edge_ptr int64
        (G + 1,), its first edge. E is `room()`. ValueError where something does not fit."""
        cdef _View o = _View(out, True)
        cdef size_t room = self.room()
        self.hidden.aim_at(o, x)
        self.weights = _place(o, weights, room * ts_dtype_bytes(self.form.out))
        self.edge_index = <int64_t *>_place(o, edge_index, 0 if self.packed else 16 * room)
        self.owner = <int64_t *>_place(o, owner, 8 * self.num_nodes)
        self.ptr = <int64_t *>_place(o, ptr, 8 * (self.num_graphs + 1))
        self.edge_ptr = <int64_t *>_place(o, edge_ptr, 8 * (self.num_graphs + 1))
        self.out, self.aimed = o, True

    cdef int work(self) noexcept nogil:
        cdef size_t g, v
        cdef int64_t node = 0
        cdef int ret = self.make_means()
        if ret != 0:
            return ret
        self.hidden.num_threads = self.num_threads
        ret = self.hidden.work()
        if ret != 0:
            return ret
        ret = TS_ERR_BOUNDS
        if not self.counted and self.form.rule.threshold <= 0 and not self.form.rule.top_k_fraction > 0:
            # Attention is a softmax: that all of it is positive is the rule. The first graph
            # where it is not ends the attempt, and the edges are counted after all.
            self.line_up(True)
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
cdef class Pages(Job):
    """Brings the pages of some Spans into memory, or, drop, lets go of them. Other sources
    have no file behind them and are passed over. num_bytes: of the Spans."""
    cdef list spans
    cdef _Bytes *ranges
    cdef size_t n
    cdef bint drop
    cdef readonly size_t num_bytes

    def __cinit__(self, list sources, bint drop=False):
        cdef size_t i
        self.spans = [s for s in sources if type(s) is Span]
        self.n = len(self.spans)
        self.drop, self.aimed = drop, True
        self.ranges = <_Bytes *>calloc(self.n + 1, sizeof(_Bytes))
        if self.ranges == NULL:
            raise MemoryError()
        for i in range(self.n):
            self.ranges[i].data = (<Span>self.spans[i]).data
            self.ranges[i].num_bytes = (<Span>self.spans[i]).num_bytes
            self.num_bytes += self.ranges[i].num_bytes

    def __dealloc__(self):
        self.leave()
        free(self.ranges)

    cdef int work(self) noexcept nogil:
        cdef size_t i
        for i in range(self.n):
            if self.drop:
                ts_map_evict(self.ranges[i].data, self.ranges[i].num_bytes)
            else:
                ts_map_prefetch(self.ranges[i].data, self.ranges[i].num_bytes)
        return 0
