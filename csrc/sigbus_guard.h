/**
 * Reading file mappings whose file may be truncated during the read.
 *
 * Touching a mapped page beyond the end of its file raises SIGBUS, which ends the process. Work
 * that runs under ts_sigbus_guard() returns TS_ERR_FAULT instead. The page that holds the new end
 * of the file does not fault: the kernel fills its rest with zeros, see ts_map_is_intact().
 */
#ifndef TS_SIGBUS_GUARD_H
#define TS_SIGBUS_GUARD_H

#include "error.h"

/**
 * Run work(context) in the calling thread.
 *
 * A fault leaves `work` by a long jump. `work` must therefore hold no lock, call no interpreter
 * and start no thread that it has to join, and must keep every allocation and file descriptor
 * where its caller can release it. It may allocate. Guards nest; every thread needs its own.
 * SIGBUS must not be blocked in the thread.
 *
 * The first call installs a signal handler. The handler that was installed before receives every
 * SIGBUS that no guard expects, with its own flags and mask. If another handler was installed since, the
 * next call installs this one again, in front of that one.
 *
 * @return the result of work(context), or TS_ERR_FAULT if it touched a missing page
 */
TS_WARN_UNUSED
int ts_sigbus_guard(int (*work)(void *context), void *context);

/**
 * Run work(context) shortly after another ts_sigbus_guard(): the same, without the system call
 * that checks whether the handler is still installed.
 */
TS_WARN_UNUSED
int ts_sigbus_guard_again(int (*work)(void *context), void *context);

/** Return the address of the last TS_ERR_FAULT of the calling thread. */
const void *ts_sigbus_fault(void);

/** Set the address of the last fault of the calling thread, for functions that join threads. */
void ts_sigbus_set_fault(const void *address);

#endif
