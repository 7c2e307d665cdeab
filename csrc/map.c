#include "map.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "error.h"
#include "sigbus_guard.h"
#include "platform.h"

static int find_tail(void *context)
{
    struct ts_map *map = context;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), first = (map->size - 1) / page * page, last = map->size - 1;
    while (last > first && map->base[last] == 0)
        last--;
    map->tail_byte = map->base[last];
    map->tail = map->base + last;
    return TS_OK;
}

int ts_map_open(struct ts_map *map, int fd, int64_t expected_size)
{
    struct stat st;
    *map = (struct ts_map){0};
    if (fstat(fd, &st) != 0)
        return TS_ERR_IO;
    if (!S_ISREG(st.st_mode)) {
        errno = EINVAL;
        return TS_ERR_IO;
    }
    if (expected_size >= 0 && st.st_size != expected_size)
        return TS_ERR_SIZE;
    if (st.st_size == 0)
        return TS_OK;
    void *base = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        return TS_ERR_IO;
    map->base = base;
    map->size = (size_t)st.st_size;
    return ts_sigbus_guard(find_tail, map);
}

void ts_map_close(struct ts_map *map)
{
    if (map->base != NULL)
        munmap((void *)map->base, map->size);
    *map = (struct ts_map){0};
}

int ts_map_is_intact(const struct ts_map *map)
{
    /* An acquire fence: earlier reads must not move past this point. Written in assembly because the
     * thread sanitizer does not support atomic_thread_fence(). */
#if defined(__aarch64__)
    __asm__ volatile("dmb ishld" ::: "memory");
#else
    __asm__ volatile("" ::: "memory");
#endif
    return map->tail == NULL || *(const volatile unsigned char *)map->tail == map->tail_byte;
}

struct copy_args {
    const struct ts_map *map;
    size_t offset, bytes;
    void *out;
};

static int copy_bytes(void *context)
{
    const struct copy_args *args = context;
    memcpy(args->out, args->map->base + args->offset, args->bytes);
    if (ts_map_is_intact(args->map))
        return TS_OK;
    ts_sigbus_set_fault(args->map->tail);
    return TS_ERR_FAULT;
}

int ts_map_copy(const struct ts_map *map, size_t offset, size_t bytes, void *out)
{
    struct copy_args args = {map, offset, bytes, out};
    return bytes == 0 ? TS_OK : ts_sigbus_guard(copy_bytes, &args);
}

/* madvise() needs whole pages. */
static void advise_pages(void (*advise)(void *, size_t), const void *begin, size_t bytes)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = (uintptr_t)begin & ~(page - 1);
    if (bytes != 0)
        advise((void *)first, (uintptr_t)begin + bytes - first);
}

void ts_map_prefetch(const void *begin, size_t bytes)
{
    advise_pages(ts_advise_prefetch, begin, bytes);
}

void ts_map_evict(const void *begin, size_t bytes)
{
    advise_pages(ts_advise_evict, begin, bytes);
}
