#include "stream.h"
#include "test_core.h"

void test_stream(void)
{
    unsigned char bytes[300], copied[300];
    for (int i = 0; i < 300; i++)
        bytes[i] = (unsigned char)i;
    for (int shift = 0; shift < 64; shift++) {
        memset(copied, 0xee, sizeof copied);
        ts_stream_copy(copied + shift, bytes + 3, (size_t)(200 - shift));
        ts_stream_fence();
        CHECK(memcmp(copied + shift, bytes + 3, (size_t)(200 - shift)) == 0 && copied[200] == 0xee);
        CHECK(shift == 0 || copied[shift - 1] == 0xee);
    }
}
