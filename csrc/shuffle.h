/**
 * The order of an epoch, a pure function of integers, for data/order.py.
 * ts_splitmix64() and ts_permute() are thread safe.
 */
#ifndef TS_SHUFFLE_H
#define TS_SHUFFLE_H

#include <stddef.h>
#include <stdint.h>

/** Return the SplitMix64 finalizer of a value, a bijection of 64-bit integers. */
uint64_t ts_splitmix64(uint64_t value);

/**
 * Evaluate a keyed permutation of [0, n).
 *
 * @param positions  count positions below n
 * @param key        selects the permutation
 * @param out        the permuted value of each position
 */
void ts_permute(const int64_t *positions, size_t count, uint64_t n, uint64_t key, int64_t *out);

/**
 * A shuffle buffer over the ids [0, n): a window of `size` ids, filled in order, that yields a
 * random one at each step. Not thread safe.
 */
struct ts_shuffle_buffer {
    int64_t *window; /* (size,), owned by the caller */
    uint64_t n, size, key;
    uint64_t step;   /* number of ids yielded so far */
};

/** Reset a buffer. `size` must be in [1, n] unless n is 0. */
void ts_shuffle_buffer_init(struct ts_shuffle_buffer *buffer);

/**
 * Yield the next ids; step + count must not exceed n.
 *
 * @param out  count ids, or NULL to skip them
 */
void ts_shuffle_buffer_next(struct ts_shuffle_buffer *buffer, uint64_t count, int64_t *out);

#endif
