/* Building batches: parallel copies and edge lists. */
#ifndef TS_GATHER_H
#define TS_GATHER_H

#include <stddef.h>
#include <stdint.h>

#include "attention.h"

struct ts_copy {
    const unsigned char *src;
    unsigned char *dst;
    size_t bytes;
};

/* Does all copies on up to num_threads threads. Sources stay owned by the caller. */
void ts_copy_many(const struct ts_copy *copies, size_t n, int num_threads);

/* One layer of one trace on its way into a batch. */
struct ts_layer {
    const unsigned char *weights; /* packed triangle (causal) or S*S (square) of `dtype` */
    size_t num_tokens;            /* S */
    int causal;
    int64_t first_node;           /* number of this graph's node 0 in the batch */
    int64_t num_edges;            /* out: ts_count_edges */
    int64_t first_edge;           /* in: ts_fill_edges */
};

/* Sets num_edges of every layer by `rule`. TS_ERR_NOMEM or TS_ERR_DTYPE. */
int ts_count_edges(struct ts_layer *layers, size_t n, enum ts_dtype dtype, struct ts_edge_rule rule, int num_threads);

/* Writes the edges of layer l at first_edge: source[] the attended token j,
 * target[] the attending token i, row after row, and its weight, bits as stored. */
int ts_fill_edges(const struct ts_layer *layers, size_t n, enum ts_dtype dtype, struct ts_edge_rule rule,
                  int num_threads, int64_t *source, int64_t *target, unsigned char *weight);

#endif
