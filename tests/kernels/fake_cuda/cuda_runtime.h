// As much of the CUDA run-time library as staging.h uses, with a stream whose work ends when the test says so.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <cstdlib>
#include <deque>

enum cudaError_t { cudaSuccess = 0, cudaErrorNotReady = 600 };
enum { cudaHostAllocDefault = 0, cudaEventDisableTiming = 2 };
struct FakeEvent {
    bool pending = false;
};
typedef FakeEvent *cudaEvent_t;
typedef void *cudaStream_t;

// Events in the order in which the stream reaches them.
inline std::deque<cudaEvent_t> fake_stream;
inline int fake_waits = 0, fake_allocations = 0;

inline void fake_advance() {
    fake_stream.front()->pending = false;
    fake_stream.pop_front();
}
inline cudaError_t cudaHostAlloc(void **memory, size_t bytes, int) {
    fake_allocations++;
    *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    return cudaSuccess;
}
inline cudaError_t cudaFreeHost(void *memory) {
    fake_allocations--;
    free(memory);
    return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, int) {
    fake_allocations++;
    *event = new FakeEvent;
    return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
    fake_allocations--;
    delete event;
    return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
    event->pending = true;
    fake_stream.push_back(event);
    return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
    return event->pending ? cudaErrorNotReady : cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    fake_waits++;
    while (event->pending) fake_advance();
    return cudaSuccess;
}
