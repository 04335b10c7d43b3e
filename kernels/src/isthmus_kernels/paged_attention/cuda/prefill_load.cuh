// What the first warpgroup of the prefill kernel does (prefill.cuh): deals out tiles of rows and loads their queries, keys
// and values; and what it shares with the other two.
#pragma once
#include "../prefill_layout.h"
#include "../../cuda/hopper.cuh"

namespace isthmus::prefill {

using namespace isthmus::hopper;

constexpr int kStages = 2;
constexpr int kThreads = 384;
constexpr int kMaxBoxes = 16;  // of 8 tokens

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
    int block_shift;  // log2 of a block's tokens
    int box;          // tokens of a box: a block's, at most kKeys
    float scale;      // times log2(e)
};

struct Shared {
    alignas(1024) char q[2][kTileBytes];  // and then, in the place of a warp's queries, its part of the result
    alignas(1024) char keys[kStages][kTileBytes];
    alignas(1024) char values[kStages][kTileBytes];
    Tile tile;
    uint64_t tile_full, tile_empty;
    uint64_t q_full[2], q_empty[2];
    uint64_t keys_full[kStages], keys_empty[kStages];
    uint64_t values_full[kStages], values_empty[kStages];
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

// Loads the keys or values of a tile of rows; by a whole warp. Its lanes look up the blocks of the next tile of keys, one of
// them issues the loads: in uniform control flow, since a warp must hand the copy engine box after box without delay.
__device__ __forceinline__ void load_context(const Arguments &arguments, const CUtensorMap *map, const Tile &tile,
                                             char (*ring)[kTileBytes], uint64_t *full, uint64_t *empty,
                                             Turn<kStages> &turn) {
    const int box = arguments.box, boxes = kKeys / box;
    const int offset = int(threadIdx.x % 32) * box;
    const int *table = arguments.tables + tile.request * arguments.table_row;
    const bool mine = offset < kKeys, leads = leader();
    int blocks = mine && offset < tile.seq_len ? table[offset >> arguments.block_shift] : 0;
    for (int index = 0; index < tile.tiles; index++) {
        const int first = index * kKeys, later = first + kKeys + offset, here = blocks;
        const int token = first & ((1 << arguments.block_shift) - 1);  // not 0 where a block has several tiles
        if (mine && later < tile.seq_len && index + 1 < tile.tiles) blocks = table[later >> arguments.block_shift];
        wait(&empty[turn.index], turn.phase ^ 1);
        if (leads) expect(&full[turn.index], uint32_t(loaded_keys(first, tile.seq_len, box) * 2 * kRowBytes));
        const uint32_t to = shared_address(ring[turn.index]);
#pragma unroll
        for (int i = 0; i < kMaxBoxes; i++) {
            if (i >= boxes || first + i * box >= tile.seq_len) break;
            const int block = __shfl_sync(~0u, here, i);
            if (leads) {
                load(to + i * box * kRowBytes, map, &full[turn.index], 0, tile.head, token, block);
                load(to + i * box * kRowBytes + kHalfBytes, map, &full[turn.index], kHalfColumns, tile.head, token,
                     block);
            }
        }
        turn.next();
    }
}

// Deals out tiles; by a whole warp.
__device__ __forceinline__ void deal(const Arguments &arguments, Shared &shared) {
    const int lane = threadIdx.x % 32;
    Turn<1> slot;
    int work = blockIdx.x;
    while (true) {
        wait(&shared.tile_empty, slot.phase ^ 1);
        slot.next();
        const Tile tile = find_tile(arguments, work);
        if (lane == 0) {
            shared.tile = tile;
            arrive(&shared.tile_full);
        }
        if (tile.request < 0) break;
        if (lane == 0) work = int(gridDim.x) + atomicAdd(&arguments.counter[0], 1);
        work = __shfl_sync(~0u, work, 0);
    }
    if (lane == 0 && atomicAdd(&arguments.counter[1], 1) == int(gridDim.x) - 1) {
        // All blocks have taken their last tile: as the next launch expects it.
        arguments.counter[0] = 0;
        arguments.counter[1] = 0;
    }
}

// The next tile, for a warp that does not deal them out.
__device__ __forceinline__ Tile take_tile(Shared &shared, Turn<1> &slot) {
    wait(&shared.tile_full, slot.phase);
    slot.next();
    const Tile tile = shared.tile;
    // Every lane for its own read. One for its warp, after __syncwarp, is right as well and no faster, but racecheck takes
    // that arrival for the read of one lane.
    arrive(&shared.tile_empty);
    return tile;
}

__device__ __forceinline__ void load_queries_and_keys(const Arguments &arguments, Shared &shared) {
    Turn<1> slot;
    Turn<2> q;
    Turn<kStages> turn;
    while (true) {
        const Tile tile = take_tile(shared, slot);
        if (tile.request < 0) return;
        wait(&shared.q_empty[q.index], q.phase ^ 1);
        if (leader()) {
            expect(&shared.q_full[q.index],
                   uint32_t(arguments.queries_per_tile * arguments.group * 2 * kRowBytes));
            for (int half = 0; half < 2; half++)
                load(shared_address(shared.q[q.index]) + half * kHalfBytes, &arguments.q, &shared.q_full[q.index],
                     half * kHalfColumns, tile.head * arguments.group, tile.start + tile.first_query);
        }
        __syncwarp();
        q.next();
        load_context(arguments, &arguments.keys, tile, shared.keys, shared.keys_full, shared.keys_empty, turn);
    }
}

__device__ __forceinline__ void load_values(const Arguments &arguments, Shared &shared) {
    Turn<1> slot;
    Turn<kStages> turn;
    while (true) {
        const Tile tile = take_tile(shared, slot);
        if (tile.request < 0) return;
        load_context(arguments, &arguments.values, tile, shared.values, shared.values_full, shared.values_empty, turn);
    }
}

}  // namespace isthmus::prefill
