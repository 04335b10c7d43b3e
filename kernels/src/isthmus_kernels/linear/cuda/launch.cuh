// Host side of products of many rows: describes the matrices to the copy engine and launches.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>

#include "../../cuda/tensor_map.cuh"
#include "product.cuh"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace isthmus::product {

// Tiles of rows that are gone through together (`place`): 4, 12 and 16 read as much or more from memory (LOG.md).
constexpr int kBand = 8;

// The beginning of each call, in the order in which cuda_impl.py packs it. Strides are in elements.
struct Matrices {
    int64_t out, x, weight;  // addresses
    int64_t rows, width, columns;
    int64_t out_row, x_row, weight_row;
    int64_t device, multiprocessors;
};

inline cudaError_t right_device(const Matrices &call) {
    int current = -1;
    if (const cudaError_t code = cudaGetDevice(&current)) return code;
    return current == call.device ? cudaSuccess : cudaErrorInvalidDevice;
}

// `tile_width`: columns of the result in a tile; `outputs`: rows of the weight.
template <typename T>
cudaError_t describe_matrices(const Matrices &call, Product *product, int64_t tile_width, int64_t outputs) {
    const Encode encode = encoder();
    if (!encode) return cudaErrorSymbolNotFound;
    const auto columns = cuuint64_t(call.columns), rows = cuuint64_t(call.rows), width = cuuint64_t(call.width);
    if (!describe<2>(encode, &product->x, false, call.x, {columns, rows}, {call.x_row}, {kColumns, kRows}) ||
        !describe<2>(encode, &product->weight, false, call.weight, {columns, cuuint64_t(outputs)}, {call.weight_row},
                     {kColumns, T::kWidth}) ||
        !describe<2>(encode, &product->out, false, call.out, {width, rows}, {call.out_row}, {T::kBoxColumns, kBoxRows}))
        return cudaErrorInvalidValue;
    product->row_tiles = int((call.rows + kCluster * kRows - 1) / (kCluster * kRows));
    product->width_tiles = int((call.width + tile_width - 1) / tile_width);
    product->steps = int(call.columns / kColumns);
    product->band = kBand;
    return cudaSuccess;
}

template <typename T, typename Arguments>
cudaError_t launch(const Matrices &call, void (*kernel)(Arguments), Arguments &arguments, cudaStream_t stream) {
    // The structure is aligned by the kernel itself.
    const int bytes = int(sizeof(Shared<T>)) + 1024;
    const auto entry = (const void *)kernel;
    if (const cudaError_t code = cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return code;
    const int64_t clusters =
        std::min<int64_t>(call.multiprocessors / kCluster, int64_t(arguments.row_tiles) * arguments.width_tiles);
    void *parameters[] = {&arguments};
    return cudaLaunchKernel(entry, dim3(unsigned(clusters * kCluster)), dim3(kThreads), parameters, size_t(bytes), stream);
}

}  // namespace isthmus::product
