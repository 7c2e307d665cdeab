/* CRC-32C (Castagnoli, RFC 3720 appendix B.4), as Zarr's crc32c codec and the
 * manifest use it. */
#ifndef TS_CRC32C_H
#define TS_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* The checksum of the bytes behind `crc` followed by data[0..n). Start with 0.
 * Uses wide carry-less products (AVX-512) or SSE4.2 where the processor has them. Reads only;
 * thread safe. */
uint32_t ts_crc32c(uint32_t crc, const void *data, size_t n);

/* The portable path, public so that a test can hold the two against each other. */
uint32_t ts_crc32c_portable(uint32_t crc, const void *data, size_t n);

/* The checksum of A followed by B from crc(A), crc(B) and the length of B. */
uint32_t ts_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t len_b);

#endif
