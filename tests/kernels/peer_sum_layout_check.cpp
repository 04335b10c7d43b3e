// Checks of peer_sum/layout.h, run by test_peer_sum.py: exits with a line about the first failure. Ranks run their blocks in
// random order, words arrive in random order, and every word must be the one that was sent for the place that is read.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <vector>

#include "peer_sum/layout.h"

using namespace isthmus::peer_sum;

static void check(bool good, const char *what, int64_t a, int64_t b) {
    if (good) return;
    std::printf("%s: %lld, %lld\n", what, (long long)a, (long long)b);
    std::exit(1);
}

// No word that is sent is the one that says that nothing has arrived, and all others are sent as they are.
static void words() {
    check(sent(kEmpty) != kEmpty, "empty", sent(kEmpty), 0);
    for (uint32_t word : {0u, 1u, 0x80000000u, 0x7FFF7FFFu, 0xFFFFFFFEu, 0xFFFF0000u, 0x0000FFFFu, 0xFFC00000u})
        check(sent(word) == word, "word", word, sent(word));
}

// Rooms of an inbox lie beside each other and fill it.
static void rooms() {
    for (int ranks : {2, 3, 8})
        for (int blocks : {1, 5, 132}) {
            const int64_t room = 48;
            std::set<int64_t> seen;
            for (uint32_t call : {0u, 1u})
                for (int block = 0; block < blocks; block++)
                    for (int writer = 1; writer < ranks; writer++) {
                        const int64_t at = room_offset(call, block, blocks, place(writer, 0), ranks, room);
                        check(at >= 0 && at % room == 0 && at + room <= inbox_bytes(blocks, ranks, room), "at", at, room);
                        seen.insert(at);
                    }
            check(int64_t(seen.size()) * room == inbox_bytes(blocks, ranks, room), "rooms", int64_t(seen.size()), blocks);
            for (int reader = 0; reader < ranks; reader++) {
                std::set<int> places;
                for (int writer = 0; writer < ranks; writer++)
                    if (writer != reader) places.insert(place(writer, reader));
                check(int(places.size()) == ranks - 1 && *places.begin() == 0 && *places.rbegin() == ranks - 2, "place",
                      reader, ranks);
            }
        }
}

// A word is (call, row, writer), one a row.
struct Rank {
    std::vector<uint32_t> inbox, calls;
    int call = 0;                 // that it computes
    std::vector<int> sent, read;  // rows of each block, in this call
};

static void simulate(unsigned seed, int ranks, int parities) {
    std::mt19937 rng(seed);
    const int blocks = 3, most = 4, calls = 60;
    const int64_t room = most;  // in words here
    std::vector<int> rows(calls);
    for (int &count : rows) count = 1 + int(rng() % (blocks * most));
    std::vector<Rank> all(size_t(ranks), Rank{});
    for (Rank &rank : all) {
        rank.inbox.assign(size_t(inbox_bytes(blocks, ranks, room)), kEmpty);
        rank.calls.assign(blocks, 0);
        rank.sent.assign(blocks, 0), rank.read.assign(blocks, 0);
    }
    struct Store { int reader; int64_t at; uint32_t word; };
    std::vector<Store> flying;
    auto word = [](int call, int row, int writer) { return uint32_t(call * 1000 + row * 10 + writer); };
    int ended = 0;
    for (long turn = 0; ended < ranks; turn++) {
        check(turn < 10'000'000, "does not end", seed, ended);
        if (!flying.empty() && rng() % 2) {
            std::swap(flying[rng() % flying.size()], flying.back());
            const Store store = flying.back();
            flying.pop_back();
            uint32_t &place = all[size_t(store.reader)].inbox[size_t(store.at)];
            check(place == kEmpty, "written over a word that was not read", seed, store.at);
            place = store.word;
            continue;
        }
        const int me = int(rng() % unsigned(ranks));
        Rank &rank = all[size_t(me)];
        if (rank.call == calls) continue;
        const int count = rows[size_t(rank.call)], taking = std::min(count, blocks), block = int(rng() % unsigned(taking));
        const int of_block = (count - block + taking - 1) / taking;
        int &sent = rank.sent[size_t(block)], &read = rank.read[size_t(block)];
        const uint32_t before = rank.calls[size_t(block)] % unsigned(parities);
        if (sent < of_block && sent <= read + 1) {
            for (int reader = 0; reader < ranks; reader++)
                if (reader != me)
                    flying.push_back({reader, room_offset(before, block, blocks, place(me, reader), ranks, room) + sent,
                                      word(rank.call, block + sent * taking, me)});
            sent++;
        } else if (read < of_block) {
            bool whole = true;
            for (int writer = 0; writer < ranks; writer++)
                if (writer != me)
                    whole &= rank.inbox[size_t(room_offset(before, block, blocks, place(writer, me), ranks, room) + read)] !=
                             kEmpty;
            if (!whole) continue;
            for (int writer = 0; writer < ranks; writer++) {
                if (writer == me) continue;
                uint32_t &from = rank.inbox[size_t(room_offset(before, block, blocks, place(writer, me), ranks, room) + read)];
                check(from == word(rank.call, block + read * taking, writer), "another word", from, rank.call);
                from = kEmpty;
            }
            read++;
        }
        bool done = true;
        for (int b = 0; b < taking; b++) done &= rank.read[size_t(b)] == (count - b + taking - 1) / taking;
        if (!done) continue;
        for (int b = 0; b < taking; b++) rank.calls[size_t(b)]++;
        rank.sent.assign(blocks, 0), rank.read.assign(blocks, 0);
        ended += ++rank.call == calls;
    }
}

// With an argument: halves that do not alternate, which must fail.
int main(int count, char **) {
    words();
    rooms();
    for (unsigned seed = 0; seed < 200; seed++) simulate(seed, 2 + int(seed % 3), count > 1 ? 1 : 2);
}
