// Decode attention of many rows: one query a request, all warps with equal numbers of keys (stream-K; Osama et al. 2023), as
// in triton_decode.py.
//
// A warp is a program of its own. It takes tiles [begin, end) of the line of all requests' and kv heads' tiles, whatever
// (request, head) they belong to. It has room for kStages of them: as soon as one has been read, another is asked for. Scores are made with keys down and heads across, so that eight columns, and
// not sixteen rows, stand for the few query heads of a kv head: half the matrix operations, and so less of the power that
// bounds a step of many rows. Warps of a block share only the table of where requests begin on the line.
#pragma once
#include "../decode_layout.h"
#include "../../cuda/hopper.cuh"

namespace isthmus::decode {

using namespace isthmus::hopper;

constexpr float kMinusInfinity = -__builtin_huge_valf();

struct Arguments {
    const char *kv;                               // the layer's pool
    int64_t kv_block, kv_part, kv_token, kv_head;  // bytes
    const char *q;
    char *out;
    int64_t q_token, q_head, out_token, out_head;  // bytes
    const int *tables;                             // [requests][table_row]
    int64_t table_row;
    const int *starts;  // [requests + 1]
    const int *lens;    // [requests]
    float *partial;     // [2 programs][kSums][32]: of a program's first and of its other unfinished part
    float4 *stats;      // [2 programs][32]: maxima and sums of a lane's two heads
    int *arrived;       // [programs], zero between calls: parts that are there of what begins in the program
    int requests, kv_heads, group;
    int block_shift;  // log2 of a block's tokens
    float scale;      // times log2(e)
};

// Of a block, which has a multiprocessor for itself.
template <int kWarps, int kStages>
struct Shared {
    alignas(1024) char tiles[kWarps][kStages][kTileBytes];
    int ends[kMostRequests];  // of each request on the line of tiles
    int most;                 // tiles of the longest
};

// A (request, kv head).
struct Piece {
    int request, head;
    int begin, end;  // on the line
    int seq_len;
};

__device__ __forceinline__ Piece find(const Arguments &arguments, const int *ends, int at) {
    int low = 0, high = arguments.requests - 1;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (ends[middle] > at) high = middle;
        else low = middle + 1;
    }
    const int first = low ? ends[low - 1] : 0, tiles = (ends[low] - first) / arguments.kv_heads;
    Piece piece;
    piece.request = low;
    piece.head = (at - first) / tiles;
    piece.begin = first + piece.head * tiles;
    piece.end = piece.begin + tiles;
    piece.seq_len = arguments.lens[low];
    return piece;
}

// Fills in `ends` and `most`; by a whole block.
template <typename S>
__device__ __forceinline__ void lay_out(const Arguments &arguments, S &shared) {
    const int requests = arguments.requests, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < requests; i += blockDim.x) {
        const int queries = arguments.starts[i + 1] - arguments.starts[i];
        shared.ends[i] = queries == 1 ? (arguments.lens[i] + kKeys - 1) / kKeys : 0;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        const int each = (requests + 31) / 32, from = lane * each, to = min(from + each, requests);
        int sum = 0, most = 0;
        for (int i = from; i < to; i++) {
            most = max(most, shared.ends[i]);
            sum += shared.ends[i] * arguments.kv_heads;
            shared.ends[i] = sum;
        }
        int below = sum;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, below, step);
            if (lane >= step) below += other;
        }
        for (int i = from; i < to; i++) shared.ends[i] += below - sum;
        most = __reduce_max_sync(~0u, most);
        if (lane == 0) shared.most = most;
    }
    __syncthreads();
}

// Of lanes below kKeys / 8: where the block begins that holds 8 of the tile's keys, from key 8 lane on.
__device__ __forceinline__ int64_t block_of(const Arguments &arguments, const Piece &piece, int at) {
    const int offset = int(threadIdx.x % 32) * 8, token = (at - piece.begin) * kKeys + offset;
    if (offset >= kKeys || token >= piece.seq_len) return 0;
    return arguments.tables[piece.request * arguments.table_row + (token >> arguments.block_shift)] * arguments.kv_block;
}

// Asks for 16 bytes, or writes zeros where `real` is false.
__device__ __forceinline__ void copy(uint32_t to, const char *from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copies_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Until all but the last `kPending` groups of this thread's copies have arrived.
template <int kPending>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Asks for the tile's keys and values; by a whole warp, whose lanes hold the blocks. Two keys at a time, whole rows.
__device__ __forceinline__ void load_tile(const Arguments &arguments, const Piece &piece, int at, int64_t block, char *tile) {
    const int lane = threadIdx.x % 32, first = (at - piece.begin) * kKeys, chunk = lane % 16;
    const int left = piece.seq_len - first, inside = (1 << arguments.block_shift) - 1;
    const char *head = arguments.kv + piece.head * arguments.kv_head + chunk * 16;
    const uint32_t to = shared_address(tile) + chunk / 8 * kHalfBytes;
#pragma unroll
    for (int i = 0; i < kKeys / 8; i++) {
        const char *rows = head + __shfl_sync(~0u, block, i) + ((first + 8 * i) & inside) * arguments.kv_token;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int within = 2 * j + lane / 16, key = 8 * i + within;
            const char *from = rows + within * arguments.kv_token;
            const uint32_t there = to + swizzled(key, chunk % 8);
            copy(there, from, key < left);
            copy(there + 2 * kHalfBytes, from + arguments.kv_part, key < left);
        }
    }
}

// d += a b of 16 x 16 by 16 x 8.
__device__ __forceinline__ void product(float *d, const uint32_t *a, const uint32_t *b, Bf16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
                 "%2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void product(float *d, const uint32_t *a, const uint32_t *b, Fp16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
                 "%2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The 16 x 16 part that is the transpose of what lies there.
__device__ __forceinline__ void load_transposed(uint32_t *a, const char *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// An 8 x 8 part of 16-bit numbers across a warp.
__device__ __forceinline__ uint32_t transposed(uint32_t part) {
    uint32_t turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(part));
    return turned;
}

// What a warp knows of a (request, kv head). Heads are columns: a lane has two, 2 (lane % 4) and the next.
struct State {
    float o[kSums];  // result, channels down, of what was summed so far
    float peak[2];   // largest score, times the scale
    float total[2];  // sum of weights, of this lane's keys
};

// Over the lanes that have the same heads.
__device__ __forceinline__ float most_of_lanes(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// Takes in the tile, of which `count` keys are the context's.
template <typename T>
__device__ __forceinline__ void attend(State &state, const uint32_t (&q)[16], const char *tile, int count, float scale) {
    const int lane = threadIdx.x % 32;
    float s[8] = {};
#pragma unroll
    for (int k = 0; k < kDim / 16; k++) {
        const int chunk = 2 * k + lane / 16;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t keys[4];
            load_operand(keys, tile + chunk / 8 * kHalfBytes + swizzled(16 * i + lane % 16, chunk % 8));
            product(s + 4 * i, keys, q + 2 * k, T());
        }
    }
    if (count < kKeys) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (key_of(lane, i) >= count) s[i] = kMinusInfinity;
    }
    float fade[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float most = most_of_lanes(fmaxf(fmaxf(s[h], s[h + 2]), fmaxf(s[h + 4], s[h + 6]))) * scale;
        const float peak = fmaxf(state.peak[h], most);
        fade[h] = exp2_fast(state.peak[h] - peak);
        state.peak[h] = peak;
        float sum = 0.f;
#pragma unroll
        for (int i = h; i < 8; i += 2) {
            s[i] = exp2_fast(fmaf(s[i], scale, -peak));
            sum += s[i];
        }
        state.total[h] = state.total[h] * fade[h] + sum;
    }
    if (__any_sync(~0u, fade[0] != 1.f || fade[1] != 1.f)) {
#pragma unroll
        for (int i = 0; i < kSums; i++) state.o[i] *= fade[i % 2];
    }
    uint32_t weights[4];
#pragma unroll
    for (int i = 0; i < 4; i++) weights[i] = transposed(pack(s[2 * i], s[2 * i + 1], T()));
    const char *values = tile + 2 * kHalfBytes;
#pragma unroll
    for (int d = 0; d < kDim / 16; d++) {
        const int chunk = 2 * d + lane / 8 % 2;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t part[4];
            load_transposed(part, values + chunk / 8 * kHalfBytes +
                                      swizzled(16 * i + lane % 8 + lane / 16 * 8, chunk % 8));
            product(state.o + 4 * d, part, weights + 2 * i, T());
        }
    }
}

// The query of a (request, kv head), heads across: zeros past the group.
__device__ __forceinline__ void load_query(uint32_t (&q)[16], const Arguments &arguments, const Piece &piece) {
    const int lane = threadIdx.x % 32, head = lane / 4;
    const char *row = arguments.q + arguments.starts[piece.request] * arguments.q_token +
                      (piece.head * arguments.group + head) * arguments.q_head + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < 16; i++) q[i] = head < arguments.group ? *reinterpret_cast<const uint32_t *>(row + i * 16) : 0u;
}

// `total`: of all lanes.
template <typename T>
__device__ __forceinline__ void write_out(const Arguments &arguments, const Piece &piece, const State &state,
                                          const float (&total)[2]) {
    const int lane = threadIdx.x % 32, head = lane / 4;
    const float factor[2] = {1.f / total[0], 1.f / total[1]};
    char *row = arguments.out + arguments.starts[piece.request] * arguments.out_token +
                (piece.head * arguments.group + head) * arguments.out_head + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const uint32_t part =
            transposed(pack(state.o[2 * i] * factor[0], state.o[2 * i + 1] * factor[1], T()));
        if (head < arguments.group) *reinterpret_cast<uint32_t *>(row + i * 16) = part;
    }
}

// Adds up the parts of a piece that several programs share, `first` to `last`; by the last one that has arrived.
__device__ __forceinline__ void merge(const Arguments &arguments, const Piece &piece, int chunk, int first, int last,
                                      State &state, float (&total)[2]) {
    const int lane = threadIdx.x % 32;
    for (int program = first; program <= last; program++) {
        const int64_t slot = 2 * program + (program == first && program * chunk < piece.begin);
        const float4 part = __ldcg(arguments.stats + slot * 32 + lane);
        float values[kSums];
#pragma unroll
        for (int i = 0; i < kSums; i++) values[i] = __ldcg(arguments.partial + (slot * kSums + i) * 32 + lane);
        const float peaks[2] = {part.x, part.y}, totals[2] = {part.z, part.w};
        float fade[2], share[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float peak = program == first ? peaks[h] : fmaxf(state.peak[h], peaks[h]);
            fade[h] = program == first ? 0.f : exp2_fast(state.peak[h] - peak);
            share[h] = exp2_fast(peaks[h] - peak);
            total[h] = program == first ? totals[h] : total[h] * fade[h] + totals[h] * share[h];
            state.peak[h] = peak;
        }
#pragma unroll
        for (int i = 0; i < kSums; i++)
            state.o[i] = program == first ? values[i] : state.o[i] * fade[i % 2] + values[i] * share[i % 2];
    }
}

// A piece has ended, or the program's share of it.
template <typename T>
__device__ __forceinline__ void finish(const Arguments &arguments, const Piece &piece, State &state, int program,
                                       int chunk, int begin, int end) {
    const int lane = threadIdx.x % 32;
    float total[2] = {sum_of_lanes(state.total[0]), sum_of_lanes(state.total[1])};
    if (piece.begin < begin || piece.end > end) {
        const int64_t slot = 2 * program + (piece.begin > begin);
        arguments.stats[slot * 32 + lane] = float4{state.peak[0], state.peak[1], total[0], total[1]};
#pragma unroll
        for (int i = 0; i < kSums; i++) arguments.partial[(slot * kSums + i) * 32 + lane] = state.o[i];
        __threadfence();
        __syncwarp();
        const int first = piece.begin / chunk, last = (piece.end - 1) / chunk;
        int before = 0;
        if (lane == 0) before = atomicAdd(arguments.arrived + first, 1);
        if (__shfl_sync(~0u, before, 0) != last - first) return;
        __threadfence();
        merge(arguments, piece, chunk, first, last, state, total);
        if (lane == 0) arguments.arrived[first] = 0;
    }
    write_out<T>(arguments, piece, state, total);
}

template <typename T, int kWarps, int kStages>
__global__ void __launch_bounds__(kWarps * 32, 1) attention(const __grid_constant__ Arguments arguments) {
    extern __shared__ __align__(1024) char memory[];
    auto &shared = *reinterpret_cast<Shared<kWarps, kStages> *>(memory);
    lay_out(arguments, shared);
    const int warp = threadIdx.x / 32, programs = gridDim.x * kWarps, program = blockIdx.x + warp * gridDim.x;
    const int line = shared.ends[arguments.requests - 1];
    const int chunk = share_of(line, programs, shared.most), begin = program * chunk, end = min(begin + chunk, line);
    if (begin >= end) return;

    char(*ring)[kTileBytes] = shared.tiles[warp];
    Piece asked = find(arguments, shared.ends, begin), piece = asked;
    int next = begin;
#pragma unroll
    for (int stage = 0; stage < kStages; stage++) {
        if (next < end) {
            if (next == asked.end) asked = find(arguments, shared.ends, next);
            load_tile(arguments, asked, next, block_of(arguments, asked, next), ring[stage]);
            next++;
        }
        copies_commit();
    }
    int stage = 0;
    uint32_t q[16];
    State state;
    for (int at = begin; at < end; at++) {
        if (at == begin || at == piece.end) {
            if (at > begin) piece = find(arguments, shared.ends, at);
            load_query(q, arguments, piece);
#pragma unroll
            for (int i = 0; i < kSums; i++) state.o[i] = 0.f;
            state.peak[0] = state.peak[1] = kMinusInfinity;
            state.total[0] = state.total[1] = 0.f;
        }
        int64_t block = 0;
        if (next < end) {
            if (next == asked.end) asked = find(arguments, shared.ends, next);
            block = block_of(arguments, asked, next);
        }
        copies_wait<kStages - 1>();
        __syncwarp();
        attend<T>(state, q, ring[stage], piece.seq_len - (at - piece.begin) * kKeys, arguments.scale);
        __syncwarp();
        if (next < end) {
            load_tile(arguments, asked, next, block, ring[stage]);
            next++;
        }
        copies_commit();
        if (++stage == kStages) stage = 0;
        if (at + 1 == piece.end || at + 1 == end) finish<T>(arguments, piece, state, program, chunk, begin, end);
    }
}

}  // namespace isthmus::decode
