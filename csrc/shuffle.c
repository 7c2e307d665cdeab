#include "shuffle.h"

#define ROUNDS 6
#define BLOCK 256 /* positions permuted side by side */
#define GOLDEN 0x9e3779b97f4a7c15ull

uint64_t ts_splitmix64(uint64_t value)
{
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
    return value ^ (value >> 31);
}

/* Apply one Feistel network to values of twice `half` bits. */
static inline uint64_t feistel(uint64_t value, unsigned half, const uint64_t *keys)
{
    uint64_t low = ((uint64_t)1 << half) - 1, left = value >> half, right = value & low;
    for (int r = 0; r < ROUNDS; r++) {
        uint64_t mixed = left ^ (ts_splitmix64(right ^ keys[r]) & low);
        left = right;
        right = mixed;
    }
    return left << half | right;
}

void ts_permute(const int64_t *positions, size_t count, uint64_t n, uint64_t key, int64_t *out)
{
    uint64_t keys[ROUNDS];
    unsigned half = 1;
    while (half < 31 && (n - 1) >> (2 * half) != 0)
        half++;
    for (uint64_t r = 0; r < ROUNDS; r++)
        keys[r] = ts_splitmix64(key ^ ((r + 1) << 56));
    for (size_t begin = 0; begin < count; begin += BLOCK) {
        size_t most = count - begin < BLOCK ? count - begin : BLOCK, pending = most;
        unsigned char slots[BLOCK];
        for (size_t k = 0; k < most; k++) {
            out[begin + k] = positions[begin + k];
            slots[k] = (unsigned char)k;
        }
        /* Walk the cycles of a block side by side: values of n or more are mapped again. Advancing past
         * them without a branch keeps the multiplications of neighbors overlapped. */
        while (pending > 0) {
            size_t left = 0;
            for (size_t k = 0; k < pending; k++) {
                unsigned char slot = slots[k];
                uint64_t value = n <= 1 ? 0 : feistel((uint64_t)out[begin + slot], half, keys);
                out[begin + slot] = (int64_t)value;
                slots[left] = slot;
                left += value >= n && n > 0;
            }
            pending = left;
        }
    }
}

void ts_shuffle_buffer_init(struct ts_shuffle_buffer *buffer)
{
    buffer->step = 0;
    for (uint64_t k = 0; k < buffer->size; k++)
        buffer->window[k] = (int64_t)k;
}

void ts_shuffle_buffer_next(struct ts_shuffle_buffer *buffer, uint64_t count, int64_t *out)
{
    for (uint64_t k = 0; k < count; k++) {
        uint64_t step = buffer->step++, next_id = buffer->size + step;
        uint64_t length = next_id <= buffer->n ? buffer->size : buffer->n - step;
        int64_t *slot = &buffer->window[ts_splitmix64((step * GOLDEN) ^ buffer->key) % length];
        if (out != NULL)
            out[k] = *slot;
        /* The next id refills the slot; when none is left, the window shrinks by its last entry. */
        *slot = next_id < buffer->n ? (int64_t)next_id : buffer->window[length - 1];
    }
}
