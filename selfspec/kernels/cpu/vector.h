// Vectors of floats as GCC and Clang know them on any machine, and the few functions that models need of them.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 12;  // floats of a vector register; rows of a product that fit the registers
#elif defined(__AVX2__)
constexpr int LANES = 8, ROWS = 6;
#else
constexpr int LANES = 4, ROWS = 6;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));

static inline Vec load(const float* from) {
    Vec v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

static inline void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

// The first `count` lanes only, where a whole vector would reach beyond what is ours.
static inline Vec load_some(const float* from, int count) {
    Vec v = {};
    std::memcpy(&v, from, sizeof(float) * count);
    return v;
}

static inline void store_some(float* to, Vec v, int count) { std::memcpy(to, &v, sizeof(float) * count); }

static inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

static inline float sum(Vec v) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}

// e^x to about 1e-7 of it, 0 below -87: x = n ln 2 + r, a polynomial of r (Cephes), and n into the exponent.
static inline Vec exponential(Vec x) {
    const Vec magic = Vec{} + 12582912.f;  // 1.5 * 2^23: adding it rounds to a whole number
    Vec bounded = larger(x, Vec{} - 87.f);
    bounded = bounded < 88.f ? bounded : Vec{} + 88.f;
    Vec shifted = bounded * 1.44269504f + magic, n = shifted - magic;
    Vec r = bounded - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.f;
    Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
    Vec scale;
    std::memcpy(&scale, &exponent, sizeof scale);
    return x < -87.f ? Vec{} : p * scale;
}

static inline Vec silu(Vec x) { return x / (exponential(-x) + 1.f); }
