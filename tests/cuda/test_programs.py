"""Plans of several rounds on a device, which advances the rows: a round begins before the last one is read."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from selfspec import SamplingParams
from selfspec.control.ledger import Ledger
from selfspec.control.plan import NUM_LOOKUP_BINS, NUM_MATCH_BINS, SOURCES, LookupTable, ShadowPlan, always
from selfspec.core import LOOKUP
from selfspec.executors.cuda import rounds as module
from selfspec.executors.cuda.rounds import RecordedRounds
from selfspec.executors.eager import EagerExecutor
from selfspec.kernels.suite import REFERENCE
from tests.cuda.host_time import ROUNDS, measured
from tests.cuda.standin import with_runner
from tests.helpers import Always, audit_cache, decode, make_prompts, request, run, tokens_of
from tests.models import build, some_heads, tiny
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
    large = [one for one in target.split.runner.graphs.capture.made if "accept(i64[32," in one.kernels[-1]]
    assert len(large) == 1 and large[0].num_replays > 2


def test_plain_rounds_of_more_rows_than_draft_are_recorded(monkeypatch):
    monkeypatch.setattr(EagerExecutor, "round", None)
    target = with_runner(Target(build("llama"), backend="views"), max_rows=2)
    asked = [request(prompt, SamplingParams(max_tokens=4)) for prompt in make_prompts([5] * 5)]
    made = run(target, asked, Always(2, 2, num_rounds=9), max_num_seqs=5, max_num_cached_tokens=80, page_size=16)
    assert tokens_of(made.outputs) == tokens_of(decode(tiny("llama"), asked))
    assert {len(round_.rows) for round_ in made.rounds} == {5} and all(r.exit_layer is None for r in made.rounds)
    assert target.split.runner.graphs.num_recorded == 1


def test_rows_near_their_ends_take_no_recordings_of_their_own():
    _, target = recorded(Always(2, 4, num_rounds=99), requests(1, ends=False))
    tape = target.split.runner.graphs.capture
    assert sum(any("accept" in one for one in made.kernels) for made in tape.made) == 1


def test_a_plan_goes_on_with_another_recording_where_one_has_no_capacity_for_longer_rows(monkeypatch):
    monkeypatch.setattr(module, "LEAST_HELD", 16)
    monkeypatch.setattr(module, "HELD_FACTOR", 2)
    made, target = recorded(Always(2, 3, num_rounds=99), requests(3, ends=False), max_num_cached_tokens=256)
    first = [round_.round_index for round_ in made.rounds].index(0, 1)
    assert any(row.finish_reason for round_ in made.rounds[:first] for row in round_.rows), "a plan ends with a row"
    assert len(target.split.runner.graphs) >= 3


# ------------------------------------------------------------------------------------------------ rounds launched ahead


@pytest.fixture
def launches(monkeypatch):
    """Rounds launched, and those of them that were launched while another one was under way."""
    counts, honest = Counter(), RecordedRounds.launch

    def launch(self, *kept):
        counts["all"] += 1
        counts["ahead"] += self.num_in_flight > 0
        return honest(self, *kept)

    monkeypatch.setattr(RecordedRounds, "launch", launch)
    return counts


@pytest.mark.parametrize("exit_layer", [None, 2])
def test_a_lookup_table_without_a_match_does_not_stop_the_run_ahead(launches, exit_layer):
    """The table asks for long matches, which random text does not have."""
    bins = [0] * NUM_MATCH_BINS
    bins[-1] = 4
    table = LookupTable((tuple(bins * len(SOURCES)),), ((1.0,) * NUM_LOOKUP_BINS,), (0.0,))
    made, _ = recorded(Always(exit_layer, 2, num_rounds=99, lookups=table), requests(1, ends=False))
    assert not any(row.match_length for round_ in made.rounds for row in round_.rows)
    assert launches["all"] == len(made.rounds) and launches["ahead"] == launches["all"] - 1


def test_all_but_the_first_round_of_a_plan_are_launched_ahead():
    """Of the seven plans of 64 rounds whose host time is measured."""
    _, _, recordings, ahead = measured(2, Always(1, 4, num_rounds=ROUNDS), {})
    assert (recordings, ahead) == (1, "441 of 448")


class Looking(Always):
    """Drafts after every match."""

    def plan(self, rows):
        return replace(super().plan(rows), lookups=always((4,) * len(rows)))


def test_a_match_waits_for_the_round_in_flight_and_drafts_then(launches):
    made, _ = recorded(Looking(2, 2, num_rounds=99), requests(2, ends=False))
    drafted = Counter(round_.exit_layer for round_ in made.rounds)
    assert drafted[LOOKUP] and drafted[2]
    assert 0 < launches["ahead"] < launches["all"] == len(made.rounds)


class Overdrawn(Always):
    """A ledger that covers two rounds by layers: the first one is charged with little more than its price."""

    def plan(self, rows):
        ledger = Ledger(1e-9, 1e-9, (0.0,), 1e-10)
        return replace(super().plan(rows), ledger=ledger)


def test_a_plan_ends_where_the_ledger_covers_no_more_rounds_by_layers(launches):
    made, _ = recorded(Overdrawn(2, 2, num_rounds=99), requests(1, ends=False))
    assert made.rounds[0].exit_layer == 2 and launches["ahead"] > 0
    assert max(round_.round_index for round_ in made.rounds) == 2, "the second overdraws, the third was in flight"


# ------------------------------------------------------------------------------------------------- rows of every kind


KINDS = (
    {}, {"temperature": 0.9}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 1.0, "top_k": 20, "min_p": 0.01},
    {"stop_token_ids": [3]}, {"stop_token_ids": [3, 4, 5, 6, 7]},
)  # fmt: skip


def test_six_kinds_of_request_through_one_shape_make_one_recording():
    target = with_runner(Target(build("llama"), backend="views"), max_rows=32)
    for i, kind in enumerate(KINDS):
        [prompt], params = make_prompts([5 + i]), SamplingParams(max_tokens=9, seed=i, **kind)
        [wanted] = tokens_of(decode(tiny("llama"), [request(prompt, params)]))
        sizes = {"max_num_cached_tokens": 64, "page_size": 16}
        made = run(target, [request(prompt, params)], Always(2, 2, num_rounds=99), **sizes)
        assert tokens_of(made.outputs) == [wanted]
        del made  # its pages are lent again
    drafting, *last = target.split.runner.graphs.capture.made  # no prompt, and a row's last token is drafted by nobody
    assert "i64[1,20]" in drafting.kernels[-1] and len(last) < 2
    assert all("i64[1,18]" in one.kernels[-1] for one in last)


def test_more_ends_than_the_device_knows_are_seen_by_the_host():
    [prompt] = make_prompts([5])
    [whole] = tokens_of(decode(tiny("llama"), [request(prompt, SamplingParams(max_tokens=30))]))
    ends = [token for token in range(96) if token not in whole][:9]
    params = SamplingParams(max_tokens=30, stop_token_ids=[*ends, whole[11]])
    [wanted] = tokens_of(decode(tiny("llama"), [request(prompt, params)]))
    recorded(Always(2, 2, num_rounds=99), [(request(prompt, params), wanted)])


def third_less(ids, scores):
    """A processor that depends on the row's length."""
    scores[:, ids.shape[1] % 3 :: 3] -= 2.0
    return scores


OTHERS = (
    {"repetition_penalty": 1.3}, {"logprobs": 2}, {"logit_bias": {5: 2.0}}, {"presence_penalty": 0.7, "logprobs": 0},
    {"logits_processors": (third_less,), "temperature": 0.8}, {"no_repeat_ngram_size": 2},
)  # fmt: skip


@pytest.mark.parametrize("exit_layer", [None, LOOKUP, 2])
def test_rows_whose_picks_the_host_makes_share_the_recording(launches, monkeypatch, exit_layer):
    asked, wanted = [], []
    for i, own in enumerate(({}, OTHERS[0], {"temperature": 0.9}, *OTHERS[1:])):
        params = SamplingParams(max_tokens=12 + i, seed=i, **own)
        [prompt] = make_prompts([5 + i], seed=i)
        [output] = decode(tiny("llama"), [request(prompt * 2, params)])
        asked.append((request(prompt * 2, params), output.token_ids))
        wanted.append(output)
    monkeypatch.setattr(EagerExecutor, "round", None)
    made, _ = recorded(Always(exit_layer, 2, num_rounds=6), asked)
    assert launches["all"] >= len(made.rounds)
    assert any(row.num_accepted for round_ in made.rounds for row in round_.rows) or exit_layer is None
    for output, plain in zip(made.outputs, wanted, strict=True):
        assert (output.logprobs is None) == (plain.logprobs is None)
        for mine, others in zip(output.logprobs or (), plain.logprobs or (), strict=True):
            values = [[one.logprob for one in each.values()] for each in (mine, others)]
            assert mine.keys() == others.keys() and values[0] == pytest.approx(values[1], abs=1e-4)


def test_a_row_that_ends_leaves_the_round_in_flight_to_the_others():
    made, _ = recorded(Always(2, 3, num_rounds=99), requests())
    rounds = made.rounds
    ends = [at for at, one in enumerate(rounds) if any(row.finish_reason for row in one.rows)]
    after = [rounds[at + 1] for at in ends[:-1] if rounds[at + 1].round_index]
    assert after and all(round_.rows and all(row.token_ids for row in round_.rows) for round_ in after)
    assert rounds[-1].rows, "no round of rows that have all ended"


# ------------------------------------------------------------------------------------- what the host reads of states


@pytest.mark.parametrize(
    ("policy", "own", "num_recordings"),
    [
        (Always(None, 0, shadow=ShadowPlan((1, 2, 3), (0,), 1)), {"repetition_penalty": 1.4, "temperature": 0.7}, 1),
        (Always(2, 3, shadow=ShadowPlan((1, 3), (0,), 4, exact=True)), {"temperature": 0.9, "top_k": 9}, 2),
        (Always(2, 3, keep_divergence=True), {"temperature": 0.9}, 2),
    ],
    ids=["plain", "drafted", "divergences"],
)
def test_probes_and_divergences_of_recorded_rounds_are_those_of_eager_ones(policy, own, num_recordings, monkeypatch):
    """A probe in plain rounds takes no recording of its own."""
    [prompt], target, seen = make_prompts([9]), with_runner(Target(build("llama"), backend="views")), []
    for one in (Target(build("llama"), backend="views"), target):
        if one is target:
            monkeypatch.setattr(EagerExecutor, "round", None)
        made = run(one, [request(prompt, SamplingParams(max_tokens=15, **own))], policy, page_size=16)
        seen.append([row for round_ in made.rounds for row in round_.rows])
    for mine, wanted in zip(*seen, strict=True):
        assert (mine.token_ids, mine.drafted) == (wanted.token_ids, wanted.drafted)
        assert mine.divergences == pytest.approx(wanted.divergences, abs=1e-4)
        if wanted.shadow is not None:
            assert mine.shadow.hits.tolist() == wanted.shadow.hits.tolist()
            assert mine.shadow.confidences == pytest.approx(wanted.shadow.confidences, abs=1e-4)
    assert any(row.shadow if policy.made.shadow else row.divergences for row in seen[1])
    assert target.split.runner.graphs.num_recorded <= num_recordings


@pytest.mark.parametrize("own", [{}, {"logprobs": 1}], ids=["device", "host"])
@pytest.mark.parametrize("plan", [Always(2, 3, num_rounds=5), Looking(2, 3)], ids=["exit", "lookup"])
def test_exit_heads_read_the_final_states_that_rounds_leave(plan, own):
    """The first token of a draft by the state of the round before, whichever round that was and whoever picked."""
    prompts, found, heads = make_prompts([9, 17]), [], some_heads((2,))
    for is_recorded in (False, True):
        target = Target(build("llama"), backend="views", exit_heads=heads)
        target = with_runner(target) if is_recorded else target
        asked = [request(one, SamplingParams(max_tokens=15, seed=i, **own)) for i, one in enumerate(prompts)]
        made = run(target, asked, plan, max_num_seqs=2, page_size=16, max_num_cached_tokens=128)
        rounds = [[(row.drafted, row.token_ids) for row in one.rows if row.token_ids] for one in made.rounds]
        found.append([one for one in rounds if one])
    assert found[0] == found[1]


# --------------------------------------------------------------------------------------------------------- mutations


def content_of_a_token_less(before, state, num_kept):
    state[:, 1] -= ((num_kept > 1) & (state[:, 1] > 0)).int()


def same_remaining(before, state, num_kept):
    state[:, 2] = before[:, 2]


def the_token_fed_before(before, state, num_kept):
    state[:, 0] = before[:, 0]


def ended_rows_go_on(before, state, num_kept):
    state[:, 1], state[:, 2] = before[:, 1] + num_kept, before[:, 2] - num_kept


def all_rows_end_with_one(before, state, num_kept):
    state[:, 1:3] *= ((state[:, 1] > 0) | (before[:, 1] == 0)).all()


@pytest.mark.parametrize(
    "fault",
    [content_of_a_token_less, same_remaining, the_token_fed_before, ended_rows_go_on, all_rows_end_with_one],
)
@pytest.mark.slow
def test_faults_of_advancing_are_noticed(fault):
    def accept(state, *given):
        before = state.clone()
        done = REFERENCE.accept(state, *given)
        fault(before, state, done.num_kept)
        return done

    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        recorded(Always(2, 3, num_rounds=99), requests(), kernels=REFERENCE._replace(accept=accept))
