// Vectors of floats as GCC and Clang know them on any machine, and the few functions that models need of them.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 12;  // floats of a vector register; rows of a product that fit the registers
#elif defined(__AVX2__)
constexpr int LANES = 8, ROWS = 6;
#else
constexpr int LANES = 4, ROWS = 6;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));

constexpr int32_t UPPER = -(1 << 16);  // a number's upper half: all that bfloat16 has of it

static inline Vec load(const void* from) {
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

// a * b + c, in one rounding where the processor has that: left to the compiler, it would be so in some loops only, and
// a token's bits would depend on how many there are.
static inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

static inline Vec splat(float x) { return x - Vec{}; }  // which compilers know to be x; 0 + x is not, if x is -0

static inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

static inline float sum(Vec v) {
    float total = v[0];
    for (int i = 1; i < LANES; i++) total += v[i];
    return total;
}

// Where the lanes of two rows go when every other group of `step` lanes changes places.
struct Exchange {
    Ints low, high;
    explicit Exchange(int step) {
        for (int i = 0; i < LANES; i++) {
            low[i] = i & step ? LANES + i - step : i;
            high[i] = i & step ? LANES + i : i + step;
        }
    }
};

// Rows become columns.
static inline void transpose(Vec (&rows)[LANES]) {
    static const Exchange exchanges[] = {Exchange(1), Exchange(2), Exchange(4), Exchange(8)};
#pragma GCC unroll 4
    for (int step = 1, stage = 0; step < LANES; step *= 2, stage++) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i & step) continue;
            Vec a = rows[i], b = rows[i + step];
#if defined(__clang__)
            for (int j = 0; j < LANES; j++) {
                rows[i][j] = j & step ? b[j - step] : a[j];
                rows[i + step][j] = j & step ? b[j] : a[j + step];
            }
#else
            rows[i] = __builtin_shuffle(a, b, exchanges[stage].low);
            rows[i + step] = __builtin_shuffle(a, b, exchanges[stage].high);
#endif
        }
    }
}

// e^x to about 1e-7 of it, 0 below -87: x = n ln 2 + r, a polynomial of r (Cephes), and n into the exponent.
static inline Vec exponential(Vec x) {
    const Vec magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to a whole number
    Vec bounded = larger(x, splat(-87.f));
    bounded = bounded < 88.f ? bounded : splat(88.f);
    Vec n = fma(bounded, splat(1.44269504f), magic) - magic;
    Vec r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), bounded));
    Vec p = splat(1.9875691500e-4f);
    for (float term : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = fma(p, r, splat(term));
    p = fma(p, r * r, r) + 1.f;
    Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
    Vec scale;
    std::memcpy(&scale, &exponent, sizeof scale);
    return x < -87.f ? Vec{} : p * scale;
}

static inline Vec silu(Vec x) { return x / (exponential(-x) + 1.f); }
