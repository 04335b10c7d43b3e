// The product with panels of fp32 or bf16 weights, in fp32 arithmetic (../panels.h).
#include "../panels.h"

EXPORT(linear_panel_width) {
    (void)arguments;
    return NR;
}

EXPORT(linear_pack) {
    Arguments in = {arguments};
    void *panels = in.pointer<void>();
    const void *weight = in.pointer<const void>();
    const int64_t n = in.number();
    const int64_t k = in.number();
    const int64_t dtype = in.number();
    const int64_t count = (n + NR - 1) / NR;
    parallel(count, [&](int64_t p, int) {
        for (int64_t i = 0; i < k; i++)
            for (int j = 0; j < NR; j++) {
                const int64_t row = p * NR + j, to = (p * k + i) * NR;
                if (dtype == F32) {
                    ((float *)panels)[to + j] = row < n ? ((const float *)weight)[row * k + i] : 0.0f;
                } else {
                    // Channel j and channel j + VW share a 32-bit word, low and high half.
                    const int64_t at = to + (j < VW ? 2 * j : 2 * (j - VW) + 1);
                    ((uint16_t *)panels)[at] = row < n ? ((const uint16_t *)weight)[row * k + i] : 0;
                }
            }
    });
    return 0;
}

EXPORT(linear) {
    Arguments in = {arguments};
    void *out = in.pointer<void>();
    const void *x = in.pointer<const void>();
    const void *panels = in.pointer<const void>();
    const float *bias = in.pointer<const float>();
    const int64_t m = in.number();
    const int64_t n = in.number();
    const int64_t k = in.number();
    const int64_t x_step = in.number();
    const int64_t out_step = in.number();
    const int64_t dtype = in.number();
    const int64_t weight_dtype = in.number();
#define CASE(A, W) run((A *)out, (const A *)x, (const W *)panels, bias, m, n, k, x_step, out_step)
    if (dtype == F32) return weight_dtype == F32 ? CASE(float, float) : CASE(float, bf16);
    return weight_dtype == F32 ? CASE(bf16, float) : CASE(bf16, bf16);
#undef CASE
}
