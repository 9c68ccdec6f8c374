// Structures of a model and of a call, and the functions of layers; see `body.cpp`.
#pragma once

#include <cstdint>

struct Product {
    const char* packed;
    const float* bias;  // [panels * PANEL], in the packed order; or null
    int64_t in, out, kind;  // out: size of y; for a gated product, half the number of packed outputs
    const int64_t* panels;  // [panels + 1][2], if MIXED: the offset of each panel, and its kind
    int64_t digits;         // bytes of an activation in a product with blocks
};

struct RowTable {  // a matrix of which single rows are read
    const float* floats;    // [rows, size]; or null
    const Product* packed;  // packed in blocks, without bias
};

struct Shape {
    int64_t heads, kv_heads, head_dim, page_size;
};

struct Layer {
    Product qkv, o, gate_up, down;
    const float *norm, *mlp_norm;
    // of queries and keys; of the outputs of attention and MLP before they are added; each may be null
    const float *q_norm, *k_norm, *post_norm, *post_mlp_norm;
    void *keys, *values;  // [pages, page_size, kv_heads, head_dim]: float32, or int16 if they have scales
    uint16_t *key_scales, *value_scales;  // [pages, page_size, kv_heads, blocks of a head], see `kept.h`; or null
    int64_t window, table;  // window: 0: none; table: index of the layer's rotary angles
};

// A trained head of an exit layer: see `selfspec.model.exit_heads.ExitHead`.
struct ExitHead {
    Product gate_up, down;
    const float* norm;  // [2 * hidden]
    float eps;
};

enum Activation : int64_t { SILU, GELU_TANH };

struct Model {
    Shape shape;
    int64_t hidden, inner, tables;  // inner: hidden size of the MLP; tables: number of rotary angles per position
    Activation activation;          // of the MLP
    float eps, mlp_eps, qk_eps, scale, embed_scale;  // embed_scale: embeddings are multiplied by it
};

struct Call {
    int64_t num_tokens, num_rows;
    const int64_t* positions;  // [num_tokens]
    const int64_t* firsts;     // [num_rows + 1]: offset of each row's tokens
    const int64_t* pages;      // [num_rows, row_pages]
    int64_t row_pages;
    const float *cos, *sin;  // [positions, tables, head_dim]; sin is negated in the first half
};

struct SamplingParams {  // of a row: see `selfspec.core.SamplingParams`
    float temperature, top_p, min_p, repetition, presence, frequency;
    int64_t top_k, seed, ngram;
};

extern "C" {
int64_t selfspec_buffer_floats(const Model* m, int64_t num_tokens);
int64_t selfspec_scratch_floats(const Model* m, int64_t longest);
int64_t selfspec_linear_floats(const Product* p, int64_t n, int64_t num_threads);
void selfspec_run(const Model* model, const Layer* layers, int64_t num_layers, const Call* given, const void* from,
                  const RowTable* embedding, float* x, float* const* taps, const float* last, float* buffers,
                  float* scratch, int64_t scratch_floats, int64_t num_threads);
// Row number `row` of a matrix, [size]. memory: [size] floats, which are written if the matrix is packed.
const float* selfspec_row(const RowTable* table, int64_t row, int64_t size, float* memory);
void selfspec_linear(const Product* p, const float* x, int64_t n, float* y, const float* weight, float eps, float* h,
                     int64_t num_threads);
int64_t selfspec_exit_head_floats(const ExitHead* e, int64_t n, int64_t num_threads);
void selfspec_exit_head(const ExitHead* e, const float* x, const float* const* last, int64_t n, float* y, float* memory,
                        int64_t num_threads);
}
