// Inputs and outputs of a draft, and the functions that rounds call; see `draft.cpp`.
#pragma once

#include <chrono>

#include "grammars.h"
#include "model.h"
#include "penalties.h"

// When rows stop drafting, see `selfspec.control.plan`. With `calibration`, all rows stop when their mean survival
// falls below `least`, and the last token of a row is withdrawn, not verified, where its survival is below `keep`.
// Without it, each row stops after a token whose confidence is below `min_confidence`.
struct Stop {
    double min_confidence, least, keep;
    const double *edges, *calibration;  // bounds between confidence bins; acceptance rate by bin, or null
    int64_t num_edges;
};

struct DraftArgs {
    int64_t num_rows, most, vocab;  // most: maximum drafted tokens per row; vocab: outputs of the draft head
    // [num_rows, row_pages]; the others [num_rows], of each row's last token
    const int64_t *pages, *positions, *lengths, *last;
    int64_t row_pages;
    const SamplingParams* params;  // [num_rows]
    const int64_t* names;  // [vocab]: token ids of the head's outputs; null: the whole vocabulary
    const float *cos, *sin;
    const RowTable* embedding;
    const float* norm;
    float eps;
    const ExitHead* exit_head;  // of the layers that draft; null: none
    float* const* finals;  // [num_rows]: the final state of the token before each row's last one, updated; null: no heads
    Stop stop;
    int64_t *counts, *tokens;     // out: [num_rows]; [num_rows, most]
    float *confidences, *hidden;  // out: [num_rows, most] or null; [num_rows, most, hidden]
    double* taken;                // out: [most, 3] seconds of layers, head and pick
    float* noise;      // buffer, see `Row`: [num_rows, num_kept, padded vocab]; or null
    int64_t num_kept;  // number of first drafted tokens per row whose noise is kept
    const History* const* histories;  // [num_rows], null for rows without penalties; null: no row has penalties
    // place of each token among the head's outputs, see `Prefix`; null: whole vocabulary
    const int32_t* places;
    Grammars* grammars;  // null: no row has one, else drafts are over the whole vocabulary
    int64_t* num_verified;  // out: [num_rows]: `counts` without withdrawn tokens
};

static inline double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

extern "C" {
int64_t selfspec_pick_floats(int64_t vocab);
void selfspec_pick(const float* logits, int64_t stride, int64_t n, int64_t vocab, const SamplingParams* params,
                   const int64_t* positions, const int64_t* tokens, int64_t tokens_stride, int64_t* picks,
                   float* confidences, float* memory, int64_t num_threads);
int64_t selfspec_draft_floats(const Model* m, const DraftArgs* d, const Product* head, int64_t longest,
                              int64_t num_threads);
void selfspec_draft(const Model* m, const Layer* layers, int64_t num_layers, const Product* head,
                    const DraftArgs* args, int64_t longest, float* memory, int64_t num_threads);
}
