// The rounds of a plan in one call; see `selfspec.control.plan.Plan`.
//
// Python code between two rounds runs on cold caches. One call for several rounds avoids most of it.

#include <algorithm>
#include <new>
#include <numeric>
#include <optional>
#include <vector>

#include "lookup.h"
#include "round.h"

// When a program ends, and what is drafted by lookup. Arrays of outputs hold one round after the other.
struct Program {
    int64_t rounds;               // maximum
    double seconds;               // no further round begins later
    int64_t* rooms;               // [num_rows]: tokens that each row may still draft; updated
    const int64_t *ends, *stops;  // tokens that end a row, row after row; [num_rows + 1] their offsets
    void* const* indices;         // [num_rows] indices of the rows, see `lookup.cpp`; null: no lookup
    void* const* others;          // [num_others] texts that all rows look in besides, and their sources
    const int64_t* sources;
    int64_t num_others;
    const int64_t* lengths;       // [num_rows, sources, bins]: the fields of `selfspec.control.plan.LookupTable`
    const double *gains, *needs;  // [num_rows, sources, bins]; [num_needs]
    int64_t num_needs;
    // [rounds]: whether no layer drafts; in: of the first round if `indices` is null; out: of all rounds
    int64_t* given;
    int64_t *matches, *drafted_from;  // out: [rounds, num_rows]: match length and source of a draft by lookup, else 0
    // The contents of rows with penalties, row after row, empty for other rows; [num_rows + 1] offsets; [num_rows]
    // prompt lengths. Null if no row has penalties.
    const int64_t *texts, *text_ends, *num_prompts;
    int64_t done;      // out: number of rounds that ran
};

namespace {

class Run {
    Program& p;
    Drafting d;
    Judging j;
    int64_t exit_layer;
    std::vector<int64_t> positions, last, lengths, drafts;  // per row
    std::vector<Choice> choices;       // per row: where it may draft by lookup
    std::vector<std::optional<History>> histories;
    std::vector<const History*> history_of;  // per row, null without penalties
    std::vector<int32_t> places;       // of tokens among the draft head's outputs

    bool ends(int64_t row, const int64_t* tokens, int64_t count) const {
        const int64_t *first = p.ends + p.stops[row], *end = p.ends + p.stops[row + 1];
        return std::any_of(tokens, tokens + count, [=](int64_t token) { return std::find(first, end, token) != end; });
    }

    // Set the number of tokens that each row drafts by lookup. Returns whether any row does.
    bool look_up() {
        double gain = 0;
        int64_t total = 0;
        for (int64_t r = 0; r < d.num_rows; r++) {
            Choice& choice = choices[r];
            selfspec_lookup(p.indices[r], p.others, p.sources, p.num_others, &choice);
            int64_t at = r * NUM_SOURCES * NUM_BINS + choice.bin;
            drafts[r] = choice.found.match ? std::max<int64_t>(0, std::min({p.lengths[at], p.rooms[r], j.most})) : 0;
            if (drafts[r]) gain += p.gains[at];
            total += drafts[r];
        }
        return total && gain >= p.needs[std::min(total, p.num_needs - 1)];
    }

    // Choose the source of drafts of the next round, and write drafts by lookup.
    void choose() {
        bool is_found = look_up();
        p.given[p.done] = is_found || !exit_layer;
        for (int64_t r = 0; r < d.num_rows && is_found; r++) {
            if (!drafts[r]) continue;
            const Choice& choice = choices[r];
            int64_t count = selfspec_texts_draft(choice.texts, &choice.found, drafts[r], j.tokens + r * j.most);
            std::iota(j.parents + r * j.most, j.parents + r * j.most + count, 0);
            int64_t at = p.done * d.num_rows + r;
            j.counts[r] = count;
            if (count) p.matches[at] = choice.found.match, p.drafted_from[at] = choice.source;
        }
    }

    // Set up the histories of rows with penalties.
    void remember() {
        int64_t vocab = j.head->out;
        histories.resize(d.num_rows);
        for (int64_t r = 0; r < d.num_rows; r++) {
            if (penalizes(d.how[r]))
                histories[r].emplace(vocab, p.texts + p.text_ends[r], p.text_ends[r + 1] - p.text_ends[r],
                                     p.num_prompts[r]);
            history_of.push_back(histories[r] ? &*histories[r] : nullptr);
        }
        d.histories = history_of.data();
        if (!exit_layer || !d.names) return;
        places.assign(vocab, -1);
        for (int64_t i = 0; i < d.vocab; i++) places[d.names[i]] = int32_t(i);
        d.places = places.data();
    }

    // Advance the rows to the next round. Returns whether there may be one.
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

    // Advance to the output arrays of the next round.
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
          lengths(d.lengths, d.lengths + d.num_rows), drafts(d.num_rows), choices(d.num_rows) {
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

// Returns 0, or 1 if memory allocation failed.
int64_t selfspec_program(const Model* m, const Drafting* d, const Judging* j, Program* program) try {
    return Run(*d, *j, *program).run(m);
} catch (const std::bad_alloc&) {
    return 1;
}
}
