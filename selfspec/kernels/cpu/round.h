// What Python tells of a round, and what it comes to; see `round.cpp`.
#pragma once

#include "drafting.h"
#include "drafts.h"

// Who verifies, and what it comes to. Node 0 of a draft is its row's last token, node i > 0 is tokens[i - 1], and goes
// on from the node parents[i - 1].
struct Judging {
    const Layer* layers;
    int64_t num_layers;
    const Product* head;
    const float* norm;      // the last one
    const Layer* drafters;  // who draft: the first `exit_layer` of `layers`, or copies of those
    int64_t exit_layer;     // 0: drafts are given
    const Product* draft_head;
    int64_t are_copies, longest;        // longest: tokens of a row, when all that may be drafted has its place
    int64_t few, threads_few, threads;  // threads of calls of at most so many tokens, and of others
    const Seconds* seconds;             // which second choices are drafted beside; null: none
    int64_t most;                       // tokens of a row's draft
    int64_t *counts, *tokens, *parents, *chains;  // drafts, given or out: [num_rows], [num_rows, most] twice, [num_rows]
    int64_t *accepted, *path, *picks;  // out: [num_rows] nodes; these [num_rows, most + 1]; and what was picked at each
    // out, or null: hidden states after some layers, [num_layers] of [nodes, hidden] or null, and logits [nodes, vocab].
    float *const *taps, *logits;
    double* taken;                // out: [4] seconds: early layers after the draft, layers, head, picks
    const int64_t* num_likely;    // [num_rows]: likeliest tokens that are told of, -1: no logprobs; null: of all rows
    int64_t most_likely;          // of any row
    float* logprobs;              // out: [num_rows, most + 1], of accepted picks, and the same of
    int64_t *ranks, *likely;      // [num_rows, most + 1], and [num_rows, most + 1, most_likely] tokens
    float* likely_logprobs;       // as `likely`
};

extern "C" {
// Draft where layers do, and verify. Keys and values of tokens that are right then stand where these do.
// Returns 0, or 1 where there is too little memory.
int64_t selfspec_round(const Model* m, const Drafting* d, const Judging* j);
}
