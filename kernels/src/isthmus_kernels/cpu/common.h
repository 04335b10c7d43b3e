// Shared by all CPU sources. Each source is compiled once per instruction set (ISTHMUS_LEVEL), so everything
// here is in an anonymous namespace and no standard-library template is used: the linker would keep one copy
// of such a template for all levels, possibly the one an older CPU cannot run.
#pragma once
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ISTHMUS_CAT2(a, b) a##b
#define ISTHMUS_CAT(a, b) ISTHMUS_CAT2(a, b)
// Every entry point takes its arguments as 8-byte slots, in order. One shape for all lets a recorded sequence of
// calls be replayed from here (level.cpp) without Python.
#define EXPORT(name)                                                                         \
    extern "C" __attribute__((visibility("default"))) int64_t ISTHMUS_CAT(isthmus_##name##_, \
                                                                          ISTHMUS_LEVEL)(const uint64_t *arguments)
#define INLINE inline __attribute__((always_inline))

extern "C" void isthmus_parallel(int64_t count, int threads, void (*body)(void *context, int64_t index, int thread),
                                 void *context);

namespace {

#if defined(__AVX512F__)
constexpr int VW = 16;
#elif defined(__AVX2__)
constexpr int VW = 8;
#else
constexpr int VW = 4;
#endif
typedef float vf __attribute__((vector_size(VW * 4)));
typedef int32_t vi __attribute__((vector_size(VW * 4)));
typedef uint32_t vu __attribute__((vector_size(VW * 4)));
typedef uint16_t vh __attribute__((vector_size(VW * 2)));
typedef uint8_t vb __attribute__((vector_size(VW)));
typedef int8_t vsb __attribute__((vector_size(VW)));
typedef int16_t vsh __attribute__((vector_size(VW * 2)));

struct bf16 {
    uint16_t bits;
};

// E4M3 (OFP8; Micikevicius et al. 2022): 1 sign, 4 exponent bits with bias 7, 3 of mantissa; no infinity, 0x7f is NaN.
struct fp8 {
    uint8_t bits;
};

enum { F32 = 0, BF16 = 1, FP8 = 2 };

// Whether numbers of a pool of this type are multiples of a scale (../rope_kv_write/README.md).
template <class C>
constexpr bool SCALED = false;
template <>
constexpr bool SCALED<fp8> = true;

struct Arguments {
    const uint64_t *at;
    template <class T>
    T *pointer() {
        return (T *)(uintptr_t)*at++;
    }
    int64_t number() { return int64_t(*at++); }
    float real() {
        double d;
        memcpy(&d, at++, sizeof d);
        return float(d);
    }
};

INLINE float to_float(float x) {
    return x;
}
INLINE float to_float(bf16 x) {
    uint32_t u = uint32_t(x.bits) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

INLINE float to_float(fp8 x) {
    const uint32_t code = x.bits & 0x7fu;
    uint32_t u = code << 20 | uint32_t(x.bits & 0x80u) << 24;
    float f;
    memcpy(&f, &u, 4);
    f *= 0x1p120f;  // from a bias of 7 to one of 127: right for subnormal numbers, too
    return code == 0x7fu ? NAN : f;
}

// Round to nearest even; a NaN stays a NaN.
INLINE uint16_t bf16_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t(u >> 16) | 0x40;
    return uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
INLINE void put(float *p, float x) {
    *p = x;
}
INLINE void put(bf16 *p, float x) {
    p->bits = bf16_bits(x);
}

// Round to nearest even; what is larger than the largest number, 448, becomes that; a NaN stays a NaN.
INLINE uint8_t fp8_bits(float f) {
    uint32_t u, code;
    memcpy(&u, &f, 4);
    const uint32_t sign = u >> 24 & 0x80u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return uint8_t(sign | 0x7fu);
    if (u > 0x43e00000u) u = 0x43e00000u;
    if (u < 0x3c800000u) {  // below 2^-6 numbers are 2^-9 apart, as floats at 2^14 are
        float magnitude;
        memcpy(&magnitude, &u, 4);
        magnitude += 0x1p14f;
        memcpy(&code, &magnitude, 4);
        code -= 0x46800000u;
    } else {
        code = ((u + 0x7ffffu + (u >> 20 & 1)) >> 20) - (120u << 3);
    }
    return uint8_t(sign | code);
}
INLINE void put(fp8 *p, float x) {
    p->bits = fp8_bits(x);
}

INLINE vf load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
// GCC 12 widens and narrows the generic form by halves, five instructions for one.
INLINE vf load(const bf16 *p) {
    vh h;
    memcpy(&h, p, sizeof h);
#if defined(__AVX512F__)
    return (vf)((vu)_mm512_cvtepu16_epi32((__m256i)h) << 16);
#elif defined(__AVX2__)
    return (vf)((vu)_mm256_cvtepu16_epi32((__m128i)h) << 16);
#else
    return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}
INLINE vf load(const fp8 *p) {
#if defined(__AVX2__)
    // By way of fp16, whose subnormal numbers cost nothing to widen.
    vsb b;
    memcpy(&b, p, sizeof b);
    vh h = (vh)(__builtin_convertvector(b, vsh) << 7) & 0xbf80;
    h |= ((h & 0x3f80) + 0x80) & 0x4000;  // NaN: all bits but the sign
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps((__m256i)h) * 0x1p8f;
#else
    return (vf)_mm256_cvtph_ps((__m128i)h) * 0x1p8f;
#endif
#else
    vf v;
    for (int i = 0; i < VW; i++) v[i] = to_float(p[i]);
    return v;
#endif
}
INLINE void store(float *p, vf v) {
    memcpy(p, &v, sizeof v);
}
INLINE void store(bf16 *p, vf v) {
    vu u = (vu)v;
    vu rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
    vu nan = (vu)((u & 0x7fffffffu) > 0x7f800000u);
    const vu words = (nan & ((u >> 16) | 0x40)) | (~nan & rounded);
#if defined(__AVX512F__)
    const vh h = (vh)_mm512_cvtepi32_epi16((__m512i)words);
#else
    const vh h = __builtin_convertvector(words, vh);
#endif
    memcpy(p, &h, sizeof h);
}
INLINE void store(fp8 *p, vf v) {
    vu u = (vu)v;
    const vu sign = u >> 24 & 0x80, nan = (vu)((u & 0x7fffffffu) > 0x7f800000u);
    u &= 0x7fffffffu;
    const vu over = (vu)(u > 0x43e00000u), small = (vu)(u < 0x3c800000u);
    u = (over & 0x43e00000u) | (~over & u);
    const vu low = (vu)((vf)u + 0x1p14f) - 0x46800000u, high = ((u + 0x7ffffu + (u >> 20 & 1)) >> 20) - (120u << 3);
    const vu code = (small & low) | (~small & high);
    const vb b = __builtin_convertvector(sign | (nan & 0x7f) | (~nan & code), vb);
    memcpy(p, &b, sizeof b);
}
INLINE vf splat(float x) {
    return vf{} + x;
}
INLINE vf select(vi mask, vf a, vf b) {
    return (vf)((mask & (vi)a) | (~mask & (vi)b));
}
// The generic form takes three instructions where the machine has one.
#if defined(__AVX512F__)
INLINE vf vmax(vf a, vf b) {
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
}
INLINE vf vmin(vf a, vf b) {
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
}
#elif defined(__AVX2__)
INLINE vf vmax(vf a, vf b) {
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
}
INLINE vf vmin(vf a, vf b) {
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
}
#else
INLINE vf vmax(vf a, vf b) {
    return select(a > b, a, b);
}
INLINE vf vmin(vf a, vf b) {
    return select(a < b, a, b);
}
#endif
// Four lanes: what a horizontal reduction folds to.
typedef float v4 __attribute__((vector_size(16)));
INLINE v4 fold(vf v) {
#if defined(__AVX512F__)
    typedef float v8 __attribute__((vector_size(32)));
    const v8 w = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                 __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    return __builtin_shufflevector(w, w, 0, 1, 2, 3) + __builtin_shufflevector(w, w, 4, 5, 6, 7);
#elif defined(__AVX2__)
    return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
#else
    return v;
#endif
}
// Rows become columns.
INLINE void transpose(v4 (&x)[4]) {
    const v4 a = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5), b = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5);
    const v4 c = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7), d = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
    x[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5), x[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
    x[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5), x[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
}
// {sum(a), sum(b), sum(c), sum(d)}
INLINE v4 hsum4(vf a, vf b, vf c, vf d) {
    const v4 p = fold(a), q = fold(b), r = fold(c), s = fold(d);
    const v4 x = __builtin_shufflevector(p, q, 0, 4, 1, 5) + __builtin_shufflevector(p, q, 2, 6, 3, 7);
    const v4 y = __builtin_shufflevector(r, s, 0, 4, 1, 5) + __builtin_shufflevector(r, s, 2, 6, 3, 7);
    return __builtin_shufflevector(x, y, 0, 1, 4, 5) + __builtin_shufflevector(x, y, 2, 3, 6, 7);
}
INLINE float hsum(vf v) {
    const v4 w = fold(v);
    return (w[0] + w[2]) + (w[1] + w[3]);
}
INLINE float hmax(vf v) {
    float lanes[VW];
    memcpy(lanes, &v, sizeof v);
    for (int half = VW / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
}

// e^x, about 1 ulp (Cephes expf coefficients); exactly 0 below the smallest normal result, +inf never occurs
// (x is clamped to 88.3).
INLINE vf vexp(vf x) {
    const vf clamped = vmin(vmax(x, splat(-87.3f)), splat(88.3f));
    const vf shifted = clamped * 1.44269504088896341f + 12582912.0f;  // round to integer in the low mantissa bits
    const vf n = shifted - 12582912.0f;
    vf r = clamped - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const vi scale = ((vi)shifted - 0x4b400000 + 127) << 23;
    return select(x < splat(-87.3f), vf{}, p * (vf)scale);
}

// Call f(index, thread) for every index below `count`, on torch's number of threads (see pool.cpp).
template <class F>
INLINE void parallel(int64_t count, const F &f) {
    isthmus_parallel(
        count, omp_get_max_threads(),
        [](void *context, int64_t index, int thread) { (*(const F *)context)(index, thread); }, (void *)&f);
}

// Call f(begin, end) for ranges that cover [0, count), in a few pieces a thread, or in one when `work`, the number
// of elements, would not pay for the threads.
constexpr int64_t PARALLEL_MIN = 16384;
template <class F>
INLINE void parallel_ranges(int64_t count, int64_t work, const F &f) {
    const int64_t threads = omp_get_max_threads();
    if (work < PARALLEL_MIN || threads < 2 || count < 2) {
        f(int64_t(0), count);
        return;
    }
    const int64_t pieces = count < 4 * threads ? count : 4 * threads;
    parallel(pieces, [&](int64_t i, int) { f(count * i / pieces, count * (i + 1) / pieces); });
}

}  // namespace
