// Attention of packed ragged rows, read where the paged cache holds them: nothing is padded, gathered or masked ahead.
//
// The queries of one row that share a key head stand in the lanes of vectors, a few tokens' or many. Sums go over a
// query's own keys from first to last, so that a query's bits do not depend on which others it is computed beside.
#pragma once

#include <cmath>

#include "model.h"
#include "vector.h"

// Where a row's tokens are: `count` new ones, the first of them at `position`, written already. A node of a tree is a
// row of its own: from position `root` on, its branch lies at root + branch[0], root + branch[1], ...
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

// Where keys that the next task begins with lie one after another: asked for while this one mixes values.
struct Next {
    const float* keys;  // null: there are none
    int64_t count;
};

static inline void ask(const float* from, int64_t away) { __builtin_prefetch(from + away); }

// What queries make of keys: weight of query `i` and key `low` + k is at[k * per_key + i * per_query].
struct Weights {
    float* at;
    int64_t per_key, per_query;
    float* total;  // [LANES]: their sums
};

// Weights times values, for Q queries from `lane` on and D vectors of the head from `from` on.
template <int Q, int D>
static void mix(const Weights& weights, const float* storage, const Shape& s, const Span& row, int64_t kv_head,
                int64_t low, int64_t limit, int lane, int64_t from, const Next& next, float* out) {
    Vec acc[Q][D] = {};
    int64_t stride = s.kv_heads * s.head_dim, known = low + (next.keys ? next.count : 0);
    for (int64_t at = low; at < limit;) {
        int64_t stop = together_until(s, row, at, limit), away = 0;
        const float* value = slot(storage, s, row, at, kv_head) + from;
        if (at < known) {
            stop = stop < known ? stop : known;
            away = next.keys + (at - low) * stride + from - value;
        }
        for (; at < stop; at++, value += stride) {
            const float* weight = weights.at + (at - low) * weights.per_key + lane * weights.per_query;
            Vec v[D];
            for (int d = 0; d < D; d++) {
                v[d] = load(value + d * LANES);
                ask(value + d * LANES, away);
            }
            for (int q = 0; q < Q; q++)
                for (int d = 0; d < D; d++) acc[q][d] = fma(splat(weight[q * weights.per_query]), v[d], acc[q][d]);
        }
    }
    for (int q = 0; q < Q; q++)
        for (int d = 0; d < D; d++) store(out + q * s.head_dim + from + d * LANES, acc[q][d] / weights.total[lane + q]);
}

typedef void (*Mix)(const Weights&, const float*, const Shape&, const Span&, int64_t, int64_t, int64_t, int, int64_t,
                    const Next&, float*);
constexpr int QUERIES = 8;  // mixed at once; of four vectors of the head, half as many: sums have to fit the registers

template <int... Q>
static Mix mix_of(int queries, int vectors, std::integer_sequence<int, Q...>) {
    static const Mix one[] = {mix<Q + 1, 1>...}, two[] = {mix<Q + 1, 2>...};
    static const Mix four[] = {mix<Q % (QUERIES / 2) + 1, 4>...};
    return (vectors == 1 ? one : vectors == 2 ? two : four)[queries - 1];
}

// The head's last few numbers, where its size is no multiple of a vector.
static void mix_rest(const Weights& weights, const float* storage, const Shape& s, const Span& row, int64_t kv_head,
                     int64_t low, int64_t limit, int lane, int64_t from, float* out) {
    for (int64_t d = from; d < s.head_dim; d++) {
        float acc = 0;
        for (int64_t at = low; at < limit; at++)
            acc += weights.at[(at - low) * weights.per_key + lane * weights.per_query] *
                   slot(storage, s, row, at, kv_head)[d];
        out[d] = acc / weights.total[lane];
    }
}

// Scores are sums by quads: number j of a head belongs to sum j / QUAD % SUMS, and the sums are added pair by pair.
constexpr int QUAD_SUMS = LANES / QUAD, TOGETHER = 4;  // keys at once, so that sums do not wait for each other

// Products of K keys with the queries in `turned` [head_dim][LANES].
template <int K>
static inline void products(const float* turned, const float* key, int64_t stride, int64_t away, int64_t d, Vec* out) {
    Vec acc[K][QUAD_SUMS] = {};
    for (int64_t from = 0; from < d; from += LANES) {
        for (int i = 0; i < K; i++) ask(key + i * stride + from, away);
        if (d - from >= LANES) {
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++) {
                Vec q = load(turned + (from + j) * LANES);
                for (int i = 0; i < K; i++)
                    acc[i][j / QUAD] = fma(q, splat(key[i * stride + from + j]), acc[i][j / QUAD]);
            }
        } else {
            for (int64_t j = 0; j < d - from; j++)
                for (int i = 0; i < K; i++)
                    acc[i][j / QUAD] =
                        fma(load(turned + (from + j) * LANES), splat(key[i * stride + from + j]), acc[i][j / QUAD]);
        }
    }
    for (int i = 0; i < K; i++) {
        for (int step = 1; step < QUAD_SUMS; step *= 2)
            for (int j = 0; j < QUAD_SUMS; j += 2 * step) acc[i][j] += acc[i][j + step];
        out[i] = acc[i][0];
    }
}

// Weights of many queries, [keys][LANES]: a query in every lane.
static void weigh_many(const Shape& s, const Span& row, int64_t kv_head, const float* queries, const float* keys,
                       const float* values, int, const Ints& position, int64_t low, int64_t limit, int window,
                       float scale, float* turned, const Weights& weights) {
    int64_t d = s.head_dim, stride = s.kv_heads * d;
    for (int64_t i = 0; i < d; i++)
        for (int lane = 0; lane < LANES; lane++) turned[i * LANES + lane] = queries[lane * d + i];
    Vec most = splat(-INFINITY), never = most;
    for (int64_t at = low; at < limit;) {
        int64_t stop = together_until(s, row, at, limit);
        const float* key = slot(keys, s, row, at, kv_head);
        while (at < stop) {
            int count = stop - at < TOGETHER ? 1 : TOGETHER;
            Vec sums[TOGETHER];
            (count == 1 ? products<1> : products<TOGETHER>)(turned, key, stride, values - keys, d, sums);
            for (int i = 0; i < count; i++, at++, key += stride) {
                Ints seen = position >= int32_t(at);
                if (window) seen &= position < int32_t(at) + window;
                Vec score = seen ? sums[i] * scale : never;
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

constexpr int FEW = LANES / 2;  // queries at most of which a vector of keys is the better one

// Vectors of a head, the last one filled up with zeros.
static inline int64_t vectors_of(int64_t head_dim) { return (head_dim + LANES - 1) / LANES; }

// The first `left` numbers, or a whole vector of them.
static inline Vec load_rest(const float* from, int64_t left) {
    return left >= LANES ? load(from) : load_some(from, int(left));
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

// Keys of one head one after another, and how far away from them something to ask for is.
struct Keys {
    const float* first;
    int64_t stride, away;
};

// Products of LANES keys with N `spread` queries. Four keys at a time are turned within quads of lanes, so that a
// lane's sum is of one key and one quad.
template <int N>
static void products_of_few(const Keys& keys, const float* queries, int64_t d, Vec* out) {
    Vec sums[N][QUAD_SUMS];
    const float* key = keys.first;
#pragma GCC unroll 4
    for (int part = 0; part < QUAD_SUMS; part++, key += QUAD * keys.stride) {
        Vec acc[N] = {};
        const float* q = queries;
        for (int64_t from = 0; from < d; from += LANES) {
            Vec four[QUAD];
            for (int i = 0; i < QUAD; i++) {
                four[i] = load_rest(key + i * keys.stride + from, d - from);
                ask(key + i * keys.stride + from, keys.away);
            }
            turn_quads(four);
#pragma GCC unroll 4
            for (int j = 0; j < QUAD; j++)
#pragma GCC unroll 8
                for (int n = 0; n < N; n++, q += LANES) acc[n] = fma(four[j], load(q), acc[n]);
        }
        for (int n = 0; n < N; n++) sums[n][part] = acc[n];
    }
    for (int n = 0; n < N; n++) out[n] = add_quads(sums[n]);
}

// The keys [at, stop) copied one after another, as products read LANES of them where they are fewer or apart.
static Keys gather(const float* keys, const float* values, const Shape& s, const Span& row, int64_t kv_head, int64_t at,
                   int64_t stop, float* copied) {
    int64_t d = s.head_dim, stride = s.kv_heads * d;
    for (float* to = copied; at < stop;) {
        int64_t until = together_until(s, row, at, stop);
        const float* key = slot(keys, s, row, at, kv_head);
        for (; at < until; at++, key += stride, to += d) {
            std::memcpy(to, key, sizeof(float) * d);
            for (int64_t i = 0; i < d; i += LANES) ask(key + i, values - keys);
        }
    }
    return {copied, d, 0};
}

typedef void (*Products)(const Keys&, const float*, int64_t, Vec*);
template <int... N>
static Products products_for(int count, std::integer_sequence<int, N...>) {
    static const Products known[] = {products_of_few<N + 1>...};
    return known[count - 1];
}

// Floats of room to weigh keys in, for queries spread and keys copied, or queries turned.
static inline int64_t weigh_room(int64_t d) { return vectors_of(d) * QUAD * LANES * FEW + LANES * d; }

// Weights of a few queries, [queries][keys]: a key in every lane. The same sums in the same order.
static void weigh_few(const Shape& s, const Span& row, int64_t kv_head, const float* queries, const float* keys,
                      const float* values, int count, const Ints& position, int64_t low, int64_t limit, int window,
                      float scale, float* room, const Weights& weights) {
    int64_t d = s.head_dim, stride = s.kv_heads * d, until = low;
    float* copied = room + vectors_of(d) * QUAD * LANES * FEW;
    Products products = products_for(count, std::make_integer_sequence<int, FEW>());
    const float* run = nullptr;  // keys that lie one after another, from here up to `until`
    Vec most[FEW];
    Ints lane = {};
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int q = 0; q < count; q++) most[q] = splat(-INFINITY);
    spread(queries, count, d, room);
    for (int64_t at = low; at < limit; at += LANES, run += LANES * stride) {
        if (at >= until) {
            until = together_until(s, row, at, limit);
            run = slot(keys, s, row, at, kv_head);
        }
        int64_t stop = at + LANES < limit ? at + LANES : limit;
        Vec sums[FEW];
        products(at + LANES <= until ? Keys{run, stride, values - keys}
                                     : gather(keys, values, s, row, kv_head, at, stop, copied),
                 room, d, sums);
        Ints where = lane + int32_t(at);
        for (int q = 0; q < count; q++) {
            Ints seen = where <= position[q];  // which is below `limit`
            if (window) seen &= where > position[q] - window;
            Vec score = seen ? sums[q] * scale : splat(-INFINITY);
            store(weights.at + q * weights.per_query + (at - low), score);
            most[q] = larger(most[q], score);
        }
    }
    for (int q = 0; q < count; q++) {
        float *weight = weights.at + q * weights.per_query, largest = most[q][0];
        for (int i = 1; i < LANES; i++) largest = most[q][i] > largest ? most[q][i] : largest;
        Vec parts = {};
        for (int64_t at = 0; at < limit - low; at += LANES) {
            Vec part = exponential(load(weight + at) - largest);
            store(weight + at, part);
            parts += part;
        }
        weights.total[q] = sum(parts);
    }
}

// The first key that a row's queries from `begin` on read: sums are grouped by where keys stand.
static inline int64_t lowest(int64_t position, int64_t window) {
    int64_t low = window && position >= window ? position - window + 1 : 0;
    return low - low % LANES;
}

// Queries [block * LANES, ...) of those of one row that share a key head; query m is token m / share, head m % share.
static void attend(const Shape& s, const Span& row, int64_t kv_head, int64_t block, const float* q, int64_t q_stride,
                   const float* keys, const float* values, int window, float scale, const Next& next, float* out,
                   float* scratch) {
    int64_t share = s.heads / s.kv_heads, d = s.head_dim, begin = block * LANES;
    int64_t left = row.count * share - begin;
    int count = left < LANES ? int(left) : LANES;
    float *mixed = scratch, *queries = mixed + d * LANES, *total = queries + d * LANES, *room = total + LANES;
    Ints position = {};
    for (int lane = 0; lane < LANES; lane++) {
        int64_t m = begin + (lane < count ? lane : 0), token = m / share, head = kv_head * share + m % share;
        position[lane] = int32_t(row.position + token);
        std::memcpy(queries + lane * d, q + (row.first + token) * q_stride + head * d, sizeof(float) * d);
    }
    int64_t limit = position[count - 1] + 1, low = lowest(position[0], window);
    bool few = count <= FEW;
    Weights weights{room + weigh_room(d), few ? 1 : LANES, few ? (limit - low + LANES - 1) / LANES * LANES : 1, total};
    (few ? weigh_few : weigh_many)(s, row, kv_head, queries, keys, values, count, position, low, limit, window, scale,
                                   room, weights);
    int most = d < 4 * LANES || count <= QUERIES / 2 ? QUERIES : QUERIES / 2;
    for (int lane = 0; lane < count; lane += most) {
        int together = count - lane < most ? count - lane : most;
        int64_t from = 0;
        float* to = mixed + lane * d;
        for (int vectors = 4; vectors; vectors /= 2)
            for (; d - from >= vectors * LANES; from += vectors * LANES)
                mix_of(together, vectors, std::make_integer_sequence<int, QUERIES>())(
                    weights, values, s, row, kv_head, low, limit, lane, from, lane ? Next{} : next, to);
        for (int i = 0; i < together && from < d; i++)
            mix_rest(weights, values, s, row, kv_head, low, limit, lane + i, from, to + i * d);
    }
    for (int lane = 0; lane < count; lane++) {
        int64_t m = begin + lane, token = m / share, head = kv_head * share + m % share;
        std::memcpy(out + ((row.first + token) * s.heads + head) * d, mixed + lane * d, sizeof(float) * d);
    }
}

// Floats of scratch for rows of `longest` tokens.
static inline int64_t attention_scratch(const Shape& s, int64_t longest) {
    return (2 * s.head_dim + 1 + longest + LANES) * LANES + weigh_room(s.head_dim);
}
