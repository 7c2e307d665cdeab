/* Work in the threads of the OpenMP runtime that the process has loaded already: with
 * torch that is where its operations run. For a while after one these threads are awake, and what
 * it wrote last is in the caches of the thread that wrote it. */
#ifndef TS_TEAM_H
#define TS_TEAM_H

/* Part `part` of `num_parts`; must not touch what other parts write. */
typedef void (*ts_part_fn)(void *context, int part, int num_parts);

/* Calls fn for parts 0 .. num_parts - 1, each in a thread of its own, the caller's the first of
 * them, and returns when all have. num_parts is num_threads, or what the runtime gives: 1 where
 * none is loaded and, by default, where the caller is in a thread of it itself.
 * Give the number of threads that torch has, or 1: the runtime ends threads that are too many
 * and starts them again when torch next asks for all, and one that it cannot start ends the
 * process. As torch's operations it must not be used by a fork of a process that has. */
void ts_team_run(int num_threads, ts_part_fn fn, void *context);

#endif
