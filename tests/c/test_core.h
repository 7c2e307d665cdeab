/**
 * Shared declarations of the C unit tests.
 *
 * One file tests one module of csrc/ and defines one entry function; test_main.c runs them all.
 * The tests run under sanitizers, so buffers are allocated at their exact size: an access one byte
 * too far is detected.
 */
#ifndef TEST_CORE_H
#define TEST_CORE_H

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "error.h"
#include "map.h"
#include "simd.h"

/** End the test program unless a condition holds. */
#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            exit(1); \
        } \
    } while (0)

/** Run a test at every level of vector instructions. */
static inline void at_every_simd_level(void (*test)(void))
{
    for (int level = TS_SIMD_BASELINE; level <= TS_SIMD_HIGHEST; level++) {
        ts_simd_limit(level);
        test();
    }
    ts_simd_limit(TS_SIMD_HIGHEST);
}

/** Create an empty temporary file and set `path`, a template of mkstemp(). Returns its descriptor. */
static inline int make_file(char *path)
{
    int fd = mkstemp(path);
    CHECK(fd >= 0);
    return fd;
}

#define TEMPORARY_PATH "/tmp/tracestore_core_XXXXXX"

/** Map a file of four pages of bytes 0x3c and then truncate it to `length` bytes. */
static inline unsigned char *map_truncated_file(struct ts_map *map, off_t length)
{
    char path[] = TEMPORARY_PATH;
    int fd = make_file(path);
    unsigned char page[4096];
    memset(page, 0x3c, sizeof page);
    for (int i = 0; i < 4; i++)
        CHECK(write(fd, page, sizeof page) == (ssize_t)sizeof page);
    CHECK(ts_map_open(map, path, 4 * 4096) == TS_OK && ts_map_record_tail(map) == TS_OK && ts_map_is_intact(map));
    CHECK(ftruncate(fd, length) == 0);
    close(fd);
    unlink(path);
    return (unsigned char *)map->base;
}

void test_attention(void);
void test_copy(void);
void test_crc32c(void);
void test_edge_rule(void);
void test_error(void);
void test_float_convert(void);
void test_gather(void);
void test_gine(void);
void test_guarded_for(void);
void test_huge_alloc(void);
void test_index(void);
void test_map(void);
void test_pack(void);
void test_parallel(void);
void test_platform(void);
void test_shared_memory(void);
void test_shuffle(void);
void test_sigbus_guard(void);
void test_simd(void);
void test_stream(void);
void test_thread_pool(void);

#endif
