// Products of many rows for compute capability 9.0 whose results are worked on before they are written. Tiles and the roles
// of warps are those of CUTLASS's cooperative kernels (Thakkar et al. 2023); sums are fp32. What becomes of the sums, and
// which rows of the weight meet in a tile, an operation says (gated.cuh, rotated.cuh).
//
// Two blocks form a cluster. They take the same two parts of the weight and different rows of x; each loads one of the parts
// for both. A block is three warpgroups: one warp of the first loads, the other two multiply 64 rows each. Blocks stay
// resident. While a warpgroup turns its sums into results, the other has the matrix units for itself; for that the second
// one starts a little later, and the lead renews itself with every tile.
//
// A row is summed over columns in their order, 16 at a time, whatever the number of rows: its bits depend on that row and
// the weight alone.
#pragma once
#include "../../cuda/hopper.cuh"
#include "../product_layout.h"

namespace isthmus::product {

constexpr int kThreads = 384;
constexpr int kWarps = 8;  // that multiply

struct Product {
    CUtensorMap x;       // [rows][columns], boxes of kRows x kColumns
    CUtensorMap weight;  // [outputs][columns], boxes of a tile's width x kColumns
    CUtensorMap out;     // [rows][width], boxes of kBoxRows x kBoxColumns
    int row_tiles, width_tiles;
    int steps;  // of kColumns columns
    int band;   // as in `place`
};

template <typename T>
struct Shared {
    alignas(1024) char x[T::kStages][kRowsBytes];
    alignas(1024) char weight[T::kStages][kCluster * T::kHalfBytes];
    alignas(1024) char out[kWarps][T::kBoxes][T::kBoxBytes];
    uint64_t full[T::kStages], empty[T::kStages];
};

// Loads the tiles of a block; by a whole warp, one lane of which issues the loads.
template <typename Op>
__device__ __forceinline__ void load_tiles(const typename Op::Arguments &arguments, Shared<typename Op::T> &shared) {
    using T = typename Op::T;
    const int rank = int(cluster_rank());
    const bool leads = leader();
    const int tiles = arguments.row_tiles * arguments.width_tiles;
    Turn<T::kStages> turn;
    for (int tile = blockIdx.x / kCluster; tile < tiles; tile += gridDim.x / kCluster) {
        const Place at = place(tile, arguments.row_tiles, arguments.width_tiles, arguments.band);
        const int row = (at.rows * kCluster + rank) * kRows;
        const int half = Op::weight_row(arguments, at, rank);
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

// Multiplies 64 rows of each tile of a block; by a warpgroup.
template <typename Op>
__device__ __forceinline__ void multiply(const typename Op::Arguments &arguments, Shared<typename Op::T> &shared,
                                         int group) {
    using T = typename Op::T;
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
        Op::write(arguments, d, shared.out[group * 4 + warp],
                  (at.rows * kCluster + rank) * kRows + group * 64 + warp * kBoxRows, at.width);
    }
    if (leader()) stores_wait();
}

// A whole kernel, of clusters of kCluster blocks of kThreads threads.
template <typename Op>
__device__ __forceinline__ void run(const typename Op::Arguments &arguments) {
    using T = typename Op::T;
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
        if (threadIdx.x / 32 == 0) load_tiles<Op>(arguments, shared);
    } else {
        more_registers<240>();
        multiply<Op>(arguments, shared, group - 1);
    }
    // The other block may still load into this one's memory, and arrive at its barriers.
    cluster_sync();
}

}  // namespace isthmus::product
