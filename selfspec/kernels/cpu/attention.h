// Attention of packed ragged rows that reads keys and values directly from the paged cache, without padding, gathering
// or masks.
//
// The queries of one row that share a key head are processed together. Sums run over a query's keys in order, so the
// bits of its result do not depend on the queries that are processed with it.
#pragma once

#include "scores.h"

// The first keys of the next task, which are contiguous. They are prefetched while the current task mixes values.
template <typename Number>
struct Next {
    const Number* keys;  // null: no next task
    int64_t count;
};

constexpr int64_t ASKED = 16384;  // maximum bytes of prefetched keys: the first-level cache also holds values

// The keys [low, limit) whose values are mixed.
struct KeyRange {
    int64_t low, limit;
};

// Weights times values, for Q queries from `lane` on and D vectors of the head from `from` on.
template <typename Number, int Q, int D>
static void mix(const Weights& weights, const Kept<Number>& values, const Shape& s, const Span& row, int64_t kv_head,
                const KeyRange& keys, int lane, int64_t from, const Next<Number>& next, float* out) {
    Vec acc[Q][D] = {};
    int64_t stride = s.kv_heads * s.head_dim, low = keys.low, limit = keys.limit;
    int64_t known = low + (next.keys ? next.count : 0);
    for (int64_t at = low; at < limit;) {
        int64_t stop = together_until(s, at, limit), away = 0;
        Kept<Number> value = slot(values, s, row, at, kv_head);
        if (at < known) {
            stop = stop < known ? stop : known;
            away = next.keys + (at - low) * stride - value.numbers;
        }
        for (; at < stop; at++, value = after(value, s, 1)) {
            const float* weight = weights.at + (at - low) * weights.per_key + lane * weights.per_query;
            for (int d = 0; d < D; d++)
                if (begins_line<Number>(from + d * LANES)) ask(value.numbers + from + d * LANES, away);
            if constexpr (Q < D) {  // the smaller number of operands is kept in registers
                Vec w[Q];
                for (int q = 0; q < Q; q++) w[q] = splat(weight[q * weights.per_query]);
                for (int d = 0; d < D; d++) {
                    Vec v = held(read(value, from, d * LANES));
                    for (int q = 0; q < Q; q++) acc[q][d] = fma(w[q], v, acc[q][d]);
                }
            } else {
                Vec v[D];
                for (int d = 0; d < D; d++) v[d] = read(value, from, d * LANES);
                for (int q = 0; q < Q; q++) {
                    Vec w = splat(weight[q * weights.per_query]);
                    for (int d = 0; d < D; d++) acc[q][d] = fma(w, v[d], acc[q][d]);
                }
            }
        }
    }
    for (int q = 0; q < Q; q++)
        for (int d = 0; d < D; d++)
            store(out + q * s.head_dim + from + d * LANES, acc[q][d] / weights.total[lane + q]);
}

template <typename Number>
using Mix = void (*)(const Weights&, const Kept<Number>&, const Shape&, const Span&, int64_t, const KeyRange&, int,
                     int64_t, const Next<Number>&, float*);
// Queries mixed at once for one, two and four vectors of the head: as many sums as fit the registers.
constexpr int OF_ONE = 8, OF_TWO = LANES == 16 ? 8 : 6, OF_FOUR = LANES == 16 ? 4 : 3;

template <typename Number, int... Q>
static Mix<Number> mix_of(int queries, int vectors, std::integer_sequence<int, Q...>) {
    static const Mix<Number> one[] = {mix<Number, Q + 1, 1>...}, two[] = {mix<Number, Q % OF_TWO + 1, 2>...};
    static const Mix<Number> four[] = {mix<Number, Q % OF_FOUR + 1, 4>...};
    return (vectors == 1 ? one : vectors == 2 ? two : four)[queries - 1];
}

// The same for one query and fewer numbers of the head than a vector holds.
template <int N, typename Number>
static void mix_part(const Weights& weights, const Kept<Number>& values, const Shape& s, const Span& row,
                     int64_t kv_head, const KeyRange& keys, int lane, int64_t from, float* out) {
    Vec acc = {};
    int64_t low = keys.low;
    for (int64_t at = low; at < keys.limit;) {
        int64_t stop = together_until(s, at, keys.limit);
        Kept<Number> value = slot(values, s, row, at, kv_head);
        for (; at < stop; at++, value = after(value, s, 1)) {
            const float* weight = weights.at + (at - low) * weights.per_key + lane * weights.per_query;
            acc = fma(splat(*weight), read_some(value, from, N), acc);
        }
    }
    store_some(out + from, acc / weights.total[lane], N);
}

// The last numbers of a head whose size is no multiple of a vector.
template <int N = LANES / 2, typename Number>
static void mix_rest(const Weights& weights, const Kept<Number>& values, const Shape& s, const Span& row,
                     int64_t kv_head, const KeyRange& keys, int lane, int64_t from, float* out) {
    for (; s.head_dim - from >= N; from += N) mix_part<N>(weights, values, s, row, kv_head, keys, lane, from, out);
    if constexpr (N > 1) mix_rest<N / 2>(weights, values, s, row, kv_head, keys, lane, from, out);
}

// The same for `count` queries from `lane` on and the whole head. mixed: [LANES][head_dim].
template <typename Number>
static void mix_all(const Weights& weights, const Kept<Number>& values, const Shape& s, const Span& row,
                    int64_t kv_head, const KeyRange& keys, int lane, int count, const Next<Number>& next,
                    float* mixed) {
    int64_t d = s.head_dim;
    bool is_cheap = LANES == 16 && std::is_same_v<Number, float>;  // to read values again for other queries
    int widest = is_cheap || count <= OF_FOUR ? 4 : 2, first = lane, end = lane + count;
    int most = widest == 4 && d >= 4 * LANES ? OF_FOUR : d >= 2 * LANES ? OF_TWO : OF_ONE;
    for (; lane < end; lane += most) {
        int together = end - lane < most ? end - lane : most;
        int64_t from = 0;
        float* to = mixed + lane * d;
        for (int vectors = widest; vectors; vectors /= 2)
            for (; d - from >= vectors * LANES; from += vectors * LANES)
                mix_of<Number>(together, vectors, std::make_integer_sequence<int, OF_ONE>())(
                    weights, values, s, row, kv_head, keys, lane, from, lane > first ? Next<Number>{} : next, to);
        for (int i = 0; i < together && from < d; i++)
            mix_rest(weights, values, s, row, kv_head, keys, lane + i, from, to + i * d);
    }
}

// The first key that the queries of a row from `begin` on read, rounded so that sums are grouped by key positions.
static inline int64_t lowest(int64_t position, int64_t window) {
    int64_t low = window && position >= window ? position - window + 1 : 0;
    return low - low % LANES;
}

// Queries [block * LANES, ...) of a row that share a key head. Query m is token m / share, head m % share. The first
// `asked` of their keys are prefetched already.
template <typename Number>
static void attend(const Shape& s, const Span& row, int64_t kv_head, int64_t block, const float* q, int64_t q_stride,
                   const Kept<Number>& keys, const Kept<Number>& values, int64_t asked, int window, float scale,
                   const Next<Number>& next, float* out, float* scratch) {
    int64_t share = s.heads / s.kv_heads, d = s.head_dim, begin = block * LANES;
    int64_t left = row.count * share - begin;
    int count = left < LANES ? int(left) : LANES;
    float *mixed = scratch + (-(reinterpret_cast<uintptr_t>(scratch) / 4) & (CACHE_LINE / 4 - 1)), *queries = mixed + d * LANES, *total = queries + d * LANES, *memory = total + LANES;
    Ints position = {};
    for (int lane = 0; lane < LANES; lane++) {
        int64_t m = begin + (lane < count ? lane : 0), token = m / share, head = kv_head * share + m % share;
        position[lane] = int32_t(row.position + token);
        std::memcpy(queries + lane * d, q + (row.first + token) * q_stride + head * d, sizeof(float) * d);
    }
    int64_t limit = position[count - 1] + 1, low = lowest(position[0], window);
    bool few = count <= FEW;
    int64_t per_query = few ? (limit - low + LANES - 1) / LANES * LANES : 1;
    Weights weights{memory + weigh_floats(d), few ? 1 : LANES, per_query, total};
    (few ? weigh_few<Number> : weigh_many<Number>)(s, row, kv_head, queries, keys, values, count, position, low, limit, asked, window,
                                   scale, memory, weights);
    mix_all(weights, values, s, row, kv_head, {low, limit}, 0, count, next, mixed);
    for (int lane = 0; lane < count; lane++) {
        int64_t m = begin + lane, token = m / share, head = kv_head * share + m % share;
        std::memcpy(out + ((row.first + token) * s.heads + head) * d, mixed + lane * d, sizeof(float) * d);
    }
}

// Floats of scratch memory for rows of at most `longest` tokens.
static inline int64_t attention_scratch(const Shape& s, int64_t longest) {
    return (2 * s.head_dim + 1 + longest + LANES) * LANES + weigh_floats(s.head_dim) + CACHE_LINE / 4;
}
