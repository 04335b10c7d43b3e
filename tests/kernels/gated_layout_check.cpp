// Checks of linear/gated_layout.h, run by test_cuda_gated.py: exits with a line about the first failure.
#include <cstdio>
#include <cstdlib>
#include <set>
#include <utility>

#include "linear/gated_layout.h"

using namespace isthmus::gated;

static void check(bool good, const char *what, int a, int b) {
    if (good) return;
    std::printf("%s: %d, %d\n", what, a, b);
    std::exit(1);
}

// Every tile once, and bands of rows one after another.
static void order() {
    for (int row_tiles : {1, 2, 7, 8, 9, 32, 33})
        for (int width_tiles : {1, 3, 16, 97})
            for (int band : {1, 3, 8, 64}) {
                std::set<std::pair<int, int>> seen;
                int last = 0;
                for (int index = 0; index < row_tiles * width_tiles; index++) {
                    const Place at = place(index, row_tiles, width_tiles, band);
                    check(at.rows >= 0 && at.rows < row_tiles, "rows", at.rows, row_tiles);
                    check(at.width >= 0 && at.width < width_tiles, "width", at.width, width_tiles);
                    check(at.rows / band >= last, "band", at.rows, band);
                    last = at.rows / band;
                    seen.insert({at.rows, at.width});
                }
                check(int(seen.size()) == row_tiles * width_tiles, "tiles", int(seen.size()), row_tiles);
            }
}

// A warp writes the boxes of its result so that the copy engine finds them: lane l gives the address of row l % 8
// of part l / 8, and parts of a pair of 8-column groups are rows 0-7 and 8-15 of one, then of the other.
template <typename T>
static void boxes() {
    static_assert(T::kBoxes * T::kBoxColumns == T::kWidth && T::kHalfBytes % 1024 == 0);
    std::set<int> places;
    for (int pair = 0; pair < T::kBoxColumns / 16; pair++)
        for (int lane = 0; lane < 32; lane++) {
            const int part = lane / 8, row = part % 2 * 8 + lane % 8, chunk = 2 * pair + part / 2;
            check(row == lane % 16 && chunk == 2 * pair + lane / 16, "lane", lane, pair);
            // The element that register `part` of the thread with the part's first values holds.
            const int element = pair * 8 + part * 2;
            check(fragment_column(0, element) == 8 * chunk, "column", element, chunk);
            check(fragment_row(0, element) == part % 2 * 8, "row", element, part);
            // A gate's value is half of the columns, and half of the registers, further.
            check(fragment_column(0, element + T::kSums / 2) == 8 * chunk + T::kWidth, "value", element, chunk);
            const int place = swizzled<T::kBoxRowBytes>(lane % 16, 2 * pair + lane / 16);
            // The copy engine's rule, on addresses: 16-byte places of 128-byte lines, by the line's number.
            const int plain = lane % 16 * T::kBoxRowBytes + (2 * pair + lane / 16) * 16;
            check(place == (plain ^ ((plain >> 7) & (T::kBoxRowBytes / 16 - 1)) << 4), "swizzle", place, plain);
            places.insert(place);
        }
    check(int(places.size()) * 16 == T::kBoxBytes && *places.rbegin() == T::kBoxBytes - 16, "box", int(places.size()), 0);
}

int main() {
    order();
    boxes<Tile<128>>();
    boxes<Tile<96>>();
    return 0;
}
