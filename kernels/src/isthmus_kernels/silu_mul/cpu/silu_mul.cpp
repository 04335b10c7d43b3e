// silu(gate) * up and gelu_tanh(gate) * up over the two halves of each row. Both are gate * sigmoid(z) of a z of the
// gate: its own value for SiLU, 2 sqrt(2/pi) (g + 0.044715 g^3) for GELU, as 1 + tanh(a) = 2 sigmoid(2 a).
#include "common.h"

namespace {

struct Silu {
    template <class V>
    static INLINE V z(V g) {
        return g;
    }
};

struct GeluTanh {
    template <class V>
    static INLINE V z(V g) {
        return (g + g * g * g * 0.044715f) * 1.59576912160573071f;
    }
};

template <class A, class T>
void run(T *out, const T *x, int64_t rows, int64_t width, int64_t out_stride, int64_t x_stride) {
    parallel_ranges(rows, rows * width, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            const T *gate = x + r * x_stride, *up = gate + width;
            T *o = out + r * out_stride;
            int64_t i = 0;
            for (; i + VW <= width; i += VW) {
                const vf g = load(gate + i);
                store(o + i, g / (vexp(-A::z(g)) + 1.0f) * load(up + i));
            }
            for (; i < width; i++) {
                const float g = to_float(gate[i]);
                put(o + i, g / (1.0f + expf(-A::z(g))) * to_float(up[i]));
            }
        }
    });
}

template <class A>
int64_t enter(const uint64_t *arguments) {
    Arguments in = {arguments};
    void *out = in.pointer<void>();
    const void *x = in.pointer<const void>();
    const int64_t rows = in.number();
    const int64_t width = in.number();
    const int64_t out_stride = in.number();
    const int64_t x_stride = in.number();
    const int64_t dtype = in.number();
    if (dtype == F32) run<A>((float *)out, (const float *)x, rows, width, out_stride, x_stride);
    else run<A>((bf16 *)out, (const bf16 *)x, rows, width, out_stride, x_stride);
    return 0;
}

}  // namespace

EXPORT(silu_mul) {
    return enter<Silu>(arguments);
}

EXPORT(gelu_tanh_mul) {
    return enter<GeluTanh>(arguments);
}
