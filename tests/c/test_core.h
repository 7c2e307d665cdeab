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
    CHECK(ts_map_open(map, fd, 4 * 4096) == TS_OK && ts_map_is_intact(map));
    CHECK(ftruncate(fd, length) == 0);
    close(fd);
    unlink(path);
    return (unsigned char *)map->base;
}

/** The modules of csrc/ that have tests. test_NAME.c defines the function test_NAME(). */
#define TEST_MODULES(TEST) \
    TEST(attention) TEST(copy) TEST(crc32c) TEST(edge_rule) TEST(error) TEST(float_convert) \
    TEST(gather) TEST(gine) TEST(guarded_for) TEST(huge_alloc) TEST(index) TEST(map) TEST(pack) \
    TEST(parallel) TEST(platform) TEST(rows) TEST(shared_memory) TEST(shuffle) TEST(sigbus_guard) \
    TEST(simd) TEST(stream) TEST(thread_pool)

#define DECLARE_TEST(name) void test_##name(void);
TEST_MODULES(DECLARE_TEST)

#endif
