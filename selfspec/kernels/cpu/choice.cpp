// How often every exit layer is right, and which of them, drafting in which way, promises most; `tracker`, `worth` and
// `choosing` of selfspec.control say the same in Python. Between two rounds the weights stream through the caches, so
// that hundreds of small functions, as Python and numpy make of it, take ten times as long as they do in a loop.

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

constexpr int64_t POWERS = 3, VIEWS = 3;  // of log-odds; of counts

// Statistics of a tracker: [lines, bins], a line per exit layer, of each kind that is named.
struct Known {
    int64_t lines, bins;
    double* counts;             // recent hits, recent misses, lasting ones, and those over all texts
    const double* bounds;       // [bins - 1] of confidence
    double *expected, *wider;   // of the curves; of rates, times what that is worth, and of shares
    double* curve;              // [2, lines]: offset and slope
    const double *mean, *log_odds;
    double weights[4];          // observations that the next wider view is worth: of rates and shares, recent, lasting
    double precision[2], curve_weight, most_step;
    double recalled;             // lasting observations of a line, below which it takes some of those over all texts
    double half_lives[3];        // of the counts, in tokens
    double *right, *share, *totals;  // out: estimates, and lasting observations of each line
};

// Of a line that little is lasting of, take as much from what all texts have told.
void recall(const Known& k, int64_t line) {
    int64_t size = k.lines * k.bins, at = line * k.bins;
    double *lasting = k.counts + 2 * size, *overall = lasting + 2 * size, total = 0, beyond = 0;
    auto for_all = [&](auto of) {
        for (int64_t i = at; i < at + k.bins; i++) of(i), of(size + i);
    };
    auto rest = [&](int64_t i) { return std::max(overall[i] - lasting[i], 0.0); };
    for_all([&](int64_t i) { total += lasting[i], beyond += rest(i); });
    if (total >= k.recalled) return;
    double share = std::min((k.recalled - total) / std::max(beyond, 1e-9), 1.0);
    for_all([&](int64_t i) { lasting[i] += share * rest(i); });
}

// One Newton step of a line's curve, by its lasting counts.
void fit(const Known& k, int64_t line) {
    int64_t size = k.lines * k.bins;
    const double *hits = k.counts + 2 * size + line * k.bins, *misses = hits + size;
    double *expected = k.expected + line * k.bins, slopes[2] = {}, bends[POWERS] = {};
    for (int64_t i = 0; i < k.bins; i++) {
        double hoped = (hits[i] + misses[i]) * expected[i], bend = hoped - hoped * expected[i], power = 1;
        for (int64_t n = 0; n < POWERS; n++, power *= k.log_odds[i]) {
            if (n < 2) slopes[n] += (hits[i] - hoped) * power;
            bends[n] += bend * power;
        }
    }
    double *offset = k.curve + line, *slope = offset + k.lines;
    double first = slopes[0] - (*offset - k.mean[line]) * k.precision[0];
    double second = slopes[1] - (*slope - k.mean[k.lines + line]) * k.precision[1];
    double a = bends[0] + k.precision[0], b = bends[1], d = bends[2] + k.precision[1], by = a * d - b * b;
    auto step = [&](double of) { return std::min(std::max(of / by, -k.most_step), k.most_step); };
    *offset += step(d * first - b * second);
    *slope += step(a * second - b * first);
    for (int64_t i = 0; i < k.bins; i++) {
        expected[i] = 1 / (1 + std::exp(-(*offset + *slope * k.log_odds[i])));
        k.wider[line * k.bins + i] = k.curve_weight * expected[i];
    }
}

// What is counted, out of how many, of one line: shrunk from recent counts to lasting ones, and from those to `wider`.
double shrunk(const Known& k, bool is_share, double recent, double of_recent, double lasting, double of_lasting,
              double wider) {
    double beside_recent = k.weights[is_share], beside_lasting = k.weights[2 + is_share];
    double found = (lasting + wider) / (of_lasting + beside_lasting);
    return (found * beside_recent + recent) / (of_recent + beside_recent);
}

void estimate(const Known& k, int64_t line) {
    int64_t size = k.lines * k.bins, at = line * k.bins;
    const double *counts = k.counts + at, *wider = k.wider + at;
    double recent = 0, lasting = 0, highest = 0;
    auto seen = [&](int64_t i, int64_t view) {
        const double* hits = counts + 2 * view * size;
        return hits[i] + hits[size + i];
    };
    for (int64_t i = 0; i < k.bins; i++) recent += seen(i, 0), lasting += seen(i, 1);
    for (int64_t i = 0; i < k.bins; i++) {
        double now = seen(i, 0), before = seen(i, 1);
        double right = shrunk(k, false, counts[i], now, counts[2 * size + i], before, wider[i]);
        highest = std::max(highest, right);
        k.right[at + i] = highest;  // rises along the bins
        k.share[at + i] = shrunk(k, true, now, recent, before, lasting, wider[size + i]);
    }
    k.totals[line] = lasting;
}

constexpr int64_t PIECES = 9, MOST_WIDTH = 64;

// Seconds of rounds, by exit layer and drafted tokens per row: the columns of [PIECES, lines, width], times `by`.
struct Prices {
    double by[PIECES];
    const double* table;
};

struct Way {  // of drafting
    double share;                 // of the target's picks that its tokens are among
    double margin;                // what its promise is multiplied by beside the others'
    int64_t are_copies, deepest;  // exit layer
    Prices prices;
};

struct Asked {
    int64_t num_rows, num_ways, num_layers;
    const Way* ways;
    const int64_t* layers;   // exit layers to choose from
    int64_t width, longest;  // columns of prices; the last `longest` + 1 are of rounds, by drafted tokens per row
    const int64_t* caps;     // tokens after which a row's draft may be taken to end
    int64_t num_caps;
    const double *came, *expected;  // [lines]: tokens of copies that were right, and that layers would have had right
    double pooled, believed;        // the share of all lines, and how many such tokens it is worth beside those
    const double* favour;           // [lines]: over the rows, what is added to 1
    double trust, trust_in_known, known;  // `known`: lasting observations from which a line is
    int64_t now_way, now_layer;           // way and exit layer in use; -1: none
    double stay;                          // what another must promise beside it
};

struct Choice {
    int64_t way, exit_layer;
    double rate, length, covered, trust;
};

void price(const Prices& p, int64_t lines, int64_t width, int64_t line, double* out) {
    std::fill(out, out + width, 0.0);
    for (int64_t piece = 0; piece < PIECES; piece++) {
        const double* column = p.table + (piece * lines + line) * width;
        for (int64_t i = 0; i < width; i++) out[i] += p.by[piece] * column[i];
    }
}

struct Promise {
    double rate, length;
};

constexpr double SURE = 1 - 1e-6;

// Of one row, which ends below each bin or after some number of tokens, whichever comes first.
Promise of_one(const Known& k, const Asked& a, int64_t line, double covered, const double* rounds) {
    const double *right = k.right + line * k.bins, *share = k.share + line * k.bins;
    double total = 0, above = 0, kept = 0;
    for (int64_t i = k.bins - 1; i >= 0; i--) total += right[i] * share[i] * covered;
    total = std::min(total, SURE);
    Promise best{-1, 0};
    for (int64_t i = k.bins - 1; i >= 0; i--) {
        above += share[i], kept += right[i] * share[i] * covered;
        double goes_on = std::min(above, SURE), is_right = std::min(kept, SURE), power = 1, right_power = 1;
        Promise here{-1, 0};
        for (int64_t n = 0, tokens = 0; n < a.num_caps; n++) {
            for (; tokens < a.caps[n]; tokens++) power *= goes_on, right_power *= is_right;
            double drafted = (1 - power) / (1 - goes_on), came = (1 - right_power) / (1 - is_right);
            if (!(drafted < double(a.longest))) continue;  // not a number
            int64_t low = int64_t(drafted);
            double seconds = rounds[low] + (drafted - double(low)) * (rounds[low + 1] - rounds[low]);
            double rate = (1 + total * came) / seconds;
            if (rate > here.rate) here = {rate, drafted};
        }
        if (here.rate >= best.rate) best = here;
    }
    return best;
}

// Of several, which stop together.
Promise of_rows(const Known& k, const Asked& a, int64_t line, double covered, const double* rounds) {
    double acceptance = 0, power = 1, kept = 1;
    for (int64_t i = line * k.bins; i < (line + 1) * k.bins; i++) acceptance += k.right[i] * k.share[i] * covered;
    Promise best{-1, 0};
    for (int64_t n = 1; n <= a.longest; n++) {
        power *= acceptance, kept += power;
        double rate = double(a.num_rows) * kept / rounds[n];
        if (rate > best.rate) best = {rate, double(n)};
    }
    return best;
}

}  // namespace

extern "C" {

// Fade all counts, which was last done at `before`, and count what came since: single observations, by where they are
// counted and when they came; and drafts, [num_drafts, 3]: where their line's hits begin, tokens told of, and first ones
// that are hits; when those came; and all their tokens' confidences.
void selfspec_count(const Known* known, const int64_t* cells, const double* cells_at, int64_t num_cells,
                    const int64_t* drafts, const double* drafts_at, const double* sure, int64_t num_drafts, double now,
                    double before) {
    const Known& k = *known;
    int64_t half = k.lines * k.bins, size = 2 * half;
    for (int64_t view = 0; view < VIEWS; view++) {
        double by = std::exp2((before - now) / k.half_lives[view]);
        for (int64_t i = view * size; i < (view + 1) * size; i++) k.counts[i] *= by;
    }
    double weights[VIEWS];
    auto weigh = [&](double at) {
        for (int64_t view = 0; view < VIEWS; view++) weights[view] = std::exp2((at - now) / k.half_lives[view]);
    };
    auto add = [&](int64_t cell) {
        for (int64_t view = 0; view < VIEWS; view++) k.counts[view * size + cell] += weights[view];
    };
    for (int64_t i = 0; i < num_cells; i++) {
        if (i == 0 || cells_at[i] != cells_at[i - 1]) weigh(cells_at[i]);
        add(cells[i]);
    }
    for (int64_t n = 0; n < num_drafts; n++, drafts += 3) {
        weigh(drafts_at[n]);
        for (int64_t i = 0; i < drafts[1]; i++) {
            int64_t bin = std::upper_bound(k.bounds, k.bounds + k.bins - 1, *sure++) - k.bounds;
            add(drafts[0] + bin + (i < drafts[2] ? 0 : half));
        }
    }
}

// Fit curves if that is asked for, and estimate.
void selfspec_estimate(const Known* known, int64_t fits) {
    const Known& k = *known;
    for (int64_t line = 0; line < k.lines; line++) {
        recall(k, line);
        for (int64_t i = 0; i < fits; i++) fit(k, line);
        estimate(k, line);
    }
}

// out[lines]: tokens of a row per second by an exit layer that is always right.
void selfspec_limits(const Prices* prices, int64_t lines, int64_t width, int64_t longest, double* out) {
    double seconds[MOST_WIDTH];
    for (int64_t line = 0; line < lines; line++) {
        price(*prices, lines, width, line, seconds);
        const double* rounds = seconds + width - longest - 1;
        out[line] = 0;
        for (int64_t n = 1; n <= longest; n++) out[line] = std::max(out[line], double(n + 1) / rounds[n]);
    }
}

// The best choice, and its exit layer's prices, [width].
void selfspec_choose(const Known* known, const Asked* asked, Choice* out, double* prices) {
    const Known& k = *known;
    const Asked& a = *asked;
    auto choice = [&](int64_t way, int64_t exit_layer) {
        int64_t line = exit_layer - 1;
        price(a.ways[way].prices, k.lines, a.width, line, prices);
        double agreement = (a.came[line] + a.believed * a.pooled) / (a.expected[line] + a.believed);
        double covered = a.ways[way].share * (a.ways[way].are_copies ? std::min(agreement, 1.0) : 1.0);
        Promise best = (a.num_rows > 1 ? of_rows : of_one)(k, a, line, covered, prices + a.width - a.longest - 1);
        double trust = k.totals[line] >= a.known ? a.trust_in_known : a.trust;
        return Choice{way, exit_layer, best.rate, best.length, covered, trust};
    };
    auto promised = [&](const Choice& one) {
        double favour = 1 + a.favour[one.exit_layer - 1] / double(a.num_rows);
        return one.rate * favour * one.trust * a.ways[one.way].margin;
    };
    *out = choice(0, a.layers[0]);
    double most = -1;
    for (int64_t way = 0; way < a.num_ways; way++)
        for (int64_t i = 0; i < a.num_layers; i++) {
            if (a.layers[i] > a.ways[way].deepest) continue;
            Choice one = choice(way, a.layers[i]);
            if (promised(one) > most) most = promised(one), *out = one;
        }
    if (a.now_way >= 0) {
        Choice now = choice(a.now_way, a.now_layer);
        if (most < a.stay * promised(now)) *out = now;
    }
    price(a.ways[out->way].prices, k.lines, a.width, out->exit_layer - 1, prices);
}
}
