// Host side of the gated product. A plain C entry point, called through ctypes (cuda_impl.py); 0 is success, a positive
// code is a cudaError_t.
#include "gated.cuh"

#include "launch.cuh"

namespace {

using namespace isthmus::product;

struct Call {
    Matrices matrices;
    int64_t tile;  // columns of the result: 128 or 96
};

template <typename T>
cudaError_t launch_gated(const Matrices &call, cudaStream_t stream) {
    typename Gated<T>::Arguments arguments;
    if (const cudaError_t code = describe_matrices<T>(call, &arguments, T::kWidth, 2 * call.width)) return code;
    arguments.width = int(call.width);
    return launch<T>(call, gated_product<T>, arguments, stream);
}

}  // namespace

EXPORT int64_t isthmus_gated_product(const Call *call, cudaStream_t stream) {
    if (const cudaError_t code = right_device(call->matrices)) return code;
    if (call->tile == 128) return launch_gated<Tile<128>>(call->matrices, stream);
    if (call->tile == 96) return launch_gated<Tile<96>>(call->matrices, stream);
    return cudaErrorInvalidValue;
}
