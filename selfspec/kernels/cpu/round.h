// Inputs and outputs of a round; see `round.cpp`.
#pragma once

#include "drafting.h"
#include "drafts.h"

// Inputs and outputs of a verification. Node 0 of a draft is its row's last token. Node i > 0 is tokens[i - 1], and its
// parent is parents[i - 1].
struct Judging {
    const Layer* layers;
    int64_t num_layers;
    const Product* head;
    const float* norm;      // the final norm
    const Layer* drafters;  // layers that draft: the first `exit_layer` of `layers`, or copies of them
    int64_t exit_layer;     // 0: no layer drafts
    const Product* draft_head;
    int64_t are_copies, longest;        // longest: maximum tokens per row, all possible drafts included
    int64_t few, threads_few, threads;  // threads of calls of at most `few` tokens, and of larger calls
    const Seconds* seconds;             // which second choices are drafted; null: none
    int64_t most;                       // maximum drafted tokens per row
    int64_t *counts, *tokens, *parents, *chains;  // drafts, in or out: [num_rows], [num_rows, most] twice, [num_rows]
    // out: accepted nodes [num_rows]; their indices, and the pick at each, [num_rows, most + 1]
    int64_t *accepted, *path, *picks;
    // out, or null: hidden states after layers, [num_layers] pointers to [nodes, hidden] or null; logits [nodes,
    // vocab].
    float *const *taps, *logits;
    double* taken;                // out: [4] seconds of early layers after the draft, layers, head, picks
    // [num_rows]: most probable tokens to report, -1: no log-probabilities; null: for no row
    const int64_t* num_likely;
    int64_t most_likely;          // maximum of num_likely
    float* logprobs;              // out: [num_rows, most + 1], of accepted picks
    int64_t *ranks, *likely;      // out: [num_rows, most + 1]; tokens [num_rows, most + 1, most_likely]
    float* likely_logprobs;       // out: as `likely`
};

extern "C" {
// Draft, if layers do, and verify. The keys and values of accepted tokens are then at their positions. Returns 0, or 1
// if memory allocation failed.
int64_t selfspec_round(const Model* m, const Drafting* d, const Judging* j);
}
