// Runs the host side of the swap against a fake stream. Prints what is wrong, and returns 1; argv[1] is the seed.
#include "kv_swap/cuda/staging.h"
#include "../check.h"

#include <cstdio>
#include <deque>
#include <random>
#include <set>

using namespace isthmus;

struct Held {
    Page *page;
    int64_t count;
    uint32_t mark;
};

// Pages keep what was written to them until the stream has passed, whatever is reserved meanwhile.
static int check_staging(std::mt19937 &random, int64_t bytes) {
    {
        Staging staging;
        CHECK(staging.open(bytes) == 0);
        CHECK(staging.largest() >= 1 && int64_t(Page::bytes(staging.largest())) <= bytes / 2);
        std::deque<Held> held;  // as fake_stream
        for (uint32_t round = 0; round < 3000; round++) {
            const int64_t most = random() % 4 ? std::min<int64_t>(staging.largest(), 20) : staging.largest();
            const int64_t count = 1 + int64_t(random() % uint64_t(most));
            Page *page = nullptr;
            CHECK(staging.reserve(count, &page) == 0);
            while (held.size() > fake_stream.size()) held.pop_front();  // it waited
            page->count = count;
            for (int64_t i = 0; i < count; i++) page->pairs[i] = {round, uint32_t(i)};
            CHECK(staging.commit(nullptr) == 0);
            held.push_back({page, count, round});
            for (const Held &one : held) {
                CHECK(one.page->count == one.count);
                for (int64_t i = 0; i < one.count; i++)
                    CHECK(one.page->pairs[i].pool == one.mark && one.page->pairs[i].host == uint32_t(i));
            }
            for (uint32_t done = random() % 3; done && !held.empty(); done--) fake_advance(), held.pop_front();
        }
        while (!fake_stream.empty()) fake_advance();
    }
    CHECK(fake_allocations == 0);
    return 0;
}

// Nothing waits while there is room: 64 small pages in flight.
static int check_room() {
    Staging staging;
    CHECK(staging.open(1 << 20) == 0);
    fake_waits = 0;
    Page *page;
    for (int i = 0; i < kPagesInFlight; i++) CHECK(staging.reserve(100, &page) == 0 && staging.commit(nullptr) == 0);
    CHECK(fake_waits == 0);
    CHECK(staging.reserve(100, &page) == 0 && fake_waits == 1);
    while (!fake_stream.empty()) fake_advance();
    return 0;
}

// Chunks cover the swap, fit their slots, and begin or end small; slots come in turn.
static int check_chunks(std::mt19937 &random) {
    for (int round = 0; round < 2000; round++) {
        const bool in = random() % 2;
        const int64_t most = 1 + int64_t(random() % 100), count = 1 + int64_t(random() % 2000);
        std::vector<int64_t> sizes;
        for (int64_t done = 0; done < count; done += sizes.back()) {
            sizes.push_back(stage_chunk(in, done, count - done, most));
            CHECK(1 <= sizes.back() && sizes.back() <= most && sizes.back() <= count - done);
        }
        CHECK((in ? sizes.back() : sizes.front()) <= std::max<int64_t>(1, most / 8));
        // And no smaller than they have to be: what is not at either end fills its slot.
        CHECK(int64_t(sizes.size()) <= count / most + 9);
    }
    {
        Slots slots;
        CHECK(slots.open(3) == 0);
        std::set<cudaEvent_t> events;
        for (int i = 0; i < 7; i++) {
            const Slots::Slot slot = slots.next();
            CHECK(slot.index == i % 3);
            events.insert(slot.filled), events.insert(slot.freed);
        }
        CHECK(events.size() == 6);
    }
    CHECK(fake_allocations == 0);
    return 0;
}

template <class Id>
static int check_ids(std::mt19937 &random) {
    Checker checker;
    const int64_t to_blocks = 130, from_blocks = 70;
    checker.resize(to_blocks);
    for (int round = 0; round < 3000; round++) {
        std::vector<Id> to, from;
        std::set<Id> seen;
        bool want = true;
        for (int64_t i = int64_t(random() % 12); i > 0; i--) {
            to.push_back(Id(int64_t(random() % 132) - (random() % 50 == 0)));
            from.push_back(Id(int64_t(random() % 71) - (random() % 50 == 0)));
            want = want && to.back() >= 0 && to.back() < to_blocks && from.back() >= 0 && from.back() < from_blocks &&
                   seen.insert(to.back()).second;
        }
        CHECK(checker.good(to.data(), from.data(), int64_t(to.size()), from_blocks) == want);
    }
    return 0;
}

int main(int, char **argv) {
    std::mt19937 random{uint32_t(atoi(argv[1]))};
    for (const int64_t bytes : {4096, 5000, 65536}) {
        if (check_staging(random, bytes)) return 1;
    }
    return check_room() || check_chunks(random) || check_ids<int32_t>(random) || check_ids<int64_t>(random);
}
