// Log-probabilities of a token and of the most probable ones, from the model's unmodified logits.
#pragma once

#include "pick.h"

struct LogProbs {
    float* own;      // log-probability of the token
    int64_t* rank;   // rank of the token, from 1; among equal logits the lowest token comes first
    int64_t wanted;  // number of most probable tokens to report, at most the vocabulary
    int64_t* likely;
    float* likely_own;
};

// memory: two padded vocabularies of floats.
static void log_probabilities(const float* logits, int64_t vocab, int64_t token, float* memory, const LogProbs& out) {
    int64_t n = filled_up(vocab), rank = 1, count = 0;
    scale({logits, vocab, 0, nullptr}, 1, memory);
    float most = largest(memory, n), own = logits[token];
    double total = double(most) + std::log(weigh(memory, n, most, memory + n));
    for (int64_t i = 0; i < token; i++) rank += logits[i] >= own;
    for (int64_t i = token + 1; i < vocab; i++) rank += logits[i] > own;
    *out.own = float(double(own) - total), *out.rank = rank;
    auto insert = [&](int64_t i) {  // behind those of equal probability
        int64_t at = count < out.wanted ? count++ : count - 1;
        for (; at > 0 && logits[out.likely[at - 1]] < logits[i]; at--) out.likely[at] = out.likely[at - 1];
        out.likely[at] = i;
    };
    for (int64_t i = 0; i < out.wanted; i++) insert(i);
    for (int64_t i = count; count && i < vocab; i++)
        if (logits[i] > logits[out.likely[count - 1]]) insert(i);
    for (int64_t i = 0; i < count; i++) out.likely_own[i] = float(double(logits[out.likely[i]]) - total);
}
