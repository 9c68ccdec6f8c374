// Drafts by lookup: an index over a row's own text, one over finished responses, and a corpus.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

// The sources of `selfspec.control.plan.SOURCES`, in this order, and the bounds between bins of match lengths, its
// `MATCH_EDGES`.
constexpr int64_t OWN_TEXT = 0;
constexpr int64_t EDGES[] = {2, 3, 4, 6, 9, 16, 32, 64, 128}, NUM_BINS = std::size(EDGES) + 1, NUM_SOURCES = 3;
constexpr int64_t GRAMMAR = NUM_SOURCES;  // the source of drafts that are in no text: a grammar forces them

struct Found {
    int64_t match, place;  // match length, 0: none; where the texts have it
};

// Texts in which a row's last tokens may occur, and the tokens after them.
class Texts {
   public:
    virtual ~Texts() = default;
    // The longest suffix of the tokens before `end` that occurs with a continuation; at most `count` tokens are read.
    virtual Found find(const int32_t* end, int64_t count) const = 0;
    // Write at most n tokens that follow a match, and return their number.
    virtual int64_t draft(const Found& found, int64_t n, int64_t* out) const = 0;
};

// A row's best match: see `selfspec.drafting.lookup`.
struct Choice {
    Found found;
    int64_t source, bin;  // bin: among those of all sources
    const Texts* texts;
};

extern "C" {
void selfspec_lookup(const void* index, const void* const* others, const int64_t* sources, int64_t num_others,
                     Choice* out);
int64_t selfspec_texts_draft(const void* texts, const Found* found, int64_t n, int64_t* out);
bool selfspec_index_add(void* index, const int64_t* tokens, int64_t n);
}
