# cython: language_level=3, binding=True, boundscheck=False, wraparound=False
"""The fused aggregation of GINE over a batch of graphs (see csrc/gine.h)."""
from libc.stdint cimport int64_t, uint16_t

from cpython.buffer cimport PyObject_GetBuffer, PyBuffer_Release, PyBUF_SIMPLE, Py_buffer

ctypedef fused real:
    float
    double

cdef extern from "half.h":
    ctypedef enum ts_dtype "enum ts_dtype":
        TS_F16
        TS_BF16
        TS_F32
        TS_F64
    size_t ts_dtype_bytes(ts_dtype dtype)

cdef extern from "gine.h" nogil:
    struct ts_gine:
        size_t num_graphs
        size_t dim
        const int64_t *node_ptr
        const int64_t *weight_ptr
        const void *weights
        ts_dtype weight_dtype
        double threshold
        const int64_t *source
        const int64_t *target
        int num_threads
    size_t ts_gine_chunks(size_t num_graphs)
    int ts_gine_forward_f32(const ts_gine *g, const float *x, const float *w, const float *b, float *out)
    int ts_gine_forward_f64(const ts_gine *g, const double *x, const double *w, const double *b, double *out)
    int ts_gine_backward_f32(const ts_gine *g, const float *x, const float *w, const float *b, const float *grad_out,
                             float *grad_x, float *grad_w, float *grad_b, float *workspace)
    int ts_gine_backward_f64(const ts_gine *g, const double *x, const double *w, const double *b,
                             const double *grad_out, double *grad_x, double *grad_w, double *grad_b,
                             double *workspace)


cdef class Graphs:
    """The edges of a batch of graphs: checked once, used by forward and backward.

    node_ptr (G + 1): graph g owns nodes node_ptr[g] .. node_ptr[g + 1].
    Dense: `weights` are packed lower triangles, graph g's at weight_ptr[g].
    Sparse: edges weight_ptr[g] .. weight_ptr[g + 1] with source and target in
    the batch's node numbers. ValueError where something points outside."""
    cdef ts_gine g
    cdef const int64_t[::1] node_ptr, weight_ptr, source, target
    cdef Py_buffer weights
    cdef bint held
    cdef readonly int64_t num_nodes

    def __cinit__(self, const int64_t[::1] node_ptr, const int64_t[::1] weight_ptr, weights, int weight_dtype,
                  double threshold=0.0, source=None, target=None):
        cdef Py_ssize_t G = node_ptr.shape[0] - 1, k
        cdef int64_t S, e, needed
        self.held = False
        PyObject_GetBuffer(weights, &self.weights, PyBUF_SIMPLE)
        self.held = True
        cdef int64_t num_weights = self.weights.len // <Py_ssize_t>ts_dtype_bytes(<ts_dtype>weight_dtype)
        self.node_ptr, self.weight_ptr = node_ptr, weight_ptr
        if G < 0 or weight_ptr.shape[0] != G + 1 or node_ptr[0] != 0 or weight_ptr[0] < 0:
            raise ValueError("node_ptr and weight_ptr must be (G + 1,) from 0")
        if source is not None:
            self.source, self.target = source, target
            if self.source.shape[0] != num_weights or self.target.shape[0] != num_weights:
                raise ValueError("source, target and weights must have one entry an edge")
        for k in range(G):
            S = node_ptr[k + 1] - node_ptr[k]
            needed = S * (S + 1) // 2 if source is None else 0
            if S < 0 or weight_ptr[k + 1] - weight_ptr[k] < needed or weight_ptr[k + 1] > num_weights:
                raise ValueError(f"graph {k}: pointers out of bounds")
            if source is not None:
                for e in range(weight_ptr[k], weight_ptr[k + 1]):
                    if not (node_ptr[k] <= self.source[e] < node_ptr[k + 1]
                            and node_ptr[k] <= self.target[e] < node_ptr[k + 1]):
                        raise ValueError(f"graph {k}: edge {e} leaves the graph")
        self.num_nodes = node_ptr[G]
        self.g.num_graphs = <size_t>G
        self.g.node_ptr = &node_ptr[0]
        self.g.weight_ptr = &weight_ptr[0]
        self.g.weights = self.weights.buf
        self.g.weight_dtype = <ts_dtype>weight_dtype
        self.g.threshold = threshold
        self.g.source = &self.source[0] if source is not None and num_weights else NULL
        self.g.target = &self.target[0] if source is not None and num_weights else NULL
        if source is not None and not num_weights:
            # No edge at all: an empty triangle with a threshold nothing passes.
            raise ValueError("a sparse batch needs at least one edge")

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.weights)

    def workspace_rows(self) -> int:
        """Rows of 2 * D values that backward needs as workspace."""
        return ts_gine_chunks(self.g.num_graphs)

    def forward(self, const real[:, ::1] x, const real[::1] w, const real[::1] b, real[:, ::1] out, int num_threads=1):
        """out (N, D) = x + sum over edges of relu(x_j + w a_ij + b)."""
        cdef ts_gine g = self.g
        cdef int ret
        if x.shape[0] != self.num_nodes or out.shape[0] != x.shape[0] or out.shape[1] != x.shape[1] \
                or w.shape[0] != x.shape[1] or b.shape[0] != x.shape[1]:
            raise ValueError("x, w, b and out do not fit together")
        if x.shape[0] == 0 or x.shape[1] == 0:
            return
        g.dim = <size_t>x.shape[1]
        g.num_threads = num_threads
        with nogil:
            if real is float:
                ret = ts_gine_forward_f32(&g, &x[0, 0], &w[0], &b[0], &out[0, 0])
            else:
                ret = ts_gine_forward_f64(&g, &x[0, 0], &w[0], &b[0], &out[0, 0])
        if ret != 0:
            raise MemoryError("GINE forward")

    def backward(self, const real[:, ::1] x, const real[::1] w, const real[::1] b, const real[:, ::1] grad_out,
                 grad_x, real[::1] grad_w, real[::1] grad_b, real[:, ::1] workspace, int num_threads=1):
        """Gradients of x (None: not wanted), w and b; workspace (workspace_rows(), 2 D)."""
        cdef ts_gine g = self.g
        cdef real[:, ::1] gx
        cdef real *gx_ptr = NULL
        cdef int ret
        if x.shape[0] != self.num_nodes or grad_out.shape[0] != x.shape[0] or grad_out.shape[1] != x.shape[1] \
                or w.shape[0] != x.shape[1] or b.shape[0] != x.shape[1] or grad_w.shape[0] != x.shape[1] \
                or grad_b.shape[0] != x.shape[1] or workspace.shape[0] < <Py_ssize_t>ts_gine_chunks(g.num_graphs) \
                or workspace.shape[1] != 2 * x.shape[1]:
            raise ValueError("the arguments do not fit together")
        if x.shape[0] == 0 or x.shape[1] == 0:
            grad_w[:] = 0
            grad_b[:] = 0
            return
        if grad_x is not None:
            gx = grad_x
            if gx.shape[0] != x.shape[0] or gx.shape[1] != x.shape[1]:
                raise ValueError("grad_x has another shape than x")
            gx_ptr = &gx[0, 0]
        g.dim = <size_t>x.shape[1]
        g.num_threads = num_threads
        with nogil:
            if real is float:
                ret = ts_gine_backward_f32(&g, &x[0, 0], &w[0], &b[0], &grad_out[0, 0], gx_ptr, &grad_w[0],
                                           &grad_b[0], &workspace[0, 0])
            else:
                ret = ts_gine_backward_f64(&g, &x[0, 0], &w[0], &b[0], &grad_out[0, 0], gx_ptr, &grad_w[0],
                                           &grad_b[0], &workspace[0, 0])
        if ret != 0:
            raise MemoryError("GINE backward")
