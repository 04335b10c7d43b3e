// Host side of the prefill kernel: describes the tensors to the copy engine and launches. A plain C entry point, called
// through ctypes (cuda_impl.py); 0 is success, a positive code is a cudaError_t.
#include <cuda_runtime.h>

#include <algorithm>

#include "../../cuda/tensor_map.cuh"
#include "prefill.cuh"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using isthmus::prefill::Arguments;
using isthmus::prefill::Shared;
using namespace isthmus::prefill;

// In the order in which cuda_impl.py packs it. Strides are in elements of 2 bytes.
struct Call {
    int64_t out, q, keys, values, tables, starts, lens, counter;  // addresses
    int64_t tokens, heads, kv_heads, requests;
    int64_t blocks, block_size;
    int64_t q_token, q_head, out_token, out_head;
    int64_t kv_block, kv_token, kv_head, table_row;
    int64_t half_precision;  // fp16, not bf16
    int64_t work;            // bound on (tile of rows, kv head)
    int64_t device, multiprocessors;
    double scale;  // times log2(e)
};

int64_t launch(const void *kernel, const Call *call, cudaStream_t stream) {
    int current = -1;
    if (const cudaError_t code = cudaGetDevice(&current)) return code;
    if (current != call->device) return cudaErrorInvalidDevice;
    const Encode encode = encoder();
    if (!encode) return cudaErrorSymbolNotFound;
    const bool half = call->half_precision;
    Arguments arguments;
    const int group = int(call->heads / call->kv_heads);
    arguments.queries_per_tile = kRows / group;
    arguments.box = int(std::min<int64_t>(call->block_size, kKeys));
    if (!describe<3>(encode, &arguments.q, half, call->q, {kDim, cuuint64_t(call->heads), cuuint64_t(call->tokens)},
                     {call->q_head, call->q_token},
                     {kHalfColumns, cuuint32_t(group), cuuint32_t(arguments.queries_per_tile)}))
        return cudaErrorInvalidValue;
    const cuuint64_t sizes[] = {kDim, cuuint64_t(call->kv_heads), cuuint64_t(call->block_size),
                                cuuint64_t(call->blocks)};
    const int64_t strides[] = {call->kv_head, call->kv_token, call->kv_block};
    const cuuint32_t box[] = {kHalfColumns, 1, cuuint32_t(arguments.box), 1};
    if (!describe(encode, &arguments.keys, half, call->keys, sizes, strides, box)) return cudaErrorInvalidValue;
    if (!describe(encode, &arguments.values, half, call->values, sizes, strides, box)) return cudaErrorInvalidValue;
    arguments.out = (char *)call->out;
    arguments.out_token = call->out_token * 2;
    arguments.out_head = call->out_head * 2;
    arguments.tables = (const int *)call->tables;
    arguments.table_row = call->table_row;
    arguments.starts = (const int *)call->starts;
    arguments.lens = (const int *)call->lens;
    arguments.counter = (int *)call->counter;
    arguments.requests = int(call->requests);
    arguments.kv_heads = int(call->kv_heads);
    arguments.group = group;
    arguments.block_shift = __builtin_ctzll(uint64_t(call->block_size));
    arguments.scale = float(call->scale);

    // The structure is aligned by the kernel itself.
    const int bytes = int(sizeof(Shared)) + 1024;
    if (const cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return code;
    void *parameters[] = {&arguments};
    return cudaLaunchKernel(kernel, dim3(unsigned(std::min(call->work, call->multiprocessors))), dim3(kThreads),
                            parameters, size_t(bytes), stream);
}

}  // namespace

EXPORT int64_t isthmus_paged_prefill(const Call *call, cudaStream_t stream) {
    return launch(call->half_precision ? (const void *)attention<isthmus::hopper::Fp16>
                                       : (const void *)attention<isthmus::hopper::Bf16>,
                  call, stream);
}
