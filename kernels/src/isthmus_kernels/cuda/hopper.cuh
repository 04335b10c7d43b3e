// The instructions of compute capability 9.0a that our kernels are made of: barriers in shared memory, clusters of blocks,
// the copy engine for tensors (TMA), the matrix units of a warpgroup (wgmma). PTX ISA 8.8, chapters 9.7.13 to 9.7.15.
#pragma once
#include <cuda.h>

#include <cstdint>

namespace isthmus::hopper {

// Names of the 16-bit types: an instruction is chosen by them, no value has one.
struct Bf16 {};
struct Fp16 {};

__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return uint32_t(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void init(uint64_t *barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void expect(uint64_t *barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void wait(uint64_t *barrier, uint32_t parity) {
#ifdef ISTHMUS_BOUNDED_WAITS
    const long long begin = clock64();
#endif
    uint32_t done = 0;
    while (!done) {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
#ifdef ISTHMUS_BOUNDED_WAITS
        if (clock64() - begin > 1000000000ll) __trap();
#endif
    }
}

// Arrives at the same barrier of block `rank` of the cluster.
__device__ __forceinline__ void arrive(uint64_t *barrier, uint32_t rank) {
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(barrier)),
        "r"(rank)
        : "memory");
}

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of all blocks of the cluster.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// A place in a ring that is walked for ever. Parities alternate; who empties waits for `phase`, who fills for its inverse.
template <int kCount>
struct Turn {
    int index = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void next() {
        if (++index == kCount) index = 0, phase ^= 1;
    }
};

// True in one thread of the warp, always the same one; by a whole warp.
__device__ __forceinline__ bool leader() {
    uint32_t chosen;
    asm volatile(
        "{\n.reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(chosen));
    return chosen;
}

// Barrier `id` of the block, of `threads` threads in all.
__device__ __forceinline__ void sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void sync_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void prefetch(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads the box of `map` at the coordinates, innermost first; its bytes count on `barrier`.
__device__ __forceinline__ void load(uint32_t to, const CUtensorMap *map, uint64_t *barrier, int a, int b) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
        "[%2];" ::"r"(to),
        "l"(map), "r"(shared_address(barrier)), "r"(a), "r"(b)
        : "memory");
}
// To the same place of each of `blocks`, a bit for each block of the cluster, counted on the same barrier of each.
__device__ __forceinline__ void load_for(uint16_t blocks, uint32_t to, const CUtensorMap *map, uint64_t *barrier, int a,
                                         int b) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4}], [%2], %5;" ::"r"(to),
        "l"(map), "r"(shared_address(barrier)), "r"(a), "r"(b), "h"(blocks)
        : "memory");
}
__device__ __forceinline__ void load(uint32_t to, const CUtensorMap *map, uint64_t *barrier, int a, int b, int c) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
        "[%2];" ::"r"(to),
        "l"(map), "r"(shared_address(barrier)), "r"(a), "r"(b), "r"(c)
        : "memory");
}
__device__ __forceinline__ void load(uint32_t to, const CUtensorMap *map, uint64_t *barrier, int a, int b, int c,
                                     int d) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
        "%6}], [%2];" ::"r"(to),
        "l"(map), "r"(shared_address(barrier)), "r"(a), "r"(b), "r"(c), "r"(d)
        : "memory");
}

// Stores a box from shared memory; what lies outside of the tensor is left out. `stores_commit` ends a group of them.
__device__ __forceinline__ void store(const CUtensorMap *map, uint32_t from, int a, int b) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
                 "r"(a), "r"(b)
                 : "memory");
}
__device__ __forceinline__ void stores_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until all but the last `kPending` groups of this thread's stores have read shared memory.
template <int kPending>
__device__ __forceinline__ void stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ void stores_wait() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Four 8 x 8 parts, as a product leaves them, to rows of 16 bytes whose addresses lanes give, eight for each part.
__device__ __forceinline__ void store_parts(uint32_t to, const uint32_t (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
                 "r"(x[2]), "r"(x[3])
                 : "memory");
}

// The left side of a product, 16 x 16: lanes give the addresses of rows of 16 bytes, four 8 x 8 parts down then across.
__device__ __forceinline__ void load_operand(uint32_t *a, const char *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Ordinary writes to shared memory before it are seen by the copy engine and the matrix units after it.
__device__ __forceinline__ void fence_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <int kCount>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Registers written before it are seen by the products after it.
__device__ __forceinline__ void product_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void product_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most `kPending` committed groups of products are unfinished.
template <int kPending>
__device__ __forceinline__ void product_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// The compiler must not move uses of the registers of an unfinished product across this.
template <int kCount>
__device__ __forceinline__ void pin(float (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i++) asm volatile("" : "+f"(x[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i++) asm volatile("" : "+r"(x[i])::"memory");
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#define HOPPER_R4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define HOPPER_R16(d, i) HOPPER_R4(d, i), HOPPER_R4(d, i + 4), HOPPER_R4(d, i + 8), HOPPER_R4(d, i + 12)
#define HOPPER_R64(d) HOPPER_R16(d, 0), HOPPER_R16(d, 16), HOPPER_R16(d, 32), HOPPER_R16(d, 48)
#define HOPPER_D64                                                                                                  \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "  \
    "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

// a [64 x 16] in registers, as a product leaves 16 columns; b in shared memory; d [64 x 128] in fp32.
// product_rows: b [128 x 16], d = a b' or d + a b' where `add`. product: b [16 x 128], d += a b.
#define HOPPER_PRODUCTS(TYPE, NAME)                                                                                 \
    __device__ __forceinline__ void product_rows(float (&d)[64], const uint32_t *a, uint64_t b, int add, TYPE) {     \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                                                  \
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME " " HOPPER_D64                     \
                     ", {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"                                                  \
                     : HOPPER_R64(d)                                                                                \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                               \
    }                                                                                                               \
    __device__ __forceinline__ void product(float (&d)[64], const uint32_t *a, uint64_t b, TYPE) {                  \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                                     \
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME " " HOPPER_D64                     \
                     ", {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"                                                  \
                     : HOPPER_R64(d)                                                                                \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                         \
    }
HOPPER_PRODUCTS(Bf16, "bf16")
HOPPER_PRODUCTS(Fp16, "f16")

#define HOPPER_R128(d) \
    HOPPER_R16(d, 0), HOPPER_R16(d, 16), HOPPER_R16(d, 32), HOPPER_R16(d, 48), HOPPER_R16(d, 64), HOPPER_R16(d, 80), \
        HOPPER_R16(d, 96), HOPPER_R16(d, 112)
#define HOPPER_D128 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
    "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
    "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
    "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, " \
    "%101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, " \
    "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}"

// a [64 x 16] and b [256 x 16] in shared memory, d [64 x 256] in fp32: d = a b', or d + a b' where `add`.
__device__ __forceinline__ void product_rows(float (&d)[128], uint64_t a, uint64_t b, int add, Bf16) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " HOPPER_D128 ", %128, %129, p, 1, 1, 0, 0;\n}"
                 : HOPPER_R128(d)
                 : "l"(a), "l"(b), "r"(add));
}

#define HOPPER_R96(d) \
    HOPPER_R16(d, 0), HOPPER_R16(d, 16), HOPPER_R16(d, 32), HOPPER_R16(d, 48), HOPPER_R16(d, 64), HOPPER_R16(d, 80)
#define HOPPER_D96 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
    "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
    "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
    "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}"

// The same with b [192 x 16] and d [64 x 192].
__device__ __forceinline__ void product_rows(float (&d)[96], uint64_t a, uint64_t b, int add, Bf16) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 " HOPPER_D96 ", %96, %97, p, 1, 1, 0, 0;\n}"
                 : HOPPER_R96(d)
                 : "l"(a), "l"(b), "r"(add));
}

// The first value in the lower half.
__device__ __forceinline__ uint32_t pack(float low, float high, Bf16) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
__device__ __forceinline__ uint32_t pack(float low, float high, Fp16) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

}  // namespace isthmus::hopper
