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
    // What drafts may lose, see `selfspec.control.ledger.Ledger`. prices: [num_prices]
    double balance, share, most_balance, overrun, plain_seconds, layers_price;
    const double* prices;
    int64_t* leads;               // [num_rows]: tokens by which each row is ahead of the slowest one; updated
    int64_t num_prices, has_waiting, has_overrun;
    int64_t* capacities;          // [num_rows]: tokens that each row may still draft; updated
    const int64_t *ends, *stops;  // tokens that end a row, row after row; [num_rows + 1] their offsets
    void* const* indices;         // [num_rows] indices of the rows, see `lookup.cpp`; null: no lookup
    void* const* others;          // [num_others] other texts in which all rows look, and their sources
    const int64_t* sources;
    int64_t num_others;
    const int64_t* lengths;       // [num_rows, sources, bins]: the fields of `selfspec.control.plan.LookupTable`
    const double *gains, *needs;  // [num_rows, sources, bins]; [num_needs]
    int64_t num_needs;
    // [rounds]: whether no layer drafts; in: of the first round if nothing is drafted here; out: of all rounds
    int64_t* given;
    // out: [rounds, num_rows]: match length and source of a draft by lookup, number and source of forced tokens, else 0
    int64_t *matches, *drafted_from;
    // The contents of rows with penalties or a bias, row after row, empty for other rows; [num_rows + 1] offsets; [num_rows]
    // prompt lengths. Null if no row has any.
    const int64_t *texts, *text_ends, *num_prompts;
    // What is added to logits of these rows: `Bias` of row after row; [num_rows + 1] offsets. Null with the texts.
    const int64_t *bias_ends, *bias_tokens, *bias_until;
    const float* bias;
    Follow follow;               // follows the grammars of rows; null: no row has one
    // [num_rows]: whether rows have one; how many tokens that it forces are drafted at most, null: none of any row
    const int64_t *has_grammar, *most_forced;
    int64_t done;                // out: number of rounds that ran
};

namespace {

class Run {
    Program& p;
    DraftArgs d;
    VerifyArgs v;
    int64_t exit_layer;
    std::vector<int64_t> positions, last, lengths, drafts;  // per row
    std::vector<Choice> choices;       // per row: where it may draft by lookup
    std::vector<std::optional<History>> histories;
    std::vector<const History*> history_of;  // per row, null without penalties
    std::optional<Grammars> grammars;
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
            int64_t length = std::min({p.lengths[at], p.capacities[r], v.most});
            drafts[r] = choice.found.match ? std::max<int64_t>(0, length) : 0;
            if (drafts[r]) gain += p.gains[at];
            total += drafts[r];
        }
        if (p.prices && total) {
            int64_t whole = total;
            gain *= double(total = cut(total)) / double(whole);
        }
        return total && gain >= p.needs[std::min(total, p.num_needs - 1)];
    }

    bool layers_draft() const { return exit_layer && p.layers_price <= p.balance; }

    // Write the draft of a row that no layer makes, from texts or by its grammar, and return its number of tokens.
    int64_t write_draft(int64_t r, bool is_found) {
        int64_t *tokens = v.tokens + r * v.most, count = 0, at = p.done * d.num_rows + r;
        const Choice& choice = choices[r];
        if (is_found && drafts[r]) count = selfspec_texts_draft(choice.texts, &choice.found, drafts[r], tokens);
        if (grammars) count = grammars->num_allowed(r, tokens, count);
        if (count) p.matches[at] = choice.found.match, p.drafted_from[at] = choice.source;
        if (!p.most_forced || !grammars) return count;
        int64_t most = std::max<int64_t>(0, std::min({p.most_forced[r], p.capacities[r], v.most}));
        std::vector<int64_t> forced(most);
        int64_t num_forced = grammars->forced(r, most, v.head->out, forced.data());
        if (num_forced <= count) return count;  // what is allowed begins with what is forced
        std::copy_n(forced.begin(), num_forced, tokens);
        p.matches[at] = num_forced, p.drafted_from[at] = GRAMMAR;
        return num_forced;
    }

    // Choose the source of drafts of the next round, and write drafts that no layer makes.
    void choose() {
        bool is_found = p.indices && look_up();
        int64_t total = 0;
        for (int64_t r = 0; r < d.num_rows; r++) total += v.counts[r] = write_draft(r, is_found);
        p.given[p.done] = total || !layers_draft();
    }

    // Set up the histories of rows with penalties or a bias.
    void make_histories() {
        int64_t vocab = v.head->out;
        histories.resize(d.num_rows);
        for (int64_t r = 0; r < d.num_rows; r++) {
            int64_t first = p.bias_ends[r], count = p.bias_ends[r + 1] - first;
            if (count || penalizes(d.params[r]))
                histories[r].emplace(vocab, p.texts + p.text_ends[r], p.text_ends[r + 1] - p.text_ends[r],
                                     p.num_prompts[r],
                                     Bias{count, p.bias_tokens + first, p.bias_until + first, p.bias + first});
            history_of.push_back(histories[r] ? &*histories[r] : nullptr);
        }
        d.histories = history_of.data();
        if (!exit_layer || !d.names) return;
        places.assign(vocab, -1);
        for (int64_t i = 0; i < d.vocab; i++) places[d.names[i]] = int32_t(i);
        d.places = places.data();
    }

    // Cut drafts by lookup to the longest that the balance covers. Returns the number of their tokens.
    int64_t cut(int64_t total) {
        while (total && p.prices[std::min(total, p.num_prices - 1)] > p.balance) {
            int64_t longest = *std::max_element(drafts.begin(), drafts.end()) - 1;
            total = 0;
            for (int64_t& length : drafts) total += length = std::min(length, longest);
        }
        return total;
    }

    // Enter a round into the ledger.
    void charge(double seconds) {
        int64_t rows = d.num_rows;
        double gained = 0;
        if (v.exit_layer || std::any_of(v.counts, v.counts + rows, [](int64_t drafted) { return drafted != 0; })) {
            double kept = double(std::accumulate(v.num_emitted, v.num_emitted + rows, int64_t(0))) / double(rows);
            if (!p.has_waiting) {
                for (int64_t r = 0; r < rows; r++) p.leads[r] += v.num_emitted[r];
                int64_t slowest = *std::min_element(p.leads, p.leads + rows);
                for (int64_t r = 0; r < rows; r++) p.leads[r] -= slowest;
                kept = double(slowest);
            }
            int64_t drafted = std::accumulate(v.counts, v.counts + rows, int64_t(0));
            double price = v.exit_layer ? p.layers_price : p.prices[std::min(drafted, p.num_prices - 1)];
            double most = p.overrun * (p.plain_seconds + price);
            bool is_over = seconds > most;
            if (is_over && !p.has_overrun) seconds = most;
            p.has_overrun = is_over;
            gained = p.plain_seconds * kept - seconds;
        }
        p.balance = std::max(-p.most_balance, std::min(p.balance + p.share * seconds + gained, p.most_balance));
    }

    // Advance the rows to the next round. Returns whether there may be one.
    bool move() {
        bool goes_on = true, could_draft = false, can_draft = false;
        for (int64_t r = 0; r < d.num_rows; r++) {
            const int64_t *picks = v.picks + r * (v.most + 1), count = v.num_emitted[r];
            positions[r] += count, last[r] = picks[count - 1], p.capacities[r] -= count;
            if (p.texts && histories[r]) histories[r]->add(picks, count, 1);
            if (p.indices && !selfspec_index_add(p.indices[r], picks, count)) throw std::bad_alloc();
            goes_on = goes_on && p.capacities[r] >= 0 && !ends(r, picks, count);
            if (grammars && grammars->add(r, picks, count)) goes_on = false;
            could_draft = could_draft || lengths[r];
            lengths[r] = std::min(lengths[r], std::max<int64_t>(0, p.capacities[r]));
            can_draft = can_draft || lengths[r];
        }
        if (could_draft && !can_draft) exit_layer = 0;
        return goes_on;
    }

    // Advance to the output arrays of the next round.
    void advance() {
        int64_t rows = d.num_rows, most = v.most;
        d.counts += rows, d.taken += 3 * most;
        if (d.confidences) d.confidences += rows * most;
        v.counts += rows, v.num_emitted += rows, v.taken += 4;
        int64_t columns = rows * (most + 1);
        if (v.num_likely) {
            v.logprobs += columns, v.ranks += columns;
            v.likely += columns * v.most_likely, v.likely_logprobs += columns * v.most_likely;
        }
        v.tokens += rows * most, v.picks += columns;
        for (int64_t* counts : {d.counts, v.counts}) std::fill(counts, counts + rows, 0);
    }

   public:
    Run(const DraftArgs& draft, const VerifyArgs& verify, Program& program)
        : p(program), d(draft), v(verify), exit_layer(v.exit_layer),
          positions(d.positions, d.positions + d.num_rows), last(d.last, d.last + d.num_rows),
          lengths(d.lengths, d.lengths + d.num_rows), drafts(d.num_rows), choices(d.num_rows) {
        d.positions = positions.data(), d.last = last.data(), d.lengths = lengths.data();
        d.histories = nullptr, d.places = nullptr, d.grammars = nullptr;
        if (p.texts) make_histories();
        if (p.follow) d.grammars = &grammars.emplace(p.follow, p.has_grammar, d.num_rows);
    }

    int64_t run(const Model* m) {
        double begin = now(), start = begin;
        for (p.done = 0;; advance()) {
            if (p.indices || p.most_forced)
                choose();
            else if (p.done)
                p.given[p.done] = !layers_draft();
            v.exit_layer = p.given[p.done] ? 0 : exit_layer;
            if (selfspec_round(m, &d, &v)) return 1;
            bool goes_on = move();
            double end = now();
            if (p.prices) charge(end - start);
            if (v.exit_layer && p.layers_price > p.balance) goes_on = false;
            start = end;
            if (++p.done >= p.rounds || !goes_on || end - begin >= p.seconds) return 0;
        }
    }
};

}  // namespace

extern "C" {

// Returns 0; 1 if memory allocation failed; 2 if the caller's `follow` failed.
int64_t selfspec_program(const Model* m, const DraftArgs* d, const VerifyArgs* v, Program* program) try {
    return Run(*d, *v, *program).run(m);
} catch (const std::bad_alloc&) {
    return 1;
} catch (const FollowFailure&) {
    return 2;
}
}
