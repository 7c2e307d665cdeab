/**
 * Rules that select the edges of a graph from the weights of its pairs.
 *
 * A rule is a threshold or a fraction of the pairs, largest weights first (top-k). NaN is never
 * selected. All buffers belong to the caller. All functions are thread safe.
 */
#ifndef TS_EDGE_RULE_H
#define TS_EDGE_RULE_H

#include <stddef.h>
#include <stdint.h>

#include "float_convert.h"

/** The rule that selects edges from the pairs of a graph. */
struct ts_edge_rule {
    double attention_threshold; /* keep pairs with weight > attention_threshold */
    double top_k;               /* if > 0: instead keep this fraction of the pairs, largest weights first */
};

/** The weights that a threshold keeps, as a range of integers that have the order of the weights. */
struct ts_weight_range {
    enum ts_dtype dtype;
    int32_t limit, top; /* keep integers in (limit, top]; top is infinity, which NaN exceeds */
    size_t (*select16)(const int16_t *, size_t, int16_t, int16_t, unsigned char *);
    size_t (*select32)(const int32_t *, size_t, int32_t, int32_t, unsigned char *);
};

/**
 * Return the range of weights that a rule keeps. A top-k rule keeps every number here. The threshold
 * is compared in float64, so that it is not rounded.
 *
 * @param dtype  type of the weights: TS_F16, TS_BF16 or TS_F32
 */
struct ts_weight_range ts_weight_range(struct ts_edge_rule rule, enum ts_dtype dtype);

/**
 * Select the weights that lie in a range.
 *
 * @param weights  n weights, aligned to their type; n < 2^32
 * @param keep     n flags, set to 0 or 1
 * @return the number of selected weights
 */
size_t ts_select_in_range(const struct ts_weight_range *range, const void *weights, size_t n, unsigned char *keep);

/** Set a weight of type TS_F16, TS_BF16 or TS_F32 to NaN. */
void ts_set_nan(unsigned char *weights, size_t at, enum ts_dtype dtype);

/**
 * Set pairs of a causal graph to NaN, and count the others that lie in a range.
 *
 * @param weights  packed triangle of S tokens, aligned to its type
 * @param diagonal set the pair of each token with itself
 * @param sinks    set the pairs whose source is one of so many first tokens
 * @param degree   S counts, one for each target, at least 1
 */
void ts_mask_triangle(const struct ts_weight_range *range, unsigned char *weights, size_t S, int diagonal, size_t sinks,
                      int32_t *degree);

/** Return how many of n pairs a top-k rule keeps if no weight is NaN. */
size_t ts_top_k_count(size_t n, double top_k);

/**
 * Select the pairs that a top-k rule keeps. Ties are resolved by position.
 *
 * @param weights  n weights
 * @param keep     n flags, set to 0 or 1
 * @param scratch  n floats, overwritten
 * @return the number of selected pairs
 */
size_t ts_select_top_k(const float *weights, size_t n, double top_k, unsigned char *keep, float *scratch);

#endif
