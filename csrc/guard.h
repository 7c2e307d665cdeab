/* Reading file maps whose file may be cut short meanwhile.
 *
 * A page of a map that lies behind the end of its file raises SIGBUS when it is
 * touched, which ends the process. Work that runs under ts_sigbus_guard ends with
 * TS_ERR_FAULT instead. Pages that hold the new end of the file are not covered: the
 * kernel fills them with zeros (see ts_map_is_intact). */
#ifndef TS_GUARD_H
#define TS_GUARD_H

/* Runs work(context) in the calling thread; what it returns, or TS_ERR_FAULT where it
 * touched a page that is gone.
 *
 * It is left in the middle then, like a computation that longjmp leaves: it must hold no
 * lock, call into no interpreter, start no thread it would have to join, and keep every
 * allocation and file descriptor where its caller finds and frees it. Allocating inside
 * is fine. Guards nest; each thread needs its own. SIGBUS must not be blocked in it.
 *
 * The handler is installed by the first call. One that was there before gets every
 * SIGBUS that comes from elsewhere, with its own flags and mask. Where another one was
 * installed over it since, the next call puts it first again, in front of that one. */
int ts_sigbus_guard(int (*work)(void *context), void *context);

/* The same soon after another ts_sigbus_guard: without looking, which costs a system call,
 * whether the handler is still the first. */
int ts_guard_run_again(int (*work)(void *context), void *context);

/* The address of the calling thread's last TS_ERR_FAULT. */
const void *ts_guard_fault(void);

/* Makes `address` that of the calling thread: for functions that join threads of theirs. */
void ts_guard_set_fault(const void *address);

/* A process has one handler, but each extension module its own copy of this file: all use
 * the copy whose ts_guard_own() was handed to their ts_guard_share(). */
typedef int ts_guard_runner(int (*work)(void *context), void *context, const void **fault, int is_again);
ts_guard_runner *ts_guard_own(void);
void ts_guard_share(ts_guard_runner *runner);

#endif
