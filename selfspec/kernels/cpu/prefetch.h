// Weights that are asked for before they are needed, in an order that memory serves fast.
//
// Memory shares its pages of some KiB out over its channels, so that a stream which is asked for from first to last
// waits for one channel at a time: measured on one thread of a Xeon, it brings 10 GB/s, and eight of them side by side
// 14. So blocks of weights are asked for in STREAMS places at once, to the core's second cache, DISTANCE before a product
// comes to them; and the first ones of the product that follows are, before this one has ended. Processors of AMD find
// it the other way round: one thread of an EPYC of the fifth generation reads 37 GB/s in order, and 28 in eight places.
#pragma once

#include <cstdint>

// Compilers name the last generation that they know for later ones, too.
#if defined(__znver1__) || defined(__znver2__) || defined(__znver3__) || defined(__znver4__) || defined(__znver5__)
constexpr bool IN_ORDER = true;
#else
constexpr bool IN_ORDER = false;
#endif
constexpr int64_t STREAMS = IN_ORDER ? 1 : 8, CACHE_LINE = 64;
constexpr int64_t LINES = IN_ORDER ? 2 : STREAMS, PORTION = LINES * CACHE_LINE;  // PORTION: bytes asked for at a time
constexpr int64_t PREFETCH_BLOCK = STREAMS * 4096, DISTANCE = 2 * PREFETCH_BLOCK;
constexpr int64_t DISTANCE_ABREAST = 3 * DISTANCE;  // of two panels at a time, in order: beyond the second

struct Stretch {  // of memory that one thread reads
    const char *first, *last;
};

// Of one thread, from product to product.
class Prefetcher {
    Stretch now = {}, later = {};  // what is being asked for, and what after that
    const char* block = nullptr;
    int64_t done = 0, all = 0;  // bytes of each stream of the block: so far, and in the end
    bool is_early = false;      // what is being asked for is still to be read

    void enter(const char* at) {
        int64_t size = now.last - at < PREFETCH_BLOCK ? now.last - at : PREFETCH_BLOCK;
        block = at, done = 0, all = IN_ORDER ? size : (size + PORTION - 1) / PORTION * CACHE_LINE;
    }

   public:
    // A product begins that reads `own`, and one that reads `next` will follow; either may be empty.
    void begin(Stretch own, Stretch next, int64_t distance = DISTANCE) {
        bool is_known = is_early && now.first == own.first && now.last == own.last;
        now = own, later = next, is_early = false;
        if (is_known) return;
        enter(own.first);
        for (int64_t fetched = 0; fetched < distance; fetched += PORTION) advance();
    }

    // Another PORTION was read.
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
