// What a submission becomes: checks ids, merges runs, and gives the copy engine and the kernels their parts. No device
// code, so that a test runs it against streams of its own.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "../items.h"
#include "handover.h"
#include "staging.h"

namespace isthmus {

struct SwapLaunch {
    SwapShape shape;
    char *pool;
    char *host;
    // Pinned host memory, read when the kernel runs: a captured launch sees what is in it at each replay.
    const int64_t *count;
    const SwapPair *pairs;
    int32_t slots;       // ring: items in flight per warp
    int32_t slot_bytes;  // ring: a multiple of 16
    int32_t ahead;       // ring: loads issued before the oldest item is stored, 1..slots
    int32_t pace;        // picoseconds that a warp lets pass for each byte, 0: none
};

enum { BAD_IDS = -1, NOT_PINNED = -2, OUT_OF_MEMORY = -3, NO_THREAD = -5, CAPTURED = -6 };
enum { IN = 0, OUT = 1 };

// How one direction runs (geometry.Route, in its order).
struct Route {
    SwapShape shape;
    int64_t by_words;     // plain loads and stores instead of the ring
    int64_t ctas, warps;  // the grid
    int64_t slots, slot_bytes, ahead;
    int64_t rate;  // MB/s that the kernel holds itself to, 0: none
};

// The way through device memory (geometry.Stage, in its order): whole blocks between host and staging by the copy
// engine, between staging and the pool by a kernel.
struct Stage {
    Route route;  // its host side is staging
    int64_t slots, slot_blocks;
    int64_t memory;  // slots * slot_blocks blocks; 0: not taken
};

// In the order in which cuda_impl.py packs it.
struct Config {
    Route routes[2];
    Stage stages[2];
    int64_t pool, host;  // addresses of block 0
    int64_t pool_blocks, host_blocks;
    int64_t device;
    struct {
        int64_t last, first;  // streams: what is copied last is on `last`, the first half of a staged swap on `first`
    } streams[2];
    int64_t engine_from;    // stretches of at least this many bytes go to the copy engine
    int64_t rows_from;      // and so do blocks of fragments of so many at one distance, as rows of a 2D copy each
    int64_t stage_from;     // and blocks through staging, when what is one stretch on the host has so many on average
    int64_t hand_over_from; // swaps of so many blocks are submitted by a thread
    int64_t staging_bytes;  // pinned, per direction
};

// Launches the kernel of `route` on so many multiprocessors.
int64_t start_kernel(const Route &route, bool in, const SwapLaunch &arguments, int64_t ctas, cudaStream_t stream);

// The shape cut to whole fragments, as the copy engine takes them.
inline SwapShape whole_fragments(SwapShape shape) {
    shape.piece = shape.fragment;
    shape.splits = shape.rows = 1;
    shape.groups = shape.count[0];
    shape.items = shape.count[0] * shape.count[1] * shape.count[2] * shape.count[3];
    return shape;
}

inline int64_t block_bytes(const SwapShape &shape) {
    return shape.fragment * shape.count[0] * shape.count[1] * shape.count[2] * shape.count[3];
}

// One direction: its staging, and the scratch of a submission, for the one that makes it.
struct Lane {
    std::mutex checking;
    Checker checker;
    Staging staging;
    Slots slots;
    SwapShape uncut;
    std::vector<uint32_t> pool, host;  // pairs that are not the copy engine's alone
    std::vector<void *> to;
    std::vector<const void *> from;
    std::vector<size_t> sizes;
    std::vector<cudaMemcpy3DBatchOp> matrices;
    Handover handover;  // the last member: its thread uses the others until it ends

    int64_t open(const Route &route, const Stage &stage, int64_t bytes, int64_t to_blocks) {
        uncut = whole_fragments(route.shape);
        checker.resize(to_blocks);
        if (const int64_t code = slots.open(stage.memory ? stage.slots : 0)) return code;
        return staging.open(bytes);
    }
};

// Where a submission goes, as in `Config`.
struct Streams {
    cudaStream_t last, first;
};

struct Swap {
    Config config;
    char *host_on_device;
    GiveWay way;
    Lane lanes[2];
};

inline int64_t launch(const Swap &swap, int direction, const Route &route, char *host, const Page *page, int64_t count,
               cudaStream_t stream) {
    const int64_t full = std::max<int64_t>(1, (count * route.shape.items + route.warps - 1) / route.warps);
    const int64_t ctas = std::min(route.ctas, full);
    const SwapLaunch arguments = {route.shape,
                            (char *)swap.config.pool,
                            host,
                            &page->count,
                            page->pairs,
                            int32_t(route.slots),
                            int32_t(route.slot_bytes),
                            int32_t(route.ahead),
                            route.rate ? int32_t(ctas * route.warps * 1000000 / route.rate) : 0};
    return start_kernel(route, direction == IN, arguments, ctas, stream);
}

// Moves the lane's pairs by kernels alone, a page of them at a time.
inline int64_t submit_kernels(const Swap &swap, Lane &lane, int direction, cudaStream_t stream) {
    const int64_t count = int64_t(lane.pool.size());
    for (int64_t begin = 0, end = 0; begin < count; begin = end) {
        end = std::min(count, begin + lane.staging.largest());
        Page *page = nullptr;
        if (const int64_t code = lane.staging.reserve(end - begin, &page)) return code;
        for (int64_t i = begin; i < end; i++) page->pairs[i - begin] = {lane.pool[size_t(i)], lane.host[size_t(i)]};
        page->count = end - begin;
        const Route &route = swap.config.routes[direction];
        if (const int64_t code = launch(swap, direction, route, swap.host_on_device, page, end - begin, stream))
            return code;
        if (const int64_t code = lane.staging.commit(stream)) return code;
    }
    return 0;
}

// In batches of some megabytes: the driver starts a batch when it has written all of it, so that one batch is copied
// while the next is written.
constexpr size_t kBatchBytes = 8 << 20;
// Of rows, which take the driver longer, less: who records an event meanwhile waits for a batch.
constexpr size_t kMatrixBytes = 2 << 20;

inline int64_t submit_engine(Swap &swap, Lane &lane, int direction, cudaStream_t stream) {
    cudaMemcpyAttributes attributes = {};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    size_t first = 0;
    for (size_t begin = 0, end = 0; begin < lane.sizes.size(); begin = end) {
        for (size_t bytes = 0; end < lane.sizes.size() && bytes < kBatchBytes; end++) bytes += lane.sizes[end];
        TRY(swap.way.then(direction, [&] {
            return cudaMemcpyBatchAsync(lane.to.data() + begin, lane.from.data() + begin, lane.sizes.data() + begin,
                                        end - begin, &attributes, &first, 1, stream);
        }));
    }
    lane.to.clear(), lane.from.clear(), lane.sizes.clear();
    return 0;
}

inline int64_t submit_matrices(Swap &swap, Lane &lane, int direction, cudaStream_t stream) {
    const size_t count = lane.matrices.size(), bytes = size_t(block_bytes(lane.uncut));
    const size_t batch = std::max<size_t>(1, kMatrixBytes / bytes);
    for (size_t begin = 0; begin < count; begin += batch)
        TRY(swap.way.then(direction, [&] {
            return cudaMemcpy3DBatchAsync(std::min(batch, count - begin), lane.matrices.data() + begin, 0, stream);
        }));
    lane.matrices.clear();
    return 0;
}

// Whether a block is a matrix to the copy engine: its fragments lie at one distance on each side, no larger than it
// takes.
inline bool is_matrix(const SwapShape &shape) {
    constexpr int64_t kMost = INT32_MAX;
    for (int d = 1; d < KV_SWAP_DIMS; d++)
        if (shape.count[d] != 1) return false;
    return shape.count[0] > 1 && shape.pool_stride[0] <= kMost && shape.host_stride[0] <= kMost;
}

inline void add_matrix(const Swap &swap, Lane &lane, int direction, SwapPair pair) {
    const SwapShape &shape = lane.uncut;
    const auto side = [&](int64_t base, int64_t offset, int64_t stride) {
        cudaMemcpy3DOperand operand = {};
        operand.type = cudaMemcpyOperandTypePointer;
        operand.op.ptr.ptr = (void *)(base + offset);
        operand.op.ptr.rowLength = size_t(stride);
        operand.op.ptr.layerHeight = size_t(shape.count[0]);
        return operand;
    };
    const auto on_pool = side(swap.config.pool, kv_swap_offset(pair.pool, shape.pool_block), shape.pool_stride[0]);
    const auto on_host = side(swap.config.host, kv_swap_offset(pair.host, shape.host_block), shape.host_stride[0]);
    cudaMemcpy3DBatchOp copy = {};
    copy.src = direction == IN ? on_host : on_pool;
    copy.dst = direction == IN ? on_pool : on_host;
    copy.extent = make_cudaExtent(size_t(shape.fragment), size_t(shape.count[0]), 1);
    copy.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    copy.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    lane.matrices.push_back(copy);
}

inline void add_engine_copy(Lane &lane, int direction, char *device, char *host, int64_t bytes) {
    lane.to.push_back(direction == IN ? device : host);
    lane.from.push_back(direction == IN ? host : device);
    lane.sizes.push_back(size_t(bytes));
}

// The lane's pairs from `begin` on whose host blocks are one stretch of memory.
inline SwapRun host_run(const Swap &swap, const Lane &lane, int64_t begin, int64_t end) {
    if (lane.uncut.host_block != block_bytes(lane.uncut)) return {1, begin};
    return kv_swap_run(lane.host.data(), lane.host.data(), begin, end);
}

// Whether the lane's pairs go through staging: the copy engine needs long stretches of host memory.
inline bool staged(const Swap &swap, const Lane &lane, int direction) {
    if (!swap.config.stages[direction].memory) return false;
    const int64_t count = int64_t(lane.host.size());
    int64_t runs = 0;
    for (int64_t i = 0; i < count; i += host_run(swap, lane, i, count).length) runs++;
    return count * block_bytes(lane.uncut) >= runs * swap.config.stage_from;
}

// One chunk of pairs through one slot: the copies between host and slot, and the pairs of pool and slot for the kernel.
inline void add_chunk(const Swap &swap, Lane &lane, int direction, int64_t begin, int64_t end, char *slot, Page *page) {
    const int64_t bytes = block_bytes(lane.uncut);
    for (int64_t i = begin; i < end;) {
        const SwapRun run = host_run(swap, lane, i, end);
        const int64_t host = kv_swap_offset(lane.host[size_t(run.low)], lane.uncut.host_block);
        add_engine_copy(lane, direction, slot + (i - begin) * bytes, (char *)swap.config.host + host,
                        run.length * bytes);
        // Falling ids lie in the slot as on the host: the last of them first.
        for (int64_t j = 0; j < run.length; j++)
            page->pairs[i - begin + j] = {lane.pool[size_t(run.low == i ? i + j : i + run.length - 1 - j)],
                                          uint32_t(i - begin + j)};
        i += run.length;
    }
    page->count = end - begin;
}

// Moves the lane's pairs through staging, a chunk at a time: while one is on the link, the one beside it is on its way
// between slot and pool.
inline int64_t submit_staged(Swap &swap, Lane &lane, int direction, Streams streams) {
    const Stage &stage = swap.config.stages[direction];
    const int64_t bytes = block_bytes(lane.uncut), count = int64_t(lane.pool.size());
    const cudaStream_t kernels = direction == IN ? streams.last : streams.first;
    for (int64_t begin = 0; begin < count;) {
        // Chunks share one reservation. Each has a page of its own, which takes no more than three pairs for each of
        // its one or more pairs.
        const int64_t stop = std::min(count, begin + lane.staging.largest() / 3);
        Page *page = nullptr;
        if (const int64_t code = lane.staging.reserve(3 * (stop - begin), &page)) return code;
        while (begin < stop) {
            const int64_t size = stage_chunk(direction == IN, begin, count - begin, stage.slot_blocks);
            const int64_t end = std::min(stop, begin + size);
            const Slots::Slot slot = lane.slots.next();
            char *memory = (char *)stage.memory + slot.index * stage.slot_blocks * bytes;
            add_chunk(swap, lane, direction, begin, end, memory, page);
            const auto in_turn = [&](auto call) { return swap.way.then(direction, call); };
            const auto kernel = [&] {
                return in_turn(
                    [&] { return launch(swap, direction, stage.route, memory, page, end - begin, kernels); });
            };
            const auto engine = [&](cudaStream_t stream) { return submit_engine(swap, lane, direction, stream); };
            TRY(in_turn([&] { return cudaStreamWaitEvent(streams.first, slot.freed, 0); }));
            if (const int64_t code = direction == IN ? engine(streams.first) : kernel()) return code;
            TRY(in_turn([&] { return cudaEventRecord(slot.filled, streams.first); }));
            TRY(in_turn([&] { return cudaStreamWaitEvent(streams.last, slot.filled, 0); }));
            if (const int64_t code = direction == IN ? kernel() : engine(streams.last)) return code;
            TRY(in_turn([&] { return cudaEventRecord(slot.freed, streams.last); }));
            page = (Page *)((char *)page + Page::bytes(end - begin));
            begin = end;
        }
        if (const int64_t code = lane.staging.commit(kernels)) return code;
    }
    return 0;
}

// Sends runs and rows that are long enough to the copy engine, and all else through staging or to the kernels.
inline int64_t divide(Swap &swap, Lane &lane, int direction, const Job &job, Streams streams) {
    const uint32_t *const pool = job.ids.pool.data(), *const host = job.ids.host.data();
    const int64_t count = int64_t(job.ids.pool.size());
    const SwapShape &shape = lane.uncut;
    const int64_t engine_from = swap.config.engine_from;
    char *const to_pool = (char *)swap.config.pool, *const to_host = (char *)swap.config.host;
    lane.pool.clear(), lane.host.clear();
    lane.to.clear(), lane.from.clear(), lane.sizes.clear(), lane.matrices.clear();
    const bool whole = kv_swap_whole(shape);
    const bool matrices = shape.fragment >= swap.config.rows_from && is_matrix(shape);
    // Nothing for the copy engine: no look at each pair, which would take most of a submission's time.
    const bool pairs_alone = !whole && !matrices && shape.fragment < engine_from;
    if (pairs_alone) lane.pool.assign(pool, pool + count), lane.host.assign(host, host + count);
    for (int64_t i = 0; i < count && !pairs_alone;) {
        const SwapRun run = whole ? kv_swap_run(pool, host, i, count) : SwapRun{1, i};
        if (whole && run.length * shape.fragment >= engine_from) {
            add_engine_copy(lane, direction, to_pool + kv_swap_offset(pool[run.low], shape.pool_block),
                            to_host + kv_swap_offset(host[run.low], shape.host_block),
                            run.length * shape.fragment);
            i += run.length;
            continue;
        }
        for (const int64_t end = i + run.length; i < end; i++) {
            const SwapPair pair = {pool[i], host[i]};
            if (matrices) {
                add_matrix(swap, lane, direction, pair);
                continue;
            }
            if (shape.fragment < engine_from) {
                lane.pool.push_back(pair.pool), lane.host.push_back(pair.host);
                continue;
            }
            for (int64_t j = 0; j < shape.items; j++) {
                const SwapItem item = kv_swap_item(shape, pair, uint32_t(j));
                add_engine_copy(lane, direction, to_pool + item.pool, to_host + item.host, item.bytes);
            }
        }
    }
    if (const int64_t code = submit_engine(swap, lane, direction, streams.last)) return code;
    if (const int64_t code = submit_matrices(swap, lane, direction, streams.last)) return code;
    if (staged(swap, lane, direction)) return submit_staged(swap, lane, direction, streams);
    return submit_kernels(swap, lane, direction, streams.last);
}

// Whether all ids are in range and no destination repeats.
template <class Id>
bool good(Swap &swap, int direction, const Id *pool, const Id *host, int64_t count) {
    const std::lock_guard<std::mutex> guard(swap.lanes[direction].checking);
    Checker &checker = swap.lanes[direction].checker;
    return direction == IN ? checker.good(pool, host, count, swap.config.host_blocks)
                           : checker.good(host, pool, count, swap.config.pool_blocks);
}

// Submits one swap, in its turn.
inline int64_t submit(Swap &swap, int direction, const Job &job) {
    const auto &config = swap.config.streams[direction];
    const Streams streams = {(cudaStream_t)config.last, (cudaStream_t)config.first};
    TRY(cudaStreamWaitEvent(streams.last, job.begin, 0));
    if (swap.config.stages[direction].memory) TRY(cudaStreamWaitEvent(streams.first, job.begin, 0));
    try {
        if (const int64_t code = divide(swap, swap.lanes[direction], direction, job, streams)) return code;
    } catch (const std::bad_alloc &) {
        return OUT_OF_MEMORY;
    }
    TRY(cudaEventRecord(job.done, streams.last));
    return 0;
}

// Opens both directions, once the config is there.
inline int64_t open(Swap &swap) {
    const Config &config = swap.config;
    for (const int direction : {IN, OUT}) {
        Lane &lane = swap.lanes[direction];
        const int64_t to_blocks = direction == IN ? config.pool_blocks : config.host_blocks;
        if (const int64_t code = lane.open(config.routes[direction], config.stages[direction], config.staging_bytes,
                                           to_blocks))
            return code;
        const auto submits = [&swap, direction](const Job &job) { return submit(swap, direction, job); };
        if (const int64_t code = lane.handover.open(int(config.device), &swap.way, submits)) return code;
    }
    return 0;
}

// Checks a swap and gives it to the one that submits it; `*turn` is what to ask `handover` for.
template <class Id>
int64_t give(Swap &swap, int direction, const Id *pool, const Id *host, int64_t count, cudaStream_t after,
             int64_t *turn) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    TRY(cudaStreamIsCapturing(after, &capture));
    if (capture != cudaStreamCaptureStatusNone) return CAPTURED;
    const auto fill = [&](Ids &ids) -> int64_t {
        if (!good(swap, direction, pool, host, count)) return BAD_IDS;
        ids.pool.assign(pool, pool + count), ids.host.assign(host, host + count);
        return 0;
    };
    return swap.lanes[direction].handover.give(after, count < swap.config.hand_over_from, fill, turn);
}

}  // namespace isthmus
