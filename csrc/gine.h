/**
 * Message aggregation of GINE (Hu et al. 2020; PyG's GINEConv with eps = 0):
 *
 *     out_i = x_i + sum over edges j -> i of relu(x_j + w a_ij + b)
 *
 * computed directly from stored attention weights, without temporaries of size E x D.
 *
 * Graph g owns the nodes node_ptr[g] .. node_ptr[g + 1]. Its edges come in one of two forms:
 *
 * - Triangles (source is NULL): a packed lower triangle starts at weights[weight_ptr[g]]; pairs
 *   with a_ij > threshold are edges, NaN never is. With C > 1 channels a graph has C triangles,
 *   one after another; w a_ij is the sum of w_c a_cij over the channels, and pairs whose mean over
 *   the channels exceeds the threshold are edges.
 * - Edge lists: edges weight_ptr[g] .. weight_ptr[g + 1] of (source, target, weight), in any order.
 *
 * x, out and their gradients hold the rows node_ptr[0] .. node_ptr[num_graphs], so that a slice of
 * a batch needs no renumbering.
 *
 * Sums run over edges in stored order and over graphs in batch order, so that results are bitwise
 * the same for any num_threads. The functions allocate nothing: the caller provides the workspace
 * and so controls the memory budget. They read nothing outside the buffers, whatever these hold.
 * All pointers are borrowed for the call. Functions are thread safe on distinct outputs and
 * workspaces.
 */
#ifndef TS_GINE_H
#define TS_GINE_H

#include <stddef.h>
#include <stdint.h>

#include "error.h"
#include "float_convert.h"

struct ts_gine {
    size_t num_graphs, num_rows;
    size_t dim;                /* D, the number of columns of x */
    size_t num_weights;
    size_t num_channels;       /* C, the number of weights of an edge */
    const int64_t *node_ptr;   /* (num_graphs + 1,) */
    const int64_t *weight_ptr; /* (num_graphs + 1,): first weight, or first edge, of a graph */
    const void *weights;
    enum ts_dtype weight_dtype;
    double threshold;      /* used with triangles */
    const int64_t *source; /* (num_weights,) in the numbering of node_ptr, or NULL for triangles */
    const int64_t *target; /* as source */
    const void *x;         /* (num_rows, dim) */
    enum ts_dtype x_dtype;
    int num_threads;
};

/**
 * Check that pointers do not decrease, stay inside the buffers and match num_rows. Call it before
 * any function below. Edges are checked when they are read.
 *
 * @return TS_ERR_BOUNDS
 */
TS_WARN_UNUSED
int ts_gine_check(const struct ts_gine *g);

/**
 * Return the bytes of workspace that a call needs.
 *
 * @param real_bytes  4 for the _f32 functions, 8 for the _f64 ones
 * @param backward    0: forward, 1: backward
 */
size_t ts_gine_workspace(const struct ts_gine *g, size_t real_bytes, int backward);

/**
 * Compute the aggregation.
 *
 * @param w          (num_channels, dim)
 * @param b          (dim,)
 * @param out        (num_rows, dim)
 * @param workspace  ts_gine_workspace() bytes, aligned as by malloc()
 * @return TS_ERR_BOUNDS if an edge leaves its graph
 */
TS_WARN_UNUSED
int ts_gine_forward_f32(const struct ts_gine *g, const float *w, const float *b, float *out, void *workspace);
TS_WARN_UNUSED
int ts_gine_forward_f64(const struct ts_gine *g, const double *w, const double *b, double *out, void *workspace);

/**
 * Compute the gradients of the aggregation.
 *
 * @param grad_out   (num_rows, dim)
 * @param grad_x     (num_rows, dim), or NULL to skip it
 * @param grad_w     (num_channels, dim)
 * @param grad_b     (dim,)
 * @param workspace  ts_gine_workspace() bytes, aligned as by malloc()
 * @return TS_ERR_BOUNDS if an edge leaves its graph
 */
TS_WARN_UNUSED
int ts_gine_backward_f32(const struct ts_gine *g, const float *w, const float *b, const float *grad_out,
                         float *grad_x, float *grad_w, float *grad_b, void *workspace);
TS_WARN_UNUSED
int ts_gine_backward_f64(const struct ts_gine *g, const double *w, const double *b, const double *grad_out,
                         double *grad_x, double *grad_w, double *grad_b, void *workspace);

#endif
