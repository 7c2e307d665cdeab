/* Copies of memory that the threads of an OpenMP runtime (torch's) work on. */
#ifndef TS_SPANS_H
#define TS_SPANS_H

#include <stddef.h>

/* Owned by the caller; spans do not overlap. */
struct ts_span {
    const unsigned char *src;
    unsigned char *dst;
    size_t num_items, item_bytes;
};

/* Copies all spans, past the caches, each divided among num_threads threads (torch's number)
 * as torch divides an operation on a tensor of these items. -> the threads that there were. */
int ts_copy_spans(const struct ts_span *spans, size_t n, int num_threads);

#endif
