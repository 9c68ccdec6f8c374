// The rounds of a plan in one call, each from where the one before left its rows; see `selfspec.control.plan.Plan`.
//
// Python between two rounds runs on cold caches; after several it does for the first of them alone.

#include <algorithm>
#include <new>
#include <numeric>
#include <optional>
#include <vector>

#include "round.h"

// How far rounds go on, and what is drafted by lookup. The arrays of a round lie after those of the one before.
struct Program {
    int64_t rounds;               // at most
    double seconds;               // none begins later
    int64_t* rooms;               // [num_rows]: tokens that each may yet draft; they come to less
    const int64_t *ends, *stops;  // tokens that end a row, row after row; [num_rows + 1] where they begin
    void* const* indices;         // [num_rows] of the rows' tokens, see `lookup.cpp`; null: the first draft may be given
    const int64_t* lengths;       // [num_rows, bins]: as `selfspec.control.plan.LookupTable` has it, and the same of
    const double *gains, *needs;  // [num_rows, bins]; [num_needs]
    int64_t num_needs;
    int64_t* given;    // [rounds]: whether no layer drafts; in: of the first where there are no indices, out: of all
    int64_t* matches;  // out: [rounds, num_rows]: the match that a draft by lookup follows, else 0
    // The tokens of rows with penalties, row after row, of others none; [num_rows + 1] where they begin; [num_rows] how
    // many of them are the prompt. Null where no row has penalties.
    const int64_t *texts, *text_ends, *num_prompts;
    int64_t done;      // out: rounds
};

extern "C" {
int64_t selfspec_index_match(const void* index, int64_t* bin);
int64_t selfspec_index_bins();
void selfspec_index_draft(const void* index, int64_t n, int64_t* out);
bool selfspec_index_add(void* index, const int64_t* tokens, int64_t n);
}

namespace {

class Run {
    Program& p;
    Drafting d;
    Judging j;
    int64_t exit_layer;
    std::vector<int64_t> positions, last, lengths, matches, drafts;  // of every row
    std::vector<std::optional<History>> histories;
    std::vector<const History*> told;  // the same
    std::vector<int32_t> places;       // in the drafter's part of the vocabulary

    bool ends(int64_t row, const int64_t* tokens, int64_t count) const {
        const int64_t *first = p.ends + p.stops[row], *end = p.ends + p.stops[row + 1];
        return std::any_of(tokens, tokens + count, [=](int64_t token) { return std::find(first, end, token) != end; });
    }

    // Tokens that each row drafts by lookup; whether any does.
    bool look_up() {
        double gain = 0;
        int64_t total = 0, bin = 0;
        for (int64_t r = 0; r < d.num_rows; r++) {
            matches[r] = selfspec_index_match(p.indices[r], &bin);
            int64_t at = r * selfspec_index_bins() + bin;
            drafts[r] = matches[r] ? std::max<int64_t>(0, std::min({p.lengths[at], p.rooms[r], j.most})) : 0;
            if (drafts[r]) gain += p.gains[at];
            total += drafts[r];
        }
        return total && gain >= p.needs[std::min(total, p.num_needs - 1)];
    }

    // Who drafts in the next round, and what is drafted by lookup.
    void choose() {
        bool is_found = look_up();
        p.given[p.done] = is_found || !exit_layer;
        for (int64_t r = 0; r < d.num_rows && is_found; r++) {
            if (!drafts[r]) continue;
            selfspec_index_draft(p.indices[r], drafts[r], j.tokens + r * j.most);
            std::iota(j.parents + r * j.most, j.parents + r * j.most + drafts[r], 0);
            j.counts[r] = drafts[r], p.matches[p.done * d.num_rows + r] = matches[r];
        }
    }

    // What rows with penalties hold.
    void remember() {
        int64_t vocab = j.head->out;
        histories.resize(d.num_rows);
        for (int64_t r = 0; r < d.num_rows; r++) {
            if (penalizes(d.how[r]))
                histories[r].emplace(vocab, p.texts + p.text_ends[r], p.text_ends[r + 1] - p.text_ends[r],
                                     p.num_prompts[r]);
            told.push_back(histories[r] ? &*histories[r] : nullptr);
        }
        d.histories = told.data();
        if (!exit_layer || !d.names) return;
        places.assign(vocab, -1);
        for (int64_t i = 0; i < d.vocab; i++) places[d.names[i]] = int32_t(i);
        d.places = places.data();
    }

    // To where the next round begins; whether there may be one.
    bool move() {
        bool goes_on = true, had_room = false, has_room = false;
        for (int64_t r = 0; r < d.num_rows; r++) {
            const int64_t *picks = j.picks + r * (j.most + 1), count = j.accepted[r];
            positions[r] += count, last[r] = picks[count - 1], p.rooms[r] -= count;
            if (p.texts && histories[r]) histories[r]->add(picks, count, 1);
            if (p.indices && !selfspec_index_add(p.indices[r], picks, count)) throw std::bad_alloc();
            goes_on = goes_on && p.rooms[r] >= 0 && !ends(r, picks, count);
            had_room = had_room || lengths[r];
            lengths[r] = std::min(lengths[r], std::max<int64_t>(0, p.rooms[r]));
            has_room = has_room || lengths[r];
        }
        if (had_room && !has_room) exit_layer = 0;
        return goes_on;
    }

    // To the arrays of the next round.
    void advance() {
        int64_t rows = d.num_rows, most = j.most;
        d.counts += rows, d.taken += 3 * most;
        if (d.sure) d.sure += rows * most;
        j.counts += rows, j.chains += rows, j.accepted += rows, j.taken += 4;
        int64_t columns = rows * (most + 1);
        if (j.num_likely) {
            j.logprobs += columns, j.ranks += columns;
            j.likely += columns * j.most_likely, j.likely_logprobs += columns * j.most_likely;
        }
        j.tokens += rows * most, j.parents += rows * most, j.path += rows * (most + 1), j.picks += rows * (most + 1);
        for (int64_t* counts : {d.counts, j.counts, j.chains}) std::fill(counts, counts + rows, 0);
    }

   public:
    Run(const Drafting& drafting, const Judging& judging, Program& program)
        : p(program), d(drafting), j(judging), exit_layer(j.exit_layer),
          positions(d.positions, d.positions + d.num_rows), last(d.last, d.last + d.num_rows),
          lengths(d.lengths, d.lengths + d.num_rows), matches(d.num_rows), drafts(d.num_rows) {
        d.positions = positions.data(), d.last = last.data(), d.lengths = lengths.data();
        d.histories = nullptr, d.places = nullptr;
        if (p.texts) remember();
    }

    int64_t run(const Model* m) {
        double begin = now();
        for (p.done = 0;; advance()) {
            if (p.indices)
                choose();
            else if (p.done)
                p.given[p.done] = !exit_layer;
            j.exit_layer = p.given[p.done] ? 0 : exit_layer;
            if (selfspec_round(m, &d, &j)) return 1;
            bool goes_on = move();
            if (++p.done >= p.rounds || !goes_on || now() - begin >= p.seconds) return 0;
        }
    }
};

}  // namespace

extern "C" {

// Returns 0, or 1 where there is too little memory.
int64_t selfspec_program(const Model* m, const Drafting* d, const Judging* j, Program* program) try {
    return Run(*d, *j, *program).run(m);
} catch (const std::bad_alloc&) {
    return 1;
}
}
