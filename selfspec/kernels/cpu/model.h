// What Python tells of a model and of a call, and the functions that drafts are made of; see `body.cpp`.
#pragma once

#include <cstdint>

struct Product {
    const char* packed;
    const float* bias;  // [panels * PANEL], in the packed order; or null
    int64_t in, out, kind;  // out: of y, so that SWIGLU has half as many as there are weights
};

struct Shape {
    int64_t heads, kv_heads, head_dim, page_size;
};

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

struct How {  // a row picks: see `selfspec.executors.pick.Sampling`
    float temperature, top_p, min_p, repetition, presence, frequency;
    int64_t top_k, seed, ngram;
};

extern "C" {
int64_t selfspec_buffer_floats(const Model* m, int64_t num_tokens);
int64_t selfspec_scratch_floats(const Model* m, int64_t longest);
int64_t selfspec_linear_floats(const Product* p, int64_t n, int64_t num_threads);
void selfspec_run(const Model* model, const Layer* layers, int64_t num_layers, const Call* given, const void* from,
                  const float* embedding, float* x, float* const* taps, const float* last, float* buffers,
                  float* scratch, int64_t scratch_floats, int64_t num_threads);
void selfspec_linear(const Product* p, const float* x, int64_t n, float* y, const float* weight, float eps, float* h,
                     int64_t num_threads);
}
