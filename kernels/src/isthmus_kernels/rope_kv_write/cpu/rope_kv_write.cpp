// Optional per-head RMSNorm, rotary embedding of q (in place) and k, and the write of k and v to the pool.
#include "common.h"

namespace {

struct Pool {
    int64_t blocks, block_size, heads, dim, block_stride, half_stride, token_stride, head_stride;
    float *scales;  // fp8 only, with strides of its own
    int64_t scale_block, scale_half, scale_token, scale_head;
};

// out[0..dim) = rotate(norm(in)); `in` may alias `out`, hence the fp32 copy.
template <class T, class O, class W>
INLINE void rotate(O *out, const T *in, const W *norm, const float *cos, const float *sin, int64_t dim, int64_t half,
                   float eps, float *buffer) {
    vf squares[2] = {};
    float tail = 0;
    int64_t i = 0;
    for (; i + 2 * VW <= dim; i += 2 * VW)
        for (int u = 0; u < 2; u++) {
            const vf x = load(in + i + u * VW);
            store(buffer + i + u * VW, x);
            squares[u] += x * x;
        }
    for (; i < dim; i++) {
        buffer[i] = to_float(in[i]);
        tail += buffer[i] * buffer[i];
    }
    if (norm) {
        const float scale = 1.0f / sqrtf((hsum(squares[0] + squares[1]) + tail) / float(dim) + eps);
        for (i = 0; i + VW <= dim; i += VW) store(buffer + i, load(buffer + i) * (scale * load(norm + i)));
        for (; i < dim; i++) buffer[i] *= scale * to_float(norm[i]);
    }
    for (i = 0; i + VW <= half; i += VW) {
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

template <class T>
INLINE void copy_row(float *to, const T *from, int64_t dim) {
    for (int64_t i = 0; i < dim; i++) to[i] = to_float(from[i]);
}

// As fp8_linear/reference.py: the largest magnitude becomes the largest number of E4M3.
void quantize(fp8 *to, float *scale, const float *from, int64_t dim) {
    float most = 1e-12f;
    for (int64_t i = 0; i < dim; i++) most = fabsf(from[i]) > most ? fabsf(from[i]) : most;
    const float factor = 1.0f / most * 448.0f;
    *scale = most * (1.0f / 448.0f);
    int64_t i = 0;
    for (; i + VW <= dim; i += VW) store(to + i, load(from + i) * factor);
    for (; i < dim; i++) put(to + i, from[i] * factor);
}

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
            float *scales = p.scales;
            if constexpr (SCALED<C>)
                scales += (slots[t] / p.block_size) * p.scale_block + (slots[t] % p.block_size) * p.scale_token;
            for (int64_t h = 0; h < p.heads; h++) {
                if constexpr (SCALED<C>) {
                    float wide[MAX_DIM];
                    rotate(wide, k + h * p.dim, k_norm, c, s, p.dim, half, eps, buffer);
                    quantize(to + h * p.head_stride, scales + h * p.scale_head, wide, p.dim);
                    copy_row(wide, v + h * p.dim, p.dim);
                    quantize(to + p.half_stride + h * p.head_stride, scales + p.scale_half + h * p.scale_head, wide,
                             p.dim);
                    continue;
                }
                rotate(to + h * p.head_stride, k + h * p.dim, k_norm, c, s, p.dim, half, eps, buffer);
                C *values = to + p.half_stride + h * p.head_stride;
                const T *from = v + h * p.dim;
                int64_t i = 0;
                for (; i + VW <= p.dim; i += VW) store(values + i, load(from + i));
                for (; i < p.dim; i++) put(values + i, to_float(from[i]));
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
    float *scales = in.pointer<float>();
    const int64_t scale_block = in.number();
    const int64_t scale_half = in.number();
    const int64_t scale_token = in.number();
    const int64_t scale_head = in.number();
    const float eps = in.real();
    const int64_t dtype = in.number();
    const int64_t pool_dtype = in.number();
    const int64_t norm_dtype = in.number();
    const Pool p = {blocks,       block_size,   kv_heads,    dim,    block_stride, half_stride,
                    token_stride, head_stride,  scales,      scale_block, scale_half,   scale_token,
                    scale_head};
#define CASE(T, C)                                                                                                   \
    by_norm((T *)qkv, positions, cos, sin, (C *)pool, slots, q_norm, k_norm, tokens, q_heads, max_pos, half, p, eps, \
            norm_dtype)
#define BY_POOL(T) pool_dtype == F32 ? CASE(T, float) : pool_dtype == BF16 ? CASE(T, bf16) : CASE(T, fp8)
    return dtype == F32 ? (BY_POOL(float)) : (BY_POOL(bf16));
#undef BY_POOL
#undef CASE
}
