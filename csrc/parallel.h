/* Fork-join over threads that live for one call only: nothing is kept between
 * calls, so fork() at any time is safe and a failing thread creation costs
 * speed, never correctness. */
#ifndef TS_PARALLEL_H
#define TS_PARALLEL_H

#include <stddef.h>

/* Work on items [begin, end); must not touch what other ranges write. */
typedef void (*ts_range_fn)(void *context, size_t begin, size_t end);

/* Calls fn over disjoint ranges of at most `grain` items that cover [0, n),
 * on up to `num_threads` threads, the caller's included. Which thread takes
 * which range is not defined; the ranges themselves depend on n and grain only. */
void ts_parallel_for(size_t n, size_t grain, int num_threads, ts_range_fn fn, void *context);

#endif
