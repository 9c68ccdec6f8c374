// Penalties on logits by the tokens before a position, and what is added to single logits:
// `selfspec.executors.penalties` and `logit_rules` do the same in torch.
#pragma once

#include <algorithm>
#include <vector>

#include "model.h"

static inline bool penalizes(const SamplingParams& params) {
    return params.repetition != 1 || params.presence != 0 || params.frequency != 0 || params.ngram > 0;
}

// What is added to the logits of a row's tokens: entry i to `tokens[i]`, at positions before `until[i]`. Of entries of
// the same token, the last one counts.
struct Bias {
    int64_t count;
    const int64_t *tokens, *until;
    const float* added;
};

// A row's tokens, and the number of times that its output contains each.
struct History {
    int64_t vocab;
    Bias bias;
    std::vector<int64_t> tokens, distinct;  // all tokens; the distinct ones within the vocabulary
    std::vector<int32_t> counts;            // [vocab]
    std::vector<char> is_seen;              // [vocab]

    History(int64_t vocab, const int64_t* content, int64_t count, int64_t num_prompt, const Bias& bias)
        : vocab(vocab), bias(bias), counts(vocab), is_seen(vocab) {
        add(content, num_prompt, 0);
        add(content + num_prompt, count - num_prompt, 1);
    }

    // times: 1 for output tokens, 0 for prompt tokens.
    void add(const int64_t* more, int64_t count, int32_t times) {
        for (int64_t i = 0; i < count; i++) {
            int64_t token = more[i];
            tokens.push_back(token);
            if (token >= vocab) continue;
            if (!is_seen[token]) is_seen[token] = 1, distinct.push_back(token);
            counts[token] += times;
        }
    }
};

// The tokens before a position: a row's tokens, and the drafted ones after them.
struct Prefix {
    const History& row;
    const int64_t* drafted;
    int64_t count;          // number of drafted tokens
    const int32_t* places;  // [vocab]: place of each token among the logits, -1 if absent; null: the token itself

    int64_t place_of(int64_t token) const { return token >= row.vocab ? -1 : places ? places[token] : token; }

    int64_t at(int64_t i) const {
        int64_t known = int64_t(row.tokens.size());
        return i < known ? row.tokens[i] : drafted[i - known];
    }

    // Call `f` with every token that would repeat an n-gram.
    template <class F>
    void each_repeating(int64_t n, F f) const {
        int64_t total = int64_t(row.tokens.size()) + count;
        for (int64_t end = n - 1; end < total; end++) {
            int64_t same = 1;
            while (same < n && at(end - same) == at(total - same)) same++;
            if (same == n) f(at(end));
        }
    }

    // Recompute the scores (logits over temperature) of tokens that occur before, or to which something is added.
    void penalize(const SamplingParams& params, const float* logits, float temperature, float* scores) const {
        auto one = [&](int64_t token, int64_t times, float added) {
            int64_t place = place_of(token);
            if (place < 0) return;
            float logit = logits[place];
            if (times >= 0) {
                logit = logit < 0 ? logit * params.repetition : logit / params.repetition;
                logit += -(params.frequency * float(times) + params.presence * float(times > 0));
            }
            scores[place] = (logit + added) / temperature;
        };
        auto drafted_times = [&](int64_t token) { return std::count(drafted, drafted + count, token); };
        if (penalizes(params)) {
            for (int64_t token : row.distinct) one(token, row.counts[token], 0);
            for (int64_t i = 0; i < count; i++) {
                int64_t before = drafted[i] < row.vocab ? row.counts[drafted[i]] : 0;
                one(drafted[i], before + drafted_times(drafted[i]), 0);
            }
        }
        for (int64_t i = 0; i < row.bias.count; i++) {
            int64_t token = row.bias.tokens[i], more = drafted_times(token);
            if (int64_t(row.tokens.size()) + count >= row.bias.until[i]) continue;
            bool is_penalized = penalizes(params) && (row.is_seen[token] || more);
            one(token, is_penalized ? row.counts[token] + more : -1, row.bias.added[i]);
        }
        if (!params.ngram) return;
        each_repeating(params.ngram, [&](int64_t token) {
            int64_t place = place_of(token);
            if (place >= 0) scores[place] = -__builtin_inff();
        });
    }
};
