/**
 * CRC-32C (Castagnoli, RFC 3720 appendix B.4), the checksum of Zarr's crc32c codec and of the
 * manifest. All functions are thread safe.
 */
#ifndef TS_CRC32C_H
#define TS_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/**
 * Extend a checksum by n bytes, with carry-less products (AVX-512) or the CRC instruction (SSE4.2,
 * aarch64) where available.
 *
 * @param crc   checksum of the preceding bytes; 0 at the beginning
 * @param data  n bytes
 * @return the checksum of the preceding bytes followed by data
 */
uint32_t ts_crc32c(uint32_t crc, const void *data, size_t n);

/**
 * Return the checksum of A followed by B.
 *
 * @param crc_a  checksum of A
 * @param crc_b  checksum of B
 * @param len_b  length of B in bytes
 */
uint32_t ts_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t len_b);

#endif
