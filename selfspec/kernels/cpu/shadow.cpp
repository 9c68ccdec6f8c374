// Shadow picks at verified positions, from the logits of a few tokens: see `selfspec/executors/shadow.py`.

#include "norm.h"
#include "pick.h"
#include "team.h"

struct ProbeArgs {
    int64_t num_layers, num_positions, hidden, vocab, num_likely, num_others;
    const RowTable* head;      // [vocab, hidden]
    const float *bias, *norm;  // [vocab] or null, [hidden]
    const int64_t* others;            // [num_others]: the sample of the vocabulary
    const float *states, *target;     // [num_layers, num_positions, hidden]; the target's logits [num_positions, vocab]
    const int64_t* judged;            // [num_positions]: the target's picks
    const SamplingParams* params;
    const int64_t* positions;  // index in its row's content of the token picked at each position
    bool* hits;                // out: [num_layers, num_positions]; confidences of the same shape
    float* confidences;
    float eps;
    // Penalties, or null: [num_positions, vocab] whether a token occurs before, and the number added to its logit. They
    // are applied to the target's logits already.
    const bool* seen;
    const float* penalty_bias;
};

template <int half = LANES / 2>
static inline float total(Vec v) {
    v += choose(v, v, [](int i) { return i ^ half; });
    if constexpr (half > 1) return total<half / 2>(v);
    return v[0];
}

// A token's weights times R rows of x, each into a row of `out`.
template <int R>
static void multiply(const float* weight, const float* x, int64_t size, float* out, int64_t apart) {
    Vec sums[R] = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        Vec one = load(weight + i);
        for (int r = 0; r < R; r++) sums[r] = fma(one, load(x + r * size + i), sums[r]);
    }
    for (int r = 0; r < R; r++) {
        float product = total(sums[r]);
        for (int64_t j = i; j < size; j++) product += weight[j] * x[r * size + j];
        out[r * apart] = product;
    }
}

// The most probable tokens without the pick, in any order; returns their number. `out` has twice the capacity.
static int64_t likeliest(const float* logits, int64_t vocab, int64_t except, int64_t wanted, int64_t* out) {
    int64_t count = 0;
    float bound = -INFINITY;
    auto cut = [&] {
        auto is_likelier = [&](int64_t a, int64_t b) { return logits[a] > logits[b]; };
        std::nth_element(out, out + wanted - 1, out + count, is_likelier);
        bound = logits[out[wanted - 1]], count = wanted;
    };
    auto consider = [&](int64_t i) {
        if (!(logits[i] > bound) || i == except) return;
        out[count++] = i;
        if (count == 2 * wanted) cut();
    };
    int64_t i = 0;
    for (; wanted && i + LANES <= vocab; i += LANES) {
        Ints is_likelier = load(logits + i) > bound;
        int32_t some = 0;
        for (int lane = 0; lane < LANES; lane++) some |= is_likelier[lane];
        for (int64_t j = i; some && j < i + LANES; j++) consider(j);
    }
    for (; wanted && i < vocab; i++) consider(i);
    if (wanted && count > wanted) cut();
    return count;
}

// Computes the shadow picks of one position after another, in its own memory.
class Probe {
    const ProbeArgs& all;
    int64_t most;  // maximum number of tokens, padded
    int64_t* tokens;
    float *normed, *logits, *stands_for;  // [layers, hidden], [layers, most], [most]
    float *row, *memory;                    // [hidden], `pick_floats`

    static int64_t most_of(const ProbeArgs& all) {
        return filled_up(1 + all.num_likely + std::max(all.num_likely, all.num_others));
    }

    void fetch(int64_t token) const {
        if (!all.head->floats) return;
        const float* weight = all.head->floats + token * all.hidden;
        for (int64_t i = 0; i < all.hidden; i += 16) __builtin_prefetch(weight + i);
    }

    // Compute the logits of one token for all layers.
    void multiply_all(int64_t token, int64_t column) {
        const float *weight = selfspec_row(all.head, token, all.hidden, row), *x = normed;
        float* out = logits + column;
        int64_t k = 0;
        for (; k + 8 <= all.num_layers; k += 8)
            multiply<8>(weight, x + k * all.hidden, all.hidden, out + k * most, most);
        for (; k + 3 <= all.num_layers; k += 3)
            multiply<3>(weight, x + k * all.hidden, all.hidden, out + k * most, most);
        for (; k < all.num_layers; k++)
            multiply<1>(weight, x + k * all.hidden, all.hidden, out + k * most, most);
        for (k = 0; all.bias && k < all.num_layers; k++) out[k * most] += all.bias[token];
    }

    // Apply the penalties to the logits of all layers.
    void penalize(int64_t n, int64_t count) {
        const bool* seen = all.seen + n * all.vocab;
        const float *added = all.penalty_bias + n * all.vocab, repetition = all.params[n].repetition;
        for (int64_t k = 0; k < all.num_layers; k++)
            for (int64_t i = 0; i < count; i++) {
                float& logit = logits[k * most + i];
                if (seen[tokens[i]]) logit = logit < 0 ? logit * repetition : logit / repetition;
                logit += added[tokens[i]];
            }
    }

    // Whether a layer's first logit is its largest, and the confidence.
    bool is_first(float* own, int64_t count, float* confidence) const {
        int64_t end = filled_up(count);
        for (int64_t i = count; i < end; i++) own[i] = -INFINITY;
        float best = largest(own, end);
        Vec sums = {};
        for (int64_t i = 0; i < count; i += LANES)
            sums = fma(exponential(load(own + i) - best), load(stands_for + i), sums);
        *confidence = std::isfinite(best) ? 1 / total(sums) : NAN;
        return own[0] >= best;
    }

   public:
    // The memory per thread in int64 words.
    static int64_t words(const ProbeArgs& all) {
        int64_t most = most_of(all);
        int64_t floats = all.num_layers * (all.hidden + most) + most + all.hidden + pick_floats(most);
        return most + (floats + 1) / 2;
    }

    Probe(const ProbeArgs& all, int64_t* own) : all(all), most(most_of(all)), tokens(own) {
        normed = reinterpret_cast<float*>(own + most), logits = normed + all.num_layers * all.hidden;
        stands_for = logits + all.num_layers * most, row = stands_for + most;
        memory = row + all.hidden;
    }

    void run(int64_t n) {
        tokens[0] = all.judged[n];
        const float* target = all.target + n * all.vocab;
        int64_t num_top = 1 + likeliest(target, all.vocab, tokens[0], all.num_likely, tokens + 1);
        std::copy(all.others, all.others + all.num_others, tokens + num_top);
        int64_t count = num_top + all.num_others, num_twice = 0;
        for (int64_t k = 0; k < all.num_layers; k++)
            norm(all.states + (k * all.num_positions + n) * all.hidden, all.norm, all.eps, all.hidden,
                 normed + k * all.hidden);
        for (int64_t i = 0; i < count; i++) {
            if (i + 1 < count) fetch(tokens[i + 1]);
            int64_t* top_end = tokens + num_top;
            if (i >= num_top && std::find(tokens, top_end, tokens[i]) != top_end) {
                num_twice++;
                for (int64_t k = 0; k < all.num_layers; k++) logits[k * most + i] = -INFINITY;
            } else {
                multiply_all(tokens[i], i);
            }
        }
        float unseen = float(all.vocab - num_top) / float(std::max<int64_t>(all.num_others - num_twice, 1));
        std::fill_n(stands_for, num_top, 1.f);
        std::fill_n(stands_for + num_top, all.num_others, std::max(unseen, 1.f));
        std::fill(stands_for + count, stands_for + most, 0.f);
        const SamplingParams& params = all.params[n];
        if (all.seen) penalize(n, count);
        for (int64_t k = 0; k < all.num_layers; k++) {
            float* own = logits + k * most;
            int64_t at = k * all.num_positions + n;
            if (params.temperature > 0) {
                Picked pick = pick_row({own, count, all.positions[n], tokens}, params, memory, true);
                all.hits[at] = pick.best == 0, all.confidences[at] = pick.confidence;
            } else {
                all.hits[at] = is_first(own, count, all.confidences + at);
            }
        }
    }
};

extern "C" {

// The memory that each thread needs, in int64 words.
int64_t selfspec_shadow_words(const ProbeArgs* all) { return Probe::words(*all); }

void selfspec_shadow(const ProbeArgs* all, int64_t* memory, int64_t num_threads) {
    Team::run(num_threads, [&] {
        Probe probe(*all, memory + thread_number() * Probe::words(*all));
        Team::share(all->num_positions, [&](int64_t n) { probe.run(n); });
    });
}
}
