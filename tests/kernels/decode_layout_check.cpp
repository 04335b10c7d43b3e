// Checks of paged_attention/decode_layout.h, run by test_cuda_decode.py: exits with a line about the first failure.
#include <cstdio>
#include <cstdlib>
#include <set>
#include <utility>

#include "paged_attention/decode_layout.h"

using namespace isthmus::decode;

static void check(bool good, const char *what, int a, int b) {
    if (good) return;
    std::printf("%s: %d, %d\n", what, a, b);
    std::exit(1);
}

// The lanes of a warp hold each score of a tile's keys by all heads once.
static void scores() {
    std::set<std::pair<int, int>> places;
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 8; i++) {
            const int key = key_of(lane, i), head = 2 * (lane % 4) + i % 2;
            check(key >= 0 && key < kKeys && head < kHeads, "score", lane, i);
            places.insert({key, head});
        }
    check(places.size() == kKeys * kHeads, "scores", int(places.size()), 0);
}

static void tile() {
    std::set<int> places;
    for (int key = 0; key < kKeys; key++)
        for (int chunk = 0; chunk < 16; chunk++) places.insert(chunk / 8 * kHalfBytes + swizzled(key, chunk % 8));
    check(places.size() == kKeys * 16 && *places.rbegin() == 2 * kHalfBytes - 16, "tile", int(places.size()), 0);
    check(kTileBytes == kKeys * kDim * 2 * 2, "bytes", kTileBytes, 0);
    // A part of eight keys lies in one block, which has a power of two from eight on.
    check(kKeys % 8 == 0, "keys", kKeys, 0);
}

static void shares() {
    const int lines[] = {0, 1, 7, 1055, 1056, 1057, 24576, 1 << 20};
    for (const int line : lines)
        for (const int most : {0, 1, 3, 4, 12, 256, 2048}) {
            const int share = share_of(line, 1056, most);
            check(int64_t(share) * 1056 >= line, "all of the line", line, most);
            check(4 * share * share >= most - 4 * (2 * share + 1), "the least share", line, most);
        }
    check(share_of(64, 1056, 64) == 4 && share_of(63, 1056, 63) == 3 && share_of(24576, 1056, 12) == 24, "share", 0, 0);
}

int main() {
    scores();
    tile();
    shares();
}
