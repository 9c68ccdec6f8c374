// Weights that are asked for before they are needed, in an order that memory serves fast.
//
// Memory shares its pages of some KiB out over its channels, so that a stream which is asked for from first to last
// waits for one channel at a time: measured on one thread, it brings 10 GB/s, and eight of them side by side 14. So
// blocks of weights are asked for in STREAMS places at once, to the core's second cache, DISTANCE before a product comes
// to them; and the first ones of the product that follows are, before this one has ended.
#pragma once

#include <cstdint>

constexpr int64_t STREAMS = 8, CACHE_LINE = 64, PORTION = STREAMS * CACHE_LINE;  // PORTION: bytes asked for at a time
constexpr int64_t PREFETCH_BLOCK = STREAMS * 4096, DISTANCE = 2 * PREFETCH_BLOCK;

struct Stretch {  // of memory that one thread reads
    const char *first, *last;
};

// Of one thread, from product to product.
class Prefetcher {
    Stretch now = {}, later = {};  // what is being asked for, and what after that
    const char* block = nullptr;
    int64_t done = 0, apart = 0;  // bytes of each stream of the block so far; from one stream to the next
    bool is_early = false;        // what is being asked for is still to be read

    void enter(const char* at) {
        int64_t size = now.last - at < PREFETCH_BLOCK ? now.last - at : PREFETCH_BLOCK;
        block = at, done = 0, apart = (size + PORTION - 1) / PORTION * CACHE_LINE;
    }

   public:
    // A product begins that reads `own`, and one that reads `next` will follow; either may be empty.
    void begin(Stretch own, Stretch next) {
        bool is_known = is_early && now.first == own.first && now.last == own.last;
        now = own, later = next, is_early = false;
        if (is_known) return;
        enter(own.first);
        for (int64_t fetched = 0; fetched < DISTANCE; fetched += PORTION) advance();
    }

    // Another PORTION was read.
    void advance() {
        if (done >= apart) {
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
        for (int64_t stream = 0; stream < STREAMS; stream++, at += apart) __builtin_prefetch(at, 0, 2);
        done += CACHE_LINE;
    }
};
