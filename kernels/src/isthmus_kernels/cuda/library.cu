// What the CUDA library says of itself: which sources it was built from, and what an error code means.
#include <cuda_runtime.h>
#include <stdint.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char *isthmus_cuda_sources() {
    return ISTHMUS_SOURCES;
}

EXPORT const char *isthmus_cuda_error(int64_t code) {
    return cudaGetErrorString(cudaError_t(code));
}
