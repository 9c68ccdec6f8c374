// Packs weights in the order and format that products read: see product.h.
#pragma once

#include <algorithm>
#include <cmath>

#include "amx.h"

// Places of a weight's outputs among the packed outputs: from `offset` on, with a gap after every `lanes` outputs up to
// a multiple of `stride`. The gaps hold the other half of a gated product.
struct Places {
    int64_t offset, lanes, stride;
};

static inline int64_t place_of(int64_t output, const Places& to) {
    return to.offset + output / to.lanes * to.stride + output % to.lanes;
}

// The scale with which integers from -8 to 7 represent a group's numbers with the least squared error, among some
// candidates.
static float best_scale(const float* group) {
    constexpr float MAGIC = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
    float largest = 0, best = 0, least = INFINITY;
    for (int64_t k = 0; k < GROUP; k++)
        if (std::fabs(group[k]) > std::fabs(largest)) largest = group[k];
    for (int step = 0; largest && step < 8; step++) {
        float share = 1.f - 0.1f * float(step / 2);
        // symmetric, or with the sign that maps the largest to -8
        float scale = step % 2 ? std::fabs(largest) * share / 7.f : -largest * share / 8.f;
        float inverse = 1.f / scale, error = 0;
        for (int64_t k = 0; k < GROUP; k++) {
            float whole = std::min(std::max(group[k] * inverse + MAGIC - MAGIC, -8.f), 7.f);
            error += (group[k] - whole * scale) * (group[k] - whole * scale);
        }
        if (error < least) least = error, best = scale;
    }
    return best;
}

// Pack in 4 bits, see nibbles.h.
static void pack_rounded(const float* weight, int64_t out, const Product& p, const Places& to, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads)
    for (int64_t o = 0; o < out; o++) {
        int64_t at = place_of(o, to);
        char* packed = const_cast<char*>(p.packed) + at / PANEL * panel_bytes(p);
        for (int64_t first = 0; first < p.in; first += GROUP, packed += GROUP_BYTES) {
            float group[GROUP] = {};
            std::memcpy(group, weight + o * p.in + first, sizeof(float) * std::min(GROUP, p.in - first));
            float scale = best_scale(group), inverse = scale ? 1.f / scale : 0.f;
            std::memcpy(packed + PANEL * GROUP / 2 + at % PANEL * 4, &scale, sizeof scale);
            char* own = packed + at % PANEL * 4;
            auto number = [&](int64_t k) { return 8 + std::min(std::max(std::lrint(group[k] * inverse), -8l), 7l); };
            for (int64_t k = 0; k < GROUP; k += k % 4 == 3 ? 5 : 1)
                own[k / 8 * PANEL * 4 + k % 4] = char(number(k) | number(k + 4) << 4);
        }
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

// The size of packed weights in a format, in 32-bit words.
int64_t selfspec_packed_words(const Product* p, int64_t panels) { return panels * panel_bytes(*p) / 4; }

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
    if (p->kind == INT4) return pack_rounded(reinterpret_cast<const float*>(weight), out, *p, places, num_threads);
    uint32_t* packed = reinterpret_cast<uint32_t*>(const_cast<char*>(p->packed));
    int64_t in = p->in;
#pragma omp parallel for num_threads(num_threads)
    for (int64_t first = 0; first < out; first += LANES) {
        uint32_t* to[LANES];
        int count = out - first < LANES ? int(out - first) : LANES;
        for (int i = 0; i < count; i++) {
            int64_t at = place_of(first + i, places);
            to[i] = packed + at / PANEL * panel_bytes(*p) / 4 + at % PANEL;
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
}
