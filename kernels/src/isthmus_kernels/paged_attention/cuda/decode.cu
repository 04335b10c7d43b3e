// Host side of the decode kernel. A plain C entry point, called through ctypes (cuda_decode.py); 0 is success, a positive
// code is a cudaError_t.
#include <cuda_runtime.h>

#include "decode.cuh"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace isthmus::decode;

// Eight warps that wait at different times; fewer with rings of two to four tiles are slower (runtime/bench/LOG.md).
constexpr int kWarps = 8, kStages = 1;

// In the order in which cuda_decode.py packs it. Strides are in elements of 2 bytes.
struct Call {
    int64_t out, q, kv, tables, starts, lens, partial, stats, arrived;  // addresses
    int64_t heads, kv_heads, requests;
    int64_t block_size;
    int64_t q_token, q_head, out_token, out_head;
    int64_t kv_block, kv_part, kv_token, kv_head, table_row;
    int64_t half_precision;  // fp16, not bf16
    int64_t device, multiprocessors;
    double scale;  // times log2(e)
};

}  // namespace

EXPORT int64_t isthmus_paged_decode(const Call *call, cudaStream_t stream) {
    int current = -1;
    if (const cudaError_t code = cudaGetDevice(&current)) return code;
    if (current != call->device) return cudaErrorInvalidDevice;
    if (call->requests > kMostRequests || call->heads > call->kv_heads * kHeads) return cudaErrorInvalidValue;
    const bool half = call->half_precision;
    Arguments arguments;
    arguments.kv = (const char *)call->kv;
    arguments.kv_block = call->kv_block * 2;
    arguments.kv_part = call->kv_part * 2;
    arguments.kv_token = call->kv_token * 2;
    arguments.kv_head = call->kv_head * 2;
    arguments.q = (const char *)call->q;
    arguments.out = (char *)call->out;
    arguments.q_token = call->q_token * 2;
    arguments.q_head = call->q_head * 2;
    arguments.out_token = call->out_token * 2;
    arguments.out_head = call->out_head * 2;
    arguments.tables = (const int *)call->tables;
    arguments.table_row = call->table_row;
    arguments.starts = (const int *)call->starts;
    arguments.lens = (const int *)call->lens;
    arguments.partial = (float *)call->partial;
    arguments.stats = (float4 *)call->stats;
    arguments.arrived = (int *)call->arrived;
    arguments.requests = int(call->requests);
    arguments.kv_heads = int(call->kv_heads);
    arguments.group = int(call->heads / call->kv_heads);
    arguments.block_shift = __builtin_ctzll(uint64_t(call->block_size));
    arguments.scale = float(call->scale);

    constexpr int bytes = int(sizeof(Shared<kWarps, kStages>));
    static_assert(bytes <= 227 << 10);
    const void *kernel = half ? (const void *)attention<isthmus::hopper::Fp16, kWarps, kStages>
                              : (const void *)attention<isthmus::hopper::Bf16, kWarps, kStages>;
    if (const cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return code;
    void *parameters[] = {&arguments};
    return cudaLaunchKernel(kernel, dim3(unsigned(call->multiprocessors)), dim3(kWarps * 32), parameters, size_t(bytes),
                            stream);
}
