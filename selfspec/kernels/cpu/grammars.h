// Grammars of rows, which the caller follows: see `selfspec.executors.cpu.grammars`.
#pragma once

#include <cstdint>
#include <vector>

// Asks the caller about a row: `token` comes after the first `at` tokens of the row since the program began, of which
// the caller knows the ones before; at -1: none has come. Returns the address of the mask of what may follow, plus 1 if
// nothing may: bit t % 32 of word t / 32 is whether token t may. 0: the caller has failed.
using Follow = int64_t (*)(int64_t row, int64_t at, int64_t token);

struct FollowFailure {};

// What may follow some tokens of a row.
struct Followed {
    const uint32_t* mask;  // null: every token
    bool has_ended;
};

// The only token of a mask; -1 if there are several.
static inline int64_t single_of(const uint32_t* mask, int64_t vocab) {
    int64_t found = -1;
    for (int64_t word = 0; word < (vocab + 31) / 32; word++) {
        if (!mask[word]) continue;
        if (found >= 0 || mask[word] & (mask[word] - 1)) return -1;
        found = word * 32 + __builtin_ctz(mask[word]);
    }
    return found;
}

// Follows the rows of a program. Only the thread that runs the program may ask. The caller is asked once about a
// position, since a draft's masks are those of its verification.
class Grammars {
    struct Path {
        std::vector<int64_t> tokens;  // that the caller has been told
        std::vector<Followed> after;  // the first n of them
        int64_t num_taken = 0;        // of earlier rounds
    };

    Follow follow;
    const int64_t* has_grammar;  // [num_rows]
    std::vector<Path> paths;     // per row

    void ask(int64_t row, int64_t at, int64_t token) {
        int64_t found = follow(row, at, token);
        if (!found) throw FollowFailure();
        paths[row].after.push_back({reinterpret_cast<const uint32_t*>(found & ~int64_t(1)), bool(found & 1)});
    }

   public:
    Grammars(Follow follow, const int64_t* has_grammar, int64_t num_rows)
        : follow(follow), has_grammar(has_grammar), paths(num_rows) {}

    // What may follow a row's tokens of earlier rounds and `count` drafted ones.
    Followed after(int64_t row, const int64_t* drafted = nullptr, int64_t count = 0) {
        if (!has_grammar[row]) return {nullptr, false};
        Path& path = paths[row];
        if (path.after.empty()) ask(row, -1, 0);
        for (int64_t i = 0; i < count; i++) {
            int64_t at = path.num_taken + i;
            if (at < int64_t(path.tokens.size()) && path.tokens[at] == drafted[i]) continue;
            path.tokens.resize(at), path.after.resize(at + 1);
            ask(row, at, drafted[i]);
            path.tokens.push_back(drafted[i]);
        }
        return path.after[path.num_taken + count];
    }

    // How many of these tokens a row's grammar allows, one after the other.
    int64_t num_allowed(int64_t row, const int64_t* tokens, int64_t count) {
        for (int64_t i = 0; i < count && has_grammar[row]; i++)
            if (!(after(row, tokens, i).mask[tokens[i] / 32] >> (tokens[i] % 32) & 1)) return i;
        return count;
    }

    // Write at most `most` tokens, each of which is the only one that may follow, and return their number.
    int64_t forced(int64_t row, int64_t most, int64_t vocab, int64_t* out) {
        int64_t count = 0;
        for (; count < most && has_grammar[row]; count++) {
            Followed found = after(row, out, count);
            int64_t single = found.has_ended ? -1 : single_of(found.mask, vocab);
            if (single < 0) break;
            out[count] = single;
        }
        return count;
    }

    // Take the tokens of a round. Returns whether nothing may follow them.
    bool add(int64_t row, const int64_t* tokens, int64_t count) {
        bool has_ended = after(row, tokens, count).has_ended;
        paths[row].num_taken += count;
        return has_ended;
    }
};

// Set the scores of tokens that may not follow to -inf.
static inline void exclude(const uint32_t* mask, int64_t vocab, float* scores) {
    for (int64_t at = 0; at < vocab; at += 32) {
        uint32_t bits = mask[at / 32];
        if (bits == ~0u) continue;
        int64_t end = at + 32 < vocab ? at + 32 : vocab;
        for (int64_t i = at; i < end; i++) scores[i] = bits >> (i - at) & 1 ? scores[i] : -__builtin_inff();
    }
}
