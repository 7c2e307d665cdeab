#include "shared_memory.h"
#include "test_core.h"

void test_shared_memory(void)
{
    char path[] = TEMPORARY_PATH;
    int fd = make_file(path);
    CHECK(unlink(path) == 0 && ftruncate(fd, 8192) == 0);
    int *first = ts_shared_map(fd, 8192), *second = ts_shared_map(fd, 8192);
    CHECK(first != NULL && second != NULL && ts_shared_map(-1, 8192) == NULL);
    ts_shared_incref(first);
    ts_shared_incref(second);
    CHECK(ts_shared_refcount(first) == 2);
    ts_shared_decref(first);
    CHECK(ts_shared_refcount(second) == 1);
    ts_shared_unmap(first, 8192);
    ts_shared_unmap(second, 8192);
    ts_shared_unmap(NULL, 8192);
    close(fd);
}
