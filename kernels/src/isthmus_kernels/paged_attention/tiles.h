// One tile of keys taken into the online softmax of some query rows, in two forms that give the same bits, and the merge of
// two softmaxes (README.md).
#pragma once
#include "common.h"

namespace {

constexpr int KEYS = 64;      // keys of a tile
constexpr int ROW_TILE = 64;  // most query rows of a prefill unit: whole registers of them
constexpr int FEW = 8;        // at most this many rows take the in-place form
constexpr int MAX_ROWS = 64;  // rows of a unit, padded: ROW_TILE or one token's group
constexpr int64_t PARTITION = 2 * KEYS;
constexpr float LOWEST = -3.0e38f;

#if defined(__AVX512F__)
constexpr int MR = 12;
#else
constexpr int MR = 6;
#endif

struct Args {
    const int32_t *tables, *starts, *lens;
    // `dim` is in whole registers; channels from `real` on are zeros in the scratch, and nowhere else.
    int64_t heads, kv_heads, dim, real, block_size, table_stride, window;
    int64_t q_token, q_head, out_token, out_head, block, half, token, head;
    float scale, cap;    // cap: 0 for none
    const float *sinks;  // of each q head, or null
    const float *scales;  // of a scaled pool: of each key and value, [blocks, 2, block_size, kv_heads]
    int64_t scale_block, scale_half, scale_token, scale_head;
};

// A softmax over some of the keys: of each query row the maximum, the sum of the weights, the unnormalised result.
struct State {
    float *top, *total, *sum;  // [rows], [rows], [rows][D]
};

// Of one thread. Decode units use all kv heads of `q` and the states, head by head.
struct Scratch {
    float *q;                       // few: [rows][D]; many: [D][padded rows]
    State now, before;              // of the partition that is computed, and of those before it
    float *shrink, *keys, *values;  // many rows only
    float *scores;                  // few: [rows][KEYS]; many: [KEYS][padded rows]
};

INLINE int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}
INLINE int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

// Whether this many query rows take the in-place form, which reads keys and values in whole registers.
INLINE bool in_place(const Args &a, int64_t rows) {
    return rows <= FEW && a.real == a.dim;
}

// c[M][2 VW] += a b, with a(m, k) = a[m * a_row + k * a_col] and b [depth][2 VW].
template <int M>
INLINE void product_tile(float *c, int64_t c_step, const float *a, int64_t a_row, int64_t a_col, const float *b,
                         int64_t b_step, int64_t depth) {
    vf lo[M], hi[M];
    for (int m = 0; m < M; m++) {
        lo[m] = load(c + m * c_step);
        hi[m] = load(c + m * c_step + VW);
    }
    for (int64_t k = 0; k < depth; k++) {
        const vf x = load(b + k * b_step), y = load(b + k * b_step + VW);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
            const float s = a[m * a_row + k * a_col];
            lo[m] += x * s;
            hi[m] += y * s;
        }
    }
    for (int m = 0; m < M; m++) {
        store(c + m * c_step, lo[m]);
        store(c + m * c_step + VW, hi[m]);
    }
}

void product(float *c, int64_t c_step, const float *a, int64_t a_row, int64_t a_col, const float *b, int64_t b_step,
             int64_t rows, int64_t columns, int64_t depth) {
    for (int64_t j = 0; j < columns; j += 2 * VW) {
        if (columns - j < 2 * VW) {  // one last column of VW
            for (int64_t m = 0; m < rows; m++) {
                vf acc = load(c + m * c_step + j);
                for (int64_t k = 0; k < depth; k++) acc += load(b + k * b_step + j) * a[m * a_row + k * a_col];
                store(c + m * c_step + j, acc);
            }
            return;
        }
        int64_t m = 0;
#define TILES(M)                  \
    for (; m + M <= rows; m += M) \
    product_tile<M>(c + m * c_step + j, c_step, a + m * a_row, a_row, a_col, b + j, b_step, depth)
        TILES(MR);
        TILES(4);
        TILES(1);
#undef TILES
    }
}

// Scores s to cap tanh(s / cap), in the form that does not overflow.
INLINE void soft_cap(const Args &a, float *scores, int64_t count) {
    const float twice = 2.0f / a.cap;
    for (int64_t i = 0; i < count; i += VW) {
        const vf e = vexp(load(scores + i) * twice);
        store(scores + i, splat(a.cap) - splat(2.0f * a.cap) / (e + 1.0f));
    }
}

// A score is four sums along D, of the channels d = 0, 1, 2 and 3 modulo 4, added as (0 + 2) + (1 + 3).
constexpr int LANES = 4;

// Products of M keys [M][D] with 2 VW query rows [D][padded rows], over the channels d = LANE modulo STRIDE. With
// LANE 0 and STRIDE 1 that is the whole score.
template <int LANE, int STRIDE, int M>
INLINE void lane_sums(vf (&sum)[M][2], const float *keys, const float *q, int64_t padded, int64_t dim) {
    if constexpr (STRIDE < LANES) {
        vf other[M][2];
        lane_sums<LANE, 2 * STRIDE>(sum, keys, q, padded, dim);
        lane_sums<LANE + STRIDE, 2 * STRIDE>(other, keys, q, padded, dim);
        for (int m = 0; m < M; m++)
            for (int n = 0; n < 2; n++) sum[m][n] += other[m][n];
    } else {
        for (int m = 0; m < M; m++) sum[m][0] = sum[m][1] = vf{};
        for (int64_t d = LANE; d < dim; d += LANES) {
            const vf x = load(q + d * padded), y = load(q + d * padded + VW);
            for (int m = 0; m < M; m++) {
                sum[m][0] += x * keys[m * dim + d];
                sum[m][1] += y * keys[m * dim + d];
            }
        }
    }
}

template <int M>
INLINE void scores_of(float *scores, const float *keys, const float *q, int64_t padded, int64_t dim) {
    for (int64_t row = 0; row < padded; row += 2 * VW) {
        vf sum[M][2];
        lane_sums<0, 1>(sum, keys, q + row, padded, dim);
        for (int m = 0; m < M; m++) {
            store(scores + m * padded + row, sum[m][0]);
            store(scores + m * padded + row + VW, sum[m][1]);
        }
    }
}

// Keys side by side in a register, LANES channels of each: x[j] becomes channels [4 j, 4 j + 4) of all keys.
constexpr int SIDE = VW / LANES;
INLINE void side_by_side(vf (&x)[SIDE]) {
#if defined(__AVX512F__)
#define MIX(a, b, i, j)                                                                                               \
    __builtin_shufflevector(a, b, 4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3, 4 * j, 4 * j + 1, 4 * j + 2, 4 * j + 3,     \
                            16 + 4 * i, 17 + 4 * i, 18 + 4 * i, 19 + 4 * i, 16 + 4 * j, 17 + 4 * j, 18 + 4 * j, \
                            19 + 4 * j)
    const vf a = MIX(x[0], x[1], 0, 1), b = MIX(x[0], x[1], 2, 3), c = MIX(x[2], x[3], 0, 1), d = MIX(x[2], x[3], 2, 3);
    x[0] = MIX(a, c, 0, 2), x[1] = MIX(a, c, 1, 3), x[2] = MIX(b, d, 0, 2), x[3] = MIX(b, d, 1, 3);
#undef MIX
#elif defined(__AVX2__)
    const vf a = x[0], b = x[1];
    x[0] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
    x[1] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
#endif
}

// LANES channels of a query, for each of the keys in a register.
INLINE vf repeated(const float *p) {
    v4 four;
    memcpy(&four, p, sizeof four);
#if defined(__AVX512F__)
    return (vf)_mm512_broadcast_f32x4((__m128)four);
#elif defined(__AVX2__)
    return __builtin_shufflevector(four, four, 0, 1, 2, 3, 0, 1, 2, 3);
#else
    return four;
#endif
}

// Each key's LANES sums, (0 + 2) + (1 + 3).
INLINE void store_sums(float *to, vf v) {
#if defined(__AVX512F__)
    const vf w = v + (vf)_mm512_permute_ps((__m512)v, 0x4e), sums = w + (vf)_mm512_permute_ps((__m512)w, 0xb1);
    const v4 four = (v4)_mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, (__m512)sums));
    memcpy(to, &four, sizeof four);
#elif defined(__AVX2__)
    const vf w = v + (vf)_mm256_permute_ps((__m256)v, 0x4e), sums = w + (vf)_mm256_permute_ps((__m256)w, 0xb1);
    to[0] = sums[0], to[1] = sums[4];
#else
    to[0] = (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

// Scores of M rows against G times SIDE keys read in place. One group of keys is a chain of sums a row, so several run
// side by side.
template <int M, int G, class C>
INLINE void dots(float *scores, const float *q, const C *const *keys, int64_t shift, int64_t dim) {
    vf acc[G][M] = {};
    for (int64_t d = 0; d < dim; d += VW) {
        vf x[G][SIDE];
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) {
            for (int k = 0; k < SIDE; k++) x[g][k] = load(keys[g * SIDE + k] + shift + d);
            side_by_side(x[g]);
        }
#pragma GCC unroll 4
        for (int j = 0; j < SIDE; j++)
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) {
                const vf four = repeated(q + m * dim + d + LANES * j);
#pragma GCC unroll 4
                for (int g = 0; g < G; g++) acc[g][m] += x[g][j] * four;
            }
    }
    for (int g = 0; g < G; g++)
        for (int m = 0; m < M; m++) store_sums(scores + m * KEYS + g * SIDE, acc[g][m]);
}

INLINE void prefetch(const void *at, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char *)at + b, 0, 2);
}

// sum[m][0..N VW) += weights[m][k] value[k], values read in place. The same part of `wanted` values is requested for later,
// `shift` elements from where `coming` says.
template <int M, int N, class C>
INLINE void weigh(float *sum, const float *weights, const C *const *values, int64_t at, int64_t keys, int64_t dim,
                  const C *const *coming, int64_t shift, int64_t wanted) {
    vf acc[M][N];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) acc[m][n] = load(sum + m * dim + n * VW);
    for (int64_t k = 0; k < keys; k++) {
        vf x[N];
        for (int n = 0; n < N; n++) x[n] = load(values[k] + at + n * VW);
        if (k < wanted) prefetch(coming[k] + shift, N * VW * sizeof(C));
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
            const float w = weights[m * KEYS + k];
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) acc[m][n] += x[n] * w;
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) store(sum + m * dim + n * VW, acc[m][n]);
}

// What the register file holds: rows of the in-place forms, and keys of the transposed scores.
constexpr int STEP = VW == 16 ? 4 : 3, AT_ONCE = VW == 16 ? 4 : 2;

// FORM(M) for groups of at most STEP of the rows.
#define EACH_FEW(FORM)                              \
    int64_t m = 0;                                  \
    for (; m + STEP <= rows; m += STEP) FORM(STEP); \
    if (rows - m == 3) FORM(3);                     \
    if (rows - m == 2) FORM(2);                     \
    if (rows - m == 1) FORM(1);

// The keys of one tile: where each key and value of kv head 0 lies.
template <class C>
struct Tile {
    int64_t first, count;
    const C *keys[KEYS], *values[KEYS];
    const float *scales[KEYS];  // of keys; scaled pools only

    // The tile that key `begin` is in, as far as `end`. Keys before `begin` are none of the request's any more: `begin`
    // stands for them, and is masked there.
    void locate(const Args &a, const C *pool, const int32_t *table, int64_t begin, int64_t end) {
        first = begin / KEYS * KEYS;
        count = smaller(KEYS, end - first);
        int64_t block = begin / a.block_size, offset = begin % a.block_size;
        const int64_t skipped = begin - first;
        for (int64_t k = skipped; k < count; block++, offset = 0) {
            const C *at = pool + int64_t(table[block]) * a.block + offset * a.token;
            for (; offset < a.block_size && k < count; offset++, k++, at += a.token) {
                keys[k] = at;
                values[k] = at + a.half;
                if constexpr (SCALED<C>)
                    scales[k] = a.scales + int64_t(table[block]) * a.scale_block + offset * a.scale_token;
            }
        }
        for (int64_t k = 0; k < skipped; k++) {
            keys[k] = keys[skipped], values[k] = values[skipped];
            if constexpr (SCALED<C>) scales[k] = scales[skipped];
        }
        // Keys are taken SIDE at a time; the surplus repeats the last one and is masked.
        for (int64_t k = count; k % SIDE; k++) keys[k] = keys[count - 1];
    }
};

// The tile's scales of keys or of values of one kv head, in whole registers.
template <class C>
INLINE void gather_scales(float *to, const Tile<C> &tile, int64_t shift) {
    for (int64_t k = 0; k < tile.count; k++) to[k] = tile.scales[k][shift];
    for (int64_t k = tile.count; k < KEYS; k++) to[k] = 0.0f;
}

// Requests `number` keys of a tile from `first` on.
template <class C>
INLINE void request(const Tile<C> &tile, int64_t first, int64_t number, int64_t shift, int64_t dim) {
    for (int64_t i = first; i < smaller(first + number, tile.count); i++) prefetch(tile.keys[i] + shift, dim * sizeof(C));
}

// The sum of weights when the maximum has grown: both forms round it alike.
INLINE vf rescaled(vf total, vf shrink, vf added) {
    return total * shrink + added;
}

// Take one tile into the softmax of the few query rows of one kv head, while the next tile (or head) is on its way
// from memory.
template <class C>
void few_rows(const Args &a, const Scratch &s, const Tile<C> &tile, int64_t head, const Tile<C> *next,
              int64_t next_head, int64_t rows, int64_t position, int64_t group) {
    const int64_t dim = a.dim, count = tile.count, padded = (count + VW - 1) / VW * VW;
    const int64_t shift = head * a.head, next_shift = next_head * a.head;
    float *sum = s.now.sum, scales[KEYS];
    // Keys are taken SIDE at a time, and in pairs of groups while there are so many.
    int64_t k = 0;
#define FORM(M) dots<M, 2>(s.scores + m * KEYS + k, s.q + m * dim, tile.keys + k, shift, dim)
    for (; k + 2 * SIDE <= count; k += 2 * SIDE) {
        if (next) request(*next, k, 2 * SIDE, next_shift, dim);
        EACH_FEW(FORM)
    }
#undef FORM
#define FORM(M) dots<M, 1>(s.scores + m * KEYS + k, s.q + m * dim, tile.keys + k, shift, dim)
    for (; k < count; k += SIDE) {
        if (next) request(*next, k, SIDE, next_shift, dim);
        EACH_FEW(FORM)
    }
#undef FORM
    if constexpr (SCALED<C>) {
        gather_scales(scales, tile, head * a.scale_head);
        for (int64_t m = 0; m < rows; m++)
            for (int64_t k = 0; k < padded; k += VW)
                store(s.scores + m * KEYS + k, load(s.scores + m * KEYS + k) * load(scales + k));
        gather_scales(scales, tile, head * a.scale_head + a.scale_half);
    }
    for (int64_t m = 0; m < rows; m++) {
        float *row = s.scores + m * KEYS;
        const int64_t last = position + m / group;
        if (a.cap > 0.0f) soft_cap(a, row, padded);
        // Keys [from, to) of this tile are visible to the row; the rest weigh nothing.
        const int64_t to = smaller(count, larger(0, last + 1 - tile.first));
        const int64_t from = a.window ? smaller(to, larger(0, last + 1 - a.window - tile.first)) : 0;
        for (int64_t k = 0; k < from; k++) row[k] = -INFINITY;
        for (int64_t k = to; k < padded; k++) row[k] = -INFINITY;
        const float old = s.now.top[m];
        vf best = splat(old);
        for (int64_t k = 0; k < padded; k += VW) best = vmax(best, load(row + k));
        const float peak = hmax(best);
        vf shrink = splat(1.0f);
        if (peak > old) {
            shrink = vexp(splat(old) - peak);
            for (int64_t d = 0; d < dim; d += VW) store(sum + m * dim + d, load(sum + m * dim + d) * shrink);
            s.now.top[m] = peak;
        }
        vf added = {};
        for (int64_t k = 0; k < padded; k += VW) {
            const vf p = vexp(load(row + k) - peak);
            store(row + k, SCALED<C> ? p * load(scales + k) : p);
            added += p;
        }
        s.now.total[m] = rescaled(splat(s.now.total[m]), shrink, splat(hsum(added)))[0];
    }
    // Keys were requested beside the scores, values are beside the sums: so memory is never asked for both at once. What a
    // shorter tile before does not get to comes late.
    int64_t d = 0;
    const C *const *coming = next ? next->values : nullptr;
    const int64_t wanted = next ? next->count : 0;
#define FORM(M)                                                                                        \
    weigh<M, 4>(sum + m * dim + d, s.scores + m * KEYS, tile.values, shift + d, count, dim, coming, next_shift + d, \
                m ? 0 : wanted)
    for (; d + 4 * VW <= dim; d += 4 * VW) {
        EACH_FEW(FORM)
    }
#undef FORM
#define FORM(M)                                                                                        \
    weigh<M, 1>(sum + m * dim + d, s.scores + m * KEYS, tile.values, shift + d, count, dim, coming, next_shift + d, \
                m ? 0 : wanted)
    for (; d < dim; d += VW) {
        EACH_FEW(FORM)
    }
#undef FORM
}

// The tile's keys or values as fp32 [count][D].
template <class C>
INLINE void widen(float *to, const C *const *from, int64_t shift, int64_t count, int64_t dim, int64_t real) {
    const int64_t whole = real / VW * VW;
    for (int64_t k = 0; k < count; k++) {
        for (int64_t d = 0; d < whole; d += VW) store(to + k * dim + d, load(from[k] + shift + d));
        for (int64_t d = whole; d < dim; d++) to[k * dim + d] = d < real ? to_float(from[k][shift + d]) : 0.0f;
    }
}

// As few_rows, with scores [keys][padded rows].
template <class C>
void many_rows(const Args &a, const Scratch &s, const Tile<C> &tile, int64_t head, int64_t rows, int64_t padded,
               int64_t position, int64_t group) {
    const int64_t dim = a.dim, first = tile.first, count = tile.count, shift = head * a.head;
    float scales[KEYS];
    widen(s.keys, tile.keys, shift, count, dim, a.real);
    int64_t done = 0;
    for (; done + AT_ONCE <= count; done += AT_ONCE)
        scores_of<AT_ONCE>(s.scores + done * padded, s.keys + done * dim, s.q, padded, dim);
    for (; done < count; done++) scores_of<1>(s.scores + done * padded, s.keys + done * dim, s.q, padded, dim);
    if constexpr (SCALED<C>) {
        gather_scales(scales, tile, head * a.scale_head);
        for (int64_t k = 0; k < count; k++)
            for (int64_t m = 0; m < padded; m += VW)
                store(s.scores + k * padded + m, load(s.scores + k * padded + m) * scales[k]);
        gather_scales(scales, tile, head * a.scale_head + a.scale_half);
    }
    if (a.cap > 0.0f) soft_cap(a, s.scores, count * padded);
    for (int64_t k = 0; k < count; k++) {
        // Key first + k is visible to the query rows [from, to).
        const int64_t from = smaller(padded, larger(0, first + k - position) * group);
        const int64_t to = a.window ? smaller(padded, larger(0, first + k - position + a.window) * group) : padded;
        for (int64_t m = 0; m < from; m++) s.scores[k * padded + m] = -INFINITY;
        for (int64_t m = larger(from, to); m < padded; m++) s.scores[k * padded + m] = -INFINITY;
    }
    for (int64_t m = 0; m < padded; m += VW) {
        const vf old = load(s.now.top + m);
        vf peak = old, added[VW] = {};
        for (int64_t k = 0; k < count; k++) peak = vmax(peak, load(s.scores + k * padded + m));
        const auto weigh_key = [&](int64_t k, vf &sum) __attribute__((always_inline)) {
            float *at = s.scores + k * padded + m;
            const vf p = vexp(load(at) - peak);
            store(at, SCALED<C> ? p * scales[k] : p);
            sum += p;
        };
        int64_t k = 0;
        for (; k + VW <= count; k += VW) {
#pragma GCC unroll 16
            for (int lane = 0; lane < VW; lane++) weigh_key(k + lane, added[lane]);
        }
#pragma GCC unroll 16
        for (int lane = 0; lane < VW; lane++)
            if (k + lane < count) weigh_key(k + lane, added[lane]);
#pragma GCC unroll 4
        for (int half = VW / 2; half; half /= 2)
            for (int lane = 0; lane < half; lane++) added[lane] += added[lane + half];
        const vf shrink = vexp(old - peak);
        store(s.now.total + m, rescaled(load(s.now.total + m), shrink, added[0]));
        store(s.now.top + m, peak);
        store(s.shrink + m, shrink);
    }
    float *sum = s.now.sum;
    for (int64_t m = 0; m < rows; m++) {
        if (s.shrink[m] == 1.0f) continue;
        for (int64_t d = 0; d < dim; d += VW) store(sum + m * dim + d, load(sum + m * dim + d) * s.shrink[m]);
    }
    widen(s.values, tile.values, shift, count, dim, a.real);
    product(sum, dim, s.scores, 1, padded, s.values, dim, rows, dim, count);
}

// Fold the softmax over later keys into the one over earlier keys. Never inlined: one way of rounding for all.
__attribute__((noinline)) void fold_in(const State &into, const State &later, int64_t rows, int64_t dim) {
    for (int64_t m = 0; m < rows; m += VW) {
        const vf old = load(into.top + m), top = load(later.top + m), peak = vmax(old, top);
        const vf keep = vexp(old - peak), add = vexp(top - peak);
        store(into.top + m, peak);
        store(into.total + m, load(into.total + m) * keep + load(later.total + m) * add);
        for (int64_t i = 0; i < smaller(VW, rows - m); i++) {
            float *sum = into.sum + (m + i) * dim;
            const float *from = later.sum + (m + i) * dim;
            for (int64_t d = 0; d < dim; d += VW) store(sum + d, load(sum + d) * keep[i] + load(from + d) * add[i]);
        }
    }
}

}  // namespace
