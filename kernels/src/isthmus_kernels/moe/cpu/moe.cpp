// Mixture of experts: the choice of experts, and their gated MLPs on the tokens that chose them (README.md).
//
// A pair is one token with one of its experts. Pairs are sorted by expert; each expert's weights are read once, a block
// of channels by one thread. A product is a register of partial sums along the row that is folded in the end, and a
// token's experts are added in the order of its choice: a token's result is the same bits alone and in any batch.
#include "common.h"

namespace {

constexpr int N = 4;                     // channels of a register tile
constexpr int M = VW == 16 ? 4 : 2;      // pairs of one
constexpr int64_t BLOCK = 32;            // channels of a task

INLINE int64_t padded(int64_t count) {
    return (count + VW - 1) / VW * VW;
}

INLINE float at(const void *values, int64_t index, int64_t dtype) {
    return dtype == F32 ? ((const float *)values)[index] : to_float(((const bf16 *)values)[index]);
}

template <class W>
INLINE vf load_some(const W *p, int64_t count) {
    float lanes[VW] = {};
    for (int64_t i = 0; i < count; i++) lanes[i] = to_float(p[i]);
    return load(lanes);
}

// Products of `R` rows, which end in zeros, with N channels of `k` values.
template <int R, class W>
INLINE void dots(float (&sum)[R][N], const float *const *rows, const W *const *channels, int64_t k) {
    vf total[R][N] = {};
    for (int64_t d = 0; d < k; d += VW) {
        vf w[N];
        for (int n = 0; n < N; n++) w[n] = d + VW <= k ? load(channels[n] + d) : load_some(channels[n] + d, k - d);
        for (int r = 0; r < R; r++) {
            const vf x = load(rows[r] + d);
            for (int n = 0; n < N; n++) total[r][n] += x * w[n];
        }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) sum[r][n] = hsum(total[r][n]);
}

struct Sizes {
    int64_t tokens, top_k, hidden, inner, experts;
    int64_t gate_up_step, down_step;  // from one expert to the next
    bool clamped;
    float alpha, most;
};

// Pairs by expert: `order` holds pairs, `place` where each of them is in it, `starts` where an expert's begin.
struct Pairs {
    int64_t *order, *place, *starts, *busy;
    int64_t busy_count;
};

bool arrange(Pairs &p, const int32_t *experts, const Sizes &s) {
    const int64_t count = s.tokens * s.top_k;
    memset(p.starts, 0, (s.experts + 1) * sizeof(int64_t));
    for (int64_t i = 0; i < count; i++) {
        if (experts[i] < 0 || experts[i] >= s.experts) return false;
        p.starts[experts[i] + 1]++;
    }
    p.busy_count = 0;
    for (int64_t e = 0; e < s.experts; e++) {
        if (p.starts[e + 1]) p.busy[p.busy_count++] = e;
        p.starts[e + 1] += p.starts[e];
    }
    for (int64_t i = 0; i < count; i++) p.order[p.place[i] = p.starts[experts[i]]++] = i;
    for (int64_t e = s.experts; e > 0; e--) p.starts[e] = p.starts[e - 1];
    p.starts[0] = 0;
    return true;
}

INLINE float gated(float gate, float up, const Sizes &s) {
    if (!s.clamped) return gate / (1.0f + expf(-gate)) * up;
    gate = gate > s.most ? s.most : gate;
    up = up > s.most ? s.most : up < -s.most ? -s.most : up;
    return gate / (1.0f + expf(-s.alpha * gate)) * (up + 1.0f);
}

INLINE float rounded(float x, const float *) {
    return x;
}
INLINE float rounded(float x, const bf16 *) {
    bf16 narrow;
    put(&narrow, x);
    return to_float(narrow);
}

// Call f(expert, its first pair, its last, first channel, last channel) for blocks of the channels of all that are busy.
template <class F>
void each_block(const Pairs &p, int64_t channels, const F &f) {
    const int64_t blocks = (channels + BLOCK - 1) / BLOCK;
    parallel(p.busy_count * blocks, [&](int64_t task, int) {
        const int64_t e = p.busy[task / blocks], first = task % blocks * BLOCK;
        f(e, p.starts[e], p.starts[e + 1], first, first + BLOCK < channels ? first + BLOCK : channels);
    });
}

// f(pair's place, sums) for the pairs [begin, end), whose rows `row` gives.
template <class W, class Row, class F>
INLINE void each_pair(int64_t begin, int64_t end, const W *const *channels, int64_t k, const Row &row, const F &f) {
    int64_t i = begin;
    for (; i + M <= end; i += M) {
        const float *rows[M];
        float sum[M][N];
        for (int m = 0; m < M; m++) rows[m] = row(i + m);
        dots<M>(sum, rows, channels, k);
        for (int m = 0; m < M; m++) f(i + m, sum[m]);
    }
    for (; i < end; i++) {
        const float *rows[1] = {row(i)};
        float sum[1][N];
        dots<1>(sum, rows, channels, k);
        f(i, sum[0]);
    }
}

// Returns 0, 1 when memory is short, or 2 when an id is none of the experts.
template <class T>
int64_t run(T *out, const T *x, const float *weights, const int32_t *experts, const T *gate_up, const T *down,
            const void *gate_up_bias, const void *down_bias, int64_t bias_dtype, int64_t out_step, const Sizes &s) {
    const int64_t count = s.tokens * s.top_k, wide = padded(s.hidden), deep = padded(s.inner);
    int64_t *numbers = (int64_t *)malloc((2 * count + 2 * s.experts + 1) * sizeof(int64_t));
    float *floats = (float *)calloc(s.tokens * wide + count * (deep + s.hidden), sizeof(float));
    if (!numbers || !floats) {
        free(numbers), free(floats);
        return 1;
    }
    Pairs p = {numbers, numbers + count, numbers + 2 * count, numbers + 2 * count + s.experts + 1, 0};
    if (!arrange(p, experts, s)) {
        free(numbers), free(floats);
        return 2;
    }
    float *rows = floats, *inner = rows + s.tokens * wide, *results = inner + count * deep;
    parallel_ranges(s.tokens, s.tokens * s.hidden, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++)
            for (int64_t h = 0; h < s.hidden; h++) rows[t * wide + h] = to_float(x[t * s.hidden + h]);
    });
    each_block(p, s.inner, [&](int64_t e, int64_t begin, int64_t end, int64_t first, int64_t last) {
        const T *own = gate_up + e * s.gate_up_step;
        for (int64_t i = first; i < last; i += 2) {
            const int64_t next = i + 1 < last ? i + 1 : i;
            const T *channels[N] = {own + i * s.hidden, own + next * s.hidden, own + (s.inner + i) * s.hidden,
                                    own + (s.inner + next) * s.hidden};
            float bias[N] = {};
            if (gate_up_bias) {
                const int64_t of = e * 2 * s.inner;
                bias[0] = at(gate_up_bias, of + i, bias_dtype);
                bias[1] = at(gate_up_bias, of + next, bias_dtype);
                bias[2] = at(gate_up_bias, of + s.inner + i, bias_dtype);
                bias[3] = at(gate_up_bias, of + s.inner + next, bias_dtype);
            }
            each_pair(
                begin, end, channels, s.hidden, [&](int64_t place) { return rows + p.order[place] / s.top_k * wide; },
                [&](int64_t place, const float *sum) {
                    float *to = inner + place * deep;
                    to[i] = rounded(gated(sum[0] + bias[0], sum[2] + bias[2], s), x);
                    to[next] = rounded(gated(sum[1] + bias[1], sum[3] + bias[3], s), x);
                });
        }
    });
    each_block(p, s.hidden, [&](int64_t e, int64_t begin, int64_t end, int64_t first, int64_t last) {
        const T *own = down + e * s.down_step;
        for (int64_t h = first; h < last; h += N) {
            const T *channels[N];
            float bias[N] = {};
            for (int n = 0; n < N; n++) {
                const int64_t channel = h + n < last ? h + n : last - 1;
                channels[n] = own + channel * s.inner;
                if (down_bias) bias[n] = at(down_bias, e * s.hidden + channel, bias_dtype);
            }
            each_pair(
                begin, end, channels, s.inner, [&](int64_t place) { return inner + place * deep; },
                [&](int64_t place, const float *sum) {
                    for (int n = 0; n < N && h + n < last; n++) results[place * s.hidden + h + n] = sum[n] + bias[n];
                });
        }
    });
    parallel_ranges(s.tokens, count * s.hidden, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++)
            for (int64_t h = 0; h < s.hidden; h++) {
                float sum = 0.0f;
                for (int64_t j = t * s.top_k; j < (t + 1) * s.top_k; j++)
                    sum += weights[j] * results[p.place[j] * s.hidden + h];
                put(out + t * out_step + h, sum);
            }
    });
    free(numbers), free(floats);
    return 0;
}

INLINE void softmax(float *x, int64_t count) {
    float top = -INFINITY, total = 0.0f;
    for (int64_t e = 0; e < count; e++) top = x[e] > top ? x[e] : top;
    for (int64_t e = 0; e < count; e++) total += x[e] = expf(x[e] - top);
    for (int64_t e = 0; e < count; e++) x[e] /= total;
}

// The first of the best, which is then none any more.
INLINE int64_t take_best(float *x, int64_t count) {
    int64_t best = 0;
    for (int64_t e = 1; e < count; e++)
        if (!(x[e] <= x[best])) best = e;
    x[best] = -INFINITY;
    return best;
}

// Leaves experts of the `kept` groups of `size` neighbours that are worth most: as much as their best, or their best two.
void keep_groups(float *choice, float *worth, int64_t size, int64_t groups, int64_t kept, bool two) {
    for (int64_t g = 0; g < groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int64_t e = g * size; e < (g + 1) * size; e++) {
            if (choice[e] > first) second = first, first = choice[e];
            else if (choice[e] > second) second = choice[e];
        }
        worth[g] = two && size > 1 ? first + second : first;
    }
    for (int64_t k = 0; k < kept; k++) take_best(worth, groups);
    for (int64_t g = 0; g < groups; g++)
        if (worth[g] != -INFINITY)
            for (int64_t e = g * size; e < (g + 1) * size; e++) choice[e] = -INFINITY;
}

}  // namespace

EXPORT(moe) {
    Arguments in = {arguments};
    void *out = in.pointer<void>();
    const void *x = in.pointer<const void>();
    const float *weights = in.pointer<const float>();
    const int32_t *experts = in.pointer<const int32_t>();
    const void *gate_up = in.pointer<const void>();
    const void *down = in.pointer<const void>();
    const void *gate_up_bias = in.pointer<const void>();
    const void *down_bias = in.pointer<const void>();
    Sizes s;
    s.tokens = in.number();
    s.top_k = in.number();
    s.hidden = in.number();
    s.inner = in.number();
    s.experts = in.number();
    s.gate_up_step = in.number();
    s.down_step = in.number();
    const int64_t out_step = in.number();
    const int64_t dtype = in.number();
    const int64_t bias_dtype = in.number();
    s.clamped = in.number();
    s.alpha = in.real();
    s.most = in.real();
    if (!s.tokens) return 0;
#define CASE(T)                                                                                            \
    run((T *)out, (const T *)x, weights, experts, (const T *)gate_up, (const T *)down, gate_up_bias, down_bias, \
        bias_dtype, out_step, s)
    return dtype == F32 ? CASE(float) : CASE(bf16);
#undef CASE
}

// The k best of each row, as the definition has it (reference.py).
EXPORT(moe_route) {
    Arguments in = {arguments};
    float *weights = in.pointer<float>();
    int32_t *chosen = in.pointer<int32_t>();
    const void *logits = in.pointer<const void>();
    const float *bias = in.pointer<const float>();
    const int64_t tokens = in.number();
    const int64_t count = in.number();
    const int64_t top_k = in.number();
    const int64_t step = in.number();
    const int64_t dtype = in.number();
    const int64_t renormalize = in.number();
    const int64_t sigmoid = in.number();
    const int64_t groups = in.number();  // 0: none
    const int64_t kept_groups = in.number();
    const float scale = in.real();
    float *scratch = (float *)malloc(3 * tokens * count * sizeof(float));
    if (tokens && !scratch) return 1;
    parallel_ranges(tokens, tokens * count * 8, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            float *probs = scratch + 3 * t * count, *choice = probs + count, *worth = choice + count;
            for (int64_t e = 0; e < count; e++) probs[e] = at(logits, t * step + e, dtype);
            if (sigmoid) {
                for (int64_t e = 0; e < count; e++) probs[e] = 1.0f / (1.0f + expf(-probs[e]));
            } else {
                softmax(probs, count);
            }
            for (int64_t e = 0; e < count; e++) choice[e] = bias ? probs[e] + bias[e] : probs[e];
            if (groups) keep_groups(choice, worth, count / groups, groups, kept_groups, bias != nullptr);
            float kept = 0.0f;
            for (int64_t j = 0; j < top_k; j++) {
                const int64_t best = take_best(choice, count);
                chosen[t * top_k + j] = int32_t(best);
                weights[t * top_k + j] = probs[best];
                kept += probs[best];
            }
            for (int64_t j = 0; j < top_k; j++) {
                if (renormalize) weights[t * top_k + j] /= kept;
                weights[t * top_k + j] *= scale;
            }
        }
    });
    free(scratch);
    return 0;
}
