#include "shared_memory.h"

#include <sys/mman.h>

void *ts_shared_map(int fd, size_t size)
{
    void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return base == MAP_FAILED ? NULL : base;
}

void ts_shared_unmap(void *base, size_t size)
{
    if (base != NULL)
        munmap(base, size);
}

void ts_shared_incref(void *base) { __atomic_fetch_add((int *)base, 1, __ATOMIC_ACQ_REL); }
void ts_shared_decref(void *base) { __atomic_fetch_sub((int *)base, 1, __ATOMIC_ACQ_REL); }
int ts_shared_refcount(const void *base) { return __atomic_load_n((const int *)base, __ATOMIC_ACQUIRE); }
