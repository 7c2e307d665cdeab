/* Run the unit tests of all modules of the C core. */
#include "test_core.h"

#define ENTRY(name) test_##name,

int main(void)
{
    void (*const tests[])(void) = {TEST_MODULES(ENTRY)};
    size_t count = sizeof tests / sizeof *tests;
    for (size_t i = 0; i < count; i++)
        tests[i]();
    printf("%zu modules passed, 0 failed\n", count);
    return 0;
}
