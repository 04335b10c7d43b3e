// What compute-sanitizer says of two patterns in kernels that do nothing else, each beside ones that it has to report and
// ones that it has not to. All values are compared. Reports, on an H200 with CUDA 13.0, in brackets:
//
//   nvcc -std=c++17 -arch=sm_90a -Ikernels/src/isthmus_kernels/cuda -o patterns tests/support/sanitizer_patterns.cu
//   compute-sanitizer --tool racecheck ./patterns lane0     one lane arrives for its warp, after __syncwarp (1,585)
//                                              all          every lane arrives for its own read (0)
//                                              early        every lane arrives before its read: a race (1,649)
//   compute-sanitizer --tool initcheck ./patterns batch     memory written by cudaMemcpyBatchAsync alone (each word)
//                                              plain, rows  by cudaMemcpyAsync, by cudaMemcpy3DBatchAsync (0)
//                                              none         by nobody (each word)
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>
#include <numeric>
#include <vector>

#include "hopper.cuh"

using namespace isthmus::hopper;

#define OK(call)                                                         \
    do {                                                                 \
        if (const cudaError_t error = (call)) {                          \
            printf("%s: %s\n", #call, cudaGetErrorString(error));       \
            return 2;                                                    \
        }                                                                \
    } while (0)

namespace {

enum Arrival { LANE0, ALL, EARLY };
constexpr int kWarps = 10, kTiles = 100, kWords = 4096, kParts = 4;

struct Shared {
    uint64_t full, empty;
    int4 tile;
};

// A warp deals out tiles through shared memory, the others read each before the next overwrites it.
template <Arrival kArrival>
__global__ void deal(int *sums) {
    __shared__ Shared shared;
    if (threadIdx.x == 0) init(&shared.full, 1), init(&shared.empty, kArrival == LANE0 ? kWarps : kWarps * 32);
    __syncthreads();
    const bool first_lane = threadIdx.x % 32 == 0;
    if (threadIdx.x < 32) {
        for (int i = 0; i < kTiles; i++) {
            wait(&shared.empty, (i & 1) ^ 1);
            if (!first_lane) continue;
            shared.tile = {i, i + 1, i + 2, i + 3};
            arrive(&shared.full);
        }
        return;
    }
    int sum = 0;
    for (int i = 0; i < kTiles; i++) {
        wait(&shared.full, i & 1);
        if (kArrival == EARLY) arrive(&shared.empty);
        const int4 tile = shared.tile;
        if (kArrival == ALL) arrive(&shared.empty);
        if (kArrival == LANE0) {
            __syncwarp();
            if (first_lane) arrive(&shared.empty);
        }
        sum += tile.x + tile.y + tile.z + tile.w;
    }
    sums[threadIdx.x - 32] = sum;
}

template <Arrival kArrival>
int check_tiles() {
    int *sums = nullptr, wrong = 0;
    std::vector<int> found(kWarps * 32);
    OK(cudaMalloc(&sums, found.size() * sizeof(int)));
    deal<kArrival><<<1, 32 * (kWarps + 1)>>>(sums);
    OK(cudaMemcpy(found.data(), sums, found.size() * sizeof(int), cudaMemcpyDeviceToHost));
    for (const int sum : found) wrong += sum != 2 * kTiles * (kTiles - 1) + 6 * kTiles;
    printf("%d of %zu sums are wrong\n", wrong, found.size());
    return wrong && kArrival != EARLY;
}

__global__ void read(const int *from, int *to) {
    to[blockIdx.x * blockDim.x + threadIdx.x] = from[blockIdx.x * blockDim.x + threadIdx.x];
}

cudaError_t copy(const char *how, int *to, int *from, cudaStream_t stream) {
    constexpr size_t kBytes = kWords / kParts * sizeof(int);
    if (!strcmp(how, "plain")) return cudaMemcpyAsync(to, from, kParts * kBytes, cudaMemcpyHostToDevice, stream);
    if (!strcmp(how, "batch")) {
        const void *sources[kParts];
        void *targets[kParts];
        size_t sizes[kParts], first = 0;
        for (int i = 0; i < kParts; i++)
            sources[i] = from + i * kWords / kParts, targets[i] = to + i * kWords / kParts, sizes[i] = kBytes;
        cudaMemcpyAttributes attributes = {};
        attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
        return cudaMemcpyBatchAsync(targets, sources, sizes, kParts, &attributes, &first, 1, stream);
    }
    if (!strcmp(how, "rows")) {
        const auto side = [](int *memory) {
            cudaMemcpy3DOperand operand = {};
            operand.type = cudaMemcpyOperandTypePointer;
            operand.op.ptr = {memory, kBytes, kParts, {}};
            return operand;
        };
        cudaMemcpy3DBatchOp rows = {};
        rows.src = side(from), rows.dst = side(to), rows.extent = make_cudaExtent(kBytes, kParts, 1);
        rows.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
        return cudaMemcpy3DBatchAsync(1, &rows, 0, stream);
    }
    return cudaSuccess;
}

int check_copy(const char *how) {
    int *slot, *out, *host, wrong = 0;
    cudaStream_t stream;
    std::vector<int> found(kWords);
    OK(cudaMalloc(&slot, kWords * sizeof(int)));
    OK(cudaMalloc(&out, kWords * sizeof(int)));
    OK(cudaMallocHost(&host, kWords * sizeof(int)));
    OK(cudaStreamCreate(&stream));
    std::iota(host, host + kWords, 1);
    OK(copy(how, slot, host, stream));
    read<<<kWords / 256, 256, 0, stream>>>(slot, out);
    OK(cudaMemcpyAsync(found.data(), out, kWords * sizeof(int), cudaMemcpyDeviceToHost, stream));
    OK(cudaStreamSynchronize(stream));
    for (int i = 0; i < kWords; i++) wrong += found[size_t(i)] != i + 1;
    printf("%d of %d words are wrong\n", wrong, kWords);
    return wrong && strcmp(how, "none");
}

}  // namespace

int main(int count, char **arguments) {
    const char *pattern = count > 1 ? arguments[1] : "";
    if (!strcmp(pattern, "lane0")) return check_tiles<LANE0>();
    if (!strcmp(pattern, "all")) return check_tiles<ALL>();
    if (!strcmp(pattern, "early")) return check_tiles<EARLY>();
    return check_copy(pattern);
}
