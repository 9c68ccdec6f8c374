"""Shapes of packed calls for the kernels' tests, and attention by its formula."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

# (tokens held before, new tokens); no new tokens: an empty slot
a_row = st.one_of(st.tuples(st.integers(0, 40), st.integers(1, 6)), st.tuples(st.integers(0, 9), st.just(0)))
some_rows = st.lists(a_row, min_size=1, max_size=4).filter(lambda rows: any(new for _, new in rows))


def by_formula(call, scale, window=None, chunk=None, softcap=None, sinks=None):
    """Every query on its own, in float64, over the tokens that it may see; zeros at padding."""
    layout, out = call.layout, torch.zeros(call.queries.shape, dtype=torch.float64)
    page_size, share = call.keys.shape[1], call.queries.shape[1] // call.keys.shape[2]
    for token, slot in enumerate(layout.rows.tolist()):
        if slot < 0:
            continue
        length, own = int(layout.lengths[slot]), int(layout.positions[token])
        seen = [
            at
            for at in range(min(length, own + 1))
            if (window is None or own - at < window) and (chunk is None or at // chunk == own // chunk)
        ]
        pages = layout.pages[slot].tolist()
        places = [pages[at // page_size] * page_size + at % page_size for at in seen]
        for head in range(call.queries.shape[1]):
            keys = call.keys.flatten(0, 1)[places, head // share].double()
            values = call.values.flatten(0, 1)[places, head // share].double()
            scores = keys @ call.queries[token, head].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].double()[None]])
            out[token, head] = scores.softmax(0)[: len(seen)] @ values
    return out.float()
