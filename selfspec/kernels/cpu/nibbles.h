// Products with 4-bit weights, for drafts only. They take a seventh of the memory of float32 weights, so a few layers
// of a small model stay in a core's second-level cache from one drafted token to the next.
//
// GROUP inputs share a scale, for the weights of an output and for activations. A weight is an integer from -8 to 7
// times the scale of its group, stored with an offset of 8. Weights are packed as [panels][groups]; a group is [GROUP /
// 8][PANEL][4] bytes, whose lower halves are four inputs and whose upper halves are the next four, and then [PANEL]
// scales. Activations are rounded to 8 bits per group, since a single large activation would otherwise determine the
// scale of its whole token. Sums within a group are integers, so results are equal on all machines and do not depend on
// other tokens.
#pragma once

#include "product.h"

// per token and group: its numbers, their scale, and the initial value of the sum
constexpr int64_t GROUP_FLOATS = GROUP / 4 + 2;
constexpr int64_t ABREAST = 4;                // tokens whose sums fit the registers

static inline int64_t groups_of(int64_t in) { return (in + GROUP - 1) / GROUP; }
static inline int64_t rounded_floats(int64_t n, int64_t in) { return n * groups_of(in) * GROUP_FLOATS; }

// Add to each lane the products of its four bytes: `a` from 0 to 15, `b` from -127 to 127. Without an instruction that
// adds four products, a lane holds two 16-bit sums, which do not overflow in SHORT steps and are then added by
// `widened`.
constexpr int64_t SHORT = 8;

static inline Ints add_bytes(Ints sum, Ints a, Ints b) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(__AVX512BW__)
    return (Ints)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)a, (__m512i)b));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    __m256i next = _mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)a, (__m256i)b));
    asm("" : "+x"(next));  // without it, compilers choose an order of additions that needs too many registers
    return (Ints)next;
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return (Ints)vusdotq_s32((int32x4_t)sum, (uint8x16_t)a, (int8x16_t)b);
#else
    for (int byte = 0; byte < 32; byte += 8) sum += (a >> byte & 255) * (b << (24 - byte) >> 24);
    return sum;
#endif
}

static inline Ints widened(Ints sum) {
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
    return sum;
#elif defined(__AVX512BW__)
    return (Ints)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (Ints)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
#else
    return sum;
#endif
}

// Round x[in]. Write per group its 8-bit numbers, their scale, and -8 times their sum.
static void round_token(const float* x, int64_t in, float* out) {
    constexpr float MAGIC = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer in the lower bits
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
        for (int i = 0; i < LANES; i++) start -= 8 * total[i];
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

// R tokens, `stride` apart, times P panels. `prefetcher`, if given, is advanced by the bytes read.
template <int R, int P>
static void tile_of_nibbles(const float* x, int64_t stride, int64_t groups, const char* panel, Prefetcher* prefetcher,
                            Vec (&total)[ABREAST][2]) {
    int64_t apart = groups * GROUP_BYTES, told = 0;  // bytes
    Vec sums[R * P][2] = {};
    for (int64_t group = 0; group < groups; group++, x += GROUP_FLOATS, panel += GROUP_BYTES) {
        for (; prefetcher && told < (group + 1) * P * GROUP_BYTES; told += PORTION) prefetcher->advance();
        Ints whole[R * P][2];
        for (int i = 0; i < R * P; i++) whole[i][0] = whole[i][1] = splat_word(x + i / P * stride + GROUP / 4 + 1);
        for (int64_t start = 0; start < GROUP / 8; start += SHORT / 2) {
            Ints some[R * P][2] = {};
#pragma GCC unroll 4
            for (int64_t k = start; k < start + SHORT / 2; k++) {
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
                    for (int i = 0; i < R * P; i++) {
                        const float* numbers = x + i / P * stride + 2 * k;
                        Ints both = (Ints)load(panel + i % P * apart + (k * PANEL + half * LANES) * 4);
                        some[i][half] = add_bytes(some[i][half], both & 0x0f0f0f0f, splat_word(numbers));
                        some[i][half] = add_bytes(some[i][half], both >> 4 & 0x0f0f0f0f, splat_word(numbers + 1));
                    }
            }
            for (int i = 0; i < R * P; i++)
                for (int half = 0; half < 2; half++) whole[i][half] += widened(some[i][half]);
        }
        for (int i = 0; i < R * P; i++)
            for (int half = 0; half < 2; half++) {
                const char* scales = panel + i % P * apart + PANEL * GROUP / 2 + half * LANES * 4;
                Vec scale = load(scales) * x[i / P * stride + GROUP / 4];
                sums[i][half] = fma(__builtin_convertvector(whole[i][half], Vec), scale, sums[i][half]);
            }
    }
    for (int i = 0; i < R * P; i++) total[i][0] = sums[i][0], total[i][1] = sums[i][1];
}

// Panels [first, last) of y[n, out] from rounded tokens. `prefetcher`, if given, is advanced by the bytes read.
static void product_of_nibbles(const Product& p, After after, const float* x, int64_t n, float* y, int64_t first,
                               int64_t last, Prefetcher* prefetcher) {
    typedef void (*Tile)(const float*, int64_t, int64_t, const char*, Prefetcher*, Vec(&)[ABREAST][2]);
    static const Tile tiles[] = {nullptr, tile_of_nibbles<1, 1>, tile_of_nibbles<2, 1>, tile_of_nibbles<3, 1>,
                                 tile_of_nibbles<4, 1>};
    int64_t groups = groups_of(p.in), stride = groups * GROUP_FLOATS;
    auto end = [&](int64_t panel, Vec (&sums)[2], float* to) {
        for (int half = 0; p.bias && half < 2; half++) sums[half] += load(p.bias + panel * PANEL + half * LANES);
        finish(p, after, panel, sums[0], sums[1], to);
    };
    Vec total[ABREAST][2];
    for (int64_t panel = first; panel < last; panel++) {
        const char* weights = p.packed + panel * panel_bytes(p);
        if (n == 1 && panel + 1 < last) {  // two panels at a time read the token once, and load in parallel
            tile_of_nibbles<1, 2>(x, stride, groups, weights, prefetcher, total);
            end(panel++, total[0], y);
            end(panel, total[1], y);
            continue;
        }
        for (int64_t t = 0; t < n; t += ABREAST) {
            int64_t count = n - t < ABREAST ? n - t : ABREAST;
            tiles[count](x + t * stride, stride, groups, weights, t ? nullptr : prefetcher, total);
            for (int64_t r = 0; r < count; r++) end(panel, total[r], y + (t + r) * p.out);
        }
    }
}
