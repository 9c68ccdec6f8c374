// Attention of packed ragged rows, read where the paged cache holds them: nothing is padded, gathered or masked ahead.
//
// The queries of one row that share a key head stand in the lanes of vectors, a few tokens' or many. Sums go over a
// query's own keys from first to last, so that a query's bits do not depend on which others it is computed beside.
#pragma once

#include <cmath>

#include "vector.h"

struct Shape {
    int64_t heads, kv_heads, head_dim, page_size;
};

// Where a row's tokens are: `count` new ones, the first of them at `position`, written already.
struct Span {
    const int64_t* pages;
    int64_t position, first, count;  // first: its index in the packed call
};

static inline const float* slot(const float* storage, const Shape& s, const Span& row, int64_t at, int64_t kv_head) {
    int64_t where = row.pages[at / s.page_size] * s.page_size + at % s.page_size;
    return storage + (where * s.kv_heads + kv_head) * s.head_dim;
}

// weights[keys][LANES] times values, for Q queries (lanes from `lane` on) and D vectors of the head from `from` on.
template <int Q, int D>
static void mix(const float* weights, const float* storage, const Shape& s, const Span& row, int64_t kv_head,
                int64_t low, int64_t limit, int lane, int64_t from, float* out, const Vec& total) {
    Vec acc[Q][D] = {};
    int64_t stride = s.kv_heads * s.head_dim;
    for (int64_t at = low; at < limit;) {
        int64_t stop = (at / s.page_size + 1) * s.page_size;
        const float* value = slot(storage, s, row, at, kv_head) + from;
        for (stop = stop < limit ? stop : limit; at < stop; at++, value += stride) {
            const float* weight = weights + (at - low) * LANES + lane;
            Vec v[D];
            for (int d = 0; d < D; d++) v[d] = load(value + d * LANES);
            for (int q = 0; q < Q; q++)
                for (int d = 0; d < D; d++) acc[q][d] += weight[q] * v[d];
        }
    }
    for (int q = 0; q < Q; q++)
        for (int d = 0; d < D; d++) store(out + q * s.head_dim + from + d * LANES, acc[q][d] / total[lane + q]);
}

typedef void (*Mix)(const float*, const float*, const Shape&, const Span&, int64_t, int64_t, int64_t, int, int64_t,
                    float*, const Vec&);
static const Mix MIXES[4][3] = {{mix<1, 1>, mix<1, 2>, mix<1, 4>},
                                {mix<2, 1>, mix<2, 2>, mix<2, 4>},
                                {mix<3, 1>, mix<3, 2>, mix<3, 4>},
                                {mix<4, 1>, mix<4, 2>, mix<4, 4>}};

// The head's last few numbers, where its size is no multiple of a vector.
static void mix_rest(const float* weights, const float* storage, const Shape& s, const Span& row, int64_t kv_head,
                     int64_t low, int64_t limit, int lane, int64_t from, float* out, const Vec& total) {
    for (int64_t d = from; d < s.head_dim; d++) {
        float acc = 0;
        for (int64_t at = low; at < limit; at++)
            acc += weights[(at - low) * LANES + lane] * slot(storage, s, row, at, kv_head)[d];
        out[d] = acc / total[lane];
    }
}

// Scores of the keys [low, limit) for the queries in `turned` [head_dim][LANES]; returns the largest per lane.
static Vec scores(const float* turned, const float* storage, const Shape& s, const Span& row, int64_t kv_head,
                  int64_t low, int64_t limit, const Ints& position, int window, float scale, float* out) {
    Vec most = Vec{} - INFINITY, never = Vec{} - INFINITY;
    int64_t stride = s.kv_heads * s.head_dim;
    for (int64_t at = low; at < limit;) {
        int64_t stop = (at / s.page_size + 1) * s.page_size;
        stop = stop < limit ? stop : limit;
        const float* key = slot(storage, s, row, at, kv_head);
        while (at < stop) {
            constexpr int TOGETHER = 4;  // keys at once, so that their sums do not wait for each other
            int64_t count = stop - at < TOGETHER ? stop - at : TOGETHER;
            Vec acc[TOGETHER] = {};
            if (count == TOGETHER) {
                for (int64_t d = 0; d < s.head_dim; d++) {
                    Vec q = load(turned + d * LANES);
                    for (int i = 0; i < TOGETHER; i++) acc[i] += q * key[i * stride + d];
                }
            } else {
                for (int64_t d = 0; d < s.head_dim; d++) {
                    Vec q = load(turned + d * LANES);
                    for (int i = 0; i < count; i++) acc[i] += q * key[i * stride + d];
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

// Queries [block * LANES, ...) of those of one row that share a key head; query m is token m / share, head m % share.
static void attend(const Shape& s, const Span& row, int64_t kv_head, int64_t block, const float* q, int64_t q_stride,
                   const float* keys, const float* values, int window, float scale, float* out, float* scratch) {
    int64_t share = s.heads / s.kv_heads, d = s.head_dim, begin = block * LANES;
    int64_t left = row.count * share - begin;
    int count = left < LANES ? int(left) : LANES;
    float *turned = scratch, *mixed = turned + d * LANES, *weights = mixed + d * LANES;
    Ints position = {};
    for (int lane = 0; lane < LANES; lane++) {
        int64_t m = begin + (lane < count ? lane : 0), token = m / share, head = kv_head * share + m % share;
        position[lane] = int32_t(row.position + token);
        const float* one = q + (row.first + token) * q_stride + head * d;
        for (int64_t i = 0; i < d; i++) turned[i * LANES + lane] = one[i];
    }
    int64_t limit = position[count - 1] + 1, low = window && position[0] >= window ? position[0] - window + 1 : 0;
    Vec most = scores(turned, keys, s, row, kv_head, low, limit, position, window, scale, weights), total = {};
    for (int64_t at = 0; at < limit - low; at++) {
        Vec weight = exponential(load(weights + at * LANES) - most);
        store(weights + at * LANES, weight);
        total += weight;
    }
    for (int lane = 0; lane < count; lane += 4) {
        int together = count - lane < 4 ? count - lane : 4;
        int64_t from = 0;
        float* to = mixed + lane * d;
        for (int vectors = 4; vectors; vectors /= 2)
            for (; d - from >= vectors * LANES; from += vectors * LANES)
                MIXES[together - 1][vectors / 2](weights, values, s, row, kv_head, low, limit, lane, from, to, total);
        for (int i = 0; i < together && from < d; i++)
            mix_rest(weights, values, s, row, kv_head, low, limit, lane + i, from, to + i * d, total);
    }
    for (int lane = 0; lane < count; lane++) {
        int64_t m = begin + lane, token = m / share, head = kv_head * share + m % share;
        std::memcpy(out + ((row.first + token) * s.heads + head) * d, mixed + lane * d, sizeof(float) * d);
    }
}
