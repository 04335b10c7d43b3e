// What the host side of the swap keeps: the check of ids, pinned memory for those on their way to a kernel, and turns
// of the slots of a staged swap.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "../items.h"

#define TRY(call)                                                    \
    do {                                                             \
        if (const cudaError_t error = (call)) return int64_t(error); \
    } while (0)

namespace isthmus {

// What a kernel reads of one submission, in pinned memory.
struct Page {
    int64_t count;
    int64_t unused;
    SwapPair pairs[1];

    static size_t bytes(int64_t pairs) { return offsetof(Page, pairs) + size_t(pairs) * sizeof(SwapPair); }
};

// Finds bad ids with one bit for each block of the destination, all zero between calls: a swap of a few blocks of a
// large pool touches little memory that the transfers before it have pushed out of the caches.
class Checker {
  public:
    void resize(int64_t blocks) {
        blocks_ = uint64_t(blocks);
        taken_.assign(size_t(blocks / 64 + 1), 0);
    }
    template <class Id>
    bool good(const Id *to, const Id *from, int64_t count, int64_t from_blocks) {
        bool good = true;
        int64_t seen = 0;
        for (; seen < count; seen++) {
            // A negative id is a large unsigned one.
            const uint64_t source = uint64_t(int64_t(from[seen])), target = uint64_t(int64_t(to[seen]));
            good = source < uint64_t(from_blocks) && target < blocks_ && !(taken_[target / 64] >> (target % 64) & 1);
            if (!good) break;
            taken_[target / 64] |= uint64_t(1) << (target % 64);
        }
        for (int64_t i = 0; i < seen; i++) taken_[size_t(to[i]) / 64] = 0;
        return good;
    }

  private:
    uint64_t blocks_ = 0;
    std::vector<uint64_t> taken_;
};

constexpr int kPagesInFlight = 64;

// Pinned memory for pages, used in turn; a page is free again when the kernel that reads it has ended.
class Staging {
  public:
    ~Staging() {
        for (const Use &use : uses_)
            if (use.done) cudaEventDestroy(use.done);
        if (memory_) cudaFreeHost(memory_);
    }
    int64_t open(int64_t bytes) {
        bytes_ = bytes;
        TRY(cudaHostAlloc((void **)&memory_, size_t(bytes), cudaHostAllocDefault));
        for (Use &use : uses_) TRY(cudaEventCreateWithFlags(&use.done, cudaEventDisableTiming));
        return 0;
    }
    // The most pairs of a page: half of the memory, so that one page can be filled while another is read.
    int64_t largest() const { return (bytes_ / 2 - int64_t(Page::bytes(0)) - kLine) / int64_t(sizeof(SwapPair)); }

    // A page for `pairs` pairs; waits for the oldest pages when it has no room.
    int64_t reserve(int64_t pairs, Page **page) {
        const int64_t size = (int64_t(Page::bytes(pairs)) + kLine - 1) / kLine * kLine;
        while (used_ && cudaEventQuery(uses_[oldest_].done) == cudaSuccess) retire();
        // Memory that was just used is the likeliest to be in a cache.
        if (!used_ || end_ + size > bytes_) end_ = 0;
        while (used_ && (used_ == kPagesInFlight || taken(end_, end_ + size))) {
            TRY(cudaEventSynchronize(uses_[oldest_].done));
            retire();
        }
        Use &use = uses_[(oldest_ + used_) % kPagesInFlight];
        use.begin = end_, use.end = end_ + size;
        *page = (Page *)(memory_ + end_);
        return 0;
    }
    // The page reserved last is read by what was submitted to `stream`.
    int64_t commit(cudaStream_t stream) {
        Use &use = uses_[(oldest_ + used_) % kPagesInFlight];
        TRY(cudaEventRecord(use.done, stream));
        end_ = use.end;
        used_++;
        return 0;
    }

  private:
    static constexpr int64_t kLine = 64;
    struct Use {
        int64_t begin, end;
        cudaEvent_t done;
    };
    void retire() {
        oldest_ = (oldest_ + 1) % kPagesInFlight;
        used_--;
    }
    bool taken(int64_t begin, int64_t end) const {
        for (int i = 0; i < used_; i++) {
            const Use &use = uses_[(oldest_ + i) % kPagesInFlight];
            if (use.begin < end && begin < use.end) return true;
        }
        return false;
    }
    char *memory_ = nullptr;
    int64_t bytes_ = 0, end_ = 0;
    Use uses_[kPagesInFlight] = {};
    int oldest_ = 0, used_ = 0;
};

// Blocks of the next chunk of a staged swap, at most `most`. The work of one end is never beside a copy: of a swap in
// the last chunk's way out of its slot, of a swap out the first one's way into it. So swaps in end with small chunks,
// and swaps out begin with them.
inline int64_t stage_chunk(bool in, int64_t done, int64_t left, int64_t most) {
    const int64_t least = std::max<int64_t>(1, most / 8);
    return std::min({left, most, std::max(least, in ? left / 2 : done)});
}

// Slots of device memory, used in turn.
class Slots {
  public:
    struct Slot {
        int64_t index;
        cudaEvent_t filled, freed;
    };
    ~Slots() {
        for (const Slot &slot : slots_) cudaEventDestroy(slot.filled), cudaEventDestroy(slot.freed);
    }
    int64_t open(int64_t count) {
        slots_.reserve(size_t(count));
        for (int64_t i = 0; i < count; i++) {
            Slot slot = {i, nullptr, nullptr};
            TRY(cudaEventCreateWithFlags(&slot.filled, cudaEventDisableTiming));
            slots_.push_back(slot);
            TRY(cudaEventCreateWithFlags(&slots_.back().freed, cudaEventDisableTiming));
        }
        return 0;
    }
    Slot next() { return slots_[turn_++ % slots_.size()]; }

  private:
    std::vector<Slot> slots_;
    size_t turn_ = 0;
};

}  // namespace isthmus
