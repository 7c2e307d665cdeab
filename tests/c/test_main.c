/* Run the unit tests of all modules of the C core. */
#include "test_core.h"

int main(void)
{
    void (*const tests[])(void) = {
        test_attention,   test_copy,         test_crc32c,      test_edge_rule,   test_error,
        test_float_convert, test_gather,     test_gine,        test_guarded_for, test_huge_alloc,
        test_index,       test_map,          test_pack,        test_parallel,    test_platform,
        test_shared_memory, test_shuffle,    test_sigbus_guard, test_simd,       test_stream,
        test_thread_pool,
    };
    size_t count = sizeof tests / sizeof *tests;
    for (size_t i = 0; i < count; i++)
        tests[i]();
    printf("%zu modules passed, 0 failed\n", count);
    return 0;
}
