// Products with the quantised weights of GGUF files, which are read as the file holds them, and with 4-bit copies for
// drafts.
//
// A weight is q d + m: an integer q of 4, 5, 6 or 8 bits, a scale d and a minimum m (or m = 0) per BLOCK of 32 inputs of
// an output; Q6_K has a scale per half a block. An activation is rounded to DIGITS bytes under one power of two per
// block: with three bytes, to a 2^23rd of the block's largest, as float32 would; with two, to a 2^15th, as
// `selfspec.kernels.rounding` says. So the sums within a block are sums of integers, and exact. The blocks of an output are added in order in float32. An output's bits depend neither on other
// tokens nor on how many are multiplied at once.
//
// A packed panel is a sequence of blocks. A block is [4][PANEL][4] bytes with four bits of inputs 8 j to 8 j + 3 in
// their lower and of the next four inputs in their upper halves; then further bits; then scales. In Q8_0 it is
// [8][PANEL][4] bytes and scales. Integers are stored without a sign, see `offset`.
#pragma once

#include <cmath>

#include "product.h"

// Processors with sums of four products of bytes need no sums of pairs. On others, activations of two bytes are multiplied
// as 16-bit numbers, which takes as many instructions and half as many sums; so are weights of 8 bits, whose products of
// bytes would overflow. All else is multiplied as bytes in pairs.
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
constexpr bool IN_PAIRS = false;
#else
constexpr bool IN_PAIRS = LANES >= 8;
#endif

// Add to each lane the products of its four bytes: `a` from 0 to 255, `b` from -128 to 127. If IN_PAIRS, a lane may be
// two 16-bit sums, which `widened` adds; they do not overflow for `a` of up to 15 in eight additions, of up to 31 in
// four, and of up to 63 in two.
static inline Ints add_bytes(Ints sum, Ints a, Ints b) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(__AVX512BW__)
    return (Ints)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)a, (__m512i)b));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    // In the order of the source: with compilers' orders of additions, sums would not fit the registers.
    __m256i product;
    asm volatile("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(a), "x"(b));
    return sum;
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return (Ints)vusdotq_s32((int32x4_t)sum, (uint8x16_t)a, (int8x16_t)b);
#else
    for (int byte = 0; byte < 32; byte += 8) sum += (a >> byte & 255) * (b << (24 - byte) >> 24);
    return sum;
#endif
}

// Each lane's sum of the products of its two 16-bit numbers.
static inline Ints multiplied_shorts(Ints a, Ints b) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

static inline Ints add_shorts(Ints sum, Ints a, Ints b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    __m256i product;  // in the order of the source, see `add_bytes`
    asm volatile("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(a), "x"(b));
    return sum;
#else
    return sum + multiplied_shorts(a, b);
#endif
}

// Sums of words, times `factor`.
static inline Ints widened(Ints sum, int32_t factor) {
#if defined(__AVX512BW__) && !defined(__AVX512VNNI__)
    return (Ints)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(int16_t(factor)));
#elif defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
    return (Ints)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(int16_t(factor)));
#else
    return sum * factor;
#endif
}

static inline Ints nearest(Vec v) {  // the nearest integers
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtps_epi32((__m256)v);
#else
    Ints whole;
    for (int i = 0; i < LANES; i++) whole[i] = int32_t(std::lrint(v[i]));
    return whole;
#endif
}

constexpr int64_t WORDS = BLOCK / 4;  // of four inputs

constexpr int64_t MOST_DIGITS = 3;

// A block of a token. A number is an integer times `scale`. Of three bytes, the integer is 65536 h + l: with bytes, `h`
// is the first of three and `l` is 256 times the second plus the third; as 16-bit numbers, `h` and `l` are divided a
// little differently. Of two bytes, the integer is one 16-bit number if IN_PAIRS; else the first byte is the upper one.
template <int DIGITS>
struct TokenBlock {
    static constexpr int SHORTS = DIGITS == 3 ? 2 : 1;
    static constexpr bool HAS_BYTES = !(IN_PAIRS && DIGITS == 2), HAS_SHORTS = IN_PAIRS && DIGITS > 1;
    float scale, sum, sums[2];  // sums of the numbers: of the block and of its halves
    int8_t bytes[HAS_BYTES ? WORDS : 1][DIGITS == 3 ? 4 : DIGITS][4];  // of each word; a fourth byte is not used
    int16_t shorts[HAS_SHORTS ? WORDS : 1][SHORTS][2][2];  // of each word: h, then l; of each: numbers 0, 2, then 1, 3
};

// Floats of n tokens in the form that a product with blocks reads.
static int64_t digit_floats(int64_t digits, int64_t n, int64_t in) {
    auto size = digits == 1 ? sizeof(TokenBlock<1>) : digits == 2 ? sizeof(TokenBlock<2>) : sizeof(TokenBlock<3>);
    return n * blocks_of(in) * int64_t(size / sizeof(float));
}

// `scale` of a block, and its inverse. Both are powers of two, so that multiplication is exact; a single byte would
// lose up to a bit by that.
template <int DIGITS>
static void set_scale(float largest, float& scale, float& inverse) {
    constexpr float LEAST = 1e-30f;  // smaller numbers count as zero
    scale = inverse = 0;
    if (!(largest < INFINITY)) scale = NAN;
    if (!(largest < INFINITY) || largest < LEAST) return;
    if (DIGITS == 1) {
        scale = largest / 127.f, inverse = 127.f / largest;
        return;
    }
    float above = largest * 1.004f;  // the factor keeps the highest digit below 128
    uint32_t bits;
    std::memcpy(&bits, &above, sizeof bits);
    auto power = [](uint32_t exponent) {
        float one;
        std::memcpy(&one, &(exponent <<= 23), sizeof one);
        return one;
    };
    constexpr uint32_t BITS = 8 * DIGITS - 1;  // and a sign
    inverse = power(253 + BITS - (bits >> 23)), scale = power((bits >> 23) + 1 - BITS);
}

typedef int8_t Bytes __attribute__((vector_size(LANES * 4)));
struct Order {
    int8_t of[16];
};
constexpr Order BYTES = {{2, 6, 10, 14, 1, 5, 9, 13, 0, 4, 8, 12, 3, 7, 11, 15}};  // of four integers
constexpr Order TWO_BYTES = {{1, 5, 9, 13, 0, 4, 8, 12, 2, 6, 10, 14, 3, 7, 11, 15}};
constexpr Order UPPER_SHORTS = {{2, 3, 10, 11, 6, 7, 14, 15, 2, 3, 10, 11, 6, 7, 14, 15}};
constexpr Order LOWER_SHORTS = {{0, 1, 8, 9, 4, 5, 12, 13, 0, 1, 8, 9, 4, 5, 12, 13}};

// Permute the bytes of every four integers.
template <const Order& order, int... I>
static inline Bytes permuted(Ints v, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector((Bytes)v, (Bytes)v, (I / 16 * 16 + order.of[I % 16])...);
#else
    return __builtin_shuffle((Bytes)v, Bytes{int8_t(I / 16 * 16 + order.of[I % 16])...});
#endif
}

template <const Order& order>
static inline Bytes permuted(Ints v) {
    return permuted<order>(v, std::make_integer_sequence<int, LANES * 4>());
}

// Round x[in] to digits. shorts: of three bytes, also write 16-bit numbers.
template <int DIGITS>
static void to_digits(const float* x, int64_t in, float* out, bool shorts) {
    constexpr int64_t VECTORS = BLOCK / LANES;
    auto* block = reinterpret_cast<TokenBlock<DIGITS>*>(out);
    for (int64_t first = 0; first < in; first += BLOCK, block++) {
        Vec some[VECTORS];
        Ints most = {}, total[2] = {};  // bits of absolute values are ordered as these are, and NaN is the largest
        for (int64_t i = 0; i < VECTORS; i++) {
            int64_t at = first + i * LANES, memory = in - at;
            some[i] = memory >= LANES ? load(x + at) : load_some(x + at, memory > 0 ? int(memory) : 0);
            Ints size = (Ints)some[i] & 0x7fffffff;
            most = size > most ? size : most;
        }
        int32_t bits = 0;
        for (int i = 0; i < LANES; i++) bits = most[i] > bits ? most[i] : bits;
        float largest, inverse;
        std::memcpy(&largest, &bits, sizeof largest);
        set_scale<DIGITS>(largest, block->scale, inverse);
        for (int64_t i = 0; i < VECTORS; i++) {
            Ints n = nearest(some[i] * inverse);
            total[i / (VECTORS / 2)] += n;
            int64_t word = i * LANES / 4;
            if constexpr (DIGITS == 1) {
                for (int lane = 0; lane < LANES; lane++) block->bytes[word + lane / 4][0][lane % 4] = int8_t(n[lane]);
            } else if constexpr (DIGITS == 2) {
                Bytes both = IN_PAIRS ? permuted<LOWER_SHORTS>(n) : permuted<TWO_BYTES>((n + 0x80) ^ 0x80);
                for (int lane = 0; lane < LANES; lane += 4) {
                    int64_t at = word + lane / 4;
                    void* to = IN_PAIRS ? static_cast<void*>(block->shorts[at]) : block->bytes[at];
                    std::memcpy(to, reinterpret_cast<const char*>(&both) + 4 * lane, 8);
                }
            } else {
                Bytes bytes = permuted<BYTES>((n + 0x808080) ^ 0x808080);  // adding 128 to a byte makes it signed
                std::memcpy(block->bytes[word], &bytes, sizeof bytes);
                if (!shorts) continue;
                Bytes upper = permuted<UPPER_SHORTS>(n + 0x8000), lower = permuted<LOWER_SHORTS>(n);
                for (int lane = 0; lane < LANES; lane += 4) {
                    std::memcpy(block->shorts[word + lane / 4][0], reinterpret_cast<const char*>(&upper) + 4 * lane, 8);
                    std::memcpy(block->shorts[word + lane / 4][1], reinterpret_cast<const char*>(&lower) + 4 * lane, 8);
                }
            }
        }
        for (int half = 0; half < 2; half++) {
            int32_t whole = 0;  // at most 2^27
            for (int i = 0; i < LANES; i++) whole += total[half][i];
            block->sums[half] = float(whole) * block->scale;
        }
        block->sum = block->sums[0] + block->sums[1];
    }
}

// LANES half-precision numbers. All scales of a file are finite.
static inline Vec half_floats(const char* from) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__) && defined(__F16C__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    Ints bits = __builtin_convertvector(halves, Ints);
    Vec size = (Vec)((bits & 0x7fff) << 13) * 0x1p112f;  // the exponent's bias is 15, not 127
    return (Vec)((Ints)size | (bits & 0x8000) << 16);
#endif
}

// LANES bytes. Explicit on x86, where compilers convert them one after the other.
template <typename Byte>
static inline Vec byte_floats(const char* from) {
#if defined(__AVX512F__)
    __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return (Vec)_mm512_cvtepi32_ps(Byte(-1) < 0 ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
    __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return (Vec)_mm256_cvtepi32_ps(Byte(-1) < 0 ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    typedef Byte Bytes __attribute__((vector_size(LANES)));
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, Vec);
#endif
}

// The integers of LANES outputs in word 2 j + part of a block. half: of the panel.
template <int KIND>
static inline Ints integers(const char* block, int half, int j, int part) {
    constexpr int64_t REST = 4 * PANEL * 4;  // where further bits begin
    int64_t lane = half * LANES * 4;
    if (KIND == Q8_0) return (Ints)load(block + (2 * j + part) * PANEL * 4 + lane);
    Ints both = (Ints)load(block + j * PANEL * 4 + lane), four = (part ? both >> 4 : both) & 0x0f0f0f0f;
    if (shape_of(KIND).bits == 5) return four | ((Ints)load(block + REST + lane) >> (4 * part + j) & 0x01010101) << 4;
    if (KIND == Q6_K) return four | ((Ints)load(block + REST + part * PANEL * 4 + lane) >> 2 * j & 0x03030303) << 4;
    return four;
}

// The same integers as 16-bit numbers: those of even inputs of the word, or those of odd ones.
template <int KIND>
static inline Ints short_integers(const char* block, int half, int j, int part, int odd) {
    typedef uint16_t Numbers __attribute__((vector_size(LANES * 4)));
    if constexpr (shape_of(KIND).bits == 4) {
        auto both = (Numbers)load(block + j * PANEL * 4 + half * LANES * 4);
        return (Ints)(part && odd ? both >> 12 : both >> (4 * part + 8 * odd) & 15);
    }
    auto bytes = (Numbers)integers<KIND>(block, half, j, part);
    return (Ints)(odd ? bytes >> 8 : bytes & 255);
}

struct Scales {
    Vec scale, minimum;  // minimum: the weight whose stored integer is 0
};

// The scales of LANES outputs. part: of the block, in Q6_K; super: scales of several blocks.
template <int KIND>
static inline Scales scales_of(const char* block, const char* super, int half, int part) {
    constexpr BlockShape S = shape_of(KIND);
    const char* own = block + S.numbers() * PANEL;
    int64_t lane = half * LANES;
    auto less = [](Vec scale) { return scale * float(-S.offset); };
    if (S.super == 4) {
        Vec scale = half_floats(super + lane * 2) * byte_floats<uint8_t>(own + lane);
        return {scale, half_floats(super + (PANEL + lane) * 2) * -byte_floats<uint8_t>(own + PANEL + lane)};
    }
    if (KIND == Q6_K) {
        Vec scale = half_floats(super + lane * 2) * byte_floats<int8_t>(own + part * PANEL + lane);
        return {scale, less(scale)};
    }
    Vec scale = half_floats(own + lane * 2);
    return {scale, S.offset == 0 ? half_floats(own + (PANEL + lane) * 2) : less(scale)};
}

static inline Ints splat_word(const void* at) {
    int32_t word;
    std::memcpy(&word, at, sizeof word);
    return word - Ints{};
}

constexpr int MOST_SUMS = LANES == 16 ? 24 : 12;  // of integers, that fit the registers
constexpr int MOST_TOKENS = 6;                    // of a tile

// Tokens whose sums for a panel fit the registers.
static constexpr int tokens_abreast(int digits) {
    return digits == 1 ? 4 : digits == 2 && IN_PAIRS ? MOST_TOKENS : MOST_SUMS / 2 / digits;
}

typedef Vec BlockSums[MOST_TOKENS][2];

// R tokens, `stride` bytes apart, times a panel. `prefetcher`, if given, is advanced by the bytes read.
template <int KIND, int DIGITS, int R>
static void tile_of_blocks(const char* tokens, int64_t stride, int64_t blocks, const char* panel,
                           Prefetcher* prefetcher, BlockSums& total) {
    constexpr BlockShape S = shape_of(KIND);
    constexpr bool SHORTS = IN_PAIRS && (S.bits == 8 || DIGITS == 2);
    constexpr int PARTS = KIND == Q6_K ? 2 : 1, SUMS = SHORTS ? TokenBlock<DIGITS>::SHORTS : DIGITS, LENGTH = WORDS / PARTS;
    // words until a sum of pairs may overflow
    constexpr int FIT = !IN_PAIRS || SHORTS || S.bits == 4 ? LENGTH : S.bits == 5 ? 4 : 2;
    int64_t advanced = 0, size = (S.bytes() * PER_SUPER + S.super) * PANEL / PER_SUPER;
    Vec sums[R][2] = {};
    const char *block = panel, *super = panel;
    for (int64_t b = 0; b < blocks; b++, block += S.bytes() * PANEL) {
        if (S.super && b % PER_SUPER == 0) super = block, block += S.super * PANEL;
        if (prefetcher)
            for (; advanced < (b + 1) * size; advanced += PORTION) prefetcher->advance();
        const TokenBlock<DIGITS>* x[R];
        for (int r = 0; r < R; r++) x[r] = reinterpret_cast<const TokenBlock<DIGITS>*>(tokens + r * stride) + b;
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            Ints whole[R][2][SUMS];
#pragma GCC unroll 4
            for (int start = 0; start < LENGTH; start += FIT) {
                Ints some[R][2][SUMS] = {};
#pragma GCC unroll 8
                for (int w = part * LENGTH + start; w < part * LENGTH + start + FIT; w++) {
#pragma GCC unroll 2
                    for (int odd = 0; odd < (SHORTS ? 2 : 1); odd++) {
                        Ints q[2];
                        for (int v = 0; v < 2; v++)
                            q[v] = SHORTS ? short_integers<KIND>(block, v, w / 2, w % 2, odd)
                                          : integers<KIND>(block, v, w / 2, w % 2);
#pragma GCC unroll 8
                        for (int r = 0; r < R; r++)
#pragma GCC unroll 3
                            for (int i = 0; i < SUMS; i++) {
                                const TokenBlock<DIGITS>& t = *x[r];
                                Ints numbers = SHORTS ? splat_word(t.shorts[w][i][odd]) : splat_word(t.bytes[w][i]);
                                for (int v = 0; v < 2; v++) {
                                    Ints& sum = some[r][v][i];
                                    sum = !SHORTS ? add_bytes(sum, q[v], numbers)
                                          : w == part * LENGTH && !odd ? multiplied_shorts(q[v], numbers)
                                                                       : add_shorts(sum, q[v], numbers);
                                }
                            }
                    }
                }
#pragma GCC unroll 8
                for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                    for (int v = 0; v < 2; v++)
#pragma GCC unroll 3
                        for (int i = 0; i < SUMS; i++) {
                            Ints one = SHORTS ? some[r][v][i] : widened(some[r][v][i], i == DIGITS - 2 ? 256 : 1);
                            whole[r][v][i] = start ? whole[r][v][i] + one : one;
                        }
            }
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) {
                Scales s = scales_of<KIND>(block, super, v, part);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    const TokenBlock<DIGITS>& t = *x[r];
                    Vec value = __builtin_convertvector(whole[r][v][0], Vec);
                    if constexpr (DIGITS == 2 && !SHORTS) {
                        value = __builtin_convertvector(whole[r][v][0] + whole[r][v][1], Vec);
                    } else if constexpr (DIGITS == 3) {
                        Ints low = SHORTS ? whole[r][v][1] : whole[r][v][1] + whole[r][v][2];
                        value = fma(value, splat(65536.f), __builtin_convertvector(low, Vec));
                    }
                    sums[r][v] = fma(s.minimum, splat(PARTS == 2 ? t.sums[part] : t.sum), sums[r][v]);
                    sums[r][v] = fma(value, s.scale * t.scale, sums[r][v]);
                }
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 2; v++) total[r][v] = sums[r][v];
}

typedef void (*BlocksTile)(const char*, int64_t, int64_t, const char*, Prefetcher*, BlockSums&);
template <int KIND, int DIGITS, int... R>
static BlocksTile blocks_tile(int64_t tokens, std::integer_sequence<int, R...>) {
    static const BlocksTile tiles[] = {tile_of_blocks<KIND, DIGITS, R + 1>...};
    return tiles[tokens - 1];
}

template <int KIND, int DIGITS>
static BlocksTile blocks_tile(int64_t tokens) {
    return blocks_tile<KIND, DIGITS>(tokens, std::make_integer_sequence<int, tokens_abreast(DIGITS)>());
}

template <int DIGITS>
static BlocksTile tile_of_kind(int64_t kind, int64_t tokens) {
    switch (kind) {
        case Q4_0: return blocks_tile<Q4_0, DIGITS>(tokens);
        case Q4_1: return blocks_tile<Q4_1, DIGITS>(tokens);
        case Q5_0: return blocks_tile<Q5_0, DIGITS>(tokens);
        case Q5_1: return blocks_tile<Q5_1, DIGITS>(tokens);
        case Q4_K: return blocks_tile<Q4_K, DIGITS>(tokens);
        case Q5_K: return blocks_tile<Q5_K, DIGITS>(tokens);
        case Q6_K: return blocks_tile<Q6_K, DIGITS>(tokens);
        default: return blocks_tile<Q8_0, DIGITS>(tokens);
    }
}

static BlocksTile tile_of_kind(int64_t kind, int64_t digits, int64_t tokens) {
    if (digits == 1) return blocks_tile<Q4_0, 1>(tokens);
    return (digits == 2 ? tile_of_kind<2> : tile_of_kind<3>)(kind, tokens);
}

// Panels [first, last) of y[n, out] from tokens in digits. `prefetcher`, if given, is advanced by the bytes read.
static void product_of_blocks(const Product& p, After after, const float* x, int64_t n, float* y, int64_t first,
                              int64_t last, Prefetcher* prefetcher) {
    const char* tokens = reinterpret_cast<const char*>(x);
    int64_t blocks = blocks_of(p.in), stride = digit_floats(p.digits, 1, p.in) * int64_t(sizeof(float));
    int64_t most = tokens_abreast(int(p.digits)), parts = (n + most - 1) / most, abreast = (n + parts - 1) / parts;
    for (int64_t panel = first; panel < last; panel++) {
        const float* bias = p.bias ? p.bias + panel * PANEL : nullptr;
        for (int64_t t = 0; t < n; t += abreast) {
            int64_t count = n - t < abreast ? n - t : abreast;
            BlockSums total;
            tile_of_kind(kind_of(p, panel), p.digits, count)(tokens + t * stride, stride, blocks, p.packed + panel_at(p, panel),
                                                  t ? nullptr : prefetcher, total);
            for (int64_t r = 0; r < count; r++) {
                Vec low = total[r][0], high = total[r][1];
                if (bias) low += load(bias), high += load(bias + LANES);
                finish(p, after, panel, low, high, y + (t + r) * p.out);
            }
        }
    }
}
