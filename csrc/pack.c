#include "pack.h"

#include <string.h>

#include "attention.h"
#include "crc32c.h"
#include "error.h"

void ts_checksum_scan(struct ts_checksum_scan *scan, const void *in, enum ts_dtype dtype, size_t n, void *out)
{
    size_t bytes = n * ts_dtype_bytes(dtype);
    if (out != NULL) {
        memcpy(out, in, bytes);
        in = out;
    }
    scan->nonfinite += ts_count_nonfinite(in, dtype, n);
    if (scan->layer_crcs == NULL) {
        scan->crc = ts_crc32c(scan->crc, in, bytes);
    } else {
        *scan->layer_crcs = ts_crc32c(0, in, bytes);
        scan->crc = ts_crc32c_combine(scan->crc, *scan->layer_crcs++, bytes);
    }
}

int ts_pack_attention(struct ts_pack *p)
{
    enum ts_dtype dtype = p->mean ? TS_F16 : p->stored_dtype;
    size_t H = p->mean ? 1 : p->H, S = p->S;
    size_t values = H * (p->causal ? S * (S + 1) / 2 : S * S), bytes = values * ts_dtype_bytes(dtype);
    p->scan = (struct ts_checksum_scan){.layer_crcs = p->scan.layer_crcs};
    for (size_t k = 0; k < p->L; k++) {
        unsigned char *out = p->out == NULL ? NULL : (unsigned char *)p->out + k * bytes;
        if (p->causal && !ts_is_causal(p->sources[k], p->source_dtype, p->H, S)) {
            p->causal = 0;
            return TS_OK;
        }
        if (p->mean) {
            int ret = ts_head_mean(p->sources[k], p->source_dtype, p->H, S, p->causal, (uint16_t *)out);
            if (ret != TS_OK) {
                p->layer = k;
                return ret;
            }
        } else if (out != NULL && p->causal) {
            ts_pack_triangle(p->stored[k], ts_dtype_bytes(dtype), H, S, out);
        } else if (out != NULL) {
            memcpy(out, p->stored[k], bytes);
        }
        ts_checksum_scan(&p->scan, out != NULL ? out : p->stored[k], dtype, values, NULL);
    }
    return TS_OK;
}
