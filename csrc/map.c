#include "map.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "crc32c.h"
#include "error.h"
#include "guard.h"
#include "platform.h"

int ts_map_descriptor(struct ts_map *map, int fd, int64_t expected_size)
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
    return TS_OK;
}

int ts_map_open(struct ts_map *map, const char *path, int64_t expected_size)
{
    /* O_NONBLOCK: opening a FIFO in place of a file must not hang. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        *map = (struct ts_map){0};
        return TS_ERR_IO;
    }
    int ret = ts_map_descriptor(map, fd, expected_size), saved = errno;
    close(fd);
    errno = saved;
    return ret;
}

void ts_map_close(struct ts_map *map)
{
    if (map->base != NULL)
        munmap((void *)map->base, map->size);
    *map = (struct ts_map){0};
}

static int mark(void *context)
{
    struct ts_map *map = context;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), first = (map->size - 1) / page * page, at = map->size - 1;
    while (at > first && map->base[at] == 0)
        at--;
    map->tail_byte = map->base[at];
    map->tail = map->base + at;
    return TS_OK;
}

int ts_map_record_tail(struct ts_map *map)
{
    return map->base == NULL ? TS_OK : ts_sigbus_guard(mark, map);
}

int ts_map_is_intact(const struct ts_map *map)
{
    /* What was read stays before this: the fence that the thread sanitizer has no word for. */
#if defined(__aarch64__)
    __asm__ volatile("dmb ishld" ::: "memory");
#else
    __asm__ volatile("" ::: "memory");
#endif
    return map->tail == NULL || *(const volatile unsigned char *)map->tail == map->tail_byte;
}

struct copying {
    const struct ts_map *map;
    size_t from, bytes;
    void *out;
};

static int copy(void *context)
{
    const struct copying *c = context;
    memcpy(c->out, c->map->base + c->from, c->bytes);
    if (ts_map_is_intact(c->map))
        return TS_OK;
    ts_guard_set_fault(c->map->tail);
    return TS_ERR_FAULT;
}

int ts_map_copy(const struct ts_map *map, size_t from, size_t bytes, void *out)
{
    struct copying c = {map, from, bytes, out};
    return bytes == 0 ? TS_OK : ts_sigbus_guard(copy, &c);
}

static void advise(void (*give)(void *, size_t), const void *from, size_t bytes)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)from & ~(page - 1);
    if (bytes != 0)
        give((void *)begin, (uintptr_t)from + bytes - begin);
}

void ts_map_prefetch(const void *from, size_t bytes)
{
    advise(ts_advise_read, from, bytes);
}

void ts_map_evict(const void *from, size_t bytes)
{
    advise(ts_advise_drop, from, bytes);
}

int64_t ts_major_faults(void)
{
    return ts_faults();
}

static uint64_t little64(const unsigned char *p)
{
    uint64_t v = 0;
    for (int i = 7; i >= 0; i--)
        v = v << 8 | p[i];
    return v;
}

int ts_shard_check(const unsigned char *base, size_t size, uint64_t num_chunks, uint64_t chunk_bytes)
{
    uint64_t data_bytes, index_bytes, total;
    if (__builtin_mul_overflow(num_chunks, chunk_bytes, &data_bytes)
        || __builtin_mul_overflow(num_chunks, (uint64_t)16, &index_bytes)
        || __builtin_add_overflow(data_bytes, index_bytes, &total)
        || __builtin_add_overflow(total, (uint64_t)4, &total) || total != size)
        return TS_ERR_SIZE;
    const unsigned char *index = base + data_bytes, *stored = index + index_bytes;
    uint32_t crc = (uint32_t)stored[0] | (uint32_t)stored[1] << 8 | (uint32_t)stored[2] << 16 | (uint32_t)stored[3] << 24;
    if (ts_crc32c(0, index, index_bytes) != crc)
        return TS_ERR_CHECKSUM;
    for (uint64_t k = 0; k < num_chunks; k++)
        if (little64(index + 16 * k) != k * chunk_bytes || little64(index + 16 * k + 8) != chunk_bytes)
            return TS_ERR_LAYOUT;
    return TS_OK;
}
