// How swaps of one direction reach the driver: a caller hands one over, and a thread submits it in its turn. No device
// code, so that a test runs it against streams of its own.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "staging.h"

namespace isthmus {

enum { NOT_YET = -4 };

// Swaps whose copies have not all ended, at most: who gives one more waits for the oldest.
constexpr int64_t kSwapsInFlight = 64;

// The driver has one lock for most of its calls, and gives it to whoever comes: a thread that makes one call after the
// other keeps it from who waits. So a thread with many calls to make asks here before each, and lets short ones go
// first. Nothing depends on it but time: every wait ends by the clock, too.
template <class Clock>
class GiveWayBy {
  public:
    // Makes a short call, after the long ones that have begun.
    template <class Call>
    auto first(Call call) {
        waiting_++;
        for (const std::atomic<int64_t> &until : until_)
            while (now() < until) std::this_thread::yield();
        const auto result = call();
        waiting_--;
        return result;
    }
    // Makes one of many calls; `who` is 0 or 1, and has a thread of its own.
    template <class Call>
    auto then(int who, Call call) {
        // First the own mark, so that of two who come at once one at least sees the other.
        until_[who] = now() + kBatch;
        if (waiting_) {
            until_[who] = 0;
            for (const int64_t most = now() + kPatience; waiting_ && now() < most;) std::this_thread::yield();
            until_[who] = now() + kBatch;
        }
        const auto result = call();
        until_[who] = 0;
        return result;
    }

  private:
    // Nanoseconds. What takes longer than a batch takes waits for the device, perhaps without the lock.
    static constexpr int64_t kBatch = 10'000, kPatience = 50'000;
    static int64_t now() { return Clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }
    std::atomic<int> waiting_{0};
    std::atomic<int64_t> until_[2] = {};  // when the long call of each is late; 0: it makes none
};
using GiveWay = GiveWayBy<std::chrono::steady_clock>;

struct Ids {
    std::vector<uint32_t> pool, host;
};

// A swap as it was given: ids that are checked, an event on the caller's stream, and one at its own end.
struct Job {
    Ids ids;
    cudaEvent_t begin = nullptr, done = nullptr;
};

// Swaps have turns 0, 1, 2 and so on, in which they are submitted and in which they end. A swap that cannot be
// submitted fails, and so do all after it: their order would be broken.
class Handover {
  public:
    using Submit = std::function<int64_t(const Job &)>;

    ~Handover() {
        stop();
        for (const Job &job : jobs_) {
            if (job.begin) cudaEventDestroy(job.begin);
            if (job.done) cudaEventDestroy(job.done);
        }
    }

    // `way` outlives the thread.
    int64_t open(int device, GiveWay *way, Submit submit) {
        submit_ = std::move(submit);
        way_ = way;
        spare_.reserve(kSwapsInFlight + 1);
        for (Job &job : jobs_) {
            TRY(cudaEventCreateWithFlags(&job.begin, cudaEventDisableTiming));
            TRY(cudaEventCreateWithFlags(&job.done, cudaEventDisableTiming));
        }
        thread_ = std::thread([this, device] { run(device); });
        return 0;
    }

    // Submits what was given and ends the thread.
    void stop() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            stopped_ = true;
        }
        given_more_.notify_one();
        if (thread_.joinable()) thread_.join();
    }

    // Gives the swap that `fill` writes, to begin when what `after` was given before has ended. `here`: if no other is
    // in line, the calling thread submits it.
    template <class Fill>
    int64_t give(cudaStream_t after, bool here, Fill fill, int64_t *turn) {
        const std::lock_guard<std::mutex> giving(giving_);
        const int64_t mine = given_;
        Job &job = jobs_[mine % kSwapsInFlight];
        {
            std::unique_lock<std::mutex> lock(mutex_);
            submitted_more_.wait(lock, [&] { return failed_ || submitted_ > mine - kSwapsInFlight; });
            if (failed_) return failed_;
        }
        if (mine >= kSwapsInFlight) TRY(cudaEventSynchronize(job.done));
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            taken_ = mine + 1;
            if (!spare_.empty()) job.ids = std::move(spare_.back()), spare_.pop_back();
        }
        if (const int64_t code = fill(job.ids)) return code;
        TRY(way_->first([&] { return cudaEventRecord(job.begin, after); }));
        std::unique_lock<std::mutex> lock(mutex_);
        *turn = mine;
        if (here && submitted_ == mine) {
            lock.unlock();  // nobody else submits: the thread sees nothing to do, other callers wait for `giving`
            const int64_t code = submit_(job);
            lock.lock();
            given_++;
            note(code);
            return code;
        }
        given_++;
        lock.unlock();
        given_more_.notify_one();
        return 0;
    }

    // 0 when its copies have ended.
    int64_t query(int64_t turn) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (const int64_t code = failure(turn)) return code;
        if (turn >= submitted_) return NOT_YET;
        if (ended(turn)) return 0;
        const cudaError_t state = cudaEventQuery(event(turn));
        return state == cudaErrorNotReady ? int64_t(NOT_YET) : int64_t(state);
    }
    // Waits for the end of its copies.
    int64_t synchronize(int64_t turn) {
        if (const int64_t code = submitted(turn)) return code;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (ended(turn)) return 0;
        }
        TRY(cudaEventSynchronize(event(turn)));
        return 0;
    }
    // Lets what `stream` is given from now on wait for the end of its copies. Waits until it is submitted.
    int64_t wait(int64_t turn, cudaStream_t stream) {
        if (const int64_t code = submitted(turn)) return code;
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!ended(turn)) TRY(cudaStreamWaitEvent(stream, event(turn), 0));
        return 0;
    }
    // Why swaps from `*first` on have failed; 0 when none has.
    int64_t failed(int64_t *first) {
        const std::lock_guard<std::mutex> lock(mutex_);
        *first = first_failed_;
        return failed_;
    }

  private:
    void run(int device) {
        cudaSetDevice(device);
        // A capture on another thread neither sees these calls nor forbids them.
        cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
        cudaThreadExchangeStreamCaptureMode(&mode);
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            given_more_.wait(lock, [&] { return stopped_ || submitted_ < given_; });
            if (submitted_ == given_) return;
            const Job &job = jobs_[submitted_ % kSwapsInFlight];
            int64_t code = failed_;
            if (!code) {
                lock.unlock();
                code = submit_(job);
                lock.lock();
            }
            note(code);
        }
    }
    // The first turn that was not, is submitted now, or has failed. Under `mutex_`.
    void note(int64_t code) {
        if (code && !failed_) failed_ = code, first_failed_ = submitted_;
        // The memory that was just used is the likeliest to be in a cache.
        spare_.push_back(std::move(jobs_[submitted_ % kSwapsInFlight].ids));
        submitted_++;
        submitted_more_.notify_all();
    }
    int64_t failure(int64_t turn) const { return failed_ && turn >= first_failed_ ? failed_ : 0; }
    int64_t submitted(int64_t turn) {
        std::unique_lock<std::mutex> lock(mutex_);
        submitted_more_.wait(lock, [&] { return submitted_ > turn; });
        return failure(turn);
    }
    // Whether its event is a later swap's, which had to wait for its end.
    bool ended(int64_t turn) const { return turn + kSwapsInFlight < taken_; }
    cudaEvent_t event(int64_t turn) const { return jobs_[turn % kSwapsInFlight].done; }

    Submit submit_;
    GiveWay *way_ = nullptr;
    Job jobs_[kSwapsInFlight];
    std::vector<Ids> spare_;  // of jobs that are submitted
    std::mutex giving_;  // by who gives, for as long as that takes
    std::mutex mutex_;   // the numbers below
    std::condition_variable given_more_, submitted_more_;
    int64_t taken_ = 0, given_ = 0, submitted_ = 0;  // turns, in the order in which each passes them
    int64_t failed_ = 0, first_failed_ = 0;
    bool stopped_ = false;
    std::thread thread_;
};

}  // namespace isthmus
