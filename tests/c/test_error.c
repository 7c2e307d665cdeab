#include "error.h"
#include "test_core.h"

void test_error(void)
{
    for (int code = 0; code > TS_ERR_LAST; code--) {
        CHECK(ts_strerror(code) != NULL && strcmp(ts_strerror(code), "unknown error") != 0);
        for (int other = 0; other > code; other--)
            CHECK(strcmp(ts_strerror(code), ts_strerror(other)) != 0);
    }
    CHECK(strcmp(ts_strerror(TS_ERR_LAST), "unknown error") == 0);
}
