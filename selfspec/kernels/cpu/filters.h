// Which scores top-k and top-p keep, without sorting more than a few of them.
#pragma once

#include <algorithm>

#include "noise.h"

constexpr int64_t SORTED = 64;  // tokens at most that are sorted rather than parted once more

// Calls `f` with every place, in order, whose number is above a bound; most chunks have none.
template <class F>
static void each_above(const float* x, int64_t n, float bound, F f) {
    for (int64_t at = 0; at < n; at += CHUNK) {
        Ints any = {};
        for (int64_t i = at; i < at + CHUNK; i += LANES) any |= load(x + i) > bound;
        int32_t some = 0;
        for (int i = 0; i < LANES; i++) some |= any[i];
        if (!some) continue;
        for (int64_t i = at; i < at + CHUNK; i++)
            if (x[i] > bound) f(i);
    }
}

// How many numbers are above a bound, and what they weigh: their weights, or one each.
static double above(const float* x, const float* weights, int64_t n, float bound, int64_t& count) {
    double total = 0;
    count = 0;
    for (int64_t at = 0; at < n; at += CHUNK) {
        Vec part = {}, ones = {}, zero = {};
        for (int64_t i = at; i < at + CHUNK; i += LANES) {
            Ints is_above = load(x + i) > bound;
            ones += is_above ? splat(1) : zero;
            if (weights) part += is_above ? load(weights + i) : zero;
        }
        float number = sum(ones);
        count += int64_t(number);
        total += weights ? sum(part) : number;
    }
    return total;
}

// Keep the largest numbers until they weigh `wanted`, and make the others -inf. Of equals the last are kept with
// weights, as a sort from the smallest on leaves them, and all without.
static void keep(float* x, float* weights, int64_t n, float most, double wanted, int64_t* order) {
    float step = std::max(1.f, std::fabs(most) * 1e-6f);
    float low = -INFINITY, high = most;  // what is above `high` is kept, and no more than what is above `low`
    double before = 0;
    for (int64_t count_low = n, count_high = 0, count; count_low - count_high > SORTED; step *= 4) {
        float middle = low == -INFINITY ? most - step : low + (high - low) / 2;
        if (!(middle > low && middle < high)) break;
        double weight = above(x, weights, n, middle, count);
        if (weight >= wanted)
            low = middle, count_low = count;
        else
            high = middle, count_high = count, before = weight;
    }
    int64_t inside = 0, last = -1;
    each_above(x, n, low, [&](int64_t i) {
        if (x[i] <= high) order[inside++] = i;
    });
    std::sort(order, order + inside, [&](int64_t a, int64_t b) { return x[a] != x[b] ? x[a] > x[b] : a > b; });
    for (int64_t i = 0; i < inside && (before < wanted || last < 0); i++) {  // one at least, however little is wanted
        last = order[i];
        before += weights ? weights[last] : 1;
    }
    if (last < 0) return;
    float bound = x[last];
    for (int64_t at = 0; at < n; at += LANES) {
        Vec one = load(x + at), never = splat(-INFINITY), zero = {};
        Ints kept = one >= bound;
        store(x + at, kept ? one : never);
        if (weights) store(weights + at, kept ? load(weights + at) : zero);
    }
    for (int64_t i = 0; weights && i < last; i++)
        if (x[i] == bound) x[i] = -INFINITY;
}
