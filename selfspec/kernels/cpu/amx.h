// Products by Intel's AMX with bfloat16 weights and float32 activations, at full float32 precision.
//
// AMX multiplies bfloat16 numbers and accumulates in float32. An activation is the sum of three bfloat16 numbers
// (PARTS): the upper 8 bits of its 24-bit mantissa, the next 8 and the last 8. They are three rows of a tile, which are
// multiplied at the cost of one. A tile has 16 rows, so 5 tokens cost as much as one, and three tiles hold 16 tokens.
// Each of a token's three sums runs over `in` in order, whatever else is in the tiles, so the bits of a token's outputs
// do not depend on other tokens. AMX flushes numbers below 2^-126 to zero. An infinite activation gives NaN instead of
// infinity.
#pragma once

#include "product.h"

constexpr int64_t PARTS = 3, TILE_ROWS = 16, BATCH = 16;  // BATCH: tokens in three tiles
constexpr int64_t FIT = TILE_ROWS / PARTS;                // tokens in one tile

// Rows per tile, and number of tiles, for n tokens.
static inline int64_t tile_rows(int64_t n) { return n <= FIT ? PARTS * n : TILE_ROWS; }
static inline int64_t tiles_of(int64_t n) { return (PARTS * n + TILE_ROWS - 1) / TILE_ROWS; }

// Size of the buffer for the parts of n tokens' activations, in floats.
static inline int64_t parts_floats(int64_t n, int64_t in) { return tiles_of(n) * tile_rows(n) * depth_of(in) / 2; }

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

// Request permission for tiles from the system, once per process. Returns whether they may be used.
static bool allow_tiles() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM (Documentation/arch/x86/xstate.rst)
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

struct alignas(64) TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

static thread_local int64_t configured = 0;  // rows of this thread's token tiles; the last tile holds weights

static void configure(int64_t rows) {
    if (configured == rows) return;
    TileConfig config = {};
    config.palette = 1;
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = i < 7 ? rows : TILE_ROWS;
    __asm__ volatile("" ::: "memory");  // the compiler only knows that the first 8 bytes are read
    _tile_loadconfig(&config);
    configured = rows;
}

static void release_tiles() {
    if (configured) _tile_release();
    configured = 0;
}

// Write steps [first, last) of x[n, in] in parts: [tiles][depth / DEEP][rows][DEEP].
static void take_apart(const float* x, int64_t n, int64_t in, void* parts, int64_t first, int64_t last) {
    int64_t rows = tile_rows(n), steps = depth_of(in) / DEEP;
    for (int64_t i = 0; i < n; i++, x += in) {
        uint16_t* lines[PARTS];
        for (int64_t part = 0; part < PARTS; part++) {
            int64_t row = i * PARTS + part;
            lines[part] = static_cast<uint16_t*>(parts) + (row / rows * rows * steps + row % rows) * DEEP;
        }
        for (int64_t k = first * DEEP; k < last * DEEP; k += LANES) {
            Vec rest = in - k >= LANES ? load(x + k) : load_some(x + k, in > k ? int(in - k) : 0);
            int64_t at = k / DEEP * rows * DEEP + k % DEEP;
            for (uint16_t* line : lines) {
                Vec part = (Vec)((Ints)rest & UPPER);
                rest -= part;
                Halves halves = __builtin_convertvector((Ints)part >> 16, Halves);
                std::memcpy(line + at, &halves, sizeof halves);
            }
        }
    }
}

constexpr int64_t STEP = PANEL * DEEP * 2;  // bytes of a panel's weights per step
constexpr int64_t SUMS = 4 * LANES;         // capacity of a token's sums in outputs, of one or two panels
static_assert(STEP == 4 * PORTION, "both below fetch a portion four times a step");

// One tile of tokens times one or two panels. Two panels hide the latency of the accumulations.
template <bool two>
static inline void one_tile(const char* a, const char* left, const char* right, int64_t steps, float* sums,
                            Prefetcher* prefetcher) {
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    int64_t tile = configured * 64;
    auto fetch = [&]() {  // half a step
        if (prefetcher) prefetcher->advance(), prefetcher->advance();
    };
    for (int64_t step = 0; step < steps; step++, a += tile, left += STEP, right += STEP) {
        _tile_loadd(4, a, 64);
        _tile_loadd(7, left, 128);
        _tile_dpbf16ps(0, 4, 7);
        fetch();
        _tile_loadd(7, left + 64, 128);
        _tile_dpbf16ps(1, 4, 7);
        fetch();
        if (two) {
            _tile_loadd(7, right, 128);
            _tile_dpbf16ps(2, 4, 7);
            fetch();
            _tile_loadd(7, right + 64, 128);
            _tile_dpbf16ps(3, 4, 7);
            fetch();
        }
    }
    constexpr int64_t row = SUMS * 4;
    _tile_stored(0, sums, row);
    _tile_stored(1, sums + LANES, row);
    if (two) {
        _tile_stored(2, sums + 2 * LANES, row);
        _tile_stored(3, sums + 3 * LANES, row);
    }
}

// prefetch distance to the first-level cache in bytes; tokens take much of that cache
constexpr int64_t SOON = 2 * STEP;

// Two or three tiles of tokens times one panel, which is read once. Few lines are prefetched between two tile
// operations, since more of them would stall.
template <bool three>
static inline void more_tiles(const char* a, const char* panel, int64_t steps, float* sums, Prefetcher* prefetcher) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (three) {
        _tile_zero(4);
        _tile_zero(5);
    }
    constexpr int64_t tile = TILE_ROWS * 64, row = SUMS * 4;
    const char *b = a + steps * tile, *c = b + steps * tile;
    for (int64_t step = 0; step < steps; step++, a += tile, b += tile, c += tile, panel += STEP) {
        auto fetch = [&](int64_t quarter) {
            if (prefetcher) prefetcher->advance();
            for (int64_t line = 0; line < PORTION; line += CACHE_LINE)
                __builtin_prefetch(panel + SOON + quarter * PORTION + line);
        };
        _tile_loadd(7, panel, 128);
        _tile_loadd(6, a, 64);
        _tile_dpbf16ps(0, 6, 7);
        fetch(0);
        _tile_loadd(6, b, 64);
        _tile_dpbf16ps(2, 6, 7);
        fetch(1);
        if (three) {
            _tile_loadd(6, c, 64);
            _tile_dpbf16ps(4, 6, 7);
        }
        _tile_loadd(7, panel + 64, 128);
        if (three) {
            _tile_dpbf16ps(5, 6, 7);
            _tile_loadd(6, b, 64);
        }
        fetch(2);
        _tile_dpbf16ps(3, 6, 7);
        _tile_loadd(6, a, 64);
        fetch(3);
        _tile_dpbf16ps(1, 6, 7);
    }
    float *second = sums + TILE_ROWS * SUMS, *third = second + TILE_ROWS * SUMS;
    _tile_stored(0, sums, row);
    _tile_stored(1, sums + LANES, row);
    _tile_stored(2, second, row);
    _tile_stored(3, second + LANES, row);
    if (three) {
        _tile_stored(4, third, row);
        _tile_stored(5, third + LANES, row);
    }
}

// Panels [first, last) of y[n, out] from rows in parts.
static void product_of_parts(const Product& p, After after, const void* parts, int64_t n, float* y, int64_t first,
                             int64_t last, Prefetcher& prefetcher) {
    int64_t rows = tile_rows(n), steps = depth_of(p.in) / DEEP;
    // a second panel must be within the prefetched range
    int64_t together = n <= FIT && panel_bytes(p.kind, p.in) <= PREFETCH_BLOCK ? 2 : 1;
    alignas(64) float sums[3 * TILE_ROWS * SUMS];
    configure(rows);
    for (int64_t panel = first; panel < last; panel += together) {
        const char* weights = p.packed + panel_at(p, panel);
        int64_t panels = last - panel < together ? 1 : together;
        for (int64_t t = 0; t < n; t += BATCH) {
            int64_t count = n - t < BATCH ? n - t : BATCH, tiles = tiles_of(count);
            const char* a = static_cast<const char*>(parts) + t / BATCH * 3 * rows * steps * 64;
            __asm__ volatile("" ::: "memory");  // the compiler does not know that tiles read this memory
            Prefetcher* own = t ? nullptr : &prefetcher;
            if (tiles == 1 && panels == 2) one_tile<true>(a, weights, weights + panel_bytes(p.kind, p.in), steps, sums, own);
            if (tiles == 1 && panels == 1) one_tile<false>(a, weights, weights, steps, sums, own);
            if (tiles == 2) more_tiles<false>(a, weights, steps, sums, own);
            if (tiles == 3) more_tiles<true>(a, weights, steps, sums, own);
            for (int64_t r = 0; r < count; r++)
                for (int64_t i = 0; i < panels; i++) {
                    const float* sum = sums + r * PARTS * SUMS + i * PANEL;
                    Vec total[2];
                    for (int half = 0; half < 2; half++, sum += LANES) {
                        total[half] = load(sum) + (load(sum + SUMS) + load(sum + 2 * SUMS));
                        if (p.bias) total[half] += load(p.bias + (panel + i) * PANEL + half * LANES);
                    }
                    finish(p, after, panel + i, total[0], total[1], y + (t + r) * p.out);
                }
        }
    }
}
#else
static bool allow_tiles() { return false; }
static void release_tiles() {}
static void take_apart(const float*, int64_t, int64_t, void*, int64_t, int64_t) {}
static void product_of_parts(const Product&, After, const void*, int64_t, float*, int64_t, int64_t, Prefetcher&) {}
#endif
