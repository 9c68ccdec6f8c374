// Attention of packed ragged rows that reads keys and values directly from the paged cache, without padding, gathering
// or masks.
//
// The queries of one row that share a key head are processed together. Keys are split at multiples of SPLIT positions,
// which threads may share (flash-decoding, arXiv 2311.01282). Sums run over the keys of a split in order, and over the
// splits in order. So the bits of a query's result depend neither on the queries that are processed with it nor on the
// threads.
#pragma once

#include "scores.h"

// What is prefetched while values are mixed: contiguous keys that are read next, and values of the next split.
template <typename Number>
struct Next {
    const Number* keys;  // or null
    int64_t count;
    int64_t value = 0;  // distance in numbers, or 0
};

constexpr int64_t ASKED = 16384;  // maximum bytes of prefetched keys: the first-level cache also holds values

constexpr int64_t SPLIT = 256;  // keys and values of a head in two bytes: 64 KB, which the second-level cache holds

struct KeyRange {  // the keys [low, limit)
    int64_t low, limit;
};

static inline int64_t splits_of(const KeyRange& keys) {
    return (keys.limit + SPLIT - 1) / SPLIT - keys.low / SPLIT;
}

static inline KeyRange split_of(const KeyRange& keys, int64_t split) {
    int64_t first = keys.low / SPLIT + split;
    return {std::max(keys.low, first * SPLIT), std::min(keys.limit, (first + 1) * SPLIT)};
}

// The attention of LANES queries to some of their keys.
struct Partial {
    float *most, *total, *mixed;  // [LANES] as in `Weights`; [LANES][head_dim]: sums of weights times values
};

static inline int64_t partial_floats(int64_t head_dim) { return (head_dim + 2) * LANES; }
static inline Partial partial_at(float* memory) { return {memory, memory + LANES, memory + 2 * LANES}; }

// Add the attention of `count` queries to later keys.
static void add_partial(const Partial& later, int count, int64_t head_dim, const Partial& to) {
    Vec before = load(to.most), after = load(later.most), most = larger(before, after);
    Vec first = exponential(before - most), second = exponential(after - most);
    store(to.most, most);
    store(to.total, fma(load(to.total), first, load(later.total) * second));
    for (int lane = 0; lane < count; lane++) {
        float *own = to.mixed + lane * head_dim, *other = later.mixed + lane * head_dim;
        Vec a = splat(first[lane]), b = splat(second[lane]);
        int64_t i = 0;
        for (; i + LANES <= head_dim; i += LANES) store(own + i, fma(load(own + i), a, load(other + i) * b));
        int rest = int(head_dim - i);
        if (rest) store_some(own + i, fma(load_some(own + i, rest), a, load_some(other + i, rest) * b), rest);
    }
}

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
                if (begins_line<Number>(from + d * LANES)) {
                    if (away) ask(value.numbers + from + d * LANES, away);
                    if (next.value) ask_later(value.numbers + from + d * LANES, next.value);
                }
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
            store(out + q * s.head_dim + from + d * LANES, acc[q][d]);
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
    store_some(out + from, acc, N);
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

// Queries [block * LANES, ...) of a row that share a key head. Query m is token m / share, head m % share.
struct Queries {
    Span span;
    int64_t kv_head, block;
    int count;      // at most LANES
    KeyRange keys;  // that they read

    Queries(const Shape& s, const Span& span, int64_t kv_head, int64_t block, int64_t window)
        : span(span), kv_head(kv_head), block(block) {
        int64_t share = s.heads / s.kv_heads, begin = block * LANES;
        count = int(std::min(span.count * share - begin, int64_t(LANES)));
        keys = {lowest(span.position + begin / share, window), span.position + (begin + count - 1) / share + 1};
    }
};

// Attention of queries to one split of their keys. The first `asked` of these are prefetched already; all of them, and
// their values, unless the thread `begins` with this split.
template <typename Number>
static void attend(const Shape& s, const Queries& of, const KeyRange& range, const float* q, int64_t q_stride,
                   const Kept<Number>& keys, const Kept<Number>& values, int64_t asked, bool begins, int window,
                   float scale, Next<Number> next, const Partial& out, float* scratch) {
    int64_t share = s.heads / s.kv_heads, d = s.head_dim;
    float *queries = aligned(scratch), *memory = queries + d * LANES;
    bool few = of.count <= FEW;
    Ints position = {};
    for (int lane = 0; lane < LANES; lane++) {
        int64_t m = of.block * LANES + (lane < of.count ? lane : 0), token = m / share;
        position[lane] = int32_t(of.span.position + token);
        if (few && lane >= of.count) continue;
        const float* from = q + (of.span.first + token) * q_stride + (of.kv_head * share + m % share) * d;
        std::memcpy(queries + lane * d, from, sizeof(float) * d);
    }
    int64_t per_query = few ? SPLIT : 1, stride = s.kv_heads * d;
    Ahead ahead{values.numbers - keys.numbers, SOON_KEYS * stride};
    if (std::is_same_v<Number, int16_t>) {  // four bytes a number leave no room in the second-level cache
        bool has_more = range.limit < of.keys.limit;
        if (has_more) next.value = SPLIT * stride;
        if (!begins) ahead = {0, has_more ? SPLIT * stride : 0};
    }
    Weights weights{memory + weigh_floats(d), few ? 1 : LANES, per_query, out.most, out.total};
    (few ? weigh_few<Number> : weigh_many<Number>)(s, of.span, of.kv_head, queries, keys, ahead, of.count, position,
                                                   range.low, range.limit, asked, window, scale, memory, weights);
    mix_all(weights, values, s, of.span, of.kv_head, range, 0, of.count, next, out.mixed);
}

// Write the results of queries to out [tokens, heads, head_dim].
static void finish(const Shape& s, const Queries& of, const Partial& all, float* out) {
    int64_t share = s.heads / s.kv_heads, d = s.head_dim;
    for (int lane = 0; lane < of.count; lane++) {
        int64_t m = of.block * LANES + lane, i = 0;
        float* to = out + ((of.span.first + m / share) * s.heads + of.kv_head * share + m % share) * d;
        const float* mixed = all.mixed + lane * d;
        float total = all.total[lane];
        for (; i + LANES <= d; i += LANES) store(to + i, load(mixed + i) / total);
        for (; i < d; i++) to[i] = mixed[i] / total;
    }
}

// Floats of scratch memory of `attend`.
static inline int64_t attend_floats(const Shape& s) {
    return s.head_dim * LANES + weigh_floats(s.head_dim) + SPLIT * LANES + LINE;
}
