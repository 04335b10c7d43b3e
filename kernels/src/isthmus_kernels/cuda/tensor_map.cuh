// Host side of the copy engine for tensors: how a tensor is described to it.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace isthmus::hopper {

using Encode = decltype(&cuTensorMapEncodeTiled);

// Through the run-time library, so that this one loads where there is no driver.
inline Encode encoder() {
    static const Encode found = [] {
        void *entry = nullptr;
        cudaDriverEntryPointQueryResult result;
        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result))
            return Encode(nullptr);
        return result == cudaDriverEntryPointSuccess ? Encode(entry) : Encode(nullptr);
    }();
    return found;
}

// Dimensions innermost first; `strides` in elements, from the second dimension on. The swizzle is that of the box's rows.
template <int kRank>
bool describe(Encode encode, CUtensorMap *map, bool half_precision, int64_t address, const cuuint64_t (&sizes)[kRank],
              const int64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank]) {
    cuuint64_t bytes[kRank - 1];
    for (int i = 0; i < kRank - 1; i++) bytes[i] = cuuint64_t(strides[i]) * 2;
    cuuint32_t steps[kRank];
    std::fill(steps, steps + kRank, 1);
    return encode(map, half_precision ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kRank,
                  (void *)address, sizes, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  box[0] * 2 == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace isthmus::hopper
