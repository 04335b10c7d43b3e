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

struct bf16 {
    uint16_t bits;
};

enum { F32 = 0, BF16 = 1 };

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

INLINE vf load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE vf load(const bf16 *p) {
    vh h;
    memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
}
INLINE void store(float *p, vf v) {
    memcpy(p, &v, sizeof v);
}
INLINE void store(bf16 *p, vf v) {
    vu u = (vu)v;
    vu rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
    vu nan = (vu)((u & 0x7fffffffu) > 0x7f800000u);
    vh h = __builtin_convertvector((nan & ((u >> 16) | 0x40)) | (~nan & rounded), vh);
    memcpy(p, &h, sizeof h);
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
