// The product of queries, keys and values with what is done to each of its heads: norm and rotary embedding in fp32, queries
// to their matrix, keys and values to the paged pool. A tile takes two heads of 128 channels, and a thread both halves of the
// channels that turn into each other; a row of a head is spread over four threads.
#pragma once
#include "product.cuh"

namespace isthmus::product {

struct Rotated {
    using T = Tile<128>;
    static constexpr int kDim = 128, kHalf = kDim / 2, kHeads = 2;  // of a tile

    struct Arguments : Product {
        int rows;
        int q_heads, kv_heads;
        int block_size;
        const int64_t *positions, *slots;  // [rows]; a negative slot is not written
        const float *cos, *sin;            // rows of kHalf, by position
        int64_t cos_row, sin_row;
        const uint32_t *q_weight, *k_weight;  // of the norms, two bf16 in each; null: no norm
        char *kv;                             // keys, then values, of one layer
        int64_t kv_block, kv_part, kv_token, kv_head;  // bytes
        float eps;
    };

    static __device__ __forceinline__ int weight_row(const Arguments &, Place at, int rank) {
        return (at.width * kHeads + rank) * kDim;
    }

    // Norm and rotation of a warp's 16 rows of both heads, in place.
    static __device__ __forceinline__ void turn(const Arguments &arguments, float (&d)[T::kSums], int row, int first) {
        const int lane = threadIdx.x % 32, pair = lane % 4;
        const uint32_t *weight[kHeads];
        float scale[kHeads][2];
        const float *cos[2], *sin[2];
#pragma unroll
        for (int s = 0; s < 2; s++) {  // the thread's rows
            const int own = row + lane / 4 + 8 * s;
            const int64_t position = own < arguments.rows ? arguments.positions[own] : 0;
            cos[s] = arguments.cos + position * arguments.cos_row + 2 * pair;
            sin[s] = arguments.sin + position * arguments.sin_row + 2 * pair;
        }
#pragma unroll
        for (int h = 0; h < kHeads; h++) {
            weight[h] = first + h < arguments.q_heads ? arguments.q_weight : arguments.k_weight;
#pragma unroll
            for (int s = 0; s < 2; s++) {
                float squares = 0.f;
#pragma unroll
                for (int j = 0; j < kDim / 8; j++) {
                    const float a = d[64 * h + 4 * j + 2 * s], b = d[64 * h + 4 * j + 2 * s + 1];
                    squares += a * a + b * b;
                }
                squares += __shfl_xor_sync(~0u, squares, 1);
                squares += __shfl_xor_sync(~0u, squares, 2);
                scale[h][s] = weight[h] ? rsqrtf(squares / kDim + arguments.eps) : 1.f;
            }
        }
#pragma unroll
        for (int j = 0; j < kHalf / 8; j++) {
            float2 c[2], z[2];
#pragma unroll
            for (int s = 0; s < 2; s++) {
                c[s] = __ldg(reinterpret_cast<const float2 *>(cos[s] + 8 * j));
                z[s] = __ldg(reinterpret_cast<const float2 *>(sin[s] + 8 * j));
            }
#pragma unroll
            for (int h = 0; h < kHeads; h++) {
                if (first + h >= arguments.q_heads + arguments.kv_heads) continue;  // values
                float low[2] = {1.f, 1.f}, high[2] = {1.f, 1.f};
                if (weight[h]) {
                    unpack(__ldg(weight[h] + 4 * j + pair), low);
                    unpack(__ldg(weight[h] + kHalf / 2 + 4 * j + pair), high);
                }
#pragma unroll
                for (int s = 0; s < 2; s++) {
                    float *a = &d[64 * h + 4 * j + 2 * s], *b = a + kHalf / 2;
                    const float a0 = a[0] * scale[h][s] * low[0], a1 = a[1] * scale[h][s] * low[1];
                    const float b0 = b[0] * scale[h][s] * high[0], b1 = b[1] * scale[h][s] * high[1];
                    a[0] = a0 * c[s].x - b0 * z[s].x, a[1] = a1 * c[s].y - b1 * z[s].y;
                    b[0] = b0 * c[s].x + a0 * z[s].x, b[1] = b1 * c[s].y + a1 * z[s].y;
                }
            }
        }
    }

    // Writes a warp's 16 rows of both heads, 64 channels at a time, through buffers in turn.
    static __device__ __forceinline__ void write(const Arguments &arguments, float (&d)[T::kSums],
                                                 char (*buffers)[T::kBoxBytes], int row, int at) {
        const int lane = threadIdx.x % 32, first = at * kHeads;
        const bool leads = leader();
        if (first < arguments.q_heads + arguments.kv_heads) turn(arguments, d, row, first);
        // Where the keys of the row of this lane go; negative: nowhere.
        int64_t place = -1;
        if (first + kHeads > arguments.q_heads && lane < kBoxRows && row + lane < arguments.rows) {
            const int64_t slot = arguments.slots[row + lane];
            const int block = int(slot) / arguments.block_size, within = int(slot) % arguments.block_size;
            if (slot >= 0) place = block * arguments.kv_block + within * arguments.kv_token;
        }
#pragma unroll
        for (int box = 0; box < kHeads * T::kBoxes; box++) {
            const int head = first + box / T::kBoxes, kv_head = head - arguments.q_heads;
            const uint32_t buffer = shared_address(buffers[box % T::kBoxes]);
            if (leads) stores_read<T::kBoxes - 1>();  // the store from this buffer before
            __syncwarp();
#pragma unroll
            for (int pair = 0; pair < T::kBoxColumns / 16; pair++) {
                uint32_t parts[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int sum = box * T::kBoxColumns / 2 + pair * 8 + i * 2;
                    parts[i] = pack(d[sum], d[sum + 1], Bf16());
                }
                store_parts(buffer + swizzled(lane % 16, 2 * pair + lane / 16), parts);
            }
            if (kv_head < 0) {
                fence_async();
                __syncwarp();
                if (leads) store(&arguments.out, buffer, (first * T::kBoxes + box) * T::kBoxColumns, row);
            } else {
                const bool values = kv_head >= arguments.kv_heads;
                char *heads = arguments.kv + (values ? arguments.kv_part : 0) +
                              (values ? kv_head - arguments.kv_heads : kv_head) * arguments.kv_head +
                              box % T::kBoxes * T::kBoxRowBytes + lane % 8 * 16;
                __syncwarp();
#pragma unroll
                for (int i = 0; i < kBoxRows / 4; i++) {  // four rows at a time, eight lanes each
                    const int64_t to = __shfl_sync(~0u, place, 4 * i + lane / 8);
                    const char *from = buffers[box % T::kBoxes] + swizzled(4 * i + lane / 8, lane % 8);
                    if (to >= 0) *reinterpret_cast<uint4 *>(heads + to) = *reinterpret_cast<const uint4 *>(from);
                }
            }
            // Without a store too: groups are counted by boxes.
            if (leads) stores_commit();
        }
    }
};

__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    rotated_product(const __grid_constant__ Rotated::Arguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    run<Rotated>(arguments);
#endif
}

}  // namespace isthmus::product
