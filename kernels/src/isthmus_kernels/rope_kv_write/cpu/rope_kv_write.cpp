// Optional per-head RMSNorm, rotary embedding of q (in place) and k, and the write of k and v to the pool.
#include "common.h"

namespace {

struct Pool {
    int64_t blocks, block_size, heads, dim, block_stride, half_stride, token_stride, head_stride;
};

// out[0..dim) = rotate(norm(in)); `in` may alias `out`, hence the fp32 copy.
template <class T, class O, class W>
INLINE void rotate(O *out, const T *in, const W *norm, const float *cos, const float *sin, int64_t dim, int64_t half,
                   float eps, float *buffer) {
    float squares = 0;
    for (int64_t i = 0; i < dim; i++) {
        buffer[i] = to_float(in[i]);
        squares += buffer[i] * buffer[i];
    }
    if (norm) {
        const float scale = 1.0f / sqrtf(squares / float(dim) + eps);
        for (int64_t i = 0; i < dim; i++) buffer[i] *= scale * to_float(norm[i]);
    }
    int64_t i = 0;
    for (; i + VW <= half; i += VW) {
        const vf a = load(buffer + i), b = load(buffer + half + i), c = load(cos + i), s = load(sin + i);
        store(out + i, a * c - b * s);
        store(out + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        const float a = buffer[i], b = buffer[half + i];
        put(out + i, a * cos[i] - b * sin[i]);
        put(out + half + i, b * cos[i] + a * sin[i]);
    }
    for (i = 2 * half; i < dim; i++) put(out + i, buffer[i]);
}

constexpr int64_t MAX_DIM = 1024;

template <class T, class C, class W>
int64_t run(T *qkv, const int64_t *positions, const float *cos, const float *sin, C *pool, const int64_t *slots,
            const W *q_norm, const W *k_norm, int64_t tokens, int64_t q_heads, int64_t max_pos, int64_t half, Pool p,
            float eps) {
    // Checked before anything is written, so that an error leaves q and the pool as they were.
    for (int64_t t = 0; t < tokens; t++) {
        if (positions[t] < 0 || positions[t] >= max_pos) return 1 + 2 * t;
        if (slots[t] >= p.blocks * p.block_size) return 2 + 2 * t;
    }
    const int64_t width = (q_heads + 2 * p.heads) * p.dim;
    parallel_ranges(tokens, tokens * width, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            float buffer[MAX_DIM];
            T *row = qkv + t * width;
            const float *c = cos + positions[t] * half, *s = sin + positions[t] * half;
            for (int64_t h = 0; h < q_heads; h++)
                rotate(row + h * p.dim, row + h * p.dim, q_norm, c, s, p.dim, half, eps, buffer);
            if (slots[t] < 0) continue;
            C *to = pool + (slots[t] / p.block_size) * p.block_stride + (slots[t] % p.block_size) * p.token_stride;
            const T *k = row + q_heads * p.dim, *v = k + p.heads * p.dim;
            for (int64_t h = 0; h < p.heads; h++) {
                rotate(to + h * p.head_stride, k + h * p.dim, k_norm, c, s, p.dim, half, eps, buffer);
                C *values = to + p.half_stride + h * p.head_stride;
                for (int64_t i = 0; i < p.dim; i++) put(values + i, to_float(v[h * p.dim + i]));
            }
        }
    });
    return 0;
}

template <class T, class C>
int64_t by_norm(T *qkv, const int64_t *positions, const float *cos, const float *sin, C *pool, const int64_t *slots,
                const void *q_norm, const void *k_norm, int64_t tokens, int64_t q_heads, int64_t max_pos, int64_t half,
                Pool p, float eps, int32_t norm_dtype) {
    if (norm_dtype == F32)
        return run(qkv, positions, cos, sin, pool, slots, (const float *)q_norm, (const float *)k_norm, tokens, q_heads,
                   max_pos, half, p, eps);
    return run(qkv, positions, cos, sin, pool, slots, (const bf16 *)q_norm, (const bf16 *)k_norm, tokens, q_heads,
               max_pos, half, p, eps);
}

}  // namespace

// Returns 0, or 1 + 2 t for a bad position of token t, or 2 + 2 t for a bad slot of token t.
EXPORT(rope_kv_write) {
    Arguments in = {arguments};
    void *qkv = in.pointer<void>();
    const int64_t *positions = in.pointer<const int64_t>();
    const float *cos = in.pointer<const float>();
    const float *sin = in.pointer<const float>();
    void *pool = in.pointer<void>();
    const int64_t *slots = in.pointer<const int64_t>();
    const void *q_norm = in.pointer<const void>();
    const void *k_norm = in.pointer<const void>();
    const int64_t tokens = in.number();
    const int64_t q_heads = in.number();
    const int64_t max_pos = in.number();
    const int64_t half = in.number();
    const int64_t blocks = in.number();
    const int64_t block_size = in.number();
    const int64_t kv_heads = in.number();
    const int64_t dim = in.number();
    const int64_t block_stride = in.number();
    const int64_t half_stride = in.number();
    const int64_t token_stride = in.number();
    const int64_t head_stride = in.number();
    const float eps = in.real();
    const int64_t dtype = in.number();
    const int64_t pool_dtype = in.number();
    const int64_t norm_dtype = in.number();
    const Pool p = {blocks, block_size, kv_heads, dim, block_stride, half_stride, token_stride, head_stride};
#define CASE(T, C)                                                                                                   \
    by_norm((T *)qkv, positions, cos, sin, (C *)pool, slots, q_norm, k_norm, tokens, q_heads, max_pos, half, p, eps, \
            norm_dtype)
    if (dtype == F32) return pool_dtype == F32 ? CASE(float, float) : CASE(float, bf16);
    return pool_dtype == F32 ? CASE(bf16, float) : CASE(bf16, bf16);
#undef CASE
}
