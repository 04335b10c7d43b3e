// What one swap copies, cut into items. Shared by the CUDA kernels and the CPU copy, so that the index arithmetic
// which runs on a GPU is the one that every machine tests.
#pragma once
#include <stdint.h>

#if defined(__CUDACC__)
#define ISTHMUS_BOTH __host__ __device__ __forceinline__
#else
#define ISTHMUS_BOTH static inline
#endif

#define KV_SWAP_DIMS 4

// A block is `count[0] * .. * count[3]` fragments of `fragment` contiguous bytes; dimension 0 is the innermost.
// Items are what one warp moves at a time: a piece of one fragment (splits > 1) or up to `rows` fragments along
// dimension 0. All strides are in bytes. Filled by geometry.py, in this order.
struct SwapShape {
    int64_t fragment;
    int64_t piece;   // bytes of a piece: fragment when splits == 1, else a multiple of 16
    int64_t splits;  // pieces of a fragment
    int64_t rows;    // fragments of an item; 1 when splits > 1
    int64_t groups;  // items along dimension 0: ceil(count[0] / rows)
    int64_t items;   // items of a block
    int64_t count[KV_SWAP_DIMS];
    int64_t pool_stride[KV_SWAP_DIMS];
    int64_t host_stride[KV_SWAP_DIMS];
    int64_t pool_block;  // from one block to the next
    int64_t host_block;
    int64_t word;  // 16, 8, 4, 2 or 1: divides the fragment, every stride and both addresses
};

// Which block of the pool goes with which of the host buffer.
struct SwapPair {
    uint32_t pool, host;
};

struct SwapItem {
    int64_t pool, host;  // byte offsets from the start of either view
    uint32_t bytes, rows;
};

// The one place where an id meets a stride: 64 bits throughout.
ISTHMUS_BOTH int64_t kv_swap_offset(uint32_t block, int64_t stride) {
    return int64_t(block) * stride;
}

ISTHMUS_BOTH SwapItem kv_swap_item(const SwapShape &shape, SwapPair pair, uint32_t index) {
    const uint32_t split = index % uint32_t(shape.splits);
    index /= uint32_t(shape.splits);
    const uint32_t group = index % uint32_t(shape.groups);
    index /= uint32_t(shape.groups);
    const int64_t row = int64_t(group) * shape.rows;
    SwapItem item;
    item.pool = kv_swap_offset(pair.pool, shape.pool_block) + split * shape.piece + row * shape.pool_stride[0];
    item.host = kv_swap_offset(pair.host, shape.host_block) + split * shape.piece + row * shape.host_stride[0];
    for (int d = 1; d < KV_SWAP_DIMS; d++) {
        const uint32_t at = index % uint32_t(shape.count[d]);
        index /= uint32_t(shape.count[d]);
        item.pool += at * shape.pool_stride[d];
        item.host += at * shape.host_stride[d];
    }
    const int64_t bytes = shape.fragment - split * shape.piece, rows = shape.count[0] - row;
    item.bytes = uint32_t(bytes < shape.piece ? bytes : shape.piece);
    item.rows = uint32_t(rows < shape.rows ? rows : shape.rows);
    return item;
}

// Whether a block is one stretch of memory on both sides, and ends where the next one begins.
ISTHMUS_BOTH bool kv_swap_whole(const SwapShape &shape) {
    int64_t fragments = 1;
    for (int d = 0; d < KV_SWAP_DIMS; d++) fragments *= shape.count[d];
    return fragments == 1 && shape.fragment == shape.pool_block && shape.fragment == shape.host_block;
}

// Pairs that are one stretch of memory on both sides: their ids rise together or fall together.
struct SwapRun {
    int64_t length;
    int64_t low;  // index of the pair where the stretch begins
};

// The run that begins at pair `begin` and ends before pair `end`.
template <class Id>
ISTHMUS_BOTH SwapRun kv_swap_run(const Id *pool, const Id *host, int64_t begin, int64_t end) {
    const int64_t step = begin + 1 < end && int64_t(pool[begin + 1]) < int64_t(pool[begin]) ? -1 : 1;
    int64_t length = 1;
    while (begin + length < end && int64_t(pool[begin + length]) == int64_t(pool[begin]) + step * length &&
           int64_t(host[begin + length]) == int64_t(host[begin]) + step * length)
        length++;
    return {length, step > 0 ? begin : begin + length - 1};
}
