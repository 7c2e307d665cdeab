#include "block.h"

#include <stdint.h>
#include <sys/mman.h>

#include "platform.h"

#define SMALL ((size_t)64 << 10)
#define HUGE_PAGE ((size_t)2 << 20)

size_t ts_block_size(size_t bytes)
{
    size_t unit = bytes < HUGE_PAGE ? SMALL : HUGE_PAGE;
    return bytes == 0 ? unit : (bytes + unit - 1) / unit * unit;
}

void *ts_block_alloc(size_t bytes)
{
    size_t size = ts_block_size(bytes), slack = size < HUGE_PAGE ? 0 : HUGE_PAGE;
    unsigned char *base = mmap(NULL, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return NULL;
    if (slack == 0)
        return base;
    size_t head = (size_t)(-(uintptr_t)base & (HUGE_PAGE - 1));
    if (head != 0)
        munmap(base, head);
    if (slack != head)
        munmap(base + head + size, slack - head);
    ts_advise_huge(base + head, size);
    return base + head;
}

void ts_block_free(void *block, size_t bytes)
{
    if (block != NULL)
        munmap(block, ts_block_size(bytes));
}

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
