// silu(gate) * up over the two halves of each row.
#include "common.h"

namespace {

template <class T>
void run(T *out, const T *x, int64_t rows, int64_t width, int64_t out_stride, int64_t x_stride) {
    parallel_ranges(rows, rows * width, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            const T *gate = x + r * x_stride, *up = gate + width;
            T *o = out + r * out_stride;
            int64_t i = 0;
            for (; i + VW <= width; i += VW) {
                const vf g = load(gate + i);
                store(o + i, g / (vexp(-g) + 1.0f) * load(up + i));
            }
            for (; i < width; i++) {
                const float g = to_float(gate[i]);
                put(o + i, g / (1.0f + expf(-g)) * to_float(up[i]));
            }
        }
    });
}

}  // namespace

EXPORT(silu_mul) {
    Arguments in = {arguments};
    void *out = in.pointer<void>();
    const void *x = in.pointer<const void>();
    const int64_t rows = in.number();
    const int64_t width = in.number();
    const int64_t out_stride = in.number();
    const int64_t x_stride = in.number();
    const int64_t dtype = in.number();
    if (dtype == F32) run((float *)out, (const float *)x, rows, width, out_stride, x_stride);
    else run((bf16 *)out, (const bf16 *)x, rows, width, out_stride, x_stride);
    return 0;
}
