"""Acceptance on the device against the engine's own: the same tokens kept, the same ends."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.decoding.stopping import Stopper
from selfspec.kernels import reference
from selfspec.kernels.layout import MOST_EOS

fused_accept = pytest.importorskip("selfspec.kernels.fused_accept", reason="Triton is not installed")

token = st.integers(0, 3)
a_row = st.one_of(
    st.none(),  # an empty slot
    st.tuples(st.lists(st.tuples(token, token), max_size=5), token, st.integers(1, 9), st.sets(token, max_size=2)),
)


@pytest.mark.parametrize("accept", [reference.accept, fused_accept.accept])
@settings(max_examples=25)
@given(rows=st.lists(a_row, min_size=1, max_size=4), padding=st.integers(0, 2))
def test_blocks_end_where_the_engine_ends_them(accept, rows, padding):
    fed, picks, starts, counts, state, wanted = [], [], [], [], [], []
    for row in rows:
        pairs, bonus, most, ends = row or ([], 0, 0, set())
        starts.append(len(fed))
        counts.append(len(pairs) + 1 if row else 0)
        state.append([5, 30 if row else 0, most, 1, 2, 3, 4, 5, 6, *ends, *[-1] * (MOST_EOS - len(ends))])
        if row is None:
            wanted.append((0, 0, 0, [0, 0, 0]))
        else:
            fed += [9, *(guess for guess, _ in pairs)]
            picks += [*(own for _, own in pairs), bonus]
            accepted = next((i for i, (guess, own) in enumerate(pairs) if guess != own), len(pairs))
            block = picks[starts[-1] :][: accepted + 1]
            kept, _, reason = Stopper(most, frozenset(ends)).cut([], 0, block)
            wanted.append(
                (len(pairs), accepted, kept, [block[kept - 1], *((0, 0) if reason else (30 + kept, most - kept))])
            )
        fed += [7] * padding
        picks += [7] * padding
    state = torch.tensor(state)
    before = state.clone()
    done = accept(
        state, torch.tensor([*fed, 0]), torch.tensor([*picks, 0]), torch.tensor(starts, dtype=torch.int32),
        torch.tensor(counts, dtype=torch.int32), 6,
    )  # fmt: skip
    assert torch.equal(state[:, 3:], before[:, 3:])
    for slot, (drafted, accepted, kept, row) in enumerate(wanted):
        assert done.record[slot, :3].tolist() == [drafted, accepted, kept] and int(done.num_kept[slot]) == kept
        assert state[slot, :3].tolist() == row
        start = starts[slot]
        assert done.record[slot, 3 : 3 + drafted].tolist() == fed[start + 1 : start + 1 + drafted]
        if counts[slot]:
            assert done.record[slot, 9 : 10 + drafted].tolist() == picks[start : start + 1 + drafted]
