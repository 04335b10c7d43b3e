// Swap between two buffers in host memory: the runs and items of the CUDA kernels, each moved by memcpy.
#include "../items.h"
#include "common.h"

EXPORT(kv_swap) {
    Arguments in = {arguments};
    const SwapShape &shape = *in.pointer<const SwapShape>();
    char *pool = in.pointer<char>();
    char *host = in.pointer<char>();
    const int64_t *pool_ids = in.pointer<const int64_t>();
    const int64_t *host_ids = in.pointer<const int64_t>();
    const int64_t count = in.number();
    const bool into_pool = in.number();
    const auto copy = [&](int64_t on_pool, int64_t on_host, int64_t bytes) {
        memcpy(into_pool ? pool + on_pool : host + on_host, into_pool ? host + on_host : pool + on_pool, size_t(bytes));
    };
    const int64_t work = count * shape.items * shape.piece * shape.rows;
    if (kv_swap_whole(shape)) {
        parallel_ranges(count, work, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end;) {
                const SwapRun run = kv_swap_run(pool_ids, host_ids, i, end);
                copy(kv_swap_offset(uint32_t(pool_ids[run.low]), shape.pool_block),
                     kv_swap_offset(uint32_t(host_ids[run.low]), shape.host_block), run.length * shape.fragment);
                i += run.length;
            }
        });
        return 0;
    }
    parallel_ranges(count * shape.items, work, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const int64_t block = i / shape.items;
            const SwapPair pair = {uint32_t(pool_ids[block]), uint32_t(host_ids[block])};
            const SwapItem item = kv_swap_item(shape, pair, uint32_t(i - block * shape.items));
            for (uint32_t row = 0; row < item.rows; row++)
                copy(item.pool + row * shape.pool_stride[0], item.host + row * shape.host_stride[0], item.bytes);
        }
    });
    return 0;
}
