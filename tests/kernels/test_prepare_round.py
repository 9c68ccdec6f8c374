"""The calls of a round from the state of its rows: as a plain loop makes them, by the twin and by the kernel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.kernels import reference
from selfspec.kernels.layout import GIVEN

prepare_round = pytest.importorskip("selfspec.kernels.prepare_round", reason="Triton is not installed")

PAGE, NUM_PAGES = 4, 6
a_row = st.one_of(
    st.none(),  # an empty slot
    st.tuples(st.integers(1, 12), st.integers(1, 6), st.integers(0, 5), st.integers(0, 1 << 40)),
)


def state_of(rows, width):
    """The rows, and what each place of each is, or None: (kept at, position)."""
    state = torch.zeros(len(rows), GIVEN + width, dtype=torch.int64)
    pages = torch.randperm(len(rows) * NUM_PAGES).view(len(rows), NUM_PAGES).int()
    places = []
    for slot, row in enumerate(rows):
        content, remaining, drafts, seed = row or (0, 0, 0, 0)
        floats = torch.tensor([0.5 * (slot % 3), 0.9, 0.1]).view(torch.int32).tolist()
        own = [slot + 3, content, remaining, drafts, seed, slot % 4, *floats, *[-1] * 8, *range(20, 20 + width)]
        state[slot] = torch.tensor(own)
        used = 0 if row is None else min(drafts, remaining - 1) + 1
        at = [content - 1 + p for p in range(used)]
        kept = [int(pages[slot, p // PAGE]) * PAGE + p % PAGE for p in at]
        places.append([*zip(kept, at, strict=True), *[None] * (width - used)])
    return state, pages, places


def check(step, state, places, starts):
    """A call of some places of every slot."""
    n = len(places[0])
    flat = [(slot, place) for slot, own in enumerate(places) for place in own]
    layout, sampling = step
    assert layout.rows.tolist() == [-1 if place is None else slot for slot, place in flat]
    assert layout.slots.tolist() == [-1 if place is None else place[0] for _, place in flat]
    assert layout.positions.tolist() == [0 if place is None else place[1] for _, place in flat]
    counts = [sum(place is not None for place in own) for own in places]
    assert layout.counts.tolist() == counts and layout.starts.tolist() == starts
    assert layout.lengths.tolist() == [max([0, *(place[1] + 1 for place in own if place)]) for own in places]
    assert layout.most_new == n and layout.most_tokens == 64
    for slot, place, target, seed, top_k, temperature in zip(
        *zip(*flat, strict=True), sampling.positions.tolist(), sampling.seeds.tolist(), sampling.top_k.tolist(),
        sampling.temperature.tolist(), strict=True,
    ):  # fmt: skip
        assert (seed, top_k, temperature) == (int(state[slot, 4]), slot % 4, 0.5 * (slot % 3))
        assert place is None or target == place[1] + 1
    assert all(p == pytest.approx(0.9) for p in sampling.top_p.tolist())
    assert all(p == pytest.approx(0.1) for p in sampling.min_p.tolist())


@pytest.mark.parametrize("prepare", [reference.prepare, prepare_round.prepare])
@settings(max_examples=20)
@given(rows=st.lists(a_row, min_size=1, max_size=5), width=st.integers(1, 6), has_drafts=st.booleans())
def test_every_place_lies_where_its_row_has_it(prepare, rows, width, has_drafts):
    rows = [row and (row[0], row[1], min(row[2], width - 1), row[3]) for row in rows]
    state, pages, places = state_of(rows, width)
    done = prepare(state, pages, PAGE, width, 64, has_drafts)
    assert done.fed.view(len(rows), width).tolist() == [[slot + 3, *range(20, 19 + width)] for slot in range(len(rows))]
    check(done.verify, state, places, [slot * width for slot in range(len(rows))])
    assert len(done.drafts) == width * has_drafts
    for at, step in enumerate(done.drafts):
        check(step, state, [[own[at]] for own in places], [*range(len(rows))])


@pytest.mark.parametrize("prepare", [reference.prepare, prepare_round.prepare])
def test_a_state_of_too_few_columns_is_refused(prepare):
    state, pages = torch.zeros(2, GIVEN, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"prepare: state must be \[S, at least {GIVEN + 1}\], got \[2, {GIVEN}\]"):
        prepare(state, pages, PAGE, 2, 64)
