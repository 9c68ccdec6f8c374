// Products with weights of 4 bits, for drafts alone: a seventh of what float32 weighs, so that a few layers of a small
// model stay in a core's own cache from one drafted token to the next.
//
// GROUP inputs of an output share a scale, on both sides. A weight is a whole number from -8 to 7 times its group's
// scale, stored 8 higher; packed [panels][groups], and of each group [GROUP / 8][PANEL][4] bytes, of which the lower
// halves are four inputs' and the upper ones the next four's, and then [PANEL] scales. Activations are rounded to 8
// bits, since a single large one would drown all others of its token also by groups. Sums of a group are whole numbers:
// the same on every machine, whatever its instructions, and whatever other tokens there are.
#pragma once

#include "product.h"

constexpr int64_t GROUP_FLOATS = GROUP / 4 + 2;  // of a token: its numbers, their scale, and where their sums begin
constexpr int64_t ABREAST = 4;                // tokens whose sums fit the registers

static inline int64_t groups_of(int64_t in) { return (in + GROUP - 1) / GROUP; }
static inline int64_t rounded_floats(int64_t n, int64_t in) { return n * groups_of(in) * GROUP_FLOATS; }

// To each lane's sum, the products of its four bytes: those of `a` from 0 to 15, of `b` from -127 to 127. Where no
// instruction adds up four, a lane holds two sums of 16 bits, which have room for SHORT such steps, until `widened`.
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
    asm("" : "+x"(next));  // else compilers add in an order that needs more registers than there are
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

// Round x[in]: per group, its numbers of 8 bits, their scale, and -8 times their sum.
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

// R tokens, `stride` apart, times P panels; `prefetcher` is told of what was read, if given.
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

// Panels [first, last) of y[n, out] from rounded tokens; `prefetcher` is told of what was read, if given.
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
        if (n == 1 && panel + 1 < last) {  // two at a time read the token once, and come from memory side by side
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
