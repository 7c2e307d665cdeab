#include "map.h"
#include "test_core.h"

void test_map(void)
{
    char path[] = TEMPORARY_PATH;
    int fd = make_file(path);
    CHECK(write(fd, "eight by", 8) == 8);
    struct ts_map map;
    CHECK(ts_map_open(&map, fd, 9) == TS_ERR_SIZE);
    CHECK(ts_map_open(&map, fd, 8) == TS_OK && map.size == 8 && memcmp(map.base, "eight by", 8) == 0);
    ts_map_close(&map);
    CHECK(ftruncate(fd, 0) == 0);
    CHECK(ts_map_open(&map, fd, -1) == TS_OK && map.base == NULL && map.size == 0);
    close(fd);
    unlink(path);
    CHECK(ts_map_open(&map, fd, -1) == TS_ERR_IO);
    fd = open("/tmp", O_RDONLY);
    CHECK(ts_map_open(&map, fd, -1) == TS_ERR_IO);
    close(fd);
}
