// Where the prefill kernel (cuda/prefill.cuh) keeps what: pure arithmetic, compiled for the GPU and for the CPU alike, so
// that tests check it without a card (tests/kernels/test_cuda_prefill.py).
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define PREFILL_FN __host__ __device__ __forceinline__ constexpr
#else
#define PREFILL_FN inline constexpr
#endif

namespace isthmus::prefill {

constexpr int kDim = 128;        // head_dim
constexpr int kRows = 128;       // rows of (query, head) of a tile: two warpgroups of 64
constexpr int kKeys = 128;       // keys multiplied at a time
constexpr int kHalfColumns = 64; // columns that one swizzled row of 128 bytes holds
constexpr int kRowBytes = 128;
constexpr int kHalfBytes = kKeys * kRowBytes;  // half of the columns of all rows
constexpr int kTileBytes = 2 * kHalfBytes;

// Offset of the 16 bytes with columns 8 `chunk`.. of `row` within one half of the columns: the copy engine's 128-byte
// swizzle, in which bits 4-6 of an address are xored with bits 7-9.
PREFILL_FN int swizzled(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
}

// A thread of a warpgroup holds 64 of the 64 x 128 elements of a product: its place of element `i`.
PREFILL_FN int fragment_row(int thread, int i) {
    return thread / 32 * 16 + thread % 32 / 4 + ((i >> 1) & 1) * 8;
}
PREFILL_FN int fragment_column(int thread, int i) {
    return (i >> 2) * 8 + thread % 4 * 2 + (i & 1);
}

// Shared-memory matrix descriptor of the matrix units with the 128-byte swizzle: addresses and strides in 16 bytes.
// `leading`: from one 64-column half to the next, where columns are the dimension that is not summed over; 1 otherwise.
// `stride`: from 8 rows to the next 8.
PREFILL_FN uint64_t descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
    return uint64_t((address & 0x3FFFF) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 |
           uint64_t(1) << 62;
}

// One tile of rows: the queries [first_query, first_query + kRows / group) of a request, all query heads of a kv head.
struct Tile {
    int request;  // negative: there is none
    int start;    // index of the request's first query in q
    int queries;  // how many the request has
    int seq_len;
    int first_query;
    int head;   // kv head
    int tiles;  // of keys
    int whole;  // tiles of keys that every query sees to the end
};

// Fills in what follows from the request: the first query of the tile stands at seq_len - queries + first_query.
PREFILL_FN Tile key_range(Tile tile, int queries_per_tile) {
    const int lowest = tile.seq_len - tile.queries + tile.first_query;
    const int last = lowest + queries_per_tile - 1;
    const int highest = last < tile.seq_len - 1 ? last : tile.seq_len - 1;
    tile.tiles = highest / kKeys + 1;
    tile.whole = (lowest + 1) / kKeys;
    return tile;
}

// Keys of a tile that starts at `first` and lie in pages that hold keys of the context: what is loaded.
PREFILL_FN int loaded_keys(int first, int seq_len, int box) {
    const int left = (seq_len - first + box - 1) / box * box;
    return left < kKeys ? left : kKeys;
}

}  // namespace isthmus::prefill
