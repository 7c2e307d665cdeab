/**
 * Graphs of a batch: edge lists or packed weights, from stored attention.
 *
 * Sources and destinations belong to the caller and do not overlap; no state is kept between
 * calls. The output depends on the arguments alone, never on the number of threads. Sources may
 * lie in file mappings: every function returns TS_ERR_FAULT if a file was truncated during the
 * call (see sigbus_guard.h), and its output is undefined then. Functions may run concurrently on
 * different graphs and outputs.
 */
#ifndef TS_GATHER_H
#define TS_GATHER_H

#include <stddef.h>
#include <stdint.h>

#include "copy.h"
#include "edge_rule.h"

/** One graph of a batch: one layer of one trace. */
struct ts_graph {
    const unsigned char *weights; /* packed triangle (causal) or S * S (square), of every head */
    size_t num_tokens;            /* S */
    int causal;
    size_t num_heads;             /* heads whose weights are packed, one after another; 0 means 1 */
    const int32_t *pairs;         /* (num_edges, 2) source and target if only edges are stored, else NULL */
    int64_t first_node;           /* index of node 0 of this graph in the batch */
    int64_t first_edge;           /* input of ts_fill_edges(); the edges of the graphs are contiguous */
    int64_t num_edges;            /* output of ts_count_edges(); an input if pairs is set */
};

/** How stored weights become edges. */
struct ts_edge_options {
    enum ts_dtype in, out; /* stored type and output type, see ts_can_copy() */
    struct ts_edge_rule rule;
    int mask_diagonal;     /* ts_pack_graphs(): the pair of a token with itself is no edge */
    size_t mask_sinks;     /* ts_pack_graphs(): pairs whose source is one of so many first tokens are no edges */
};

/**
 * Return the number of stored weights: S (S + 1) / 2 of a causal graph or S * S of a square one,
 * times the number of heads; the number of edges if only edges are stored.
 */
size_t ts_num_pairs(const struct ts_graph *graph);

/**
 * Compute the means over H heads, which are stored one after another.
 *
 * @param graphs  n graphs; on return their weights point into `out`
 * @param out     the means as float16, graph after graph; must outlive `graphs`
 * @return TS_ERR_RANGE as ts_mean_rows(), TS_ERR_NOMEM, TS_ERR_FAULT
 */
TS_WARN_UNUSED
int ts_average_heads(struct ts_graph *graphs, size_t n, enum ts_dtype dtype, size_t H, uint16_t *out, int num_threads);

/**
 * Set num_edges of every graph by the rule. Graphs of stored edges keep all their edges.
 *
 * @param graphs  n graphs
 * @return TS_ERR_DTYPE, TS_ERR_FAULT
 */
TS_WARN_UNUSED
int ts_count_edges(struct ts_graph *graphs, size_t n, const struct ts_edge_options *options, int num_threads);

/**
 * Write the edges of every graph from its first_edge on, row after row.
 *
 * @param source  the attended token j of each edge
 * @param target  the attending token i of each edge
 * @param weight  the weight of each edge, of type options->out
 * @return TS_ERR_BOUNDS if the weights changed since ts_count_edges(), TS_ERR_NODE if a stored
 *         edge leaves its graph, TS_ERR_NOMEM, TS_ERR_DTYPE, TS_ERR_FAULT
 */
TS_WARN_UNUSED
int ts_fill_edges(const struct ts_graph *graphs, size_t n, const struct ts_edge_options *options, int num_threads,
                  int64_t *source, int64_t *target, unsigned char *weight);

/**
 * Write the weights of all pairs, graph after graph. Pairs that a top-k rule drops, and masked ones, become
 * NaN, which exceeds no threshold.
 *
 * @param out     the sum of ts_num_pairs() values of type options->out
 * @param degree  the edges into each node, at least 1, from the first node of the batch on; NULL to mask and count
 *                nothing. Requires causal graphs with the weights of one head.
 * @return TS_ERR_NOMEM, TS_ERR_DTYPE, TS_ERR_FAULT
 */
TS_WARN_UNUSED
int ts_pack_graphs(const struct ts_graph *graphs, size_t n, const struct ts_edge_options *options, int num_threads,
                   unsigned char *out, int32_t *degree);

#endif
