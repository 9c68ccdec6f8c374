// Several rounds of one plan in one call, each from where the one before left its rows.
//
// Python between two rounds runs on cold caches; after several it does for the first of them alone.

#include <algorithm>
#include <new>
#include <vector>

#include "round.h"

// How far rounds go on, and what is looked up meanwhile. The arrays of a round lie after those of the one before.
struct Ahead {
    int64_t rounds;               // at most
    double seconds;               // none begins later
    int64_t* rooms;               // [num_rows]: tokens that each may yet draft; they come to less
    const int64_t *ends, *stops;  // tokens that end a row, row after row; [num_rows + 1] where each row's begin, or null
    void* const* indices;         // [num_rows] of the rows' tokens, see `lookup.cpp`; or null
    int64_t quiet;                // bit n: rounds go on where n tokens of a row are found
    int64_t* found;               // out: [rounds, num_rows, found_size]: how many shorter matches, and these: `lookup.cpp`
    int64_t found_size, done;     // done: out, rounds
};

extern "C" int64_t selfspec_index_add(void* index, const int64_t* tokens, int64_t n, int64_t* out);

namespace {

class Going {
    Ahead& a;
    Drafting d;
    Judging j;
    std::vector<int64_t> positions, last;

    bool ends(int64_t row, const int64_t* tokens, int64_t count) const {
        if (!a.stops) return true;
        const int64_t *first = a.ends + a.stops[row], *end = a.ends + a.stops[row + 1];
        return std::any_of(tokens, tokens + count, [=](int64_t token) { return std::find(first, end, token) != end; });
    }

    // Whether nothing is found that the plan does not know.
    bool look_up(int64_t row, const int64_t* tokens, int64_t count) const {
        if (!a.indices || !a.indices[row]) return true;
        int64_t* out = a.found + (a.done * d.num_rows + row) * a.found_size;
        out[0] = selfspec_index_add(a.indices[row], tokens, count, out + 1);
        if (out[0] < 0) throw std::bad_alloc();
        return a.quiet >> out[1] & 1;
    }

    // To where the next round begins; whether it is to.
    bool move() {
        bool goes_on = true;
        for (int64_t r = 0; r < d.num_rows; r++) {
            const int64_t *picks = j.picks + r * (j.most + 1), count = j.accepted[r];
            positions[r] += count, last[r] = picks[count - 1], a.rooms[r] -= count;
            bool is_quiet = look_up(r, picks, count);
            goes_on = goes_on && is_quiet && a.rooms[r] >= d.lengths[r] && !ends(r, picks, count);
        }
        return goes_on;
    }

    void advance() {
        int64_t rows = d.num_rows, most = j.most;
        d.counts += rows, d.taken += 3 * d.most;
        if (d.sure) d.sure += rows * most;
        j.counts += rows, j.chains += rows, j.accepted += rows, j.taken += 4;
        j.tokens += rows * most, j.parents += rows * most, j.path += rows * (most + 1), j.picks += rows * (most + 1);
        for (int64_t* counts : {d.counts, j.counts, j.chains}) std::fill(counts, counts + rows, 0);
    }

   public:
    Going(const Drafting& drafting, const Judging& judging, Ahead& ahead)
        : a(ahead), d(drafting), j(judging), positions(d.positions, d.positions + d.num_rows),
          last(d.last, d.last + d.num_rows) {
        d.positions = positions.data(), d.last = last.data();
    }

    int64_t run(const Model* m) {
        double begin = now();
        for (a.done = 0;; advance()) {
            if (selfspec_round(m, &d, &j)) return 1;
            bool goes_on = move();
            if (++a.done >= a.rounds || !goes_on || now() - begin >= a.seconds) return 0;
        }
    }
};

}  // namespace

extern "C" {

// Rounds whose drafts layers make, or that have none. Returns 0, or 1 where there is too little memory.
int64_t selfspec_rounds(const Model* m, const Drafting* d, const Judging* j, Ahead* ahead) try {
    return Going(*d, *j, *ahead).run(m);
} catch (const std::bad_alloc&) {
    return 1;
}
}
