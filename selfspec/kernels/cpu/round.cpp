// A whole round in one call: drafts, their verification by layers and head, and the target's picks.
//
// Reading the weights evicts the data of Python and torch from the caches. Python code between the parts of a round
// took a quarter of its time.

#include <algorithm>
#include <memory>
#include <new>
#include <optional>
#include <vector>

#include "logprobs.h"
#include "pick.h"
#include "round.h"
#include "team.h"

namespace {

constexpr int64_t SHARED = 1 << 16;  // logits above which threads share the picks of a round
constexpr int64_t MOST_KEPT = 1 << 18;  // floats of noise to keep; the noise of later tokens is computed again

// Uninitialised floats that begin at a cache line, since vectors are loaded from them.
class Floats {
    std::unique_ptr<float[]> all;
    float* first = nullptr;

   public:
    Floats() {}
    explicit Floats(int64_t count) : all(new float[count + 16]) {
        first = all.get() + (-(reinterpret_cast<uintptr_t>(all.get()) / 4) & 15);
    }
    float* get() const { return first; }
};

// The new tokens of some rows in a round, row after row; firsts [number of rows + 1]: offset of each row's tokens.
struct PackedTokens {
    std::vector<int64_t> tokens, positions, rows, firsts{0};

    int64_t size() const { return int64_t(tokens.size()); }
};

// What grammars leave after each new token.
struct Allowed {
    std::vector<const uint32_t*> masks;  // null: every token
    std::vector<int64_t> singles;        // the pick, where there is nothing to pick from; else -1
    std::vector<int64_t> places;         // of the logits; -1: none are needed
    int64_t num_picked = 0;              // tokens with logits
};

class Round {
    const Model& m;
    DraftArgs d;
    const VerifyArgs& v;
    Floats noise;

    int64_t threads(int64_t n) const { return n > v.few ? v.threads : v.threads_few; }

    // Whether the row's last drafted token is not verified. Early layers have then read all tokens that are.
    bool is_withdrawn(int64_t r) const { return v.exit_layer && v.counts[r] < d.counts[r]; }

    // Every row's last token and its drafted tokens; `only_unread`: only those that no early layer has processed.
    PackedTokens packed(bool only_unread) const {
        PackedTokens all;
        for (int64_t r = 0; r < d.num_rows; r++) {
            if (only_unread && is_withdrawn(r)) continue;
            all.rows.push_back(r);
            for (int64_t i = only_unread ? v.counts[r] : 0; i <= v.counts[r]; i++) {
                all.tokens.push_back(i ? v.tokens[r * v.most + i - 1] : d.last[r]);
                all.positions.push_back(d.positions[r] + i);
            }
            all.firsts.push_back(all.size());
        }
        return all;
    }

    // Run layers [start, stop) on packed tokens, from the tokens or from hidden states `from`.
    void run(const PackedTokens& all, int64_t start, int64_t stop, const float* from, float* x,
             float* const* taps) const {
        int64_t n = all.size(), scratch = selfspec_scratch_floats(&m, v.longest);
        int64_t buffers = selfspec_buffer_floats(&m, n);
        Floats memory(buffers + scratch * threads(n));
        std::vector<int64_t> pages;
        for (int64_t r : all.rows) pages.insert(pages.end(), d.pages + r * d.row_pages, d.pages + (r + 1) * d.row_pages);
        Call call = {n, int64_t(all.rows.size()), all.positions.data(), all.firsts.data(), pages.data(), d.row_pages,
                     d.cos, d.sin};
        const void* given = start ? static_cast<const void*>(from) : all.tokens.data();
        selfspec_run(&m, v.layers + start, stop - start, &call, given, start ? nullptr : d.embedding, x, taps,
                     stop == v.num_layers ? v.norm : nullptr, memory.get(), memory.get() + buffers, scratch,
                     threads(n));
    }

    // Run the early layers on the last token of each draft. x: the hidden states of all tokens.
    void read_on(float* x) const {
        PackedTokens unread = packed(true);
        Floats states(unread.size() * m.hidden);
        if (unread.size()) run(unread, 0, v.exit_layer, nullptr, states.get(), nullptr);
        const float* own = states.get();
        for (int64_t r = 0; r < d.num_rows; r++) {
            x = std::copy_n(d.hidden + r * d.most * m.hidden, (v.counts[r] + is_withdrawn(r)) * m.hidden, x);
            if (is_withdrawn(r)) continue;
            x = std::copy_n(own, m.hidden, x);
            own += m.hidden;
        }
    }

    // What may follow each token. The masks of drafts are known, since grammars have followed them.
    Allowed allowed(const PackedTokens& all) const {
        int64_t n = all.size();
        Allowed found{std::vector<const uint32_t*>(n), std::vector<int64_t>(n, -1), std::vector<int64_t>(n)};
        for (int64_t r = 0; r < d.num_rows; r++) {
            bool needs_logits = v.taps || v.logits || (v.num_likely && v.num_likely[r] >= 0);
            if (d.histories && d.histories[r]) needs_logits = true;  // which may exclude the only token, too
            for (int64_t at = all.firsts[r]; at < all.firsts[r + 1]; at++) {
                if (d.grammars)
                    found.masks[at] = d.grammars->after(r, v.tokens + r * v.most, at - all.firsts[r]).mask;
                if (found.masks[at] && !needs_logits) found.singles[at] = single_of(found.masks[at], v.head->out);
                found.places[at] = found.singles[at] < 0 ? found.num_picked++ : -1;
            }
        }
        return found;
    }

    // The target's pick after `place` drafted tokens of a row, with the noise of the draft's pick at the same position.
    int64_t pick_at(const PackedTokens& all, const Allowed& may, const float* logits, int64_t row, int64_t place,
                    float* memory) const {
        int64_t vocab = v.head->out, at = all.firsts[row] + place;
        if (may.singles[at] >= 0) return may.singles[at];
        bool is_kept = d.noise && place < v.counts[row] && place < d.num_kept;
        float* kept = is_kept ? d.noise + (row * d.num_kept + place) * filled_up(vocab) : nullptr;
        Row one{logits + may.places[at] * vocab, vocab, all.positions[at] + 1, nullptr, kept};
        const History* history = d.histories ? d.histories[row] : nullptr;
        std::optional<Prefix> prefix;
        if (history) one.prefix = &prefix.emplace(Prefix{*history, v.tokens + row * v.most, place, nullptr});
        one.mask = may.masks[at];
        return pick_row(one, d.params[row], memory, false).best;
    }

    // The logits of the tokens that have any. x: the final states of all tokens.
    void compute_logits(const float* x, const Allowed& may, float* logits) const {
        int64_t n = may.places.size(), num_picked = may.num_picked, num_threads = threads(num_picked);
        Floats picked(num_picked < n ? num_picked * m.hidden : 0);
        for (int64_t at = 0; num_picked < n && at < n; at++)
            if (may.places[at] >= 0) std::copy_n(x + at * m.hidden, m.hidden, picked.get() + may.places[at] * m.hidden);
        if (num_picked < n) x = picked.get();
        Floats memory(selfspec_linear_floats(v.head, num_picked, num_threads));
        selfspec_linear(v.head, x, num_picked, logits, nullptr, 0, memory.get(), num_threads);
    }

    // Report the log-probabilities of a row's pick after so many accepted tokens.
    void report(const float* logits, int64_t row, int64_t accepted, int64_t token, float* memory) const {
        int64_t at = row * (v.most + 1) + accepted, first = at * v.most_likely, wanted = v.num_likely[row];
        LogProbs out{v.logprobs + at, v.ranks + at, wanted, v.likely + first, v.likely_logprobs + first};
        log_probabilities(logits, v.head->out, token, memory, out);
    }

    // The target's picks after all tokens, by several threads. memory: `pick_floats` per thread.
    std::vector<int64_t> pick_all(const PackedTokens& all, const Allowed& may, const float* logits,
                                  int64_t num_threads, float* memory) const {
        int64_t n = all.size();
        std::vector<int64_t> picks(n), owners(n);
        for (int64_t r = 0; r < d.num_rows; r++)
            for (int64_t at = all.firsts[r]; at < all.firsts[r + 1]; at++) owners[at] = r;
        Team::for_each(n, num_threads, [&](int64_t i) {
            float* own = memory + thread_number() * pick_floats(v.head->out);
            picks[i] = pick_at(all, may, logits, owners[i], i - all.firsts[owners[i]], own);
        });
        return picks;
    }

    // The acceptance rule: the drafted tokens up to the first that is not the target's pick, and that pick.
    void accept(const PackedTokens& all, const Allowed& may, const float* logits) const {
        int64_t n = may.num_picked, vocab = v.head->out;
        int64_t num_threads = n * vocab > SHARED ? std::min(threads(n), n) : 1;
        bool is_shared = num_threads > 1;  // else picks after the first rejected token are not computed
        Floats memory(num_threads * pick_floats(vocab));
        std::vector<int64_t> picks;
        if (is_shared) picks = pick_all(all, may, logits, num_threads, memory.get());
        for (int64_t r = 0; r < d.num_rows; r++) {
            const int64_t* drafted = v.tokens + r * v.most;
            int64_t *out = v.picks + r * (v.most + 1), place = 0;
            for (bool is_right = true; is_right; place++) {
                int64_t at = all.firsts[r] + place;
                out[place] = is_shared ? picks[at] : pick_at(all, may, logits, r, place, memory.get());
                if (v.num_likely && v.num_likely[r] >= 0)
                    report(logits + may.places[at] * vocab, r, place, out[place], memory.get());
                is_right = place < v.counts[r] && drafted[place] == out[place];
            }
            v.num_emitted[r] = place;
        }
    }

   public:
    Round(const Model& m, const DraftArgs& d, const VerifyArgs& v) : m(m), d(d), v(v) {}

    void draft() {
        int64_t each = d.num_rows * filled_up(d.vocab);
        bool samples = false;
        for (int64_t r = 0; r < d.num_rows; r++) samples = samples || d.params[r].temperature > 0;
        d.num_kept = samples && !d.names ? std::min(d.most, MOST_KEPT / each) : 0;
        if (d.num_kept) noise = Floats(each * d.num_kept);
        d.noise = noise.get();
        int64_t num_threads = threads(d.num_rows);
        d.num_verified = v.counts;
        Floats memory(selfspec_draft_floats(&m, &d, v.draft_head, v.longest, num_threads));
        selfspec_draft(&m, v.drafters, v.exit_layer, v.draft_head, &d, v.longest, memory.get(), num_threads);
        for (int64_t r = 0; r < d.num_rows; r++)
            std::copy_n(d.tokens + r * d.most, d.counts[r], v.tokens + r * v.most);
    }

    void verify() const {
        PackedTokens all = packed(false);
        Allowed may = allowed(all);
        int64_t n = all.size(), num_picked = may.num_picked, vocab = v.head->out;
        bool is_read = v.exit_layer && !v.are_copies && !v.taps;  // with taps, all layers process all tokens
        Floats x(n * m.hidden), own(v.logits ? 0 : num_picked * vocab), early(is_read ? n * m.hidden : 0);
        float* logits = v.logits ? v.logits : own.get();
        double before = now();
        if (is_read) read_on(early.get());
        double start = now();
        run(all, is_read ? v.exit_layer : 0, v.num_layers, early.get(), x.get(), v.taps);
        double between = now();
        if (num_picked) compute_logits(x.get(), may, logits);
        double headed = now();
        accept(all, may, logits);
        if (v.finals) std::copy_n(x.get(), n * m.hidden, v.finals);
        for (int64_t r = 0; d.finals && r < d.num_rows; r++)
            std::copy_n(x.get() + (all.firsts[r] + v.num_emitted[r] - 1) * m.hidden, m.hidden, d.finals[r]);
        double *taken = v.taken, end = now();
        taken[0] = start - before, taken[1] = between - start, taken[2] = headed - between, taken[3] = end - headed;
    }
};

}  // namespace

extern "C" {

int64_t selfspec_round(const Model* m, const DraftArgs* d, const VerifyArgs* v) try {
    Round round(*m, *d, *v);
    if (v->exit_layer) round.draft();
    round.verify();
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}
}
