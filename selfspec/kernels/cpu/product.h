// Products of a few rows with packed weights: every weight is read once, whatever the number of rows up to ROWS.
//
// Weights [out, in] are packed in panels of PANEL outputs, the last one filled up with zeros: FULL, [panels][in][PANEL]
// numbers of 32 bits, or, where no weight is lost by it, HALF: bfloat16, the upper half of those bits, of two inputs in
// one word, [panels][depth / 2][PANEL], the first input's below. An output is summed over `in` from first to last in
// one register: its bits depend neither on how many rows there are nor on how weights are packed. Rows [n, in] are
// turned first, [blocks][in][rows of the block], so that they are read in one stream too.
#pragma once

#include "prefetch.h"
#include "model.h"
#include "vector.h"

constexpr int PANEL = 2 * LANES;

enum After { STORE, ADD, SWIGLU };  // y = xW, y += xW, or y = silu(x gate) * (x up) with both halves in one panel
enum Kind { FULL, HALF, AMX, INT4 };  // AMX: packed as HALF, and multiplied as amx.h says; INT4: see nibbles.h

constexpr int64_t GROUP = 64; // inputs that weights of 4 bits are taken in at a time
constexpr int64_t GROUP_BYTES = PANEL * (GROUP / 2 + 4);  // of a panel, with their scales
constexpr int64_t DEEP = 32;  // inputs that AMX takes in one step: what `depth` is a multiple of, filled up with zeros

static inline int64_t depth_of(int64_t in) { return (in + DEEP - 1) / DEEP * DEEP; }

static inline int64_t panel_bytes(const Product& p) {
    if (p.kind == INT4) return (p.in + GROUP - 1) / GROUP * GROUP_BYTES;
    return PANEL * (p.kind == FULL ? 4 * p.in : 2 * depth_of(p.in));
}

template <int R>
static inline void add(const float* x, Vec low, Vec high, Vec (&a)[R][2]) {
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
        Vec one = splat(x[r]);
        a[r][0] = fma(one, low, a[r][0]);
        a[r][1] = fma(one, high, a[r][1]);
    }
}

template <int R>
static inline void add_full(const float* x, int64_t in, const char* panel, Vec (&a)[R][2]) {
    for (int64_t k = 0; k < in; k++, panel += PANEL * 4, x += R) {
        Vec low = load(panel), high = load(panel + LANES * 4);
        add<R>(x, low, high, a);
    }
}

template <int R>
static inline void add_halves(const float* x, int64_t in, const char* panel, Vec (&a)[R][2]) {
    for (int64_t k = 0; k < in; k += 2, panel += PANEL * 4, x += 2 * R) {
        Ints low = (Ints)load(panel), high = (Ints)load(panel + LANES * 4);
        add<R>(x, (Vec)(low << 16), (Vec)(high << 16), a);
        if (k + 1 < in) add<R>(x + R, (Vec)(low & UPPER), (Vec)(high & UPPER), a);
    }
}

// R rows times a panel; `prefetcher` is told of every PORTION, if given.
template <int R, Kind kind>
static void tile(const float* x, int64_t in, const char* panel, const float* bias, Prefetcher* prefetcher,
                 Vec (&acc)[ROWS][2]) {
    constexpr int64_t inputs = PORTION / (PANEL * (kind == FULL ? 4 : 2));
    Vec a[R][2];
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) a[r][half] = bias ? load(bias + half * LANES) : Vec{};
    int64_t k = 0;
    for (; k < in; k += inputs, panel += PORTION, x += inputs * R) {
        if (prefetcher) prefetcher->advance();
        int64_t some = in - k < inputs ? in - k : inputs;
        if (kind == FULL) {
            add_full<R>(x, some, panel, a);
        } else {
            add_halves<R>(x, some, panel, a);
        }
    }
    for (; kind == HALF && prefetcher && k < depth_of(in); k += inputs) prefetcher->advance();
    for (int r = 0; r < R; r++) acc[r][0] = a[r][0], acc[r][1] = a[r][1];
}

typedef void (*Tile)(const float*, int64_t, const char*, const float*, Prefetcher*, Vec (&)[ROWS][2]);
template <Kind k>
static const Tile TILES[13] = {nullptr,    tile<1, k>, tile<2, k>, tile<3, k>,  tile<4, k>,  tile<5, k>, tile<6, k>,
#if defined(__AVX512F__)
                               tile<7, k>, tile<8, k>, tile<9, k>, tile<10, k>, tile<11, k>, tile<12, k>
#endif
};

static inline void put(float* y, Vec v, int64_t room, bool add) {
    if (room >= LANES) {
        store(y, add ? load(y) + v : v);
    } else if (room > 0) {
        store_some(y, add ? load_some(y, room) + v : v, room);
    }
}

// One panel's outputs of one row to where they belong in `y` [out].
static inline void finish(const Product& p, After after, int64_t panel, Vec low, Vec high, float* y) {
    if (after == SWIGLU) {
        int64_t at = panel * LANES;
        put(y + at, silu(low) * high, p.out - at, false);
    } else {
        int64_t at = panel * PANEL;
        put(y + at, low, p.out - at, after == ADD);
        put(y + at + LANES, high, p.out - at - LANES, after == ADD);
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
static void product(const Product& p, After after, const float* x, int64_t n, float* y, int64_t first, int64_t last,
                    Prefetcher& prefetcher) {
    int64_t rows = block_rows(n);
    const Tile* tiles = p.kind == FULL ? TILES<FULL> : TILES<HALF>;
    for (int64_t panel = first; panel < last; panel++) {
        const char* weights = p.packed + panel * panel_bytes(p);
        const float* bias = p.bias ? p.bias + panel * PANEL : nullptr;
        for (int64_t r0 = 0; r0 < n; r0 += rows) {
            int64_t count = n - r0 < rows ? n - r0 : rows;
            Vec acc[ROWS][2];
            tiles[count](x + r0 * p.in, p.in, weights, bias, r0 ? nullptr : &prefetcher, acc);
            for (int64_t r = 0; r < count; r++) finish(p, after, panel, acc[r][0], acc[r][1], y + (r0 + r) * p.out);
        }
    }
}

static inline int64_t panels_of(const Product& p, After after) {
    int64_t per_panel = after == SWIGLU ? LANES : PANEL;
    return (p.out + per_panel - 1) / per_panel;
}
