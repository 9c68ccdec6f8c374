// Drafts from a corpus file; `selfspec.drafting.datastore.Datastore` does the same in Python and describes the file.

#include <algorithm>
#include <new>
#include <vector>

#include "lookup.h"

namespace {

constexpr int64_t DEPTH = 16, MOST_PLACES = 32;  // those of selfspec.drafting.datastore and its file

class Corpus : public Texts {
    const uint8_t* cells;  // tokens + 1 of all documents backwards, 0 between them; big-endian
    const uint32_t *starts, *places;
    int64_t width, num_cells, vocab, num_places;

    // A cell; 0, the end of a document, beyond the last one and for no token of the vocabulary, as in a damaged file.
    int64_t cell(int64_t at) const {
        if (at < 0 || at >= num_cells) return 0;
        int64_t value = 0;
        for (const uint8_t *byte = cells + at * width, *end = byte + width; byte < end; byte++) value = value << 8 | *byte;
        return value;
    }

    // The number of tokens by which the context at a place and a key, its last token first, agree; and which is first.
    int64_t agreed(int64_t place, const std::vector<int64_t>& key, int64_t length, int64_t* order) const {
        for (int64_t i = 0; i < length; i++) {
            *order = cell(place + i) - key[i];
            if (*order) return i;
        }
        return length;
    }

    // The first context in [first, end) whose first `length` tokens are at least the key's; or above it.
    int64_t bound(int64_t first, int64_t end, const std::vector<int64_t>& key, int64_t length, bool above) const {
        while (first < end) {
            int64_t middle = (first + end) / 2, order = 0;
            agreed(places[middle], key, length, &order);
            if (order < 0 || (above && order == 0))
                first = middle + 1;
            else
                end = middle;
        }
        return first;
    }

    // The key of a context, and the range of contexts with its last token.
    std::vector<int64_t> key_of(const int32_t* end, int64_t count, int64_t* range) const {
        std::vector<int64_t> key;
        while (int64_t(key.size()) < std::min(count, DEPTH) && end[-1 - int64_t(key.size())] < vocab)
            key.push_back(end[-1 - int64_t(key.size())] + 1);
        if (!key.empty())
            for (int64_t i : {0, 1}) range[i] = std::min<int64_t>(starts[key[0] - 1 + i], num_places);
        return key;
    }

   public:
    Corpus(const uint8_t* cells, const uint32_t* starts, const uint32_t* places, const int64_t* sizes)
        : cells(cells), starts(starts), places(places), width(sizes[0]), num_cells(sizes[1]), vocab(sizes[2]),
          num_places(sizes[3]) {}

    // Place: the first occurrence and the number of occurrences, in one number.
    Found find(const int32_t* end, int64_t count) const override {
        int64_t range[2] = {0, 0};
        std::vector<int64_t> key = key_of(end, count, range);
        int64_t length = 0, size = int64_t(key.size()), order = 0;
        int64_t slot = bound(range[0], range[1], key, size, false);
        for (int64_t i : {slot - 1, slot})
            if (range[0] <= i && i < range[1]) length = std::max(length, agreed(places[i], key, size, &order));
        if (!length) return {0, -1};
        int64_t first = bound(range[0], slot, key, length, false), last = bound(slot, range[1], key, length, true);
        return {length, int64_t(uint64_t(first) << 32 | uint64_t(last - first))};
    }

    // Each time the most frequent next token after the matches that have followed the draft so far.
    int64_t draft(const Found& found, int64_t n, int64_t* out) const override {
        int64_t first = int64_t(uint64_t(found.place) >> 32), count = found.place & 0xFFFFFFFF;
        std::vector<int64_t> ends;
        for (int64_t i = 0, step = (count + MOST_PLACES - 1) / MOST_PLACES; i < count; i += step)
            ends.push_back(places[first + i]);
        for (int64_t at = 0; at < n; at++) {
            int64_t best = 0, most = 0;
            for (std::size_t i = 0; i < ends.size(); i++) {
                int64_t next = cell(ends[i] - 1 - at), times = 0;
                for (int64_t end : ends) times += cell(end - 1 - at) == next;
                if (next && times > most) best = next, most = times;
            }
            if (!best || best > vocab) return at;
            out[at] = best - 1;
            ends.erase(std::remove_if(ends.begin(), ends.end(), [&](int64_t end) { return cell(end - 1 - at) != best; }),
                       ends.end());
        }
        return n;
    }
};

}  // namespace

extern "C" {

// sizes: bytes per cell, cells, tokens of the vocabulary, places. Free it by `selfspec_texts_free`.
void* selfspec_corpus_new(const uint8_t* cells, const uint32_t* starts, const uint32_t* places,
                          const int64_t* sizes) try {
    return static_cast<Texts*>(new Corpus(cells, starts, places, sizes));
} catch (const std::bad_alloc&) {
    return nullptr;
}
}
