// Causal attention of a mixed batch over a paged pool: online softmax over tiles of keys (../README.md).
//
// Work unit: one request, one kv head, a tile of queries (all q heads of the group together, so that each key
// and value is read once for the group), one partition of the context. Partial results of partitions are
// merged at the end. Few query rows (decode) read keys and values in place. Many rows (prefill) compute the
// scores transposed, [keys][rows]: the queries are laid out as [D][rows] once, keys are broadcast, and the
// softmax and the weighted sum need no transposition and no horizontal operation.
#include "common.h"

namespace {

constexpr int KEYS = 64;         // keys of a tile
constexpr int ROW_TILE = 48;     // wanted query rows of a prefill unit
constexpr int FEW = 8;           // at most this many rows take the in-place form
constexpr int MAX_ROWS = 64;     // rows of a unit, padded: ROW_TILE or one token's group
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
    float q[MAX_ROWS * MAX_DIM];  // few: [rows][D]; many: [D][padded rows]
    float sum[MAX_ROWS * MAX_DIM];
    float keys[KEYS * MAX_DIM], values[KEYS * MAX_DIM];
    float scores[MAX_ROWS * KEYS];  // few: [rows][KEYS]; many: [KEYS][padded rows]
    float top[MAX_ROWS], total[MAX_ROWS], shrink[MAX_ROWS];
};

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// c[M][2 VW] = (c or 0) + a b, with a(m, k) = a[m * a_row + k * a_col] and b [depth][2 VW].
template <int M>
INLINE void product_tile(float *c, int64_t c_step, bool resume, const float *a, int64_t a_row, int64_t a_col,
                         const float *b, int64_t b_step, int64_t depth) {
    vf lo[M], hi[M];
    for (int m = 0; m < M; m++) {
        lo[m] = resume ? load(c + m * c_step) : vf{};
        hi[m] = resume ? load(c + m * c_step + VW) : vf{};
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

void product(float *c, int64_t c_step, bool resume, const float *a, int64_t a_row, int64_t a_col, const float *b,
             int64_t b_step, int64_t rows, int64_t columns, int64_t depth) {
    for (int64_t j = 0; j < columns; j += 2 * VW) {
        if (columns - j < 2 * VW) {  // one last column of VW
            for (int64_t m = 0; m < rows; m++) {
                vf acc = resume ? load(c + m * c_step + j) : vf{};
                for (int64_t k = 0; k < depth; k++) acc += load(b + k * b_step + j) * a[m * a_row + k * a_col];
                store(c + m * c_step + j, acc);
            }
            return;
        }
        int64_t m = 0;
#define TILES(M)                  \
    for (; m + M <= rows; m += M) \
    product_tile<M>(c + m * c_step + j, c_step, resume, a + m * a_row, a_row, a_col, b + j, b_step, depth)
        TILES(MR);
        TILES(4);
        TILES(1);
#undef TILES
    }
}

// Scores of M rows against four keys read in place, D in steps of VW.
template <int M, class C>
INLINE void dots(float *scores, const float *q, const C *const *keys, int64_t dim) {
    vf acc[M][4] = {};
    for (int64_t d = 0; d < dim; d += VW) {
        vf x[4];
        for (int k = 0; k < 4; k++) x[k] = load(keys[k] + d);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
            const vf y = load(q + m * dim + d);
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) acc[m][k] += x[k] * y;
        }
    }
    for (int m = 0; m < M; m++) {
        const v4 four = hsum4(acc[m][0], acc[m][1], acc[m][2], acc[m][3]);
        memcpy(scores + m * KEYS, &four, sizeof four);
    }
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

constexpr int STEP = VW == 16 ? 4 : 3;  // rows of the in-place forms: what the register file holds

// FORM(M) for groups of at most STEP of the rows.
#define EACH_FEW(FORM)                              \
    int64_t m = 0;                                  \
    for (; m + STEP <= rows; m += STEP) FORM(STEP); \
    if (rows - m == 3) FORM(3);                     \
    if (rows - m == 2) FORM(2);                     \
    if (rows - m == 1) FORM(1);

// Fold one tile into the running maximum, sum and weighted sum of a few query rows.
template <class C>
void few_rows(const Args &a, Scratch &s, const C *const *keys, const C *const *values, int64_t count, int64_t rows,
              int64_t first, int64_t position, int64_t group) {
    const int64_t dim = a.dim, padded = (count + VW - 1) / VW * VW;
    {
        // A last group of four repeats its final key; the surplus scores are masked below.
        const int64_t whole = (count + 3) / 4 * 4;
#define FORM(M)                          \
    for (int64_t k = 0; k < whole; k += 4) \
    dots<M>(s.scores + m * KEYS + k, s.q + m * dim, keys + k, dim)
        EACH_FEW(FORM)
#undef FORM
    }
    for (int64_t m = 0; m < rows; m++) {
        float *row = s.scores + m * KEYS;
        const int64_t last = position + m / group;
        // Keys [from, to) of this tile are visible to the row; the rest weigh nothing.
        const int64_t to = smaller(count, larger(0, last + 1 - first));
        const int64_t from = a.window ? smaller(to, larger(0, last + 1 - a.window - first)) : 0;
        for (int64_t k = 0; k < from; k++) row[k] = -INFINITY;
        for (int64_t k = to; k < padded; k++) row[k] = -INFINITY;
        vf best = splat(s.top[m]);
        for (int64_t k = 0; k < padded; k += VW) best = vmax(best, load(row + k));
        const float peak = hmax(best);
        if (peak > s.top[m]) {
            const float shrink = expf(s.top[m] - peak);
            s.total[m] *= shrink;
            for (int64_t d = 0; d < dim; d += VW) store(s.sum + m * dim + d, load(s.sum + m * dim + d) * shrink);
            s.top[m] = peak;
        }
        vf added = {};
        for (int64_t k = 0; k < padded; k += VW) {
            const vf p = vexp(load(row + k) - peak);
            store(row + k, p);
            added += p;
        }
        s.total[m] += hsum(added);
    }
    int64_t d = 0;
#define FORM(M) weigh<M, 4>(s.sum + m * dim + d, s.scores + m * KEYS, values, d, count, dim)
    for (; d + 4 * VW <= dim; d += 4 * VW) {
        EACH_FEW(FORM)
    }
#undef FORM
#define FORM(M) weigh<M, 1>(s.sum + m * dim + d, s.scores + m * KEYS, values, d, count, dim)
    for (; d < dim; d += VW) {
        EACH_FEW(FORM)
    }
#undef FORM
}

// The tile's keys or values as fp32 [count][D].
template <class C>
INLINE void widen(float *to, const C *const *from, int64_t count, int64_t dim) {
    for (int64_t k = 0; k < count; k++)
        for (int64_t d = 0; d < dim; d += VW) store(to + k * dim + d, load(from[k] + d));
}

// As few_rows, with scores [keys][padded rows].
template <class C>
void many_rows(const Args &a, Scratch &s, const C *const *keys, const C *const *values, int64_t count, int64_t rows,
               int64_t padded, int64_t first, int64_t position, int64_t group) {
    const int64_t dim = a.dim;
    widen(s.keys, keys, count, dim);
    product(s.scores, padded, false, s.keys, dim, 1, s.q, padded, count, padded, dim);
    for (int64_t k = 0; k < count; k++) {
        // Key first + k is visible to the query rows [from, to).
        const int64_t from = smaller(padded, larger(0, first + k - position) * group);
        const int64_t to = a.window ? smaller(padded, larger(0, first + k - position + a.window) * group) : padded;
        for (int64_t m = 0; m < from; m++) s.scores[k * padded + m] = -INFINITY;
        for (int64_t m = larger(from, to); m < padded; m++) s.scores[k * padded + m] = -INFINITY;
    }
    for (int64_t m = 0; m < padded; m += VW) {
        const vf old = load(s.top + m);
        vf peak = old, added = {};
        for (int64_t k = 0; k < count; k++) peak = vmax(peak, load(s.scores + k * padded + m));
        for (int64_t k = 0; k < count; k++) {
            const vf p = vexp(load(s.scores + k * padded + m) - peak);
            store(s.scores + k * padded + m, p);
            added += p;
        }
        const vf shrink = vexp(old - peak);
        store(s.total + m, load(s.total + m) * shrink + added);
        store(s.top + m, peak);
        store(s.shrink + m, shrink);
    }
    for (int64_t m = 0; m < rows; m++) {
        if (s.shrink[m] == 1.0f) continue;
        for (int64_t d = 0; d < dim; d += VW) store(s.sum + m * dim + d, load(s.sum + m * dim + d) * s.shrink[m]);
    }
    widen(s.values, values, count, dim);
    product(s.sum, dim, true, s.scores, 1, padded, s.values, dim, rows, dim, count);
}

INLINE int64_t padded_rows(int64_t rows) { return (rows + 2 * VW - 1) / (2 * VW) * (2 * VW); }

template <class C>
void attend(const Args &a, const C *pool, const Unit &u, Scratch &s, int64_t rows, int64_t group) {
    const int64_t position = a.lens[u.row] - (a.starts[u.row + 1] - a.starts[u.row]) + u.first;
    const int64_t padded = padded_rows(rows);
    const int32_t *table = a.tables + u.row * a.table_stride;
    const C *base = pool + u.kv_head * a.head;
    for (int64_t m = 0; m < padded; m++) s.top[m] = LOWEST, s.total[m] = 0.0f;
    memset(s.sum, 0, rows * a.dim * sizeof(float));
    for (int64_t first = u.begin; first < u.end; first += KEYS) {
        const int64_t count = smaller(KEYS, u.end - first);
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
        for (int64_t k = count; k % 4; k++) keys[k] = keys[count - 1];
        if (rows <= FEW) few_rows(a, s, keys, values, count, rows, first, position, group);
        else many_rows(a, s, keys, values, count, rows, padded, first, position, group);
    }
}

template <class T>
void load_queries(const Args &a, const T *q, const Unit &u, Scratch &s, int64_t rows, int64_t group) {
    const int64_t padded = padded_rows(rows);
    if (rows > FEW) memset(s.q, 0, a.dim * padded * sizeof(float));
    for (int64_t m = 0; m < rows; m++) {
        const T *from = q + (a.starts[u.row] + u.first + m / group) * a.q_token +
                        (u.kv_head * group + m % group) * a.q_head;
        if (rows <= FEW)
            for (int64_t d = 0; d < a.dim; d += VW) store(s.q + m * a.dim + d, load(from + d) * a.scale);
        else
            for (int64_t d = 0; d < a.dim; d++) s.q[d * padded + m] = to_float(from[d]) * a.scale;
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
            load_queries(a, q, u, s, rows, group);
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
