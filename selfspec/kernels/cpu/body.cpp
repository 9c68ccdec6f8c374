// The layers of a Llama-shaped model in one call, in float32: norm, attention over the paged cache, norm, gated MLP. In
// some models, the outputs of attention and MLP pass another norm before they are added.
//
// The code is compiled on the machine that runs it. All functions work on any number of packed rows, and the bits of a
// token's results do not depend on the other tokens of its call. Threads split the panels, rows or heads of each step
// and synchronise between steps.

#include "amx.h"
#include "blocks.h"
#include "norm.h"
#include "packing.h"
#include "splits.h"

static void rotate(float* x, const float* cos, const float* sin, int64_t size) {
    int64_t half = size / 2, i = 0;
    for (; i + LANES <= half; i += LANES) {
        Vec a = load(x + i), b = load(x + i + half);
        store(x + i, a * load(cos + i) + b * load(sin + i));
        store(x + i + half, b * load(cos + i + half) + a * load(sin + i + half));
    }
    for (; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] + b * sin[i];
        x[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

// Apply norms and rotary embedding to one token's queries and keys of a key head, and write keys and values to the
// cache.
template <typename Number>
static void place(const Model& m, const Layer& layer, const Call& call, const Span& row, int64_t kv_head, int64_t token,
                  float* qkv) {
    const Shape& s = m.shape;
    int64_t d = s.head_dim, share = s.heads / s.kv_heads, position = row.position + token;
    int64_t angles = (position * m.tables + layer.table) * d;
    float* one = qkv + (row.first + token) * (s.heads + 2 * s.kv_heads) * d;
    auto turn = [&](float* head, const float* weight) {
        if (weight) norm(head, weight, m.qk_eps, d, head);
        rotate(head, call.cos + angles, call.sin + angles, d);
    };
    for (int64_t head = kv_head * share; head < (kv_head + 1) * share; head++) turn(one + head * d, layer.q_norm);
    float *key = one + (s.heads + kv_head) * d, *value = key + s.kv_heads * d;
    turn(key, layer.k_norm);
    keep(key, d, slot(keys_of<Number>(layer), s, row, position, kv_head));
    keep(value, d, slot(values_of<Number>(layer), s, row, position, kv_head));
}

// Size of the buffer for n rows in the form that any product reads, with alignment, in floats.
static int64_t prepared_floats(int64_t n, int64_t in) {
    return std::max(parts_floats(n, in), digit_floats(MOST_DIGITS, n, in)) + LINE;
}

// Up to this size, every thread prepares all rows for itself, which is faster than sharing the work and waiting.
constexpr int64_t FEW_FLOATS = 1 << 14;

static bool is_little(int64_t n, int64_t in) { return n == 1 || prepared_floats(n, in) <= FEW_FLOATS; }

// Size of a thread's own buffer for that, in floats.
static int64_t own_floats(int64_t in) { return std::max(FEW_FLOATS, prepared_floats(1, in)); }

// The panels [first, last) that a thread multiplies.
struct Share {
    int64_t first, last;
};

static Share share_of(const Product& p, After after) {
    int64_t panels = panels_of(p, after), thread = thread_number(), threads = thread_count();
    return {panels * thread / threads, panels * (thread + 1) / threads};
}

static Stretch stretch_of(const Product& p, Share share) {
    return {p.packed + panel_at(p, share.first), p.packed + panel_at(p, share.last)};
}

// Bytes up to which a 4-bit product is assumed to remain in the core's cache since the last token.
constexpr int64_t NEAR = 1 << 19;

// Buffers for rows in the form that products read: one shared by all threads, one per thread; and the threads.
struct Memory {
    float *shared, *own;
    Team& team;
};

// Write token number t in the form that a product reads.
static void prepare(const Product& p, const float* x, int64_t t, float* prepared) {
    if (p.kind == PAIRS) return round_pairs(x, p.in, prepared + t * token_floats(p));
    float* own = prepared + t * digit_floats(p.digits, 1, p.in);
    if (p.digits == 1) return to_digits<1>(x, p.in, own, false);
    bool shorts = IN_PAIRS && (p.kind == MIXED || shape_of(p.kind).bits == 8);
    (p.digits == 2 ? to_digits<2> : to_digits<3>)(x, p.in, own, shorts);
}

// Compute y from x by all threads. `next`: the product after it, or null; `after_next`: its operation.
static void share_product(const Product& p, After after, const float* x, int64_t n, const Memory& memory, float* y,
                          Prefetcher& prefetcher, const Product* next = nullptr, After after_next = STORE) {
    bool alone = is_little(n, p.in);
    int64_t thread = alone ? 0 : thread_number(), threads = alone ? 1 : thread_count();
    auto [first, last] = share_of(p, after);
    float* prepared = aligned(alone ? memory.own : memory.shared);
    // Whether a product needs no prefetches. Processors that read in order prefetch two panels themselves. Small 4-bit
    // products are still in the cache.
    auto needs_none = [n](const Product& one, After then) {
        if (one.kind == INT4) return panel_at(one, panels_of(one, then)) <= NEAR;
        return one.kind != AMX && IN_ORDER && n == 1 && (is_of_blocks(one.kind) || are_abreast(one, n));
    };
    bool prefetches = !needs_none(p, after), asks = next && !needs_none(*next, after_next);
    if (prefetches)
        prefetcher.begin(stretch_of(p, {first, last}), asks ? stretch_of(*next, share_of(*next, after_next)) : Stretch{},
                         are_abreast(p, n) ? DISTANCE_ABREAST : DISTANCE);
    if (p.kind == AMX) {
        int64_t steps = depth_of(p.in) / DEEP;
        take_apart(x, n, p.in, prepared, steps * thread / threads, steps * (thread + 1) / threads);
    } else if (is_of_blocks(p.kind) || p.kind == PAIRS) {
        for (int64_t t = n * thread / threads; t < n * (thread + 1) / threads; t++) prepare(p, x + t * p.in, t, prepared);
    }
    if (!alone && p.kind != FULL && p.kind != HALF) memory.team.wait();
    if (p.kind == AMX) {
        product_of_parts(p, after, prepared, n, y, first, last, prefetcher);
    } else if (is_of_blocks(p.kind)) {
        product_of_blocks(p, after, prepared, n, y, first, last, prefetches ? &prefetcher : nullptr);
    } else {
        product(p, after, p.kind == PAIRS ? prepared : x, n, y, first, last, prefetches ? &prefetcher : nullptr);
    }
    memory.team.wait();
}

// Write the keys and values of this thread's units. If other threads read them, wait for all threads.
template <typename Number>
static void place_all(const Model& m, const Layer& layer, const Call& call, Team& team, bool are_shared, float* qkv) {
    const Shape& s = m.shape;
    bool are_own = s.kv_heads % thread_count() == 0;  // each head belongs to one thread
    if (!are_own) {
        int64_t most = 0;
        for (int64_t row = 0; row < call.num_rows; row++)
            most = std::max(most, call.firsts[row + 1] - call.firsts[row]);
        are_own = most * s.heads / s.kv_heads <= LANES;  // each head of a row is a single unit
    }
    for_own_units(s, call, layer.window, [&](int64_t, const Queries& one) {
        for (int64_t t = 0; !one.block && t < one.span.count; t++)
            place<Number>(m, layer, call, one.span, one.kv_head, t, qkv);
    });
    if (!are_own || are_shared) team.wait();
}

static int64_t widest(const Model& m) {  // the largest input of a product
    int64_t mixed = m.shape.heads * m.shape.head_dim, other = m.inner > m.hidden ? m.inner : m.hidden;
    return mixed > other ? mixed : other;
}

// Write n tokens' embeddings, or hidden states if `embedding` is null, to x [n, hidden].
static void gather_inputs(const Model& m, const void* from, const RowTable* embedding, int64_t n, float* x) {
    int64_t size = m.hidden;
    if (!embedding) {
        std::memcpy(x, from, sizeof(float) * n * size);
        return;
    }
    for (int64_t t = 0; t < n; t++, x += size) {
        const float* own = selfspec_row(embedding, static_cast<const int64_t*>(from)[t], size, x);
        for (int64_t i = 0; i < size; i++) x[i] = own[i] * m.embed_scale;
    }
}

// Add the norms of the rows of y [n, size], which are overwritten, to x. Threads share the rows.
static void add_normed(float* y, const float* weight, float eps, int64_t n, int64_t size, float* x) {
    Team::share(n, [&](int64_t t) {
        float* own = y + t * size;
        norm(own, weight, eps, size, own);
        add_to(x + t * size, own, size);
    });
}

extern "C" {

// The size of `buffers`, and of `scratch` per thread, of a call in floats.
int64_t selfspec_buffer_floats(const Model* m, int64_t num_tokens) {
    const Shape& s = m->shape;
    int64_t mixed = s.heads * s.head_dim, kept = m->hidden + 2 * mixed + 2 * s.kv_heads * s.head_dim + m->inner;
    return num_tokens * kept + prepared_floats(num_tokens, widest(*m));
}

int64_t selfspec_scratch_floats(const Model* m, int64_t longest) {
    return std::max(attention_scratch(m->shape, longest), 2 * own_floats(widest(*m)));
}

int64_t selfspec_linear_floats(const Product* p, int64_t n, int64_t num_threads) {
    return n * p->in + prepared_floats(n, p->in) + num_threads * own_floats(p->in);
}

// Run layers from `from` to x [num_tokens, hidden]. `from`: hidden states, or token ids if `embedding` is given.
// `last`: the final norm, applied if given. taps: per layer, where to write its output, or null.
void selfspec_run(const Model* model, const Layer* layers, int64_t num_layers, const Call* given, const void* from,
                  const RowTable* embedding, float* x, float* const* taps, const float* last, float* buffers,
                  float* scratch, int64_t scratch_floats, int64_t num_threads) {
    const Model& m = *model;
    const Call& call = *given;
    const Shape& s = m.shape;
    int64_t n = call.num_tokens;
    float *h = buffers, *qkv = h + n * m.hidden;
    float *mixed = qkv + n * (s.heads + 2 * s.kv_heads) * s.head_dim, *inner = mixed + n * s.heads * s.head_dim;
    float* shared = inner + n * m.inner;
    gather_inputs(m, from, embedding, n, x);
    After gated = m.activation == GELU_TANH ? GEGLU : SWIGLU;
    Team team;
    int64_t longest = 0;
    for (int64_t row = 0; row < call.num_rows; row++)
        longest = std::max(longest, span_of(call, row).position + span_of(call, row).count);
    const Scratch memories{scratch, scratch_floats, splits_in(longest)};
    Team::run(num_threads, [&] {
        float *own = scratch + thread_number() * scratch_floats;
        const Memory memory{shared, own, team};
        bool alone = is_little(n, m.hidden), shared_splits = longest > SPLIT && are_few_units(s, call);
        float* normed = alone ? own + own_floats(widest(m)) : h;
        auto norm_one = [&](const float* weight, float eps, int64_t t) {
            norm(x + t * m.hidden, weight, eps, m.hidden, normed + t * m.hidden);
        };
        auto norm_all = [&](const float* weight, float eps) {
            if (alone) {
                for (int64_t t = 0; t < n; t++) norm_one(weight, eps, t);
                return;
            }
            Team::share(n, [&](int64_t t) { norm_one(weight, eps, t); });
            team.wait();
        };
        Prefetcher prefetcher;
        // Add a product to x, after its norm if there is one. The thread that adds to a token computes its next norm,
        // too. Threads wait only if each of them computes all norms.
        auto add_product = [&](const Product& p, const float* from, const float* weight, float eps,
                               const Product* next, After after_next) {
            share_product(p, weight ? STORE : ADD, from, n, memory, weight ? h : x, prefetcher, next, after_next);
            if (!weight) return;
            add_normed(h, weight, eps, n, m.hidden, x);
            if (alone) team.wait();
        };
        for (int64_t i = 0; i < num_layers; i++) {
            const Layer& layer = layers[i];
            const Product* following = i + 1 < num_layers ? &layers[i + 1].qkv : nullptr;
            norm_all(layer.norm, m.eps);
            share_product(layer.qkv, STORE, normed, n, memory, qkv, prefetcher, &layer.o);
            if (layer.key_scales) {
                place_all<int16_t>(m, layer, call, team, shared_splits, qkv);
                attend_all<int16_t>(m, layer, call, team, shared_splits, qkv, mixed, memories);
            } else {
                place_all<float>(m, layer, call, team, shared_splits, qkv);
                attend_all<float>(m, layer, call, team, shared_splits, qkv, mixed, memories);
            }
            add_product(layer.o, mixed, layer.post_norm, m.eps, &layer.gate_up, gated);
            norm_all(layer.mlp_norm, m.mlp_eps);
            share_product(layer.gate_up, gated, normed, n, memory, inner, prefetcher, &layer.down);
            add_product(layer.down, inner, layer.post_mlp_norm, m.mlp_eps, following, STORE);
            if (taps && taps[i]) {
                int64_t bytes = sizeof(float) * m.hidden;
                Team::share(n, [&](int64_t t) { std::memcpy(taps[i] + t * m.hidden, x + t * m.hidden, bytes); });
                team.wait();
            }
        }
        if (last) Team::share(n, [&](int64_t t) { norm(x + t * m.hidden, last, m.eps, m.hidden, x + t * m.hidden); });
        release_tiles();
    });
}

// y [n, out] = x [n, in] times packed weights. `weight`: of a norm before it, or null. h: `selfspec_linear_floats`
// floats.
void selfspec_linear(const Product* p, const float* x, int64_t n, float* y, const float* weight, float eps, float* h,
                     int64_t num_threads) {
    Team team;
    Team::run(num_threads, [&] {
        float* shared = h + n * p->in;
        float* own = shared + prepared_floats(n, p->in) + thread_number() * own_floats(p->in);
        const Memory memory{shared, own, team};
        if (weight) {
            Team::share(n, [&](int64_t t) { norm(x + t * p->in, weight, eps, p->in, h + t * p->in); });
            team.wait();
        }
        Prefetcher prefetcher;
        share_product(*p, STORE, weight ? h : x, n, memory, y, prefetcher);
        release_tiles();
    });
}

int64_t selfspec_exit_head_floats(const ExitHead* e, int64_t n, int64_t num_threads) {
    int64_t width = e->gate_up.in, inner = e->down.in, widest = std::max(width, inner);
    return n * (width + inner) + prepared_floats(n, widest) + num_threads * own_floats(widest);
}

// y [n, hidden] = x + down(silu(gate(z)) * up(z)) with z = [norm(x), norm(last)]. last: [n] pointers to states of the
// tokens before, or null: zeros. memory: `selfspec_exit_head_floats` floats.
void selfspec_exit_head(const ExitHead* e, const float* x, const float* const* last, int64_t n, float* y, float* memory,
                        int64_t num_threads) {
    int64_t width = e->gate_up.in, hidden = width / 2, inner = e->down.in, widest = std::max(width, inner);
    float *normed = memory, *mixed = normed + n * width, *shared = mixed + n * inner;
    Team team;
    Team::run(num_threads, [&] {
        float* own = shared + prepared_floats(n, widest) + thread_number() * own_floats(widest);
        const Memory rows{shared, own, team};
        Team::share(n, [&](int64_t t) {
            float *of_exit = normed + t * width, *before = of_exit + hidden;
            norm(x + t * hidden, e->norm, e->eps, hidden, of_exit);
            if (last) norm(last[t], e->norm + hidden, e->eps, hidden, before);
            else std::fill_n(before, hidden, 0.f);
            std::memcpy(y + t * hidden, x + t * hidden, sizeof(float) * hidden);
        });
        team.wait();
        Prefetcher prefetcher;
        share_product(e->gate_up, SWIGLU, normed, n, rows, mixed, prefetcher, &e->down, ADD);
        share_product(e->down, ADD, mixed, n, rows, y, prefetcher);
        release_tiles();
    });
}

}
