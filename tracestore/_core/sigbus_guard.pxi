# Shared by the modules that read file maps: textually included, so that all use one handler of SIGBUS.
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
