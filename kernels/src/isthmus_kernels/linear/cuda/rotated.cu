// Host side of the product of queries, keys and values. A plain C entry point, called through ctypes (cuda_impl.py); 0 is
// success, a positive code is a cudaError_t.
#include "rotated.cuh"

#include "launch.cuh"

namespace {

using namespace isthmus::product;

// `matrices.out` is that of the queries.
struct Call {
    Matrices matrices;
    int64_t positions, slots, cos, sin, cos_row, sin_row;
    int64_t q_weight, k_weight;  // 0: no norm
    int64_t kv, kv_block, kv_part, kv_token, kv_head;
    int64_t kv_heads, block_size;
    double eps;
};

}  // namespace

EXPORT int64_t isthmus_rotated_product(const Call *call, cudaStream_t stream) {
    const Matrices &matrices = call->matrices;
    if (const cudaError_t code = right_device(matrices)) return code;
    const int64_t q_heads = matrices.width / Rotated::kDim, heads = q_heads + 2 * call->kv_heads;
    if (heads % Rotated::kHeads) return cudaErrorInvalidValue;
    Rotated::Arguments arguments;
    const cudaError_t code = describe_matrices<Rotated::T>(matrices, &arguments, Rotated::kDim, heads * Rotated::kDim);
    if (code) return code;
    arguments.width_tiles = int(heads / Rotated::kHeads);
    arguments.rows = int(matrices.rows);
    arguments.q_heads = int(q_heads);
    arguments.kv_heads = int(call->kv_heads);
    arguments.block_size = int(call->block_size);
    arguments.positions = (const int64_t *)call->positions;
    arguments.slots = (const int64_t *)call->slots;
    arguments.cos = (const float *)call->cos, arguments.cos_row = call->cos_row;
    arguments.sin = (const float *)call->sin, arguments.sin_row = call->sin_row;
    arguments.q_weight = (const uint32_t *)call->q_weight, arguments.k_weight = (const uint32_t *)call->k_weight;
    arguments.kv = (char *)call->kv;
    arguments.kv_block = 2 * call->kv_block, arguments.kv_part = 2 * call->kv_part;
    arguments.kv_token = 2 * call->kv_token, arguments.kv_head = 2 * call->kv_head;
    arguments.eps = float(call->eps);
    return launch<Rotated::T>(matrices, rotated_product, arguments, stream);
}
