// The threads of the library. A parallel loop is a counter that everybody takes indices from: the caller works
// too, and returns when the indices are used up and nobody is inside one. A thread that the system has not
// scheduled is therefore never waited for, which is what makes OpenMP's barriers crawl on a busy machine.
//
// Unless it was interrupted inside an index: then the loop lasts as long as whatever took its processor, some
// milliseconds, and several engines that share their processors stop one another like that most of the time. So a
// loop that waited for such a helper, soon after another one did, is a sign that there are fewer processors than threads,
// and the next ones are done by one thread less; after a while without such a sign one more is tried.
//
// One loop runs at a time; a second caller meanwhile runs its loop alone. A forked child
// hires helpers of its own. Compiled once, for the oldest instruction set.
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace {

typedef void (*Body)(void *context, int64_t index, int thread);

constexpr int MAX_THREADS = 256;
// Turns of waiting (20 to 70 ns each) before a helper sleeps: longer than the gap between two ops of a step.
constexpr int SPIN = 2000;
// A helper that finishes its index so much later than the caller had none left, beyond twice what an index takes, was
// interrupted: the system lets whoever is in its way run for some milliseconds.
constexpr int64_t INTERRUPTED_NS = 500000;
// An interruption is not worth a thread if the time since the one before it, or since the thread returned, is so many
// times longer. The process's own other threads interrupt like that once a step.
constexpr int64_t RARE = 8;
// How long a thread stays away: about as long as an interruption lasts; twice as long each time that it is interrupted
// again too soon after its return.
constexpr int64_t AWAY_NS = 2000000, LONGEST_AWAY_NS = 160000000;

struct alignas(64) Pool {
    // The loop that is open. Written by its caller while `open` is 0 and no helper is inside.
    Body body;
    void *context;
    int64_t count;
    int threads;
    alignas(64) int64_t next;
    alignas(64) int32_t open, inside;
    int32_t awaited;  // the caller sleeps until nobody is inside
    alignas(64) uint32_t generation;  // changes with every loop; helpers sleep on it
    int32_t sleeping;
    // Threads that may work; the helpers beyond sleep on it. Written by callers while `busy` is theirs.
    alignas(64) int32_t present;
    alignas(64) int32_t busy;
    int32_t helpers, wanted;
    pthread_t handles[MAX_THREADS];
    int32_t avoided;  // the processor that helpers are kept off
    // When `present` changed or a helper was interrupted, and how long `present` stays as it is.
    int64_t changed_at, away;
    bool failed, watched;
} pool;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

void sleep_while(const void *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake(const void *word, int count) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

// How many it took.
int64_t take_indices(int thread) {
    for (int64_t taken = 0;; taken++) {
        const int64_t index = __atomic_fetch_add(&pool.next, 1, __ATOMIC_RELAXED);
        if (index >= pool.count) return taken;
        pool.body(pool.context, index, thread);
    }
}

uint32_t next_loop(uint32_t seen) {
    for (int i = 0; i < SPIN; i++) {
        const uint32_t now = __atomic_load_n(&pool.generation, __ATOMIC_ACQUIRE);
        if (now != seen) return now;
        relax();
    }
    __atomic_fetch_add(&pool.sleeping, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&pool.generation, __ATOMIC_SEQ_CST) == seen) sleep_while(&pool.generation, seen);
    __atomic_fetch_sub(&pool.sleeping, 1, __ATOMIC_SEQ_CST);
    return __atomic_load_n(&pool.generation, __ATOMIC_ACQUIRE);
}

void *help(void *number) {
    const int thread = int(intptr_t(number));
    for (uint32_t seen = 0;;) {
        for (int32_t present; thread >= (present = __atomic_load_n(&pool.present, __ATOMIC_SEQ_CST));)
            sleep_while(&pool.present, present);
        seen = next_loop(seen);
        // Entering before looking at `open`, while the caller closes before looking at `inside`: one of the two
        // sees the other.
        __atomic_fetch_add(&pool.inside, 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&pool.open, __ATOMIC_SEQ_CST) && thread < pool.threads) take_indices(thread);
        if (__atomic_fetch_sub(&pool.inside, 1, __ATOMIC_SEQ_CST) == 1 &&
            __atomic_load_n(&pool.awaited, __ATOMIC_SEQ_CST))
            wake(&pool.inside, 1);
    }
    return nullptr;
}

// Only the forking thread lives on in the child.
void forget_helpers() {
    pool.helpers = pool.open = pool.inside = pool.sleeping = pool.awaited = pool.busy = 0;
}

void hire(int wanted) {
    if (!pool.watched) {
        pool.watched = true;
        pthread_atfork(nullptr, nullptr, forget_helpers);
    }
    while (pool.helpers < wanted && !pool.failed) {
        pthread_t handle;
        // Where no thread can be had, the caller does the work.
        if (pthread_create(&handle, nullptr, help, (void *)(intptr_t)(pool.helpers + 1))) pool.failed = true;
        else pthread_detach(handle), pool.handles[pool.helpers++] = handle, pool.avoided = -1;
    }
}

// Helpers about to be woken shall not run where the caller does: the system likes to place whoever is woken beside its
// waker, even with an idle processor at hand, and both then take turns on one, step after step. So they may run wherever
// the caller may but on its processor, until it is met on another one.
void keep_apart() {
    const int32_t own = sched_getcpu();
    if (own < 0 || own == pool.avoided) return;
    pool.avoided = own;
    cpu_set_t others;
    // More processors than the set has room for: the system will find one.
    if (sched_getaffinity(0, sizeof others, &others)) return;
    if (CPU_COUNT(&others) > 1) CPU_CLR(own, &others);
    for (int i = 0; i < pool.helpers; i++) pthread_setaffinity_np(pool.handles[i], sizeof others, &others);
}

// Until no helper is inside an index.
void await_helpers() {
    for (int i = 0; i < SPIN; i++) {
        if (!__atomic_load_n(&pool.inside, __ATOMIC_ACQUIRE)) return;
        relax();
    }
    __atomic_store_n(&pool.awaited, 1, __ATOMIC_SEQ_CST);
    while (const int32_t inside = __atomic_load_n(&pool.inside, __ATOMIC_SEQ_CST)) sleep_while(&pool.inside, inside);
    __atomic_store_n(&pool.awaited, 0, __ATOMIC_RELAXED);
}

// Lets threads go, or more come.
void set_present(int32_t present, int64_t at) {
    const bool more = present > pool.present;
    __atomic_store_n(&pool.present, present, __ATOMIC_SEQ_CST);
    pool.changed_at = at;
    if (more) wake(&pool.present, MAX_THREADS);
}

// What a loop tells: its caller had no index left at `idle` and waited until `end`, where an index takes `each`.
void learn(int threads, int64_t each, int64_t idle, int64_t end) {
    const int64_t since = end - pool.changed_at, waited = end - idle;
    if (waited > INTERRUPTED_NS + 2 * each) {
        if (since > RARE * waited) {
            pool.away = AWAY_NS / 2;
            pool.changed_at = end;
            return;
        }
        if (pool.away < LONGEST_AWAY_NS) pool.away *= 2;
        set_present(pool.present > 1 ? pool.present - 1 : 1, end);
    } else if (pool.present < threads && since > pool.away) {
        set_present(pool.present + 1, end);
    }
}

}  // namespace

// Threads that compute at present: fewer than were asked for while others need their processors; 0 before the first loop.
extern "C" __attribute__((visibility("default"))) int64_t isthmus_threads_present() {
    return __atomic_load_n(&pool.present, __ATOMIC_RELAXED);
}

// Call body(context, index, thread) for every index below `count`, on at most `threads` threads; `thread` is below
// that and no two calls with the same one overlap.
extern "C" __attribute__((visibility("hidden"))) void isthmus_parallel(int64_t count, int threads, Body body,
                                                                       void *context) {
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (count < 2 || threads < 2 || __atomic_exchange_n(&pool.busy, 1, __ATOMIC_ACQUIRE)) {
        for (int64_t index = 0; index < count; index++) body(context, index, 0);
        return;
    }
    hire(threads - 1);
    const int64_t began = now();
    if (pool.wanted != threads) {
        pool.wanted = threads;
        pool.away = AWAY_NS / 2;
        set_present(threads, began);
    }
    pool.body = body;
    pool.context = context;
    pool.count = count;
    pool.threads = pool.present;
    __atomic_store_n(&pool.next, 0, __ATOMIC_RELAXED);
    if (pool.threads > 1) {
        __atomic_store_n(&pool.open, 1, __ATOMIC_SEQ_CST);
        __atomic_fetch_add(&pool.generation, 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&pool.sleeping, __ATOMIC_SEQ_CST)) {
            keep_apart();
            wake(&pool.generation, pool.threads - 1);
        }
    }
    const int64_t taken = take_indices(0);
    const int64_t idle = now();
    __atomic_store_n(&pool.open, 0, __ATOMIC_SEQ_CST);
    await_helpers();
    learn(threads, (idle - began) / (taken ? taken : 1), idle, now());
    __atomic_store_n(&pool.busy, 0, __ATOMIC_RELEASE);
}
