// The noise of `kernels/gumbel.py`: SplitMix64 as a hash of seed, position and token (Steele, Lea, Flood 2014).
#pragma once

#include <cmath>

#include "vector.h"

constexpr int64_t CHUNK = 256;  // tokens that are summed in single precision; buffers are padded to a multiple of it

static inline int64_t filled_up(int64_t n) { return (n + CHUNK - 1) / CHUNK * CHUNK; }

static inline uint64_t mixed(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

constexpr uint64_t STRIDE = 0x9E3779B97F4A7C15;

static inline uint64_t key_of(int64_t seed, int64_t position) {
    return mixed(mixed(uint64_t(seed) * STRIDE + STRIDE) + uint64_t(position) * STRIDE);
}

static inline uint64_t bits_of(uint64_t key, int64_t token) { return mixed(key + uint64_t(token + 1) * STRIDE) >> 12; }

static float noise(uint64_t key, int64_t token) {
    return float(-std::log(-std::log((double(bits_of(key, token)) + 0.5) * 0x1p-52)));
}

// E = -log(u) of CHUNK tokens with a relative error of about 1e-6, from u and from 1 - u, which is more precise near u
// = 1.
static void arrivals(uint64_t key, const int64_t* tokens, int64_t first, float* out) {
    float uniform[CHUNK], rest[CHUNK];
    for (int64_t i = 0; i < CHUNK; i++) {
        uint64_t bits = bits_of(key, tokens ? tokens[first + i] : first + i) | 0x3FF0000000000000;
        double from_one;  // 1 + bits / 2^52
        std::memcpy(&from_one, &bits, sizeof bits);
        double u = from_one - (1 - 0x1p-53);
        uniform[i] = float(u);
        rest[i] = float(1 - u);
    }
    for (int64_t i = 0; i < CHUNK; i += LANES) {
        Vec u = load(uniform + i), m;
        Ints bits;
        std::memcpy(&bits, &u, sizeof u);
        Ints exponent = (bits - 0x3F400000) >> 23, mantissa = bits - (exponent << 23);  // mantissa in [0.75, 1.5)
        std::memcpy(&m, &mantissa, sizeof m);
        Vec above = exponent == 0 ? -load(rest + i) : m - 1.f;
        Vec f = above / (above + 2.f), square = f * f, p = splat(1.f / 9);  // log(m) = 2 artanh(f)
        for (float term : {1.f / 7, 1.f / 5, 1.f / 3}) p = fma(p, square, splat(term));
        Vec log_m = fma(f + f, p * square, f + f);
        store(out + i, -fma(__builtin_convertvector(exponent, Vec), splat(0.69314718f), log_m));
    }
}
