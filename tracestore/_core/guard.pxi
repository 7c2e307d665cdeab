# Shared by the modules that read file maps: textually included, so that all use one handler of SIGBUS.
from tracestore._core.mapping cimport guard_runner, raise_fault

cdef extern from "error.h":
    int TS_ERR_FAULT

cdef extern from "guard.h" nogil:
    ctypedef int ts_guard_runner(int (*work)(void *) noexcept, void *context, const void **fault, int is_again)
    void ts_guard_share(ts_guard_runner *runner)
    int ts_sigbus_guard(int (*work)(void *) noexcept, void *context)
    int ts_guard_run_again(int (*work)(void *) noexcept, void *context)
    const void *ts_guard_fault()

ts_guard_share(<ts_guard_runner *>guard_runner())
