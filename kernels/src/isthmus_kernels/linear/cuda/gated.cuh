// silu(x G') * (x U') of many rows, without the two products in memory: a tile takes the same columns of both, so that a
// thread has gates and values of its results.
#pragma once
#include "product.cuh"

namespace isthmus::product {

// silu(g) u of two columns, with one reciprocal for both: in fp32 the product of two powers of two up to 62 stays in range,
// and where the gate is further from zero, silu(g) is below 2^-56.
__device__ __forceinline__ uint32_t gate(float g0, float u0, float g1, float u1) {
    constexpr float kLog2E = 1.44269504f;
    const float a = 1.f + exp2_fast(fminf(g0 * -kLog2E, 62.f)), b = 1.f + exp2_fast(fminf(g1 * -kLog2E, 62.f));
    const float r = reciprocal_fast(a * b);
    return pack(g0 * u0 * (r * b), g1 * u1 * (r * a), Bf16());
}

template <typename Tile>
struct Gated {
    using T = Tile;
    struct Arguments : Product {
        int width;  // of the result; the weight is [2 * width][columns], gates first
    };

    // The first block of a cluster loads gates, the second values.
    static __device__ __forceinline__ int weight_row(const Arguments &arguments, Place at, int rank) {
        return rank * arguments.width + at.width * T::kWidth;
    }

    // Writes a warp's 16 rows of a tile, a box of columns at a time, each through a buffer of its own. `d`: of each row the
    // sums of the tile's gates, then those of their values.
    static __device__ __forceinline__ void write(const Arguments &arguments, const float (&d)[T::kSums],
                                                 char (*buffers)[T::kBoxBytes], int row, int at) {
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
                    const int sum = box * T::kBoxColumns / 2 + pair * 8 + i * 2, value = sum + T::kSums / 2;
                    parts[i] = gate(d[sum], d[value], d[sum + 1], d[value + 1]);
                }
                store_parts(buffer + swizzled<T::kBoxRowBytes>(lane % 16, 2 * pair + lane / 16), parts);
            }
            fence_async();
            __syncwarp();
            if (leads) {
                store(&arguments.out, buffer, at * T::kWidth + box * T::kBoxColumns, row);
                stores_commit();
            }
        }
    }
};

template <typename T>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    gated_product(const __grid_constant__ typename Gated<T>::Arguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    run<Gated<T>>(arguments);
#endif
}

}  // namespace isthmus::product
