/* The aggregation of GINE (Hu et al. 2020, eq. as PyG's GINEConv, eps = 0):
 *     out_i = x_i + sum over edges j -> i of relu(x_j + w a_ij + b)
 * straight from the stored attention, without anything of size E x D.
 *
 * Graph g owns nodes node_ptr[g] .. node_ptr[g+1]. Triangles: its weights are the packed
 * lower triangle at weights[weight_ptr[g]]; pairs with a_ij > threshold (never NaN) are edges.
 * Edge lists: its edges are weight_ptr[g] .. weight_ptr[g+1] of (source, target, weight),
 * in any order; all of them count. With C > 1 channels (triangles only) a graph has C triangles
 * one behind the other, w a_ij is the sum of w_c a_cij over them, and pairs whose mean over the
 * channels is above the threshold are edges. x, out and their gradients hold the rows
 * node_ptr[0] .. node_ptr[num_graphs], so that a part of a batch needs no renumbering.
 *
 * A sum runs over its edges in stored order, and over graphs in theirs, whatever num_threads
 * is: results are bitwise the same. Nothing is allocated: workspaces come from the caller, so
 * that its memory budget sees them. Nothing outside the buffers is read whatever they hold. */
#ifndef TS_GINE_H
#define TS_GINE_H

#include <stddef.h>
#include <stdint.h>

#include "half.h"

struct ts_gine {
    size_t num_graphs, num_rows, dim; /* dim: D, columns of x */
    size_t num_weights;
    size_t num_channels;       /* C: 1, or the heads whose weights an edge has */
    const int64_t *node_ptr;   /* num_graphs + 1 */
    const int64_t *weight_ptr; /* num_graphs + 1: where triangles, or edges, of a graph begin */
    const void *weights;
    enum ts_dtype weight_dtype;
    double threshold;      /* triangles only */
    const int64_t *source; /* edge lists only, else NULL; the numbering of node_ptr */
    const int64_t *target;
    const void *x; /* (num_rows, dim) of x_dtype, converted as it is read */
    enum ts_dtype x_dtype;
    int num_threads;
    int simd; /* 0: the best that the processor has; 2, 3 (AVX2), 4 (AVX-512): that at most */
};

/* TS_ERR_BOUNDS unless pointers rise, stay inside the buffers and fit num_rows. To be called
 * before anything below. Edges are checked where they are read. */
int ts_gine_check(const struct ts_gine *g);

/* Bytes of workspace that forward, or backward, needs; aligned as malloc does. */
size_t ts_gine_workspace(const struct ts_gine *g, size_t real_bytes, int backward);

/* w (num_channels, dim), b (dim,); out (num_rows, dim). TS_ERR_BOUNDS: an edge leaves its graph. */
int ts_gine_forward_f32(const struct ts_gine *g, const float *w, const float *b, float *out, void *workspace);
int ts_gine_forward_f64(const struct ts_gine *g, const double *w, const double *b, double *out, void *workspace);

/* grad_out (num_rows, dim) -> grad_x (same shape, NULL if not wanted), grad_w and grad_b as w and b. */
int ts_gine_backward_f32(const struct ts_gine *g, const float *w, const float *b, const float *grad_out,
                         float *grad_x, float *grad_w, float *grad_b, void *workspace);
int ts_gine_backward_f64(const struct ts_gine *g, const double *w, const double *b, const double *grad_out,
                         double *grad_x, double *grad_w, double *grad_b, void *workspace);

#endif
