"""Executors differ in speed, not in meaning: each decodes the same requests under random plans as plain decoding does.

This is the one place where tokens of plans are compared with plain decoding for every kind of draft and stop rule.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.control import ledger
from selfspec.control.adaptive import Adaptive
from selfspec.control.plan import CORPUS, NUM_LOOKUP_BINS, RESPONSES, SOURCES, LookupTable, Policy, always
from selfspec.core import LOOKUP, Plan, Request, RowRound
from selfspec.drafting.datastore import Datastore
from selfspec.drafting.responses import Responses
from selfspec.errors import UnsupportedModelError
from selfspec.executors.cpu.executor import CompiledRounds
from selfspec.executors.cuda.rounds import RecordedRounds
from selfspec.loading.target import Target
from selfspec.params import SamplingParams
from tests.executors.requests import (
    LENGTHS,
    NUM_REQUESTS,
    PENALTIES,
    RECORDED,
    assert_same,
    engine_of,
    every_executor,
    most_executors,
    new_target,
    only_eager,
    plain,
    programs,
    rounds_by_plan,
    some_responses,
    target,
)
from tests.executors.requests import corpus as corpus
from tests.helpers import Always, Run, Seen, audit_cache, make_prompts
from tests.models import build, rounded, some_heads
from tests.slow import FRESH, slow
from tests.where_drafts_pay import where_drafts_pay

IN_FLIGHT = dict.fromkeys(RECORDED, 1)  # rounds that have begun when a row ends, and in which it has no part
# Seeds of the suite; `make test-slow` adds up to twelve for each executor.
SEEDS = {"eager": (0, 1), "cpu": (0, 1, 2, 3), "cuda": (0,), "fused": ()}


class Checked(Run):
    """No row may draft more than it has capacity for beside the target's own token."""

    def step(self) -> list[Any]:
        capacities = {row.seq_id: row.num_remaining for row in self.engine.running}
        rounds = super().step()
        for row in (row for round_ in rounds for row in round_.rows if row.seq_id in capacities):
            assert not row.drafted or len(row.drafted) < capacities[row.seq_id]
            capacities[row.seq_id] -= len(row.token_ids)
        return rounds


def ends_by_token(row: RowRound) -> bool:
    sequence = row.sequence
    is_end = row.finish_reason == "stop" and sequence.token_ids[-1] in sequence.stopper.ends
    return is_end or row.finish_reason == "length"


def check(kind: str, seed: int, policy: Policy, made: Target | None = None, audit: bool = True, **texts: Any) -> Run:
    """Rows that come, go, and end in any way meanwhile have the tokens and log-probabilities of plain decoding."""
    dice = random.Random(seed)
    most, steps = dice.randint(1, 4), 0

    def audited(engine: Any) -> None:
        nonlocal steps
        steps += 1
        if audit and (seed == 0 or steps % 6 == 0):
            audit_cache(engine)

    run = Checked(engine_of(kind, policy, made, max_num_seqs=most, prefill_chunk=25, **texts), audited)
    several = range(NUM_REQUESTS if dice.random() < 0.6 else len(LENGTHS))
    waiting = dice.sample(several, 3 if kind in RECORDED else 5)  # each shape of a round is recorded
    asked: dict[str, int] = {}
    doomed: list[str] = []
    while waiting or run.engine.has_unfinished_requests():
        if waiting and (dice.random() < 0.7 or not run.engine.has_unfinished_requests()):
            at = waiting.pop()
            asked[run.add(plain(kind, at)[0])] = at
            if dice.random() < 0.2:
                doomed.append(run.add(make_prompts([5])[0], SamplingParams(max_tokens=40, temperature=1.0)))
        if doomed and dice.random() < 0.5:
            run.engine.abort(dice.choice(doomed))
        run.step()
    run.finish()
    assert run.sequences.keys() == {*asked, *doomed}
    for request_id, at in asked.items():
        assert_same(run.output(request_id), plain(kind, at)[1])
    for of_plan in rounds_by_plan(run.rounds):
        for round_ in of_plan[: -1 - IN_FLIGHT.get(kind, 0)]:  # what ends a row but its text ends the plan
            assert not any(ends_by_token(row) for row in round_.rows)
    return run


@pytest.mark.parametrize(
    ("kind", "seed"), [(k, s) if s in SEEDS[k] else slow(k, s) for k in SEEDS for s in range(12 if k != "fused" else 3)]
)
def test_any_plans_of_any_batch_give_the_output_of_plain_decoding(kind: str, seed: int, corpus: Datastore) -> None:
    """Every second seed drafts by lookup from a corpus and responses, too; every fourth one through exit heads."""
    texts = {"corpus": corpus, "responses": some_responses(kind)} if seed % 2 else {}
    made = new_target(kind, exit_heads=some_heads((1, 2, 3))) if seed % 4 == 2 else None
    check(kind, seed, programs(seed, kind), made, **texts)


@pytest.mark.parametrize("kind", ["eager", "cpu", slow("cuda")])
def test_adaptive_where_drafts_pay_gives_the_output_of_plain_decoding(
    kind: str, corpus: Datastore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "SECONDS", 1e6)  # drafts are affordable, however slow the machine is
    drafted = 0
    for seed in range(3):
        texts = {"corpus": corpus, "responses": some_responses(kind)} if seed else {}
        run = check(kind, seed, Adaptive(where_drafts_pay()), **texts)
        drafted += sum(output.stats.num_draft_tokens for output in run.outputs if output.stats is not None)
    assert drafted > 0


class Overdrawn(Always):
    """A ledger that covers two rounds by layers: the first one is charged with little more than its price."""

    def plan(self, rows: list[Any]) -> Plan:
        return replace(super().plan(rows), ledger=ledger.Ledger(1e-9, 1e-9, (0.0,), 1e-10))


@pytest.mark.parametrize("kind", ["eager", "cpu"])
def test_a_plan_ends_where_the_ledger_covers_no_more_rounds_by_layers(kind: str) -> None:
    run = check(kind, 0, Overdrawn(2, 2, num_rounds=99), audit=False)
    assert max(map(len, rounds_by_plan(run.rounds))) == 2


@pytest.mark.slow
@FRESH
@given(kind=st.sampled_from(["eager", "cpu"]), seed=st.integers(1, 1 << 40))
def test_plans_that_nobody_has_seen_give_the_output_of_plain_decoding(kind: str, seed: int) -> None:
    check(kind, seed, programs(seed))


@most_executors
def test_random_plans_draft_in_every_way_and_each_executor_runs_its_own(
    kind: str, corpus: Datastore, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {"cpu": 0, "cuda": 0}
    for name, owner, method in (("cpu", CompiledRounds, "run"), ("cuda", RecordedRounds, "take")):
        honest: Any = getattr(owner, method)

        def counted(*given: Any, name: str = name, honest: Any = honest, **named: Any) -> Any:
            calls[name] += 1
            return honest(*given, **named)

        monkeypatch.setattr(owner, method, counted)
    rows = []
    for seed in range(3 if kind in RECORDED else 5):
        policy = programs(seed, kind, eager=0.3)
        check(kind, seed, policy, audit=False, **({"corpus": corpus} if seed == 1 else {}))
        rows += policy.rows
    assert any(row.match_length and row.num_accepted for row in rows)
    assert any(row.confidences for row in rows) and any(row.shadow for row in rows)
    assert any(row.divergences for row in rows) and any(row.is_outside_vocab for row in rows)
    own = "cuda" if kind in RECORDED else kind
    assert {name: count > 3 for name, count in calls.items()} == {name: own == name for name in calls}


def check_policy(kind: str, policy: Policy, made: Target | None = None) -> None:
    """Rows that end in the midst of a block, and that come to their last tokens, have those of plain decoding."""
    run, asked = Checked(engine_of(kind, policy, made, max_num_seqs=2), audit_cache), (3, 0, 8, 7, 11, 4, 14, 10)
    for at in asked:
        run.add(plain(kind, at)[0])
    for at, output in zip(asked, run.finish().outputs, strict=True):
        assert_same(output, plain(kind, at)[1])


# --------------------------------------------------------------------------------------------------- drafts by lookup


@most_executors
def test_a_corpus_is_drafted_from_where_a_row_has_nothing_of_its_own(kind: str, corpus: Datastore) -> None:
    policy, (request, wanted) = Always(LOOKUP, 4, num_rounds=9), plain(kind, 7)
    run = Run(engine_of(kind, policy, corpus=corpus))
    run.add(request)
    assert_same(run.finish().outputs[0], wanted)
    assert sum(row.num_accepted for row in policy.rows if row.source == CORPUS) > 3


@most_executors
def test_the_same_request_again_takes_few_rounds_and_one_call(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled plans draft from finished responses without coming back to Python."""
    calls, honest = [], CompiledRounds.run
    monkeypatch.setattr(CompiledRounds, "run", lambda *given, **named: calls.append(1) or honest(*given, **named))
    responses, (request, wanted), num_rounds = Responses(), plain(kind, 7), []
    for _ in range(2):
        policy = Always(LOOKUP, 8, num_rounds=90)
        run = Run(engine_of(kind, policy, responses=responses))
        run.add(request)
        calls.clear()
        assert_same(run.finish().outputs[0], wanted)
        num_rounds.append(len(policy.rows))
    assert num_rounds[1] == -(-len(wanted.token_ids) // 9) < num_rounds[0] / 2
    assert {row.source for row in policy.rows if row.num_drafted} == {RESPONSES}
    assert len(calls) == (kind == "cpu")


def test_compiled_plans_choose_among_all_texts_as_python_does(corpus: Datastore) -> None:
    outcomes = {}
    for is_eager in (True, False):
        responses, policy = some_responses("cpu"), Always(LOOKUP, 4, num_rounds=50)
        for at in (2, 3, 5, 6, 7, 0):
            engine = same_layers(is_eager, policy, target("cpu"), responses=responses, corpus=corpus)
            run = Run(engine)
            run.add(plain("cpu", at)[0])
            run.finish()
        outcomes[is_eager] = [(one.source, one.match_length, one.num_drafted, one.num_accepted) for one in policy.rows]
    assert outcomes[True] == outcomes[False]
    assert {source for source, match, *_ in outcomes[True] if match} == set(SOURCES)


@most_executors
def test_only_finished_responses_are_kept(kind: str) -> None:
    responses, (request, wanted) = Responses(), plain(kind, 7)
    run = Run(engine_of(kind, Always(LOOKUP, 4), responses=responses))
    name = run.add(request)
    run.step()
    run.engine.abort(name)
    run.finish()
    assert len(responses) == 0
    run.add(request)
    run.finish()
    assert responses.continuation(responses.find(request.prompt_token_ids), 999) == wanted.token_ids


# ---------------------------------------------------------------------------------------------------- the same rounds


def same_layers(is_eager: bool, policy: Policy, made: Target, **options: Any) -> Any:
    """An engine of compiled layers, whose rounds the eager executor runs, or the compiled one."""
    if not is_eager:
        return engine_of("cpu", policy, made, **options)
    with only_eager():
        return engine_of("cpu", policy, made, **options)


def seen_of(row: Any) -> tuple[Any, ...]:
    shadow = row.shadow
    probe = None if shadow is None else (shadow.layers, shadow.hits.tolist(), shadow.confidences.tolist())
    kept = row.seq_id, row.num_drafted, row.num_accepted, row.token_ids, row.drafted, row.confidences, row.match_length
    return *kept, row.source, row.is_outside_vocab, row.finish_reason, probe


def rounds_of(is_eager: bool, model: Any, policy: Seen, params: list[SamplingParams], heads: Any) -> tuple[Any, ...]:
    """What every row got round by round, what the policy saw, and the keys and values that rows wrote."""
    made = Target(model, backend="compiled", exit_heads=heads)  # which has not seen yet which tokens are frequent
    run = Run(same_layers(is_eager, policy, made, max_num_seqs=len(params), max_num_cached_tokens=1024))
    for i, prompt in enumerate(make_prompts(LENGTHS[: len(params)], seed=len(params))):
        run.add(Request(prompt * (1 + i % 2), params[i]))
    written = []
    while run.engine.has_unfinished_requests():
        run.step()
        for row in run.engine.running:
            pairs = [run.engine.cache.read(layer, row.pages, row.num_cached) for layer in range(4)]
            written.append([float(one.double().sum()) for pair in pairs for one in pair])
    seen = [(plan, one.exit_layer, [*map(seen_of, one.rows)]) for plan, of_plan in policy.seen for one in of_plan]
    got = [(one.plan, one.exit_layer, one.round_index, [*map(seen_of, one.rows)]) for one in run.rounds]
    return [output.stats for output in run.outputs], got, seen, written


def some_params(num_rows: int, new: int, sampled: list[bool], penalties: Any = ()) -> list[SamplingParams]:
    ways: Any = ({}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 1.1})
    own = [ways[sampled[i] * (1 + i % 2)] | (penalties[i] if penalties else {}) for i in range(num_rows)]
    return [SamplingParams(max_tokens=new + i, seed=i, **one) for i, one in enumerate(own)]


def check_same_rounds(make: Any, params: list[SamplingParams], family: str = "llama", heads: Any = None, **shape: Any):
    """The eager and the compiled executor on the same compiled layers; what the latter did."""
    found = []
    for is_eager in (False, True):
        model = build("llama", **shape).bfloat16() if family == "bfloat16" else build(family, **shape)
        found.append(rounds_of(is_eager, model, make(), params, heads))
    for compiled, eager in zip(*found, strict=True):
        assert compiled == eager
    return found[0]


@pytest.fixture
def threads() -> Any:
    """Sets torch's threads for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@given(
    seed=st.integers(0, 1 << 16),
    num_rows=st.integers(1, 6),
    family=st.sampled_from(["llama", "qwen3", "mistral", "gemma3_text", "bfloat16"]),
    num_threads=st.integers(1, 3),
    sampled=st.lists(st.booleans(), min_size=6, max_size=6),
    penalties=st.lists(st.sampled_from([{}, {}, *PENALTIES]), min_size=6, max_size=6),
)
def test_the_compiled_executor_runs_the_rounds_of_the_eager_one(
    seed: int, num_rows: int, family: str, num_threads: int, sampled: list[bool], penalties: Any
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        params = some_params(num_rows, 24, sampled, penalties)
        check_same_rounds(lambda: programs(seed, copies=False, eager=0.0), params, family)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("family", "num_threads"), [("llama", 2), ("bfloat16", 1)])
def test_the_compiled_executor_drafts_through_exit_heads_as_the_eager_one(
    family: str, num_threads: int, threads: Any
) -> None:
    threads(num_threads)
    params, heads = some_params(3, 60, [True, False, True]), some_heads((1, 2))
    short = {"most_rounds": 2, "copies": False, "eager": 0.0}  # many plans, however fast the machine is
    found = [check_same_rounds(lambda: programs(8, **short), params, family, own) for own in (heads, None)]
    plans = [plan for plan, *_ in found[0][2] if plan.exit_layer in (1, 2)]
    assert len(plans) > 4 and any(plan.shadow for plan in plans)
    assert found[0][2] != found[1][2], "the heads change what is drafted"


class Together(Seen):
    """Drafts by lookup where two rows have a match, else by half of the layers."""

    def plan(self, rows: list[Any]) -> Plan:
        bins, lengths = NUM_LOOKUP_BINS, (3,) * len(rows)
        table = LookupTable(((4,) * bins,) * len(rows), ((1.0,) * bins,) * len(rows), (1.5,))
        return Plan(2, lengths, lookups=table, num_rounds=20)


class Both(Seen):
    """Half of the layers draft where lookup finds nothing, in plans of so many rounds."""

    def __init__(self, num_rounds: int) -> None:
        super().__init__()
        self.num_rounds = num_rounds

    def plan(self, rows: list[Any]) -> Plan:
        lengths = (3,) * len(rows)
        return Plan(2, lengths, keep_confidence=True, lookups=always(lengths), num_rounds=self.num_rounds)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_both_weigh_what_a_batch_would_draft_by_lookup(num_rows: int) -> None:
    _, _, seen, _ = check_same_rounds(Together, some_params(num_rows, 60, [False] * 6))
    by_lookup = [[row[1] > 0 for row in rows] for _, exit_layer, rows in seen if exit_layer == LOOKUP]
    assert bool(by_lookup) == (num_rows > 1) and all(sum(rows) > 1 for rows in by_lookup)
    accepted = [row[2] for _, exit_layer, rows in seen if exit_layer == LOOKUP for row in rows]
    assert num_rows == 1 or sum(accepted) > 0


@pytest.mark.parametrize(("vocab", "num_threads"), [(9000, 2), (40_000, 1)])
def test_large_vocabularies_are_picked_from_by_all_threads_and_keep_noise_of_some_tokens(
    vocab: int, num_threads: int, threads: Any
) -> None:
    threads(num_threads)
    params = some_params(3, 14, [True, True, False])
    _, rounds, *_ = check_same_rounds(lambda: Always(2, 9, num_rounds=9), params, vocab_size=vocab)
    assert sum(row[1] for *_, rows in rounds for row in rows) > 30


def test_exact_mode_gives_the_bits_of_plain_decoding() -> None:
    """Compiled layers compute a token's logits by the same operations in every batch."""
    made = Target(rounded(build("llama")).bfloat16(), backend="compiled")
    assert made.refresh(exact=True) is made.split
    params = [SamplingParams(max_tokens=14, seed=i, logprobs=2, **own) for i, own in enumerate(({}, *PENALTIES[:3]))]
    params += [SamplingParams(max_tokens=14, seed=7, temperature=0.9, top_k=40, top_p=0.9)]
    asked = [Request(p, own, keep_logits=True) for p, own in zip(make_prompts([9, 40, 17, 1, 33]), params, strict=True)]
    wanted = []
    for request in asked:
        run = Run(engine_of("cpu", "plain", made, max_num_seqs=1))
        run.add(request)
        wanted.append(run.finish().sequences["0"])
    for seed in range(3):
        run = Run(
            engine_of("cpu", programs(seed, copies=False, eager=0.0), made, max_num_seqs=1 + 2 * seed, prefill_chunk=16)
        )
        for request in asked:
            run.add(request)
        for at, other in enumerate(wanted):
            one = run.finish().sequences[str(at)]
            assert one.completion_token_ids == other.completion_token_ids and one.logprobs == other.logprobs
            assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))
            assert torch.equal(torch.stack(one.scores), torch.stack(other.scores))


def test_a_model_without_compiled_or_fused_layers_has_no_exact_mode():
    for family, reason in (("gpt2", "its layers are of another kind"), ("llama", "here its own modules run")):
        sentence = f"{family}: exact mode needs .*, and {reason}; decode without"
        with pytest.raises(UnsupportedModelError, match=sentence):
            Target(build(family), backend="views").refresh(exact=True)


# ------------------------------------------------------------------------------------------------------ when plans end


@most_executors
@pytest.mark.parametrize("exit_layer", [None, LOOKUP, 2])
def test_a_plan_runs_at_least_one_round_and_none_after_its_deadline(kind: str, exit_layer: int | None) -> None:
    run = Run(engine_of(kind, Always(exit_layer, 3, num_rounds=40), max_step_seconds=0.0))
    request, wanted = plain(kind, 3)
    run.add(request)
    while run.engine.has_unfinished_requests():
        [round_] = run.step()
        assert round_.rows[0].token_ids
    assert_same(run.finish().outputs[0], wanted)


@most_executors
def test_a_layer_that_was_to_draft_nothing_is_not_what_drafted(kind: str) -> None:
    policy, (request, wanted) = Always(2, 0, num_rounds=9), plain(kind, 3)
    run = Run(engine_of(kind, policy))
    run.add(request)
    assert_same(run.finish().outputs[0], wanted)
    assert {round_.exit_layer for _, rounds in policy.seen for round_ in rounds} == {None}


@every_executor
@pytest.mark.parametrize("num_rounds", [3, 1000])
def test_a_plan_ends_with_its_last_round_or_with_that_of_a_row(kind: str, num_rounds: int) -> None:
    run = Run(engine_of(kind, Always(3, 2, num_rounds=num_rounds)))
    for at in (0, 3, 7):
        run.add(plain(kind, at)[0])
    for of_plan in rounds_by_plan(run.finish().rounds):
        ends = [any(row.finish_reason is not None for row in round_.rows) for round_ in of_plan]
        last = 1 + IN_FLIGHT.get(kind, 0)
        assert not any(ends[:-last]) and (len(of_plan) == num_rounds or any(ends[-last:]))


@most_executors
def test_nothing_of_a_row_is_handed_out_after_the_text_that_ended_it(kind: str) -> None:
    (request, wanted), (other, others) = plain(kind, 5), plain(kind, 7)
    assert wanted.stop_reason is not None and len(wanted.token_ids) < request.max_tokens - 3
    for exit_layer in (LOOKUP, 2):
        run = Run(engine_of(kind, Always(exit_layer, 4, num_rounds=1000)))
        run.add(request)
        run.add(other)
        one, two = run.finish().outputs  # `finish` checks that a row's last round is the one with its end
        assert_same(one, wanted)
        assert_same(two, others)


@most_executors
def test_there_are_no_rounds_after_the_text_that_ended_the_last_row(kind: str) -> None:
    request, wanted = plain(kind, 5)
    policy = Always(2, 2, num_rounds=1000)
    run = Run(engine_of(kind, policy))
    run.add(request)
    assert_same(run.finish().outputs[0], wanted)
    assert all(round_.rows for round_ in run.rounds if round_.plan is not None)
    assert len(policy.rows) == len(run.rounds)
    assert run.rounds[-1].num_wasted > 0 or kind != "cpu"
