// Causal attention of a mixed batch over a paged pool: online softmax over tiles of keys (../README.md).
//
// Work unit: one request, one kv head, a tile of queries (all q heads of the group together, so that each key
// and value is read once for the group), one partition of the context. Partial results of partitions are
// merged at the end. Two forms of the tile: few query rows (decode) read keys and values in place; many rows
// (prefill) first lay the keys out as [D][KEYS] so that the scores are a plain matrix product.
#include "common.h"

namespace {

constexpr int KEYS = 64;         // keys of a tile
constexpr int ROW_TILE = 48;     // wanted query rows of a prefill unit
constexpr int FEW = 8;           // at most this many rows take the in-place form
constexpr int MAX_ROWS = 64;     // rows of a unit: ROW_TILE or one token's group
constexpr int MAX_DIM = 256;
constexpr int64_t SPLIT_MIN = 128;  // fewest keys worth a partition of their own
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
    float scale;
};

struct Unit {
    int32_t row, kv_head, first, count;  // queries [first, first + count) of the request's chunk
    int64_t begin, end;                  // keys
    int32_t splits, part;                // this is partition `part` of `splits`
    int64_t partial;                     // its place in the partial buffer, in query rows
};

struct Scratch {
    float q[MAX_ROWS * MAX_DIM], sum[MAX_ROWS * MAX_DIM];
    float keys[MAX_DIM * KEYS], values[KEYS * MAX_DIM];
    float scores[MAX_ROWS * KEYS];
    float top[MAX_ROWS], total[MAX_ROWS];
};

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// c[M][2 VW] = (c or 0) + a[M][depth] b[depth][2 VW]
template <int M>
INLINE void product_tile(float *c, int64_t c_step, bool resume, const float *a, int64_t a_step, const float *b,
                         int64_t b_step, int64_t depth) {
    vf lo[M], hi[M];
    for (int m = 0; m < M; m++) {
        lo[m] = resume ? load(c + m * c_step) : vf{};
        hi[m] = resume ? load(c + m * c_step + VW) : vf{};
    }
    for (int64_t k = 0; k < depth; k++) {
        const vf x = load(b + k * b_step), y = load(b + k * b_step + VW);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
            const float s = a[m * a_step + k];
            lo[m] += x * s;
            hi[m] += y * s;
        }
    }
    for (int m = 0; m < M; m++) {
        store(c + m * c_step, lo[m]);
        store(c + m * c_step + VW, hi[m]);
    }
}

// One column of width VW, for a width that is no multiple of 2 VW.
INLINE void product_column(float *c, int64_t c_step, bool resume, const float *a, int64_t a_step, const float *b,
                           int64_t b_step, int64_t rows, int64_t depth) {
    for (int64_t m = 0; m < rows; m++) {
        vf acc = resume ? load(c + m * c_step) : vf{};
        for (int64_t k = 0; k < depth; k++) acc += load(b + k * b_step) * a[m * a_step + k];
        store(c + m * c_step, acc);
    }
}

void product(float *c, int64_t c_step, bool resume, const float *a, int64_t a_step, const float *b, int64_t b_step,
             int64_t rows, int64_t columns, int64_t depth) {
    int64_t j = 0;
    for (; j + 2 * VW <= columns; j += 2 * VW) {
        int64_t m = 0;
        for (; m + MR <= rows; m += MR)
            product_tile<MR>(c + m * c_step + j, c_step, resume, a + m * a_step, a_step, b + j, b_step, depth);
        for (; m + 3 <= rows; m += 3)
            product_tile<3>(c + m * c_step + j, c_step, resume, a + m * a_step, a_step, b + j, b_step, depth);
        for (; m < rows; m++)
            product_tile<1>(c + m * c_step + j, c_step, resume, a + m * a_step, a_step, b + j, b_step, depth);
    }
    for (; j < columns; j += VW) product_column(c + j, c_step, resume, a, a_step, b + j, b_step, rows, depth);
}

// Fold a tile of scores into the running maximum and sum of one query row; scores become weights.
INLINE void softmax_row(float *scores, int64_t padded, float *top, float *total, float *sum, int64_t dim) {
    vf best = splat(LOWEST);
    for (int64_t k = 0; k < padded; k += VW) best = vmax(best, load(scores + k));
    const float peak = hmax(best);
    if (peak <= LOWEST) {  // nothing visible in this tile
        memset(scores, 0, padded * sizeof(float));
        return;
    }
    if (peak > *top) {
        const float shrink = expf(*top - peak);
        *total *= shrink;
        for (int64_t d = 0; d < dim; d += VW) store(sum + d, load(sum + d) * shrink);
        *top = peak;
    }
    vf added = {};
    for (int64_t k = 0; k < padded; k += VW) {
        const vf p = vexp(load(scores + k) - *top);
        store(scores + k, p);
        added += p;
    }
    *total += hsum(added);
}

// scores[m][k] = q[m] . key for M rows and one key read in place, D in steps of VW.
template <int M, class C>
INLINE void dots(float *scores, const float *q, const C *key, int64_t dim) {
    vf acc[M] = {};
    for (int64_t d = 0; d < dim; d += VW) {
        const vf x = load(key + d);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) acc[m] += x * load(q + m * dim + d);
    }
    for (int m = 0; m < M; m++) scores[m * KEYS] = hsum(acc[m]);
}

// sum[m] += weights[m][k] value[k], values read in place.
template <int M, class C>
INLINE void weigh(float *sum, const float *weights, const C *const *values, int64_t keys, int64_t dim) {
    int64_t d = 0;
    for (; d + 2 * VW <= dim; d += 2 * VW) {
        vf lo[M], hi[M];
        for (int m = 0; m < M; m++) lo[m] = load(sum + m * dim + d), hi[m] = load(sum + m * dim + d + VW);
        for (int64_t k = 0; k < keys; k++) {
            const vf x = load(values[k] + d), y = load(values[k] + d + VW);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                lo[m] += x * weights[m * KEYS + k];
                hi[m] += y * weights[m * KEYS + k];
            }
        }
        for (int m = 0; m < M; m++) store(sum + m * dim + d, lo[m]), store(sum + m * dim + d + VW, hi[m]);
    }
    for (; d < dim; d += VW)
        for (int m = 0; m < M; m++) {
            vf acc = load(sum + m * dim + d);
            for (int64_t k = 0; k < keys; k++) acc += load(values[k] + d) * weights[m * KEYS + k];
            store(sum + m * dim + d, acc);
        }
}

// FORM(M) for groups of at most 4 of the rows.
#define EACH_FEW(FORM)                     \
    int64_t m = 0;                         \
    for (; m + 4 <= rows; m += 4) FORM(4); \
    if (rows - m == 3) FORM(3);            \
    if (rows - m == 2) FORM(2);            \
    if (rows - m == 1) FORM(1);

template <class C>
void scores_in_place(Scratch &s, const C *const *keys, int64_t rows, int64_t count, int64_t dim) {
#define FORM(M) \
    for (int64_t k = 0; k < count; k++) dots<M>(s.scores + m * KEYS + k, s.q + m * dim, keys[k], dim)
    EACH_FEW(FORM)
#undef FORM
}

template <class C>
void sums_in_place(Scratch &s, const C *const *values, int64_t rows, int64_t count, int64_t dim) {
#define FORM(M) weigh<M>(s.sum + m * dim, s.scores + m * KEYS, values, count, dim)
    EACH_FEW(FORM)
#undef FORM
}

// keys [D][KEYS] in fp32, zero beyond `count`.
template <class C>
void transpose_keys(float *to, const C *const *keys, int64_t count, int64_t padded, int64_t dim) {
    for (int64_t k = 0; k < count; k++)
        for (int64_t d = 0; d < dim; d++) to[d * KEYS + k] = to_float(keys[k][d]);
    for (int64_t d = 0; d < dim; d++)
        for (int64_t k = count; k < padded; k++) to[d * KEYS + k] = 0.0f;
}

template <class C>
void attend(const Args &a, const C *pool, const Unit &u, Scratch &s, int64_t rows, int64_t group) {
    const int64_t dim = a.dim;
    const int64_t chunk_start = a.lens[u.row] - (a.starts[u.row + 1] - a.starts[u.row]);
    const bool few = rows <= FEW;
    const int32_t *table = a.tables + u.row * a.table_stride;
    const C *base = pool + u.kv_head * a.head;
    for (int64_t m = 0; m < rows; m++) s.top[m] = LOWEST, s.total[m] = 0.0f;
    memset(s.sum, 0, rows * dim * sizeof(float));

    for (int64_t first = u.begin; first < u.end; first += KEYS) {
        const int64_t count = smaller(KEYS, u.end - first);
        const int64_t padded = (count + 2 * VW - 1) / (2 * VW) * (2 * VW);
        const C *keys[KEYS], *values[KEYS];
        int64_t block = first / a.block_size, offset = first % a.block_size;
        for (int64_t k = 0; k < count;) {
            const C *at = base + int64_t(table[block]) * a.block + offset * a.token;
            for (; offset < a.block_size && k < count; offset++, k++, at += a.token) {
                keys[k] = at;
                values[k] = at + a.half;
            }
            block++;
            offset = 0;
        }
        if (few) {
            scores_in_place(s, keys, rows, count, dim);
        } else {
            transpose_keys(s.keys, keys, count, padded, dim);
            product(s.scores, KEYS, false, s.q, dim, s.keys, KEYS, rows, padded, dim);
        }
        for (int64_t m = 0; m < rows; m++) {
            float *row = s.scores + m * KEYS;
            const int64_t position = chunk_start + u.first + m / group;
            // Keys [from, to) of this tile are visible to the row; the rest weigh nothing.
            const int64_t to = smaller(count, larger(0, position + 1 - first));
            const int64_t from = a.window ? smaller(to, larger(0, position + 1 - a.window - first)) : 0;
            for (int64_t k = 0; k < from; k++) row[k] = -INFINITY;
            for (int64_t k = to; k < padded; k++) row[k] = -INFINITY;
            softmax_row(row, padded, s.top + m, s.total + m, s.sum + m * dim, dim);
        }
        if (few) {
            sums_in_place(s, values, rows, count, dim);
        } else {
            for (int64_t k = 0; k < count; k++)
                for (int64_t d = 0; d < dim; d += VW) store(s.values + k * dim + d, load(values[k] + d));
            product(s.sum, dim, true, s.scores, KEYS, s.values, dim, rows, dim, count);
        }
    }
}

template <class T>
void load_queries(const Args &a, const T *q, const Unit &u, Scratch &s, int64_t group) {
    for (int64_t t = 0; t < u.count; t++)
        for (int64_t g = 0; g < group; g++) {
            const T *from = q + (a.starts[u.row] + u.first + t) * a.q_token + (u.kv_head * group + g) * a.q_head;
            float *to = s.q + (t * group + g) * a.dim;
            for (int64_t d = 0; d < a.dim; d += VW) store(to + d, load(from + d) * a.scale);
        }
}

template <class T>
INLINE T *out_row(const Args &a, T *out, const Unit &u, int64_t m, int64_t group) {
    return out + (a.starts[u.row] + u.first + m / group) * a.out_token + (u.kv_head * group + m % group) * a.out_head;
}

// Partial buffer: per query row of a partition, top, total, then the unnormalised sum [D].
template <class T>
void merge(const Args &a, T *out, const Unit &u, const float *partial, int64_t group) {
    const int64_t rows = u.count * group, width = a.dim + 2;
    for (int64_t m = 0; m < rows; m++) {
        float top = LOWEST, total = 0.0f, sum[MAX_DIM] = {};
        for (int p = 0; p < u.splits; p++) top = fmaxf(top, partial[(u.partial + p * rows + m) * width]);
        for (int p = 0; p < u.splits; p++) {
            const float *from = partial + (u.partial + p * rows + m) * width;
            const float factor = expf(from[0] - top);
            total += from[1] * factor;
            for (int64_t d = 0; d < a.dim; d++) sum[d] += from[2 + d] * factor;
        }
        T *to = out_row(a, out, u, m, group);
        for (int64_t d = 0; d < a.dim; d++) put(to + d, sum[d] / total);
    }
}

struct Plan {
    Unit *units;
    int64_t count, partial_rows;
};

// Cut the batch into units; with `to` null only count them.
Plan plan(const Args &a, int64_t requests, int64_t group, int64_t threads, Unit *to) {
    const int64_t tokens_per_tile = larger(1, ROW_TILE / group);
    int64_t whole = 0;
    for (int64_t r = 0; r < requests; r++)
        whole += (a.starts[r + 1] - a.starts[r] + tokens_per_tile - 1) / tokens_per_tile * a.kv_heads;
    // With plenty of units every thread is busy anyway, and partitions only cost their merge.
    const int64_t wanted = whole >= 8 * threads || threads == 1 ? 1 : (8 * threads + whole - 1) / larger(1, whole);
    Plan plan = {to, 0, 0};
    for (int64_t r = 0; r < requests; r++) {
        const int64_t queries = a.starts[r + 1] - a.starts[r], start = a.lens[r] - queries;
        // Late tiles first: they see the longest context, and the short ones even out the end.
        for (int64_t tile = (queries + tokens_per_tile - 1) / tokens_per_tile - 1; tile >= 0; tile--) {
            const int64_t first = tile * tokens_per_tile, count = smaller(tokens_per_tile, queries - first);
            const int64_t begin = a.window ? larger(0, start + first + 1 - a.window) : 0, end = start + first + count;
            const int64_t splits = larger(1, smaller(wanted, (end - begin) / SPLIT_MIN));
            const int64_t size = (end - begin + splits - 1) / splits;
            for (int64_t h = 0; h < a.kv_heads; h++)
                for (int64_t p = 0; p < splits; p++) {
                    if (to)
                        to[plan.count] = {int32_t(r),
                                          int32_t(h),
                                          int32_t(first),
                                          int32_t(count),
                                          begin + p * size,
                                          smaller(begin + (p + 1) * size, end),
                                          int32_t(splits),
                                          int32_t(p),
                                          plan.partial_rows};
                    plan.count++;
                    if (p == splits - 1 && splits > 1) plan.partial_rows += splits * count * group;
                }
        }
    }
    return plan;
}

template <class T, class C>
int64_t run(const Args &a, T *out, const T *q, const C *pool, int64_t requests) {
    const int64_t group = a.heads / a.kv_heads, threads = omp_get_max_threads();
    const Plan size = plan(a, requests, group, threads, nullptr);
    if (size.count == 0) return 0;
    const int64_t width = a.dim + 2;
    Unit *units = (Unit *)malloc(size.count * sizeof(Unit));
    float *partial = size.partial_rows ? (float *)malloc(size.partial_rows * width * sizeof(float)) : nullptr;
    Scratch *scratch = (Scratch *)malloc(threads * sizeof(Scratch));
    if (!units || !scratch || (size.partial_rows && !partial)) {
        free(units), free(partial), free(scratch);
        return 1;
    }
    plan(a, requests, group, threads, units);
#pragma omp parallel num_threads(threads) if (size.count > 1)
    {
        Scratch &s = scratch[omp_get_thread_num()];
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < size.count; i++) {
            const Unit &u = units[i];
            const int64_t rows = u.count * group;
            load_queries(a, q, u, s, group);
            attend(a, pool, u, s, rows, group);
            for (int64_t m = 0; m < rows; m++) {
                if (u.splits == 1) {
                    T *to = out_row(a, out, u, m, group);
                    const float factor = 1.0f / s.total[m];
                    for (int64_t d = 0; d < a.dim; d += VW) store(to + d, load(s.sum + m * a.dim + d) * factor);
                } else {
                    float *to = partial + (u.partial + u.part * rows + m) * width;
                    to[0] = s.top[m];
                    to[1] = s.total[m];
                    memcpy(to + 2, s.sum + m * a.dim, a.dim * sizeof(float));
                }
            }
        }
        if (partial) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < size.count; i++)
                if (units[i].splits > 1 && units[i].part == 0) merge(a, out, units[i], partial, group);
        }
    }
    free(units), free(partial), free(scratch);
    return 0;
}

}  // namespace

// Returns 0, 1 when memory is short, or 2 + r when request r's table names a block outside the pool.
EXPORT(paged_attention)(void *out, const void *q, const void *pool, const int32_t *tables, const int32_t *starts,
                        const int32_t *lens, int64_t requests, int64_t heads, int64_t kv_heads, int64_t dim,
                        int64_t block_size, int64_t blocks, int64_t table_stride, int64_t window, int64_t q_token,
                        int64_t q_head, int64_t out_token, int64_t out_head, int64_t block, int64_t half,
                        int64_t token, int64_t head, double scale, int32_t dtype, int32_t pool_dtype) {
    const Args a = {tables, starts,   lens,   heads,     kv_heads, dim,   block_size, table_stride, window,
                    q_token, q_head, out_token, out_head, block,    half,  token,      head,         float(scale)};
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
