#include "crc32c.h"
#include "map.h"
#include "test_core.h"

void test_map(void)
{
    char path[] = TEMPORARY_PATH;
    int fd = make_file(path); /* two chunks of 8 bytes, their index and its checksum */
    unsigned char file[2 * 8 + 2 * 16 + 4] = {0};
    file[16 + 8] = 8;
    file[32] = 8;
    file[32 + 8] = 8;
    uint32_t crc = ts_crc32c(0, file + 16, 32);
    for (int i = 0; i < 4; i++)
        file[48 + i] = (unsigned char)(crc >> 8 * i);
    CHECK(write(fd, file, sizeof file) == (ssize_t)sizeof file);
    struct ts_map map;
    CHECK(ts_map_open(&map, path, (int64_t)sizeof file + 1) == TS_ERR_SIZE);
    CHECK(ts_map_open(&map, path, (int64_t)sizeof file) == TS_OK && map.size == sizeof file);
    CHECK(ts_shard_check(map.base, map.size, 2, 8) == TS_OK);
    CHECK(ts_shard_check(map.base, map.size, 3, 8) == TS_ERR_SIZE);
    CHECK(ts_shard_check(map.base, map.size, UINT64_MAX, 8) == TS_ERR_SIZE);
    ts_map_close(&map);
    file[33] ^= 1;
    CHECK(ts_shard_check(file, sizeof file, 2, 8) == TS_ERR_CHECKSUM);
    CHECK(ftruncate(fd, 0) == 0);
    CHECK(ts_map_open(&map, path, -1) == TS_OK && map.base == NULL && map.size == 0);
    close(fd);
    unlink(path);
    CHECK(ts_map_open(&map, path, -1) == TS_ERR_IO);
    CHECK(ts_map_open(&map, "/tmp", -1) == TS_ERR_IO);
}
