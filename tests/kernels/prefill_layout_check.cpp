// Checks of paged_attention/prefill_layout.h, run by test_cuda_prefill.py: exits with a line about the first failure.
#include <cstdio>
#include <cstdlib>
#include <set>
#include <utility>

#include "paged_attention/prefill_layout.h"

using namespace isthmus::prefill;

static void check(bool good, const char *what, int a, int b) {
    if (good) return;
    std::printf("%s: %d, %d\n", what, a, b);
    std::exit(1);
}

// The copy engine's swizzle as an address has it: bits 4-6 xored with bits 7-9.
static int by_address(int address) {
    return address ^ ((address >> 7 & 7) << 4);
}

static void swizzle() {
    std::set<int> places;
    for (int row = 0; row < kKeys; row++)
        for (int chunk = 0; chunk < 8; chunk++) {
            check(swizzled(row, chunk) == by_address(row * kRowBytes + chunk * 16), "swizzled", row, chunk);
            places.insert(swizzled(row, chunk));
        }
    check(places.size() == kKeys * 8 && *places.rbegin() == kHalfBytes - 16, "places", int(places.size()), 0);
    // Eight rows of one chunk, as a warp writes them, lie in eight different groups of four banks.
    for (int chunk = 0; chunk < 8; chunk++) {
        std::set<int> banks;
        for (int row = 0; row < 8; row++) banks.insert(swizzled(row, chunk) / 16 % 8);
        check(banks.size() == 8, "banks", chunk, int(banks.size()));
    }
}

static void fragments() {
    std::set<std::pair<int, int>> places;
    for (int thread = 0; thread < 128; thread++)
        for (int i = 0; i < 64; i++) {
            const int row = fragment_row(thread, i), column = fragment_column(thread, i);
            places.insert({row, column});
            check(row / 16 == thread / 32, "a warp has 16 rows", thread, i);
            // What the kernel takes for granted: two rows a thread, columns in pairs, quads of threads share rows.
            check(row == fragment_row(thread, i & 2) && row == fragment_row(thread ^ 3, i), "rows", thread, i);
            check(column == fragment_column(thread, 0) + 8 * (i >> 2) + (i & 1), "columns", thread, i);
        }
    check(places.size() == 64 * 128, "fragments", int(places.size()), 0);
    // Columns 16 k.. of a product are the registers 8 k.. of a thread, and these the left side of the next product: rows
    // r, r + 8 of columns c, c + 1, then both rows of columns c + 8, c + 9.
    for (int k = 0; k < 8; k++)
        for (int pair = 0; pair < 4; pair++) {
            check(fragment_row(0, 8 * k + 2 * pair) == pair % 2 * 8, "operand row", k, pair);
            check(fragment_column(0, 8 * k + 2 * pair) == 16 * k + pair / 2 * 8, "operand column", k, pair);
        }
}

static void descriptors() {
    const uint64_t d = descriptor(0x12400, kHalfBytes, 1024);
    check((d & 0x3FFF) == 0x1240, "address", int(d & 0x3FFF), 0);
    check((d >> 16 & 0x3FFF) == kHalfBytes / 16, "leading", int(d >> 16 & 0x3FFF), 0);
    check((d >> 32 & 0x3FFF) == 64, "stride", int(d >> 32 & 0x3FFF), 0);
    check(d >> 62 == 1, "swizzle", int(d >> 62), 0);
    // An offset is added to the whole word: it must not carry out of the address, wherever a tile lies.
    const uint64_t last = descriptor(227 * 1024 - kTileBytes, 16, 1024) + ((kTileBytes - 32) >> 4);
    check((last >> 16 & 0x3FFF) == 1, "carry", int(last >> 16 & 0x3FFF), 0);
}

static void ranges() {
    for (int seq_len = 2; seq_len < 700; seq_len += 1)
        for (int queries = 2; queries <= seq_len; queries += 37)
            for (int group : {1, 3, 4, 8, 128})
                for (int first = 0; first < queries; first += kRows / group) {
                    const Tile tile = key_range({0, 0, queries, seq_len, first, 0, 0, 0}, kRows / group);
                    const int lowest = seq_len - queries + first;
                    int highest = lowest + kRows / group - 1;
                    if (highest >= seq_len) highest = seq_len - 1;
                    check(tile.tiles * kKeys > highest && (tile.tiles - 1) * kKeys <= highest, "tiles", seq_len, first);
                    check(tile.whole * kKeys - 1 <= lowest, "a whole tile is seen by all", seq_len, first);
                    check(tile.whole <= tile.tiles && tile.tiles - tile.whole <= 2, "masked tiles", seq_len, first);
                    // Only the last tile may reach past the context: the kernel clears no other.
                    check((tile.tiles - 1) * kKeys < seq_len, "tail", seq_len, first);
                }
    for (int box : {8, 16, 128})
        for (int seq_len = 1; seq_len < 300; seq_len++)
            for (int first = 0; first < seq_len; first += kKeys) {
                int loaded = 0;
                for (int key = first; key < first + kKeys; key += box) loaded += key < seq_len ? box : 0;
                check(loaded_keys(first, seq_len, box) == loaded, "loaded", seq_len, first);
            }
}

int main() {
    swizzle();
    fragments();
    descriptors();
    ranges();
}
