// A whole round in one call: drafts, their verification by layers and head, and the target's picks.
//
// Reading the weights evicts the data of Python and torch from the caches. Python code between the parts of a round
// took a quarter of its time.

#include <algorithm>
#include <memory>
#include <new>
#include <optional>
#include <vector>

#include "drafts.h"
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

class Round {
    const Model& m;
    Drafting d;
    const Judging& j;
    Floats waits;

    int64_t threads(int64_t n) const { return n > j.few ? j.threads : j.threads_few; }

    // Run layers [start, stop) on packed nodes, from their tokens or from hidden states `from`.
    void run(Nodes& nodes, int64_t start, int64_t stop, const float* from, float* x, float* const* taps) const {
        int64_t n = nodes.size(), scratch = selfspec_scratch_floats(&m, j.longest);
        int64_t buffers = selfspec_buffer_floats(&m, n);
        Floats room(buffers + scratch * threads(n));
        Call call = nodes.call(d.cos, d.sin);
        const void* given = start ? static_cast<const void*>(from) : nodes.tokens.data();
        selfspec_run(&m, j.layers + start, stop - start, &call, given, start ? nullptr : d.embedding, x, taps,
                     stop == j.num_layers ? j.norm : nullptr, room.get(), room.get() + buffers, scratch, threads(n));
    }

    Nodes nodes_of(bool only_unread) const {
        Nodes nodes(d.num_rows, d.row_pages);
        for (int64_t r = 0; r < d.num_rows; r++)
            nodes.add(d.pages + r * d.row_pages, d.positions[r], d.last[r], j.counts[r], j.tokens + r * j.most,
                      j.parents + r * j.most, only_unread ? j.chains[r] : 0);
        return nodes;
    }

    // Run the early layers on nodes that they have not processed: the last drafted tokens and second choices. x: the
    // hidden states of all nodes.
    void read_on(float* x) const {
        Nodes unread = nodes_of(true);
        Floats states(unread.size() * m.hidden);
        run(unread, 0, j.exit_layer, nullptr, states.get(), nullptr);
        const float* more = states.get();
        for (int64_t r = 0; r < d.num_rows; r++) {
            int64_t known = j.chains[r] * m.hidden, others = (j.counts[r] + 1) * m.hidden - known;
            x = std::copy_n(d.hidden + r * d.most * m.hidden, known, x);
            x = std::copy_n(more, others, x);
            more += others;
        }
    }

    // The target's pick at a node, with the noise of the draft's pick at the same position.
    int64_t pick_at(const Nodes& nodes, const float* logits, int64_t row, int64_t node, float* room) const {
        int64_t vocab = j.head->out, at = nodes.rows[row] + node;
        bool is_kept = d.waits && node < j.chains[row] && node < d.num_kept;
        float* kept = is_kept ? d.waits + (row * d.num_kept + node) * filled_up(vocab) : nullptr;
        Row one{logits + at * vocab, vocab, nodes.positions[at] + 1, nullptr, kept};
        const History* history = d.histories ? d.histories[row] : nullptr;
        std::vector<int64_t> before;
        std::optional<Prefix> prefix;
        if (history) {
            before = before_node(row, node);
            one.prefix = &prefix.emplace(Prefix{*history, before.data(), int64_t(before.size()), nullptr});
        }
        return pick_row(one, d.how[row], room, false, false).best;
    }

    // The drafted tokens on the path to a node, its own included.
    std::vector<int64_t> before_node(int64_t row, int64_t node) const {
        std::vector<int64_t> before;
        for (; node; node = j.parents[row * j.most + node - 1]) before.push_back(j.tokens[row * j.most + node - 1]);
        std::reverse(before.begin(), before.end());
        return before;
    }

    // Report the log-probabilities of a row's pick after so many accepted tokens.
    void report(const float* logits, int64_t row, int64_t accepted, int64_t token, float* room) const {
        int64_t at = row * (j.most + 1) + accepted, first = at * j.most_likely, wanted = j.num_likely[row];
        if (wanted < 0) return;
        LogProbs out{j.logprobs + at, j.ranks + at, wanted, j.likely + first, j.likely_logprobs + first};
        log_probabilities(logits, j.head->out, token, room, out);
    }

    // The target's picks at all nodes, by several threads. room: `pick_floats` per thread.
    std::vector<int64_t> pick_all(const Nodes& nodes, const float* logits, int64_t num_threads, float* room) const {
        int64_t n = nodes.size();
        std::vector<int64_t> picks(n), owners(n);
        for (int64_t r = 0; r < d.num_rows; r++)
            std::fill(owners.begin() + nodes.rows[r], owners.begin() + nodes.rows[r + 1], r);
#pragma omp parallel for num_threads(num_threads)
        for (int64_t i = 0; i < n; i++) {
            float* own = room + omp_get_thread_num() * pick_floats(j.head->out);
            picks[i] = pick_at(nodes, logits, owners[i], i - nodes.rows[owners[i]], own);
        }
        return picks;
    }

    // Walk from node 0 to the child that the target picks, while there is one.
    void walk(const Nodes& nodes, const float* logits) const {
        int64_t n = nodes.size(), vocab = j.head->out;
        int64_t num_threads = n * vocab > SHARED ? std::min(threads(n), n) : 1;
        bool is_shared = num_threads > 1;  // else picks off the path are not computed
        Floats room(num_threads * pick_floats(vocab));
        std::vector<int64_t> picks;
        if (is_shared) picks = pick_all(nodes, logits, num_threads, room.get());
        for (int64_t r = 0; r < d.num_rows; r++) {
            int64_t count = j.counts[r], length = 0;
            int64_t *path = j.path + r * (j.most + 1), *out = j.picks + r * (j.most + 1);
            const int64_t *tokens = j.tokens + r * j.most, *parents = j.parents + r * j.most;
            for (int64_t node = 0; node >= 0; length++) {
                int64_t next = node + 1;
                int64_t made = is_shared ? picks[nodes.rows[r] + node] : pick_at(nodes, logits, r, node, room.get());
                path[length] = node, out[length] = made;
                if (j.num_likely) report(logits + (nodes.rows[r] + node) * vocab, r, length, made, room.get());
                while (next <= count && !(parents[next - 1] == node && tokens[next - 1] == made)) next++;
                node = next <= count ? next : -1;
            }
            j.accepted[r] = length;
        }
    }

    // Move the keys and values of accepted nodes that are not at their tokens' positions.
    void settle() const {
        int64_t size = m.shape.page_size, floats = m.shape.kv_heads * m.shape.head_dim;
        for (int64_t r = 0; r < d.num_rows; r++) {
            const int64_t *path = j.path + r * (j.most + 1), *pages = d.pages + r * d.row_pages;
            for (int64_t i = 0; i < j.accepted[r]; i++) {
                int64_t from = d.positions[r] + path[i], to = d.positions[r] + i;
                if (from == to) continue;
                from = (pages[from / size] * size + from % size) * floats;
                to = (pages[to / size] * size + to % size) * floats;
                for (const Layer* layer = j.layers; layer < j.layers + j.num_layers; layer++) {
                    std::copy_n(layer->keys + from, floats, layer->keys + to);
                    std::copy_n(layer->values + from, floats, layer->values + to);
                }
            }
        }
    }

   public:
    Round(const Model& m, const Drafting& d, const Judging& j) : m(m), d(d), j(j) {}

    void draft() {
        int64_t each = d.num_rows * filled_up(d.vocab);
        bool samples = false;
        for (int64_t r = 0; r < d.num_rows; r++) samples = samples || d.how[r].temperature > 0;
        d.num_kept = samples && !d.names ? std::min(d.most, MOST_KEPT / each) : 0;
        if (d.num_kept) waits = Floats(each * d.num_kept);
        d.waits = waits.get();
        int64_t num_threads = threads(d.num_rows);
        Floats room(selfspec_draft_floats(&m, &d, j.draft_head, j.longest, num_threads));
        selfspec_draft(&m, j.drafters, j.exit_layer, j.draft_head, &d, j.longest, room.get(), num_threads);
        for (int64_t r = 0; r < d.num_rows; r++) {
            int64_t count = d.counts[r], *tokens = j.tokens + r * j.most, *parents = j.parents + r * j.most;
            for (int64_t i = 0; i < count; i++) tokens[i] = d.tokens[r * d.most + i], parents[i] = i;
            j.chains[r] = j.counts[r] = count;
            if (!j.seconds) continue;
            for (int64_t at : j.seconds->likely(d.sure + r * d.most, count, r)) {
                tokens[j.counts[r]] = d.seconds[r * d.most + at];
                parents[j.counts[r]++] = at;
            }
        }
    }

    void judge() const {
        Nodes nodes = nodes_of(false);
        int64_t n = nodes.size(), vocab = j.head->out;
        bool is_read = j.exit_layer && !j.are_copies && !j.taps;  // with taps, all layers process all nodes
        Floats x(n * m.hidden), own(j.logits ? 0 : n * vocab), early(is_read ? n * m.hidden : 0);
        float* logits = j.logits ? j.logits : own.get();
        double before = now();
        if (is_read) read_on(early.get());
        double start = now();
        run(nodes, is_read ? j.exit_layer : 0, j.num_layers, early.get(), x.get(), j.taps);
        double between = now();
        Floats room(selfspec_linear_floats(j.head, n, threads(n)));
        selfspec_linear(j.head, x.get(), n, logits, nullptr, 0, room.get(), threads(n));
        double headed = now();
        walk(nodes, logits);
        settle();
        double *taken = j.taken, end = now();
        taken[0] = start - before, taken[1] = between - start, taken[2] = headed - between, taken[3] = end - headed;
    }
};

}  // namespace

extern "C" {

int64_t selfspec_round(const Model* m, const Drafting* d, const Judging* j) try {
    Round round(*m, *d, *j);
    if (j->exit_layer) round.draft();
    round.judge();
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}
}
