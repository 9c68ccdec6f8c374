// Packing weights in the order and the kind that products read: see product.h.
#pragma once

#include "amx.h"

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

// Pack a weight's rows [out, in] from output `offset` of the packed ones on. `lanes` and `stride`: every `lanes` outputs
// are followed by a gap up to `stride`, where SWIGLU's other half stands.
void selfspec_pack(const uint32_t* weight, int64_t out, const Product* p, int64_t offset, int64_t lanes, int64_t stride,
                   int64_t num_threads) {
    uint32_t* packed = reinterpret_cast<uint32_t*>(const_cast<char*>(p->packed));
    int64_t in = p->in;
#pragma omp parallel for num_threads(num_threads)
    for (int64_t first = 0; first < out; first += LANES) {
        uint32_t* to[LANES];
        int count = out - first < LANES ? int(out - first) : LANES;
        for (int i = 0; i < count; i++) {
            int64_t o = first + i, at = offset + o / lanes * stride + o % lanes;
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
