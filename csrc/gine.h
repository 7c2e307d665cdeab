/* The aggregation of GINE (Hu et al. 2020, eq. as PyG's GINEConv, eps = 0):
 *     out_i = x_i + sum over edges j -> i of relu(x_j + w a_ij + b)
 * straight from the packed attention, without anything of size E x D.
 *
 * Graph g owns nodes node_ptr[g] .. node_ptr[g+1]. Dense form: its weights are
 * the packed triangle at weights[weight_ptr[g]], pairs with a_ij > threshold
 * (never NaN) are edges. Sparse form: its edges are edge_ptr[g] .. edge_ptr[g+1]
 * of (source, target, weight), node numbers within the graph's own nodes.
 *
 * Sums run in a fixed order whatever num_threads is: results are bitwise the
 * same. Workspaces come from the caller, so that its memory budget sees them. */
#ifndef TS_GINE_H
#define TS_GINE_H

#include <stddef.h>
#include <stdint.h>

#include "half.h"

struct ts_gine {
    size_t num_graphs, dim;       /* dim: D, columns of x */
    const int64_t *node_ptr;      /* num_graphs + 1 */
    const int64_t *weight_ptr;    /* dense: num_graphs + 1 offsets of triangles; sparse: edge_ptr */
    const void *weights;          /* dense or sparse weights, of weight_dtype */
    enum ts_dtype weight_dtype;   /* TS_F16, TS_BF16, TS_F32 or TS_F64 */
    double threshold;             /* dense only */
    const int64_t *source;        /* sparse only, else NULL */
    const int64_t *target;
    int num_threads;
};

/* Graphs a partial sum of the weight gradients covers: the workspace of
 * backward is 2 * dim * ts_gine_chunks() values. */
size_t ts_gine_chunks(size_t num_graphs);

/* x, out: (num_nodes, dim); w, b: (dim,). TS_ERR_NOMEM. */
int ts_gine_forward_f32(const struct ts_gine *g, const float *x, const float *w, const float *b, float *out);
int ts_gine_forward_f64(const struct ts_gine *g, const double *x, const double *w, const double *b, double *out);

/* grad_out (num_nodes, dim) -> grad_x (same shape, NULL if not wanted), grad_w, grad_b (dim,). */
int ts_gine_backward_f32(const struct ts_gine *g, const float *x, const float *w, const float *b, const float *grad_out,
                         float *grad_x, float *grad_w, float *grad_b, float *workspace);
int ts_gine_backward_f64(const struct ts_gine *g, const double *x, const double *w, const double *b,
                         const double *grad_out, double *grad_x, double *grad_w, double *grad_b, double *workspace);

#endif
