"""Acceptance on the device against the engine's own: the same tokens kept, the same ends."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.decoding.stopping import Stopper
from selfspec.kernels import reference
from selfspec.kernels.layout import ENDED_BY_EOS, ENDED_BY_LENGTH

fused_accept = pytest.importorskip("selfspec.kernels.fused_accept", reason="Triton is not installed")

token = st.integers(0, 3)
a_row = st.one_of(
    st.none(),  # an empty slot
    st.tuples(st.lists(st.tuples(token, token), max_size=5), token, st.integers(1, 9), st.sets(token, max_size=2)),
)
REASONS = {None: 0, "stop": ENDED_BY_EOS, "length": ENDED_BY_LENGTH}


@pytest.mark.parametrize("accept", [reference.accept, fused_accept.accept])
@settings(max_examples=25)
@given(rows=st.lists(a_row, min_size=1, max_size=4), padding=st.integers(0, 2))
def test_blocks_end_where_the_engine_ends_them(accept, rows, padding):
    fed, picks, starts, counts, remaining, eos = [], [], [], [], [], []
    wanted = []
    for row in rows:
        pairs, bonus, most, ends = row or ([], 0, 0, set())
        starts.append(len(fed))
        counts.append(len(pairs) + 1 if row else 0)
        remaining.append(most)
        eos.append([*ends, *[-1] * (2 - len(ends))])
        if row is None:
            wanted.append((0, 0, 0, 0, None))
        else:
            fed += [9, *(guess for guess, _ in pairs)]
            picks += [*(own for _, own in pairs), bonus]
            accepted = next((i for i, (guess, own) in enumerate(pairs) if guess != own), len(pairs))
            block = picks[starts[-1] :][: accepted + 1]
            kept, _, reason = Stopper(most, frozenset(ends)).cut([], 0, block)
            wanted.append((len(pairs), accepted, kept, REASONS[reason], block[kept - 1]))
        fed += [7] * padding
        picks += [7] * padding
    done = accept(
        torch.tensor([*fed, 0]), torch.tensor([*picks, 0]), torch.tensor(starts, dtype=torch.int32),
        torch.tensor(counts, dtype=torch.int32), torch.tensor(remaining, dtype=torch.int32), torch.tensor(eos), 6,
    )  # fmt: skip
    for slot, (drafted, accepted, kept, ended, last) in enumerate(wanted):
        assert done.record[slot, :3].tolist() == [drafted, accepted, kept]
        assert (int(done.num_accepted[slot]), int(done.num_kept[slot]), int(done.ended[slot])) == (
            accepted,
            kept,
            ended,
        )
        if last is not None:
            assert int(done.last[slot]) == last
            start = starts[slot]
            assert done.record[slot, 3 : 3 + drafted].tolist() == fed[start + 1 : start + 1 + drafted]
            assert done.record[slot, 9 : 10 + drafted].tolist() == picks[start : start + 1 + drafted]
