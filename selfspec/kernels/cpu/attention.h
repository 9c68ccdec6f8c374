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

// What queries make of keys: weight of key `at` and query `i` is at[key * per_key + i * per_query].
struct Weights {
    float* at;
    int64_t per_key, per_query;
    float* total;  // [LANES]: their sums
};

// Weights times values, for Q queries from `lane` on and D vectors of the head from `from` on.
template <int Q, int D>
static void mix(const Weights& weights, const float* storage, const Shape& s, const Span& row, int64_t kv_head,
                int64_t low, int64_t limit, int lane, int64_t from, float* out) {
    Vec acc[Q][D] = {};
    int64_t stride = s.kv_heads * s.head_dim;
    for (int64_t at = low; at < limit;) {
        int64_t stop = together_until(s, row, at, limit);
        const float* value = slot(storage, s, row, at, kv_head) + from;
        for (; at < stop; at++, value += stride) {
            const float* weight = weights.at + (at - low) * weights.per_key + lane * weights.per_query;
            Vec v[D];
            for (int d = 0; d < D; d++) v[d] = load(value + d * LANES);
            for (int q = 0; q < Q; q++)
                for (int d = 0; d < D; d++) acc[q][d] = fma(splat(weight[q * weights.per_query]), v[d], acc[q][d]);
        }
    }
    for (int q = 0; q < Q; q++)
        for (int d = 0; d < D; d++) store(out + q * s.head_dim + from + d * LANES, acc[q][d] / weights.total[lane + q]);
}

typedef void (*Mix)(const Weights&, const float*, const Shape&, const Span&, int64_t, int64_t, int64_t, int, int64_t,
                    float*);
static const Mix MIXES[4][3] = {{mix<1, 1>, mix<1, 2>, mix<1, 4>},
                                {mix<2, 1>, mix<2, 2>, mix<2, 4>},
                                {mix<3, 1>, mix<3, 2>, mix<3, 4>},
                                {mix<4, 1>, mix<4, 2>, mix<4, 4>}};

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

constexpr int TOGETHER = 4;  // sums at once, so that they do not wait for each other

// Scores of the keys [low, limit) for the queries in `turned` [head_dim][LANES]; returns the largest per lane.
static Vec scores(const float* turned, const float* storage, const Shape& s, const Span& row, int64_t kv_head,
                  int64_t low, int64_t limit, const Ints& position, int window, float scale, float* out) {
    Vec most = splat(-INFINITY), never = splat(-INFINITY);
    int64_t stride = s.kv_heads * s.head_dim;
    for (int64_t at = low; at < limit;) {
        int64_t stop = together_until(s, row, at, limit);
        const float* key = slot(storage, s, row, at, kv_head);
        while (at < stop) {
            int64_t count = stop - at < TOGETHER ? stop - at : TOGETHER;
            Vec acc[TOGETHER] = {};
            if (count == TOGETHER) {
                for (int64_t d = 0; d < s.head_dim; d++) {
                    Vec q = load(turned + d * LANES);
                    for (int i = 0; i < TOGETHER; i++) acc[i] = fma(q, splat(key[i * stride + d]), acc[i]);
                }
            } else {
                for (int64_t d = 0; d < s.head_dim; d++) {
                    Vec q = load(turned + d * LANES);
                    for (int i = 0; i < count; i++) acc[i] = fma(q, splat(key[i * stride + d]), acc[i]);
                }
            }
            for (int i = 0; i < count; i++, at++, key += stride) {
                Ints seen = position >= int32_t(at);
                if (window) seen &= position < int32_t(at) + window;
                Vec score = seen ? acc[i] * scale : never;
                most = larger(most, score);
                store(out + (at - low) * LANES, score);
            }
        }
    }
    return most;
}

// Weights of many queries, [keys][LANES]: a query in every lane.
static void weigh_many(const Shape& s, const Span& row, int64_t kv_head, const float* queries, const float* keys,
                       int, const Ints& position, int64_t low, int64_t limit, int window, float scale,
                       float* turned, const Weights& weights) {
    for (int64_t d = 0; d < s.head_dim; d++)
        for (int lane = 0; lane < LANES; lane++)
            turned[d * LANES + lane] = queries[lane * s.head_dim + d];
    Vec most = scores(turned, keys, s, row, kv_head, low, limit, position, window, scale, weights.at);
    Vec parts[LANES] = {};  // sums of every LANES-th key
    for (int64_t at = 0; at < limit - low; at++) {
        Vec weight = exponential(load(weights.at + at * LANES) - most);
        store(weights.at + at * LANES, weight);
        parts[at % LANES] += weight;
    }
    for (int i = 1; i < LANES; i++) parts[0] += parts[i];
    store(weights.total, parts[0]);
}

// Weights of a few queries, [LANES][keys]: a key in every lane. The same sums in the same order.
static void weigh_few(const Shape& s, const Span& row, int64_t kv_head, const float* queries, const float* keys,
                      int count, const Ints& position, int64_t low, int64_t limit, int window, float scale,
                      float* turned, const Weights& weights) {
    int64_t d = s.head_dim, stride = s.kv_heads * d;
    Vec most[LANES];
    for (int q = 0; q < count; q++) most[q] = splat(-INFINITY);
    Ints lane = {};
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int64_t at = low; at < limit;) {
        int64_t stop = together_until(s, row, at, limit);
        int together = stop - at < LANES ? int(stop - at) : LANES;
        const float* key = slot(keys, s, row, at, kv_head);
        int64_t from = 0;
        for (; from + LANES <= d; from += LANES) {
            Vec block[LANES];
            for (int i = 0; i < LANES; i++) block[i] = load(key + (i < together ? i : 0) * stride + from);
            transpose(block);
            for (int i = 0; i < LANES; i++) store(turned + (from + i) * LANES, block[i]);
        }
        for (; from < d; from++)
            for (int i = 0; i < LANES; i++) turned[from * LANES + i] = key[(i < together ? i : 0) * stride + from];
        for (int q0 = 0; q0 < count; q0 += TOGETHER) {
            Vec acc[TOGETHER] = {};
            const float* query = queries + q0 * d;
            for (int64_t i = 0; i < d; i++)
                for (int j = 0; j < TOGETHER; j++)
                    acc[j] = fma(load(turned + i * LANES), splat(query[j * d + i]), acc[j]);
            for (int q = q0; q < count && q < q0 + TOGETHER; q++) {
                Ints where = lane + int32_t(at), seen = (where <= position[q]) & (lane < together);
                if (window) seen &= where > position[q] - window;
                Vec score = seen ? acc[q - q0] * scale : splat(-INFINITY);
                store(weights.at + q * weights.per_query + (at - low), score);
                most[q] = larger(most[q], score);
            }
        }
        at += together;
    }
    for (int q = 0; q < count; q++) {
        float *weight = weights.at + q * weights.per_query, largest = most[q][0];
        for (int i = 1; i < LANES; i++) largest = most[q][i] > largest ? most[q][i] : largest;
        Vec parts = {};
        for (int64_t at = 0; at < limit - low; at += LANES) {
            int64_t left = limit - low - at;
            Vec score = load(weight + at), never = splat(-INFINITY);
            score = lane < int32_t(left < LANES ? left : LANES) ? score : never;
            Vec part = exponential(score - largest);
            store(weight + at, part);
            parts += part;
        }
        weights.total[q] = sum(parts);
    }
}

constexpr int FEW = LANES / 2;  // queries at most of which a vector of keys is the better one

// Queries [block * LANES, ...) of those of one row that share a key head; query m is token m / share, head m % share.
static void attend(const Shape& s, const Span& row, int64_t kv_head, int64_t block, const float* q, int64_t q_stride,
                   const float* keys, const float* values, int window, float scale, float* out, float* scratch) {
    int64_t share = s.heads / s.kv_heads, d = s.head_dim, begin = block * LANES;
    int64_t left = row.count * share - begin;
    int count = left < LANES ? int(left) : LANES;
    float *turned = scratch, *mixed = turned + d * LANES, *queries = mixed + d * LANES, *rest = queries + d * LANES;
    Ints position = {};
    for (int lane = 0; lane < LANES; lane++) {
        int64_t m = begin + (lane < count ? lane : 0), token = m / share, head = kv_head * share + m % share;
        position[lane] = int32_t(row.position + token);
        std::memcpy(queries + lane * d, q + (row.first + token) * q_stride + head * d, sizeof(float) * d);
    }
    int64_t limit = position[count - 1] + 1, low = window && position[0] >= window ? position[0] - window + 1 : 0;
    low -= low % LANES;  // sums are grouped by where keys stand
    bool few = count <= FEW;
    Weights weights{rest + LANES, few ? 1 : LANES, few ? limit - low + LANES : 1, rest};
    (few ? weigh_few : weigh_many)(s, row, kv_head, queries, keys, count, position, low, limit, window, scale, turned,
                                   weights);
    for (int lane = 0; lane < count; lane += 4) {
        int together = count - lane < 4 ? count - lane : 4;
        int64_t from = 0;
        float* to = mixed + lane * d;
        for (int vectors = 4; vectors; vectors /= 2)
            for (; d - from >= vectors * LANES; from += vectors * LANES)
                MIXES[together - 1][vectors / 2](weights, values, s, row, kv_head, low, limit, lane, from, to);
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
    return (3 * s.head_dim + longest + 1 + LANES) * LANES;
}
