// What Python tells of a draft, and the functions that rounds are made of; see `draft.cpp`.
#pragma once

#include <chrono>

#include "model.h"
#include "penalties.h"

// When rows stop drafting, see `selfspec.control.plan`: all of them where they are too unlikely to be right, or else
// each after a token that is not sure.
struct Stop {
    double min_confidence, least;
    const double *edges, *calibration;  // between bins of confidence; how often each is right, or null
    int64_t num_edges;
};

struct Drafting {
    int64_t num_rows, most, vocab;  // most: tokens of a row; vocab: of the head
    const int64_t *pages, *positions, *lengths, *last;  // [num_rows, row_pages]; [num_rows] of each row's last token
    int64_t row_pages;
    const How* how;        // [num_rows]
    const int64_t* names;  // [vocab]: the tokens that the head is of; null: all
    const float *cos, *sin, *embedding, *norm;
    float eps;
    Stop stop;
    int64_t *counts, *tokens, *seconds;  // out: [num_rows], [num_rows, most], the same or null
    float *sure, *hidden;  // [num_rows, most] or null; [num_rows, most, hidden]
    double* taken;         // [most, 3]: seconds of layers, head and pick
    float* waits;      // [num_rows, num_kept, vocab filled up]: room to keep picks' noise in, see `Row`; or null
    int64_t num_kept;  // of so many first tokens
    const History* const* histories;  // [num_rows], null for rows without penalties; null: of all rows
    const int32_t* places;            // of the tokens that the head is of, see `Prefix`; null: it is of all
};

static inline double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

extern "C" {
int64_t selfspec_pick_floats(int64_t vocab);
void selfspec_pick(const float* logits, int64_t stride, int64_t n, int64_t vocab, const How* how,
                   const int64_t* positions, const int64_t* tokens, int64_t tokens_stride, int64_t* picks, float* sure,
                   int64_t* seconds, float* room, int64_t num_threads);
int64_t selfspec_draft_floats(const Model* m, const Drafting* d, const Product* head, int64_t longest,
                              int64_t num_threads);
void selfspec_draft(const Model* m, const Layer* layers, int64_t num_layers, const Product* head, const Drafting* drafting,
                    int64_t longest, float* room, int64_t num_threads);
}
