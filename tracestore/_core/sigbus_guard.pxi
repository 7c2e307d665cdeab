# The SIGBUS guard. Modules that read file mappings include this file as text; each has a copy of
# csrc/sigbus_guard.c, and all use the signal handler of _core.mapping.
from tracestore._core.mapping cimport guard_runner, raise_fault

cdef extern from "error.h":
    int TS_ERR_FAULT

cdef extern from "sigbus_guard.h" nogil:
    ctypedef int ts_sigbus_guard_runner(int (*work)(void *) noexcept, void *context, const void **fault, int is_again)
    void ts_sigbus_guard_share(ts_sigbus_guard_runner *runner)
    int ts_sigbus_guard(int (*work)(void *) noexcept, void *context)
    int ts_sigbus_guard_again(int (*work)(void *) noexcept, void *context)
    const void *ts_sigbus_fault()

ts_sigbus_guard_share(<ts_sigbus_guard_runner *>guard_runner())
