// Host side of the gated product: describes the tensors to the copy engine and launches. A plain C entry point, called
// through ctypes (cuda_impl.py); 0 is success, a positive code is a cudaError_t.
#include <cuda_runtime.h>

#include <algorithm>

#include "../../cuda/tensor_map.cuh"
#include "gated.cuh"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace isthmus::gated;

// Tiles of rows that are gone through together (`place`): 4, 12 and 16 read as much or more from memory (LOG.md).
constexpr int kBand = 8;

// In the order in which cuda_impl.py packs it. Strides are in elements.
struct Call {
    int64_t out, x, weight;  // addresses
    int64_t rows, width, columns;
    int64_t out_row, x_row, weight_row;
    int64_t device, multiprocessors;
    int64_t tile;  // columns of the result: 128 or 96
};

template <typename T>
cudaError_t launch(const Call *call, cudaStream_t stream) {
    const Encode encode = encoder();
    if (!encode) return cudaErrorSymbolNotFound;
    const auto columns = cuuint64_t(call->columns), rows = cuuint64_t(call->rows), width = cuuint64_t(call->width);
    Arguments arguments;
    if (!describe<2>(encode, &arguments.x, false, call->x, {columns, rows}, {call->x_row}, {kColumns, kRows}) ||
        !describe<2>(encode, &arguments.weight, false, call->weight, {columns, 2 * width}, {call->weight_row},
                     {kColumns, T::kWidth}) ||
        !describe<2>(encode, &arguments.out, false, call->out, {width, rows}, {call->out_row},
                     {T::kBoxColumns, kBoxRows}))
        return cudaErrorInvalidValue;
    arguments.row_tiles = int((call->rows + kCluster * kRows - 1) / (kCluster * kRows));
    arguments.width_tiles = int((call->width + T::kWidth - 1) / T::kWidth);
    arguments.steps = int(call->columns / kColumns);
    arguments.width = int(call->width);
    arguments.band = kBand;
    // The structure is aligned by the kernel itself.
    const int bytes = int(sizeof(Shared<T>)) + 1024;
    const void *kernel = (const void *)gated_product<T>;
    if (const cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return code;
    const int64_t clusters =
        std::min<int64_t>(call->multiprocessors / kCluster, int64_t(arguments.row_tiles) * arguments.width_tiles);
    void *parameters[] = {&arguments};
    return cudaLaunchKernel(kernel, dim3(unsigned(clusters * kCluster)), dim3(kThreads), parameters, size_t(bytes), stream);
}

}  // namespace

EXPORT int64_t isthmus_gated_product(const Call *call, cudaStream_t stream) {
    int current = -1;
    if (const cudaError_t code = cudaGetDevice(&current)) return code;
    if (current != call->device) return cudaErrorInvalidDevice;
    if (call->tile == 128) return launch<Tile<128>>(call, stream);
    if (call->tile == 96) return launch<Tile<96>>(call, stream);
    return cudaErrorInvalidValue;
}
