// Causal attention of a mixed batch over a paged pool: online softmax over tiles of keys (../README.md).
//
// Work unit: one request, a tile of queries (all q heads of a kv head together, so that each key and value is
// read once for the group) and its context, or one partition of it. Few query rows (decode) take all kv heads in one
// unit and read keys and values in place, which walks the pool in long runs. Many rows (prefill) take one kv head and
// compute the scores transposed, [keys][rows]: the queries are laid out as [D][rows] once, keys are broadcast, and the
// softmax and the weighted sum need no transposition and no horizontal operation.
//
// A query's result is the same bits in either form, in any batch and any chunk. Tiles and partitions begin at multiples
// of their size in the context, not in the chunk; both forms add in the same order (the scores as a register of partial
// sums along D that is folded by halves, so do the totals of a tile; the weighted sums key by key); keys that a query
// does not see weigh exactly nothing; partitions are folded from the first to the last, by whoever computed them.
#include "common.h"

namespace {

constexpr int KEYS = 64;      // keys of a tile
constexpr int ROW_TILE = 48;  // wanted query rows of a prefill unit
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
    int64_t heads, kv_heads, dim, block_size, table_stride, window;
    int64_t q_token, q_head, out_token, out_head, block, half, token, head;
    float scale, cap;    // cap: 0 for none
    const float *sinks;  // of each q head, or null
};

struct Unit {
    int32_t row, first, count;  // queries [first, first + count) of the request's chunk
    int32_t head, heads;        // kv heads [head, head + heads)
    int64_t begin, end;         // keys
    int32_t splits, part;       // this is partition `part` of `splits`
    int64_t partial;            // its place in the partial buffer, in floats
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

// Scores of M rows against SIDE keys read in place.
template <int M, class C>
INLINE void dots(float *scores, const float *q, const C *const *keys, int64_t shift, int64_t dim) {
    vf acc[M] = {};
    for (int64_t d = 0; d < dim; d += VW) {
        vf x[SIDE];
        for (int k = 0; k < SIDE; k++) x[k] = load(keys[k] + shift + d);
        side_by_side(x);
#pragma GCC unroll 4
        for (int j = 0; j < SIDE; j++)
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) acc[m] += x[j] * repeated(q + m * dim + d + LANES * j);
    }
    for (int m = 0; m < M; m++) store_sums(scores + m * KEYS, acc[m]);
}

// sum[m][0..N VW) += weights[m][k] value[k], values read in place.
template <int M, int N, class C>
INLINE void weigh(float *sum, const float *weights, const C *const *values, int64_t at, int64_t keys, int64_t dim) {
    vf acc[M][N];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) acc[m][n] = load(sum + m * dim + n * VW);
    for (int64_t k = 0; k < keys; k++) {
        vf x[N];
        for (int n = 0; n < N; n++) x[n] = load(values[k] + at + n * VW);
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
            }
        }
        for (int64_t k = 0; k < skipped; k++) keys[k] = keys[skipped], values[k] = values[skipped];
        // Keys are taken SIDE at a time; the surplus repeats the last one and is masked.
        for (int64_t k = count; k % SIDE; k++) keys[k] = keys[count - 1];
    }
};

INLINE void prefetch(const void *at, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char *)at + b, 0, 2);
}

// The sum of weights when the maximum has grown: both forms round it alike.
INLINE vf rescaled(vf total, vf shrink, vf added) {
    return total * shrink + added;
}

// Take one tile into the softmax of the few query rows of one kv head, while the next tile (or head) is on its way
// from memory.
template <class C>
void few_rows(const Args &a, const Scratch &s, const Tile<C> &tile, int64_t shift, const Tile<C> *next,
              int64_t next_shift, int64_t rows, int64_t position, int64_t group) {
    const int64_t dim = a.dim, count = tile.count, padded = (count + VW - 1) / VW * VW;
    float *sum = s.now.sum;
    for (int64_t k = 0; k < count; k += SIDE) {
        if (next)
            for (int64_t i = k; i < smaller(k + SIDE, next->count); i++) {
                prefetch(next->keys[i] + next_shift, dim * sizeof(C));
                prefetch(next->values[i] + next_shift, dim * sizeof(C));
            }
#define FORM(M) dots<M>(s.scores + m * KEYS + k, s.q + m * dim, tile.keys + k, shift, dim)
        EACH_FEW(FORM)
#undef FORM
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
            store(row + k, p);
            added += p;
        }
        s.now.total[m] = rescaled(splat(s.now.total[m]), shrink, splat(hsum(added)))[0];
    }
    int64_t d = 0;
#define FORM(M) weigh<M, 4>(sum + m * dim + d, s.scores + m * KEYS, tile.values, shift + d, count, dim)
    for (; d + 4 * VW <= dim; d += 4 * VW) {
        EACH_FEW(FORM)
    }
#undef FORM
#define FORM(M) weigh<M, 1>(sum + m * dim + d, s.scores + m * KEYS, tile.values, shift + d, count, dim)
    for (; d < dim; d += VW) {
        EACH_FEW(FORM)
    }
#undef FORM
}

// The tile's keys or values as fp32 [count][D].
template <class C>
INLINE void widen(float *to, const C *const *from, int64_t shift, int64_t count, int64_t dim) {
    for (int64_t k = 0; k < count; k++)
        for (int64_t d = 0; d < dim; d += VW) store(to + k * dim + d, load(from[k] + shift + d));
}

// As few_rows, with scores [keys][padded rows].
template <class C>
void many_rows(const Args &a, const Scratch &s, const Tile<C> &tile, int64_t shift, int64_t rows, int64_t padded,
               int64_t position, int64_t group) {
    const int64_t dim = a.dim, first = tile.first, count = tile.count;
    widen(s.keys, tile.keys, shift, count, dim);
    int64_t done = 0;
    for (; done + AT_ONCE <= count; done += AT_ONCE)
        scores_of<AT_ONCE>(s.scores + done * padded, s.keys + done * dim, s.q, padded, dim);
    for (; done < count; done++) scores_of<1>(s.scores + done * padded, s.keys + done * dim, s.q, padded, dim);
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
            store(at, p);
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
    widen(s.values, tile.values, shift, count, dim);
    product(sum, dim, s.scores, 1, padded, s.values, dim, rows, dim, count);
}

INLINE int64_t padded_rows(int64_t rows) {
    return (rows + 2 * VW - 1) / (2 * VW) * (2 * VW);
}

INLINE State state_at(const State &s, int64_t row, int64_t dim) {
    return {s.top + row, s.total + row, s.sum + row * dim};
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

// Leaves the softmax over the unit's keys in `before`.
template <class C>
void attend(const Args &a, const C *pool, const Unit &u, Scratch &s, int64_t rows, int64_t group) {
    const int64_t position = a.lens[u.row] - (a.starts[u.row + 1] - a.starts[u.row]) + u.first;
    const int64_t padded = padded_rows(rows), all = u.heads * rows;
    const int32_t *table = a.tables + u.row * a.table_stride;
    const bool few = rows <= FEW;
    Tile<C> tiles[2];
    tiles[0].locate(a, pool, table, u.begin, u.end);
    bool fresh = true, first = true;
    for (int i = 0;; i ^= 1) {
        if (fresh) {
            for (int64_t m = 0; m < (few ? all : padded); m++) s.now.top[m] = LOWEST, s.now.total[m] = 0.0f;
            memset(s.now.sum, 0, all * a.dim * sizeof(float));
        }
        const int64_t end = tiles[i].first + KEYS;
        const bool more = end < u.end;
        if (more) tiles[i ^ 1].locate(a, pool, table, end, u.end);
        if (!few) many_rows(a, s, tiles[i], u.head * a.head, rows, padded, position, group);
        for (int64_t h = 0; few && h < u.heads; h++) {
            const bool last = h == u.heads - 1;
            const Tile<C> *next = !last ? &tiles[i] : more ? &tiles[i ^ 1] : nullptr;
            Scratch own = s;
            own.q += h * rows * a.dim;
            own.now = state_at(s.now, h * rows, a.dim);
            few_rows(a, own, tiles[i], (u.head + h) * a.head, next, (u.head + (last ? 0 : h + 1)) * a.head, rows,
                     position, group);
        }
        fresh = !more || end % PARTITION == 0;
        if (fresh && first) {
            const State swapped = s.before;
            s.before = s.now;
            s.now = swapped;
        } else if (fresh) {
            fold_in(s.before, s.now, all, a.dim);
        }
        first = first && !fresh;
        if (!more) return;
    }
}

template <class T>
INLINE T *query_row(const Args &a, T *base, int64_t token_stride, int64_t head_stride, const Unit &u, int64_t h,
                    int64_t m, int64_t group) {
    return base + (a.starts[u.row] + u.first + m / group) * token_stride +
           ((u.head + h) * group + m % group) * head_stride;
}

template <class T>
void load_queries(const Args &a, const T *q, const Unit &u, const Scratch &s, int64_t rows, int64_t group) {
    const int64_t padded = padded_rows(rows);
    if (rows > FEW) memset(s.q, 0, a.dim * padded * sizeof(float));
    for (int64_t h = 0; h < u.heads; h++)
        for (int64_t m = 0; m < rows; m++) {
            const T *from = query_row(a, q, a.q_token, a.q_head, u, h, m, group);
            float *to = s.q + h * rows * a.dim;
            if (rows <= FEW)
                for (int64_t d = 0; d < a.dim; d += VW) store(to + m * a.dim + d, load(from + d) * a.scale);
            else
                for (int64_t d = 0; d < a.dim; d++) to[d * padded + m] = to_float(from[d]) * a.scale;
        }
}

// What the head's sink adds to the sum of weights whose largest score is `top`.
INLINE float sink(const Args &a, int64_t head, float top) {
    return a.sinks ? expf(a.sinks[head] - top) : 0.0f;
}

template <class T>
void write_out(const Args &a, T *out, const Unit &u, const State &s, int64_t rows, int64_t group) {
    for (int64_t h = 0; h < u.heads; h++)
        for (int64_t m = 0; m < rows; m++) {
            T *to = query_row(a, out, a.out_token, a.out_head, u, h, m, group);
            const float added = sink(a, (u.head + h) * group + m % group, s.top[h * rows + m]);
            const float *sum = s.sum + (h * rows + m) * a.dim, factor = 1.0f / (s.total[h * rows + m] + added);
            for (int64_t d = 0; d < a.dim; d += VW) store(to + d, load(sum + d) * factor);
        }
}

INLINE int64_t whole_vectors(int64_t rows) {
    return (rows + VW - 1) / VW * VW;
}

// The partial buffer holds the states of partitions, one after another.
INLINE int64_t state_floats(int64_t rows, int64_t dim) {
    return 2 * whole_vectors(rows) + rows * dim;
}
INLINE State state_in(float *at, int64_t rows) {
    return {at, at + whole_vectors(rows), at + 2 * whole_vectors(rows)};
}

struct Plan {
    Unit *units;
    int64_t count, partial_floats;
};

// Cut the batch into units; with `to` null only count them.
Plan plan(const Args &a, int64_t requests, int64_t group, int64_t threads, Unit *to) {
    const int64_t tokens_per_tile = larger(1, ROW_TILE / group);
    int64_t whole = 0;
    for (int64_t r = 0; r < requests; r++) {
        const int64_t queries = a.starts[r + 1] - a.starts[r];
        whole += queries * group <= FEW ? queries > 0 : (queries + tokens_per_tile - 1) / tokens_per_tile * a.kv_heads;
    }
    // With plenty of units every thread is busy anyway. The bits are the same either way.
    const bool split = threads > 1 && whole < 8 * threads;
    Plan plan = {to, 0, 0};
    for (int64_t r = 0; r < requests; r++) {
        const int64_t queries = a.starts[r + 1] - a.starts[r], start = a.lens[r] - queries;
        // Late tiles first: they see the longest context, and the short ones even out the end.
        for (int64_t tile = (queries + tokens_per_tile - 1) / tokens_per_tile - 1; tile >= 0; tile--) {
            const int64_t first = tile * tokens_per_tile, count = smaller(tokens_per_tile, queries - first);
            const int64_t begin = a.window ? larger(0, start + first + 1 - a.window) : 0, end = start + first + count;
            const int64_t start_of = begin / PARTITION * PARTITION;
            const int64_t splits = split ? (end - start_of + PARTITION - 1) / PARTITION : 1;
            const int64_t heads = count * group <= FEW ? a.kv_heads : 1;
            for (int64_t h = 0; h < a.kv_heads; h += heads) {
                for (int64_t p = 0; p < splits; p++) {
                    const int64_t next = start_of + (p + 1) * PARTITION;
                    if (to)
                        to[plan.count] = {int32_t(r),
                                          int32_t(first),
                                          int32_t(count),
                                          int32_t(h),
                                          int32_t(heads),
                                          larger(begin, start_of + p * PARTITION),
                                          p == splits - 1 ? end : next,
                                          int32_t(splits),
                                          int32_t(p),
                                          plan.partial_floats};
                    plan.count++;
                }
                if (splits > 1) plan.partial_floats += splits * state_floats(heads * count * group, a.dim);
            }
        }
    }
    return plan;
}

// Floats of one thread's scratch, and the scratch laid out in them.
INLINE int64_t scratch_rows(const Args &a) {
    return larger(MAX_ROWS, FEW * a.kv_heads);
}
INLINE int64_t scratch_floats(const Args &a) {
    const int64_t rows = scratch_rows(a);
    return rows * a.dim + 2 * state_floats(rows, a.dim) + MAX_ROWS + 2 * KEYS * a.dim + MAX_ROWS * KEYS;
}
INLINE Scratch lay_out(const Args &a, float *at) {
    const int64_t rows = scratch_rows(a);
    Scratch s;
    s.q = at, at += rows * a.dim;
    s.now = state_in(at, rows), at += state_floats(rows, a.dim);
    s.before = state_in(at, rows), at += state_floats(rows, a.dim);
    s.keys = at, at += KEYS * a.dim;
    s.values = at, at += KEYS * a.dim;
    s.scores = at, at += MAX_ROWS * KEYS;
    s.shrink = at;
    return s;
}

INLINE void copy_state(const State &to, const State &from, int64_t rows, int64_t dim) {
    memcpy(to.top, from.top, rows * sizeof(float));
    memcpy(to.total, from.total, rows * sizeof(float));
    memcpy(to.sum, from.sum, rows * dim * sizeof(float));
}

template <class T, class C>
int64_t run(const Args &a, T *out, const T *q, const C *pool, int64_t requests) {
    const int64_t group = a.heads / a.kv_heads, threads = omp_get_max_threads();
    const Plan size = plan(a, requests, group, threads, nullptr);
    if (size.count == 0) return 0;
    const int64_t floats = (scratch_floats(a) + 15) / 16 * 16;
    Unit *units = (Unit *)malloc(size.count * sizeof(Unit));
    float *partial = size.partial_floats ? (float *)malloc(size.partial_floats * sizeof(float)) : nullptr;
    float *scratch = (float *)aligned_alloc(64, threads * floats * sizeof(float));
    if (!units || !scratch || (size.partial_floats && !partial)) {
        free(units), free(partial), free(scratch);
        return 1;
    }
    plan(a, requests, group, threads, units);
    parallel(size.count, [&](int64_t i, int thread) {
        Scratch s = lay_out(a, scratch + thread * floats);
        const Unit &u = units[i];
        const int64_t rows = u.count * group, all = u.heads * rows;
        load_queries(a, q, u, s, rows, group);
        attend(a, pool, u, s, rows, group);
        if (u.splits == 1) write_out(a, out, u, s.before, rows, group);
        else copy_state(state_in(partial + u.partial + u.part * state_floats(all, a.dim), all), s.before, all, a.dim);
    });
    if (partial)
        parallel(size.count, [&](int64_t i, int) {
            const Unit &u = units[i];
            if (u.splits == 1 || u.part > 0) return;
            const int64_t rows = u.count * group, all = u.heads * rows, step = state_floats(all, a.dim);
            const State sum = state_in(partial + u.partial, all);
            for (int p = 1; p < u.splits; p++) fold_in(sum, state_in(partial + u.partial + p * step, all), all, a.dim);
            write_out(a, out, u, sum, rows, group);
        });
    free(units), free(partial), free(scratch);
    return 0;
}

}  // namespace

// Returns 0, 1 when memory is short, or 2 + r when request r's table names a block outside the pool.
EXPORT(paged_attention) {
    Arguments in = {arguments};
    void *out = in.pointer<void>();
    const void *q = in.pointer<const void>();
    const void *pool = in.pointer<const void>();
    const int32_t *tables = in.pointer<const int32_t>();
    const int32_t *starts = in.pointer<const int32_t>();
    const int32_t *lens = in.pointer<const int32_t>();
    const float *sinks = in.pointer<const float>();
    const int64_t requests = in.number();
    const int64_t heads = in.number();
    const int64_t kv_heads = in.number();
    const int64_t dim = in.number();
    const int64_t block_size = in.number();
    const int64_t blocks = in.number();
    const int64_t table_stride = in.number();
    const int64_t window = in.number();
    const int64_t q_token = in.number();
    const int64_t q_head = in.number();
    const int64_t out_token = in.number();
    const int64_t out_head = in.number();
    const int64_t block = in.number();
    const int64_t half = in.number();
    const int64_t token = in.number();
    const int64_t head = in.number();
    const float scale = in.real();
    const float cap = in.real();
    const int64_t dtype = in.number();
    const int64_t pool_dtype = in.number();
    const Args a = {tables, starts,    lens,     heads, kv_heads, dim,   block_size, table_stride, window, q_token,
                    q_head, out_token, out_head, block, half,     token, head,       scale,        cap,    sinks};
    for (int64_t r = 0; r < requests; r++) {
        if (starts[r + 1] == starts[r]) continue;
        for (int64_t b = 0; b * block_size < lens[r]; b++) {
            const int32_t id = tables[r * table_stride + b];
            if (id < 0 || id >= blocks) return 2 + r;
        }
    }
#define CASE(T, C) run(a, (T *)out, (const T *)q, (const C *)pool, requests)
    if (dtype == F32) return pool_dtype == F32 ? CASE(float, float) : CASE(float, bf16);
    return pool_dtype == F32 ? CASE(bf16, float) : CASE(bf16, bf16);
#undef CASE
}
