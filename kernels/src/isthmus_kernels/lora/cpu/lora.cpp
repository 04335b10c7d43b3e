// Low-rank adapters: out += (x A^T) B for the rows that have one, in two passes over those rows.
//
// A product with a row of A is a register of partial sums along the input that is folded in the end; an output adds its
// ranks in order. Where a row or an output is cut into tasks changes neither: a row's bits do not depend on its batch.
#include "common.h"

namespace {

constexpr int N = 4;                 // ranks of a task in the first pass
constexpr int64_t BLOCK = 16 * 32;   // outputs of a task in the second: whole registers

struct Sizes {
    int64_t rows, inputs, outputs, rank, parts, x_stride, out_stride, starts[4];
};

template <class T>
INLINE vf load_some(const T *p, int64_t count) {
    float lanes[VW] = {};
    for (int64_t i = 0; i < count; i++) lanes[i] = to_float(p[i]);
    return load(lanes);
}

template <class T>
INLINE void shrink(float *inner, const T *x, const T *a, int64_t inputs) {
    vf sum[N] = {};
    int64_t i = 0;
    for (; i + VW <= inputs; i += VW) {
        const vf v = load(x + i);
        for (int n = 0; n < N; n++) sum[n] += v * load(a + n * inputs + i);
    }
    if (i < inputs) {
        const vf v = load_some(x + i, inputs - i);
        for (int n = 0; n < N; n++) sum[n] += v * load_some(a + n * inputs + i, inputs - i);
    }
    const v4 folded = hsum4(sum[0], sum[1], sum[2], sum[3]);
    memcpy(inner, &folded, sizeof folded);
}

template <class T>
INLINE void expand(T *out, const float *inner, const T *b, int64_t begin, int64_t end, const Sizes &s) {
    int64_t o = begin;
    for (; o + VW <= end; o += VW) {
        vf sum = {};
        for (int64_t r = 0; r < s.rank; r++) sum += inner[r] * load(b + r * s.outputs + o);
        store(out + o, load(out + o) + sum);
    }
    for (; o < end; o++) {
        float sum = 0;
        for (int64_t r = 0; r < s.rank; r++) sum += inner[r] * to_float(b[r * s.outputs + o]);
        put(out + o, to_float(out[o]) + sum);
    }
}

template <class T>
int64_t run(T *out, const T *x, const int32_t *slots, const T *a, const T *b, const Sizes &s) {
    int64_t *rows = (int64_t *)malloc(s.rows * sizeof(int64_t));
    if (!rows) return 1;
    int64_t count = 0;
    for (int64_t row = 0; row < s.rows; row++)
        if (slots[row]) rows[count++] = row;
    const int64_t width = s.parts * s.rank, groups = width / N;
    float *inner = count ? (float *)malloc(count * width * sizeof(float)) : nullptr;
    if (!inner) {
        free(rows);
        return count ? 1 : 0;
    }
    parallel_ranges(count * groups, count * width * s.inputs, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const int64_t row = rows[i / groups], first = i % groups * N;
            const T *own = a + ((slots[row] - 1) * width + first) * s.inputs;
            shrink(inner + i / groups * width + first, x + row * s.x_stride, own, s.inputs);
        }
    });
    int64_t blocks[4] = {};
    int64_t all = 0;
    for (int64_t p = 0; p < s.parts; p++)
        all += blocks[p] = (s.starts[p + 1] - s.starts[p] + BLOCK - 1) / BLOCK;
    parallel_ranges(count * all, count * s.outputs * s.rank, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const int64_t row = rows[i / all];
            int64_t block = i % all, part = 0;
            while (block >= blocks[part]) block -= blocks[part++];
            const int64_t first = s.starts[part] + block * BLOCK, next = first + BLOCK;
            expand(out + row * s.out_stride, inner + i / all * width + part * s.rank,
                   b + (slots[row] - 1) * s.rank * s.outputs, first,
                   next < s.starts[part + 1] ? next : s.starts[part + 1], s);
        }
    });
    free(inner), free(rows);
    return 0;
}

}  // namespace

// Returns 0, or 1 when memory is short.
EXPORT(lora) {
    Arguments in = {arguments};
    void *out = in.pointer<void>();
    const void *x = in.pointer<const void>();
    const int32_t *slots = in.pointer<const int32_t>();
    const void *a = in.pointer<const void>();
    const void *b = in.pointer<const void>();
    Sizes s = {};
    s.rows = in.number(), s.inputs = in.number(), s.outputs = in.number(), s.rank = in.number();
    s.x_stride = in.number(), s.out_stride = in.number(), s.parts = in.number();
    for (int64_t p = 0; p < 4; p++) s.starts[p] = in.number();
    if (in.number() == F32) return run((float *)out, (const float *)x, slots, (const float *)a, (const float *)b, s);
    return run((bf16 *)out, (const bf16 *)x, slots, (const bf16 *)a, (const bf16 *)b, s);
}
