// What a rank's inbox holds and where: pure arithmetic, compiled for the GPU and for the CPU alike, so that tests check it
// without a card (tests/kernels/test_peer_sum.py).
//
// [parity 0, 1][thread block][other rank][room bytes]. A block's rows of one call lie one after the other in its room. A
// word is empty until it has arrived, and is made empty again by whoever read it.
#pragma once
#include <cstdint>

#include "../cuda/function.h"

namespace isthmus::peer_sum {

constexpr int kMostRanks = 8;
constexpr int kMostThreads = 1024;

// A word that has not arrived. It is a NaN of each type (two of the 16-bit ones), and another NaN is sent in its place.
constexpr uint32_t kEmpty = 0xFFFFFFFFu;
constexpr uint32_t kNan = 0x7FFF7FFFu;

ISTHMUS_FN uint32_t sent(uint32_t word) {
    return word == kEmpty ? kNan : word;
}

// Which of the ranks - 1 places in `reader`'s inbox is `writer`'s.
ISTHMUS_FN int place(int writer, int reader) {
    return writer < reader ? writer : writer - 1;
}

// Where a room begins in an inbox. `call`: how often this block took part before.
ISTHMUS_FN int64_t room_offset(uint32_t call, int block, int blocks, int place, int ranks, int64_t room) {
    return ((int64_t(call & 1) * blocks + block) * (ranks - 1) + place) * room;
}

ISTHMUS_FN int64_t inbox_bytes(int blocks, int ranks, int64_t room) {
    return 2 * int64_t(blocks) * (ranks - 1) * room;
}

}  // namespace isthmus::peer_sum
