"""Programs of several rounds on a device, which advances the rows: a round begins before the last one is read."""

from __future__ import annotations

import pytest

from selfspec.decoding.engine import Engine
from selfspec.decoding.request import Request
from selfspec.executors.cuda import shapes
from selfspec.executors.cuda.rounds import RecordedRounds
from selfspec.executors.pick import Sampling
from selfspec.kernels.suite import REFERENCE
from tests.cuda.standin import with_runner
from tests.helpers import Always, audit_cache, audit_pages, check_rounds, make_prompts
from tests.models import build, tiny
from tests.slow import slow
from tests.target import Target

LENGTHS, NEW = (5, 12, 3, 9), (21, 9, 30, 26)
HOT = (Sampling(), Sampling(0.9, top_p=0.9, seed=1), Sampling(1.1, seed=2), Sampling())


def requests(count=4, ends=True):
    """Ragged rows, greedy and sampled, of which some end by a token in the midst of a draft."""
    prompts = make_prompts([LENGTHS[i % 4] for i in range(count)], seed=7)
    made = []
    for i, prompt in enumerate(prompts):
        free = Request(prompt, NEW[i % 4], HOT[i % 4], eos=frozenset())
        (whole,) = alone(free)
        eos = frozenset(whole[8 + i % 3 : 9 + i % 3]) if ends and i % 2 == 0 else frozenset()
        cut = next((at + 1 for at, token in enumerate(whole) if token in eos), len(whole))
        made.append((Request(prompt, NEW[i % 4], HOT[i % 4], eos=eos), whole[:cut]))
    return made


def alone(request):
    engine = Engine(tiny("llama"), policy="plain", max_batch_size=1, max_cached_tokens=256)
    engine.submit(request)
    return [row.completion.tokens for round_ in engine.run() for row in round_.rows if row.completion is not None]


def run(policy, asked, kernels=REFERENCE, audit=True, **options):
    """Decode requests by recorded rounds; every round and the target."""
    target = with_runner(Target(build("llama"), engine="views"), kernels=kernels, max_rows=32)
    options = {"max_batch_size": len(asked), "max_cached_tokens": 64 * len(asked), "page_size": 16, **options}
    engine = Engine(target, policy=policy, burst=60.0, prefill_chunk=4096, **options)
    for request, _ in asked:
        engine.submit(request)
    rounds = []
    while engine.has_work:
        rooms = {row.request_id: row.room for row in engine.rows}
        step = engine.step()
        for row in (row for round_ in step for row in round_.rows if row.request_id in rooms):
            assert not row.drafted or len(row.drafted) < rooms[row.request_id], "no room for the target's own token"
            rooms[row.request_id] -= len(row.tokens)
        audit_pages(engine)
        if audit:
            audit_cache(engine, target.model)
        rounds += step
    return rounds, target


def check(policy, asked, **options):
    """Tokens are those of plain decoding, and a row that has ended has no part in a later round."""
    rounds, target = run(policy, asked, **options)
    done = {row.completion.request_id: row.completion for one in rounds for row in one.rows if row.completion}
    assert [done[i].tokens for i in range(len(asked))] == [wanted for _, wanted in asked]
    check_rounds(rounds, done)
    for round_ in rounds:  # nothing is wasted but what an end cut off
        assert round_.num_wasted <= sum(len(row.drafted) + 1 - len(row.tokens) for row in round_.rows)
    return rounds, target


@pytest.mark.slow
def test_up_to_32_rows_are_one_recording():
    asked = requests(19, ends=False)
    rounds, target = check(Always(2, 2, num_rounds=99), asked, audit=False)
    assert len(rounds[0].rows) == 19
    large = [made for made in target.stack.runner.graphs.capture.made if "advance(i64[32," in made.kernels[-1]]
    assert len(large) == 1 and large[0].num_replays > 2


def test_rows_near_their_ends_take_no_recordings_of_their_own():
    asked = [(Request(make_prompts([9])[0], 23, eos=frozenset()), None)]
    _, target = run(Always(2, 4, num_rounds=99), asked)
    tape = target.stack.runner.graphs.capture
    assert sum(any("advance" in one for one in made.kernels) for made in tape.made) == 1


def test_a_program_ends_where_its_recording_has_no_room_for_longer_rows(monkeypatch):
    monkeypatch.setattr(shapes, "LEAST_HELD", 16)
    asked = [(Request(prompt, 60, eos=frozenset()), None) for prompt in make_prompts([9, 14])]
    asked = [(request, alone(request)[0]) for request, _ in asked]
    rounds, target = check(Always(2, 3, num_rounds=99), asked, max_cached_tokens=256)
    first = [round_.program_index for round_ in rounds].index(0, 1)
    assert 1 <= first < 10, "a program ends before any row does"
    assert len(target.stack.runner.graphs) >= 3


def test_a_row_that_ends_leaves_the_round_in_flight_to_the_others():
    asked = requests()
    rounds, _ = check(Always(2, 3, num_rounds=99), asked)
    ends = [at for at, one in enumerate(rounds) if any(row.completion for row in one.rows)]
    after = [rounds[at + 1] for at in ends[:-1] if rounds[at + 1].program_index]
    assert after and all(round_.rows and all(row.tokens for row in round_.rows) for round_ in after)
    assert rounds[-1].rows, "no round of rows that have all ended"


@pytest.mark.parametrize(("problem", "when"), [(KeyboardInterrupt, "launch"), slow(RuntimeError, "take")])
def test_what_is_in_flight_when_a_program_breaks_off_costs_no_token(monkeypatch, problem, when):
    honest, calls = getattr(RecordedRounds, when), []

    def interrupted(self):
        calls.append(self.num_in_flight)
        made = honest(self)
        if len(calls) == 3:
            raise problem("broken off")
        return made

    monkeypatch.setattr(RecordedRounds, when, interrupted)
    target = with_runner(Target(build("llama"), engine="views"))
    asked = requests()
    engine = Engine(target, policy=Always(2, 3, num_rounds=99), max_batch_size=3, max_cached_tokens=256, burst=60.0)
    for request, _ in asked:
        engine.submit(request)
    tokens, raised = [[] for _ in asked], []
    while engine.has_work:
        try:
            for row in (row for round_ in engine.step() for row in round_.rows):
                tokens[row.request_id] += row.tokens
        except problem as one:
            raised.append(one)
            engine.cancel(1)
        audit_pages(engine)
        audit_cache(engine, target.model)
    assert len(raised) == 1 and len(tokens[1]) < len(asked[1][1])
    wanted = [tokens for _, tokens in asked]
    assert [tokens[i] for i in (0, 2, 3)] == [wanted[i] for i in (0, 2, 3)]
    assert tokens[1] == wanted[1][: len(tokens[1])]


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
        check(Always(2, 3, num_rounds=99), requests(), kernels=REFERENCE._replace(advance=fault))
