/* Building batches: parallel copies, edge lists and packed triangles.
 *
 * Sources and destinations are owned by the caller and do not overlap. Nothing is
 * kept between calls. What is written depends on the arguments alone, never on the
 * number of threads. Sources may lie in file maps: all end with TS_ERR_FAULT (see guard.h)
 * where a file was cut short meanwhile; what was written then means nothing. */
#ifndef TS_GATHER_H
#define TS_GATHER_H

#include <stddef.h>
#include <stdint.h>

#include "attention.h"

struct ts_copy {
    const unsigned char *src;
    unsigned char *dst;
    size_t items;
};

/* Does all copies, items of dtype `in` written as dtype `out`: the same, or float32
 * from float16 or bfloat16. TS_ERR_DTYPE for another pair, TS_ERR_NOMEM. */
int ts_copy_many(const struct ts_copy *copies, size_t n, enum ts_dtype in, enum ts_dtype out, int num_threads);

/* One graph of a batch: one layer of one trace. */
struct ts_graph {
    const unsigned char *weights; /* packed triangle (causal) or S * S (square) */
    size_t num_tokens;            /* S */
    int causal;
    size_t num_heads;             /* to be packed, triangles or squares one behind the other; 0: one */
    const int32_t *pairs;         /* (num_edges, 2) source and target where only edges are stored, else NULL */
    int64_t first_node;           /* number of this graph's node 0 in the batch */
    int64_t first_edge;           /* in: ts_fill_edges; the graphs' edges lie one behind the other */
    int64_t num_edges;            /* out: ts_count_edges; in, where there are pairs */
};

/* How stored weights become edges: `in` as stored, `out` as ts_copy_many says. */
struct ts_edge_options {
    enum ts_dtype in, out;
    struct ts_edge_rule rule;
};

/* Stored weights: S (S + 1) / 2 of a causal graph, S * S of a square one, of each head; else its edges. */
size_t ts_num_pairs(const struct ts_graph *graph);

/* Means over H heads, stored head after head, one graph behind the other into `out`;
 * graphs[g].weights then points there. TS_ERR_RANGE as ts_mean_rows. */
int ts_mean_graphs(struct ts_graph *graphs, size_t n, enum ts_dtype dtype, size_t H, uint16_t *out, int num_threads);

/* Sets num_edges of every graph by the rule, which stored edges are not subject to. TS_ERR_DTYPE. */
int ts_count_edges(struct ts_graph *graphs, size_t n, const struct ts_edge_options *form, int num_threads);

/* Writes the edges of every graph at first_edge: source[] the attended token j,
 * target[] the attending token i, row after row, and its weight. TS_ERR_BOUNDS where
 * the weights are not those that were counted, TS_ERR_NODE, TS_ERR_NOMEM, TS_ERR_DTYPE. */
int ts_fill_edges(const struct ts_graph *graphs, size_t n, const struct ts_edge_options *form, int num_threads,
                  int64_t *source, int64_t *target, unsigned char *weight);

/* Writes all pairs of every graph, one graph behind the other; those that a top-k
 * rule drops as NaN, which is above no threshold. TS_ERR_NOMEM, TS_ERR_DTYPE. */
int ts_pack_graphs(const struct ts_graph *graphs, size_t n, const struct ts_edge_options *form, int num_threads,
                   unsigned char *out);

#endif
