// RMSNorm, with or without the residual addition: one pass for the squares, one for the scale, row by row.
#include "common.h"

namespace {

template <class T, class W>
void run(T *out, const T *x, T *residual, const W *weight, int64_t rows, int64_t width, int64_t out_stride,
         int64_t x_stride, int64_t residual_stride, float eps) {
    parallel_ranges(rows, rows * width, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            const T *in = x + r * x_stride;
            T *o = out + r * out_stride;
            vf squares[4] = {};
            float tail = 0;
            int64_t i = 0;
            if (residual) {
                T *res = residual + r * residual_stride;
                for (; i + 4 * VW <= width; i += 4 * VW)
                    for (int u = 0; u < 4; u++) {
                        store(res + i + u * VW, load(res + i + u * VW) + load(in + i + u * VW));
                        // The norm is of the stored (rounded) residual, so that it can be recomputed from it.
                        const vf sum = load(res + i + u * VW);
                        squares[u] += sum * sum;
                    }
                for (; i < width; i++) {
                    put(res + i, to_float(res[i]) + to_float(in[i]));
                    tail += to_float(res[i]) * to_float(res[i]);
                }
                in = res;
            } else {
                for (; i + 4 * VW <= width; i += 4 * VW)
                    for (int u = 0; u < 4; u++) {
                        const vf v = load(in + i + u * VW);
                        squares[u] += v * v;
                    }
                for (; i < width; i++) tail += to_float(in[i]) * to_float(in[i]);
            }
            const float mean = (hsum(squares[0] + squares[1] + squares[2] + squares[3]) + tail) / float(width);
            const float scale = 1.0f / sqrtf(mean + eps);
            i = 0;
            for (; i + VW <= width; i += VW) store(o + i, load(in + i) * scale * load(weight + i));
            for (; i < width; i++) put(o + i, to_float(in[i]) * scale * to_float(weight[i]));
        }
    });
}

}  // namespace

EXPORT(rms_norm) {
    Arguments in = {arguments};
    void *out = in.pointer<void>();
    const void *x = in.pointer<const void>();
    void *residual = in.pointer<void>();
    const void *weight = in.pointer<const void>();
    const int64_t rows = in.number();
    const int64_t width = in.number();
    const int64_t out_stride = in.number();
    const int64_t x_stride = in.number();
    const int64_t residual_stride = in.number();
    const float eps = in.real();
    const int64_t dtype = in.number();
    const int64_t weight_dtype = in.number();
#define CASE(T, W)                                                                                                    \
    run((T *)out, (const T *)x, (T *)residual, (const W *)weight, rows, width, out_stride, x_stride, residual_stride, \
        eps)
    if (dtype == F32 && weight_dtype == F32) CASE(float, float);
    else if (dtype == F32) CASE(float, bf16);
    else if (weight_dtype == F32) CASE(bf16, float);
    else CASE(bf16, bf16);
#undef CASE
    return 0;
}
