// Picks, and drafts in one call: early layers, head and pick, token after token.

#include <optional>
#include <vector>

#include "drafting.h"
#include "norm.h"
#include "pick.h"
#include "team.h"

// The rows that continue to draft after a step. confidences: of the live rows.
static std::vector<int64_t> still_drafting(const DraftArgs& d, const std::vector<int64_t>& live,
                                           const float* confidences, int64_t step, std::vector<double>& survival) {
    double total = 0;
    for (size_t i = 0; i < live.size() && d.stop.calibration; i++) {
        int64_t bin = 0;
        while (bin < d.stop.num_edges && !(confidences[i] < d.stop.edges[bin])) bin++;
        total += survival[live[i]] *= d.stop.calibration[bin];
    }
    std::vector<int64_t> drafting;
    if (d.stop.calibration && !(total >= d.stop.least * double(live.size()))) return drafting;
    for (size_t i = 0; i < live.size(); i++) {
        bool goes_on = d.stop.calibration || !d.confidences || confidences[i] >= d.stop.min_confidence;
        if (goes_on && step + 1 < d.lengths[live[i]]) drafting.push_back(live[i]);
    }
    return drafting;
}

extern "C" {

int64_t selfspec_pick_floats(int64_t vocab) { return pick_floats(vocab); }

// Pick a token for each of n rows of logits [n, vocab], `stride` apart. tokens: see `Row`, `tokens_stride` apart (0:
// the same for all rows). confidences [n] may be null. memory: `selfspec_pick_floats` per thread.
void selfspec_pick(const float* logits, int64_t stride, int64_t n, int64_t vocab, const SamplingParams* params,
                   const int64_t* positions, const int64_t* tokens, int64_t tokens_stride, int64_t* picks,
                   float* confidences, float* memory, int64_t num_threads) {
    Team::for_each(n, num_threads, [&](int64_t i) {
        const int64_t* own = tokens ? tokens + i * tokens_stride : nullptr;
        Picked one = pick_row({logits + i * stride, vocab, positions[i], own}, params[i],
                              memory + thread_number() * pick_floats(vocab), confidences);
        picks[i] = own ? own[one.best] : one.best;
        if (confidences) confidences[i] = one.confidence;
    });
}

// The working memory of a draft in floats, for rows of at most `longest` tokens.
int64_t selfspec_draft_floats(const Model* m, const DraftArgs* d, const Product* head, int64_t longest,
                              int64_t num_threads) {
    return pick_floats(d->vocab) + d->num_rows * (m->hidden + d->vocab) +
           selfspec_linear_floats(head, d->num_rows, num_threads) + selfspec_buffer_floats(m, d->num_rows) +
           num_threads * selfspec_scratch_floats(m, longest) +
           (d->exit_head
                ? 2 * d->num_rows * m->hidden + selfspec_exit_head_floats(d->exit_head, d->num_rows, num_threads)
                : 0);
}

// Draft up to the rows' lengths and stop rules. The last token of each draft is not fed.
void selfspec_draft(const Model* m, const Layer* layers, int64_t num_layers, const Product* head,
                    const DraftArgs* args, int64_t longest, float* memory, int64_t num_threads) {
    const DraftArgs& d = *args;
    int64_t size = m->hidden, rows = d.num_rows, scratch_floats = selfspec_scratch_floats(m, longest);
    float *logits = memory + pick_floats(d.vocab), *x = logits + rows * d.vocab, *h = x + rows * size;
    float* buffers = h + selfspec_linear_floats(head, rows, num_threads);
    float* scratch = buffers + selfspec_buffer_floats(m, rows);
    // Hidden states after the exit head; after the final norm, by row, they stand for final states in later steps.
    float *changed = scratch + num_threads * scratch_floats, *own = changed + rows * size;
    std::vector<const float*> last(rows);
    std::vector<int64_t> live, fed(rows), positions(rows), asked(rows), firsts(rows + 1), picks(rows);
    std::vector<int64_t> pages(rows * d.row_pages), next(d.last, d.last + rows);
    std::vector<SamplingParams> params(rows);
    std::vector<float> confidences(rows);
    std::vector<double> survival(rows, 1.0);
    for (int64_t r = 0; r < rows; r++)
        if (d.lengths[r] > 0) live.push_back(r);
    for (int64_t step = 0; !live.empty(); step++) {
        int64_t n = live.size();
        for (int64_t i = 0; i < n; i++) {
            int64_t r = live[i];
            fed[i] = next[r], params[i] = d.params[r];
            positions[i] = d.positions[r] + step, asked[i] = positions[i] + 1;
            firsts[i + 1] = i + 1;
            if (d.exit_head) last[i] = step ? own + r * size : d.finals[r];
            std::memcpy(&pages[i * d.row_pages], d.pages + r * d.row_pages, sizeof(int64_t) * d.row_pages);
        }
        Call call = {n, n, positions.data(), firsts.data(), pages.data(), d.row_pages, d.cos, d.sin};
        double start = now();
        selfspec_run(m, layers, num_layers, &call, fed.data(), d.embedding, x, nullptr, nullptr,
                     buffers, scratch, scratch_floats, num_threads);
        if (d.exit_head) selfspec_exit_head(d.exit_head, x, last.data(), n, changed, own + rows * size, num_threads);
        double between = now();
        selfspec_linear(head, d.exit_head ? changed : x, n, logits, d.norm, d.eps, h, num_threads);
        double headed = now();
        for (int64_t i = 0; i < n; i++) {
            bool is_kept = d.noise && step < d.num_kept;
            float* noise = is_kept ? d.noise + (live[i] * d.num_kept + step) * filled_up(d.vocab) : nullptr;
            if (noise) noise[0] = NAN;
            const History* history = d.histories ? d.histories[live[i]] : nullptr;
            Row row{logits + i * d.vocab, d.vocab, asked[i], d.names, noise};
            std::optional<Prefix> prefix;
            if (history) row.prefix = &prefix.emplace(Prefix{*history, d.tokens + live[i] * d.most, step, d.places});
            if (d.grammars) row.mask = d.grammars->after(live[i], d.tokens + live[i] * d.most, step).mask;
            Picked one = pick_row(row, params[i], memory, d.confidences);
            picks[i] = d.names ? d.names[one.best] : one.best, confidences[i] = one.confidence;
        }
        for (int64_t i = 0; i < n; i++) {
            int64_t r = live[i], at = r * d.most + step;
            d.tokens[at] = next[r] = picks[i], d.counts[r] = step + 1;
            if (d.confidences) d.confidences[at] = confidences[i];
            std::memcpy(d.hidden + at * size, x + i * size, sizeof(float) * size);
            if (d.exit_head) norm(changed + i * size, d.norm, d.eps, size, own + r * size);
        }
        live = still_drafting(d, live, confidences.data(), step, survival);
        double *taken = d.taken + 3 * step, end = now();
        taken[0] = between - start, taken[1] = headed - between, taken[2] = end - headed;
    }
    for (int64_t r = 0; r < rows; r++) d.num_verified[r] = d.counts[r] - (d.counts[r] && survival[r] < d.stop.keep);
}
}
