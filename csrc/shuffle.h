/* The order of an epoch, as pure functions of integers. data/order.py has the same in
 * numpy, and says where the methods come from. */
#ifndef TS_SHUFFLE_H
#define TS_SHUFFLE_H

#include <stddef.h>
#include <stdint.h>

/* SplitMix64's finaliser: a bijection of 64 bits. */
uint64_t ts_splitmix64(uint64_t value);

/* out[k] = permutation of [0, n) by `key` at positions[k], which are below n. */
void ts_permute(const int64_t *positions, size_t count, uint64_t n, uint64_t key, int64_t *out);

/* A shuffle buffer of ids: a window of `size` ids, filled in order, emits one at
 * random a step. The caller owns window[size]. */
struct ts_shuffle_buffer {
    int64_t *window;
    uint64_t n, size, key;
    uint64_t step; /* ids emitted so far */
};

/* Starts over; size is at least 1 and at most n, unless n is 0. */
void ts_shuffle_buffer_init(struct ts_shuffle_buffer *buffer);

/* The next `count` ids into out (NULL: they are passed over). step + count <= n. */
void ts_shuffle_buffer_next(struct ts_shuffle_buffer *buffer, uint64_t count, int64_t *out);

#endif
