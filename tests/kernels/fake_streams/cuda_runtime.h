// As much of the CUDA run-time library as submit.h uses. Work runs on streams of its own: in the order of each stream, in
// any order among them but for events, and as late as somebody waits or the test lets it. One thread at a time.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <vector>

enum cudaError_t { cudaSuccess = 0, cudaErrorNotReady = 600 };
enum { cudaHostAllocDefault = 0, cudaEventDisableTiming = 2 };
struct FakeEvent {
    uint64_t recorded = 0, reached = 0;
};
typedef FakeEvent *cudaEvent_t;
struct FakeStream {
    std::deque<std::function<bool()>> work;  // false: it has to wait
    bool captured = false;
};
typedef FakeStream *cudaStream_t;

inline std::recursive_mutex fake_mutex;
#define ALONE const std::lock_guard<std::recursive_mutex> alone(fake_mutex)
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed = 2 };
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) { return cudaSuccess; }
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1 };
inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
    return *status = stream->captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone, cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }

inline std::vector<FakeStream *> fake_streams;
inline std::mt19937 fake_random;
inline int fake_allocations = 0, fake_copies = 0, fake_matrices = 0, fake_kernels = 0;

// Runs one piece of work of some stream; false when none can run.
inline bool fake_step() {
    ALONE;
    const size_t first = fake_random() % fake_streams.size();
    for (size_t i = 0; i < fake_streams.size(); i++) {
        FakeStream *stream = fake_streams[(first + i) % fake_streams.size()];
        if (stream->work.empty() || !stream->work.front()()) continue;
        stream->work.pop_front();
        return true;
    }
    return false;
}
inline void fake_drain() {
    ALONE;
    while (fake_step()) {}
}
inline cudaError_t cudaHostAlloc(void **memory, size_t bytes, int) {
    ALONE;
    fake_allocations++;
    *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    return cudaSuccess;
}
inline cudaError_t cudaFreeHost(void *memory) {
    ALONE;
    fake_allocations--;
    free(memory);
    return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, int) {
    ALONE;
    fake_allocations++;
    *event = new FakeEvent;
    return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
    ALONE;
    fake_allocations--;
    delete event;
    return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    ALONE;
    const uint64_t turn = ++event->recorded;
    stream->work.push_back([=] { return event->reached = turn, true; });
    return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    ALONE;
    const uint64_t turn = event->recorded;
    stream->work.push_back([=] { return event->reached >= turn; });
    return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
    ALONE;
    return event->reached < event->recorded ? cudaErrorNotReady : cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    ALONE;
    while (event->reached < event->recorded)
        if (!fake_step()) abort();  // a wait for ever
    return cudaSuccess;
}

enum { cudaMemcpySrcAccessOrderStream = 1, cudaMemcpyFlagPreferOverlapWithCompute = 1, cudaMemcpyOperandTypePointer = 1 };
struct cudaMemcpyAttributes {
    int srcAccessOrder;
    unsigned flags;
};
inline cudaError_t cudaMemcpyBatchAsync(void **to, const void **from, const size_t *sizes, size_t count,
                                        cudaMemcpyAttributes *, size_t *, size_t, cudaStream_t stream) {
    ALONE;
    for (size_t i = 0; i < count; i++) {
        fake_copies++;
        void *const target = to[i];
        const void *const source = from[i];
        const size_t bytes = sizes[i];
        stream->work.push_back([=] { return memcpy(target, source, bytes), true; });
    }
    return cudaSuccess;
}
struct cudaExtent {
    size_t width, height, depth;
};
inline cudaExtent make_cudaExtent(size_t width, size_t height, size_t depth) { return {width, height, depth}; }
struct cudaMemcpy3DOperand {
    int type;
    struct {
        struct {
            void *ptr;
            size_t rowLength, layerHeight;
        } ptr;
    } op;
};
struct cudaMemcpy3DBatchOp {
    cudaMemcpy3DOperand src, dst;
    cudaExtent extent;
    int srcAccessOrder;
    unsigned flags;
};
inline cudaError_t cudaMemcpy3DBatchAsync(size_t count, cudaMemcpy3DBatchOp *copies, unsigned long long,
                                          cudaStream_t stream) {
    ALONE;
    for (size_t i = 0; i < count; i++) {
        fake_matrices++;
        const cudaMemcpy3DBatchOp copy = copies[i];
        stream->work.push_back([=] {
            for (size_t row = 0; row < copy.extent.height; row++)
                memcpy((char *)copy.dst.op.ptr.ptr + row * copy.dst.op.ptr.rowLength,
                       (const char *)copy.src.op.ptr.ptr + row * copy.src.op.ptr.rowLength, copy.extent.width);
            return true;
        });
    }
    return cudaSuccess;
}
