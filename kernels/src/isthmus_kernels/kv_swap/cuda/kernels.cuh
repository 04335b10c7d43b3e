// The two copy kernels. `ring` moves items through shared memory with bulk copies (cp.async.bulk, the TMA unit):
// the addresses cost one thread a few instructions and no register holds data. `words` moves them with plain loads
// and stores of 1 to 16 bytes, for what bulk copies cannot: addresses or sizes that are no multiple of 16, and rows
// too short to be worth one.
#pragma once
#include "submit.h"

namespace isthmus {

constexpr int kMaxSlots = 16;
constexpr int kMaxWarps = 16;

// Holds a warp to its share of a rate. Stores that come faster than the link takes them fill the queues that everybody's
// memory traffic goes through; a little slower, and they leave those queues empty.
struct Pace {
    int64_t per_byte, next = 0;

    __device__ void wait(uint32_t bytes) {
        if (!per_byte) return;
        constexpr int64_t kCatchUp = 4000;  // nanoseconds of being late that a warp may make up for
        int64_t now = clock();
        if (next < now - kCatchUp) next = now - kCatchUp;
        while (now < next) now = clock();
        next += bytes * per_byte / 1000;
    }

  private:
    static __device__ int64_t clock() {
        int64_t nanoseconds;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
        return nanoseconds;
    }
};

// The items of a launch are dealt to warps in batches of consecutive items: neighbours mostly share their pair, and
// each lane works out one item of the batch, so that no address is on the path of a copy.
struct Batches {
    int64_t items, batch, stride, next;

    __device__ Batches(const SwapLaunch &launch) {
        items = *launch.count * launch.shape.items;
        const int64_t warps = int64_t(gridDim.x) * (blockDim.x / 32);
        const int64_t even = items / (warps * 2);
        batch = even < 1 ? 1 : even > 32 ? 32 : even;
        next = (int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32) * batch;
        stride = warps * batch;
    }
    // This lane's item of the warp's next batch; returns how many the batch has (0: no more).
    __device__ int locate(const SwapLaunch &launch, SwapItem &item) {
        const int64_t left = items - next;
        const int size = left <= 0 ? 0 : int(left < batch ? left : batch);
        const int lane = threadIdx.x % 32;
        if (lane < size) {
            const int64_t index = next + lane, block = index / launch.shape.items;
            item = kv_swap_item(launch.shape, launch.pairs[block], uint32_t(index - block * launch.shape.items));
        }
        next += stride;
        return size;
    }
};

__device__ __forceinline__ SwapItem broadcast(const SwapItem &item, int lane) {
    SwapItem out;
    out.pool = __shfl_sync(~0u, item.pool, lane);
    out.host = __shfl_sync(~0u, item.host, lane);
    out.bytes = __shfl_sync(~0u, item.bytes, lane);
    out.rows = __shfl_sync(~0u, item.rows, lane);
    return out;
}

__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return uint32_t(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(uint64_t *barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint64_t *barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t *barrier, uint32_t parity) {
    uint32_t done = 0;
    while (!done)
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
}

__device__ __forceinline__ void bulk_load(void *to, const char *from, uint32_t bytes, uint64_t *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

__device__ __forceinline__ void bulk_store(char *to, const void *from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Wait until at most `pending` of this thread's latest stores have yet to read shared memory. The instruction takes
// a constant; waiting for more than asked is safe.
__device__ __forceinline__ void bulk_wait_read(int pending) {
    if (pending >= 8) asm volatile("cp.async.bulk.wait_group.read 8;" ::: "memory");
    else if (pending >= 6) asm volatile("cp.async.bulk.wait_group.read 6;" ::: "memory");
    else if (pending >= 4) asm volatile("cp.async.bulk.wait_group.read 4;" ::: "memory");
    else if (pending == 3) asm volatile("cp.async.bulk.wait_group.read 3;" ::: "memory");
    else if (pending == 2) asm volatile("cp.async.bulk.wait_group.read 2;" ::: "memory");
    else if (pending == 1) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    else asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Every warp has a ring of its own: `slots` pieces of shared memory, a barrier each that its load completes. Loads run
// `ahead` items before stores. From the host nearly all slots wait for loads (a read crosses the link and back before
// it frees its slot); to the host nearly all wait for stores (the link drains them).
template <bool kIn>
__global__ void __launch_bounds__(kMaxWarps * 32, 1) ring(const __grid_constant__ SwapLaunch launch) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    __shared__ __align__(8) uint64_t barriers[kMaxWarps][kMaxSlots];
    __shared__ SwapItem held[kMaxWarps][kMaxSlots];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slots = launch.slots, ahead = launch.ahead;
    const SwapShape &shape = launch.shape;
    char *ring = memory + int64_t(warp) * slots * launch.slot_bytes;
    if (lane < slots) barrier_init(&barriers[warp][lane]);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncwarp();

    const int64_t from_stride = kIn ? shape.host_stride[0] : shape.pool_stride[0];
    const int64_t to_stride = kIn ? shape.pool_stride[0] : shape.host_stride[0];
    const bool from_one = from_stride == shape.fragment, to_one = to_stride == shape.fragment;
    Pace pace{launch.pace};
    Batches batches(launch);
    SwapItem mine, later;
    int size = batches.locate(launch, mine), at = 0, later_size = 0;
    int load_slot = 0, store_slot = 0, flying = 0;
    uint32_t parity = 0;  // of the ring's present turn, for stores
    while (true) {
        const bool more = at < size;
        if (flying == ahead || (!more && flying)) {
            const SwapItem item = held[warp][store_slot];
            __syncwarp();
            barrier_wait(&barriers[warp][store_slot], parity);
            if (!kIn) pace.wait(item.rows * item.bytes);
            char *to = kIn ? launch.pool + item.pool : launch.host + item.host;
            const char *from = ring + int64_t(store_slot) * launch.slot_bytes;
            if (to_one || item.rows == 1) {
                if (lane == 0) bulk_store(to, from, item.rows * item.bytes);
            } else {
                for (uint32_t r = lane; r < item.rows; r += 32)
                    bulk_store(to + r * to_stride, from + r * item.bytes, item.bytes);
            }
            bulk_commit();
            if (++store_slot == slots) store_slot = 0, parity ^= 1;
            flying--;
        } else if (more) {
            // `slots - flying - 1` stores were issued after the one that still has to read this slot.
            bulk_wait_read(slots - flying - 1);
            const SwapItem item = broadcast(mine, at++);
            if (kIn) pace.wait(item.rows * item.bytes);
            if (lane == 0) {
                held[warp][load_slot] = item;
                barrier_expect(&barriers[warp][load_slot], item.rows * item.bytes);
            }
            __syncwarp();
            const char *from = kIn ? launch.host + item.host : launch.pool + item.pool;
            char *to = ring + int64_t(load_slot) * launch.slot_bytes;
            uint64_t *barrier = &barriers[warp][load_slot];
            if (from_one || item.rows == 1) {
                if (lane == 0) bulk_load(to, from, item.rows * item.bytes, barrier);
            } else {
                for (uint32_t r = lane; r < item.rows; r += 32)
                    bulk_load(to + r * item.bytes, from + r * from_stride, item.bytes, barrier);
            }
            if (++load_slot == slots) load_slot = 0;
            flying++;
            if (at == 1) later_size = batches.locate(launch, later);
            if (at == size) mine = later, size = later_size, at = 0;
        } else {
            break;
        }
    }
    // Shared memory must outlive its readers, and the kernel's end must mean that every byte has arrived.
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

template <int kBytes>
struct Word;
template <>
struct Word<16> { using Type = uint4; };
template <>
struct Word<8> { using Type = uint2; };
template <>
struct Word<4> { using Type = uint32_t; };
template <>
struct Word<2> { using Type = uint16_t; };
template <>
struct Word<1> { using Type = uint8_t; };

// Eight independent words per lane before the first is stored: the link's round trip is paid once for all eight.
template <int kBytes, bool kIn>
__global__ void __launch_bounds__(kMaxWarps * 32, 1) words(const __grid_constant__ SwapLaunch launch) {
    using T = typename Word<kBytes>::Type;
    constexpr int kUnroll = 8;
    const int lane = threadIdx.x % 32;
    const SwapShape &shape = launch.shape;
    const int64_t from_stride = kIn ? shape.host_stride[0] : shape.pool_stride[0];
    const int64_t to_stride = kIn ? shape.pool_stride[0] : shape.host_stride[0];
    Pace pace{launch.pace};
    Batches batches(launch);
    SwapItem mine;
    for (int size = batches.locate(launch, mine); size; size = batches.locate(launch, mine)) {
        for (int at = 0; at < size; at++) {
            const SwapItem item = broadcast(mine, at);
            pace.wait(item.rows * item.bytes);
            const char *from = kIn ? launch.host + item.host : launch.pool + item.pool;
            char *to = kIn ? launch.pool + item.pool : launch.host + item.host;
            const uint32_t per_row = item.bytes / kBytes, total = per_row * item.rows;
            for (uint32_t first = lane; first < total; first += 32 * kUnroll) {
                T held[kUnroll];
                char *target[kUnroll];
#pragma unroll
                for (int u = 0; u < kUnroll; u++) {
                    const uint32_t index = first + u * 32;
                    if (index < total) {
                        const uint32_t row = item.rows == 1 ? 0 : index / per_row, column = index - row * per_row;
                        held[u] = __ldcs((const T *)(from + row * from_stride + column * int64_t(kBytes)));
                        target[u] = to + row * to_stride + column * int64_t(kBytes);
                    }
                }
#pragma unroll
                for (int u = 0; u < kUnroll; u++)
                    if (first + u * 32 < total) *(T *)target[u] = held[u];
            }
        }
    }
}

}  // namespace isthmus
