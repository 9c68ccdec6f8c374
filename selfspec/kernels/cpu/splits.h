// How threads share the attention of a call.
#pragma once

#include <optional>

#include "attention.h"
#include "team.h"

static Span span_of(const Call& call, int64_t row) {
    int64_t first = call.firsts[row];
    return {call.pages + row * call.row_pages, call.positions[first], first, call.firsts[row + 1] - first};
}

// Call `of` with the number and the queries of each of this thread's units: LANES queries of a row that share a key
// head.
template <typename Of>
static void for_own_units(const Shape& s, const Call& call, int64_t window, Of of) {
    int64_t share = s.heads / s.kv_heads, count = 0;
    int64_t thread = thread_number(), threads = thread_count();
    for (int64_t row = 0; row < call.num_rows; row++) {
        Span span = span_of(call, row);
        int64_t blocks = (span.count * share + LANES - 1) / LANES;
        for (int64_t block = 0; block < blocks; block++)
            for (int64_t head = 0; head < s.kv_heads; head++, count++)
                if (count % threads == thread) of(count, Queries(s, span, head, block, window));
    }
}

// Fewer units per thread share their splits, since threads would wait for the one with the most units.
constexpr int64_t FEW_UNITS = 4;

static bool are_few_units(const Shape& s, const Call& call) {
    int64_t share = s.heads / s.kv_heads, units = 0;
    for (int64_t row = 0; row < call.num_rows; row++)
        units += (span_of(call, row).count * share + LANES - 1) / LANES * s.kv_heads;
    return units < FEW_UNITS * thread_count();
}

// Call `of` with the unit, the queries and the number of each split that this thread attends to, and whether the thread
// begins with this split of the unit. Shared splits are in
// the order of memory, where the heads of a token are neighbours, and every thread gets as many keys.
template <typename Of>
static void for_own_splits(const Shape& s, const Call& call, int64_t window, bool are_shared, Of of) {
    if (!are_shared)
        return for_own_units(s, call, window, [&](int64_t unit, const Queries& one) {
            for (int64_t split = 0; split < splits_of(one.keys); split++) of(unit, one, split, split == 0);
        });
    int64_t share = s.heads / s.kv_heads, thread = thread_number(), threads = thread_count();
    auto for_all = [&](auto of_block) {
        int64_t unit = 0;
        for (int64_t row = 0; row < call.num_rows; row++) {
            Span span = span_of(call, row);
            int64_t blocks = (span.count * share + LANES - 1) / LANES;
            for (int64_t block = 0; block < blocks; block++, unit += s.kv_heads)
                of_block(unit, Queries(s, span, 0, block, window));
        }
    };
    int64_t before = 0, all = 0;  // twice the keys of splits
    for_all([&](int64_t, const Queries& one) { all += 2 * s.kv_heads * (one.keys.limit - one.keys.low); });
    for_all([&](int64_t unit, Queries one) {
        int64_t begun = 0;
        for (int64_t split = 0; split < splits_of(one.keys); split++) {
            KeyRange keys = split_of(one.keys, split);
            for (one.kv_head = 0; one.kv_head < s.kv_heads; one.kv_head++, before += 2 * (keys.limit - keys.low))
                if ((before + keys.limit - keys.low) * threads / all == thread)
                    of(unit + one.kv_head, one, split, begun++ < s.kv_heads);
        }
    });
}

// The threads' scratch memory for attention.
struct Scratch {
    float* first;  // of thread 0; that of each other one is `size` floats later
    int64_t size, splits;  // splits: the most of a unit

    float* own() const { return first + thread_number() * size; }

    // Where the attention to a split of a unit is kept until all splits of it are done.
    Partial kept(const Shape& s, int64_t unit, int64_t split, int64_t threads) const {
        int64_t number = 1 + unit / threads * splits + split;
        return partial_at(first + unit % threads * size + attend_floats(s) + number * partial_floats(s.head_dim));
    }
};

static int64_t splits_in(int64_t tokens) { return (tokens + SPLIT - 1) / SPLIT; }

// Floats of scratch memory per thread for rows of at most `longest` tokens.
static int64_t attention_scratch(const Shape& s, int64_t longest) {
    return attend_floats(s) + (1 + FEW_UNITS * splits_in(longest)) * partial_floats(s.head_dim);
}

template <typename Number>
static void attend_all(const Model& m, const Layer& layer, const Call& call, Team& team, bool are_shared,
                       const float* qkv, float* out, const Scratch& scratch) {
    const Shape& s = m.shape;
    const Kept<Number> keys = keys_of<Number>(layer), values = values_of<Number>(layer);
    int64_t stride = (s.heads + 2 * s.kv_heads) * s.head_dim, threads = thread_count();
    float* own = scratch.own();
    struct Task {
        int64_t unit, split, asked;
        bool begins;
        Queries queries;
    };
    std::optional<Task> task;
    auto run = [&](const Next<Number>& next) {
        const Queries& of = task->queries;
        Partial first = scratch.kept(s, are_shared ? task->unit : thread_number(), 0, threads);
        Partial to = first;
        if (task->split)
            to = are_shared ? scratch.kept(s, task->unit, task->split, threads) : partial_at(own + attend_floats(s));
        attend(s, of, split_of(of.keys, task->split), qkv, stride, keys, values, task->asked, task->begins,
               int(layer.window), m.scale, next, to, own);
        if (are_shared) return;
        if (task->split) add_partial(to, of.count, s.head_dim, first);
        if (task->split == splits_of(of.keys) - 1) finish(s, of, first, out);
    };
    auto next_task = [&](int64_t unit, const Queries& of, int64_t split, bool begins) {
        auto [low, limit] = split_of(of.keys, split);
        int64_t known = std::min(together_until(s, low, limit) - low, ASKED / int64_t(sizeof(Number)) / s.head_dim);
        if (task) {
            const Queries& now = task->queries;
            int64_t end = split_of(now.keys, task->split).limit;
            if (std::is_same_v<Number, int16_t> && task->begins && end < now.keys.limit) {
                known = 0;
                run({slot(keys, s, now.span, end, now.kv_head).numbers, SPLIT});
            } else {
                run({slot(keys, s, of.span, low, of.kv_head).numbers, known});
            }
        } else {
            known = 0;
        }
        task.emplace(Task{unit, split, known, begins, of});
    };
    for_own_splits(s, call, layer.window, are_shared, next_task);
    if (task) run({});
    team.wait();
    if (!are_shared) return;
    for_own_units(s, call, layer.window, [&](int64_t unit, const Queries& of) {
        Partial first = scratch.kept(s, unit, 0, threads);
        for (int64_t split = 1; split < splits_of(of.keys); split++)
            add_partial(scratch.kept(s, unit, split, threads), of.count, s.head_dim, first);
        finish(s, of, first, out);
    });
    team.wait();
}
