// Prefill attention for compute capability 9.0: Dao et al. 2022 (online softmax), Shah et al. 2024 (roles of warps, two
// warpgroups in turn, the next product under the softmax), over a paged context.
//
// A block is three warpgroups. Of the first, warp 0 deals out tiles of rows, one ahead, warp 1 loads queries and keys,
// warp 2 values; the other two hold 64 rows each. Blocks stay resident and take tiles from a counter, those with the most
// keys first. Everything that changes from call to call is read on the device, so a captured launch follows it.
#pragma once
#include <type_traits>

#include "prefill_load.cuh"

namespace isthmus::prefill {

// A row's maximum is followed only when scores rise past it by this many powers of two: weights up to 2^8 lose nothing in
// fp32, and most steps need not touch what was summed before.
constexpr float kSlack = 8.f;
constexpr float kMinusInfinity = -__builtin_huge_valf();

// What a thread knows of its two rows.
struct Rows {
    float peak[2];   // largest score
    float total[2];  // sum of weights, of this thread's columns
    float fade[2];   // by which what was summed before shrinks
};

// Turns scores into weights. Column 8 j + e of a thread is seen by its row h where 8 j + e <= limit[h].
template <bool kMasked>
__device__ __forceinline__ void weigh(float (&s)[64], Rows &rows, float scale, const int (&limit)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float most[2] = {kMinusInfinity, kMinusInfinity};
#pragma unroll
        for (int j = 0; j < 16; j++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &x = s[4 * j + 2 * h + e];
                if (kMasked && 8 * j + e > limit[h]) x = kMinusInfinity;
                most[e] = fmaxf(most[e], x);
            }
        }
        float peak = fmaxf(most[0], most[1]);
        peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
        peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
        peak = fmaxf(peak, rows.peak[h]);
        if ((peak - rows.peak[h]) * scale <= kSlack) peak = rows.peak[h];
        rows.fade[h] = exp2_fast((rows.peak[h] - peak) * scale);
        rows.peak[h] = peak;
        const float base = peak * scale;
        float sum[2] = {0.f, 0.f};
#pragma unroll
        for (int j = 0; j < 16; j++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &x = s[4 * j + 2 * h + e];
                x = exp2_fast(fmaf(x, scale, -base));
                sum[e] += x;
            }
        }
        rows.total[h] = rows.total[h] * rows.fade[h] + (sum[0] + sum[1]);
    }
}

// Weights as the left side of a product over keys: 16 keys in four registers.
template <class T>
__device__ __forceinline__ void to_operand(uint32_t (&p)[32], const float (&s)[64]) {
#pragma unroll
    for (int i = 0; i < 32; i++) p[i] = pack(s[2 * i], s[2 * i + 1], T());
}

template <class T>
__device__ __forceinline__ void multiply_keys(float (&s)[64], const uint32_t (&q)[32], uint64_t keys) {
#pragma unroll
    for (int k = 0; k < kDim / 16; k++)
        product_rows(s, q + 4 * k, keys + (uint64_t(k / 4 * kHalfBytes + k % 4 * 32) >> 4), k > 0, T());
}

// A warp's 16 rows of queries as the left side of products.
__device__ __forceinline__ void load_queries(uint32_t (&q)[32], const char *rows) {
    const int lane = threadIdx.x % 32, row = lane % 16;
#pragma unroll
    for (int k = 0; k < kDim / 16; k++) {
        const int chunk = 2 * k + lane / 16;
        load_operand(q + 4 * k, rows + chunk / 8 * kHalfBytes + swizzled(row, chunk % 8));
    }
}

template <class T>
__device__ __forceinline__ void multiply_values(float (&o)[64], const uint32_t (&p)[32], uint64_t values) {
#pragma unroll
    for (int k = 0; k < kKeys / 16; k++)
        product(o, p + 4 * k, values + (uint64_t(k * 16 * kRowBytes) >> 4), T());
}

// Memory past the context may hold anything, and 0 * NaN is NaN. Both warpgroups write the same zeros, each before its
// own product.
__device__ __forceinline__ void clear_tail(char *values, int from, int group) {
    const int thread = threadIdx.x % 128;
    for (int i = thread; i < (kKeys - from) * 16; i += 128) {
        char *at = values + i % 2 * kHalfBytes + (from + i / 16) * kRowBytes + i % 16 / 2 * 16;
        *reinterpret_cast<uint4 *>(at) = uint4{0, 0, 0, 0};
    }
    fence_async();
    sync(GROUP + group, 128);
}

// A warp's 16 rows of the result, through shared memory so that whole lines are written: where its queries were.
template <class T>
__device__ __forceinline__ void write_out(const Arguments &arguments, char *q, const Tile &tile, const float (&o)[64],
                                          const float (&factor)[2], int group) {
    const int thread = threadIdx.x % 128, lane = thread % 32;
    char *mine = q + (group * 64 + thread / 32 * 16) * kRowBytes;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 64; i += 2) {
        const int row = fragment_row(lane, i), column = fragment_column(lane, i), chunk = column / 8;
        char *at = mine + chunk / 8 * kHalfBytes + swizzled(row, chunk % 8) + column % 8 * 2;
        *reinterpret_cast<uint32_t *>(at) = pack(o[i] * factor[i / 2 % 2], o[i + 1] * factor[i / 2 % 2], T());
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int row = i * 2 + lane / 16, chunk = lane % 16;
        const int member = group * 64 + thread / 32 * 16 + row;
        const int of_tile = member / arguments.group, query = tile.first_query + of_tile;
        if (of_tile >= arguments.queries_per_tile || query >= tile.queries) continue;
        const char *at = mine + chunk / 8 * kHalfBytes + swizzled(row, chunk % 8);
        const int64_t token = tile.start + query, head = tile.head * arguments.group + member % arguments.group;
        *reinterpret_cast<uint4 *>(arguments.out + token * arguments.out_token + head * arguments.out_head +
                                   chunk * 16) = *reinterpret_cast<const uint4 *>(at);
    }
}

__device__ __forceinline__ void release(uint64_t *empty) {
    if (threadIdx.x % 32 == 0) arrive(empty);
}

// 64 rows of every tile; by a warpgroup. The products of the next keys are issued before the softmax of the present ones,
// and the warpgroups issue in turn, so that one's softmax runs under the other's products.
template <class T>
__device__ __forceinline__ void attend(const Arguments &arguments, Shared &shared, int group) {
    const int thread = threadIdx.x % 128;
    const float scale = arguments.scale;
    Turn<1> slot;
    Turn<2> q_turn;
    Turn<kStages> key_turn, value_turn;
    if (group == 1) sync_arrive(TURN, 256);
    while (true) {
        const Tile tile = take_tile(shared, slot);
        if (tile.request < 0) return;
        // Keys that the thread's two rows see, less its first column.
        int seen[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int query = tile.first_query + (group * 64 + fragment_row(thread, 2 * h)) / arguments.group;
            const int position = tile.seq_len - tile.queries + query;
            seen[h] = (position < tile.seq_len ? position : tile.seq_len - 1) - fragment_column(thread, 0);
        }
        float s[64], o[64];
        uint32_t q[32], p[32];
        Rows rows = {{kMinusInfinity, kMinusInfinity}, {0.f, 0.f}, {0.f, 0.f}};
#pragma unroll
        for (int i = 0; i < 64; i++) o[i] = 0.f;

        auto keys = [&] { return descriptor(shared_address(shared.keys[key_turn.index]), 16, 8 * kRowBytes); };
        auto values = [&] {
            return descriptor(shared_address(shared.values[value_turn.index]), kHalfBytes, 8 * kRowBytes);
        };
        auto weigh_tile = [&](auto masked, int index) {
            const int limit[2] = {seen[0] - index * kKeys, seen[1] - index * kKeys};
            weigh<decltype(masked)::value>(s, rows, scale, limit);
        };
        auto done_with_keys = [&] {
            release(&shared.keys_empty[key_turn.index]);
            key_turn.next();
        };
        auto done_with_values = [&] {
            release(&shared.values_empty[value_turn.index]);
            value_turn.next();
        };

        wait(&shared.q_full[q_turn.index], q_turn.phase);
        load_queries(q, shared.q[q_turn.index] + (group * 64 + thread / 32 * 16) * kRowBytes);
        wait(&shared.keys_full[key_turn.index], key_turn.phase);
        product_fence();
        multiply_keys<T>(s, q, keys());
        product_commit();
        product_wait<0>();
        pin(s);
        done_with_keys();
        if (tile.whole == 0) weigh_tile(std::true_type(), 0);
        else weigh_tile(std::false_type(), 0);
        to_operand<T>(p, s);

        auto step = [&](auto masked, int index) {
            wait(&shared.keys_full[key_turn.index], key_turn.phase);
            sync(TURN + group, 256);
            pin(s), pin(o), pin(p);
            product_fence();
            multiply_keys<T>(s, q, keys());
            product_commit();
            wait(&shared.values_full[value_turn.index], value_turn.phase);
            multiply_values<T>(o, p, values());
            product_commit();
            sync_arrive(TURN + (1 - group), 256);
            product_wait<1>();
            pin(s);
            done_with_keys();
            weigh_tile(masked, index);
            pin(s);  // all of it before the wait
            product_wait<0>();
            pin(o);
            done_with_values();
            to_operand<T>(p, s);
            if (__any_sync(~0u, rows.fade[0] != 1.f || rows.fade[1] != 1.f)) {
#pragma unroll
                for (int i = 0; i < 64; i++) o[i] *= rows.fade[i / 2 % 2];
            }
        };
        int index = 1;
#pragma unroll 1
        for (; index < tile.whole; index++) step(std::false_type(), index);
#pragma unroll 1
        for (; index < tile.tiles; index++) step(std::true_type(), index);

        wait(&shared.values_full[value_turn.index], value_turn.phase);
        const int tail = tile.seq_len - (tile.tiles - 1) * kKeys;
        if (tail < kKeys) clear_tail(shared.values[value_turn.index], tail, group);
        pin(o), pin(p);
        product_fence();
        multiply_values<T>(o, p, values());
        product_commit();
        float factor[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float total = rows.total[h];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            factor[h] = 1.f / total;
        }
        product_wait<0>();
        pin(o);
        done_with_values();
        write_out<T>(arguments, shared.q[q_turn.index], tile, o, factor, group);
        fence_async();
        __syncwarp();
        release(&shared.q_empty[q_turn.index]);
        q_turn.next();
    }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) attention(const __grid_constant__ Arguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ char memory[];
    Shared &shared = *reinterpret_cast<Shared *>((reinterpret_cast<uintptr_t>(memory) + 1023) / 1024 * 1024);
    if (threadIdx.x == 0) {
        init(&shared.tile_full, 1), init(&shared.tile_empty, 10 * 32);
        for (int i = 0; i < 2; i++) init(&shared.q_full[i], 1), init(&shared.q_empty[i], 8);
        for (int i = 0; i < kStages; i++) {
            init(&shared.keys_full[i], 1), init(&shared.keys_empty[i], 8);
            init(&shared.values_full[i], 1), init(&shared.values_empty[i], 8);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        fence_async();
        prefetch(&arguments.q), prefetch(&arguments.keys), prefetch(&arguments.values);
    }
    __syncthreads();
    const int group = threadIdx.x / 128;
    if (group == 0) {
        fewer_registers<40>();
        if (threadIdx.x / 32 == 0) deal(arguments, shared);
        else if (threadIdx.x / 32 == 1) load_queries_and_keys(arguments, shared);
        else if (threadIdx.x / 32 == 2) load_values(arguments, shared);
    } else {
        more_registers<232>();
        attend<T>(arguments, shared, group - 1);
    }
#endif
}

}  // namespace isthmus::prefill
