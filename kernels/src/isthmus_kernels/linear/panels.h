// y = x W^T + b with W packed into panels of NR output channels, each stored along K (README.md).
//
// Every output is one chain of multiply-adds: the bias, then the columns in order, whatever the number of rows, the
// tile they fall into and the threads. A row's result is therefore the same bits alone and in any batch.
//
// An activation and a weight are 32-bit words here, of one of three kinds:
//   float x float   fp32 multiply-add
//   float x bf16    a word holds channels j and j + VW of one column; expanded to fp32, two integer operations
//   pair x pair     a word holds columns 2 i and 2 i + 1 in bf16; AVX512-BF16's dot product of two
#pragma once
#include "common.h"

namespace {

constexpr int NR = 2 * VW;                    // output channels of a panel
constexpr int MR = VW == 16 ? 12 : 6;         // rows of a register tile: 2 MR accumulators fit the register file
constexpr int64_t ROWS = 16;                  // row tiles of one task at most
constexpr int64_t PANELS = VW == 16 ? 2 : 4;  // panels of one task at most
// The rows of a task are read once for each of its panels: this much of them stays in L2.
constexpr int64_t ROW_BYTES = VW == 16 ? 640 << 10 : 320 << 10;

// Bytes that a streamed weight is requested ahead of its use, into L1: the hardware's own prefetch stops at each page.
constexpr int AHEAD = 12288;
// The same where it comes from L2.
constexpr int NEAR = 2048;
// Where more than half a tile of rows multiplies a streamed weight that is widened, requests into L1 alone leave memory idle:
// the weight is requested so far ahead into L2 as well.
constexpr int FAR_AHEAD = 49152;
// What a tile requests while it computes: what follows the panel by `near` bytes, into L1, and `far`, into L2, as much of it
// a word as `step` bytes.
struct Ahead {
    int64_t near;
    const char *far;
    int64_t step;
};
// Words of one pass over a panel at most. Longer passes start and end less often; the panel's slice streams from L2 and
// leaves room there for the rows.
constexpr int64_t DEPTH = 1024;
// From so many tiles on the first one leaves the slice in fp32 for the others: widening takes 2 instructions beside 24.
constexpr int64_t WIDE_TILES = 3;
// Words of a row that are brought into the form of a tile in one go: few tiles have more such pieces than threads.
constexpr int64_t PIECE = 256;

struct pair {
    uint32_t bits;
};

template <int N>
struct Number {
    static constexpr int value = N;
};

// What each kind of weight is multiplied with.
template <class W>
struct Kind {
    typedef float Row;
    static constexpr int64_t COLUMNS = 1;  // of a word
    static constexpr bool WIDENED = sizeof(W) < sizeof(float);
};
template <>
struct Kind<pair> {
    typedef pair Row;
    static constexpr int64_t COLUMNS = 2;
    static constexpr bool WIDENED = false;
};

struct Floats {
    vf lo, hi;
};
struct Pairs {
    vu lo, hi;
};
INLINE Floats panel_row(const float *w) {
    return {load(w), load(w + VW)};
}
INLINE Floats panel_row(const bf16 *w) {
    vu words;
    memcpy(&words, w, sizeof words);
    return {(vf)(words << 16), (vf)(words & 0xffff0000u)};
}
INLINE Pairs panel_row(const pair *w) {
    Pairs row;
    memcpy(&row.lo, w, sizeof row.lo);
    memcpy(&row.hi, w + VW, sizeof row.hi);
    return row;
}
INLINE vf multiply_add(vf sum, vf w, float x) {
    return sum + w * x;
}
#if defined(ISTHMUS_PAIRS)
INLINE vf multiply_add(vf sum, vu w, pair x) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)(vu{} + x.bits));
}
#endif

// Panels that a tile of M rows takes at once: two streams from memory are faster than one, and few rows have few chains of
// sums to run side by side.
template <int M>
constexpr int ABREAST = 2 * M <= MR ? 2 : 1;

// What a tile leaves in `wide` of a narrow weight's words: fp32, for the tiles after it.
INLINE void keep(float *wide, const Floats &row) {
    store(wide, row.lo);
    store(wide + VW, row.hi);
}
INLINE void keep(float *, const Pairs &) {}

// One register tile: c[m] = start + sum over k of a(m, k) * panel[k], with start = c[m], the bias or zero.
// `row_step` and `k_step` place a(m, k). P panels, whose weights are `w_step` apart and their channels side by side.
template <int M, int P, bool FAR, bool KEEP, class A, class W>
void tile(float *c, int64_t c_step, const float *bias, bool resume, const A *a, int64_t row_step, int64_t k_step,
          const W *w, int64_t w_step, int64_t depth, const Ahead &ahead, float *wide) {
    vf lo[P][M], hi[P][M];
    for (int p = 0; p < P; p++)
        for (int m = 0; m < M; m++) {
            lo[p][m] = resume ? load(c + m * c_step + p * NR) : bias ? load(bias + p * NR) : vf{};
            hi[p][m] = resume ? load(c + m * c_step + p * NR + VW) : bias ? load(bias + p * NR + VW) : vf{};
        }
#pragma GCC unroll 4
    for (int64_t k = 0; k < depth; k++) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            const W *at = w + p * w_step + k * NR;
            const auto row = panel_row(at);
            if (KEEP) keep(wide + k * NR, row);
            for (size_t byte = 0; byte < NR * sizeof(W); byte += 64)
                __builtin_prefetch((const char *)at + ahead.near + byte, 0, 3);
            if (FAR) __builtin_prefetch(ahead.far + k * ahead.step, 0, 2);
#pragma GCC unroll 12
            for (int m = 0; m < M; m++) {
                const A x = a[m * row_step + k * k_step];
                lo[p][m] = multiply_add(lo[p][m], row.lo, x);
                hi[p][m] = multiply_add(hi[p][m], row.hi, x);
            }
        }
    }
    for (int p = 0; p < P; p++)
        for (int m = 0; m < M; m++) {
            store(c + m * c_step + p * NR, lo[p][m]);
            store(c + m * c_step + p * NR + VW, hi[p][m]);
        }
}

#if defined(__AVX512F__)
#define MORE_ROWS(CASE) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#else
#define MORE_ROWS(CASE)
#endif
#define EACH_ROWS(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) MORE_ROWS(CASE)

template <bool KEEP, class A, class W>
void any_tile(int64_t rows, float *c, int64_t c_step, const float *bias, bool resume, const A *a, int64_t row_step,
              int64_t k_step, const W *w, int64_t depth, const Ahead &ahead, float *wide) {
#define CASE(M) \
    case M:     \
        return tile<M, 1, true, KEEP>(c, c_step, bias, resume, a, row_step, k_step, w, 0, depth, ahead, wide);
    switch (rows) { EACH_ROWS(CASE) }
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

// `width` channels of rows that are `c_step` apart.
template <class O>
INLINE void copy_rows(O *out, int64_t out_step, const float *c, int64_t rows, int64_t width, int64_t c_step) {
    if (width % NR == 0) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < width; j += VW) store(out + r * out_step + j, load(c + r * c_step + j));
        return;
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < width; j++) put(out + r * out_step + j, c[r * c_step + j]);
}

// A tile can be written straight to the output when it is fp32 and whole.
INLINE float *direct(float *out, bool whole) {
    return whole ? out : nullptr;
}
INLINE float *direct(bf16 *, bool) {
    return nullptr;
}

// Up to MR rows: every panel is read once, straight from memory, so this is the weight-bandwidth path.
// `k` counts words of a row, here and below.
template <int M, class W, class A, class O>
void skinny_rows(O *out, const A *x, const W *w, const float *bias, int64_t n, int64_t k, int64_t x_step,
                 int64_t out_step) {
    constexpr int P = ABREAST<M>;
    constexpr bool FAR = VW == 16 && Kind<W>::WIDENED && P == 1;
    parallel_ranges((n + NR - 1) / NR, n * k, [&](int64_t begin, int64_t end) {
        float c[MR * NR], edge[NR];
        const auto ahead = [&](int64_t p) __attribute__((always_inline)) {
            return Ahead{FAR ? NEAR : AHEAD, (const char *)(w + p * NR * k) + FAR_AHEAD, NR * int64_t(sizeof(W))};
        };
        const auto take = [&](auto at_once, int64_t p, const float *from) __attribute__((always_inline)) {
            constexpr int64_t width = at_once.value * NR;
            float *to = direct(out + p * NR, true);
            tile<M, at_once.value, FAR, false>(to ? to : c, to ? out_step : width, from, false, x, x_step, 1,
                                               w + p * NR * k, NR * k, k, ahead(p), nullptr);
            if (!to) copy_rows(out + p * NR, out_step, c, M, width, width);
        };
        int64_t p = begin;
        const int64_t whole = smaller(end, n / NR);
        for (; p + P <= whole; p += P) take(Number<P>(), p, bias ? bias + p * NR : nullptr);
        for (; p < whole; p++) take(Number<1>(), p, bias ? bias + p * NR : nullptr);
        for (; p < end; p++) {
            tile<M, 1, FAR, false>(c, NR, panel_bias(bias, p, n, edge), false, x, x_step, 1, w + p * NR * k, 0, k,
                                   ahead(p), nullptr);
            copy_rows(out + p * NR, out_step, c, M, n - p * NR, NR);
        }
    });
}

template <class W, class A, class O>
void skinny(O *out, const A *x, const W *w, const float *bias, int64_t m, int64_t n, int64_t k, int64_t x_step,
            int64_t out_step) {
#define CASE(M) \
    case M:     \
        return skinny_rows<M>(out, x, w, bias, n, k, x_step, out_step);
    switch (m) { EACH_ROWS(CASE) }
#undef CASE
}

// First row of tile t when m rows are cut into `tiles` nearly equal ones.
INLINE int64_t tile_start(int64_t t, int64_t m, int64_t tiles) {
    return t * (m / tiles) + smaller(t, m % tiles);
}

// Word i of a row of `columns` values.
template <class X>
INLINE void take_word(float *to, const X *row, int64_t i, int64_t) {
    *to = to_float(row[i]);
}
INLINE void take_word(pair *to, const pair *row, int64_t i, int64_t) {
    *to = row[i];
}
INLINE void take_word(pair *to, const bf16 *row, int64_t i, int64_t columns) {
    to->bits = row[2 * i].bits | (2 * i + 1 < columns ? uint32_t(row[2 * i + 1].bits) << 16 : 0);
}

// Call f(to, first row, rows, first word, word behind the last) for each piece of each tile of m rows of k words. `packed` holds
// the tiles one after another, each as [K][rows of the tile] at `to`: the inner loop walks one stream.
template <class A, class F>
INLINE void each_piece(A *packed, int64_t m, int64_t k, int64_t tiles, const F &f) {
    const int64_t pieces = (k + PIECE - 1) / PIECE;
    parallel_ranges(tiles * pieces, m * k, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const int64_t start = tile_start(i / pieces, m, tiles), first = i % pieces * PIECE;
            f(packed + start * k, start, tile_start(i / pieces + 1, m, tiles) - start, first, smaller(k, first + PIECE));
        }
    });
}

template <class A, class X>
void pack_rows(A *packed, const X *x, int64_t m, int64_t k, int64_t columns, int64_t x_step, int64_t tiles) {
    each_piece(packed, m, k, tiles, [&](A *to, int64_t start, int64_t rows, int64_t first, int64_t end) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = first; i < end; i++) take_word(to + i * rows + r, x + (start + r) * x_step, i, columns);
    });
}

template <class A>
INLINE v4 four_words(const A *from) {
    static_assert(sizeof(A) == 4, "");
    v4 words;
    memcpy(&words, from, sizeof words);
    return words;
}
INLINE v4 four_words(const bf16 *from) {
    typedef uint16_t h4 __attribute__((vector_size(8)));
    typedef uint32_t u4 __attribute__((vector_size(16)));
    h4 halves;
    memcpy(&halves, from, sizeof halves);
    return (v4)(__builtin_convertvector(halves, u4) << 16);
}

// Four words of each of R rows, 1 to 4, as R words of each of four columns.
template <int R, class A, class X>
INLINE void turn(A *to, int64_t to_step, const X *from, int64_t from_step) {
    v4 words[4];
    for (int r = 0; r < 4; r++) words[r] = four_words(from + (r < R ? r : 0) * from_step);
    transpose(words);
    for (int i = 0; i < 4; i++) memcpy(to + i * to_step, &words[i], R * sizeof(A));
}

template <int R, class A, class X>
INLINE void turn_all(A *to, int64_t to_step, const X *from, int64_t from_step, int64_t i, int64_t end) {
    for (; i + 4 <= end; i += 4) turn<R>(to + i * to_step, to_step, from + i, from_step);
    for (; i < end; i++)
        for (int r = 0; r < R; r++) take_word(to + i * to_step + r, from + r * from_step, i, end);
}

// As pack_rows, for rows whose values are words, or become such one by one.
template <class A, class X>
void turn_rows(A *packed, const X *x, int64_t m, int64_t k, int64_t x_step, int64_t tiles) {
    each_piece(packed, m, k, tiles, [&](A *to, int64_t start, int64_t rows, int64_t first, int64_t end) {
        const X *from = x + start * x_step;
        int64_t r = 0;
        for (; r + 4 <= rows; r += 4) turn_all<4>(to + r, rows, from + r * x_step, x_step, first, end);
        if (rows - r == 3) turn_all<3>(to + r, rows, from + r * x_step, x_step, first, end);
        if (rows - r == 2) turn_all<2>(to + r, rows, from + r * x_step, x_step, first, end);
        if (rows - r == 1) turn_all<1>(to + r, rows, from + r * x_step, x_step, first, end);
    });
}

// Words of one pass where a row has k.
INLINE int64_t pass_depth(int64_t k) {
    const int64_t passes = (k + DEPTH - 1) / DEPTH;
    return (k + passes - 1) / passes;
}

// Words in which a thread keeps a slice of a panel in fp32.
template <class W>
INLINE int64_t wide_words(int64_t k, int64_t tiles) {
    return Kind<W>::WIDENED && tiles >= WIDE_TILES ? pass_depth(k) * NR : 0;
}

// `wide` has wide_words of each thread.
template <class W, class A, class O>
void blocked(O *out, const A *packed, const W *w, const float *bias, int64_t m, int64_t n, int64_t k, int64_t out_step,
             int64_t tiles, float *wide) {
    const int64_t panels = (n + NR - 1) / NR;
    const int64_t depth = pass_depth(k), passes = (k + depth - 1) / depth;
    const int64_t fit = ROW_BYTES / (MR * k * int64_t(sizeof(A))), most = fit < 1 ? 1 : smaller(fit, ROWS);
    const int64_t row_tasks = (tiles + most - 1) / most;
    // At least eight tasks a thread, as far as there are panels: the last ones to finish are then short.
    const int64_t spread = panels * row_tasks / (8 * omp_get_max_threads());
    const int64_t together = spread < 1 ? 1 : smaller(spread, PANELS);
    const int64_t panel_tasks = (panels + together - 1) / together;
    parallel(row_tasks * panel_tasks, [&](int64_t task, int thread) {
        float sums[ROWS * MR * NR], edge[NR];
        const int64_t first = tile_start(task / panel_tasks, tiles, row_tasks);
        const int64_t last = tile_start(task / panel_tasks + 1, tiles, row_tasks);
        const int64_t panel = task % panel_tasks * together;
        const int64_t sharing = last - first;
        const bool widened = Kind<W>::WIDENED && sharing >= WIDE_TILES;
        float *slice = wide + thread * wide_words<W>(k, tiles);
        for (int64_t p = panel; p < smaller(panel + together, panels); p++)
            for (int64_t pass = 0; pass < passes; pass++)
                for (int64_t t = first; t < last; t++) {
                    const int64_t start = tile_start(t, m, tiles), rows = tile_start(t + 1, m, tiles) - start;
                    const int64_t width = smaller(NR, n - p * NR);
                    float *own = sums + (passes > 1 ? t - first : 0) * MR * NR;
                    float *to = direct(out + start * out_step + p * NR, width == NR);
                    const W *own_w = w + (p * k + pass * depth) * NR;
                    const int64_t words = smaller(depth, k - pass * depth), bytes = words * NR * int64_t(sizeof(W));
                    // Each tile brings its part of the next slice from memory to L2. The first slice of a task nobody brought.
                    const bool cold = p == panel && pass == 0 && t == first;
                    const Ahead ahead = {cold ? AHEAD : NEAR,
                                         (const char *)own_w + bytes + (t - first) * bytes / sharing,
                                         bytes / sharing / words};
                    const auto take = [&](auto keeps, const auto *weights) __attribute__((always_inline)) {
                        any_tile<keeps.value>(rows, to ? to : own, to ? out_step : NR, panel_bias(bias, p, n, edge),
                                              pass > 0, packed + start * k + pass * depth * rows, 1, rows, weights,
                                              words, ahead, slice);
                    };
                    if constexpr (Kind<W>::WIDENED) {
                        if (!widened) take(Number<0>(), own_w);
                        else if (t == first) take(Number<1>(), own_w);
                        else take(Number<0>(), (const float *)slice);
                    } else {
                        take(Number<0>(), own_w);
                    }
                    if (!to && pass == passes - 1)
                        copy_rows(out + start * out_step + p * NR, out_step, own, rows, width, NR);
                }
    });
}

// Rows whose words are as they are needed, or null: nothing is copied then.
INLINE const float *words_of(const float *x, float *, int64_t, int64_t *) {
    return x;
}
INLINE const float *words_of(const bf16 *, float *, int64_t, int64_t *) {
    return nullptr;
}
INLINE const pair *words_of(const bf16 *x, pair *, int64_t columns, int64_t *x_step) {
    if (columns % 2 || *x_step % 2) return nullptr;
    *x_step /= 2;
    return (const pair *)x;
}

// m rows of `columns` values, n channels. Returns 0, or 1 when memory is short.
template <class X, class W>
int64_t run(X *out, const X *x, const W *w, const float *bias, int64_t m, int64_t n, int64_t columns, int64_t x_step,
            int64_t out_step) {
    typedef typename Kind<W>::Row A;
    if (m == 0 || n == 0) return 0;
    const int64_t k = (columns + Kind<W>::COLUMNS - 1) / Kind<W>::COLUMNS;
    int64_t step = x_step;
    const A *words = words_of(x, (A *)nullptr, columns, &step);
    if (words && m <= MR) {
        skinny(out, words, w, bias, m, n, k, step, out_step);
        return 0;
    }
    const int64_t tiles = (m + MR - 1) / MR, wide = m > MR ? wide_words<W>(k, tiles) * omp_get_max_threads() : 0;
    A *packed = (A *)aligned_alloc(64, (size_t(m * k + wide) * sizeof(A) + 127) / 64 * 64);
    if (!packed) return 1;
    if (m <= MR) {
        for (int64_t r = 0; r < m; r++)
            for (int64_t i = 0; i < k; i++) take_word(packed + r * k + i, x + r * x_step, i, columns);
        skinny(out, (const A *)packed, w, bias, m, n, k, k, out_step);
    } else {
        if (words) turn_rows(packed, words, m, k, step, tiles);
        else if constexpr (Kind<W>::COLUMNS == 1) turn_rows(packed, x, m, k, x_step, tiles);
        else pack_rows(packed, x, m, k, columns, x_step, tiles);
        blocked(out, (const A *)packed, w, bias, m, n, k, out_step, tiles, (float *)packed + (m * k + 15) / 16 * 16);
    }
    free(packed);
    return 0;
}

}  // namespace
