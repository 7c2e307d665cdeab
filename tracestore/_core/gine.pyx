# cython: language_level=3, binding=True, boundscheck=False, wraparound=False, freethreading_compatible=True
"""Fused aggregation of GINE over a batch of graphs (see csrc/gine.h)."""
from libc.stdint cimport int64_t, uint8_t

from tracestore._core.csrc cimport ts_dtype, ts_dtype_bytes
from tracestore._core.mapping cimport _View, raise_error

ctypedef fused real:
    float
    double

cdef extern from "gine.h" nogil:
    struct ts_gine:
        size_t num_graphs
        size_t num_rows
        size_t dim
        size_t num_weights
        size_t num_channels
        const int64_t *node_ptr
        const int64_t *weight_ptr
        const void *weights
        ts_dtype weight_dtype
        double threshold
        const int64_t *source
        const int64_t *target
        const void *x
        ts_dtype x_dtype
        int num_threads
    int ts_gine_check(const ts_gine *g)
    size_t ts_gine_workspace(const ts_gine *g, size_t real_bytes, int backward)
    int ts_gine_forward_f32(const ts_gine *g, const float *w, const float *b, float *out, void *workspace)
    int ts_gine_forward_f64(const ts_gine *g, const double *w, const double *b, double *out, void *workspace)
    int ts_gine_backward_f32(const ts_gine *g, const float *w, const float *b, const float *grad_out, float *grad_x,
                             float *grad_w, float *grad_b, void *workspace)
    int ts_gine_backward_f64(const ts_gine *g, const double *w, const double *b, const double *grad_out,
                             double *grad_x, double *grad_w, double *grad_b, void *workspace)


cdef class GineInputs:
    """A validated batch of graphs with their rows of x. The arrays are borrowed, not copied.

    Parameters
    ----------
    x : buffer (N, D)
        Node features; row 0 is node `node_ptr[0]`.
    x_dtype, weight_dtype : int
        Element types, as the codes of `kernels`.
    node_ptr : int64 (G + 1,)
        Graph g owns the nodes node_ptr[g] .. node_ptr[g + 1].
    weights : buffer
        Packed lower triangles, or the weights of edge lists.
    weight_ptr : int64 (G + 1,)
        The first weight of each graph.
    source, target : int64 (E,), optional
        Edge lists, in the numbering of `node_ptr`. Without them `weights` holds triangles.
    threshold : float
        Pairs of triangles with a larger weight are edges.
    num_threads : int
        Number of threads.
    num_channels : int
        Number of triangles of each graph, stored one after another.

    Raises
    ------
    ValueError
        If shapes disagree or a pointer leads outside its array.
    """
    cdef ts_gine g
    cdef const int64_t[::1] node_ptr, weight_ptr, source, target
    cdef _View weights, x

    def __cinit__(self, x, int x_dtype, const int64_t[::1] node_ptr, weights, int weight_dtype,
                  const int64_t[::1] weight_ptr, source=None, target=None, double threshold=0.0, int num_threads=1,
                  size_t num_channels=1):
        self.weights, self.x = _View(weights), _View(x)
        self.node_ptr, self.weight_ptr = node_ptr, weight_ptr
        self.g.num_weights = self.weights.view.len // ts_dtype_bytes(<ts_dtype>weight_dtype)
        if self.x.view.ndim != 2 or <size_t>self.x.view.itemsize != ts_dtype_bytes(<ts_dtype>x_dtype):
            raise ValueError("x must be (N, D)")
        if node_ptr.shape[0] < 1 or weight_ptr.shape[0] != node_ptr.shape[0]:
            raise ValueError("node_ptr and weight_ptr must be (G + 1,)")
        if (source is None) != (target is None):
            raise ValueError("source and target must be given together")
        if source is not None:
            self.source, self.target = source, target
            if <size_t>self.source.shape[0] != self.g.num_weights or <size_t>self.target.shape[0] != self.g.num_weights:
                raise ValueError("source, target and weights must have one entry per edge")
            # NULL would mean triangles, so an empty edge list needs some other address.
            self.g.source = &self.source[0] if self.source.shape[0] else &node_ptr[0]
            self.g.target = &self.target[0] if self.target.shape[0] else &node_ptr[0]
        else:
            self.g.source = self.g.target = NULL
        self.g.num_graphs = <size_t>(node_ptr.shape[0] - 1)
        self.g.num_rows, self.g.dim = <size_t>self.x.view.shape[0], <size_t>self.x.view.shape[1]
        self.g.node_ptr, self.g.weight_ptr = &node_ptr[0], &weight_ptr[0]
        self.g.weights, self.g.weight_dtype = self.weights.view.buf, <ts_dtype>weight_dtype
        self.g.x, self.g.x_dtype = self.x.view.buf, <ts_dtype>x_dtype
        self.g.threshold, self.g.num_threads, self.g.num_channels = threshold, num_threads, num_channels
        if ts_gine_check(&self.g) != 0:
            raise ValueError("node_ptr or weight_ptr does not match x and the weights")

    def workspace_bytes(self, int real_bytes, bint backward) -> int:
        """Return the bytes of workspace of a pass that computes with floats of `real_bytes`."""
        return ts_gine_workspace(&self.g, <size_t>real_bytes, backward)

    def forward(self, const real[::1] w, const real[::1] b, real[:, ::1] out, uint8_t[::1] workspace) -> None:
        """Compute out_i = x_i + sum over edges j -> i of relu(x_j + w a_ij + b).

        Parameters
        ----------
        w : float (C D,)
        b : float (D,)
        out : float (N, D)
        workspace : uint8
            At least `workspace_bytes` bytes.

        Raises
        ------
        ValueError
            If shapes disagree or an edge leaves its graph.
        """
        cdef int ret
        cdef size_t N = self.g.num_rows, D = self.g.dim, W = self.g.num_channels * D
        if <size_t>out.shape[0] != N or <size_t>out.shape[1] != D or <size_t>w.shape[0] != W \
                or <size_t>b.shape[0] != D or <size_t>workspace.shape[0] < ts_gine_workspace(&self.g, sizeof(real), 0):
            raise ValueError("the shapes of w, b, out and workspace do not match x")
        if N == 0 or D == 0:
            return
        with nogil:
            if real is float:
                ret = ts_gine_forward_f32(&self.g, &w[0], &b[0], &out[0, 0], &workspace[0])
            else:
                ret = ts_gine_forward_f64(&self.g, &w[0], &b[0], &out[0, 0], &workspace[0])
        if ret != 0:
            raise_error(ret)

    def backward(self, const real[::1] w, const real[::1] b, const real[:, ::1] grad_out, grad_x, real[::1] grad_w,
                 real[::1] grad_b, uint8_t[::1] workspace) -> None:
        """Compute the gradients of x, w and b from `grad_out`; shapes as in `forward`.

        With `grad_x` None, the gradient of x is skipped.
        """
        cdef int ret
        cdef real[:, ::1] gx
        cdef real *gx_ptr = NULL
        cdef size_t N = self.g.num_rows, D = self.g.dim, W = self.g.num_channels * D
        if <size_t>grad_out.shape[0] != N or <size_t>grad_out.shape[1] != D or <size_t>w.shape[0] != W \
                or <size_t>b.shape[0] != D or <size_t>grad_w.shape[0] != W or <size_t>grad_b.shape[0] != D \
                or <size_t>workspace.shape[0] < ts_gine_workspace(&self.g, sizeof(real), 1):
            raise ValueError("the shapes of the arguments do not match x")
        if N == 0 or D == 0:
            grad_w[:] = 0
            grad_b[:] = 0
            return
        if grad_x is not None:
            gx = grad_x
            if <size_t>gx.shape[0] != N or <size_t>gx.shape[1] != D:
                raise ValueError(f"grad_x: expected shape ({N}, {D}), found ({gx.shape[0]}, {gx.shape[1]})")
            gx_ptr = &gx[0, 0]
        with nogil:
            if real is float:
                ret = ts_gine_backward_f32(&self.g, &w[0], &b[0], &grad_out[0, 0], gx_ptr, &grad_w[0], &grad_b[0],
                                           &workspace[0])
            else:
                ret = ts_gine_backward_f64(&self.g, &w[0], &b[0], &grad_out[0, 0], gx_ptr, &grad_w[0], &grad_b[0],
                                           &workspace[0])
        if ret != 0:
            raise_error(ret)
