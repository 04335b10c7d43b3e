// Where the copy engine and the matrix units of compute capability 9.0 have what: pure arithmetic, compiled for the GPU and
// for the CPU alike, so that tests check it without a card (tests/kernels/test_cuda_prefill.py, test_cuda_gated.py).
#pragma once
#include <cstdint>

#include "function.h"

namespace isthmus::hopper {

constexpr int kRowBytes = 128;  // of a swizzled row: 64 columns of 2 bytes

// Offset of the 16 bytes with columns 8 `chunk`.. of row `row`, of kBytes / 2 columns: the copy engine's swizzle of kBytes,
// 128 or 64, in which bits 4-6 of an address are xored with bits 7-9, or bits 4-5 with bits 7-8.
template <int kBytes = kRowBytes>
ISTHMUS_FN int swizzled(int row, int chunk) {
    static_assert(kBytes == 128 || kBytes == 64);
    return row * kBytes + ((chunk ^ (kBytes == 128 ? row & 7 : row >> 1 & 3)) << 4);
}

// A thread of a warpgroup holds 64 of the 64 x 128 elements of a product: its place of element `i`.
ISTHMUS_FN int fragment_row(int thread, int i) {
    return thread / 32 * 16 + thread % 32 / 4 + ((i >> 1) & 1) * 8;
}
ISTHMUS_FN int fragment_column(int thread, int i) {
    return (i >> 2) * 8 + thread % 4 * 2 + (i & 1);
}

// Shared-memory matrix descriptor of the matrix units with the 128-byte swizzle: addresses and strides in 16 bytes.
// `leading`: from one 64-column half to the next, where columns are the dimension that is not summed over; 1 otherwise.
// `stride`: from 8 rows to the next 8.
ISTHMUS_FN uint64_t descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
    return uint64_t((address & 0x3FFFF) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 |
           uint64_t(1) << 62;
}

}  // namespace isthmus::hopper
