// Submissions of the swap against streams whose work runs late and in any order that events allow, by every way: the
// copy engine, its rows, kernels, staging. Prints what is wrong, and returns 1; argv[1] is the seed.
#include "kv_swap/cuda/submit.h"
#include "../check.h"

#include <cstdio>
#include <numeric>

using namespace isthmus;

// The kernels by their definition, on what they find when they run.
int64_t isthmus::start_kernel(const Route &, bool in, const SwapLaunch &arguments, int64_t, cudaStream_t stream) {
    ALONE;
    fake_kernels++;
    stream->work.push_back([=] {
        const SwapShape &shape = arguments.shape;
        for (int64_t i = 0; i < *arguments.count * shape.items; i++) {
            const SwapItem item = kv_swap_item(shape, arguments.pairs[i / shape.items], uint32_t(i % shape.items));
            for (uint32_t row = 0; row < item.rows; row++) {
                char *pool = arguments.pool + item.pool + row * shape.pool_stride[0];
                char *host = arguments.host + item.host + row * shape.host_stride[0];
                memcpy(in ? pool : host, in ? host : pool, item.bytes);
            }
        }
        return true;
    });
    return 0;
}

static std::mt19937 random_;  // of this thread
static int64_t below(int64_t limit) { return int64_t(random_() % uint64_t(limit)); }

// A pool of `rows` fragments a block, layer by layer (or block by block), over a host buffer of whole blocks with
// `gap` bytes between them.
struct World {
    int64_t fragment = 1 + below(40), rows = 1 + below(6), pool_blocks = 30, host_blocks = 40;
    int64_t gap = below(3) ? 0 : 16;
    bool layer_major = below(3) > 0;
    std::vector<char> pool, host, slots;

    SwapShape shape(bool staged) const {
        SwapShape s = {};
        s.fragment = s.piece = fragment;
        s.splits = s.rows = 1;
        for (int d = 0; d < KV_SWAP_DIMS; d++) s.count[d] = 1;
        s.pool_block = layer_major ? fragment : rows * fragment;
        s.host_block = staged ? rows * fragment : rows * fragment + gap;
        if (!layer_major || rows == 1) {  // joined, as geometry.py does
            s.fragment = s.piece = rows * fragment;
            s.pool_stride[0] = s.host_stride[0] = s.fragment;
            s.groups = s.items = 1;
            return s;
        }
        s.count[0] = s.groups = s.items = rows;
        s.pool_stride[0] = pool_blocks * fragment;
        s.host_stride[0] = fragment;
        return s;
    }
    char *row(std::vector<char> &pools, int64_t block, int64_t r) const {
        return pools.data() + (layer_major ? (r * pool_blocks + block) : (block * rows + r)) * fragment;
    }
};

static std::vector<int64_t> draw(int64_t blocks, int64_t count) {
    std::vector<int64_t> ids(static_cast<size_t>(blocks));
    std::iota(ids.begin(), ids.end(), 0);
    if (below(3) == 0) {
        std::shuffle(ids.begin(), ids.end(), random_);
    } else {  // stretches that rise or fall
        std::rotate(ids.begin(), ids.begin() + below(blocks), ids.end());
        for (int64_t at = 0; at < blocks; at += 5)
            if (below(2)) std::reverse(ids.begin() + at, ids.begin() + std::min(blocks, at + 5));
    }
    ids.resize(size_t(count));
    return ids;
}

static int check_world(int direction) {
    World world;
    world.pool.resize(size_t(world.pool_blocks * world.rows * world.fragment));
    world.host.resize(size_t(world.host_blocks * (world.rows * world.fragment + world.gap)));
    for (std::vector<char> *memory : {&world.pool, &world.host})
        for (char &byte : *memory) byte = char(random_());
    FakeStream caller, last, first, reader;
    fake_streams = {&caller, &last, &first, &reader};
    const int64_t slot_blocks = 1 + below(4), count_slots = 2 + below(3), block = world.rows * world.fragment;
    const int64_t never = int64_t(1) << 40;
    world.slots.assign(size_t(slot_blocks * count_slots * block), 0x55);
    // The caller submits, the thread does, or now the one and now the other.
    const int64_t hand_over_from = below(3) ? below(world.pool_blocks) : 0;
    Swap swap;
    swap.config = {};
    swap.config.hand_over_from = hand_over_from, swap.config.staging_bytes = 4096;
    for (int d : {IN, OUT}) {
        swap.config.routes[d].shape = world.shape(false);
        swap.config.routes[d].ctas = swap.config.routes[d].warps = 2;
        swap.config.stages[d].route = swap.config.routes[d];
        swap.config.stages[d].route.shape = world.shape(true);
        swap.config.stages[d].slots = count_slots, swap.config.stages[d].slot_blocks = slot_blocks;
        swap.config.stages[d].memory = below(3) ? int64_t(world.slots.data()) : 0;
        swap.config.streams[d] = {int64_t(&last), int64_t(&first)};
    }
    swap.config.pool = int64_t(world.pool.data()), swap.config.host = int64_t(world.host.data());
    swap.config.pool_blocks = world.pool_blocks, swap.config.host_blocks = world.host_blocks;
    swap.config.engine_from = below(2) ? 1 + below(4 * block) : never;
    swap.config.rows_from = below(3) ? never : 1;
    swap.config.stage_from = below(2) ? 1 : 1 + below(3 * block);
    swap.host_on_device = world.host.data();
    CHECK(open(swap) == 0);
    Handover &handover = swap.lanes[direction].handover;
    int64_t turn = -1;
    int kernels_before = 0;
    std::vector<char> pool = world.pool, host = world.host;  // what must come of it
    for (int round = 0; round < 12; round++) {
        const bool rising = round == 11;
        const int64_t count = rising ? world.pool_blocks : below(world.pool_blocks);
        std::vector<int64_t> on_pool = draw(world.pool_blocks, count), on_host = draw(world.host_blocks, count);
        if (rising) {  // all blocks in a run
            std::iota(on_pool.begin(), on_pool.end(), 0), std::iota(on_host.begin(), on_host.end(), 0);
            CHECK(handover.synchronize(turn) == 0);
            ALONE;
            kernels_before = fake_kernels;
        }
        // The source changes right before the first, on the caller's stream; the copy has to wait for it.
        std::vector<char> &source = direction == IN ? world.host : world.pool, &expected = direction == IN ? host : pool;
        if (round == 0) {
            ALONE;
            for (int i = 0; i < 30; i++) caller.work.push_back([] { return true; });  // it takes its time
            caller.work.push_back([&source] {
                for (char &byte : source) byte++;
                return true;
            });
            for (char &byte : expected) byte++;
        }
        CHECK(give(swap, direction, on_pool.data(), on_host.data(), count, &caller, &turn) == 0 && turn == round);
        for (int64_t i = 0; i < count; i++)
            for (int64_t r = 0; r < world.rows; r++) {
                char *mine = world.row(pool, on_pool[size_t(i)], r);
                char *other = host.data() + on_host[size_t(i)] * (block + world.gap) + r * world.fragment;
                memcpy(direction == IN ? mine : other, direction == IN ? other : mine, size_t(world.fragment));
            }
        for (int64_t steps = below(40); steps > 0 && fake_step(); steps--) {}
    }
    const std::vector<int64_t> bad = {0, world.pool_blocks};
    CHECK(give(swap, direction, bad.data(), bad.data(), 2, &caller, &turn) == BAD_IDS);
    caller.captured = true;
    CHECK(give(swap, direction, bad.data(), bad.data(), 0, &caller, &turn) == CAPTURED);
    // Who waits on a stream finds the copies made.
    std::vector<char> seen;
    const std::vector<char> &target = direction == IN ? world.pool : world.host;
    CHECK(handover.wait(turn, &reader) == 0);
    {
        ALONE;
        // What is for the copy engine goes to it alone.
        const SwapShape shape = world.shape(false);
        const bool a_run = kv_swap_whole(shape) && world.pool_blocks * shape.fragment >= swap.config.engine_from;
        if (a_run || (swap.config.rows_from == 1 && is_matrix(shape))) CHECK(fake_kernels == kernels_before);
        reader.work.push_back([&] { return seen = target, true; });
    }
    if (below(2)) CHECK(handover.synchronize(turn) == 0 && handover.query(turn) == 0);
    fake_drain();
    CHECK(handover.query(turn) == 0 && handover.query(0) == 0);
    CHECK(caller.work.empty() && last.work.empty() && first.work.empty() && reader.work.empty());
    CHECK(pool == world.pool && host == world.host && seen == target);
    return 0;
}

int main(int, char **argv) {
    random_.seed(uint32_t(atoi(argv[1]))), fake_random.seed(uint32_t(atoi(argv[1])));
    for (int round = 0; round < 200; round++)
        if (check_world(round % 2)) return printf("round %d\n", round), 1;
    CHECK(fake_allocations == 0);
    CHECK(fake_copies > 300 && fake_matrices > 300 && fake_kernels > 300);  // every way was taken
    return 0;
}
