#include "map.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "crc32c.h"
#include "error.h"
#include "sigbus_guard.h"
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
    /* O_NONBLOCK keeps open() from hanging if the path is a FIFO. */
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

int ts_map_record_tail(struct ts_map *map)
{
    return map->base == NULL ? TS_OK : ts_sigbus_guard(find_tail, map);
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

static uint64_t load_le64(const unsigned char *p)
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
        if (load_le64(index + 16 * k) != k * chunk_bytes || load_le64(index + 16 * k + 8) != chunk_bytes)
            return TS_ERR_LAYOUT;
    return TS_OK;
}
