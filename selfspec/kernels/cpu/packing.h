// Packs weights in the order and format that products read: see product.h.
#pragma once

#include <algorithm>
#include <cmath>

#include "amx.h"
#include "blocks.h"

// Places of a weight's outputs among the packed outputs: from `offset` on, with a gap after every `lanes` outputs up to
// a multiple of `stride`. The gaps hold the other half of a gated product.
struct Places {
    int64_t offset, lanes, stride;
};

static inline int64_t place_of(int64_t output, const Places& to) {
    return to.offset + output / to.lanes * to.stride + output % to.lanes;
}

// One block of an output: its integers with their offset, and its scales in packed order.
struct OneBlock {
    uint8_t numbers[BLOCK], scales[4], super[4];
};

static void put_block(int64_t kind, const OneBlock& from, char* panel, int64_t block, int64_t output) {
    BlockShape shape = shape_of(kind);
    char* super = panel + PANEL * (block / PER_SUPER) * (PER_SUPER * shape.bytes() + shape.super);
    char *own = super + PANEL * (shape.super + block % PER_SUPER * shape.bytes()), *lane = own + output * 4;
    const uint8_t* q = from.numbers;
    if (shape.bits == 8) {
        for (int64_t i = 0; i < BLOCK; i++) lane[i / 4 * PANEL * 4 + i % 4] = char(q[i]);
    } else {
        for (int64_t j = 0; j < 4; j++)
            for (int64_t c = 0; c < 4; c++)
                lane[j * PANEL * 4 + c] = char((q[8 * j + c] & 15) | (q[8 * j + 4 + c] & 15) << 4);
    }
    lane += 4 * PANEL * 4;  // where further bits begin
    for (int64_t c = 0; c < 4 && (shape.bits == 5 || shape.bits == 6); c++) {
        int parts[2] = {};
        for (int64_t j = 0; j < 4; j++)
            for (int64_t part = 0; part < 2; part++) parts[part] |= (q[8 * j + 4 * part + c] >> 4) << (shape.bits - 4) * j;
        if (shape.bits == 5) lane[c] = char(parts[0] | parts[1] << 4);
        if (shape.bits == 6) lane[c] = char(parts[0]), lane[PANEL * 4 + c] = char(parts[1]);
    }
    int64_t wide = kind == Q4_K || kind == Q6_K ? 1 : 2;  // bytes of one of the block's scales
    char* scales = own + PANEL * shape.numbers();
    for (int64_t i = 0; i < shape.scales; i++) scales[(i / wide * PANEL + output) * wide + i % wide] = char(from.scales[i]);
    for (int64_t i = 0; i < shape.super; i++) super[(i / 2 * PANEL + output) * 2 + i % 2] = char(from.super[i]);
}

// Block number `block` of an output's blocks in a file, as ggml defines them.
static OneBlock file_block(int64_t kind, const uint8_t* blocks, int64_t block) {
    OneBlock made = {};
    if (kind == Q4_0 || kind == Q4_1 || kind == Q5_0) {
        const uint8_t* from = blocks + block * (kind == Q4_0 ? 18 : kind == Q4_1 ? 20 : 22);
        const uint8_t* four = from + (kind == Q4_0 ? 2 : kind == Q4_1 ? 4 : 6);
        for (int i = 0; i < BLOCK; i++) made.numbers[i] = i < 16 ? four[i] & 15 : four[i - 16] >> 4;
        std::memcpy(made.scales, from, shape_of(kind).scales);
        for (int i = 0; kind == Q5_0 && i < BLOCK; i++) made.numbers[i] |= (from[2 + i / 8] >> i % 8 & 1) << 4;
    } else if (kind == Q8_0) {
        const uint8_t* from = blocks + block * 34;
        for (int i = 0; i < BLOCK; i++) made.numbers[i] = uint8_t(from[2 + i] + 128);
        std::memcpy(made.scales, from, 2);
    } else if (kind == Q4_K) {
        const uint8_t *from = blocks + block / PER_SUPER * 144, *packed = from + 4, *four = from + 16;
        int64_t b = block % PER_SUPER;
        std::memcpy(made.super, from, 4);
        made.scales[0] = b < 4 ? packed[b] & 63 : (packed[b + 4] & 15) | packed[b - 4] >> 6 << 4;
        made.scales[1] = b < 4 ? packed[b + 4] & 63 : packed[b + 4] >> 4 | packed[b] >> 6 << 4;
        for (int i = 0; i < BLOCK; i++) made.numbers[i] = four[b / 2 * BLOCK + i] >> b % 2 * 4 & 15;
    } else {  // Q6_K: 128 bytes of four bits, 64 of two, 16 scales and a scale of all
        const uint8_t* from = blocks + block / PER_SUPER * 210;
        int64_t b = block % PER_SUPER, half = b / 4, part = b % 4;
        const uint8_t *four = from + half * 64 + part % 2 * BLOCK, *two = from + 128 + half * BLOCK;
        std::memcpy(made.super, from + 208, 2);
        std::memcpy(made.scales, from + 192 + 2 * b, 2);
        for (int i = 0; i < BLOCK; i++)
            made.numbers[i] = uint8_t((four[i] >> part / 2 * 4 & 15) | (two[i] >> 2 * part & 3) << 4);
    }
    return made;
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

// Pack a weight's rows [out, in] with `block_of(output, block)`.
template <typename Of>
static void pack_blocks(int64_t out, const Product& p, const Places& to, int64_t num_threads, Of block_of) {
#pragma omp parallel for num_threads(num_threads)
    for (int64_t o = 0; o < out; o++) {
        int64_t at = place_of(o, to), panel = at / PANEL, kind = kind_of(p, panel);
        char* packed = const_cast<char*>(p.packed) + panel_at(p, panel);
        for (int64_t b = 0; b < blocks_of(p.in); b++) put_block(kind, block_of(kind, o, b), packed, b, at % PANEL);
    }
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
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
    for (int64_t i = 0; i < n; i++) out[i] = checksum(words[i], sizes[i]);
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
        return pack_blocks(out, *p, places, num_threads, [&](int64_t, int64_t o, int64_t b) {
            const float* row = reinterpret_cast<const float*>(weight) + o * p->in;
            return rounded_block(row + b * BLOCK, std::min(BLOCK, p->in - b * BLOCK));
        });
    }
    uint32_t* packed = reinterpret_cast<uint32_t*>(const_cast<char*>(p->packed));
    int64_t in = p->in;
#pragma omp parallel for num_threads(num_threads)
    for (int64_t first = 0; first < out; first += LANES) {
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
    }
}

// Pack a weight's rows from the blocks of a GGUF file, [rows in the file][row_bytes]. rows: the file's row of each
// output; null: in the file's order.
void selfspec_pack_blocks(const uint8_t* blocks, int64_t row_bytes, const int64_t* rows, int64_t out, const Product* p,
                          int64_t offset, int64_t lanes, int64_t stride, int64_t num_threads) {
    pack_blocks(out, *p, {offset, lanes, stride}, num_threads, [&](int64_t kind, int64_t o, int64_t b) {
        return file_block(kind, blocks + (rows ? rows[o] : o) * row_bytes, b);
    });
}
}
