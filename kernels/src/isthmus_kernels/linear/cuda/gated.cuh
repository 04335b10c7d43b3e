// silu(x G') * (x U') of many rows for compute capability 9.0, without the two products in memory. Tiles and the roles of
// warps are those of CUTLASS's cooperative kernels (Thakkar et al. 2023); sums are fp32.
//
// Two blocks form a cluster. They take the same rows of G and U and different rows of x; each loads half of that weight for
// both. A block is three warpgroups: one warp of the first loads, the other two multiply 64 rows each. Blocks stay
// resident. While a warpgroup turns its sums into results, the other has the matrix units for itself; for that the second
// one starts a little later, and the lead renews itself with every tile.
//
// A row is summed over columns in their order, 16 at a time, whatever the number of rows: its bits depend on that row and
// the weight alone.
#pragma once
#include "../../cuda/hopper.cuh"
#include "../gated_layout.h"

namespace isthmus::gated {

constexpr int kThreads = 384;
constexpr int kWarps = 8;  // that multiply

struct Arguments {
    CUtensorMap x;       // [rows][columns], boxes of kRows x kColumns
    CUtensorMap weight;  // [2 * width][columns], gates first, boxes of a tile's width x kColumns
    CUtensorMap out;     // [rows][width], boxes of kBoxRows x kBoxColumns
    int row_tiles, width_tiles;
    int steps;  // of kColumns columns
    int width;
    int band;  // as in `place`
};

template <typename T>
struct Shared {
    alignas(1024) char x[T::kStages][kRowsBytes];
    alignas(1024) char weight[T::kStages][kCluster * T::kHalfBytes];
    alignas(1024) char out[kWarps][T::kBoxes][T::kBoxBytes];
    uint64_t full[T::kStages], empty[T::kStages];
};

// Loads the tiles of a block; by a whole warp, one lane of which issues the loads.
template <typename T>
__device__ __forceinline__ void load_tiles(const Arguments &arguments, Shared<T> &shared) {
    const int rank = int(cluster_rank());
    const bool leads = leader();
    const int tiles = arguments.row_tiles * arguments.width_tiles;
    Turn<T::kStages> turn;
    for (int tile = blockIdx.x / kCluster; tile < tiles; tile += gridDim.x / kCluster) {
        const Place at = place(tile, arguments.row_tiles, arguments.width_tiles, arguments.band);
        const int row = (at.rows * kCluster + rank) * kRows;
        const int half = rank * arguments.width + at.width * T::kWidth;
        for (int step = 0; step < arguments.steps; step++) {
            wait(&shared.empty[turn.index], turn.phase ^ 1);
            if (leads) {
                uint64_t *full = &shared.full[turn.index];
                expect(full, kRowsBytes + kCluster * T::kHalfBytes);
                load(shared_address(shared.x[turn.index]), &arguments.x, full, step * kColumns, row);
                load_for((1 << kCluster) - 1, shared_address(shared.weight[turn.index]) + rank * T::kHalfBytes,
                         &arguments.weight, full, step * kColumns, half);
            }
            __syncwarp();
            turn.next();
        }
    }
}

// silu(g) u of two columns, with one reciprocal for both: in fp32 the product of two powers of two up to 62 stays in range,
// and where the gate is further from zero, silu(g) is below 2^-56.
__device__ __forceinline__ uint32_t gate(float g0, float u0, float g1, float u1) {
    constexpr float kLog2E = 1.44269504f;
    const float a = 1.f + exp2_fast(fminf(g0 * -kLog2E, 62.f)), b = 1.f + exp2_fast(fminf(g1 * -kLog2E, 62.f));
    const float r = reciprocal_fast(a * b);
    return pack(g0 * u0 * (r * b), g1 * u1 * (r * a), Bf16());
}

// Writes a warp's 16 rows of a tile, a box of columns at a time, each through a buffer of its own. `d`: of each row the sums
// of the tile's gates, then those of their values.
template <typename T>
__device__ __forceinline__ void write(const Arguments &arguments, const float (&d)[T::kSums],
                                      char (*buffers)[T::kBoxBytes], int row, int column) {
    const int lane = threadIdx.x % 32;
    const bool leads = leader();
#pragma unroll
    for (int box = 0; box < T::kBoxes; box++) {
        const uint32_t buffer = shared_address(buffers[box]);
        if (leads) stores_read<T::kBoxes - 1>();  // the last tile's store from this buffer
        __syncwarp();
#pragma unroll
        for (int pair = 0; pair < T::kBoxColumns / 16; pair++) {
            uint32_t parts[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = box * T::kBoxColumns / 2 + pair * 8 + i * 2, value = at + T::kSums / 2;
                parts[i] = gate(d[at], d[value], d[at + 1], d[value + 1]);
            }
            store_parts(buffer + swizzled<T::kBoxRowBytes>(lane % 16, 2 * pair + lane / 16), parts);
        }
        fence_async();
        __syncwarp();
        if (leads) {
            store(&arguments.out, buffer, column + box * T::kBoxColumns, row);
            stores_commit();
        }
    }
}

// Multiplies 64 rows of each tile of a block; by a warpgroup.
template <typename T>
__device__ __forceinline__ void multiply(const Arguments &arguments, Shared<T> &shared, int group) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, rank = int(cluster_rank());
    const int tiles = arguments.row_tiles * arguments.width_tiles;
    Turn<T::kStages> turn;
    float d[T::kSums] = {};
    if (group == 1 && arguments.steps > 1) wait(&shared.full[1], 0);
    for (int tile = blockIdx.x / kCluster; tile < tiles; tile += gridDim.x / kCluster) {
        const Place at = place(tile, arguments.row_tiles, arguments.width_tiles, arguments.band);
        int previous = 0;
        for (int step = 0; step < arguments.steps; step++) {
            wait(&shared.full[turn.index], turn.phase);
            const uint32_t rows = shared_address(shared.x[turn.index]) + group * 64 * kRowBytes;
            const uint64_t x = descriptor(rows, 16, 8 * kRowBytes);
            const uint64_t weight = descriptor(shared_address(shared.weight[turn.index]), 16, 8 * kRowBytes);
            product_fence();
#pragma unroll
            for (int i = 0; i < kColumns / 16; i++)  // 32 bytes further: in descriptors, 2
                product_rows(d, x + 2 * i, weight + 2 * i, step > 0 || i > 0, Bf16());
            product_commit();
            if (step > 0) {
                product_wait<1>();
                if (lane < kCluster) arrive(&shared.empty[previous], lane);
            }
            previous = turn.index;
            turn.next();
        }
        product_wait<0>();
        pin(d);
        if (lane < kCluster) arrive(&shared.empty[previous], lane);
        write<T>(arguments, d, shared.out[group * 4 + warp],
              (at.rows * kCluster + rank) * kRows + group * 64 + warp * kBoxRows, at.width * T::kWidth);
    }
    if (leader()) stores_wait();
}

template <typename T>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    gated_product(const __grid_constant__ Arguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ char memory[];
    auto &shared = *reinterpret_cast<Shared<T> *>((reinterpret_cast<uintptr_t>(memory) + 1023) / 1024 * 1024);
    if (threadIdx.x == 0) {
        for (int i = 0; i < T::kStages; i++) init(&shared.full[i], 1), init(&shared.empty[i], kWarps * kCluster);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        fence_async();
        prefetch(&arguments.x), prefetch(&arguments.weight), prefetch(&arguments.out);
    }
    cluster_sync();
    const int group = threadIdx.x / 128;
    if (group == 0) {
        fewer_registers<24>();
        if (threadIdx.x / 32 == 0) load_tiles(arguments, shared);
    } else {
        more_registers<240>();
        multiply(arguments, shared, group - 1);
    }
    // The other block may still load into this one's memory, and arrive at its barriers.
    cluster_sync();
#endif
}

}  // namespace isthmus::gated
