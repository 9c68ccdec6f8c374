// Which scores top-k and top-p keep, without sorting more than a few of them.
#pragma once

#include <algorithm>

#include "noise.h"

constexpr int64_t SORTED = 64;  // maximum number of tokens to sort; more are partitioned again

// Call `f` with every index whose number is above a bound, in order. Most chunks contain none.
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

// The count of numbers above a bound, and their total weight: the sum of their weights, or 1 each.
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

// Keep the largest numbers up to a total weight of `wanted`, and set the others to -inf. Among equal numbers: with
// weights, the last ones are kept, as after an ascending sort; without weights, all are kept.
static void keep(float* x, float* weights, int64_t n, float most, double wanted, int64_t* order) {
    float step = std::max(1.f, std::fabs(most) * 1e-6f);
    float low = -INFINITY, high = most;  // numbers above `high` are kept, and none at or below `low`
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
    for (int64_t i = 0; i < inside && (before < wanted || last < 0); i++) {  // at least one is kept
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
