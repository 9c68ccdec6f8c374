// Vectors of floats by the vector extensions of GCC and Clang, and the few functions of them that models need.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 12;  // floats per vector register; rows of a product whose sums fit the registers
#elif defined(__AVX2__)
constexpr int LANES = 8, ROWS = 6;
#else
constexpr int LANES = 4, ROWS = 6;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef int16_t Shorts __attribute__((vector_size(LANES * 2)));

constexpr int32_t UPPER = -(1 << 16);  // the upper half of a number's bits: a bfloat16 number

static inline Vec load(const void* from) {
    Vec v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

static inline void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

// The first `count` lanes, with zeros in the others: a whole vector may exceed the buffer.
static inline Vec load_some(const float* from, int count) {
#if defined(__AVX512F__)
    return (Vec)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), from);
#else
    Vec v = {};
    std::memcpy(&v, from, sizeof(float) * count);
    return v;
#endif
}

static inline void store_some(float* to, Vec v, int count) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(to, __mmask16((1u << count) - 1), (__m512)v);
#else
    std::memcpy(to, &v, sizeof(float) * count);
#endif
}

// Explicit on x86, where compilers convert the halves of a vector one after the other.
static inline Vec floats(Shorts v) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32((__m256i)v));
#elif defined(__AVX2__)
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32((__m128i)v));
#else
    return __builtin_convertvector(__builtin_convertvector(v, Ints), Vec);
#endif
}

// a * b + c, in one rounding if the processor supports it. Explicit, since compilers would contract only some loops,
// and the bits of a token's results would depend on the number of tokens.
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

static inline Vec splat(float x) { return x - Vec{}; }  // compilers simplify this to x; not so 0 + x, because of x = -0

// Keeps a vector that is used more than once in a register. On processors without broadcast from memory in a
// multiplication, each load counts.
static inline Vec held(Vec v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    asm("" : "+x"(v));
#endif
    return v;
}

// Forces the next load. With 16 registers, compilers would keep the loaded value and spill sums instead.
static inline void forget() {
#if defined(__AVX2__) && !defined(__AVX512F__)
    asm volatile("" ::: "memory");
#endif
}

// The larger one; the second one if either is NaN.
static inline Vec larger(Vec a, Vec b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_maskz_max_ps(__mmask16(-1), (__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

static inline float sum(Vec v) {
    float total = v[0];
    for (int i = 1; i < LANES; i++) total += v[i];
    return total;
}

constexpr int QUAD = 4;  // lanes that are permuted together, for any vector size

// A permutation of the lanes of two vectors; the lanes of `b` are numbered after those of `a`. of: the number of the lane
// that goes to a lane, a function without state, since permutations must be constant where the code is compiled.
template <class Of, int... I>
static inline Vec choose(Vec a, Vec b, Of of, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, of(I)...);
#else
    return __builtin_shuffle(a, b, Ints{of(I)...});
#endif
}

template <class Of>
static inline Vec choose(Vec a, Vec b, Of of) {
    return choose(a, b, of, std::make_integer_sequence<int, LANES>());
}

// Transpose rows and columns within every quad of lanes.
static inline void turn_quads(Vec (&rows)[QUAD]) {
    auto singles = [](int i) { return i % 2 * LANES + i / QUAD * QUAD + i % QUAD / 2; };  // a0 b0 a1 b1
    auto later_singles = [](int i) { return i % 2 * LANES + i / QUAD * QUAD + i % QUAD / 2 + 2; };
    auto pairs = [](int i) { return i % QUAD / 2 * LANES + i / QUAD * QUAD + i % 2; };  // a0 a1 b0 b1
    auto later_pairs = [](int i) { return i % QUAD / 2 * LANES + i / QUAD * QUAD + i % 2 + 2; };
    Vec a = choose(rows[0], rows[1], singles), b = choose(rows[0], rows[1], later_singles);
    Vec c = choose(rows[2], rows[3], singles), d = choose(rows[2], rows[3], later_singles);
    rows[0] = choose(a, c, pairs), rows[1] = choose(a, c, later_pairs);
    rows[2] = choose(b, d, pairs), rows[3] = choose(b, d, later_pairs);
}

// Copy number `which` of every quad to all its lanes.
template <int which>
static inline Vec repeat_in_quads(Vec v) {
    return choose(v, v, [](int i) { return i / QUAD * QUAD + which; });
}

// Sums of two neighbouring quads: those of `a`, then those of `b`.
static inline Vec add_neighbours(Vec a, Vec b) {
    Vec even = choose(a, b, [](int i) { return i / QUAD * 2 * QUAD + i % QUAD; });
    return even + choose(a, b, [](int i) { return i / QUAD * 2 * QUAD + i % QUAD + QUAD; });
}

// The sum of each row's quads, added in order.
static inline Vec add_quads(const Vec (&rows)[LANES / QUAD]) {
    if constexpr (LANES / QUAD == 1) return rows[0];
    if constexpr (LANES / QUAD == 2) return add_neighbours(rows[0], rows[1]);
    if constexpr (LANES / QUAD == 4)
        return add_neighbours(add_neighbours(rows[0], rows[1]), add_neighbours(rows[2], rows[3]));
}

// e^x with a relative error of about 1e-7, 0 below -87: x = n ln 2 + r, a polynomial of r (Cephes), and n in the
// exponent.
static inline Vec exponential(Vec x) {
    const Vec magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
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

// The approximation by tanh: x / 2 * (1 + tanh(u)) is x / (1 + e^(-2u)).
static inline Vec gelu_tanh(Vec x) {
    Vec u = 0.7978845608f * fma(0.044715f * x * x, x, x);  // sqrt(2 / pi) (x + 0.044715 x^3)
    return x / (exponential(-2.f * u) + 1.f);
}
