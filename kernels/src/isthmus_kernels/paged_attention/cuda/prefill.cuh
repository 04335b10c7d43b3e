// Prefill attention for compute capability 9.0: Dao et al. 2022 (online softmax), Shah et al. 2024 (roles of warps, two
// warpgroups in turn, the next product under the softmax), over a paged context.
//
// A block is three warpgroups. Of the first, warp 0 deals out tiles of rows and loads queries and keys, warp 1 loads
// values; the other two hold 64 rows each. Blocks stay resident and take tiles from a counter, those with the most keys
// first. Everything that changes from call to call is read on the device, so a captured launch follows it.
#pragma once
#include "../prefill_layout.h"
#include "hopper.cuh"

namespace isthmus::prefill {

using namespace isthmus::hopper;

constexpr int kStages = 2;
constexpr int kThreads = 384;
// A row's maximum is followed only when scores rise past it by this many powers of two: weights up to 2^8 lose nothing in
// fp32, and most steps need not touch what was summed before.
constexpr float kSlack = 8.f;
constexpr float kMinusInfinity = -__builtin_huge_valf();

// Barriers of the block beside 0: whose turn it is, and one for each warpgroup.
enum { TURN = 1, GROUP = 3 };

struct Arguments {
    CUtensorMap q;       // [tokens][heads][kDim], boxes of 64 columns of a tile's rows
    CUtensorMap keys;    // [blocks][block_size][kv heads][kDim], boxes of 64 columns of `box` tokens
    CUtensorMap values;
    char *out;
    int64_t out_token, out_head;  // bytes
    const int *tables;            // [requests][table_row]
    int64_t table_row;
    const int *starts;  // [requests + 1]
    const int *lens;    // [requests]
    int *counter;       // [2]: tiles taken beyond the first of each block, blocks that are done; zero between launches
    int requests;
    int kv_heads;
    int group;             // query heads of a kv head
    int queries_per_tile;  // kRows / group
    int block_size;
    int box;      // tokens of a box: the smaller of block_size and kKeys
    float scale;  // times log2(e)
};

struct Shared {
    alignas(1024) char q[kTileBytes];
    alignas(1024) char keys[kStages][kTileBytes];
    alignas(1024) char values[kStages][kTileBytes];
    alignas(1024) char out[kTileBytes];
    Tile tiles[2];
    uint64_t tile_full[2], tile_empty[2];
    uint64_t q_full, q_empty;
    uint64_t keys_full[kStages], keys_empty[kStages];
    uint64_t values_full[kStages], values_empty[kStages];
};

// A place in a ring that is walked for ever. Parities alternate; who empties waits for `phase`, who fills for its inverse.
template <int kCount>
struct Turn {
    int index = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void next() {
        if (++index == kCount) index = 0, phase ^= 1;
    }
};

// Tile `work` of all, counted from the last tile of the last request; by a whole warp. Requests with one query are not
// ours. Returns a negative request past the last tile.
__device__ __forceinline__ Tile find_tile(const Arguments &arguments, int work) {
    const int lane = threadIdx.x % 32;
    int left = work / arguments.kv_heads;
    Tile tile;
    tile.request = -1;
    tile.head = work % arguments.kv_heads;
    for (int last = arguments.requests - 1; last >= 0; last -= 32) {
        const int request = last - lane;
        int start = 0, queries = 0;
        if (request >= 0) {
            start = arguments.starts[request];
            queries = arguments.starts[request + 1] - start;
        }
        const int count =
            queries > 1 ? (queries + arguments.queries_per_tile - 1) / arguments.queries_per_tile : 0;
        int sum = count;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int below = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += below;
        }
        const uint32_t holds = __ballot_sync(~0u, sum > left);
        if (holds) {
            const int owner = __ffs(int(holds)) - 1;
            tile.request = last - owner;
            tile.start = __shfl_sync(~0u, start, owner);
            tile.queries = __shfl_sync(~0u, queries, owner);
            tile.seq_len = arguments.lens[tile.request];
            const int from_last = left - __shfl_sync(~0u, sum - count, owner);
            tile.first_query = (__shfl_sync(~0u, count, owner) - 1 - from_last) * arguments.queries_per_tile;
            return key_range(tile, arguments.queries_per_tile);
        }
        left -= __shfl_sync(~0u, sum, 31);
    }
    return tile;
}

// Loads the keys or values of a tile of rows, a box a lane at a time; by a whole warp.
__device__ __forceinline__ void load_context(const Arguments &arguments, const CUtensorMap *map, const Tile &tile,
                                             char (*ring)[kTileBytes], uint64_t *full, uint64_t *empty,
                                             Turn<kStages> &turn) {
    const int lane = threadIdx.x % 32;
    const int box = arguments.box, boxes = 2 * kKeys / box;
    const int half = lane % 2, offset = lane / 2 * box;
    const int *table = arguments.tables + tile.request * arguments.table_row;
    const bool mine = lane < boxes;
    int block = mine && offset < tile.seq_len ? table[offset / arguments.block_size] : 0;
    for (int index = 0; index < tile.tiles; index++) {
        const int first = index * kKeys, key = first + offset;
        const bool load_it = mine && key < tile.seq_len;
        const int here = block, later = key + kKeys;
        if (mine && later < tile.seq_len && index + 1 < tile.tiles) block = table[later / arguments.block_size];
        wait(&empty[turn.index], turn.phase ^ 1);
        if (lane == 0) expect(&full[turn.index], uint32_t(loaded_keys(first, tile.seq_len, box) * 2 * kRowBytes));
        __syncwarp();
        if (load_it)
            load(shared_address(ring[turn.index]) + half * kHalfBytes + offset * kRowBytes, map, &full[turn.index],
                 half * kHalfColumns, tile.head, key % arguments.block_size, here);
        turn.next();
    }
}

// Deals out tiles and loads queries and keys; by a whole warp.
__device__ __forceinline__ void lead(const Arguments &arguments, Shared &shared) {
    const int lane = threadIdx.x % 32;
    Turn<2> slot;
    Turn<1> q;
    Turn<kStages> turn;
    int work = blockIdx.x;
    while (true) {
        const Tile tile = find_tile(arguments, work);
        wait(&shared.tile_empty[slot.index], slot.phase ^ 1);
        if (lane == 0) {
            shared.tiles[slot.index] = tile;
            arrive(&shared.tile_full[slot.index]);
        }
        if (tile.request < 0) break;
        slot.next();
        int taken = 0;
        if (lane == 0) taken = atomicAdd(&arguments.counter[0], 1);
        wait(&shared.q_empty, q.phase ^ 1);
        if (lane == 0) {
            expect(&shared.q_full, uint32_t(arguments.queries_per_tile * arguments.group * 2 * kRowBytes));
            for (int half = 0; half < 2; half++)
                load(shared_address(shared.q) + half * kHalfBytes, &arguments.q, &shared.q_full, half * kHalfColumns,
                     tile.head * arguments.group, tile.start + tile.first_query);
        }
        __syncwarp();
        q.next();
        load_context(arguments, &arguments.keys, tile, shared.keys, shared.keys_full, shared.keys_empty, turn);
        work = int(gridDim.x) + __shfl_sync(~0u, taken, 0);
    }
    if (lane == 0 && atomicAdd(&arguments.counter[1], 1) == int(gridDim.x) - 1) {
        // All blocks have taken their last tile: as the next launch expects it.
        arguments.counter[0] = 0;
        arguments.counter[1] = 0;
    }
}

// The next tile, for a warp that does not deal them out.
__device__ __forceinline__ Tile take_tile(Shared &shared, Turn<2> &slot) {
    wait(&shared.tile_full[slot.index], slot.phase);
    const Tile tile = shared.tiles[slot.index];
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&shared.tile_empty[slot.index]);
    slot.next();
    return tile;
}

__device__ __forceinline__ void load_values(const Arguments &arguments, Shared &shared) {
    Turn<2> slot;
    Turn<kStages> turn;
    while (true) {
        const Tile tile = take_tile(shared, slot);
        if (tile.request < 0) return;
        load_context(arguments, &arguments.values, tile, shared.values, shared.values_full, shared.values_empty, turn);
    }
}

struct True { static constexpr bool value = true; };
struct False { static constexpr bool value = false; };

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
__device__ __forceinline__ void multiply_keys(float (&s)[64], uint64_t q, uint64_t keys) {
#pragma unroll
    for (int k = 0; k < kDim / 16; k++) {
        // 32 bytes within a swizzled row, then the other half of the columns.
        const uint64_t offset = uint64_t(k / 4 * kHalfBytes + k % 4 * 32) >> 4;
        product(s, q + offset, keys + offset, k > 0, T());
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

// A warp's 16 rows of the result, through shared memory of its own so that whole lines are written.
template <class T>
__device__ __forceinline__ void write_out(const Arguments &arguments, Shared &shared, const Tile &tile,
                                          const float (&o)[64], const float (&factor)[2], int group) {
    const int thread = threadIdx.x % 128, lane = thread % 32;
    char *mine = shared.out + (group * 64 + thread / 32 * 16) * kRowBytes;
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
    const uint64_t q = descriptor(shared_address(shared.q) + group * 64 * kRowBytes, 16, 8 * kRowBytes);
    Turn<2> slot;
    Turn<1> q_turn;
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
        uint32_t p[32];
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

        wait(&shared.q_full, q_turn.phase);
        q_turn.next();
        wait(&shared.keys_full[key_turn.index], key_turn.phase);
        product_fence();
        multiply_keys<T>(s, q, keys());
        product_commit();
        product_wait<0>();
        pin(s);
        done_with_keys();
        if (tile.whole == 0) weigh_tile(True(), 0);
        else weigh_tile(False(), 0);
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
        for (; index < tile.whole; index++) step(False(), index);
#pragma unroll 1
        for (; index < tile.tiles; index++) step(True(), index);

        release(&shared.q_empty);
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
        write_out<T>(arguments, shared, tile, o, factor, group);
    }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) attention(const __grid_constant__ Arguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ char memory[];
    Shared &shared = *reinterpret_cast<Shared *>((reinterpret_cast<uintptr_t>(memory) + 1023) / 1024 * 1024);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) init(&shared.tile_full[i], 1), init(&shared.tile_empty[i], 9);
        init(&shared.q_full, 1), init(&shared.q_empty, 8);
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
        if (threadIdx.x / 32 == 0) lead(arguments, shared);
        else if (threadIdx.x / 32 == 1) load_values(arguments, shared);
    } else {
        more_registers<232>();
        attend<T>(arguments, shared, group - 1);
    }
#endif
}

}  // namespace isthmus::prefill
