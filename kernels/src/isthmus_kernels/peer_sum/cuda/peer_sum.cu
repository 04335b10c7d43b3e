// Sums over the GPUs of one host, which map each other's inboxes. Every rank stores its rows into the inboxes of the others
// and adds what arrives in its own: one way over the link, and no barrier.
//
// The data are their own flags. A word of an inbox is empty until the other rank's store has arrived; whoever reads it makes
// it empty again. So nothing depends on the order in which stores arrive, not even on the 16 bytes of one arriving together.
// Calls alternate between two halves of an inbox (`parity`). A half is written again two calls later: the writer has then
// ended the call between, for which it needed what the reader sent after its kernel before had ended, emptying included.
// Every rank makes the same calls, each on one stream. A block counts the calls that it took part in; as many blocks take
// part on every rank, so their counts agree. They are all resident at once, since those of another rank wait for them.
//
// Where each rank has a card of its own, blocks may begin while the kernel before still runs, and let the one after begin
// (isthmus_kernels.early_launch). Before they have waited for the end of the former they read weights alone; the latter
// takes places that are left once all of them are resident.
//
// Each element is added in the order of ranks, in fp32: the same bits on every rank, whoever was first.
#include <cuda_runtime.h>

#include <algorithm>

#include "../layout.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace isthmus::peer_sum;

// In the order in which cuda_impl.py packs it. Strides are in bytes.
struct Call {
    int64_t x, residual, weight, out;  // addresses; residual 0: the sum alone
    int64_t rows, width;
    int64_t parts, part_stride;  // 0: x is of the dtype; else fp32, and its parts are added in order
    int64_t x_row, residual_row, out_row;
    int64_t dtype;  // 0: bf16, 1: fp16, 2: fp32
    int64_t device;
    int64_t rank, ranks, blocks, room;
    int64_t calls, words;  // addresses
    int64_t patience_ns;
    int64_t early;  // 1: may begin while the kernel before still runs
    double eps;
    int64_t inboxes[kMostRanks];
};

struct Arguments {
    const char *x;
    char *residual;
    const char *weight;
    char *out;
    int64_t rows, x_row, residual_row, out_row, room, part_stride;
    int parts;
    int vectors;  // 16 bytes each, of a row
    int rank, ranks, blocks;
    float width, eps;
    uint32_t *calls;           // [blocks]
    volatile uint32_t *words;  // of the host: 0: give up; 1: the rank that was waited for in vain, plus 1
    uint64_t patience_ns;
    char *inboxes[kMostRanks];
};

// By the instructions themselves: CUDA's headers of 16-bit types come with a package that is not needed otherwise.
struct Bf16 {
    static __device__ __forceinline__ void widen(uint32_t pair, float &low, float &high) {
        low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xFFFF0000u);
    }
    static __device__ __forceinline__ uint32_t narrow(float low, float high) {
        uint32_t pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
    }
};

struct Fp16 {
    static __device__ __forceinline__ void widen(uint32_t pair, float &low, float &high) {
        asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
            : "=f"(low), "=f"(high)
            : "r"(pair));
    }
    static __device__ __forceinline__ uint32_t narrow(float low, float high) {
        uint32_t pair;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
    }
};

// 16 bytes as numbers.
template <typename T>
struct Pack {
    static constexpr int kCount = 8;
    static __device__ void widen(uint4 from, float (&to)[8]) {
        T::widen(from.x, to[0], to[1]), T::widen(from.y, to[2], to[3]);
        T::widen(from.z, to[4], to[5]), T::widen(from.w, to[6], to[7]);
    }
    static __device__ uint4 narrow(const float (&from)[8]) {
        return {T::narrow(from[0], from[1]), T::narrow(from[2], from[3]), T::narrow(from[4], from[5]),
                T::narrow(from[6], from[7])};
    }
};

template <>
struct Pack<float> {
    static constexpr int kCount = 4;
    static __device__ void widen(uint4 from, float (&to)[4]) {
        to[0] = __uint_as_float(from.x), to[1] = __uint_as_float(from.y);
        to[2] = __uint_as_float(from.z), to[3] = __uint_as_float(from.w);
    }
    static __device__ uint4 narrow(const float (&from)[4]) {
        return {__float_as_uint(from[0]), __float_as_uint(from[1]), __float_as_uint(from[2]), __float_as_uint(from[3])};
    }
};

// Past the first-level cache, and never merged or moved by the compiler.
__device__ __forceinline__ uint4 read_inbox(const char *at) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store_inbox(char *at, uint4 v) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ bool whole(uint4 v) {
    return v.x != kEmpty && v.y != kEmpty && v.z != kEmpty && v.w != kEmpty;
}

// Every few thousand looks. Nothing that runs later on this device has a result: a trap ends them all.
__device__ __noinline__ void look_up(const Arguments &a, int from, uint64_t &begun) {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (!begun) begun = now;
    const bool overdue = now - begun > a.patience_ns;
    if (!overdue && !a.words[0]) return;
    if (overdue) {
        a.words[1] = uint32_t(from) + 1;
        __threadfence_system();
    }
    __trap();
}

__device__ __forceinline__ uint4 take(char *at, const Arguments &a, int from) {
    uint4 v = read_inbox(at);
    uint64_t begun = 0;
    for (uint32_t looks = 1; !whole(v); looks++) {
        if (looks % 4096 == 0) look_up(a, from, begun);
        v = read_inbox(at);
    }
    *reinterpret_cast<uint4 *>(at) = {kEmpty, kEmpty, kEmpty, kEmpty};
    return v;
}

// This rank's 16 bytes of the dtype: as they are in x, or the sum of fp32 parts.
template <typename T, bool kParts>
__device__ __forceinline__ uint4 own_vector(const Arguments &a, int64_t row, int column) {
    uint4 v;
    if constexpr (kParts) {
        float total[8];
        const char *at = a.x + row * a.x_row + int64_t(column) * 32;
        for (int part = 0; part < a.parts; part++, at += a.part_stride) {
            float low[4], high[4];
            Pack<float>::widen(*reinterpret_cast<const uint4 *>(at), low);
            Pack<float>::widen(*reinterpret_cast<const uint4 *>(at + 16), high);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                total[e] = part ? total[e] + low[e] : low[e];
                total[e + 4] = part ? total[e + 4] + high[e] : high[e];
            }
        }
        v = Pack<T>::narrow(total);
    } else {
        v = *reinterpret_cast<const uint4 *>(a.x + row * a.x_row + int64_t(column) * 16);
    }
    return {sent(v.x), sent(v.y), sent(v.z), sent(v.w)};
}

// A block takes rows block, block + gridDim.x, ...; a thread kVectors times 16 bytes of each. The row after is sent before
// this one is waited for.
template <typename T, int kVectors, bool kNorm, bool kParts>
__global__ void __launch_bounds__(kMostThreads, 1) sum_rows(const __grid_constant__ Arguments a) {
    using P = Pack<T>;
    __shared__ float squares[2][32];
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, warps = int(blockDim.x) / 32;
    const int64_t row_bytes = int64_t(a.vectors) * 16;

    auto column = [&](int i) { return int(threadIdx.x) + i * int(blockDim.x); };
    uint4 own[kVectors], following[kVectors], weight[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; i++)
        if (kNorm && column(i) < a.vectors) weight[i] = *reinterpret_cast<const uint4 *>(a.weight + int64_t(column(i)) * 16);
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const uint32_t call = a.calls[blockIdx.x];

    auto send = [&](int64_t row, int64_t turn, uint4(&own)[kVectors]) {
#pragma unroll
        for (int i = 0; i < kVectors; i++) {
            if (column(i) >= a.vectors) continue;
            own[i] = own_vector<T, kParts>(a, row, column(i));
            for (int next = 1; next < a.ranks; next++) {
                const int reader = (a.rank + next) % a.ranks;  // not all to the same one at once
                store_inbox(a.inboxes[reader] + turn * row_bytes + int64_t(column(i)) * 16 +
                                room_offset(call, int(blockIdx.x), a.blocks, place(a.rank, reader), a.ranks, a.room),
                            own[i]);
            }
        }
    };

    send(blockIdx.x, 0, own);

    int64_t turn = 0;
    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, turn++) {
        uint4 residual[kVectors];
#pragma unroll
        for (int i = 0; i < kVectors; i++)
            if (kNorm && column(i) < a.vectors)
                residual[i] = *reinterpret_cast<const uint4 *>(a.residual + row * a.residual_row + int64_t(column(i)) * 16);
        if (row + gridDim.x < a.rows) send(row + gridDim.x, turn + 1, following);

        float square = 0;
#pragma unroll
        for (int i = 0; i < kVectors; i++) {
            if (column(i) >= a.vectors) continue;
            float total[P::kCount], part[P::kCount];
            for (int rank = 0; rank < a.ranks; rank++) {
                uint4 v = own[i];
                if (rank != a.rank)
                    v = take(a.inboxes[a.rank] + turn * row_bytes + int64_t(column(i)) * 16 +
                                 room_offset(call, int(blockIdx.x), a.blocks, place(rank, a.rank), a.ranks, a.room),
                             a, rank);
                P::widen(v, part);
#pragma unroll
                for (int e = 0; e < P::kCount; e++) total[e] = rank ? total[e] + part[e] : part[e];
            }
            if constexpr (kNorm) {
                P::widen(residual[i], part);
#pragma unroll
                for (int e = 0; e < P::kCount; e++) total[e] += part[e];
                // What is normed is the residual as stored, so that it can be recomputed from it.
                residual[i] = P::narrow(total);
                *reinterpret_cast<uint4 *>(a.residual + row * a.residual_row + int64_t(column(i)) * 16) = residual[i];
                P::widen(residual[i], total);
#pragma unroll
                for (int e = 0; e < P::kCount; e++) square += total[e] * total[e];
            } else {
                *reinterpret_cast<uint4 *>(a.out + row * a.out_row + int64_t(column(i)) * 16) = P::narrow(total);
            }
        }
        if constexpr (kNorm) {
#pragma unroll
            for (int step = 16; step; step /= 2) square += __shfl_xor_sync(~0u, square, step);
            if (!lane) squares[turn & 1][warp] = square;
            __syncthreads();
            // All warps add alike. The other half is written by the next row, and this one after the next barrier.
            square = lane < warps ? squares[turn & 1][lane] : 0;
#pragma unroll
            for (int step = 16; step; step /= 2) square += __shfl_xor_sync(~0u, square, step);
            const float scale = rsqrtf(square / a.width + a.eps);
#pragma unroll
            for (int i = 0; i < kVectors; i++) {
                if (column(i) >= a.vectors) continue;
                float value[P::kCount], factor[P::kCount];
                P::widen(residual[i], value);
                P::widen(weight[i], factor);
#pragma unroll
                for (int e = 0; e < P::kCount; e++) value[e] = value[e] * scale * factor[e];
                *reinterpret_cast<uint4 *>(a.out + row * a.out_row + int64_t(column(i)) * 16) = P::narrow(value);
            }
        }
#pragma unroll
        for (int i = 0; i < kVectors; i++) own[i] = following[i];
    }
    __syncthreads();  // all threads have read the count
    if (!threadIdx.x) a.calls[blockIdx.x] = call + 1;
}

template <typename T, int kVectors>
const void *kernel_of(bool norm, bool parts) {
    if constexpr (Pack<T>::kCount == 8)
        if (parts) return norm ? (const void *)sum_rows<T, kVectors, true, true> : nullptr;
    if (parts) return nullptr;
    return norm ? (const void *)sum_rows<T, kVectors, true, false> : (const void *)sum_rows<T, kVectors, false, false>;
}

template <typename T>
const void *kernel_of(int vectors, bool norm, bool parts) {
    if (vectors <= kMostThreads) return kernel_of<T, 1>(norm, parts);
    if (vectors <= 2 * kMostThreads) return kernel_of<T, 2>(norm, parts);
    return vectors <= 4 * kMostThreads ? kernel_of<T, 4>(norm, parts) : nullptr;
}

}  // namespace

// 0 is success, a positive code is a cudaError_t.
EXPORT int64_t isthmus_peer_sum(const Call *call, cudaStream_t stream) {
    int current = -1;
    if (const cudaError_t code = cudaGetDevice(&current)) return code;
    if (current != call->device) return cudaErrorInvalidDevice;
    const int64_t row_bytes = call->width * (call->dtype == 2 ? 4 : 2);
    const int64_t blocks = std::min(call->rows, call->blocks);
    if (call->ranks > kMostRanks || row_bytes % 16 || blocks < 1) return cudaErrorInvalidValue;
    if ((call->rows + blocks - 1) / blocks * row_bytes > call->room) return cudaErrorInvalidValue;
    const bool norm = call->residual != 0;
    const int vectors = int(row_bytes / 16);
    const bool parts = call->parts != 0;
    const void *kernel = call->dtype == 0   ? kernel_of<Bf16>(vectors, norm, parts)
                         : call->dtype == 1 ? kernel_of<Fp16>(vectors, norm, parts)
                                            : kernel_of<float>(vectors, norm, parts);
    if (!kernel) return cudaErrorInvalidValue;
    Arguments arguments = {};
    arguments.x = (const char *)call->x;
    arguments.residual = (char *)call->residual;
    arguments.weight = (const char *)call->weight;
    arguments.out = (char *)call->out;
    arguments.rows = call->rows;
    arguments.x_row = call->x_row, arguments.residual_row = call->residual_row, arguments.out_row = call->out_row;
    arguments.room = call->room, arguments.part_stride = call->part_stride, arguments.parts = int(call->parts);
    arguments.vectors = vectors;
    arguments.rank = int(call->rank), arguments.ranks = int(call->ranks), arguments.blocks = int(call->blocks);
    arguments.width = float(call->width), arguments.eps = float(call->eps);
    arguments.calls = (uint32_t *)call->calls;
    arguments.words = (volatile uint32_t *)call->words;
    arguments.patience_ns = uint64_t(call->patience_ns);
    for (int rank = 0; rank < call->ranks; rank++) arguments.inboxes[rank] = (char *)call->inboxes[rank];
    const int each = (vectors + kMostThreads - 1) / kMostThreads;
    const int vectors_a_thread = each == 3 ? 4 : each;
    const int threads = ((vectors + vectors_a_thread - 1) / vectors_a_thread + 31) / 32 * 32;
    void *parameters[] = {&arguments};
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(unsigned(blocks)), config.blockDim = dim3(unsigned(threads)), config.stream = stream;
    config.attrs = &early, config.numAttrs = call->early ? 1 : 0;
    return cudaLaunchKernelExC(&config, kernel, parameters);
}
