// Scores of queries and the keys of one row, read from the paged cache, and their softmax weights.
//
// For many queries, the lanes of a vector are queries; for few, they are keys. Both add the same numbers in the same
// order, over a query's keys in order.
#pragma once

#include <type_traits>

#include "kept.h"
#include "prefetch.h"

// The end of the contiguous keys from position `at` on.
static inline int64_t together_until(const Shape& s, int64_t at, int64_t limit) {
    int64_t stop = (at / s.page_size + 1) * s.page_size;
    return stop < limit ? stop : limit;
}

// Prefetch what is `away` numbers from an address.
template <typename Number>
static inline void ask(const Number* from, int64_t away) {
    __builtin_prefetch(from + away);
}

template <typename Number>
static inline void ask_later(const Number* from, int64_t away) {
    __builtin_prefetch(from + away, 0, 2);
}

// Whether number `at` of a head begins a cache line, if heads begin with one.
template <typename Number>
static inline bool begins_line(int64_t at) {
    return at % int64_t(CACHE_LINE / sizeof(Number)) == 0;
}

// The weights of queries for keys: that of query `i` and key `low` + k is at[k * per_key + i * per_query].
struct Weights {
    float* at;
    int64_t per_key, per_query;
    float *most, *total;  // [LANES]: largest scores, at least LEAST, and sums of weights
};

// Below any score: the largest score of a query that attends to none of the keys. Its weights are zero.
constexpr float LEAST = -1e30f;

// Scores are summed by quads: number j of a head belongs to sum j / QUAD % QUAD_SUMS. The sums are added pairwise.
constexpr int QUAD_SUMS = LANES / QUAD, TOGETHER = 4;  // TOGETHER: keys at once, to hide the latency of additions

constexpr int64_t SOON_KEYS = 2 * LANES;  // prefetch distance in keys, for keys that are not prefetched yet

// Maximum number of queries for vectors of keys: each query takes a register.
constexpr int FEW = LANES == 16 ? LANES : LANES / 2;

// Vectors of a head; the last one is padded with zeros.
static inline int64_t vectors_of(int64_t head_dim) { return (head_dim + LANES - 1) / LANES; }

// The working memory for scores in floats: spread or transposed queries, and LANES copied keys.
static inline int64_t copied_at(int64_t d) { return vectors_of(d) * QUAD * LANES * FEW; }
static inline int64_t weigh_floats(int64_t d) { return copied_at(d) + LANES * d; }

// What is prefetched while a key is read: its value and a key soon after it into the first-level cache, or, where both
// are in a cache already, the key of the next split into the second-level cache.
struct Ahead {
    int64_t value, key;  // distances in numbers; value: 0 for the next split; key: 0 if there is none
};

// Copy `count` contiguous keys of a head to float32 numbers [count][head_dim].
template <typename Number>
static inline void copy(Kept<Number> key, const Ahead& ahead, const Shape& s, int64_t count, float* to) {
    int64_t d = s.head_dim, rest = d % LANES;
    for (int64_t i = 0; i < count; i++, key = after(key, s, 1), to += d) {
        int64_t from = 0;
        for (; from + BLOCK <= d; from += BLOCK) {
#pragma GCC unroll 8
            for (int64_t more = 0; more < BLOCK; more += LANES) {
                if (begins_line<Number>(more)) {
                    const Number* at = key.numbers + from + more;
                    if (ahead.value) {
                        ask(at, ahead.value);
                        ask(at, ahead.key);
                    } else if (ahead.key) {
                        ask_later(at, ahead.key);
                    }
                }
                store(to + from + more, read(key, from, more));
            }
        }
        for (; from + LANES <= d; from += LANES) store(to + from, read(key, from));
        if (rest) store_some(to + d - rest, read_some(key, d - rest, int(rest)), int(rest));
    }
}

// Products of K keys with the queries in `turned` [head_dim][LANES]. Sums stay in registers if the size of a head is a
// multiple of a vector.
template <int K, bool whole>
static inline void products(const float* turned, const float* key, int64_t stride, int64_t away, int64_t d, Vec* out) {
    Vec acc[K][QUAD_SUMS] = {};
    for (int64_t from = 0; from < d; from += LANES) {
#pragma GCC unroll 4
        for (int i = 0; i < K; i++) {
            if (!away || !begins_line<float>(from)) continue;
            ask(key + i * stride + from, away);
            ask(key + i * stride + from, SOON_KEYS * stride);
        }
        if (whole || d - from >= LANES) {  // alternating sums hide the latency of additions
#pragma GCC unroll 4
            for (int j = 0; j < QUAD; j++)
#pragma GCC unroll 4
                for (int sum = 0; sum < QUAD_SUMS; sum++) {
                    int number = sum * QUAD + j;
                    Vec q = held(load(turned + (from + number) * LANES));
#pragma GCC unroll 4
                    for (int i = 0; i < K; i++)
                        acc[i][sum] = fma(q, splat(key[i * stride + from + number]), acc[i][sum]);
                }
        } else {
            for (int64_t j = 0; j < d - from; j++)
                for (int i = 0; i < K; i++)
                    acc[i][j / QUAD] =
                        fma(load(turned + (from + j) * LANES), splat(key[i * stride + from + j]), acc[i][j / QUAD]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < K; i++) {
#pragma GCC unroll 4
        for (int step = 1; step < QUAD_SUMS; step *= 2)
#pragma GCC unroll 4
            for (int j = 0; j < QUAD_SUMS; j += 2 * step) acc[i][j] += acc[i][j + step];
        out[i] = acc[i][0];
    }
}

// Weights of many queries, [keys][LANES]: the lanes are queries.
template <typename Number>
static void weigh_many(const Shape& s, const Span& row, int64_t kv_head, const float* queries,
                       const Kept<Number>& keys, const Ahead& ahead, int, const Ints& position, int64_t low,
                       int64_t limit, int64_t, int window, float scale, float* turned, const Weights& weights) {
    constexpr bool in_place = std::is_same_v<Number, float>;
    int64_t d = s.head_dim, stride = in_place ? s.kv_heads * d : d;
    int64_t away = in_place ? ahead.value : 0;
    float* copied = turned + copied_at(d);
    for (int64_t i = 0; i < d; i++)
        for (int lane = 0; lane < LANES; lane++) turned[i * LANES + lane] = queries[lane * d + i];
    auto one = d % LANES ? products<1, false> : products<1, true>;
    auto some = d % LANES ? products<TOGETHER, false> : products<TOGETHER, true>;
    Vec most = splat(LEAST), never = splat(-INFINITY);
    for (int64_t at = low; at < limit;) {
        int64_t stop = together_until(s, at, limit);
        const float* key = copied;
        if constexpr (in_place) {
            key = slot(keys, s, row, at, kv_head).numbers;
        } else {
            stop = std::min(stop, at + LANES);
            copy(slot(keys, s, row, at, kv_head), ahead, s, stop - at, copied);
        }
        while (at < stop) {
            int count = stop - at < TOGETHER ? 1 : TOGETHER;
            Vec sums[TOGETHER];
            (count == 1 ? one : some)(turned, key, stride, away, d, sums);
            for (int i = 0; i < count; i++, at++, key += stride) {
                Vec score = sums[i] * scale;
                if (window || at > position[0]) {  // the first query attends to the fewest keys
                    Ints seen = position >= int32_t(at);
                    if (window) seen &= position < int32_t(at) + window;
                    score = seen ? score : never;
                }
                most = larger(most, score);
                store(weights.at + (at - low) * LANES, score);
            }
        }
    }
    Vec parts[LANES] = {};  // sums of every LANES-th key
    for (int64_t at = 0; at < limit - low; at++) {
        Vec weight = exponential(load(weights.at + at * LANES) - most);
        store(weights.at + at * LANES, weight);
        parts[at % LANES] += weight;
    }
    for (int i = 1; i < LANES; i++) parts[0] += parts[i];
    store(weights.most, most);
    store(weights.total, parts[0]);
}

// The first `left` numbers at an address; `whole`: they are a whole vector.
template <bool whole = false>
static inline Vec load_rest(const float* from, int64_t left) {
    return whole || left >= LANES ? load(from) : load_some(from, int(left));
}

// Queries [n][d] in the form that `scores` reads, [vectors][QUAD][n][LANES]: number j of every quad in all its lanes.
static void spread(const float* queries, int n, int64_t d, float* out) {
    for (int64_t from = 0; from < d; from += LANES, out += QUAD * n * LANES)
        for (int q = 0; q < n; q++) {
            Vec one = load_rest(queries + q * d + from, d - from);
            auto put = [&](int j, Vec v) { store(out + (j * n + q) * LANES, v); };
            put(0, repeat_in_quads<0>(one)), put(1, repeat_in_quads<1>(one));
            put(2, repeat_in_quads<2>(one)), put(3, repeat_in_quads<3>(one));
        }
}

// The contiguous keys of one head, and the prefetch distances to values and to later keys.
struct Keys {
    const float* first;
    int64_t stride, away, later;  // later: 0 if later keys need no prefetch
};

// Products of LANES keys with N `spread` queries. Four keys at a time are transposed within quads of lanes, so that a
// lane sums one key and one quad. If registers suffice, four more keys use the same loaded queries.
template <int N, bool whole>
static void products_of_few(const Keys& keys, const float* queries, int64_t d, Vec* out) {
    constexpr int BESIDE = LANES == 8 && N <= 3 ? 2 : 1;
    Vec sums[N][QUAD_SUMS];
    const float* key = keys.first;
#pragma GCC unroll 4
    for (int part = 0; part < QUAD_SUMS; part += BESIDE, key += BESIDE * QUAD * keys.stride) {
        Vec acc[BESIDE][N] = {};
        const float* q = queries;
        for (int64_t from = 0; from < d; from += LANES, q += QUAD * N * LANES) {
            Vec fours[BESIDE][QUAD];
#pragma GCC unroll 8
            for (int i = 0; i < BESIDE * QUAD; i++) {
                const float* own = key + i * keys.stride + from;
                fours[i / QUAD][i % QUAD] = load_rest<whole>(own, d - from);
                if (!keys.away || !begins_line<float>(from)) continue;
                ask(own, keys.away);
                if (keys.later) ask(own, keys.later);
            }
            for (Vec (&four)[QUAD] : fours) turn_quads(four);
#pragma GCC unroll 4
            for (int j = 0; j < QUAD; j++)
#pragma GCC unroll 16
                for (int n = 0; n < N; n++) {
                    Vec one = load(q + (j * N + n) * LANES);
                    if (BESIDE > 1) one = held(one);
                    for (int more = 0; more < BESIDE; more++) acc[more][n] = fma(fours[more][j], one, acc[more][n]);
                }
        }
        for (int more = 0; more < BESIDE; more++)
            for (int n = 0; n < N; n++) sums[n][part + more] = acc[more][n];
    }
    for (int n = 0; n < N; n++) out[n] = add_quads(sums[n]);
}

// Copy the keys [at, stop) contiguously and pad them with zeros: products read LANES contiguous keys.
template <typename Number>
static Keys gather(const Kept<Number>& keys, const Ahead& ahead, const Shape& s, const Span& row, int64_t kv_head,
                   int64_t at, int64_t stop, float* copied) {
    int64_t d = s.head_dim;
    float* to = copied;
    while (at < stop) {
        int64_t until = together_until(s, at, stop);
        copy(slot(keys, s, row, at, kv_head), ahead, s, until - at, to);
        to += (until - at) * d, at = until;
    }
    std::fill(to, copied + LANES * d, 0.f);  // uninitialised numbers may be denormal, which is slow
    return {copied, d, 0, 0};
}

typedef void (*Products)(const Keys&, const float*, int64_t, Vec*);
template <int... N>
static Products products_for(int count, int64_t d, std::integer_sequence<int, N...>) {
    static const Products whole[] = {products_of_few<N + 1, true>...}, filled[] = {products_of_few<N + 1, false>...};
    return (d % LANES ? filled : whole)[count - 1];
}

// Scores of a few queries and the keys [low, limit), [queries][keys]: the lanes are keys. The sums and their order are
// the same. The first `asked` keys are prefetched already. most: per query and lane, the largest score so far.
template <typename Number>
static void score_few(const Shape& s, const Span& row, int64_t kv_head, const float* queries,
                      const Kept<Number>& keys, const Ahead& ahead, int count, const Ints& position, int64_t low,
                      int64_t limit, int64_t asked, int window, float scale, float* memory,
                      const Weights& weights, Vec* most) {
    int64_t d = s.head_dim, stride = s.kv_heads * d, until = low;
    float* copied = memory + copied_at(d);
    Products products = products_for(count, d, std::make_integer_sequence<int, FEW>());
    const float* run = nullptr;  // contiguous keys, up to `until`
    Ints lane = {};
    for (int i = 0; i < LANES; i++) lane[i] = i;
    spread(queries, count, d, memory);
    for (int64_t at = low; at < limit; at += LANES, run += LANES * stride) {
        if constexpr (std::is_same_v<Number, float>) {
            if (at >= until) {
                until = together_until(s, at, limit);
                run = slot(keys, s, row, at, kv_head).numbers;
            }
        }
        int64_t stop = at + LANES < limit ? at + LANES : limit;
        Vec sums[FEW];
        int64_t later = at + SOON_KEYS < low + asked ? 0 : ahead.key;
        products(at + LANES <= until ? Keys{run, stride, ahead.value, later}
                                     : gather(keys, ahead, s, row, kv_head, at, stop, copied),
                 memory, d, sums);
        Ints where = lane + int32_t(at);
        for (int q = 0; q < count; q++) {
            Ints seen = where <= position[q];  // beyond `limit` only if that is a multiple of LANES
            if (window) seen &= where > position[q] - window;
            Vec score = seen ? sums[q] * scale : splat(-INFINITY);
            store(weights.at + q * weights.per_query + (at - low), score);
            most[q] = larger(most[q], score);
        }
    }
}

// Turn the scores of one query into weights, and store their sum.
static void soften(const Weights& weights, int q, int64_t count, const Vec& most) {
    float *weight = weights.at + q * weights.per_query, largest = most[0];
    for (int i = 1; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
    Vec parts = {};
    for (int64_t at = 0; at < count; at += LANES) {
        Vec part = exponential(load(weight + at) - largest);
        store(weight + at, part);
        parts += part;
    }
    weights.most[q] = largest;
    weights.total[q] = sum(parts);
}

// Weights of a few queries, which are the tokens of one row.
template <typename Number>
static void weigh_few(const Shape& s, const Span& row, int64_t kv_head, const float* queries,
                      const Kept<Number>& keys, const Ahead& ahead, int count, const Ints& position, int64_t low,
                      int64_t limit, int64_t asked, int window, float scale, float* memory,
                      const Weights& weights) {
    Vec most[FEW];
    for (int q = 0; q < count; q++) most[q] = splat(LEAST);
    score_few(s, row, kv_head, queries, keys, ahead, count, position, low, limit, asked, window, scale, memory,
              weights, most);
    for (int q = 0; q < count; q++) soften(weights, q, limit - low, most[q]);
}
