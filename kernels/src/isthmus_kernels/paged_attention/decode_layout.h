// Where the decode kernel (cuda/decode.cuh) keeps what: pure arithmetic, compiled for the GPU and for the CPU alike, so that
// tests check it without a card (tests/kernels/test_cuda_decode.py).
#pragma once
#include "../cuda/layout.h"

namespace isthmus::decode {

using namespace isthmus::hopper;

constexpr int kDim = 128;           // head_dim
constexpr int kKeys = 32;           // of a tile
constexpr int kHeads = 8;           // query heads of a kv head, at most
constexpr int kHalfColumns = 64;    // columns that one swizzled row of 128 bytes holds
constexpr int kHalfBytes = kKeys * kRowBytes;  // half of the columns of all keys, or values
constexpr int kTileBytes = 4 * kHalfBytes;     // keys, then values
constexpr int kSums = kDim * kHeads / 32;      // of a lane: its part of the result
constexpr int kMostRequests = 512;             // of a batch

// Key of the tile whose score is element `i` of a lane's 8.
ISTHMUS_FN int key_of(int lane, int i) {
    return i / 4 * 16 + (i >> 1 & 1) * 8 + lane / 4;
}

// Tiles of a program: a share of the `line` of all, but no fewer than half the root of the longest request's `most`. With
// few requests there are programs for every tile, but a tile takes about as long as the merge of a few parts.
ISTHMUS_FN int share_of(int line, int programs, int most) {
    int least = 0;
    while (4 * (least + 1) * (least + 1) <= most) least++;
    const int share = (line + programs - 1) / programs;
    return share < least ? least : share;
}

}  // namespace isthmus::decode
