// Several rounds of one plan in one call, each from where the one before left its rows.
//
// Python between two rounds runs on cold caches; after several it does for the first of them alone.

#include <algorithm>
#include <new>
#include <numeric>
#include <vector>

#include "round.h"

// How far rounds go on, and what is looked up meanwhile. The arrays of a round lie after those of the one before.
struct Ahead {
    int64_t rounds;               // at most
    double seconds;               // none begins later
    int64_t* rooms;               // [num_rows]: tokens that each may yet draft; they come to less
    const int64_t *ends, *stops;  // tokens that end a row, row after row; [num_rows + 1] where they begin; or null
    void* const* indices;         // [num_rows] of the rows' tokens, see `lookup.cpp`; or null
    // [num_lengths] each, by match, longer ones as the last: what a single row drafts by lookup, 0 as ever; and whether
    // that is not known where other tokens followed shorter matches.
    const int64_t *lengths, *branches;
    const int64_t* grown;         // [num_grown]: instead of the last length, after so many rounds of that kind in a row
                                  // whose drafts were right as a whole, 1 and more; more are as the last
    int64_t* found;               // out: [rounds, num_rows, found_size]: how many shorter matches, and what else
                                  // `selfspec_index_add` tells
    int64_t* given;               // [rounds]: whether no layer drafts; in: of the first, out: of all
    int64_t num_lengths, num_grown, found_size;
    int64_t most_lookups;         // rounds after the first one that are drafted by lookup
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
    int64_t match, drafts = 0;  // of the next round: what a single row matched, and drafts by lookup
    int64_t streak;
    std::vector<int64_t> positions, last, lengths;

    bool ends(int64_t row, const int64_t* tokens, int64_t count) const {
        const int64_t *first = a.ends + a.stops[row], *end = a.ends + a.stops[row + 1];
        return std::any_of(tokens, tokens + count, [=](int64_t token) { return std::find(first, end, token) != end; });
    }

    // Tokens to draft by lookup next; 0 where nothing is looked up.
    int64_t look_up(int64_t row, const int64_t* tokens, int64_t count) {
        if (!a.indices || !a.indices[row]) return 0;
        int64_t* out = a.found + (a.done * d.num_rows + row) * a.found_size;
        out[0] = selfspec_index_add(a.indices[row], tokens, count, out + 1);
        if (out[0] < 0) throw std::bad_alloc();
        for (uint64_t right = uint64_t(out[4] & a.watched); right; right >>= 8) surprises += right & 0xFF;
        match = std::min(out[1], a.num_lengths - 1);
        if (d.num_rows == 1 && a.done >= a.kept && surprises >= a.most_surprises) return TO_ASK;
        if (a.branches[match] && selfspec_index_has_others(a.indices[row])) return TO_ASK;
        int64_t length = a.lengths[match];
        if (length && lookups >= a.most_lookups) return TO_ASK;
        if (length > 0 && streak && a.num_grown && match == a.num_lengths - 1)
            length = a.grown[std::min(streak, a.num_grown) - 1];
        return length > 0 ? std::min(length, std::max<int64_t>(1, a.rooms[row])) : length;
    }

    // To where the next round begins; whether there is to be one.
    bool move() {
        bool goes_on = true;
        for (int64_t r = 0; r < d.num_rows; r++) {
            const int64_t *picks = j.picks + r * (j.most + 1), count = j.accepted[r];
            positions[r] += count, last[r] = picks[count - 1], a.rooms[r] -= count;
            bool was_right = a.given[a.done] && j.counts[r] > 0 && count > j.counts[r];
            streak = was_right && match == a.num_lengths - 1 ? streak + 1 : 0;
            surprises += a.given[a.done] && j.counts[r] > 0 && !streak;
            drafts = look_up(r, picks, count);
            bool is_known = drafts == 0 || (drafts > 0 && drafts <= j.most && d.num_rows == 1);
            int64_t least = drafts ? drafts : std::min<int64_t>(1, lengths[r]);
            goes_on = goes_on && is_known && a.stops && !ends(r, picks, count) && a.rooms[r] >= least;
            lengths[r] = std::min(lengths[r], a.rooms[r]);
        }
        return goes_on;
    }

    // To the arrays of the next round, and the draft of the only row if it is found.
    void advance() {
        int64_t rows = d.num_rows, most = j.most;
        d.counts += rows, d.taken += 3 * most;
        if (d.sure) d.sure += rows * most;
        j.counts += rows, j.chains += rows, j.accepted += rows, j.taken += 4;
        j.tokens += rows * most, j.parents += rows * most, j.path += rows * (most + 1), j.picks += rows * (most + 1);
        for (int64_t* counts : {d.counts, j.counts, j.chains}) std::fill(counts, counts + rows, 0);
        a.given[a.done] = drafts > 0 || !exit_layer;
        if (!drafts) return;
        lookups++;
        selfspec_index_draft(a.indices[0], drafts, j.tokens);
        std::iota(j.parents, j.parents + drafts, 0);
        j.counts[0] = drafts;
    }

   public:
    Going(const Drafting& drafting, const Judging& judging, Ahead& ahead)
        : a(ahead), d(drafting), j(judging), exit_layer(j.exit_layer),
          match(std::min(ahead.match, ahead.num_lengths - 1)), streak(ahead.streak),
          positions(d.positions, d.positions + d.num_rows), last(d.last, d.last + d.num_rows),
          lengths(d.lengths, d.lengths + d.num_rows) {
        d.positions = positions.data(), d.last = last.data(), d.lengths = lengths.data();
    }

    int64_t run(const Model* m) {
        double begin = now();
        for (a.done = 0;; advance()) {
            j.exit_layer = a.given[a.done] ? 0 : exit_layer;
            if (selfspec_round(m, &d, &j)) return 1;
            bool goes_on = move();
            if (++a.done >= a.rounds || !goes_on || now() - begin >= a.seconds) return 0;
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
