// The swap on a GPU: kernels are launched here, everything else of a submission is in submit.h.
// Plain C entry points, called through ctypes (cuda_impl.py); 0 is success, a positive code is a cudaError_t, a
// negative one is explained there. Nothing here allocates, synchronises with the device or touches pageable memory
// between open and close, except that a submission waits for its turn in a staging ring that is all in flight, and a
// caller where too many swaps are.
#include <cuda_runtime.h>

#include <memory>
#include <mutex>
#include <new>
#include <system_error>

#include "kernels.cuh"
#include "submit.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace isthmus;

namespace {

// Makes the device current for a scope.
struct Device {
    int before = 0;
    explicit Device(int64_t device) {
        cudaGetDevice(&before);
        if (before != device) cudaSetDevice(int(device));
    }
    ~Device() { cudaSetDevice(before); }
};

constexpr int kMaxShared = 200 * 1024;

const void *kernel_of(const Route &route, bool in) {
    if (!route.by_words) return in ? (const void *)ring<true> : (const void *)ring<false>;
    switch (route.shape.word) {
        case 16: return in ? (const void *)words<16, true> : (const void *)words<16, false>;
        case 8: return in ? (const void *)words<8, true> : (const void *)words<8, false>;
        case 4: return in ? (const void *)words<4, true> : (const void *)words<4, false>;
        case 2: return in ? (const void *)words<2, true> : (const void *)words<2, false>;
        default: return in ? (const void *)words<1, true> : (const void *)words<1, false>;
    }
}

size_t shared_bytes(const Route &route) {
    return route.by_words ? 0 : size_t(route.warps * route.slots * route.slot_bytes);
}

struct Prepared {
    Swap *swap;
    int64_t device;
    int direction;
    int64_t capacity;
    Page *page;
};

template <class Id>
int64_t fill(Prepared &prepared, const Id *pool, const Id *host, int64_t count) {
    if (!good(*prepared.swap, prepared.direction, pool, host, count)) return BAD_IDS;
    for (int64_t i = 0; i < count; i++) prepared.page->pairs[i] = {uint32_t(pool[i]), uint32_t(host[i])};
    prepared.page->count = count;
    return 0;
}

}  // namespace

int64_t isthmus::start_kernel(const Route &route, bool in, const SwapLaunch &arguments, int64_t ctas,
                              cudaStream_t stream) {
    void *parameters[] = {(void *)&arguments};
    return int64_t(cudaLaunchKernel(kernel_of(route, in), dim3(unsigned(ctas)), dim3(unsigned(route.warps * 32)),
                                    parameters, shared_bytes(route), stream));
}

EXPORT int64_t isthmus_kv_swap_open(const Config *config, Swap **out) {
    const Device current(config->device);
    std::unique_ptr<Swap> swap(new (std::nothrow) Swap());
    if (!swap) return OUT_OF_MEMORY;
    swap->config = *config;
    cudaPointerAttributes where = {};
    TRY(cudaPointerGetAttributes(&where, (const void *)config->host));
    if (where.type != cudaMemoryTypeHost || !where.devicePointer) return NOT_PINNED;
    swap->host_on_device = (char *)where.devicePointer;
    for (const int direction : {IN, OUT})
        for (const Route *one : {&config->routes[direction], &config->stages[direction].route})
            TRY(cudaFuncSetAttribute(kernel_of(*one, direction == IN), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     kMaxShared));
    try {
        if (const int64_t code = open(*swap)) return code;
    } catch (const std::bad_alloc &) {
        return OUT_OF_MEMORY;
    } catch (const std::system_error &) {
        return NO_THREAD;
    }
    *out = swap.release();
    return 0;
}

// Submits what was given; nothing more is.
EXPORT void isthmus_kv_swap_stop(Swap *swap) {
    for (Lane &lane : swap->lanes) lane.handover.stop();
}

// It is stopped, and the caller has waited for its streams.
EXPORT void isthmus_kv_swap_close(Swap *swap) {
    const Device current(swap->config.device);
    delete swap;
}

EXPORT int64_t isthmus_kv_swap_submit(Swap *swap, int64_t direction, const void *pool_ids, const void *host_ids,
                                      int64_t id_bytes, int64_t count, cudaStream_t after, int64_t *turn) {
    const Device current(swap->config.device);
    const int way = int(direction);
    try {
        if (id_bytes == 4)
            return give(*swap, way, (const int32_t *)pool_ids, (const int32_t *)host_ids, count, after, turn);
        return give(*swap, way, (const int64_t *)pool_ids, (const int64_t *)host_ids, count, after, turn);
    } catch (const std::bad_alloc &) {
        return OUT_OF_MEMORY;
    }
}

EXPORT int64_t isthmus_kv_swap_query(Swap *swap, int64_t direction, int64_t turn) {
    const Device current(swap->config.device);
    return swap->lanes[direction].handover.query(turn);
}

EXPORT int64_t isthmus_kv_swap_synchronize(Swap *swap, int64_t direction, int64_t turn) {
    const Device current(swap->config.device);
    return swap->lanes[direction].handover.synchronize(turn);
}

EXPORT int64_t isthmus_kv_swap_wait(Swap *swap, int64_t direction, int64_t turn, cudaStream_t stream) {
    const Device current(swap->config.device);
    return swap->lanes[direction].handover.wait(turn, stream);
}

EXPORT int64_t isthmus_kv_swap_failed(Swap *swap, int64_t direction, int64_t *first) {
    return swap->lanes[direction].handover.failed(first);
}

EXPORT int64_t isthmus_kv_swap_prepare(Swap *swap, int64_t direction, int64_t capacity, Prepared **out) {
    const Device current(swap->config.device);
    std::unique_ptr<Prepared> prepared(new (std::nothrow)
                                           Prepared{swap, swap->config.device, int(direction), capacity, nullptr});
    if (!prepared) return OUT_OF_MEMORY;
    TRY(cudaHostAlloc((void **)&prepared->page, Page::bytes(capacity), cudaHostAllocDefault));
    prepared->page->count = 0;
    *out = prepared.release();
    return 0;
}

EXPORT int64_t isthmus_kv_swap_fill(Prepared *prepared, const void *pool_ids, const void *host_ids, int64_t id_bytes,
                                    int64_t count) {
    if (id_bytes == 4) return fill(*prepared, (const int32_t *)pool_ids, (const int32_t *)host_ids, count);
    return fill(*prepared, (const int64_t *)pool_ids, (const int64_t *)host_ids, count);
}

EXPORT int64_t isthmus_kv_swap_launch(const Prepared *prepared, cudaStream_t stream) {
    const Device current(prepared->device);
    const Swap &swap = *prepared->swap;
    return launch(swap, prepared->direction, swap.config.routes[prepared->direction], swap.host_on_device,
                  prepared->page, prepared->capacity, stream);
}

EXPORT void isthmus_kv_swap_release(Prepared *prepared) {
    const Device current(prepared->device);
    cudaFreeHost(prepared->page);
    delete prepared;
}

