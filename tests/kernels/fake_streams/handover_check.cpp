// The line of swaps between callers and the one that submits: order, bound, failures, many threads. Prints what is wrong,
// and returns 1; argv[1] is the seed.
#include "kv_swap/cuda/handover.h"
#include "../check.h"

#include <atomic>

using namespace isthmus;

// Submissions in the order of the turns, each ended before its place is taken by a later one.
static int check_threads(unsigned seed) {
    constexpr int kThreads = 4, kEach = 150;
    FakeStream caller, last;
    fake_streams = {&caller, &last};
    std::vector<uint32_t> seen;
    std::atomic<int64_t> open_swaps = 0, most = 0, wrong = 0;
    GiveWay way;
    {
        Handover handover;
        CHECK(handover.open(0, &way, [&](const Job &job) -> int64_t {
            most = std::max(most.load(), ++open_swaps);
            seen.push_back(job.ids.pool[0]);
            TRY(way.then(0, [&] { return cudaStreamWaitEvent(&last, job.begin, 0); }));
            {
                ALONE;
                last.work.push_back([&] { return open_swaps--, true; });
            }
            TRY(cudaEventRecord(job.done, &last));
            return 0;
        }) == 0);
        std::vector<std::thread> threads;
        for (int t = 0; t < kThreads; t++)
            threads.emplace_back([&, t] {
                std::mt19937 random(seed * kThreads + unsigned(t));
                int64_t before = -1;
                for (uint32_t i = 0; i < kEach; i++) {
                    const uint32_t name = uint32_t(t) * kEach + i;
                    int64_t turn = -1;
                    const auto fill = [&](Ids &ids) -> int64_t { return ids.pool.assign(1, name), 0; };
                    if (handover.give(&caller, random() % 2, fill, &turn) || turn <= before) wrong++;
                    before = turn;
                    if (random() % 4 == 0 && handover.synchronize(turn)) wrong++;
                    if (random() % 4 == 0) {
                        const int64_t old = int64_t(random() % uint64_t(turn + 1)), state = handover.query(old);
                        if (state && state != NOT_YET) wrong++;
                    }
                }
                if (handover.synchronize(before) || handover.query(before)) wrong++;
            });
        for (std::thread &thread : threads) thread.join();
    }
    CHECK(wrong == 0 && most <= kSwapsInFlight && seen.size() == kThreads * kEach);
    std::vector<uint32_t> next(kThreads, 0);  // each caller's in its order
    for (const uint32_t name : seen) CHECK(name % kEach == next[name / kEach]++);
    return 0;
}

// A swap that cannot be submitted takes those after it with it, and no one before; whoever asks hears of it.
static int check_failure(bool here) {
    FakeStream caller, last;
    fake_streams = {&caller, &last};
    int submissions = 0;
    GiveWay way;
    Handover handover;
    CHECK(handover.open(0, &way, [&](const Job &job) -> int64_t {
        if (++submissions == 3) return 7;
        TRY(cudaEventRecord(job.done, &last));
        return 0;
    }) == 0);
    const auto fill = [](Ids &ids) -> int64_t { return ids.pool.assign(1, 0), 0; };
    int64_t turn = -1, first = -1, code = 0;
    for (int i = 0; i < 5 && !code; i++) {
        code = handover.give(&caller, here, fill, &turn);
        CHECK(code == 0 || (code == 7 && i >= 2));
    }
    CHECK(handover.synchronize(0) == 0 && handover.synchronize(1) == 0);
    CHECK(handover.synchronize(2) == 7 && handover.query(2) == 7 && handover.wait(2, &last) == 7);
    CHECK(handover.query(1) == 0 && handover.wait(1, &last) == 0);
    CHECK(handover.give(&caller, here, fill, &turn) == 7 && handover.query(3) == 7);
    handover.stop();
    CHECK(submissions == 3 && handover.failed(&first) == 7 && first == 2);
    fake_drain();
    return 0;
}

// What was given before the end is still submitted.
static int check_stop() {
    FakeStream caller, last;
    fake_streams = {&caller, &last};
    int submissions = 0;
    GiveWay way;
    Handover handover;
    CHECK(handover.open(0, &way, [&](const Job &job) { return submissions++, int64_t(cudaEventRecord(job.done, &last)); }) == 0);
    int64_t turn = -1;
    for (int i = 0; i < 40; i++) CHECK(handover.give(&caller, false, [](Ids &) { return int64_t(0); }, &turn) == 0);
    handover.stop();
    CHECK(submissions == 40 && handover.query(39) == NOT_YET);
    fake_drain();
    CHECK(handover.query(39) == 0);
    return 0;
}

// Goes on by a microsecond whenever it is read.
struct Ticking {
    using time_point = std::chrono::time_point<std::chrono::steady_clock>;
    static inline int64_t reads = 0;
    static time_point now() { return time_point(std::chrono::microseconds(++reads)); }
};

// Who has a short call to make waits for the long one that has begun, and a long one for short ones; neither for ever.
static int check_give_way() {
    GiveWayBy<Ticking> way;
    const auto reads = [](auto call) {
        const int64_t before = Ticking::reads;
        call();
        return Ticking::reads - before;
    };
    const auto nothing = [] { return 5; };
    const auto short_call = [&] { return way.first(nothing); };
    CHECK(way.first(nothing) == 5 && way.then(1, nothing) == 5);
    CHECK(reads(short_call) == 2);  // one for each who could be at a long one
    for (const int who : {0, 1}) {
        int64_t waited = 0;
        way.then(who, [&] { return waited = reads(short_call); });
        CHECK(waited == (who ? 10 : 11));
        CHECK(reads(short_call) == 2);
        way.first([&] { return waited = reads([&] { way.then(who, nothing); }); });
        CHECK(waited >= 50 && waited < 60);
        CHECK(reads([&] { way.then(who, nothing); }) == 1);
    }
    return 0;
}

int main(int, char **argv) {
    const unsigned seed = unsigned(atoi(argv[1]));
    fake_random.seed(seed);
    if (check_give_way() || check_threads(seed) || check_failure(false) || check_failure(true) || check_stop()) return 1;
    CHECK(fake_allocations == 0);
    return 0;
}
