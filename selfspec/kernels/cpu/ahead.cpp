// Several rounds of one plan in one call, each from where the one before left its rows.
//
// Python between two rounds runs on cold caches; after several it does for the first of them alone.

#include <algorithm>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "round.h"

// How far rounds go on, and what is looked up meanwhile. The arrays of a round lie after those of the one before.
struct Ahead {
    int64_t rounds, longer;       // at most; and one more for each after the first one that lookup drafts, up to so many
    double seconds;               // none begins later
    int64_t* rooms;               // [num_rows]: tokens that each may yet draft; they come to less
    const int64_t *ends, *stops;  // tokens that end a row, row after row; [num_rows + 1] where they begin; or null
    void* const* indices;         // [num_rows] of the rows' tokens, see `lookup.cpp`; or null
    // [num_lengths] each, by match, longer ones as the last: what a single row drafts by lookup, 0 as ever; and whether
    // that is not known where other tokens followed shorter matches. With `needs`, the former are [num_rows, num_lengths].
    const int64_t *lengths, *branches;
    const double* gains;          // as `lengths`, with `needs`: how many of them are likely to be right
    const double* needs;          // [num_needs]: of all rows, by what they draft in all, more as the last; or null
    const int64_t* grown;         // [num_grown]: instead of the last length, after so many rounds of that kind in a row
                                  // whose drafts were right as a whole, 1 and more; more are as the last
    int64_t* found;               // out: [rounds + longer, num_rows, found_size]: how many shorter matches, and what else
                                  // `selfspec_index_add` tells
    int64_t* given;               // [rounds + longer]: whether no layer drafts; in: of the first, out: of all
    int64_t num_lengths, num_grown, num_needs, found_size;
    // Of a single row, but not before `kept` rounds after the first one: tokens that came as what followed its matches
    // the last time, in bins of these that are watched (all bits of a byte each), and drafts by lookup that no longer one
    // takes the place of.
    int64_t most_surprises, kept, watched;
    int64_t match, streak;        // of a single row, before the first round; the latter: of right drafts, see `grown`
    int64_t done;                 // out: rounds
};

extern "C" {
int64_t selfspec_index_add(void* index, const int64_t* tokens, int64_t n, int64_t* out);
bool selfspec_index_has_others(const void* index);
void selfspec_index_draft(const void* index, int64_t n, int64_t* out);
}

namespace {

constexpr int64_t TO_ASK = -1;  // or anything below 0

class Going {
    Ahead& a;
    Drafting d;
    Judging j;
    int64_t exit_layer, lookups = 0;  // the latter: rounds after the first one that were drafted by lookup
    int64_t surprises = 0;
    int64_t match;  // of a single row, before the next round
    int64_t streak;
    std::vector<int64_t> positions, last, lengths;
    std::vector<int64_t> drafts;  // [num_rows]: what each drafts by lookup in the next round

    bool ends(int64_t row, const int64_t* tokens, int64_t count) const {
        const int64_t *first = a.ends + a.stops[row], *end = a.ends + a.stops[row + 1];
        return std::any_of(tokens, tokens + count, [=](int64_t token) { return std::find(first, end, token) != end; });
    }

    // What a row's index tells of its new tokens; null where it has none.
    const int64_t* told(int64_t row, const int64_t* tokens, int64_t count) {
        if (!a.indices || !a.indices[row]) return nullptr;
        int64_t* out = a.found + (a.done * d.num_rows + row) * a.found_size;
        out[0] = selfspec_index_add(a.indices[row], tokens, count, out + 1);
        if (out[0] < 0) throw std::bad_alloc();
        return out + 1;
    }

    // Tokens for a row to draft by lookup next; 0 where nothing is looked up.
    int64_t look_up(int64_t row, const int64_t* told) {
        for (uint64_t right = uint64_t(told[3] & a.watched); right; right >>= 8) surprises += right & 0xFF;
        match = std::min(told[0], a.num_lengths - 1);
        if (d.num_rows == 1 && a.done >= a.kept && surprises >= a.most_surprises) return TO_ASK;
        if (a.branches[match] && selfspec_index_has_others(a.indices[row])) return TO_ASK;
        int64_t length = a.lengths[match];
        if (length > 0 && streak && a.num_grown && match == a.num_lengths - 1)
            length = a.grown[std::min(streak, a.num_grown) - 1];
        return length > 0 ? std::min(length, std::max<int64_t>(1, a.rooms[row])) : length;
    }

    // What all rows draft by lookup next, after so long matches: see `selfspec.control.plan.Lookups`.
    void share(const std::vector<int64_t>& matches) {
        double gain = 0;
        int64_t total = 0;
        for (int64_t r = 0; r < d.num_rows; r++) {
            int64_t at = r * a.num_lengths + std::min(matches[r], a.num_lengths - 1);
            drafts[r] = matches[r] ? std::max<int64_t>(0, std::min(a.lengths[at], a.rooms[r])) : 0;
            if (drafts[r]) gain += a.gains[at];
            total += drafts[r];
        }
        if (!total || !(gain >= a.needs[std::min(total, a.num_needs - 1)])) std::fill(drafts.begin(), drafts.end(), 0);
    }

    // Whether it is known what rows draft by lookup, and how much that is in all.
    std::pair<bool, int64_t> drafted() const {
        bool is_known = true;
        int64_t total = 0;
        for (int64_t count : drafts) {
            is_known = is_known && (!count || (count > 0 && count <= j.most && (d.num_rows == 1 || a.needs)));
            total += count;
        }
        return {is_known, total};
    }

    // To where the next round begins; whether there is to be one.
    bool move() {
        std::vector<int64_t> matches(d.num_rows);
        bool goes_on = a.stops;
        for (int64_t r = 0; r < d.num_rows; r++) {
            const int64_t *picks = j.picks + r * (j.most + 1), count = j.accepted[r];
            positions[r] += count, last[r] = picks[count - 1], a.rooms[r] -= count;
            bool was_right = a.given[a.done] && j.counts[r] > 0 && count > j.counts[r];
            streak = was_right && match == a.num_lengths - 1 ? streak + 1 : 0;
            surprises += a.given[a.done] && j.counts[r] > 0 && !streak;
            const int64_t* now = told(r, picks, count);
            drafts[r] = now && !a.needs ? look_up(r, now) : 0;
            matches[r] = now ? now[0] : 0;
            goes_on = goes_on && !ends(r, picks, count);
        }
        if (a.needs) share(matches);
        auto [is_known, total] = drafted();
        bool was_drafting = false, is_drafting = false;  // by layers
        for (int64_t r = 0; r < d.num_rows; r++) {
            goes_on = goes_on && a.rooms[r] >= drafts[r];
            was_drafting = was_drafting || lengths[r];
            lengths[r] = std::min(lengths[r], a.rooms[r]);
            is_drafting = is_drafting || lengths[r];
        }
        // Rows that have room for their last token alone take it beside others that draft.
        return goes_on && is_known && (total || is_drafting || !was_drafting);
    }

    // To the arrays of the next round, and the drafts of rows that are found.
    void advance() {
        int64_t rows = d.num_rows, most = j.most;
        d.counts += rows, d.taken += 3 * most;
        if (d.sure) d.sure += rows * most;
        j.counts += rows, j.chains += rows, j.accepted += rows, j.taken += 4;
        j.tokens += rows * most, j.parents += rows * most, j.path += rows * (most + 1), j.picks += rows * (most + 1);
        for (int64_t* counts : {d.counts, j.counts, j.chains}) std::fill(counts, counts + rows, 0);
        bool is_found = false;
        for (int64_t r = 0; r < rows; r++) {
            if (!drafts[r]) continue;
            is_found = true;
            selfspec_index_draft(a.indices[r], drafts[r], j.tokens + r * most);
            std::iota(j.parents + r * most, j.parents + r * most + drafts[r], 0);
            j.counts[r] = drafts[r];
        }
        lookups += is_found;
        a.given[a.done] = is_found || !exit_layer;
    }

   public:
    Going(const Drafting& drafting, const Judging& judging, Ahead& ahead)
        : a(ahead), d(drafting), j(judging), exit_layer(j.exit_layer),
          match(std::min(ahead.match, ahead.num_lengths - 1)), streak(ahead.streak),
          positions(d.positions, d.positions + d.num_rows), last(d.last, d.last + d.num_rows),
          lengths(d.lengths, d.lengths + d.num_rows), drafts(d.num_rows) {
        d.positions = positions.data(), d.last = last.data(), d.lengths = lengths.data();
    }

    int64_t run(const Model* m) {
        double begin = now();
        for (a.done = 0;; advance()) {
            j.exit_layer = a.given[a.done] ? 0 : exit_layer;
            if (selfspec_round(m, &d, &j)) return 1;
            bool goes_on = move();
            if (++a.done >= a.rounds + std::min(lookups, a.longer) || !goes_on || now() - begin >= a.seconds) return 0;
        }
    }
};

}  // namespace

extern "C" {

// As many as there may be. Returns 0, or 1 where there is too little memory.
int64_t selfspec_rounds(const Model* m, const Drafting* d, const Judging* j, Ahead* ahead) try {
    return Going(*d, *j, *ahead).run(m);
} catch (const std::bad_alloc&) {
    return 1;
}
}
