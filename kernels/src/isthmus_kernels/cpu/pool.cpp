// The threads of the library. A parallel loop is a counter that everybody takes indices from: the caller works
// too, and returns when the indices are used up and nobody is inside one. A thread that the system has not
// scheduled is therefore never waited for, which is what makes OpenMP's barriers crawl on a busy machine.
//
// One loop runs at a time; a second caller meanwhile runs its loop alone. A forked child
// hires helpers of its own. Compiled once, for the oldest instruction set.
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

typedef void (*Body)(void *context, int64_t index, int thread);

constexpr int MAX_THREADS = 256;
// Turns of waiting (20 to 70 ns each) before a helper sleeps: longer than the gap between two ops of a step.
constexpr int SPIN = 2000;

struct alignas(64) Pool {
    // The loop that is open. Written by its caller while `open` is 0 and no helper is inside.
    Body body;
    void *context;
    int64_t count;
    int threads;
    alignas(64) int64_t next;
    alignas(64) int32_t open, inside;
    alignas(64) uint32_t generation;  // changes with every loop; helpers sleep on it
    int32_t sleeping;
    alignas(64) int32_t busy;
    int32_t helpers;
    bool failed, watched;
} pool;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

void take_indices(int thread) {
    for (;;) {
        const int64_t index = __atomic_fetch_add(&pool.next, 1, __ATOMIC_RELAXED);
        if (index >= pool.count) return;
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
    while (__atomic_load_n(&pool.generation, __ATOMIC_SEQ_CST) == seen)
        syscall(SYS_futex, &pool.generation, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    __atomic_fetch_sub(&pool.sleeping, 1, __ATOMIC_SEQ_CST);
    return __atomic_load_n(&pool.generation, __ATOMIC_ACQUIRE);
}

void *help(void *number) {
    const int thread = int(intptr_t(number));
    for (uint32_t seen = 0;;) {
        seen = next_loop(seen);
        // Entering before looking at `open`, while the caller closes before looking at `inside`: one of the two
        // sees the other.
        __atomic_fetch_add(&pool.inside, 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&pool.open, __ATOMIC_SEQ_CST) && thread < pool.threads) take_indices(thread);
        __atomic_fetch_sub(&pool.inside, 1, __ATOMIC_RELEASE);
    }
    return nullptr;
}

// Only the forking thread lives on in the child.
void forget_helpers() {
    pool.helpers = pool.open = pool.inside = pool.sleeping = pool.busy = 0;
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
        else pthread_detach(handle), pool.helpers++;
    }
}

}  // namespace

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
    pool.body = body;
    pool.context = context;
    pool.count = count;
    pool.threads = threads;
    __atomic_store_n(&pool.next, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&pool.open, 1, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&pool.generation, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool.sleeping, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &pool.generation, FUTEX_WAKE_PRIVATE, threads - 1, nullptr, nullptr, 0);
    take_indices(0);
    __atomic_store_n(&pool.open, 0, __ATOMIC_SEQ_CST);
    for (int i = 0; __atomic_load_n(&pool.inside, __ATOMIC_ACQUIRE); i++) {
        if (i < SPIN) relax();
        else sched_yield();  // a helper was interrupted inside an index: let it finish
    }
    __atomic_store_n(&pool.busy, 0, __ATOMIC_RELEASE);
}
