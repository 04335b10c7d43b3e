// Tiles of the gated product (cuda/gated.cuh) and their order: pure arithmetic, compiled for the GPU and for the CPU alike,
// so that tests check it without a card (tests/kernels/test_cuda_gated.py).
#pragma once
#include "../cuda/layout.h"

namespace isthmus::gated {

using namespace isthmus::hopper;

constexpr int kCluster = 2;   // blocks that share their tile of the weight: one loads its gates, the other its values
constexpr int kRows = 128;    // of x and of the result in a block's tile: two warpgroups of 64
constexpr int kColumns = 64;  // that are summed over at a time: what one swizzled row of 128 bytes holds
constexpr int kBoxRows = 16;  // of the result, stored at once by a warp
constexpr int kRowsBytes = kRows * kRowBytes;

// A tile of `width` columns of the result: as many gates, and as many values. 128 or 96.
template <int kWidthOf>
struct Tile {
    static constexpr int kWidth = kWidthOf;
    static constexpr int kHalfBytes = kWidth * kRowBytes;  // of the gates, or the values
    // Of the result, stored at once: what divides the width and has a swizzle.
    static constexpr int kBoxColumns = kWidth % 64 ? 32 : 64;
    static constexpr int kBoxRowBytes = kBoxColumns * 2;
    static constexpr int kBoxBytes = kBoxRows * kBoxRowBytes;
    static constexpr int kBoxes = kWidth / kBoxColumns;
    static constexpr int kStages = kWidth == 128 ? 4 : 5;  // what fits into 227 KB
    static constexpr int kSums = kWidth;                   // of a thread: 64 rows of both halves over 128 threads
};

struct Place {
    int rows;   // index of a cluster's kCluster * kRows rows
    int width;  // index of a tile's columns of the result
};

// Tile `index` of row_tiles x width_tiles. `band` tiles of rows are gone through along the whole width before the next
// ones: what runs at the same time is about square, and so is read from memory few times.
ISTHMUS_FN Place place(int index, int row_tiles, int width_tiles, int band) {
    const int first = index / (band * width_tiles) * band;
    const int height = row_tiles - first < band ? row_tiles - first : band;
    const int within = index - first * width_tiles;
    return {first + within % height, within / height};
}

}  // namespace isthmus::gated
