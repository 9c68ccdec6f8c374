// What a row drafts by lookup after matches of every length: `selfspec.control.weighing` says the same in Python, and
// choice.cpp why it is said here, too.

#include <algorithm>
#include <cstdint>

namespace {

// What came after matches: [bins, longest] by position of a draft's token; [bins] of all tokens, and of the row's own.
struct Matches {
    int64_t bins, longest;
    const int64_t* edges;  // [bins - 1] between bins of matches
    const double *hits, *seen, *pooled_hits, *pooled_seen, *own_hits, *own_seen, *first;  // first: if nothing is known
    double first_weight, pool_weight, row_weight, least;  // what that is worth, beside the next wider view
    double weight;                                        // of an observation now
};

// Seconds of rounds that draft 1, 2, .. tokens: [count] each, of what is added up.
struct Rounds {
    int64_t count;
    const double *fixed, *picks, *drafted;
    double pick, reading, further, deciding, slower, plain;  // what they are multiplied by; of a round without
};

constexpr int64_t MOST_FOUND = 63;  // tokens of a draft

// Of one length of matches; all in numbers of one kind, counts too.
struct Asked {
    double match, few, most;      // tokens that are looked at, and where any could pay, that may be drafted
    double is_long;               // whether it is asked for the longest draft that pays
    double usual, trust, likely;  // tokens per second; in forecasts; that a token beside a draft is right, at most
    double sure, planning;        // a chance beyond which none counts for more; seconds that it takes to plan a draft
};

struct Weighed {
    double length, could_pay, longest;  // longest: that pays where every token is right
    double promised, forecast, num_chances;
    double chances[MOST_FOUND];
};

// How likely a draft is right as far as each of its tokens; how many are likely enough.
int64_t survivals(const Matches& m, int64_t match, int64_t most, double* out) {
    int64_t bin = 0, at = 0;
    while (bin < m.bins - 1 && match >= m.edges[bin]) bin++;
    const double *hits = m.hits + bin * m.longest, *seen = m.seen + bin * m.longest;
    double first = m.first_weight * m.weight, more = m.pool_weight * m.weight, survival = 1;
    for (int64_t pool = bin; pool < m.bins && at < most; pool++) {
        int64_t end = pool == m.bins - 1 ? most : std::min(most, m.edges[pool] - match);
        double pooled = (m.pooled_hits[pool] + first * m.first[pool]) / (m.pooled_seen[pool] + first) * more;
        double came = m.own_hits[pool], of = m.own_seen[pool] + m.row_weight;
        for (; at < end; at++) {
            survival *= (came + m.row_weight * (hits[at] + pooled) / (seen[at] + more)) / of;
            if (survival < m.least) return at;
            out[at] = survival;
        }
    }
    return at;
}

// Of `count` tokens that are come to, and right, with such chances: how many to draft for most tokens per second.
template <class Chance>
int64_t best_of(int64_t count, const Chance& chance, const double* seconds, double* rate) {
    double tokens = 1;
    int64_t length = 0;
    *rate = 1 / seconds[0];
    for (int64_t n = 1; n <= count; n++) {
        tokens += chance(n - 1);
        if (tokens > *rate * seconds[n]) *rate = tokens / seconds[n], length = n;
    }
    return length;
}

void weigh(const Matches& m, const double* seconds, int64_t most_priced, const Asked& a, Weighed* out) {
    int64_t match = int64_t(a.match), few = int64_t(a.few), most = int64_t(a.most);
    double* chances = out->chances;
    int64_t count = survivals(m, match, few, chances);
    double first = count ? chances[0] : 0, enough = a.usual * seconds[1], rate;
    auto pays = [&](double chance) { return chance > 0 && a.trust / (1 - std::min(chance, a.sure)) > enough; };
    out->length = out->longest = out->promised = out->forecast = 0;
    out->could_pay = pays(std::max(first, a.likely));
    if (out->could_pay != 0) {
        if (few < most && count) count = survivals(m, match, most, chances);
        auto likely = [&](int64_t at) { return chances[at]; };
        int64_t length = best_of(std::min(count, most_priced), likely, seconds, &rate);
        out->forecast = rate * seconds[length];
        out->promised = a.trust * out->forecast / (seconds[length] + a.planning);
        out->length = out->promised < a.usual ? 0 : double(length);
        auto sure = [](int64_t) { return 1.0; };
        if (a.is_long != 0) out->longest = double(best_of(std::min(most, most_priced), sure, seconds, &rate));
    }
    out->num_chances = double(count);
}

}  // namespace

extern "C" {

void selfspec_weigh(const Matches* matches, const Rounds* rounds, const Asked* asked, int64_t num_asked, Weighed* out) {
    const Rounds& r = *rounds;
    double seconds[MOST_FOUND + 1] = {r.plain};
    int64_t count = std::min(r.count, MOST_FOUND);
    for (int64_t n = 0; n < count; n++) {
        double reading = r.reading + r.further * r.drafted[n];
        seconds[n + 1] = r.slower * (r.fixed[n] + r.pick * r.picks[n] + reading + r.deciding);
    }
    for (int64_t i = 0; i < num_asked; i++) weigh(*matches, seconds, count, asked[i], out + i);
}
}
