// The token a row takes from its logits, in one call: filters, noise, argmax, how sure that was, and what came second.
//
// The same as `selfspec.executors.pick` in torch: filters in transformers' order, and the noise of `kernels/gumbel.py`.
// The largest of s - log(E), where E = -log(u) of a uniform u, is the largest of exp(s) / E: that takes one logarithm
// of every token, and to single precision; the noise itself is made for the few that may have won.
#pragma once

#include "filters.h"
#include "model.h"
#include "noise.h"
#include "penalties.h"

struct Row {
    const float* logits;
    int64_t vocab, position;
    const int64_t* tokens;  // that the logits are of, ascending; null: all of a vocabulary
    // `arrivals` of the whole vocabulary at this position, shared by draft and target; a NaN first: not made yet; null:
    // not kept.
    float* kept = nullptr;
    const Prefix* prefix = nullptr;  // what penalties are for; null: there are none
};

struct Picked {
    int64_t best, second;  // where among the logits
    float sure;
};

// Floats of room that a row needs: scores, weights, and two whole numbers per token.
static inline int64_t pick_floats(int64_t vocab) { return 6 * filled_up(vocab); }

// The largest of filled-up numbers; NaN where one of them is none.
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

// The first place of a number that is the largest; NaN: of one that is none.
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

// Logits over temperature, filled up with -inf.
static void scale(const Row& row, float temperature, float* out) {
    int64_t i = 0, end = filled_up(row.vocab);
    bool is_one = temperature == 1;
    for (; i + LANES <= row.vocab; i += LANES)
        store(out + i, is_one ? load(row.logits + i) : load(row.logits + i) / temperature);
    for (; i < row.vocab; i++) out[i] = is_one ? row.logits[i] : row.logits[i] / temperature;
    for (; i < end; i++) out[i] = -INFINITY;
}

// e^(x - most) of filled-up numbers, and their sum.
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

// The winner among scores x, and what share it has; see above. Tokens: of each score, filled up; null: its place.
struct Contest {
    const float* x;
    int64_t count;
    const int64_t* tokens;
    uint64_t key;
    float* shares;
    float* kept;  // see `Row`

    // The place of the winner, -1 where none can be told for being all too far below `most`.
    int64_t winner(float most, float share) const {
        if (!(share > 1e-30f)) return -1;
        float least = share * std::exp(-(1e-4f + 5e-7f * std::fabs(most)));  // beyond what rounding may have changed
        int64_t best = -1;
        float top = -INFINITY;
        each_above(shares, filled_up(count), least, [&](int64_t i) {
            float score = x[i] + noise(key, tokens ? tokens[i] : i);
            if (best < 0 || score > top) best = i, top = score;
        });
        return best;
    }

    // Fills in the shares; returns their sum.
    double run(float most) const {
        double total = 0;
        float own[CHUNK];
        bool is_known = kept && !std::isnan(kept[0]);
        for (int64_t at = 0; at < filled_up(count); at += CHUNK) {
            float* waits = kept ? kept + at : own;
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
static Picked sampled(const Row& row, const How& how, float* x, float most, float* weights, int64_t* places,
                      int64_t* names, bool with_second) {
    int64_t n = filled_up(row.vocab), count = row.vocab;
    bool by_k = how.top_k > 0 && how.top_k < row.vocab, by_p = how.top_p < 1, by_min = how.min_p > 0;
    if (by_k) keep(x, nullptr, n, most, double(how.top_k), places);
    if (by_p) {
        double total = weigh(x, n, most, weights);
        keep(x, weights, n, most, double(how.top_p) * total, places);
    }
    const int64_t* tokens = row.tokens;
    bool some = by_k || by_p || by_min;
    if (some || tokens) {  // those that are left, moved together
        double low = by_min ? double(most) + std::log(double(how.min_p)) : -INFINITY;
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
    Contest contest{x, count, tokens, key_of(how.seed, row.position), weights, tokens ? nullptr : row.kept};
    double total = contest.run(most);
    int64_t best = contest.winner(most, largest(weights, filled_up(count)));
    Picked picked{best, 0, float(weights[best] / total)};
    if (with_second && count > 1) {
        x[best] = -INFINITY, weights[best] = 0;
        picked.second = contest.winner(most, largest(weights, filled_up(count)));
        if (picked.second < 0) {
            float next = largest(x, filled_up(count));
            if (next > -INFINITY) contest.run(next);
            picked.second = next > -INFINITY ? contest.winner(next, largest(weights, filled_up(count))) : 0;
        }
        if (tokens == names) picked.second = places[picked.second];
    }
    if (tokens == names) picked.best = places[best];
    return picked;
}

// The pick of one row; `room` is for `pick_floats` floats. NaN counts as the largest; among what is not finite there is
// no sampling, and no telling how sure it is.
static Picked pick_row(const Row& row, const How& how, float* room, bool with_sure, bool with_second) {
    int64_t n = filled_up(row.vocab);
    float *x = room, *weights = x + n;
    int64_t* places = reinterpret_cast<int64_t*>(weights + n);
    float temperature = how.temperature > 0 ? how.temperature : 1;
    scale(row, temperature, x);
    if (row.prefix) row.prefix->penalize(how, row.logits, temperature, x);
    float most = largest(x, n);
    bool is_finite = std::isfinite(most);
    if (how.temperature > 0 && is_finite) return sampled(row, how, x, most, weights, places, places + n, with_second);
    Picked picked{first_of(x, n, most), 0, NAN};
    if (with_sure && is_finite) picked.sure = float(1 / weigh(x, n, most, weights));
    if (with_second) {
        x[picked.best] = -INFINITY;
        picked.second = first_of(x, n, largest(x, n));
    }
    return picked;
}
