// RMS norm of one row.
#pragma once

#include <cmath>

#include "vector.h"

static void norm(const float* x, const float* weight, float eps, int64_t size, float* out) {
    Vec squares = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    float total = sum(squares);
    for (; i < size; i++) total += x[i] * x[i];
    float factor = 1.f / std::sqrt(total / size + eps);
    for (i = 0; i + LANES <= size; i += LANES) store(out + i, load(x + i) * factor * load(weight + i));
    for (; i < size; i++) out[i] = x[i] * factor * weight[i];
}

// out += x
static void add_to(float* out, const float* x, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(out + i, load(out + i) + load(x + i));
    for (; i < size; i++) out[i] += x[i];
}
