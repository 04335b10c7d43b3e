// Causal attention of a mixed batch over a paged pool: online softmax over tiles of keys (../README.md).
//
// Work unit: one request, a tile of queries (all q heads of a kv head together, so that each key and value is
// read once for the group) and its context, or one partition of it. Few query rows (decode) take all kv heads in one
// unit, or where units are few a thread's share of them, and read keys and values in place, which walks the pool in long
// runs. Many rows (prefill) take one kv head and
// compute the scores transposed, [keys][rows]: the queries are laid out as [D][rows] once, keys are broadcast, and the
// softmax and the weighted sum need no transposition and no horizontal operation.
//
// A query's result is the same bits in either form, in any batch and any chunk. Tiles and partitions begin at multiples
// of their size in the context, not in the chunk; both forms add in the same order (the scores as a register of partial
// sums along D that is folded by halves, so do the totals of a tile; the weighted sums key by key); keys that a query
// does not see weigh exactly nothing; partitions are folded from the first to the last, by whoever computed them.
#include "../tiles.h"

namespace {

struct Unit {
    int32_t row, first, count;  // queries [first, first + count) of the request's chunk
    int32_t head, heads;        // kv heads [head, head + heads)
    int64_t begin, end;         // keys
    int32_t splits, part;       // this is partition `part` of `splits`
    int64_t partial;            // its place in the partial buffer, in floats
};

INLINE int64_t padded_rows(int64_t rows) {
    return (rows + 2 * VW - 1) / (2 * VW) * (2 * VW);
}

INLINE State state_at(const State &s, int64_t row, int64_t dim) {
    return {s.top + row, s.total + row, s.sum + row * dim};
}

// Leaves the softmax over the unit's keys in `before`.
template <class C>
void attend(const Args &a, const C *pool, const Unit &u, Scratch &s, int64_t rows, int64_t group) {
    const int64_t position = a.lens[u.row] - (a.starts[u.row + 1] - a.starts[u.row]) + u.first;
    const int64_t padded = padded_rows(rows), all = u.heads * rows;
    const int32_t *table = a.tables + u.row * a.table_stride;
    const bool few = in_place(a, rows);
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
        if (!few) many_rows(a, s, tiles[i], u.head, rows, padded, position, group);
        for (int64_t h = 0; few && h < u.heads; h++) {
            const bool last = h == u.heads - 1;
            const Tile<C> *next = !last ? &tiles[i] : more ? &tiles[i ^ 1] : nullptr;
            Scratch own = s;
            own.q += h * rows * a.dim;
            own.now = state_at(s.now, h * rows, a.dim);
            few_rows(a, own, tiles[i], u.head + h, next, u.head + (last ? 0 : h + 1), rows, position, group);
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

// Channel d of row m to to[d * padded + m].
template <class T>
INLINE void put_column(float *to, int64_t padded, const T *from, int64_t first, int64_t end, float scale) {
    for (int64_t d = first; d < end; d++) to[d * padded] = to_float(from[d]) * scale;
}

template <class T>
void load_queries(const Args &a, const T *q, const Unit &u, const Scratch &s, int64_t rows, int64_t group) {
    if (in_place(a, rows)) {
        for (int64_t h = 0; h < u.heads; h++)
            for (int64_t m = 0; m < rows; m++) {
                const T *from = query_row(a, q, a.q_token, a.q_head, u, h, m, group);
                float *to = s.q + (h * rows + m) * a.dim;
                for (int64_t d = 0; d < a.dim; d += VW) store(to + d, load(from + d) * a.scale);
            }
        return;
    }
    // Of one kv head. What is beyond the rows and the channels must be numbers, and is multiplied with nothing.
    const int64_t padded = padded_rows(rows), whole = a.real / VW * VW;
    memset(s.q, 0, a.dim * padded * sizeof(float));
    int64_t m = 0;
    for (; m + 4 <= rows; m += 4) {
        const T *from[4];
        for (int i = 0; i < 4; i++) from[i] = query_row(a, q, a.q_token, a.q_head, u, 0, m + i, group);
        for (int64_t d = 0; d < whole; d += VW) {
            float row[4][VW];
            for (int i = 0; i < 4; i++) store(row[i], load(from[i] + d) * a.scale);
            for (int j = 0; j < VW; j += 4) {
                v4 x[4];
                for (int i = 0; i < 4; i++) memcpy(&x[i], row[i] + j, sizeof x[i]);
                transpose(x);
                for (int i = 0; i < 4; i++) memcpy(s.q + (d + j + i) * padded + m, &x[i], sizeof x[i]);
            }
        }
        for (int i = 0; i < 4; i++) put_column(s.q + m + i, padded, from[i], whole, a.real, a.scale);
    }
    for (; m < rows; m++)
        put_column(s.q + m, padded, query_row(a, q, a.q_token, a.q_head, u, 0, m, group), 0, a.real, a.scale);
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
            const int64_t whole = a.real / VW * VW;
            for (int64_t d = 0; d < whole; d += VW) store(to + d, load(sum + d) * factor);
            for (int64_t d = whole; d < a.real; d++) put(to + d, sum[d] * factor);
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
        whole += in_place(a, queries * group) ? queries > 0 : (queries + tokens_per_tile - 1) / tokens_per_tile * a.kv_heads;
    }
    // With plenty of units every thread is busy anyway. The bits are the same either way.
    const bool split = threads > 1 && whole < 8 * threads;
    // A short context is one partition or two of unlike length: its heads are shared out as well.
    const int64_t parts = split ? smaller(threads, a.kv_heads) : 1;
    Plan plan = {to, 0, 0};
    for (int64_t r = 0; r < requests; r++) {
        const int64_t queries = a.starts[r + 1] - a.starts[r], start = a.lens[r] - queries;
        // Late tiles first: they see the longest context, and the short ones even out the end.
        for (int64_t tile = (queries + tokens_per_tile - 1) / tokens_per_tile - 1; tile >= 0; tile--) {
            const int64_t first = tile * tokens_per_tile, count = smaller(tokens_per_tile, queries - first);
            const int64_t begin = a.window ? larger(0, start + first + 1 - a.window) : 0, end = start + first + count;
            const int64_t start_of = begin / PARTITION * PARTITION;
            const int64_t splits = split ? (end - start_of + PARTITION - 1) / PARTITION : 1;
            const int64_t most = !in_place(a, count * group) ? 1 : (a.kv_heads + parts - 1) / parts;
            for (int64_t h = 0; h < a.kv_heads; h += most) {
                const int64_t heads = smaller(most, a.kv_heads - h);
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
    const int64_t real = in.number();
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
    const float *scales = in.pointer<const float>();
    const int64_t scale_block = in.number();
    const int64_t scale_half = in.number();
    const int64_t scale_token = in.number();
    const int64_t scale_head = in.number();
    const float scale = in.real();
    const float cap = in.real();
    const int64_t dtype = in.number();
    const int64_t pool_dtype = in.number();
    const int64_t dim = (real + VW - 1) / VW * VW;
    const Args a = {tables, starts, lens,      heads,    kv_heads, dim,  real,  block_size, table_stride, window, q_token,
                    q_head, out_token, out_head, block,    half, token, head,       scale,        cap,    sinks,
                    scales, scale_block, scale_half, scale_token, scale_head};
    for (int64_t r = 0; r < requests; r++) {
        if (starts[r + 1] == starts[r]) continue;
        for (int64_t b = 0; b * block_size < lens[r]; b++) {
            const int32_t id = tables[r * table_stride + b];
            if (id < 0 || id >= blocks) return 2 + r;
        }
    }
#define CASE(T, C) run(a, (T *)out, (const T *)q, (const C *)pool, requests)
#define BY_POOL(T) pool_dtype == F32 ? CASE(T, float) : pool_dtype == BF16 ? CASE(T, bf16) : CASE(T, fp8)
    return dtype == F32 ? (BY_POOL(float)) : (BY_POOL(bf16));
#undef BY_POOL
#undef CASE
}
