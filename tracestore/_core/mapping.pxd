# cython: language_level=3
cdef extern from "map.h" nogil:
    struct ts_map:
        const unsigned char *base
        size_t size
        const unsigned char *tail
        unsigned char tail_byte
    int ts_map_is_intact(const ts_map *map)


cdef class MappedFile:
    cdef ts_map map
    cdef readonly size_t size
    cdef readonly str name
    cdef bint is_in_store
    cdef bytes path
    cdef void *next_map
    cdef void *previous_map
    cdef void link(self) noexcept
    cdef int raise_truncated(self) except -1


# Return ts_sigbus_guard_own() of _core.mapping, for sigbus_guard.pxi.
cdef void *guard_runner() noexcept
# Raise the exception of a TS_ERR_FAULT at an address. Needs the GIL.
cdef int raise_fault(const void *address) except -1
