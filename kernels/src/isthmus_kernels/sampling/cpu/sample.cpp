// One pass over the batch, a thread per row (greedy: per piece of a row). Filters need no sort: the k-th largest logit and the smallest
// logit inside the top-p mass are found by descending a histogram of the bits of the float (11 + 11 + 10).
// Noise is the counter-based Gumbel of ../noise.py; a token that cannot win is
// passed over before any logarithm.
#include "common.h"

namespace {

// -log(u) of the largest u that the noise draws from, and a margin for the rounding of fp32 logits.
constexpr float LEAST = 0x1p-24f, MARGIN = 1.001f;

INLINE uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}
constexpr uint64_t GOLDEN = 0x9e3779b97f4a7c15ull;

INLINE float uniform(uint64_t key, int64_t token) {
    return (float(mix64(key + uint64_t(token + 1) * GOLDEN) >> 41) + 0.5f) * 0x1p-23f;
}

// Unsigned integers in the order of the floats.
INLINE uint32_t ordered(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
INLINE float unordered(uint32_t u) {
    u = u & 0x80000000u ? u & 0x7fffffffu : ~u;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

// The largest value t of z, among those >= floor, such that the weight of all values >= t reaches `goal`
// (or the smallest such value when it never does). Weights: 1 each, or `mass`.
float cut(const float *z, const float *mass, int64_t count, float floor, double goal) {
    static const int SHIFT[3] = {21, 10, 0};
    static const uint32_t BINS[3] = {2048, 2048, 1024};
    double above = 0;
    uint32_t prefix = 0, mask = 0;
    for (int level = 0; level < 3; level++) {
        double bins[2048] = {};
        for (int64_t i = 0; i < count; i++) {
            const uint32_t u = ordered(z[i]);
            if (z[i] >= floor && (u & mask) == prefix)
                bins[(u >> SHIFT[level]) & (BINS[level] - 1)] += mass ? mass[i] : 1.0;
        }
        int64_t bin = BINS[level] - 1, lowest = -1;
        for (; bin >= 0; bin--) {
            if (bins[bin] == 0.0) continue;
            lowest = bin;
            if (above + bins[bin] >= goal) break;
            above += bins[bin];
        }
        if (bin < 0) {  // the goal is not reached: take the lowest value there is
            if (lowest < 0) return floor;
            bin = lowest;
            above -= bins[bin];
        }
        prefix |= uint32_t(bin) << SHIFT[level];
        mask |= (BINS[level] - 1) << SHIFT[level];
    }
    return unordered(prefix);
}

struct Best {
    float logit;
    int64_t token;  // -1: there is no number among them
};

// The largest of the logits [begin, end), the first of equal ones.
template <class T>
INLINE Best first_best(const T *logits, int64_t begin, int64_t end) {
    vf lanes = splat(-INFINITY);
    int64_t i = begin;
    for (; i + VW <= end; i += VW) lanes = vmax(load(logits + i), lanes);
    float best = hmax(lanes);
    for (; i < end; i++) {
        const float logit = to_float(logits[i]);
        best = logit > best ? logit : best;
    }
    for (i = begin; i < end; i++)
        if (to_float(logits[i]) == best) return {best, i};
    return {best, -1};
}

// Logits of one task: a greedy draw of few rows from a large vocabulary has work for every thread.
constexpr int64_t PIECE = 16384;

// Returns 0, or 1 when memory is short.
template <class T>
int64_t greedy(int64_t *out, const T *logits, int64_t rows, int64_t vocab, int64_t row_stride) {
    const int64_t pieces = (vocab + PIECE - 1) / PIECE;
    Best *found = (Best *)malloc(size_t(rows * pieces) * sizeof(Best));
    if (!found) return 1;
    parallel(rows * pieces, [&](int64_t i, int) {
        const int64_t begin = i % pieces * PIECE, end = begin + PIECE < vocab ? begin + PIECE : vocab;
        found[i] = first_best(logits + i / pieces * row_stride, begin, end);
    });
    for (int64_t b = 0; b < rows; b++) {
        Best best = {-INFINITY, -1};
        for (const Best *one = found + b * pieces; one < found + (b + 1) * pieces; one++)
            if (one->token >= 0 && (best.token < 0 || one->logit > best.logit)) best = *one;
        out[b] = best.token < 0 ? 0 : best.token;
    }
    free(found);
    return 0;
}

struct Row {
    float temperature, top_p, min_p;
    int64_t top_k;
    uint64_t key;
};

// `z` and `mass` have room for vocab + VW values.
template <class T>
int64_t choose(const T *logits, int64_t vocab, const Row &r, float *z, float *mass) {
    const int64_t best_token = first_best(logits, 0, vocab).token, peak_token = best_token < 0 ? 0 : best_token;
    if (r.temperature == 0.0f) return peak_token;
    for (int64_t i = 0; i < vocab; i++) z[i] = to_float(logits[i]) / r.temperature;
    for (int64_t i = vocab; i < vocab + VW; i++) z[i] = -INFINITY;
    const float peak = z[peak_token];
    // So cold that scores overflow: all but the largest logit are out of reach of any noise.
    if (!isfinite(peak)) return peak_token;
    float floor = -3.4028235e38f;  // all finite logits
    if (r.min_p > 0.0f) floor = fmaxf(floor, peak + logf(r.min_p));
    if (r.top_k > 0 && r.top_k < vocab) floor = fmaxf(floor, cut(z, nullptr, vocab, floor, double(r.top_k)));
    double total = 0;
    for (int64_t i = 0; i < vocab; i += VW) {
        const vf x = load(z + i);
        const vf m = select(x >= splat(floor), vexp(x - peak), vf{});
        store(mass + i, m);
        total += hsum(m);
    }
    if (r.top_p < 1.0f) floor = fmaxf(floor, cut(z, mass, vocab, floor, fmax(double(r.top_p), 1e-30) * total));
    // With E = -log(u), token i beats the best so far when E_i / mass_i < E_best / mass_best. As E >= 1 - u, most
    // tokens are ruled out before any logarithm.
    int64_t choice = peak_token;
    float spread = -logf(uniform(r.key, peak_token)), best = peak - logf(spread);
    for (int64_t i = 0; i < vocab; i++) {
        const float limit = mass[i] * spread * MARGIN;
        if (limit < LEAST || z[i] < floor || i == peak_token) continue;
        const float u = uniform(r.key, i);
        if (1.0f - u > limit) continue;
        const float exponential = -logf(u), noisy = z[i] - logf(exponential);
        if (noisy > best || (noisy == best && i < choice)) {
            best = noisy, choice = i;
            spread = exponential / mass[i];
        }
    }
    return choice;
}

// Null pointers stand for filters that are off.
struct Filters {
    const float *temperature;
    const int32_t *top_k;
    const float *top_p, *min_p;
    const int64_t *seeds, *positions;
};

// Returns 0, or 1 when memory is short.
template <class T>
int64_t run(int64_t *out, const T *logits, const Filters &f, int64_t rows, int64_t vocab, int64_t row_stride) {
    if (!f.temperature) return greedy(out, logits, rows, vocab, row_stride);
    float *scratch = (float *)malloc(omp_get_max_threads() * 2 * (vocab + VW) * sizeof(float));
    if (!scratch) return 1;
    parallel(rows, [&](int64_t b, int thread) {
        float *own = scratch + thread * 2 * (vocab + VW);
        const Row r = {f.temperature[b], f.top_p ? f.top_p[b] : 1.0f, f.min_p ? f.min_p[b] : 0.0f,
                       f.top_k ? f.top_k[b] : 0,
                       mix64(uint64_t(f.seeds[b]) + uint64_t(f.positions[b] + 1) * GOLDEN)};
        out[b] = choose(logits + b * row_stride, vocab, r, own, own + vocab + VW);
    });
    free(scratch);
    return 0;
}

}  // namespace

EXPORT(sample) {
    Arguments in = {arguments};
    int64_t *out = in.pointer<int64_t>();
    const void *logits = in.pointer<const void>();
    const float *temperature = in.pointer<const float>();
    const int32_t *top_k = in.pointer<const int32_t>();
    const float *top_p = in.pointer<const float>();
    const float *min_p = in.pointer<const float>();
    const int64_t *seeds = in.pointer<const int64_t>();
    const int64_t *positions = in.pointer<const int64_t>();
    const int64_t rows = in.number();
    const int64_t vocab = in.number();
    const int64_t row_stride = in.number();
    const int64_t dtype = in.number();
    const Filters filters = {temperature, top_k, top_p, min_p, seeds, positions};
    if (dtype == F32) return run(out, (const float *)logits, filters, rows, vocab, row_stride);
    return run(out, (const bf16 *)logits, filters, rows, vocab, row_stride);
}
