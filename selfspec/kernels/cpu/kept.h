// Keys and values as the cache keeps them: in float32, or in two bytes a number with a scale per block of a head, see
// `selfspec.kernels.rounding`; the last block of a head may be shorter. Reading them gives the same float32 numbers in either form.
#pragma once

#include <algorithm>
#include <cmath>

#include "product.h"

// Keys or values, those of a layer or of one token and head. Number: float or int16_t.
template <typename Number>
struct Kept {
    Number* numbers;
    uint16_t* scales;  // the upper halves of float32 numbers, which are powers of two; not read for float
};

template <typename Number>
static inline Kept<Number> keys_of(const Layer& layer) {
    return {static_cast<Number*>(layer.keys), layer.key_scales};
}

template <typename Number>
static inline Kept<Number> values_of(const Layer& layer) {
    return {static_cast<Number*>(layer.values), layer.value_scales};
}

// The tokens of a row: `count` new ones, which are written already, from `position` on.
struct Span {
    const int64_t* pages;
    int64_t position, first, count;  // first: its index in the packed call
};

template <typename Number>
static inline Kept<Number> slot(const Kept<Number>& all, const Shape& s, const Span& row, int64_t at, int64_t kv_head) {
    int64_t where = row.pages[at / s.page_size] * s.page_size + at % s.page_size, head = where * s.kv_heads + kv_head;
    return {all.numbers + head * s.head_dim, all.scales + head * blocks_of(s.head_dim)};
}

// What lies `tokens` after, in the same page.
template <typename Number>
static inline Kept<Number> after(const Kept<Number>& one, const Shape& s, int64_t tokens) {
    int64_t heads = tokens * s.kv_heads;
    return {one.numbers + heads * s.head_dim, one.scales + heads * blocks_of(s.head_dim)};
}

static inline Vec scale_at(const uint16_t* scale) {
    uint32_t bits = uint32_t(*scale) << 16;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return splat(number);
}

// Numbers from `from` + `more` on, a whole vector, of which `more` is constant and `from` begins a block unless all of
// the numbers that are read from there on are in one block.
static inline Vec read(const Kept<float>& one, int64_t from, int64_t more = 0) {
    return load(one.numbers + from + more);
}

static inline Vec read(const Kept<int16_t>& one, int64_t from, int64_t more = 0) {
    Shorts v;
    std::memcpy(&v, one.numbers + from + more, sizeof v);
    return floats(v) * scale_at(one.scales + from / BLOCK + more / BLOCK);
}

// The `count` numbers from `from` on, which are fewer than a vector holds, with zeros after them.
static inline Vec read_some(const Kept<float>& one, int64_t from, int count) {
    return load_some(one.numbers + from, count);
}

static inline Vec read_some(const Kept<int16_t>& one, int64_t from, int count) {
    Shorts v = {};
    std::memcpy(&v, one.numbers + from, sizeof(int16_t) * count);
    return floats(v) * scale_at(one.scales + from / BLOCK);
}

// Write a head of float32 numbers.
static inline void keep(const float* x, int64_t d, const Kept<float>& to) {
    std::memcpy(to.numbers, x, sizeof(float) * d);
}

static inline void keep(const float* x, int64_t d, const Kept<int16_t>& to) {
    constexpr int32_t INFINITE = 0x7f800000;
    for (int64_t from = 0; from < d; from += BLOCK) {
        int64_t count = std::min(BLOCK, d - from);
        int32_t bits[BLOCK] = {}, largest = 0;  // of magnitudes, which are in the order of the numbers
        std::memcpy(bits, x + from, sizeof(float) * count);
        for (int64_t i = 0; i < BLOCK; i++) largest = std::max(largest, bits[i] & 0x7fffffff);
        float most, scale, inverse;
        std::memcpy(&most, &largest, sizeof most);
        if (largest >= INFINITE || most < 1e-30f) {
            to.scales[from / BLOCK] = largest >= INFINITE ? 0x7fc0 : 0;  // NaN, or zero
            std::fill(to.numbers + from, to.numbers + from + count, int16_t(0));
            continue;
        }
        int exponent;
        std::frexp(most * 1.004f, &exponent);
        scale = std::ldexp(1.f, exponent - 15), inverse = std::ldexp(1.f, 15 - exponent);
        std::memcpy(bits, &scale, sizeof scale);
        to.scales[from / BLOCK] = uint16_t(bits[0] >> 16);
        for (int64_t i = 0; i < count; i++) {
            constexpr float magic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, to even ones in the middle
            to.numbers[from + i] = int16_t(int32_t(x[from + i] * inverse + magic - magic));
        }
    }
}
