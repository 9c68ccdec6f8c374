// Inputs and outputs of a round; see `round.cpp`.
#pragma once

#include "drafting.h"

// Inputs and outputs of a verification of row r's last token and its drafted tokens, tokens[r][0 .. counts[r]).
struct VerifyArgs {
    const Layer* layers;
    int64_t num_layers;
    const Product* head;
    const float* norm;      // the final norm
    const Layer* drafters;  // layers that draft: the first `exit_layer` of `layers`, or copies of them
    int64_t exit_layer;     // 0: no layer drafts
    const Product* draft_head;
    int64_t are_copies, longest;        // longest: maximum tokens per row, all possible drafts included
    int64_t few, threads_few, threads;  // threads of calls of at most `few` tokens, and of larger calls
    int64_t most;                       // maximum drafted tokens per row
    int64_t *counts, *tokens;           // drafts, in or out: [num_rows], [num_rows, most]
    int64_t *num_emitted, *picks;       // out: accepted tokens and one more [num_rows]; the picks [num_rows, most + 1]
    // out, or null: hidden states after layers, [num_layers] pointers to [tokens, hidden] or null; final states [tokens,
    // hidden]; logits [tokens, vocab]
    float *const *taps, *finals, *logits;
    double* taken;                // out: [4] seconds of early layers after the draft, layers, head, picks
    // [num_rows]: most probable tokens to report, -1: no log-probabilities; null: for no row
    const int64_t* num_likely;
    int64_t most_likely;          // maximum of num_likely
    float* logprobs;              // out: [num_rows, most + 1], of emitted tokens
    int64_t *ranks, *likely;      // out: [num_rows, most + 1]; tokens [num_rows, most + 1, most_likely]
    float* likely_logprobs;       // out: as `likely`
};

extern "C" {
// Draft, if layers do, and verify. Returns 0, or 1 if memory allocation failed.
int64_t selfspec_round(const Model* m, const DraftArgs* d, const VerifyArgs* v);
}
