// Products of a few rows with packed weights. Every weight is read once for up to ROWS rows.
//
// Weights [out, in] are packed in panels of PANEL outputs; the last panel is padded with zeros. FULL:
// [panels][in][PANEL] float32 numbers. HALF, if it is lossless: bfloat16 numbers, two inputs per 32-bit word,
// [panels][depth / 2][PANEL], with the first input in the lower half. An output is summed over `in` in order in one
// register, so its bits depend neither on the number of rows nor on whether the format is FULL or HALF. PAIRS: packed
// as HALF, with tokens rounded to bfloat16 as in models of that dtype. Two products are added at a time, the second
// input first, and numbers below 2^-126 count as zero.
#pragma once

#include "prefetch.h"
#include "model.h"
#include "vector.h"

constexpr int PANEL = 2 * LANES;

// y = xW, y += xW, or y = act(x gate) * (x up), with gate and up in one panel and act = silu or gelu_tanh
enum After { STORE, ADD, SWIGLU, GEGLU };
// AMX: packed as HALF, multiplied as in amx.h. From INT4 on: blocks, see blocks.h. INT4: as Q4_0, for drafts, with
// activations of one byte. MIXED: every panel has a kind of its own.
enum Kind { FULL, HALF, AMX, PAIRS, INT4, MIXED, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

constexpr int64_t DEEP = 32;  // inputs per AMX step; `depth` is `in` padded to a multiple of it

static inline int64_t depth_of(int64_t in) { return (in + DEEP - 1) / DEEP * DEEP; }

constexpr int64_t BLOCK = 32, PER_SUPER = 8;  // inputs of a block; blocks that share scales in K-quants

struct BlockShape {
    int64_t bits, offset;   // an integer q is stored as q + offset; 0 with minima, since such integers have no sign
    int64_t scales, super;  // bytes per output: scales of a block, and scales of PER_SUPER blocks before them
    constexpr int64_t numbers() const { return BLOCK * bits / 8; }
    constexpr int64_t bytes() const { return numbers() + scales; }
};

static constexpr BlockShape shape_of(int64_t kind) {
    return kind == Q4_0 || kind == INT4 ? BlockShape{4, 8, 2, 0}
           : kind == Q4_1 ? BlockShape{4, 0, 4, 0}
           : kind == Q5_0 ? BlockShape{5, 16, 2, 0}
           : kind == Q5_1 ? BlockShape{5, 0, 4, 0}
           : kind == Q4_K ? BlockShape{4, 0, 2, 4}
           : kind == Q5_K ? BlockShape{5, 0, 2, 4}
           : kind == Q6_K ? BlockShape{6, 32, 2, 2}
                          : BlockShape{8, 128, 2, 0};  // Q8_0
}

static inline bool is_of_blocks(int64_t kind) { return kind >= INT4; }
static inline int64_t blocks_of(int64_t in) { return (in + BLOCK - 1) / BLOCK; }

static inline int64_t panel_bytes(int64_t kind, int64_t in) {
    if (!is_of_blocks(kind)) return PANEL * (kind == FULL ? 4 * in : 2 * depth_of(in));
    BlockShape shape = shape_of(kind);
    int64_t blocks = blocks_of(in);
    return PANEL * (blocks * shape.bytes() + (blocks + PER_SUPER - 1) / PER_SUPER * shape.super);
}

// The offset of a panel, which may be the end of the last one, and its kind.
static inline int64_t panel_at(const Product& p, int64_t panel) {
    return p.kind == MIXED ? p.panels[2 * panel] : panel * panel_bytes(p.kind, p.in);
}
static inline int64_t kind_of(const Product& p, int64_t panel) {
    return p.kind == MIXED ? p.panels[2 * panel + 1] : p.kind;
}

// The addresses of R rows that are `apart` floats apart: one pointer per three rows, with offsets of 0 to 2 `apart`.
template <int R>
class Rows {
    const float* every_third[(R + 2) / 3];
    int64_t apart;

   public:
    Rows(const float* x, int64_t apart) : apart(apart) {
        for (int i = 0; i < (R + 2) / 3; i++) every_third[i] = x + 3 * i * apart;
    }
    float at(int r, int64_t k) const { return every_third[r / 3][r % 3 * apart + k]; }
    int32_t word(int r) const {
        int32_t bits;
        std::memcpy(&bits, every_third[r / 3] + r % 3 * apart, sizeof bits);
        return bits;
    }
    void advance(int64_t count) {
        for (const float*& one : every_third) one += count;
    }
};

// Multiply an input of R rows by the weights of P panels, which `of` reads.
template <int R, int P, class Of>
static inline void add(const Rows<R>& x, int64_t k, Of of, Vec (&a)[P][R][2]) {
#pragma GCC unroll 2
    for (int p = 0; p < P; p++) {
        Vec low = of(p, 0), high = of(p, 1);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            Vec one = splat(x.at(r, k));
            a[p][r][0] = fma(one, low, a[p][r][0]);
            a[p][r][1] = fma(one, high, a[p][r][1]);
        }
        if (R > 1 && P > 1) forget();
    }
}

template <int R, int P>
static inline void add_full(Rows<R>& x, int64_t in, const char* panel, int64_t size, Vec (&a)[P][R][2]) {
    for (int64_t k = 0; k < in; k++, panel += PANEL * 4, x.advance(1)) {
        add<R, P>(x, 0, [&](int p, int half) { return load(panel + p * size + half * LANES * 4); }, a);
    }
}

// Weights are loaded again for every second input, since sums occupy the registers.
template <int R, int P>
static inline void add_halves(Rows<R>& x, int64_t in, const char* panel, int64_t size, Vec (&a)[P][R][2]) {
    for (int64_t k = 0; k < in; k += 2, panel += PANEL * 4, x.advance(2)) {
        auto both = [&](int p, int half) { return (Ints)load(panel + p * size + half * LANES * 4); };
        add<R, P>(x, 0, [&](int p, int half) { return (Vec)(both(p, half) << 16); }, a);
        if (k + 1 == in) break;
        add<R, P>(x, 1, [&](int p, int half) { return (Vec)(both(p, half) & UPPER); }, a);
    }
}

// Add to each lane the products of two bfloat16 numbers of `a` and two of `b`.
static inline Vec add_pairs(Vec sum, Vec a, Vec b) {
#if defined(__AVX512BF16__)
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum = fma((Vec)((Ints)a & UPPER), (Vec)((Ints)b & UPPER), sum);
    return fma((Vec)((Ints)a << 16), (Vec)((Ints)b << 16), sum);
#endif
}

template <int R, int P>
static inline void add_both(Rows<R>& x, int64_t pairs, const char* panel, int64_t size, Vec (&a)[P][R][2]) {
    for (int64_t k = 0; k < pairs; k++, panel += PANEL * 4, x.advance(1)) {
#pragma GCC unroll 2
        for (int p = 0; p < P; p++) {
            Vec low = load(panel + p * size), high = load(panel + p * size + LANES * 4);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                Vec both = (Vec)(x.word(r) - Ints{});
                a[p][r][0] = add_pairs(a[p][r][0], low, both);
                a[p][r][1] = add_pairs(a[p][r][1], high, both);
            }
        }
    }
}

typedef Vec Sums[ROWS][2];

// R rows [in], `apart` floats apart, times P consecutive panels. `prefetcher`, if given, is advanced by every PORTION.
// For few rows, two panels at a time hide the latency of the additions.
template <int R, int P, Kind kind>
static void tile(const float* from, int64_t apart, int64_t in, const char* panel, const float* bias,
                 Prefetcher* prefetcher, Sums* acc) {
    constexpr int64_t inputs = PORTION / (PANEL * (kind == FULL ? 4 : 2));
    static_assert(inputs >= 1 && (kind == FULL || inputs % 2 == 0), "two inputs of halves share a word");
    int64_t size = PANEL * (kind == FULL ? 4 * in : 2 * depth_of(in)), k = 0;
    Rows<R> x(from, apart);
    Vec a[P][R][2];
    for (int p = 0; p < P; p++)
        for (int r = 0; r < R; r++)
            for (int half = 0; half < 2; half++) a[p][r][half] = bias ? load(bias + p * PANEL + half * LANES) : Vec{};
    for (; k < in; k += inputs, panel += PORTION) {
        for (int p = 0; prefetcher && p < P; p++) prefetcher->advance();
        int64_t some = in - k < inputs ? in - k : inputs;
        if (kind == FULL) {
            add_full<R, P>(x, some, panel, size, a);
        } else if (kind == PAIRS) {
            add_both<R, P>(x, (some + 1) / 2, panel, size, a);
        } else {
            add_halves<R, P>(x, some, panel, size, a);
        }
    }
    for (; kind != FULL && prefetcher && k < depth_of(in); k += inputs)
        for (int p = 0; p < P; p++) prefetcher->advance();
    for (int p = 0; p < P; p++)
        for (int r = 0; r < R; r++) acc[p][r][0] = a[p][r][0], acc[p][r][1] = a[p][r][1];
}

typedef void (*Tile)(const float*, int64_t, int64_t, const char*, const float*, Prefetcher*, Sums*);
template <Kind k>
static const Tile TILES[13] = {nullptr,       tile<1, 1, k>, tile<2, 1, k>, tile<3, 1, k>,  tile<4, 1, k>,
                               tile<5, 1, k>, tile<6, 1, k>,
#if defined(__AVX512F__)
                               tile<7, 1, k>, tile<8, 1, k>, tile<9, 1, k>, tile<10, 1, k>, tile<11, 1, k>, tile<12, 1, k>
#endif
};
// two panels at a time, for at most so many rows and bytes per panel
constexpr int64_t ABREAST_ROWS = 3, MOST_ABREAST = 1 << 15;
template <Kind k>
static const Tile ABREAST_TILES[] = {nullptr, tile<1, 2, k>, tile<2, 2, k>, tile<3, 2, k>};

static inline void put(float* y, Vec v, int64_t memory, bool add) {
    if (memory >= LANES) {
        store(y, add ? load(y) + v : v);
    } else if (memory > 0) {
        store_some(y, add ? load_some(y, memory) + v : v, memory);
    }
}

static inline bool is_gated(After after) { return after == SWIGLU || after == GEGLU; }

static inline Vec gate(After after, Vec x) { return after == GEGLU ? gelu_tanh(x) : silu(x); }

// Write one panel's outputs of one row to `y` [out].
static inline void finish(const Product& p, After after, int64_t panel, Vec low, Vec high, float* y) {
    if (is_gated(after)) {
        int64_t at = panel * LANES;
        put(y + at, gate(after, low) * high, p.out - at, false);
    } else {
        int64_t at = panel * PANEL;
        put(y + at, low, p.out - at, after == ADD);
        put(y + at + LANES, high, p.out - at - LANES, after == ADD);
    }
}

// Rows per block, for n rows in all, as even as possible.
static inline int64_t block_rows(int64_t n) {
    int64_t blocks = (n + ROWS - 1) / ROWS;
    return (n + blocks - 1) / blocks;
}

// Whether two panels are multiplied at a time. The second of two long panels would be beyond the prefetched range.
static inline bool are_abreast(const Product& p, int64_t n) {
    return n <= ABREAST_ROWS && panel_bytes(p.kind, p.in) <= MOST_ABREAST;
}

// Floats per token in the form that such a product reads: padded bfloat16 pairs, or the token's own.
static inline int64_t token_floats(const Product& p) { return p.kind == PAIRS ? depth_of(p.in) / 2 : p.in; }

// Round x[in] to bfloat16, to nearest even.
static void round_pairs(const float* x, int64_t in, float* out) {
    char* to = reinterpret_cast<char*>(out);
    for (int64_t k = 0; k < depth_of(in); k += LANES, to += sizeof(Halves)) {
        int64_t memory = in - k;
        Ints bits = (Ints)(memory >= LANES ? load(x + k) : load_some(x + k, memory > 0 ? int(memory) : 0));
        Ints nearest = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 1 << 22;  // NaN must not become infinity
        Ints rounded = (bits & 0x7fffffff) > 0x7f800000 ? quiet : nearest;
        Halves halves = __builtin_convertvector(rounded >> 16, Halves);
        std::memcpy(to, &halves, sizeof halves);
    }
}

// Panels [first, last) of y[n, out] from n tokens, which are pairs if the product's format is PAIRS. `prefetcher`, if
// given, is advanced by the bytes read.
static void product(const Product& p, After after, const float* x, int64_t n, float* y, int64_t first, int64_t last,
                    Prefetcher* prefetcher) {
    int64_t rows = block_rows(n), apart = token_floats(p);
    auto [tiles, two] = p.kind == FULL    ? std::pair(TILES<FULL>, ABREAST_TILES<FULL>)
                        : p.kind == PAIRS ? std::pair(TILES<PAIRS>, ABREAST_TILES<PAIRS>)
                                          : std::pair(TILES<HALF>, ABREAST_TILES<HALF>);
    for (int64_t panel = first, together; panel < last; panel += together) {
        const char* weights = p.packed + panel_at(p, panel);
        const float* bias = p.bias ? p.bias + panel * PANEL : nullptr;
        together = are_abreast(p, n) && panel + 1 < last ? 2 : 1;
        for (int64_t r0 = 0; r0 < n; r0 += rows) {
            int64_t count = n - r0 < rows ? n - r0 : rows;
            Sums acc[2];
            (together == 2 ? two : tiles)[count](x + r0 * apart, apart, p.in, weights, bias, r0 ? nullptr : prefetcher, acc);
            for (int64_t one = 0; one < together; one++)
                for (int64_t r = 0; r < count; r++)
                    finish(p, after, panel + one, acc[one][r][0], acc[one][r][1], y + (r0 + r) * p.out);
        }
    }
}

static inline int64_t panels_of(const Product& p, After after) {
    int64_t per_panel = is_gated(after) ? LANES : PANEL;
    return (p.out + per_panel - 1) / per_panel;
}
