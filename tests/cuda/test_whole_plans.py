"""Recorded rounds that draft over a part of the vocabulary, and the bytes that recordings share."""

from __future__ import annotations

import torch

from selfspec.control.fixed import Fixed
from selfspec.executors.cuda.graphs import Graphs
from tests.cuda.standin import with_runner
from tests.cuda.tape import Tape
from tests.helpers import make_prompts
from tests.models import build
from tests.target import Target


def test_recordings_draft_over_a_part_that_is_ranked_anew_and_over_edited_heads():
    target, [prompt] = with_runner(Target(build("llama"), engine="views")), make_prompts([9])
    frequencies, runner = target.stack.frequencies, target.stack.runner

    def drafted():
        request, rounds = target.requests([prompt], {"max_new_tokens": 9}), []
        [plain] = target.generate([prompt], policy="plain", max_new_tokens=9)
        for round_ in target.rounds(request, policy=Fixed(2, 3, draft_vocab=20)):
            rounds += round_.rows
        assert [token for row in rounds for token in row.tokens] == plain.tokens
        return {token for row in rounds for token in row.drafted}

    assert drafted() <= frequencies.part(20).members
    before, recorded = frequencies.part(20).version, runner.graphs.num_recorded
    frequencies.add(list(range(70, 90)) * 50, written=True)
    later = drafted()
    assert frequencies.part(20).version > before and later <= frequencies.part(20).members == {*range(70, 90)}
    assert runner.graphs.num_recorded == recorded, "the same recordings"
    with torch.no_grad():
        target.model.lm_head.weight[75] += 9 * target.model.lm_head.weight[80]
    assert drafted() != later
    assert runner.graphs.num_recorded == recorded


class Held:
    """Inputs of a recording."""

    def __init__(self, *shared):
        self.num_bytes, self.shared = 1, shared


def test_bytes_that_several_recordings_read_count_once():
    part, buffer = Held(), torch.zeros(4)
    part.num_bytes = 1000
    graphs = Graphs(Tape(num_bytes=10), budget=1040)
    for key in range(3):
        graphs.record(key, Held(part), lambda: (buffer + 1,))
    assert graphs.num_bytes == 1033 and len(graphs) == 3
    graphs.record(3, Held(), lambda: (buffer + 1,))
    assert graphs.num_bytes == 1033 and len(graphs) == 3, "over the budget, so that one is dropped"
