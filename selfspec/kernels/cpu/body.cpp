// The layers of a Llama-shaped model in one call: norm, attention over the paged cache, norm, gated MLP, in float32.
//
// Compiled on the machine it runs on. Every function works on any number of packed rows; a token's bits do not depend
// on the others of its call. Threads share each step's panels, rows or heads and wait for each other between steps.

#include "attention.h"
#include "product.h"

#ifdef _OPENMP
#include <omp.h>
#else  // a compiler without it: one thread
static int omp_get_thread_num() { return 0; }
static int omp_get_num_threads() { return 1; }
#endif

struct Layer {
    Product qkv, o, gate_up, down;
    const float *norm, *mlp_norm, *q_norm, *k_norm;  // the last two may be null
    float *keys, *values;                            // [pages, page_size, kv_heads, head_dim]
    int64_t window;                                  // 0: none
};

struct Model {
    Shape shape;
    int64_t hidden, inner;  // inner: of the MLP
    float eps, mlp_eps, qk_eps, scale;
};

struct Call {
    int64_t num_tokens, num_rows;
    const int64_t* positions;  // [num_tokens]
    const int64_t* firsts;     // [num_rows + 1]: where each row's tokens begin
    const int64_t* pages;      // [num_rows, row_pages]
    int64_t row_pages;
    const int64_t *roots, *branches;  // [num_rows], [num_rows, row_nodes]: of nodes of trees; else null, or root -1
    int64_t row_nodes;
    const float *cos, *sin;  // [positions, head_dim]; sin carries the sign of the turned half
};

static void norm(const float* x, const float* weight, float eps, int64_t size, float* out) {
    Vec squares = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    float total = sum(squares);
    for (; i < size; i++) total += x[i] * x[i];
    float factor = 1.f / std::sqrt(total / size + eps);
    for (i = 0; i < size; i++) out[i] = x[i] * factor * weight[i];
}

static void rotate(float* x, const float* cos, const float* sin, int64_t size) {
    int64_t half = size / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] + b * sin[i];
        x[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

// Norm and turn one token's queries and keys, and put its keys and values where they belong.
static void place(const Model& m, const Layer& layer, const Call& call, const Span& row, int64_t token, float* qkv) {
    const Shape& s = m.shape;
    int64_t d = s.head_dim, position = row.position + token;
    float* one = qkv + (row.first + token) * (s.heads + 2 * s.kv_heads) * d;
    for (int64_t head = 0; head < s.heads + s.kv_heads; head++) {
        const float* weight = head < s.heads ? layer.q_norm : layer.k_norm;
        if (weight) norm(one + head * d, weight, m.qk_eps, d, one + head * d);
        rotate(one + head * d, call.cos + position * d, call.sin + position * d, d);
    }
    const float *key = one + s.heads * d, *value = key + s.kv_heads * d;
    int64_t bytes = sizeof(float) * s.kv_heads * d;
    std::memcpy(const_cast<float*>(slot(layer.keys, s, row, position, 0)), key, bytes);
    std::memcpy(const_cast<float*>(slot(layer.values, s, row, position, 0)), value, bytes);
}

// y from x, by all threads; `turned` [n, in] is theirs to use.
static void share_product(const Product& p, After after, const float* x, int64_t n, float* turned, float* y) {
    int64_t panels = panels_of(p, after), thread = omp_get_thread_num(), threads = omp_get_num_threads();
    if (n > 1) {
        turn(x, n, p.in, turned, p.in * thread / threads, p.in * (thread + 1) / threads);
#pragma omp barrier
        x = turned;
    }
    product(p, after, x, n, y, panels * thread / threads, panels * (thread + 1) / threads);
#pragma omp barrier
}

static Span span_of(const Call& call, int64_t row) {
    int64_t first = call.firsts[row];
    bool is_node = call.roots && call.roots[row] >= 0;
    return {call.pages + row * call.row_pages, call.positions[first], first, call.firsts[row + 1] - first,
            is_node ? call.roots[row] : 0, is_node ? call.branches + row * call.row_nodes : nullptr};
}

static void attend_all(const Model& m, const Layer& layer, const Call& call, const float* qkv, float* out,
                       float* scratch) {
    const Shape& s = m.shape;
    int64_t share = s.heads / s.kv_heads, task = 0;
    int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    for (int64_t row = 0; row < call.num_rows; row++) {
        Span span = span_of(call, row);
        int64_t blocks = (span.count * share + LANES - 1) / LANES;
        for (int64_t block = 0; block < blocks; block++)
            for (int64_t head = 0; head < s.kv_heads; head++, task++)
                if (task % threads == thread)
                    attend(s, span, head, block, qkv, (s.heads + 2 * s.kv_heads) * s.head_dim, layer.keys,
                           layer.values, int(layer.window), m.scale, out, scratch);
    }
#pragma omp barrier
}

extern "C" {

int64_t selfspec_panel() { return PANEL; }

// Floats of `buffers` and, per thread, of `scratch` that a call needs.
int64_t selfspec_buffer_floats(const Model* m, int64_t num_tokens) {
    const Shape& s = m->shape;
    int64_t mixed = s.heads * s.head_dim, widest = m->inner > m->hidden ? m->inner : m->hidden;
    widest = widest > mixed ? widest : mixed;
    return num_tokens * (m->hidden + 2 * mixed + 2 * s.kv_heads * s.head_dim + m->inner + widest);
}

int64_t selfspec_scratch_floats(const Model* m, int64_t longest) {
    return attention_scratch(m->shape, longest);
}

// x [num_tokens, hidden] is replaced by what it is after the layers, normed if `last` is given. taps: per layer, where
// to put its output, or null.
void selfspec_run(const Model* model, const Layer* layers, int64_t num_layers, const Call* given, float* x,
                  float* const* taps, const float* last, float* buffers, float* scratch, int64_t scratch_floats,
                  int64_t num_threads) {
    const Model& m = *model;
    const Call& call = *given;
    const Shape& s = m.shape;
    int64_t n = call.num_tokens;
    float *h = buffers, *qkv = h + n * m.hidden;
    float *mixed = qkv + n * (s.heads + 2 * s.kv_heads) * s.head_dim, *inner = mixed + n * s.heads * s.head_dim;
    float* turned = inner + n * m.inner;
#pragma omp parallel num_threads(num_threads)
    {
        float* own = scratch + omp_get_thread_num() * scratch_floats;
        for (int64_t i = 0; i < num_layers; i++) {
            const Layer& layer = layers[i];
#pragma omp for
            for (int64_t t = 0; t < n; t++) norm(x + t * m.hidden, layer.norm, m.eps, m.hidden, h + t * m.hidden);
            share_product(layer.qkv, STORE, h, n, turned, qkv);
#pragma omp for
            for (int64_t row = 0; row < call.num_rows; row++) {
                Span span = span_of(call, row);
                for (int64_t t = 0; t < span.count; t++) place(m, layer, call, span, t, qkv);
            }
            attend_all(m, layer, call, qkv, mixed, own);
            share_product(layer.o, ADD, mixed, n, turned, x);
#pragma omp for
            for (int64_t t = 0; t < n; t++) norm(x + t * m.hidden, layer.mlp_norm, m.mlp_eps, m.hidden, h + t * m.hidden);
            share_product(layer.gate_up, SWIGLU, h, n, turned, inner);
            share_product(layer.down, ADD, inner, n, turned, x);
            if (taps && taps[i]) {
#pragma omp single
                std::memcpy(taps[i], x, sizeof(float) * n * m.hidden);
            }
        }
        if (last) {
#pragma omp for
            for (int64_t t = 0; t < n; t++) norm(x + t * m.hidden, last, m.eps, m.hidden, x + t * m.hidden);
        }
    }
}

// y [n, out] = x [n, in] times packed weights; `weight`: of a norm before it. h [2, n, in] is room to work in.
void selfspec_linear(const Product* p, const float* x, int64_t n, float* y, const float* weight, float eps, float* h,
                     int64_t num_threads) {
#pragma omp parallel num_threads(num_threads)
    {
        if (weight) {
#pragma omp for
            for (int64_t t = 0; t < n; t++) norm(x + t * p->in, weight, eps, p->in, h + t * p->in);
        }
        share_product(*p, STORE, weight ? h : x, n, h + n * p->in, y);
    }
}

// Pack a weight's rows [out, in] from output `offset` of the packed ones on. `lanes` and `stride`: every `lanes` outputs
// are followed by a gap up to `stride`, where SWIGLU's other half stands.
void selfspec_pack(const float* weight, int64_t out, int64_t in, float* packed, int64_t offset, int64_t lanes,
                   int64_t stride, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads)
    for (int64_t first = 0; first < out; first += LANES) {
        float* to[LANES];
        int count = out - first < LANES ? int(out - first) : LANES;
        for (int i = 0; i < count; i++) {
            int64_t o = first + i, at = offset + o / lanes * stride + o % lanes;
            to[i] = packed + at / PANEL * in * PANEL + at % PANEL;
        }
        for (int64_t k = 0; k < in; k++)  // what is written follows what was written, as far as it may
            for (int i = 0; i < count; i++) to[i][k * PANEL] = weight[(first + i) * in + k];
    }
}
}
