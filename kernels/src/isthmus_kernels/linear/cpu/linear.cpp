// y = x W^T + b with W packed into panels of NR output channels, each stored along K (../README.md).
// bf16 weights are expanded to fp32 in registers: two integer operations per 2 VW weights.
#include "common.h"

namespace {

constexpr int NR = 2 * VW;                    // output channels of a panel
constexpr int MR = VW == 16 ? 12 : 6;         // rows of a register tile: 2 MR accumulators fit the register file
constexpr int64_t KC = VW == 16 ? 384 : 512;  // depth of one pass at most: a panel slice and a row tile fit L1
constexpr int64_t ROWS = 16;                  // row tiles of one task at most
constexpr int64_t PANELS = VW == 16 ? 2 : 4;  // panels of one task at most
// The rows of a task are read once for each of its panels: this much of them stays in L2.
constexpr int64_t ROW_BYTES = VW == 16 ? 640 << 10 : 320 << 10;

// Bytes that a streamed weight is requested ahead of its use; the hardware's own prefetch stops at each page.
constexpr int AHEAD = 4096;

struct Pair {
    vf lo, hi;
};
INLINE Pair panel_row(const float *w) {
    return {load(w), load(w + VW)};
}
INLINE Pair panel_row(const bf16 *w) {
    vu words;
    memcpy(&words, w, sizeof words);
    return {(vf)(words << 16), (vf)(words & 0xffff0000u)};
}

// One register tile: c[m] = start + sum over k of a(m, k) * panel[k], with start = c[m], the bias or zero.
// `row_step` and `k_step` place a(m, k). UNROLL gives small M enough independent sums to hide the latency of
// the multiply-add. STREAM: the panel comes from memory and is used once.
template <int M, int UNROLL, bool STREAM, class W>
void tile(float *c, int64_t c_step, const float *bias, bool resume, const float *a, int64_t row_step, int64_t k_step,
          const W *w, int64_t depth) {
    Pair acc[UNROLL][M];
    for (int u = 0; u < UNROLL; u++)
        for (int m = 0; m < M; m++) acc[u][m] = {vf{}, vf{}};
    if (resume)
        for (int m = 0; m < M; m++) acc[0][m] = {load(c + m * c_step), load(c + m * c_step + VW)};
    else if (bias)
        for (int m = 0; m < M; m++) acc[0][m] = {load(bias), load(bias + VW)};
    int64_t k = 0;
    for (; k + UNROLL <= depth; k += UNROLL) {
#pragma GCC unroll 8
        for (int u = 0; u < UNROLL; u++) {
            const Pair row = panel_row(w + (k + u) * NR);
            if (STREAM) __builtin_prefetch((const char *)(w + (k + u) * NR) + AHEAD, 0, 2);
#pragma GCC unroll 12
            for (int m = 0; m < M; m++) {
                const float x = a[m * row_step + (k + u) * k_step];
                acc[u][m].lo += row.lo * x;
                acc[u][m].hi += row.hi * x;
            }
        }
    }
    for (; k < depth; k++) {
        const Pair row = panel_row(w + k * NR);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
            const float x = a[m * row_step + k * k_step];
            acc[0][m].lo += row.lo * x;
            acc[0][m].hi += row.hi * x;
        }
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) {
        Pair sum = acc[0][m];
        for (int u = 1; u < UNROLL; u++) {
            sum.lo += acc[u][m].lo;
            sum.hi += acc[u][m].hi;
        }
        store(c + m * c_step, sum.lo);
        store(c + m * c_step + VW, sum.hi);
    }
}

template <bool STREAM, class W>
void any_tile(int64_t rows, float *c, int64_t c_step, const float *bias, bool resume, const float *a, int64_t row_step,
              int64_t k_step, const W *w, int64_t depth) {
#define CASE(M, U) \
    case M:        \
        return tile<M, U, STREAM>(c, c_step, bias, resume, a, row_step, k_step, w, depth)
    switch (rows) {
        CASE(1, 4);
        CASE(2, 2);
        CASE(3, 2);
        CASE(4, 1);
        CASE(5, 1);
        CASE(6, 1);
#if defined(__AVX512F__)
        CASE(7, 1);
        CASE(8, 1);
        CASE(9, 1);
        CASE(10, 1);
        CASE(11, 1);
        CASE(12, 1);
#endif
    }
#undef CASE
}

INLINE int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

// The bias of panel p with zeros after the last channel, or null.
INLINE const float *panel_bias(const float *bias, int64_t p, int64_t n, float *buffer) {
    if (!bias || (p + 1) * NR <= n) return bias ? bias + p * NR : nullptr;
    memset(buffer, 0, NR * sizeof(float));
    memcpy(buffer, bias + p * NR, (n - p * NR) * sizeof(float));
    return buffer;
}

template <class O>
INLINE void copy_rows(O *out, int64_t out_step, const float *c, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < width; j++) put(out + r * out_step + j, c[r * NR + j]);
}

// A tile can be written straight to the output when it is fp32 and whole.
INLINE float *direct(float *out, bool whole) {
    return whole ? out : nullptr;
}
INLINE float *direct(bf16 *, bool) {
    return nullptr;
}

// Up to MR rows: every panel is read once, straight from memory, so this is the weight-bandwidth path.
template <class W, class O>
void skinny(O *out, const float *x, const W *w, const float *bias, int64_t m, int64_t n, int64_t k, int64_t x_step,
            int64_t out_step) {
    parallel_ranges((n + NR - 1) / NR, n * k, [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; p++) {
            float c[MR * NR], edge[NR];
            const int64_t width = smaller(NR, n - p * NR);
            float *to = direct(out + p * NR, width == NR);
            any_tile<true>(m, to ? to : c, to ? out_step : NR, panel_bias(bias, p, n, edge), false, x, x_step, 1,
                           w + p * NR * k, k);
            if (!to) copy_rows(out + p * NR, out_step, c, m, width);
        }
    });
}

// First row of tile t when m rows are cut into `tiles` nearly equal ones.
INLINE int64_t tile_start(int64_t t, int64_t m, int64_t tiles) {
    return t * (m / tiles) + smaller(t, m % tiles);
}

// `packed` holds the rows as fp32, tile by tile, each [K][rows of the tile]: the inner loop walks one stream.
template <class X>
void pack_rows(float *packed, const X *x, int64_t m, int64_t k, int64_t x_step, int64_t tiles) {
    parallel_ranges(tiles, m * k, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            const int64_t start = tile_start(t, m, tiles), rows = tile_start(t + 1, m, tiles) - start;
            float *to = packed + start * k;
            for (int64_t r = 0; r < rows; r++)
                for (int64_t i = 0; i < k; i++) to[i * rows + r] = to_float(x[(start + r) * x_step + i]);
        }
    });
}

template <class W, class O>
void blocked(O *out, const float *packed, const W *w, const float *bias, int64_t m, int64_t n, int64_t k,
             int64_t out_step, int64_t tiles) {
    const int64_t panels = (n + NR - 1) / NR, passes = (k + KC - 1) / KC, depth = (k + passes - 1) / passes;
    const int64_t fit = ROW_BYTES / (MR * k * int64_t(sizeof(float))), group = fit < 1 ? 1 : smaller(fit, ROWS);
    const int64_t row_tasks = (tiles + group - 1) / group;
    // At least eight tasks a thread, as far as there are panels: the last ones to finish are then short.
    const int64_t spread = panels * row_tasks / (8 * omp_get_max_threads());
    const int64_t together = spread < 1 ? 1 : smaller(spread, PANELS);
    const int64_t panel_tasks = (panels + together - 1) / together;
    parallel(row_tasks * panel_tasks, [&](int64_t task, int) {
        float sums[ROWS * MR * NR], edge[NR];
        const int64_t first = task / panel_tasks * group, last = smaller(first + group, tiles);
        const int64_t panel = task % panel_tasks * together;
        for (int64_t p = panel; p < smaller(panel + together, panels); p++)
            for (int64_t pass = 0; pass < passes; pass++)
                for (int64_t t = first; t < last; t++) {
                    const int64_t start = tile_start(t, m, tiles), rows = tile_start(t + 1, m, tiles) - start;
                    const int64_t width = smaller(NR, n - p * NR);
                    float *own = sums + (t - first) * MR * NR;
                    float *to = direct(out + start * out_step + p * NR, width == NR);
                    // The first tile brings the panel from memory.
                    const auto multiply = t == first ? any_tile<true, W> : any_tile<false, W>;
                    multiply(rows, to ? to : own, to ? out_step : NR, panel_bias(bias, p, n, edge), pass > 0,
                             packed + start * k + pass * depth * rows, 1, rows, w + (p * k + pass * depth) * NR,
                             smaller(depth, k - pass * depth));
                    if (!to && pass == passes - 1)
                        copy_rows(out + start * out_step + p * NR, out_step, own, rows, width);
                }
    });
}

template <class X, class W>
int64_t run(X *out, const X *x, const W *w, const float *bias, int64_t m, int64_t n, int64_t k, int64_t x_step,
            int64_t out_step) {
    if (m == 0 || n == 0) return 0;
    if (m <= MR && sizeof(X) == sizeof(float)) {
        skinny(out, (const float *)x, w, bias, m, n, k, x_step, out_step);
        return 0;
    }
    const int64_t tiles = (m + MR - 1) / MR;
    float *packed = (float *)aligned_alloc(64, (size_t(m * k) * sizeof(float) + 63) / 64 * 64);
    if (!packed) return 1;
    if (m <= MR) {
        for (int64_t r = 0; r < m; r++)
            for (int64_t i = 0; i < k; i++) packed[r * k + i] = to_float(x[r * x_step + i]);
        skinny(out, packed, w, bias, m, n, k, k, out_step);
    } else {
        pack_rows(packed, x, m, k, x_step, tiles);
        blocked(out, packed, w, bias, m, n, k, out_step, tiles);
    }
    free(packed);
    return 0;
}

}  // namespace

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
