// The index for drafts by lookup; `selfspec.drafting.ngram_index.Index` does the same in Python.

#include "lookup.h"

#include <algorithm>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <vector>

namespace {

constexpr int64_t NO_KEY = -1;
constexpr int32_t SEPARATOR = -1;  // ends every text of several; also stands for the token before the first
constexpr uint64_t MIX = 0x9E3779B97F4A7C15;
constexpr int64_t OWN_LEAD = 3;    // that of selfspec.drafting.lookup

int64_t bin_of(int64_t match) { return std::upper_bound(EDGES, std::end(EDGES), match) - EDGES; }

// Over one growing text (`extend`), which one thread uses, or over several texts (`add_text`), which several may read
// while one adds to them.
class Index : public Texts {
    int64_t most, count = 0;                      // longest match; number of children in the table
    std::vector<int32_t> content, latest{-1};     // the tokens; latest position of each inner node, the root first
    std::vector<uint8_t> depths{0};               // depth of each inner node
    std::vector<int64_t> keys;                    // (node, token) of a child
    std::vector<int32_t> children;                // an inner node, or ~position of a leaf
    mutable std::shared_mutex mutex;

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
        put(key_of(node, place >= depth ? content[place - depth] : SEPARATOR), child);
        put(key_of(node, content[position - depth]), ~int32_t(position));
        return int32_t(node);
    }

    // Walk down along the tokens up to `position`, last one first, as far as nodes exist, and insert a leaf there.
    Found add(int64_t position) {
        int64_t node = 0, depth = 0, place = -1;
        if (4 * (count + 2) > 3 * int64_t(keys.size())) grow();
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
        return {depth, place};
    }

   public:
    Found last{0, -1};  // the earlier occurrence of the last tokens of the growing text
    // By match bin, since the last read: the number of tokens after a match, and of those that equal the predicted
    // token.
    int64_t seen[NUM_BINS] = {}, right[NUM_BINS] = {};

    Index(int64_t most, int64_t size) : most(most), keys(size * 2 + 33, NO_KEY), children(size * 2 + 33) {}

    int64_t num_tokens() const { return int64_t(content.size()); }

    void extend(int64_t token) {
        if (last.match) {
            int64_t bin = bin_of(last.match);
            seen[bin]++, right[bin] += content[last.place + 1] == token;
        }
        content.push_back(int32_t(token));
        last = add(num_tokens() - 1);
    }

    // Only what follows token `first` of the text is found; the tokens before are context.
    void add_text(const int64_t* tokens, int64_t n, int64_t first) {
        std::unique_lock lock(mutex);
        int64_t start = num_tokens();
        content.insert(content.end(), tokens, tokens + n);
        content.push_back(SEPARATOR);
        for (int64_t at = first; at < n - 1; at++) add(start + at);  // the last token has no continuation
    }

    Found find(const int32_t* end, int64_t tokens) const override {
        std::shared_lock lock(mutex);
        int64_t node = 0, depth = 0, place = -1, limit = std::min(most, tokens);
        while (depth < limit) {
            int64_t key = key_of(node, end[-1 - depth]), slot = slot_of(key);
            if (keys[slot] != key) break;
            int32_t child = children[slot];
            place = child > 0 ? latest[child] : ~child;
            int64_t deepest = child > 0 ? depths[child] : most, stop = std::min(deepest, limit);
            depth++;
            while (depth < stop && depth <= place && content[place - depth] == end[-1 - depth]) depth++;
            if (depth < deepest || child < 0) break;
            node = child;
        }
        return {depth, place};
    }

    // The tokens up to the end of their text. A repetition at the end of the growing text continues.
    int64_t draft(const Found& found, int64_t n, int64_t* out) const override {
        std::shared_lock lock(mutex);
        int64_t start = found.place + 1, period = num_tokens() - start;
        for (int64_t i = 0; i < n; i++) {
            out[i] = content[start + i % period];
            if (out[i] == SEPARATOR) return i;
        }
        return n;
    }

    // The best match of the growing text's last tokens, in this text or in others.
    Choice choose(const void* const* others, const int64_t* sources, int64_t num_others) const {
        Choice best{last, OWN_TEXT, 0, this};
        int64_t needed = last.match ? last.match + OWN_LEAD : 0;
        for (int64_t i = 0; i < num_others; i++) {
            const Texts* texts = static_cast<const Texts*>(others[i]);
            Found found = texts->find(content.data() + content.size(), num_tokens());
            if (found.match <= needed) continue;
            best = {found, sources[i], 0, texts}, needed = found.match;
        }
        best.bin = best.source * NUM_BINS + bin_of(best.found.match);
        return best;
    }
};

Index* index_of(void* handle) { return static_cast<Index*>(static_cast<Texts*>(handle)); }
const Index* index_of(const void* handle) { return static_cast<const Index*>(static_cast<const Texts*>(handle)); }

}  // namespace

// Handles point to `Texts`.
extern "C" {

// size: initial capacity in tokens.
void* selfspec_index_new(int64_t most, int64_t size) try {
    return static_cast<Texts*>(new Index(most, size));
} catch (const std::bad_alloc&) {
    return nullptr;
}

void selfspec_texts_free(void* texts) { delete static_cast<Texts*>(texts); }


// The best match of a row's last tokens. others: [num_others] texts besides the own text, and their sources.
void selfspec_lookup(const void* index, const void* const* others, const int64_t* sources, int64_t num_others,
                     Choice* out) {
    *out = index_of(index)->choose(others, sources, num_others);
}

// tokens: the last ones of a context.
void selfspec_texts_find(const void* texts, const int32_t* tokens, int64_t n, Found* out) {
    *out = static_cast<const Texts*>(texts)->find(tokens + n, n);
}

int64_t selfspec_texts_draft(const void* texts, const Found* found, int64_t n, int64_t* out) {
    return static_cast<const Texts*>(texts)->draft(*found, n, out);
}

// Out [3]: the number of tokens, which is also returned; the match length of the last token, and its place.
int64_t selfspec_index_state(const void* index, int64_t* out) {
    const Index& one = *index_of(index);
    out[0] = one.num_tokens(), out[1] = one.last.match, out[2] = one.last.place;
    return out[0];
}

// Read the counts of matches [2, bins], tokens after a match first, and reset them.
void selfspec_index_counts(void* index, int64_t* out) {
    Index& one = *index_of(index);
    for (int64_t* counts : {one.seen, one.right}) {
        out = std::copy_n(counts, NUM_BINS, out);
        std::fill_n(counts, NUM_BINS, 0);
    }
}

// Add tokens to the end of the growing text. Returns false if memory allocation failed.
bool selfspec_index_add(void* index, const int64_t* tokens, int64_t n) try {
    for (int64_t i = 0; i < n; i++) index_of(index)->extend(tokens[i]);
    return true;
} catch (const std::bad_alloc&) {
    return false;
}

// Add a text to several, see `Index::add_text`. Returns false if memory allocation failed.
bool selfspec_index_add_text(void* index, const int64_t* tokens, int64_t n, int64_t first) try {
    index_of(index)->add_text(tokens, n, first);
    return true;
} catch (const std::bad_alloc&) {
    return false;
}
}
