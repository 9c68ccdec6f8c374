// Packing weights in the order and the kind that products read: see product.h.
#pragma once

#include <cmath>

#include "amx.h"

// Where outputs of a weight belong among the packed ones: from `offset` on, and after every `lanes` of them there is a
// gap up to `stride`, where SWIGLU's other half stands.
struct Places {
    int64_t offset, lanes, stride;
};

static inline int64_t place_of(int64_t output, const Places& to) {
    return to.offset + output / to.lanes * to.stride + output % to.lanes;
}

// In 8 bits: each output's weights by a scale of their own.
static void pack_rounded(const float* weight, int64_t out, const Product& p, const Places& to, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads)
    for (int64_t o = 0; o < out; o++) {
        int64_t at = place_of(o, to);
        const float* from = weight + o * p.in;
        char* packed = const_cast<char*>(p.packed) + at / PANEL * panel_bytes(p) + at % PANEL * 4;
        float largest = 0;
        for (int64_t k = 0; k < p.in; k++) largest = std::max(largest, std::fabs(from[k]));
        float inverse = largest > 0 ? 127.f / largest : 0.f;
        const_cast<float*>(p.scales)[at] = largest / 127.f;
        for (int64_t k = 0; k < p.in; k++)
            packed[k / 4 * PANEL * 4 + k % 4] = char(128 + std::lrint(from[k] * inverse));
    }
}

extern "C" {

int64_t selfspec_panel() { return PANEL; }

// The smallest kind of packed weights where none is lost by it.
int64_t selfspec_smallest() {
    static const bool tiles = allow_tiles();
    return tiles ? AMX : HALF;
}

// Words of 32 bits that packed weights of a kind take.
int64_t selfspec_packed_words(const Product* p, int64_t panels) { return panels * panel_bytes(*p) / 4; }

// Whether bfloat16 holds every one of `count` weights.
int64_t selfspec_fits_half(const uint32_t* weights, int64_t count) {
    constexpr int64_t BLOCK = 4096;  // of which the first that does not ends the search
    for (int64_t at = 0; at < count; at += BLOCK) {
        int64_t stop = count - at < BLOCK ? count : at + BLOCK;
        uint32_t lower = 0;
        for (int64_t i = at; i < stop; i++) lower |= weights[i];
        if (lower & 0xffff) return 0;
    }
    return 1;
}

// Pack a weight's rows [out, in] where `Places` of the last numbers are.
void selfspec_pack(const uint32_t* weight, int64_t out, const Product* p, int64_t offset, int64_t lanes, int64_t stride,
                   int64_t num_threads) {
    Places places = {offset, lanes, stride};
    if (p->kind == INT8) return pack_rounded(reinterpret_cast<const float*>(weight), out, *p, places, num_threads);
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
        for (int64_t k = 0; p->kind == FULL && k < in; k++)  // written in order, as far as may be
            for (int i = 0; i < count; i++) to[i][k * PANEL] = from[i * in + k];
        for (int64_t k = 0; p->kind != FULL && k < in; k += 2)
            for (int i = 0; i < count; i++) {
                uint32_t low = from[i * in + k] >> 16, high = k + 1 < in ? from[i * in + k + 1] & UPPER : 0;
                to[i][k / 2 * PANEL] = high | low;
            }
    }
}
}
