// Drafts as rows of a call. The initial chain of a tree is one row, and every other node is a row of its own. Also:
// which second choices are drafted.
#pragma once

#include <algorithm>
#include <vector>

#include "model.h"

// The new tokens of a round, row after row, and the arrays of the call that processes them.
class Nodes {
    std::vector<int64_t> firsts{0}, pages, roots, branches;  // of the rows of the call
    // per row of the call, its path from the root; empty: a chain
    std::vector<std::vector<int64_t>> paths;
    int64_t row_pages, most = 0;

    void begin_row(const int64_t* own, int64_t root, std::vector<int64_t> path) {
        pages.insert(pages.end(), own, own + row_pages);
        roots.push_back(root);
        most = std::max(most, int64_t(path.size()));
        paths.push_back(std::move(path));
    }

   public:
    std::vector<int64_t> tokens, positions, rows{0};  // rows: offset of each row's tokens

    Nodes(int64_t num_rows, int64_t row_pages) : row_pages(row_pages) { paths.reserve(num_rows); }

    int64_t size() const { return int64_t(tokens.size()); }

    // Add the nodes from `first` on of a row whose last token is at `position`. parents: of all nodes but node 0.
    void add(const int64_t* own, int64_t position, int64_t last, int64_t count, const int64_t* drafted,
             const int64_t* parents, int64_t first) {
        int64_t trunk = 0;  // the last node of the initial chain
        while (trunk < count && parents[trunk] == trunk) trunk++;
        for (int64_t i = first; i <= count; i++) {
            std::vector<int64_t> path{i};
            if (i > trunk) {
                while (path.back()) path.push_back(parents[path.back() - 1]);
                std::reverse(path.begin(), path.end());
            }
            tokens.push_back(i ? drafted[i - 1] : last);
            positions.push_back(position + (i > trunk ? int64_t(path.size()) - 1 : i));
            if (i < trunk) continue;
            if (i > trunk)
                begin_row(own, position, std::move(path));
            else
                begin_row(own, -1, {});
            firsts.push_back(size());
        }
        rows.push_back(size());
    }

    // The call. It is valid until nodes are added.
    Call call(const float* cos, const float* sin) {
        branches.assign(paths.size() * most, 0);
        for (size_t i = 0; i < paths.size(); i++)
            std::copy(paths[i].begin(), paths[i].end(), branches.begin() + i * most);
        return {size(), int64_t(paths.size()), positions.data(), firsts.data(), pages.data(), row_pages,
                most ? roots.data() : nullptr, most ? branches.data() : nullptr, most, cos, sin};
    }
};

// Which second choices are drafted: see `selfspec.control.acceptance.likely_seconds`.
struct Seconds {
    // bounds between confidence bins; by bin, acceptance rates of first and of second choices
    const double *edges, *right, *second;
    int64_t num_edges;
    double least, enough;
    const int64_t* most;  // [num_rows]: maximum drafted tokens, second choices included
    int64_t limit;        // maximum second choices per row

    // The draft positions whose second choices are drafted, from 0 and ascending.
    std::vector<int64_t> likely(const float* sure, int64_t count, int64_t row) const {
        std::vector<std::pair<double, int64_t>> offers;
        double survival = 1, total = 0;
        for (int64_t at = 0; at < count; at++) {
            int64_t bin = std::upper_bound(edges, edges + num_edges, double(sure[at])) - edges;
            offers.push_back({survival * (1 - right[bin]) * second[bin], -at});
            survival *= right[bin];
        }
        std::sort(offers.rbegin(), offers.rend());
        int64_t room = std::max<int64_t>(0, std::min(limit, most[row] - count));
        std::vector<int64_t> found;
        for (auto [chance, at] : offers)
            if (int64_t(found.size()) < room && chance > least) found.push_back(-at), total += chance - least;
        if (total <= enough) return {};
        std::sort(found.begin(), found.end());
        return found;
    }
};
