"""Plans of several rounds on a device, which advances the rows: a round begins before the last one is read."""

from __future__ import annotations

import math
from functools import cache

import pytest

from selfspec import SamplingParams
from selfspec.executors.cuda import shapes
from selfspec.kernels.suite import REFERENCE
from tests.cuda.standin import with_runner
from tests.helpers import Always, audit_cache, decode, make_prompts, request, run, tokens_of
from tests.models import build, tiny
from tests.target import Target

SAMPLINGS = ({}, {"temperature": 0.9, "top_p": 0.9, "seed": 1}, {"temperature": 1.1, "seed": 2}, {})
LENGTHS, NEW = (5, 12, 3, 9), (21, 9, 30, 26)


@cache
def requests(count=4, ends=True):
    """Ragged rows, greedy and sampled, of which some end by a token in the midst of a draft."""
    made = []
    for i, prompt in enumerate(make_prompts([LENGTHS[i % 4] for i in range(count)], seed=7)):
        params = SamplingParams(max_tokens=NEW[i % 4], **SAMPLINGS[i % 4])
        [whole] = tokens_of(decode(tiny("llama"), [request(prompt, params)]))
        eos = frozenset(whole[8 + i % 3 : 9 + i % 3]) if ends and i % 2 == 0 else frozenset()
        cut = next((at + 1 for at, token in enumerate(whole) if token in eos), len(whole))
        made.append((request(prompt, params, eos_token_ids=eos), whole[:cut]))
    return made


def recorded(policy, asked, kernels=REFERENCE, audit=audit_cache, **options):
    """A run by recordings whose tokens are those of plain decoding, and its target."""
    target = with_runner(Target(build("llama"), backend="views"), kernels=kernels, max_rows=32)
    sizes = {"max_num_seqs": len(asked), "max_num_cached_tokens": 64 * len(asked), "page_size": 16, **options}
    made = run(target, [one for one, _ in asked], policy, audit=audit, max_step_seconds=math.inf, **sizes)
    assert tokens_of(made.outputs) == [tokens for _, tokens in asked]
    remaining = {str(at): one.max_tokens for at, (one, _) in enumerate(asked)}
    for round_ in made.rounds:
        for row in round_.rows:
            name = row.sequence.request_id
            assert not row.drafted or len(row.drafted) < remaining[name], "no place for the target's own token"
            remaining[name] -= len(row.token_ids)
        # nothing is wasted but what an end cut off
        assert round_.num_wasted <= sum(len(row.drafted) + 1 - len(row.token_ids) for row in round_.rows)
    return made, target


@pytest.mark.slow
def test_up_to_32_rows_are_one_recording():
    made, target = recorded(Always(2, 2, num_rounds=99), requests(19, ends=False), audit=None)
    assert len(made.rounds[0].rows) == 19
    large = [one for one in target.split.runner.graphs.capture.made if "advance(i64[32," in one.kernels[-1]]
    assert len(large) == 1 and large[0].num_replays > 2


def test_rows_near_their_ends_take_no_recordings_of_their_own():
    _, target = recorded(Always(2, 4, num_rounds=99), requests(1, ends=False))
    tape = target.split.runner.graphs.capture
    assert sum(any("advance" in one for one in made.kernels) for made in tape.made) == 1


def test_a_plan_ends_where_its_recording_has_no_capacity_for_longer_rows(monkeypatch):
    monkeypatch.setattr(shapes, "LEAST_HELD", 16)
    made, target = recorded(Always(2, 3, num_rounds=99), requests(3, ends=False), max_num_cached_tokens=256)
    first = [round_.round_index for round_ in made.rounds].index(0, 1)
    assert 1 <= first < 10, "a plan ends before any row does"
    assert len(target.split.runner.graphs) >= 3


def test_a_row_that_ends_leaves_the_round_in_flight_to_the_others():
    made, _ = recorded(Always(2, 3, num_rounds=99), requests())
    rounds = made.rounds
    ends = [at for at, one in enumerate(rounds) if any(row.finish_reason for row in one.rows)]
    after = [rounds[at + 1] for at in ends[:-1] if rounds[at + 1].round_index]
    assert after and all(round_.rows and all(row.token_ids for row in round_.rows) for round_ in after)
    assert rounds[-1].rows, "no round of rows that have all ended"


# --------------------------------------------------------------------------------------------------------- mutations


def content_of_a_token_less(state, num_kept, *more):
    REFERENCE.advance(state, num_kept - (num_kept > 1).int(), *more)


def same_remaining(state, *more):
    before = state[:, 2].clone()
    REFERENCE.advance(state, *more)
    state[:, 2] = before


def the_token_fed_before(state, num_kept, ended, last):
    REFERENCE.advance(state, num_kept, ended, state[:, 0].clone())


def ended_rows_go_on(state, num_kept, ended, last):
    REFERENCE.advance(state, num_kept, ended * 0, last)


def all_rows_end_with_one(state, num_kept, ended, last):
    REFERENCE.advance(state, num_kept, ended.amax().expand_as(ended).contiguous(), last)


@pytest.mark.parametrize(
    "fault",
    [content_of_a_token_less, same_remaining, the_token_fed_before, ended_rows_go_on, all_rows_end_with_one],
)
@pytest.mark.slow
def test_faults_of_advancing_are_noticed(fault):
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        recorded(Always(2, 3, num_rounds=99), requests(), kernels=REFERENCE._replace(advance=fault))
