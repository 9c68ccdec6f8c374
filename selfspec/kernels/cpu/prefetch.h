// Prefetches weights in an order that memory serves fast.
//
// Memory interleaves pages of a few KiB over its channels. A stream that is prefetched in order waits for one channel
// at a time: one thread of a Xeon reads 10 GB/s in one stream and 14 GB/s in eight parallel ones. So blocks of weights
// are prefetched at STREAMS places at once into the second-level cache, DISTANCE bytes ahead of the product. The first
// blocks of the next product are prefetched before the current one ends. AMD processors differ. One thread of a
// fifth-generation EPYC reads 37 GB/s in order and 28 GB/s in eight streams. A third-generation one, without AVX-512,
// takes 154 ms for a token of a 3B file in two streams and 215 in order; more streams delay two tokens by a sixth.
#pragma once

#include <cstdint>

// Compilers report the last generation that they know for later ones, too.
#if defined(__znver1__) || defined(__znver2__) || defined(__znver3__) || defined(__znver4__) || defined(__znver5__)
constexpr bool IS_ZEN = true;
#else
constexpr bool IS_ZEN = false;
#endif
#if defined(__AVX512F__)
constexpr bool IN_ORDER = IS_ZEN;
#else
constexpr bool IN_ORDER = false;
#endif
constexpr int64_t STREAMS = IN_ORDER ? 1 : IS_ZEN ? 2 : 8, CACHE_LINE = 64;
constexpr int64_t LINES = IN_ORDER ? 2 : STREAMS, PORTION = LINES * CACHE_LINE;  // PORTION: bytes per prefetch
constexpr int64_t PREFETCH_BLOCK = STREAMS * 4096, DISTANCE = STREAMS == 2 ? PREFETCH_BLOCK : 2 * PREFETCH_BLOCK;
// For two panels at a time: a block beyond the second one, which begins up to 32 KiB on. In order, less is enough.
constexpr int64_t DISTANCE_ABREAST = IN_ORDER ? 3 * DISTANCE : STREAMS == 2 ? (1 << 15) + PREFETCH_BLOCK : DISTANCE;

constexpr int64_t LINE = CACHE_LINE / 4;  // floats

static inline float* aligned(float* at) { return at + (-(reinterpret_cast<uintptr_t>(at) / 4) & (LINE - 1)); }

struct Stretch {  // memory that one thread reads
    const char *first, *last;
};

// The prefetches of one thread, across products.
class Prefetcher {
    Stretch now = {}, later = {};  // the range that is being prefetched, and the one after it
    const char* block = nullptr;
    int64_t done = 0, all = 0;  // bytes per stream of the block: prefetched so far, and in all
    bool is_early = false;      // the product that reads `now` has not begun

    void enter(const char* at) {
        int64_t size = now.last - at < PREFETCH_BLOCK ? now.last - at : PREFETCH_BLOCK;
        block = at, done = 0, all = IN_ORDER ? size : (size + PORTION - 1) / PORTION * CACHE_LINE;
    }

   public:
    // Begin a product that reads `own`. `next` is the range of the following product. Either may be empty.
    void begin(Stretch own, Stretch next, int64_t distance = DISTANCE) {
        bool is_known = is_early && now.first == own.first && now.last == own.last;
        now = own, later = next, is_early = false;
        if (is_known) return;
        enter(own.first);
        for (int64_t fetched = 0; fetched < distance; fetched += PORTION) advance();
    }

    // Advance by one PORTION that was read.
    void advance() {
        if (done >= all) {
            if (now.last - block > PREFETCH_BLOCK) {
                enter(block + PREFETCH_BLOCK);
            } else if (later.first != later.last) {
                now = later, later = {}, is_early = true;
                enter(now.first);
            } else {
                return;
            }
        }
        const char* at = block + done;
        for (int64_t line = 0; line < LINES; line++, at += IN_ORDER ? CACHE_LINE : all) __builtin_prefetch(at, 0, 2);
        done += PORTION / STREAMS;
    }
};
