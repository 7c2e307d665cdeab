#include "huge_alloc.h"
#include "test_core.h"

void test_huge_alloc(void)
{
    const size_t sizes[] = {0, 1, 65536, 65537, (2 << 20) - 1, 2 << 20, (5 << 20) + 3};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        unsigned char *memory = ts_huge_alloc(sizes[i]);
        size_t size = ts_huge_size(sizes[i]);
        CHECK(memory != NULL && size >= sizes[i] && ((uintptr_t)memory & (size < (2 << 20) ? 4095 : (2 << 20) - 1)) == 0);
        memory[0] = memory[size - 1] = 1;
        ts_huge_free(memory, sizes[i]);
    }
    ts_huge_free(NULL, 1);
    CHECK(ts_huge_alloc(SIZE_MAX / 2) == NULL);
}
