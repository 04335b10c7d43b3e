// Where the prefill kernel (cuda/prefill.cuh) keeps what: pure arithmetic, compiled for the GPU and for the CPU alike, so
// that tests check it without a card (tests/kernels/test_cuda_prefill.py).
#pragma once
#include "../cuda/layout.h"

namespace isthmus::prefill {

using namespace isthmus::hopper;

constexpr int kDim = 128;        // head_dim
constexpr int kRows = 128;       // rows of (query, head) of a tile: two warpgroups of 64
constexpr int kKeys = 128;       // keys multiplied at a time
constexpr int kHalfColumns = 64; // columns that one swizzled row of 128 bytes holds
constexpr int kHalfBytes = kKeys * kRowBytes;  // half of the columns of all rows
constexpr int kTileBytes = 2 * kHalfBytes;

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
ISTHMUS_FN Tile key_range(Tile tile, int queries_per_tile) {
    const int lowest = tile.seq_len - tile.queries + tile.first_query;
    const int last = lowest + queries_per_tile - 1;
    const int highest = last < tile.seq_len - 1 ? last : tile.seq_len - 1;
    tile.tiles = highest / kKeys + 1;
    tile.whole = (lowest + 1) / kKeys;
    return tile;
}

// Keys of a tile that starts at `first` and lie in pages that hold keys of the context: what is loaded.
ISTHMUS_FN int loaded_keys(int first, int seq_len, int box) {
    const int left = (seq_len - first + box - 1) / box * box;
    return left < kKeys ? left : kKeys;
}

}  // namespace isthmus::prefill
