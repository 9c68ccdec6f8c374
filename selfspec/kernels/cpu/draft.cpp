// Picks, and drafts in one call: early layers, head and pick, token after token.

#include <optional>
#include <vector>

#include "drafting.h"
#include "pick.h"
#include "team.h"

// The rows that continue to draft after a step. `sure`: confidences of the live rows.
static std::vector<int64_t> going_on(const Drafting& d, const std::vector<int64_t>& live, const float* sure,
                                     int64_t step, std::vector<double>& survival) {
    double total = 0;
    for (size_t i = 0; i < live.size() && d.stop.calibration; i++) {
        int64_t bin = 0;
        while (bin < d.stop.num_edges && !(sure[i] < d.stop.edges[bin])) bin++;
        total += survival[live[i]] *= d.stop.calibration[bin];
    }
    std::vector<int64_t> going;
    if (d.stop.calibration && !(total >= d.stop.least * double(live.size()))) return going;
    for (size_t i = 0; i < live.size(); i++) {
        bool is_sure = d.stop.calibration || !d.sure || sure[i] >= d.stop.min_confidence;
        if (is_sure && step + 1 < d.lengths[live[i]]) going.push_back(live[i]);
    }
    return going;
}

extern "C" {

int64_t selfspec_pick_floats(int64_t vocab) { return pick_floats(vocab); }

// Pick a token for each of n rows of logits [n, vocab], `stride` apart. tokens: see `Row`, `tokens_stride` apart (0:
// the same for all rows). sure [n] and seconds [n] may be null. room: `selfspec_pick_floats` per thread.
void selfspec_pick(const float* logits, int64_t stride, int64_t n, int64_t vocab, const How* how,
                   const int64_t* positions, const int64_t* tokens, int64_t tokens_stride, int64_t* picks, float* sure,
                   int64_t* seconds, float* room, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
    for (int64_t i = 0; i < n; i++) {
        const int64_t* own = tokens ? tokens + i * tokens_stride : nullptr;
        Picked one = pick_row({logits + i * stride, vocab, positions[i], own}, how[i],
                              room + omp_get_thread_num() * pick_floats(vocab), sure, seconds);
        picks[i] = own ? own[one.best] : one.best;
        if (sure) sure[i] = one.sure;
        if (seconds) seconds[i] = own ? own[one.second] : one.second;
    }
}

// The working memory of a draft in floats, for rows of at most `longest` tokens.
int64_t selfspec_draft_floats(const Model* m, const Drafting* d, const Product* head, int64_t longest,
                              int64_t num_threads) {
    return pick_floats(d->vocab) + d->num_rows * (m->hidden + d->vocab) +
           selfspec_linear_floats(head, d->num_rows, num_threads) + selfspec_buffer_floats(m, d->num_rows) +
           num_threads * selfspec_scratch_floats(m, longest) +
           (d->exit_head ? d->num_rows * m->hidden + selfspec_exit_head_floats(d->exit_head, d->num_rows, num_threads)
                         : 0);
}

// Draft up to the rows' lengths and stop rules. The last token of each draft is not fed.
void selfspec_draft(const Model* m, const Layer* layers, int64_t num_layers, const Product* head, const Drafting* drafting,
                    int64_t longest, float* room, int64_t num_threads) {
    const Drafting& d = *drafting;
    int64_t size = m->hidden, rows = d.num_rows, scratch_floats = selfspec_scratch_floats(m, longest);
    float *logits = room + pick_floats(d.vocab), *x = logits + rows * d.vocab, *h = x + rows * size;
    float* buffers = h + selfspec_linear_floats(head, rows, num_threads);
    float* scratch = buffers + selfspec_buffer_floats(m, rows);
    float* changed = scratch + num_threads * scratch_floats;  // hidden states after the exit head
    std::vector<int64_t> live, fed(rows), positions(rows), asked(rows), firsts(rows + 1), picks(rows), seconds(rows);
    std::vector<int64_t> pages(rows * d.row_pages), next(d.last, d.last + rows);
    std::vector<How> how(rows);
    std::vector<float> sure(rows);
    std::vector<double> survival(rows, 1.0);
    for (int64_t r = 0; r < rows; r++)
        if (d.lengths[r] > 0) live.push_back(r);
    for (int64_t step = 0; !live.empty(); step++) {
        int64_t n = live.size();
        for (int64_t i = 0; i < n; i++) {
            int64_t r = live[i];
            fed[i] = next[r], how[i] = d.how[r], positions[i] = d.positions[r] + step, asked[i] = positions[i] + 1;
            firsts[i + 1] = i + 1;
            std::memcpy(&pages[i * d.row_pages], d.pages + r * d.row_pages, sizeof(int64_t) * d.row_pages);
        }
        Call call = {n, n, positions.data(), firsts.data(), pages.data(), d.row_pages, nullptr, nullptr, 0, d.cos, d.sin};
        double start = now();
        selfspec_run(m, layers, num_layers, &call, fed.data(), d.embedding, x, nullptr, nullptr,
                     buffers, scratch, scratch_floats, num_threads);
        if (d.exit_head) selfspec_exit_head(d.exit_head, x, n, changed, changed + rows * size, num_threads);
        double between = now();
        selfspec_linear(head, d.exit_head ? changed : x, n, logits, d.norm, d.eps, h, num_threads);
        double headed = now();
        for (int64_t i = 0; i < n; i++) {
            bool is_kept = d.waits && step < d.num_kept;
            float* kept = is_kept ? d.waits + (live[i] * d.num_kept + step) * filled_up(d.vocab) : nullptr;
            if (kept) kept[0] = NAN;
            const History* history = d.histories ? d.histories[live[i]] : nullptr;
            Row row{logits + i * d.vocab, d.vocab, asked[i], d.names, kept};
            std::optional<Prefix> prefix;
            if (history) row.prefix = &prefix.emplace(Prefix{*history, d.tokens + live[i] * d.most, step, d.places});
            Picked one = pick_row(row, how[i], room, d.sure, d.seconds);
            picks[i] = d.names ? d.names[one.best] : one.best, sure[i] = one.sure;
            seconds[i] = d.names ? d.names[one.second] : one.second;
        }
        for (int64_t i = 0; i < n; i++) {
            int64_t r = live[i], at = r * d.most + step;
            d.tokens[at] = next[r] = picks[i], d.counts[r] = step + 1;
            if (d.sure) d.sure[at] = sure[i];
            if (d.seconds) d.seconds[at] = seconds[i];
            std::memcpy(d.hidden + at * size, x + i * size, sizeof(float) * size);
        }
        live = going_on(d, live, sure.data(), step, survival);
        double *taken = d.taken + 3 * step, end = now();
        taken[0] = between - start, taken[1] = headed - between, taken[2] = end - headed;
    }
}
}
