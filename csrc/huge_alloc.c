#include "huge_alloc.h"

#include <stdint.h>
#include <sys/mman.h>

#include "platform.h"

#define SMALL_UNIT ((size_t)64 << 10)
#define HUGE_PAGE ((size_t)2 << 20)

size_t ts_huge_size(size_t bytes)
{
    size_t unit = bytes < HUGE_PAGE ? SMALL_UNIT : HUGE_PAGE;
    return bytes == 0 ? unit : (bytes + unit - 1) / unit * unit;
}

void *ts_huge_alloc(size_t bytes)
{
    size_t size = ts_huge_size(bytes), slack = size < HUGE_PAGE ? 0 : HUGE_PAGE;
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

void ts_huge_free(void *memory, size_t bytes)
{
    if (memory != NULL)
        munmap(memory, ts_huge_size(bytes));
}
