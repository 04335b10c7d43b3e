// The product of bf16 rows with panels of bf16 weights, by AVX512-BF16's dot product of pairs (../panels.h). Only where
// isthmus_cpu_bf16() says that the CPU has it: the instruction set is raised for this file alone.
#if defined(__AVX512F__)
#pragma GCC target("avx512bf16")
#define ISTHMUS_PAIRS
#include "../panels.h"

// Columns 2 i and 2 i + 1 of a channel share a 32-bit word, low and high half; an odd last column has a zero beside it.
EXPORT(linear_pairs_pack) {
    Arguments in = {arguments};
    pair *panels = in.pointer<pair>();
    const uint16_t *weight = in.pointer<const uint16_t>();
    const int64_t n = in.number();
    const int64_t columns = in.number();
    const int64_t k = (columns + 1) / 2, count = (n + NR - 1) / NR;
    parallel(count, [&](int64_t p, int) {
        for (int64_t i = 0; i < k; i++)
            for (int j = 0; j < NR; j++) {
                const int64_t row = p * NR + j;
                const uint16_t *from = weight + row * columns + 2 * i;
                const uint32_t low = row < n ? from[0] : 0, high = row < n && 2 * i + 1 < columns ? from[1] : 0;
                panels[(p * k + i) * NR + j].bits = low | high << 16;
            }
    });
    return 0;
}

EXPORT(linear_pairs) {
    Arguments in = {arguments};
    bf16 *out = in.pointer<bf16>();
    const bf16 *x = in.pointer<const bf16>();
    const pair *panels = in.pointer<const pair>();
    const float *bias = in.pointer<const float>();
    const int64_t m = in.number();
    const int64_t n = in.number();
    const int64_t k = in.number();
    const int64_t x_step = in.number();
    const int64_t out_step = in.number();
    return run(out, x, panels, bias, m, n, k, x_step, out_step);
}
#endif
