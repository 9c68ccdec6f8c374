// Products with weights of 8 bits, for drafts alone: a quarter of what float32 weighs, so that a few layers of a small
// model stay in a core's own cache from one drafted token to the next.
//
// A weight is a whole number times its output's scale, stored 128 higher, so that none is below zero: packed
// [panels][groups * GROUP / 4][PANEL][4]. Activations are rounded too, GROUP inputs by a scale of their own, since a
// single large one would drown all others of its token. Sums of a group are whole numbers: the same on every machine,
// whatever its instructions, and whatever other tokens there are.
#pragma once

#include "product.h"

constexpr int64_t GROUP_FLOATS = GROUP / 4 + 2;  // of a token: its numbers, their scale, and where their sums begin
constexpr int64_t ABREAST = 4;                // tokens whose sums fit the registers

static inline int64_t groups_of(int64_t in) { return (in + GROUP - 1) / GROUP; }
static inline int64_t rounded_floats(int64_t n, int64_t in) { return n * groups_of(in) * GROUP_FLOATS; }

// To each lane, the sum of the products of its four bytes: those of `a` from 0 to 255, of `b` from -128 to 127.
static inline Ints add_bytes(Ints sum, Ints a, Ints b) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return (Ints)vusdotq_s32((int32x4_t)sum, (uint8x16_t)a, (int8x16_t)b);
#else
    for (int byte = 0; byte < 32; byte += 8) sum += (a >> byte & 255) * (b << (24 - byte) >> 24);
    return sum;
#endif
}

// Round x[in]: per group, its numbers of 8 bits, their scale, and -128 times their sum.
static void round_token(const float* x, int64_t in, float* out) {
    constexpr float MAGIC = 12582912.f;  // 1.5 * 2^23: adding it rounds to a whole number, which its lower bits hold
    for (int64_t first = 0; first < in; first += GROUP, out += GROUP_FLOATS) {
        Vec some[GROUP / LANES], most = {};
        for (int64_t i = 0; i < GROUP / LANES; i++) {
            int64_t at = first + i * LANES, room = in - at;
            some[i] = room >= LANES ? load(x + at) : load_some(x + at, room > 0 ? int(room) : 0);
            most = larger(most, larger(some[i], -some[i]));
        }
        float largest = 0;
        for (int i = 0; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
        float inverse = largest > 0 ? 127.f / largest : 0.f, scale = largest / 127.f;
        Ints total = {};
        int8_t numbers[GROUP];
        for (int64_t i = 0; i < GROUP / LANES; i++) {
            Ints whole = (Ints)(some[i] * inverse + MAGIC) - 0x4b400000;
            total += whole;
            for (int lane = 0; lane < LANES; lane++) numbers[i * LANES + lane] = int8_t(whole[lane]);
        }
        int32_t start = 0;
        for (int i = 0; i < LANES; i++) start -= 128 * total[i];
        std::memcpy(out, numbers, GROUP);
        out[GROUP / 4] = scale;
        std::memcpy(out + GROUP / 4 + 1, &start, sizeof start);
    }
}

static inline Ints splat_word(const float* at) {
    int32_t word;
    std::memcpy(&word, at, sizeof word);
    return word - Ints{};
}

// R tokens, `stride` apart, times one panel; `prefetcher` is told of every PORTION, if given.
template <int R>
static void tile_of_bytes(const float* x, int64_t stride, int64_t groups, const char* panel, Prefetcher* prefetcher,
                          Vec (&total)[ABREAST][2]) {
    constexpr int64_t portion = PORTION / (PANEL * 4);  // inputs, by fours
    Vec sums[R][2] = {};
    for (int64_t group = 0; group < groups; group++, x += GROUP_FLOATS) {
        Ints whole[R][2];
        for (int r = 0; r < R; r++) whole[r][0] = whole[r][1] = splat_word(x + r * stride + GROUP / 4 + 1);
        for (int64_t k = 0; k < GROUP / 4; k++, panel += PANEL * 4) {
            if (prefetcher && k % portion == 0) prefetcher->advance();
            Ints low = (Ints)load(panel), high = (Ints)load(panel + LANES * 4);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                Ints four = splat_word(x + r * stride + k);
                whole[r][0] = add_bytes(whole[r][0], low, four);
                whole[r][1] = add_bytes(whole[r][1], high, four);
            }
        }
        for (int r = 0; r < R; r++) {
            Vec scale = splat(x[r * stride + GROUP / 4]);
            for (int half = 0; half < 2; half++)
                sums[r][half] = fma(__builtin_convertvector(whole[r][half], Vec), scale, sums[r][half]);
        }
    }
    for (int r = 0; r < R; r++) total[r][0] = sums[r][0], total[r][1] = sums[r][1];
}

// Panels [first, last) of y[n, out] from rounded tokens.
static void product_of_bytes(const Product& p, After after, const float* x, int64_t n, float* y, int64_t first,
                             int64_t last, Prefetcher& prefetcher) {
    typedef void (*Tile)(const float*, int64_t, int64_t, const char*, Prefetcher*, Vec(&)[ABREAST][2]);
    static const Tile tiles[] = {nullptr, tile_of_bytes<1>, tile_of_bytes<2>, tile_of_bytes<3>, tile_of_bytes<4>};
    int64_t groups = groups_of(p.in), stride = groups * GROUP_FLOATS;
    for (int64_t panel = first; panel < last; panel++) {
        const char* weights = p.packed + panel * panel_bytes(p);
        for (int64_t t = 0; t < n; t += ABREAST) {
            int64_t count = n - t < ABREAST ? n - t : ABREAST;
            Vec total[ABREAST][2];
            tiles[count](x + t * stride, stride, groups, weights, t ? nullptr : &prefetcher, total);
            for (int64_t r = 0; r < count; r++) {
                for (int half = 0; half < 2; half++) {
                    int64_t at = panel * PANEL + half * LANES;
                    total[r][half] *= load(p.scales + at);
                    if (p.bias) total[r][half] += load(p.bias + at);
                }
                finish(p, after, panel, total[r][0], total[r][1], y + (t + r) * p.out);
            }
        }
    }
}
