// The index for drafts by lookup; `selfspec.drafting.prompt_lookup.Lookup` does the same in Python.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <new>
#include <vector>

namespace {

constexpr int64_t NO_KEY = -1, BEGINNING = -1;  // BEGINNING: the token before the first
constexpr uint64_t MIX = 0x9E3779B97F4A7C15;
// Bounds between bins of match lengths: `MATCH_EDGES` of selfspec.control.plan.
constexpr int64_t EDGES[] = {2, 3, 4, 6, 9, 16, 32, 64, 128}, NUM_BINS = std::size(EDGES) + 1;

class Index {
    int64_t most, count = 0;                      // longest match; number of children in the table
    std::vector<int32_t> content, latest{-1};     // the tokens; latest position of each inner node, the root first
    std::vector<uint8_t> depths{0};               // depth of each inner node
    std::vector<int64_t> keys;                    // (node, token) of a child
    std::vector<int32_t> children;                // an inner node, or ~position of a leaf

    static int64_t key_of(int64_t node, int64_t token) { return node << 32 | (token + 1); }

    // The place of a child in the table, or the place where to insert it.
    int64_t slot_of(int64_t key) const {
        int64_t size = int64_t(keys.size()), slot = int64_t(((uint64_t(key) * MIX) >> 32) % uint64_t(size));
        while (keys[slot] != key && keys[slot] != NO_KEY) slot = slot + 1 < size ? slot + 1 : 0;
        return slot;
    }

    void put(int64_t key, int32_t child) {
        int64_t slot = slot_of(key);
        keys[slot] = key, children[slot] = child, count++;
    }

    void grow() {
        std::vector<int64_t> old(keys.size() * 3 / 2 | 1, NO_KEY);
        std::vector<int32_t> below(old.size());
        old.swap(keys), below.swap(children), count = 0;
        for (std::size_t i = 0; i < old.size(); i++)
            if (old[i] != NO_KEY) put(old[i], below[i]);
    }

    // Insert an inner node above `child` and a leaf, whose contexts differ after `depth` tokens.
    int32_t split(int64_t position, int64_t place, int64_t depth, int32_t child) {
        int64_t node = int64_t(depths.size());
        depths.push_back(uint8_t(depth)), latest.push_back(int32_t(position));
        put(key_of(node, place >= depth ? content[place - depth] : BEGINNING), child);
        put(key_of(node, content[position - depth]), ~int32_t(position));
        return int32_t(node);
    }

   public:
    int64_t match = 0, place = -1;   // of the last token
    // By match bin, since the last read: the number of tokens after a match, and of those that equal the predicted
    // token.
    int64_t seen[NUM_BINS] = {}, right[NUM_BINS] = {};

    Index(int64_t most, int64_t size) : most(most), keys(size * 2 + 33, NO_KEY), children(size * 2 + 33) {}

    int64_t bin() const { return std::upper_bound(EDGES, std::end(EDGES), match) - EDGES; }  // of the match

    int64_t num_tokens() const { return int64_t(content.size()); }

    int64_t num_bytes() const { return int64_t(keys.capacity() * 12 + depths.capacity() * 5 + content.capacity() * 4); }

    // Walk down along the preceding tokens, last one first, as far as nodes exist, and insert a leaf there.
    void add(int64_t token) {
        int64_t position = int64_t(content.size()), node = 0, depth = 0;
        if (match) {
            seen[bin()]++, right[bin()] += content[place + 1] == token;
        }
        content.push_back(int32_t(token));
        if (4 * (count + 2) > 3 * int64_t(keys.size())) grow();
        place = -1;
        while (true) {
            int64_t key = key_of(node, content[position - depth]), slot = slot_of(key);
            int32_t child = children[slot];
            if (keys[slot] != key) {
                keys[slot] = key, children[slot] = ~int32_t(position), count++;
                break;
            }
            place = child > 0 ? latest[child] : ~child;
            int64_t end = child > 0 ? depths[child] : most;
            depth++;
            while (depth < end && depth <= place && content[place - depth] == content[position - depth]) depth++;
            if (depth < end) {
                children[slot] = split(position, place, depth, child);
                break;
            }
            if (child < 0) {
                children[slot] = ~int32_t(position);
                break;
            }
            latest[child] = int32_t(position);
            node = child;
        }
        match = depth;
    }

    // Draft the n tokens that followed the previous occurrence; a repetition continues. Only after a match.
    void draft(int64_t n, int64_t* out) const {
        int64_t start = place + 1, period = int64_t(content.size()) - start;
        for (int64_t i = 0; i < n; i++) out[i] = content[start + i % period];
    }
};

}  // namespace

extern "C" {

// size: initial capacity in tokens.
void* selfspec_index_new(int64_t most, int64_t size) try {
    return new Index(most, size);
} catch (const std::bad_alloc&) {
    return nullptr;
}

void selfspec_index_free(void* index) { delete static_cast<Index*>(index); }

int64_t selfspec_index_bytes(const void* index) { return static_cast<const Index*>(index)->num_bytes(); }

void selfspec_index_draft(const void* index, int64_t n, int64_t* out) {
    static_cast<const Index*>(index)->draft(n, out);
}

int64_t selfspec_index_match(const void* index, int64_t* bin) {
    const Index& one = *static_cast<const Index*>(index);
    *bin = one.bin();
    return one.match;
}

int64_t selfspec_index_bins() { return NUM_BINS; }

// Out [3]: the number of tokens, which is also returned; the match length of the last token, and its place.
int64_t selfspec_index_state(const void* index, int64_t* out) {
    const Index& one = *static_cast<const Index*>(index);
    out[0] = one.num_tokens(), out[1] = one.match, out[2] = one.place;
    return out[0];
}

// Read the counts of matches [2, bins], tokens after a match first, and reset them.
void selfspec_index_tally(void* index, int64_t* out) {
    Index& one = *static_cast<Index*>(index);
    for (int64_t* counts : {one.seen, one.right}) {
        out = std::copy_n(counts, NUM_BINS, out);
        std::fill_n(counts, NUM_BINS, 0);
    }
}

// Add tokens. Returns false if memory allocation failed.
bool selfspec_index_add(void* index, const int64_t* tokens, int64_t n) try {
    for (int64_t i = 0; i < n; i++) static_cast<Index*>(index)->add(tokens[i]);
    return true;
} catch (const std::bad_alloc&) {
    return false;
}
}
