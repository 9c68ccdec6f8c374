// Picks a token from the logits of a row: filters, noise, argmax and confidence.
//
// `selfspec.executors.pick` does the same in torch, with filters in transformers' order and the noise of
// `kernels/gumbel.py`. The largest s - log(E), where E = -log(u) of a uniform u, is also the largest exp(s) / E. This
// takes one logarithm per token, in single precision. The exact noise is computed only for the few tokens that may have
// won.
#pragma once

#include "filters.h"
#include "grammars.h"
#include "model.h"
#include "noise.h"
#include "penalties.h"

struct Row {
    const float* logits;
    int64_t vocab, position;
    const int64_t* tokens;  // token ids of the logits, ascending; null: the whole vocabulary
    float* noise = nullptr;  // cache of `arrivals` at this position, NaN if not computed yet; or null
    const Prefix* prefix = nullptr;  // the tokens for penalties; null: no penalties
    const uint32_t* mask = nullptr;  // of a grammar, over the whole vocabulary; null: all tokens may follow
};

struct Picked {
    int64_t best;  // index of the logits
    float confidence;
};

// The working memory of a row in floats: scores, weights, and two integers per token.
static inline int64_t pick_floats(int64_t vocab) { return 6 * filled_up(vocab); }

// The largest of padded numbers; NaN if one of them is NaN.
static float largest(const float* x, int64_t n) {
    Vec most = splat(-INFINITY);
    Ints wrong = {};
    for (int64_t i = 0; i < n; i += LANES) {
        Vec one = load(x + i);
        most = larger(one, most);
        wrong |= one != one;
    }
    float top = most[0];
    for (int i = 0; i < LANES; i++) {
        if (wrong[i]) return NAN;
        top = most[i] > top ? most[i] : top;
    }
    return top;
}

// The index of the first largest number, or of the first NaN if there is one.
static int64_t first_of(const float* x, int64_t n, float value) {
    for (int64_t at = 0; at < n; at += CHUNK) {
        Ints any = {};
        for (int64_t i = at; i < at + CHUNK; i += LANES) any |= ~(load(x + i) < value);
        int32_t some = 0;
        for (int i = 0; i < LANES; i++) some |= any[i];
        for (int64_t i = at; some && i < at + CHUNK; i++)
            if (x[i] == value || x[i] != x[i]) return i;
    }
    return 0;
}

// Logits over temperature, padded with -inf.
static void scale(const Row& row, float temperature, float* out) {
    int64_t i = 0, end = filled_up(row.vocab);
    bool is_one = temperature == 1;
    for (; i + LANES <= row.vocab; i += LANES)
        store(out + i, is_one ? load(row.logits + i) : load(row.logits + i) / temperature);
    for (; i < row.vocab; i++) out[i] = is_one ? row.logits[i] : row.logits[i] / temperature;
    for (; i < end; i++) out[i] = -INFINITY;
}

// e^(x - most) of padded numbers, and their sum.
static double weigh(const float* x, int64_t n, float most, float* out) {
    double total = 0;
    for (int64_t at = 0; at < n; at += CHUNK) {
        Vec part = {};
        for (int64_t i = at; i < at + CHUNK; i += LANES) {
            Vec weight = exponential(load(x + i) - most);
            store(out + i, weight);
            part += weight;
        }
        total += sum(part);
    }
    return total;
}

// Finds the winner among scores x by the shares exp(s) / E. tokens: per score, padded; null: the index is the token.
struct Contest {
    const float* x;
    int64_t count;
    const int64_t* tokens;
    uint64_t key;
    float* shares;
    float* known;  // `noise` of the row

    // The index of the winner; -1 if all shares underflow.
    int64_t winner(float most, float share) const {
        if (!(share > 1e-30f)) return -1;
        // shares above it may have won, given rounding errors
        float least = share * std::exp(-(1e-4f + 5e-7f * std::fabs(most)));
        int64_t best = -1;
        float top = -INFINITY;
        each_above(shares, filled_up(count), least, [&](int64_t i) {
            float score = x[i] + noise(key, tokens ? tokens[i] : i);
            if (best < 0 || score > top) best = i, top = score;
        });
        return best;
    }

    // Compute the shares. Returns their sum.
    double run(float most) const {
        double total = 0;
        float own[CHUNK];
        bool is_known = known && !std::isnan(known[0]);
        for (int64_t at = 0; at < filled_up(count); at += CHUNK) {
            float* waits = known ? known + at : own;
            if (!is_known) arrivals(key, tokens, at, waits);
            Vec part = {};
            for (int64_t i = 0; i < CHUNK; i += LANES) {
                Vec share = exponential(load(x + at + i) - most) / load(waits + i);
                store(shares + at + i, share);
                part += share;
            }
            total += sum(part);
        }
        return total;
    }
};

// The pick among sampled scores x [vocab] whose largest is `most`.
static Picked sampled(const Row& row, const SamplingParams& params, float* x, float most, float* weights,
                      int64_t* places, int64_t* names) {
    int64_t n = filled_up(row.vocab), count = row.vocab;
    bool by_k = params.top_k > 0 && params.top_k < row.vocab, by_p = params.top_p < 1, by_min = params.min_p > 0;
    if (by_k) keep(x, nullptr, n, most, double(params.top_k), places);
    if (by_p) {
        double total = weigh(x, n, most, weights);
        keep(x, weights, n, most, double(params.top_p) * total, places);
    }
    const int64_t* tokens = row.tokens;
    bool some = by_k || by_p || by_min;
    if (some || tokens) {  // move the kept scores together
        double low = by_min ? double(most) + std::log(double(params.min_p)) : -INFINITY;
        float bound = float(low);
        if (by_min && !(double(bound) < low)) bound = std::nextafter(bound, -INFINITY);
        count = 0;
        each_above(x, n, bound, [&](int64_t i) {
            if (double(x[i]) < low) return;
            places[count] = i, names[count] = tokens ? tokens[i] : i;
            x[count++] = x[i];
        });
        for (int64_t i = count; i < filled_up(count); i++) x[i] = -INFINITY, names[i] = 0;
        tokens = names;
    }
    Contest contest{x, count, tokens, key_of(params.seed, row.position), weights, tokens ? nullptr : row.noise};
    double total = contest.run(most);
    int64_t best = contest.winner(most, largest(weights, filled_up(count)));
    float confidence = float(weights[best] / total);
    return {tokens == names ? places[best] : best, confidence};
}

// The pick of a row. `memory`: `pick_floats` floats. NaN counts as the largest. If scores are not finite, the argmax is
// picked without noise and without a confidence.
static Picked pick_row(const Row& row, const SamplingParams& params, float* memory, bool with_confidence) {
    int64_t n = filled_up(row.vocab);
    float *x = memory, *weights = x + n;
    int64_t* places = reinterpret_cast<int64_t*>(weights + n);
    float temperature = params.temperature > 0 ? params.temperature : 1;
    scale(row, temperature, x);
    if (row.prefix) row.prefix->penalize(params, row.logits, temperature, x);
    if (row.mask) exclude(row.mask, row.vocab, x);
    float most = largest(x, n);
    bool is_finite = std::isfinite(most);
    if (params.temperature > 0 && is_finite) return sampled(row, params, x, most, weights, places, places + n);
    Picked picked{first_of(x, n, most), NAN};
    if (with_confidence && is_finite) picked.confidence = float(1 / weigh(x, n, most, weights));
    return picked;
}
