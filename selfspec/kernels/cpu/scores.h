// What queries make of the keys of one row, read where the cache holds them: scores, and by their softmax weights.
//
// Of many queries a vector holds one in every lane; of a few, it holds keys. Both add up the same numbers in the same
// order, over a query's own keys from first to last.
#pragma once

#include <algorithm>
#include <cmath>

#include "model.h"
#include "prefetch.h"
#include "vector.h"

// Where a row's tokens are: `count` new ones, the first at `position`, written already. A node beyond a tree's chain is
// a row of its own: from position `root` on, its branch lies at root + branch[0], root + branch[1], ...
struct Span {
    const int64_t* pages;
    int64_t position, first, count;  // first: its index in the packed call
    int64_t root;
    const int64_t* branch;  // null: a row's tokens lie at their positions
};

static inline const float* slot(const float* storage, const Shape& s, const Span& row, int64_t at, int64_t kv_head) {
    if (row.branch && at >= row.root) at = row.root + row.branch[at - row.root];
    int64_t where = row.pages[at / s.page_size] * s.page_size + at % s.page_size;
    return storage + (where * s.kv_heads + kv_head) * s.head_dim;
}

// Up to where keys lie one after another from position `at` on.
static inline int64_t together_until(const Shape& s, const Span& row, int64_t at, int64_t limit) {
    int64_t stop = (at / s.page_size + 1) * s.page_size;
    if (row.branch) {
        int64_t turn = at < row.root ? row.root : at + 1;
        stop = stop < turn ? stop : turn;
    }
    return stop < limit ? stop : limit;
}

// Ask for what is that far from something that is read.
static inline void ask(const float* from, int64_t away) { __builtin_prefetch(from + away); }

// Whether a line of the caches begins with number `at` of a head, where heads begin with one.
static inline bool begins_line(int64_t at) { return at % (CACHE_LINE / 4) == 0; }

// What queries make of keys: weight of query `i` and key `low` + k is at[k * per_key + i * per_query].
struct Weights {
    float* at;
    int64_t per_key, per_query;
    float* total;  // [LANES]: their sums
};

// Scores are sums by quads: number j of a head belongs to sum j / QUAD % QUAD_SUMS, and those are added pair by pair.
constexpr int QUAD_SUMS = LANES / QUAD, TOGETHER = 4;  // keys at once, so that sums do not wait for each other

constexpr int64_t SOON_KEYS = 2 * LANES;  // that are asked for before they are needed, where nobody did before

// Products of K keys with the queries in `turned` [head_dim][LANES]. Sums stay in registers where a head is whole: of as
// many numbers as fill vectors.
template <int K, bool whole>
static inline void products(const float* turned, const float* key, int64_t stride, int64_t away, int64_t d, Vec* out) {
    Vec acc[K][QUAD_SUMS] = {};
    for (int64_t from = 0; from < d; from += LANES) {
#pragma GCC unroll 4
        for (int i = 0; i < K; i++) {
            if (!begins_line(from)) continue;
            ask(key + i * stride + from, away);
            ask(key + i * stride + from, SOON_KEYS * stride);
        }
        if (whole || d - from >= LANES) {  // sums in turn: one would wait for itself
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

// Weights of many queries, [keys][LANES]: a query in every lane.
static void weigh_many(const Shape& s, const Span& row, int64_t kv_head, const float* queries, const float* keys,
                       const float* values, int, const Ints& position, int64_t low, int64_t limit, int64_t,
                       int window, float scale, float* turned, const Weights& weights) {
    int64_t d = s.head_dim, stride = s.kv_heads * d;
    for (int64_t i = 0; i < d; i++)
        for (int lane = 0; lane < LANES; lane++) turned[i * LANES + lane] = queries[lane * d + i];
    auto one = d % LANES ? products<1, false> : products<1, true>;
    auto some = d % LANES ? products<TOGETHER, false> : products<TOGETHER, true>;
    Vec most = splat(-INFINITY), never = most;
    for (int64_t at = low; at < limit;) {
        int64_t stop = together_until(s, row, at, limit);
        const float* key = slot(keys, s, row, at, kv_head);
        while (at < stop) {
            int count = stop - at < TOGETHER ? 1 : TOGETHER;
            Vec sums[TOGETHER];
            (count == 1 ? one : some)(turned, key, stride, values - keys, d, sums);
            for (int i = 0; i < count; i++, at++, key += stride) {
                Vec score = sums[i] * scale;
                if (window || at > position[0]) {  // the first query sees least
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
    store(weights.total, parts[0]);
}

// Queries at most of which a vector of keys is the better one: it takes a register for each.
constexpr int FEW = LANES == 16 ? LANES : LANES / 2;

// Vectors of a head, the last one filled up with zeros.
static inline int64_t vectors_of(int64_t head_dim) { return (head_dim + LANES - 1) / LANES; }

// The first `left` numbers of a head from some of them on; a whole vector of them, where `whole` says that there is one.
template <bool whole = false>
static inline Vec load_rest(const float* from, int64_t left) {
    return whole || left >= LANES ? load(from) : load_some(from, int(left));
}

// Queries [n][d] spread for `scores`, [vectors][QUAD][n][LANES]: number j of every quad in all of its lanes.
static void spread(const float* queries, int n, int64_t d, float* out) {
    for (int64_t from = 0; from < d; from += LANES, out += QUAD * n * LANES)
        for (int q = 0; q < n; q++) {
            Vec one = load_rest(queries + q * d + from, d - from);
#pragma GCC unroll 4
            for (int j = 0; j < QUAD; j++) store(out + (j * n + q) * LANES, repeat_in_quads(one, j));
        }
}

// Keys of one head one after another, and how far away from them values, and later keys, to ask for are.
struct Keys {
    const float* first;
    int64_t stride, away, later;  // later: 0 where nobody need ask
};

// Products of LANES keys with N `spread` queries. Four keys at a time are turned within quads of lanes, so that a
// lane's sum is of one key and one quad; where registers hold them, four more beside them, for which nothing of the
// queries is loaded again.
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
                if (!begins_line(from)) continue;
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

// The keys [at, stop) copied one after another and filled up with zeros: products read LANES keys that are not apart.
static Keys gather(const float* keys, const float* values, const Shape& s, const Span& row, int64_t kv_head, int64_t at,
                   int64_t stop, float* copied) {
    int64_t d = s.head_dim, stride = s.kv_heads * d;
    float* to = copied;
    while (at < stop) {
        int64_t until = together_until(s, row, at, stop);
        const float* key = slot(keys, s, row, at, kv_head);
        for (; at < until; at++, key += stride, to += d) {
            std::memcpy(to, key, sizeof(float) * d);
            for (int64_t i = 0; i < d; i += LANES) ask(key + i, values - keys);
        }
    }
    std::fill(to, copied + LANES * d, 0.f);  // what lies there may be slow to multiply
    return {copied, d, 0, 0};
}

typedef void (*Products)(const Keys&, const float*, int64_t, Vec*);
template <int... N>
static Products products_for(int count, int64_t d, std::integer_sequence<int, N...>) {
    static const Products whole[] = {products_of_few<N + 1, true>...}, filled[] = {products_of_few<N + 1, false>...};
    return (d % LANES ? filled : whole)[count - 1];
}

// Floats of room to weigh keys in, for queries spread and keys copied, or queries turned.
static inline int64_t weigh_room(int64_t d) { return vectors_of(d) * QUAD * LANES * FEW + LANES * d; }

// Scores of a few queries and the keys [begin, limit), [queries][keys]: a key in every lane. The same sums in the same
// order. `begin` stands a multiple of LANES after `low`; the first `asked` keys from `low` on were asked for before.
// most: of every query, by lane, the largest so far.
static void score_few(const Shape& s, const Span& row, int64_t kv_head, const float* queries, const float* keys,
                      const float* values, int count, const Ints& position, int64_t low, int64_t begin, int64_t limit,
                      int64_t asked, int window, float scale, float* room, const Weights& weights, Vec* most) {
    int64_t d = s.head_dim, stride = s.kv_heads * d, until = begin;
    float* copied = room + vectors_of(d) * QUAD * LANES * FEW;
    Products products = products_for(count, d, std::make_integer_sequence<int, FEW>());
    const float* run = nullptr;  // keys that lie one after another, from here up to `until`
    Ints lane = {};
    for (int i = 0; i < LANES; i++) lane[i] = i;
    spread(queries, count, d, room);
    for (int64_t at = begin; at < limit; at += LANES, run += LANES * stride) {
        if (at >= until) {
            until = together_until(s, row, at, limit);
            run = slot(keys, s, row, at, kv_head);
        }
        int64_t stop = at + LANES < limit ? at + LANES : limit;
        Vec sums[FEW];
        int64_t later = at + SOON_KEYS < low + asked ? 0 : SOON_KEYS * stride;
        products(at + LANES <= until ? Keys{run, stride, values - keys, later}
                                     : gather(keys, values, s, row, kv_head, at, stop, copied),
                 room, d, sums);
        Ints where = lane + int32_t(at);
        for (int q = 0; q < count; q++) {
            Ints seen = where <= position[q];  // beyond `limit` only where that is a multiple of LANES
            if (window) seen &= where > position[q] - window;
            Vec score = seen ? sums[q] * scale : splat(-INFINITY);
            store(weights.at + q * weights.per_query + (at - low), score);
            most[q] = larger(most[q], score);
        }
    }
}

// Scores of one of a few queries become weights, and their sum is kept.
static void soften(const Weights& weights, int q, int64_t count, const Vec& most) {
    float *weight = weights.at + q * weights.per_query, largest = most[0];
    for (int i = 1; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
    Vec parts = {};
    for (int64_t at = 0; at < count; at += LANES) {
        Vec part = exponential(load(weight + at) - largest);
        store(weight + at, part);
        parts += part;
    }
    weights.total[q] = sum(parts);
}

// Weights of a few queries, which are the tokens of one row.
static void weigh_few(const Shape& s, const Span& row, int64_t kv_head, const float* queries, const float* keys,
                      const float* values, int count, const Ints& position, int64_t low, int64_t limit, int64_t asked,
                      int window, float scale, float* room, const Weights& weights) {
    Vec most[FEW];
    for (int q = 0; q < count; q++) most[q] = splat(-INFINITY);
    score_few(s, row, kv_head, queries, keys, values, count, position, low, low, limit, asked, window, scale, room,
              weights, most);
    for (int q = 0; q < count; q++) soften(weights, q, limit - low, most[q]);
}
