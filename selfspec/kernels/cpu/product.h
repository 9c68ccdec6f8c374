// Products of a few rows with packed weights: every weight is read once, whatever the number of rows up to ROWS.
//
// Weights [out, in] are packed in panels of PANEL outputs, [panels][in][PANEL], the last one filled up with zeros. An
// output is summed over `in` from first to last in one register: its bits do not depend on how many rows there are.
// Rows [n, in] are turned first, [blocks][in][rows of the block], so that they are read in one stream too.
#pragma once

#include "vector.h"

constexpr int PANEL = 2 * LANES;

enum After { STORE, ADD, SWIGLU };  // y = xW, y += xW, or y = silu(x gate) * (x up) with both halves in one panel

struct Product {
    const float* packed;
    const float* bias;  // [panels * PANEL], in the packed order; or null
    int64_t in, out;    // out: of y, so that SWIGLU has half as many as there are weights
};

constexpr int AHEAD = 8192;  // bytes of weights asked for before they are needed: what this far hides memory's delay

template <int R>
static void tile(const float* x, int64_t in, const float* panel, const float* bias, Vec (&acc)[ROWS][2]) {
    Vec a[R][2];
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) a[r][half] = bias ? load(bias + half * LANES) : Vec{};
    for (int64_t k = 0; k < in; k++, panel += PANEL, x += R) {
        Vec low = load(panel), high = load(panel + LANES);
        for (int line = 0; line < PANEL * 4; line += 64)
            __builtin_prefetch(reinterpret_cast<const char*>(panel) + AHEAD + line);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            Vec one = splat(x[r]);
            a[r][0] = fma(one, low, a[r][0]);
            a[r][1] = fma(one, high, a[r][1]);
        }
    }
    for (int r = 0; r < R; r++) acc[r][0] = a[r][0], acc[r][1] = a[r][1];
}

typedef void (*Tile)(const float*, int64_t, const float*, const float*, Vec (&)[ROWS][2]);
static const Tile TILES[13] = {nullptr,  tile<1>, tile<2>, tile<3>,  tile<4>,  tile<5>, tile<6>,
#if defined(__AVX512F__)
                               tile<7>,  tile<8>, tile<9>, tile<10>, tile<11>, tile<12>
#endif
};

static inline void put(float* y, Vec v, int64_t room, bool add) {
    if (room >= LANES) {
        store(y, add ? load(y) + v : v);
    } else if (room > 0) {
        store_some(y, add ? load_some(y, room) + v : v, room);
    }
}

// Rows of a block, of n in all: as even as can be.
static inline int64_t block_rows(int64_t n) {
    int64_t blocks = (n + ROWS - 1) / ROWS;
    return (n + blocks - 1) / blocks;
}

// Turn x[n, in] for a product, inputs [first, last) of it.
static void turn(const float* x, int64_t n, int64_t in, float* turned, int64_t first, int64_t last) {
    int64_t rows = block_rows(n);
    for (int64_t r0 = 0; r0 < n; r0 += rows) {
        int64_t count = n - r0 < rows ? n - r0 : rows;
        float* to = turned + r0 * in + first * count;
        for (int64_t k = first; k < last; k++)
            for (int64_t r = 0; r < count; r++) *to++ = x[(r0 + r) * in + k];
    }
}

// Panels [first, last) of y[n, out] from turned rows.
static void product(const Product& p, After after, const float* x, int64_t n, float* y, int64_t first, int64_t last) {
    int64_t rows = block_rows(n);
    for (int64_t panel = first; panel < last; panel++) {
        const float* weights = p.packed + panel * p.in * PANEL;
        const float* bias = p.bias ? p.bias + panel * PANEL : nullptr;
        for (int64_t r0 = 0; r0 < n; r0 += rows) {
            int64_t count = n - r0 < rows ? n - r0 : rows;
            Vec acc[ROWS][2];
            TILES[count](x + r0 * p.in, p.in, weights, bias, acc);
            for (int64_t r = 0; r < count; r++) {
                if (after == SWIGLU) {
                    int64_t at = panel * LANES;
                    put(y + (r0 + r) * p.out + at, silu(acc[r][0]) * acc[r][1], p.out - at, false);
                } else {
                    int64_t at = panel * PANEL;
                    float* to = y + (r0 + r) * p.out + at;
                    put(to, acc[r][0], p.out - at, after == ADD);
                    put(to + LANES, acc[r][1], p.out - at - LANES, after == ADD);
                }
            }
        }
    }
}

static inline int64_t panels_of(const Product& p, After after) {
    int64_t per_panel = after == SWIGLU ? LANES : PANEL;
    return (p.out + per_panel - 1) / per_panel;
}
