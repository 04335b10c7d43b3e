// Host side of the swap on a GPU: checks ids, merges runs, and submits to the ring kernel or to the copy engine.
// Plain C entry points, called through ctypes (cuda_impl.py); 0 is success, a positive code is a cudaError_t, a
// negative one is explained there. Nothing here allocates, synchronises with the device or touches pageable memory
// between open and close, except that a submission waits for its turn in a staging ring that is all in flight.
#include <cuda_runtime.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "kernels.cuh"
#include "staging.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using isthmus::Checker;
using isthmus::Page;
using isthmus::Staging;
using isthmus::SwapLaunch;

enum { BAD_IDS = -1, NOT_PINNED = -2, OUT_OF_MEMORY = -3 };
enum { IN = 0, OUT = 1 };

// How one direction runs (geometry.Route, in its order).
struct Route {
    SwapShape shape;
    int64_t by_words;     // plain loads and stores instead of the ring
    int64_t ctas, warps;  // the grid
    int64_t slots, slot_bytes, ahead;
};

// In the order in which cuda_impl.py packs it.
struct Config {
    Route routes[2];
    int64_t pool, host;  // addresses of block 0
    int64_t pool_blocks, host_blocks;
    int64_t device;
    int64_t engine_from;    // stretches of at least this many bytes go to the copy engine
    int64_t staging_bytes;  // pinned, per direction
};

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

// The shape cut to whole fragments, as the copy engine takes them.
SwapShape whole_fragments(SwapShape shape) {
    shape.piece = shape.fragment;
    shape.splits = shape.rows = 1;
    shape.groups = shape.count[0];
    shape.items = shape.count[0] * shape.count[1] * shape.count[2] * shape.count[3];
    return shape;
}

// One direction: its staging, and the scratch of a submission. Held under `mutex` while one is made.
struct Lane {
    std::mutex mutex;
    Checker checker;
    Staging staging;
    SwapShape uncut;
    std::vector<void *> to;
    std::vector<const void *> from;
    std::vector<size_t> sizes;

    int64_t open(const Route &route, int64_t bytes, int64_t to_blocks) {
        uncut = whole_fragments(route.shape);
        checker.resize(to_blocks);
        return staging.open(bytes);
    }
};

struct Swap {
    Config config;
    char *host_on_device;
    Lane lanes[2];
};

const void *kernel_of(const Route &route, bool in) {
    using namespace isthmus;
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

int64_t launch(const Swap &swap, int direction, const Page *page, int64_t count, cudaStream_t stream) {
    const Route &route = swap.config.routes[direction];
    SwapLaunch arguments = {route.shape,
                            (char *)swap.config.pool,
                            swap.host_on_device,
                            &page->count,
                            page->pairs,
                            int32_t(route.slots),
                            int32_t(route.slot_bytes),
                            int32_t(route.ahead)};
    const int64_t full = std::max<int64_t>(1, (count * route.shape.items + route.warps - 1) / route.warps);
    void *parameters[] = {&arguments};
    return int64_t(cudaLaunchKernel(kernel_of(route, direction == IN), dim3(unsigned(std::min(route.ctas, full))),
                                    dim3(unsigned(route.warps * 32)), parameters, shared_bytes(route), stream));
}

// Fills pages with pairs and launches the kernel on each that is full, or the last.
class Pages {
  public:
    Pages(const Swap &swap, Lane &lane, int direction, int64_t most, cudaStream_t stream)
        : swap_(swap), staging_(lane.staging), direction_(direction), left_(most), stream_(stream) {}

    int64_t add(SwapPair pair) {
        if (!page_) {
            room_ = std::min(left_, staging_.largest());
            if (const int64_t code = staging_.reserve(room_, &page_)) return code;
        }
        page_->pairs[filled_++] = pair;
        left_--;
        return filled_ == room_ ? flush() : 0;
    }
    int64_t flush() {
        if (!page_) return 0;
        page_->count = filled_;
        if (const int64_t code = launch(swap_, direction_, page_, filled_, stream_)) return code;
        page_ = nullptr;
        filled_ = 0;
        return staging_.commit(stream_);
    }

  private:
    const Swap &swap_;
    Staging &staging_;
    int direction_;
    int64_t left_, filled_ = 0, room_ = 0;
    cudaStream_t stream_;
    Page *page_ = nullptr;
};

// In batches of some megabytes: the driver starts a batch when it has written all of it, so that one batch is copied
// while the next is written.
int64_t submit_engine(Lane &lane, cudaStream_t stream) {
    constexpr size_t kBatchBytes = 8 << 20;
    cudaMemcpyAttributes attributes = {};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    size_t first = 0;
    for (size_t begin = 0, end = 0; begin < lane.sizes.size(); begin = end) {
        for (size_t bytes = 0; end < lane.sizes.size() && bytes < kBatchBytes; end++) bytes += lane.sizes[end];
        TRY(cudaMemcpyBatchAsync(lane.to.data() + begin, lane.from.data() + begin, lane.sizes.data() + begin,
                                 end - begin, &attributes, &first, 1, stream));
    }
    return 0;
}

void add_engine_copy(const Swap &swap, Lane &lane, int direction, int64_t pool, int64_t host, int64_t bytes) {
    char *on_pool = (char *)swap.config.pool + pool, *on_host = (char *)swap.config.host + host;
    lane.to.push_back(direction == IN ? on_pool : on_host);
    lane.from.push_back(direction == IN ? on_host : on_pool);
    lane.sizes.push_back(size_t(bytes));
}

// Sends runs that are long enough to the copy engine, and all else to the kernels.
template <class Id>
int64_t divide(const Swap &swap, Lane &lane, int direction, const Id *pool, const Id *host, int64_t count,
               cudaStream_t stream) {
    const SwapShape &shape = lane.uncut;
    const int64_t engine_from = swap.config.engine_from;
    lane.to.clear(), lane.from.clear(), lane.sizes.clear();
    Pages pages(swap, lane, direction, count, stream);
    const bool whole = kv_swap_whole(shape);
    for (int64_t i = 0; i < count;) {
        const SwapRun run = whole ? kv_swap_run(pool, host, i, count) : SwapRun{1, i};
        if (whole && run.length * shape.fragment >= engine_from) {
            add_engine_copy(swap, lane, direction, kv_swap_offset(uint32_t(pool[run.low]), shape.pool_block),
                            kv_swap_offset(uint32_t(host[run.low]), shape.host_block), run.length * shape.fragment);
            i += run.length;
            continue;
        }
        for (const int64_t end = i + run.length; i < end; i++) {
            const SwapPair pair = {uint32_t(pool[i]), uint32_t(host[i])};
            if (shape.fragment < engine_from) {
                if (const int64_t code = pages.add(pair)) return code;
                continue;
            }
            for (int64_t j = 0; j < shape.items; j++) {
                const SwapItem item = kv_swap_item(shape, pair, uint32_t(j));
                add_engine_copy(swap, lane, direction, item.pool, item.host, item.bytes);
            }
        }
    }
    if (const int64_t code = pages.flush()) return code;
    return submit_engine(lane, stream);
}

// Whether all ids are in range and no destination repeats.
template <class Id>
bool good(Swap &swap, int direction, const Id *pool, const Id *host, int64_t count) {
    Checker &checker = swap.lanes[direction].checker;
    return direction == IN ? checker.good(pool, host, count, swap.config.host_blocks)
                           : checker.good(host, pool, count, swap.config.pool_blocks);
}

template <class Id>
int64_t submit(Swap &swap, int direction, const Id *pool, const Id *host, int64_t count, cudaStream_t stream) {
    Lane &lane = swap.lanes[direction];
    const std::lock_guard<std::mutex> guard(lane.mutex);
    if (!good(swap, direction, pool, host, count)) return BAD_IDS;
    return divide(swap, lane, direction, pool, host, count, stream);
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
    const std::lock_guard<std::mutex> guard(prepared.swap->lanes[prepared.direction].mutex);
    if (!good(*prepared.swap, prepared.direction, pool, host, count)) return BAD_IDS;
    for (int64_t i = 0; i < count; i++) prepared.page->pairs[i] = {uint32_t(pool[i]), uint32_t(host[i])};
    prepared.page->count = count;
    return 0;
}

}  // namespace

EXPORT int64_t isthmus_kv_swap_open(const Config *config, Swap **out) {
    const Device current(config->device);
    std::unique_ptr<Swap> swap(new (std::nothrow) Swap());
    if (!swap) return OUT_OF_MEMORY;
    swap->config = *config;
    cudaPointerAttributes where = {};
    TRY(cudaPointerGetAttributes(&where, (const void *)config->host));
    if (where.type != cudaMemoryTypeHost || !where.devicePointer) return NOT_PINNED;
    swap->host_on_device = (char *)where.devicePointer;
    const int64_t to_blocks[] = {config->pool_blocks, config->host_blocks};
    for (const int direction : {IN, OUT}) {
        const Route &route = config->routes[direction];
        try {
            const int64_t code = swap->lanes[direction].open(route, config->staging_bytes, to_blocks[direction]);
            if (code) return code;
        } catch (const std::bad_alloc &) {
            return OUT_OF_MEMORY;
        }
        TRY(cudaFuncSetAttribute(kernel_of(route, direction == IN), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 kMaxShared));
    }
    *out = swap.release();
    return 0;
}

// The caller has waited for what it submitted.
EXPORT void isthmus_kv_swap_close(Swap *swap) {
    const Device current(swap->config.device);
    delete swap;
}

EXPORT int64_t isthmus_kv_swap_submit(Swap *swap, int64_t direction, const void *pool_ids, const void *host_ids,
                                      int64_t id_bytes, int64_t count, cudaStream_t stream) {
    const Device current(swap->config.device);
    try {
        if (id_bytes == 4)
            return submit(*swap, int(direction), (const int32_t *)pool_ids, (const int32_t *)host_ids, count, stream);
        return submit(*swap, int(direction), (const int64_t *)pool_ids, (const int64_t *)host_ids, count, stream);
    } catch (const std::bad_alloc &) {
        return OUT_OF_MEMORY;
    }
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
    return launch(*prepared->swap, prepared->direction, prepared->page, prepared->capacity, stream);
}

EXPORT void isthmus_kv_swap_release(Prepared *prepared) {
    const Device current(prepared->device);
    cudaFreeHost(prepared->page);
    delete prepared;
}

