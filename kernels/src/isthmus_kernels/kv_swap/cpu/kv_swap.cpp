// Swap between two buffers in host memory: the items of the CUDA kernels, each moved by memcpy.
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
    const int64_t work = count * shape.items * shape.piece * shape.rows;
    parallel_ranges(count * shape.items, work, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const int64_t block = i / shape.items;
            const SwapPair pair = {uint32_t(pool_ids[block]), uint32_t(host_ids[block])};
            const SwapItem item = kv_swap_item(shape, pair, uint32_t(i - block * shape.items));
            for (uint32_t row = 0; row < item.rows; row++) {
                char *on_pool = pool + item.pool + row * shape.pool_stride[0];
                char *on_host = host + item.host + row * shape.host_stride[0];
                memcpy(into_pool ? on_pool : on_host, into_pool ? on_host : on_pool, item.bytes);
            }
        }
    });
    return 0;
}
