// Packs weights in the order and format that products read: see product.h.
#pragma once

#include <algorithm>
#include <cmath>

#include "amx.h"
#include "blocks.h"
#include "team.h"

// Places of a weight's outputs among the packed outputs: from `offset` on, with a gap after every `lanes` outputs up to
// a multiple of `stride`. The gaps hold the other half of a gated product.
struct Places {
    int64_t offset, lanes, stride;
};

static inline int64_t place_of(int64_t output, const Places& to) {
    return to.offset + output / to.lanes * to.stride + output % to.lanes;
}

// A block of an output, rounded to 4 bits: its integers with their offset, and its scale.
struct OneBlock {
    uint8_t numbers[BLOCK], scales[2];
};

// Words of a file's block: four integers of 4, 5, 6 or 8 bits in the bytes of a word.
struct Words {
    uint32_t four[WORDS], more[2];  // the lower 4 bits, or all 8, of inputs 4 k to 4 k + 3; further bits in packed order
    uint8_t scales[4], super[4];
};

static inline uint32_t word_at(const uint8_t* from) {
    uint32_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

// Block number `block` of an output's blocks in a file, as ggml defines them.
template <int64_t KIND>
static inline Words file_words(const uint8_t* blocks, int64_t block) {
    constexpr uint32_t FOUR = 0x0f0f0f0f;
    Words made = {};
    constexpr BlockShape shape = shape_of(KIND);
    if constexpr (!shape.super && shape.bits < 8) {
        constexpr int64_t START = shape.scales + (shape.bits == 5 ? 4 : 0);
        const uint8_t* from = blocks + block * (START + 16);
        for (int64_t k = 0; k < 4; k++) {
            uint32_t both = word_at(from + START + 4 * k);
            made.four[k] = both & FOUR, made.four[4 + k] = both >> 4 & FOUR;
        }
        std::memcpy(made.scales, from, shape.scales);
        if constexpr (shape.bits == 5) {
            uint32_t bits = word_at(from + shape.scales);
            // four bits, one in each byte
            auto spread = [bits](int64_t k) { return (bits >> 4 * k & 15) * 0x00204081u & 0x01010101u; };
            for (int64_t j = 0; j < 4; j++) made.more[0] |= spread(2 * j) << j | spread(2 * j + 1) << (4 + j);
        }
    } else if constexpr (KIND == Q8_0) {
        const uint8_t* from = blocks + block * 34;
        for (int64_t k = 0; k < WORDS; k++) made.four[k] = word_at(from + 2 + 4 * k) ^ 0x80808080u;
        std::memcpy(made.scales, from, 2);
    } else if constexpr (shape.super == 4) {  // Q4_K and Q5_K: two scales of all, 12 bytes of scales, 32 of fifth bits
        constexpr int64_t START = shape.bits == 5 ? 48 : 16;
        const uint8_t *from = blocks + block / PER_SUPER * (START + 128), *packed = from + 4;
        int64_t b = block % PER_SUPER;
        const uint8_t* four = from + START + b / 2 * BLOCK;
        std::memcpy(made.super, from, 4);
        made.scales[0] = b < 4 ? packed[b] & 63 : (packed[b + 4] & 15) | packed[b - 4] >> 6 << 4;
        made.scales[1] = b < 4 ? packed[b + 4] & 63 : packed[b + 4] >> 4 | packed[b] >> 6 << 4;
        for (int64_t k = 0; k < WORDS; k++) {
            made.four[k] = word_at(four + 4 * k) >> b % 2 * 4 & FOUR;
            if constexpr (shape.bits == 5)
                made.more[0] |= (word_at(from + 16 + 4 * k) >> b & 0x01010101u) << (k % 2 * 4 + k / 2);
        }
    } else {  // Q6_K: 128 bytes of four bits, 64 of two, 16 scales and a scale of all
        const uint8_t* from = blocks + block / PER_SUPER * 210;
        int64_t b = block % PER_SUPER, half = b / 4, part = b % 4;
        const uint8_t *four = from + half * 64 + part % 2 * BLOCK, *two = from + 128 + half * BLOCK;
        std::memcpy(made.super, from + 208, 2);
        std::memcpy(made.scales, from + 192 + 2 * b, 2);
        for (int64_t k = 0; k < WORDS; k++) {
            made.four[k] = word_at(four + 4 * k) >> part / 2 * 4 & FOUR;
            made.more[k % 2] |= (word_at(two + 4 * k) >> 2 * part & 0x03030303u) << k / 2 * 2;
        }
    }
    return made;
}

static inline void put_word(char* to, uint32_t word) { std::memcpy(to, &word, sizeof word); }

// Write a block of an output to its place in a panel.
template <int64_t KIND>
static inline void put_words(const Words& from, char* panel, int64_t block, int64_t output) {
    constexpr BlockShape shape = shape_of(KIND);
    char* super = panel + PANEL * (block / PER_SUPER) * (PER_SUPER * shape.bytes() + shape.super);
    char *own = super + PANEL * (shape.super + block % PER_SUPER * shape.bytes()), *lane = own + output * 4;
    constexpr int64_t ROW = PANEL * 4, WIDE = shape.super ? 1 : 2;  // WIDE: bytes of a scale
    if constexpr (shape.bits == 8) {
        for (int64_t k = 0; k < WORDS; k++) put_word(lane + k * ROW, from.four[k]);
    } else {
        for (int64_t j = 0; j < 4; j++) put_word(lane + j * ROW, from.four[2 * j] | from.four[2 * j + 1] << 4);
        if constexpr (shape.bits > 4) put_word(lane + 4 * ROW, from.more[0]);
        if constexpr (shape.bits > 5) put_word(lane + 5 * ROW, from.more[1]);
    }
    char* scales = own + PANEL * shape.numbers();
    for (int64_t i = 0; i < shape.scales; i++) scales[(i / WIDE * PANEL + output) * WIDE + i % WIDE] = char(from.scales[i]);
    for (int64_t i = 0; i < shape.super; i++) super[(i / 2 * PANEL + output) * 2 + i % 2] = char(from.super[i]);
}

// Pack a panel from the rows of its outputs in a file; null: outputs of another weight, which are left as they are.
template <int64_t KIND>
static void pack_panel(const uint8_t* const* rows, int64_t blocks, char* panel) {
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t o = 0; o < PANEL; o++)
            if (rows[o]) put_words<KIND>(file_words<KIND>(rows[o], b), panel, b, o);
}

static void pack_panel(int64_t kind, const uint8_t* const* rows, int64_t blocks, char* panel) {
    switch (kind) {
        case Q4_0: return pack_panel<Q4_0>(rows, blocks, panel);
        case Q4_1: return pack_panel<Q4_1>(rows, blocks, panel);
        case Q5_0: return pack_panel<Q5_0>(rows, blocks, panel);
        case Q5_1: return pack_panel<Q5_1>(rows, blocks, panel);
        case Q8_0: return pack_panel<Q8_0>(rows, blocks, panel);
        case Q4_K: return pack_panel<Q4_K>(rows, blocks, panel);
        case Q5_K: return pack_panel<Q5_K>(rows, blocks, panel);
        default: return pack_panel<Q6_K>(rows, blocks, panel);
    }
}

// The scale with which integers from -8 to 7 represent a block's numbers with the least squared error, among some
// candidates.
static float best_scale(const float* block) {
    constexpr float MAGIC = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
    float largest = 0, best = 0, least = INFINITY;
    for (int64_t k = 0; k < BLOCK; k++)
        if (std::fabs(block[k]) > std::fabs(largest)) largest = block[k];
    for (int step = 0; largest && step < 8; step++) {
        float share = 1.f - 0.1f * float(step / 2);
        // symmetric, or with the sign that maps the largest to -8
        float scale = step % 2 ? std::fabs(largest) * share / 7.f : -largest * share / 8.f;
        float inverse = 1.f / scale, error = 0;
        for (int64_t k = 0; k < BLOCK; k++) {
            float whole = std::min(std::max(block[k] * inverse + MAGIC - MAGIC, -8.f), 7.f);
            error += (block[k] - whole * scale) * (block[k] - whole * scale);
        }
        if (error < least) least = error, best = scale;
    }
    return best;
}

// The bits of the nearest half-precision number; numbers beyond its range become its largest.
static uint16_t half_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    uint32_t sign = bits >> 16 & 0x8000;
    float size = std::fabs(x);
    if (!(size < 65504.f)) return uint16_t(sign | 0x7bff);
    if (size < 0x1p-14f) return uint16_t(sign | uint32_t(std::lrint(size * 0x1p24f)));
    bits = (bits & 0x7fffffff) + 0xfff + (bits >> 13 & 1);
    return uint16_t(sign | std::min<uint32_t>((bits >> 13) - (112 << 10), 0x7bff));
}

// Up to BLOCK floats, rounded to 4 bits for drafts.
static OneBlock rounded_block(const float* from, int64_t count) {
    OneBlock made = {};
    float numbers[BLOCK] = {};
    std::memcpy(numbers, from, sizeof(float) * count);
    uint16_t half = half_bits(best_scale(numbers));
    float scale = (half & 0x8000 ? -1.f : 1.f) *
                  std::ldexp(float((half & 0x3ff) + (half & 0x7c00 ? 0x400 : 0)), std::max(half >> 10 & 31, 1) - 25);
    std::memcpy(made.scales, &half, sizeof half);
    for (int64_t k = 0; k < BLOCK; k++) {
        long whole = scale ? std::lrint(numbers[k] / scale) : 0;
        made.numbers[k] = uint8_t(8 + std::min(std::max(whole, -8l), 7l));
    }
    return made;
}

// A checksum of `size` bytes that depends on the value and place of every word.
static uint64_t checksum(const char* words, int64_t size) {
    typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
    // independent chains, since a multiplication takes several cycles
    constexpr int64_t ABREAST = 8, bytes = sizeof(Words);
    Words mixed[ABREAST] = {};
    auto take = [&](const char* from, int64_t size, int64_t which) {
        Words some = {};
        std::memcpy(&some, from, size);
        // Rotate, since otherwise changes of the highest bits (signs) of two words would cancel.
        mixed[which] = ((mixed[which] << 7 | mixed[which] >> 25) ^ some) * 0x9e3779b1u;  // 2^32 over the golden ratio
    };
    int64_t at = 0;
    for (; at + ABREAST * bytes <= size; at += ABREAST * bytes)
#pragma GCC unroll 8
        for (int64_t i = 0; i < ABREAST; i++) take(words + at + i * bytes, bytes, i);
    for (; at < size; at += bytes) take(words + at, std::min(bytes, size - at), 0);
    uint64_t all = size;
    for (const Words& one : mixed)
        for (int i = 0; i < LANES; i++) all = ((all << 13 | all >> 51) ^ one[i]) * 0x9e3779b97f4a7c15u;
    return all;
}

extern "C" {

// Checksums of n ranges of bytes.
void selfspec_checksums(const char* const* words, const int64_t* sizes, int64_t n, uint64_t* out, int64_t num_threads) {
    Team::deal(n, num_threads, [&](int64_t i) { out[i] = checksum(words[i], sizes[i]); });
}

int64_t selfspec_panel() { return PANEL; }

// The smallest lossless format. `rounds`: tokens may be rounded to bfloat16.
int64_t selfspec_smallest(int64_t rounds) {
    static const bool tiles = allow_tiles();
#if defined(__AVX512BF16__)
    if (rounds && !tiles) return PAIRS;
#endif
    return tiles ? AMX : HALF;
}

// The size of a packed panel of a format, in bytes.
int64_t selfspec_panel_bytes(int64_t kind, int64_t in) { return panel_bytes(kind, in); }

// Whether bfloat16 represents every one of `count` weights exactly.
int64_t selfspec_fits_half(const uint32_t* weights, int64_t count) {
    constexpr int64_t BLOCK = 4096;  // the search ends after the first block that has another weight
    for (int64_t at = 0; at < count; at += BLOCK) {
        int64_t stop = count - at < BLOCK ? count : at + BLOCK;
        uint32_t lower = 0;
        for (int64_t i = at; i < stop; i++) lower |= weights[i];
        if (lower & 0xffff) return 0;
    }
    return 1;
}

// Pack a weight's rows [out, in]; the last arguments are the fields of `Places`.
void selfspec_pack(const uint32_t* weight, int64_t out, const Product* p, int64_t offset, int64_t lanes, int64_t stride,
                   int64_t num_threads) {
    Places places = {offset, lanes, stride};
    if (p->kind == INT4) {
        Team::for_each(out, num_threads, [&](int64_t o) {
            int64_t at = place_of(o, places);
            char* panel = const_cast<char*>(p->packed) + panel_at(*p, at / PANEL);
            const float* row = reinterpret_cast<const float*>(weight) + o * p->in;
            for (int64_t b = 0; b < blocks_of(p->in); b++) {
                OneBlock rounded = rounded_block(row + b * BLOCK, std::min(BLOCK, p->in - b * BLOCK));
                Words words = {};
                std::memcpy(words.four, rounded.numbers, sizeof rounded.numbers);
                std::memcpy(words.scales, rounded.scales, sizeof rounded.scales);
                put_words<Q4_0>(words, panel, b, at % PANEL);
            }
        });
        return;
    }
    uint32_t* packed = reinterpret_cast<uint32_t*>(const_cast<char*>(p->packed));
    int64_t in = p->in;
    Team::for_each((out + LANES - 1) / LANES, num_threads, [&](int64_t group) {
        int64_t first = group * LANES;
        uint32_t* to[LANES];
        int count = out - first < LANES ? int(out - first) : LANES;
        for (int i = 0; i < count; i++) {
            int64_t at = place_of(first + i, places);
            to[i] = packed + at / PANEL * panel_bytes(p->kind, in) / 4 + at % PANEL;
        }
        const uint32_t* from = weight + first * in;
        for (int64_t k = 0; p->kind == FULL && k < in; k++)  // in the order of memory as far as possible
            for (int i = 0; i < count; i++) to[i][k * PANEL] = from[i * in + k];
        for (int64_t k = 0; p->kind != FULL && k < in; k += 2)
            for (int i = 0; i < count; i++) {
                uint32_t low = from[i * in + k] >> 16, high = k + 1 < in ? from[i * in + k + 1] & UPPER : 0;
                to[i][k / 2 * PANEL] = high | low;
            }
    });
}

// Pack a weight's rows from the blocks of a GGUF file, [rows in the file][row_bytes]. rows: the file's row of each
// output; null: in the file's order.
void selfspec_pack_blocks(const uint8_t* blocks, int64_t row_bytes, const int64_t* rows, int64_t out, const Product* p,
                          int64_t offset, int64_t lanes, int64_t stride, int64_t num_threads) {
    int64_t first = offset / PANEL, last = (place_of(out - 1, {offset, lanes, stride}) + PANEL) / PANEL;
    Team::for_each(last - first, num_threads, [&](int64_t i) {
        int64_t panel = first + i;
        const uint8_t* sources[PANEL];
        for (int64_t o = 0; o < PANEL; o++) {
            int64_t place = panel * PANEL + o - offset, group = stride ? place / stride : 0;
            int64_t within = stride ? place - group * stride : place, output = group * lanes + within;
            bool is_own = place >= 0 && within < lanes && output < out;
            sources[o] = is_own ? blocks + (rows ? rows[output] : output) * row_bytes : nullptr;
        }
        pack_panel(kind_of(*p, panel), sources, blocks_of(p->in), const_cast<char*>(p->packed) + panel_at(*p, panel));
    });
}
}
