"""Executors differ in speed, not in meaning: the same properties for each of them, and the same rounds of two."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.control.plan import CORPUS, LOOKUP, RESPONSES, SOURCES
from selfspec.decoding.row import Row
from selfspec.drafting.responses import Responses
from selfspec.executors.cpu.rounds import CompiledRounds
from selfspec.executors.cuda.rounds import RecordedRounds
from selfspec.executors.eager import EagerExecutor
from selfspec.model.draft_vocabulary import Frequencies
from tests.executors.engines import (
    EXECUTORS,
    LENGTHS,
    NUM_REQUESTS,
    PENALTIES,
    RECORDED,
    Both,
    Noted,
    Programs,
    Together,
    engine_of,
    only_eager,
    plain,
    programs,
    recorded,
    target,
)
from tests.executors.engines import corpus as corpus
from tests.helpers import Always, audit_cache, audit_pages, check_rounds, drain, make_prompts
from tests.models import build, some_heads
from tests.slow import slow
from tests.target import Target

# After what an executor's fast path has done.
LATE = {"cpu": (CompiledRounds, "run"), **dict.fromkeys(RECORDED, (RecordedRounds, "take"))}
IN_FLIGHT = dict.fromkeys(RECORDED, 1)  # rounds that have begun when a row ends, and in which it has no part
# What recordings run does not matter to an engine.
every_executor = pytest.mark.parametrize("kind", [slow(kind) if kind == "fused" else kind for kind in EXECUTORS])
# The stand-in for a device takes ten times as long, and what the engine does with rounds is the same.
most_executors = pytest.mark.parametrize("kind", [slow(kind) if kind in RECORDED else kind for kind in EXECUTORS])


def finished(rounds):
    done = [row.completion for round_ in rounds for row in round_.rows if row.completion is not None]
    return {completion.request_id: completion for completion in done}


def checked_step(engine):
    """The rounds of a step, in which no row may draft more than it has room for beside the target's own token."""
    rooms = {row.request_id: row.room for row in engine.rows}
    rounds = engine.step()
    for row in (row for round_ in rounds for row in round_.rows if row.request_id in rooms):
        assert not row.drafted or len(row.drafted) + row.num_beside < rooms[row.request_id]
        rooms[row.request_id] -= len(row.tokens)
    audit_pages(engine)
    return rounds


def check_programs(kind, dice_seed, store=None, audit=True, made=None, responses=None):
    """Rows that come, go, and end in any way meanwhile keep the tokens of plain decoding."""
    dice, policy = random.Random(dice_seed), Programs(dice_seed)
    most = dice.randint(1, 4)
    texts = {"datastore": store, "responses": responses}
    engine = engine_of(kind, made, policy=policy, max_batch_size=most, prefill_chunk=25, **texts)
    waiting, names, doomed, rounds = dice.sample(range(NUM_REQUESTS), 5), {}, set(), []
    while waiting or engine.has_work:
        if waiting and (dice.random() < 0.7 or not engine.has_work):
            at = waiting.pop()
            names[engine.submit(plain(kind, at)[0])] = at
            if dice.random() < 0.2:
                doomed.add(engine.submit(make_prompts([5])[0], max_new_tokens=40, temperature=1.0))
        if doomed and dice.random() < 0.5:
            engine.cancel(dice.choice(sorted(doomed)))
        rounds += checked_step(engine)
        if audit:
            audit_cache(engine, engine.target.model)
    done = finished(rounds)
    assert set(done) == {*names, *doomed}
    for request_id, at in names.items():
        wanted = plain(kind, at)[1]
        assert (done[request_id].tokens, done[request_id].text) == (wanted.tokens, wanted.text)
        assert done[request_id].finish_reason == wanted.finish_reason
    check_rounds(rounds, done)
    for program in programs(rounds):
        for round_ in program[: -1 - IN_FLIGHT.get(kind, 0)]:  # what ends a row but its text ends the program
            reasons = {row.completion.finish_reason for row in round_.rows if row.completion is not None}
            assert reasons <= {"stop", "cancelled"}
    return policy


def check_policy(kind, policy, made=None, asked=(3, 0, 8, 7, 11, 4, 14, 10)):
    """Rows that end in the midst of a block, and that come to their last tokens, keep those of plain decoding."""
    engine, rounds = engine_of(kind, made, policy=policy, max_batch_size=2), []
    for at in asked:
        engine.submit(plain(kind, at)[0])
    while engine.has_work:
        rounds += checked_step(engine)
        audit_cache(engine, engine.target.model)
    done = finished(rounds)
    check_rounds(rounds, done)
    assert [done[i].tokens for i in range(len(asked))] == [plain(kind, at)[1].tokens for at in asked]
    assert engine.cache.num_free_pages == engine.cache.num_pages


@pytest.mark.parametrize("has_others", [False, True], ids=["own text", "corpus and responses"])
@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        (kind, seed) if seed < {"cuda": 1, "fused": 0}.get(kind, 2) else slow(kind, seed)
        for kind in EXECUTORS
        for seed in range(4)
    ],
)
def test_any_programs_of_any_batch_give_the_tokens_of_plain_decoding(kind, has_others, corpus, seed):
    others = {"store": corpus, "responses": some_responses(kind)} if has_others else {}
    check_programs(kind, seed, **others)


def some_responses(kind):
    """Responses to some of the requests, one of them with wrong tokens."""
    responses = Responses(2000)
    for at in (3, 7, 11):
        request, done = plain(kind, at)
        responses.add(request.prompt, done.tokens)
    request, done = plain(kind, 5)
    responses.add(request.prompt, [*done.tokens[:5], 1, 2, *done.tokens[7:]])
    return responses


@most_executors
def test_programs_draft_in_every_way_and_each_executor_runs_its_own(kind, corpus, monkeypatch):
    calls = {"cpu": 0, "cuda": 0}
    for name in calls:
        owner, method = LATE[name]
        honest = getattr(owner, method)

        def counted(*given, name=name, honest=honest, **named):
            calls[name] += 1
            return honest(*given, **named)

        monkeypatch.setattr(owner, method, counted)
    seeds = range(2 if kind in RECORDED else 5)
    outcomes = [outcome for seed in seeds for outcome in check_programs(kind, seed, audit=False).outcomes]
    outcomes += check_programs(kind, 1, corpus, audit=False).outcomes
    assert any(one.match and one.num_accepted for one in outcomes)
    assert any(one.confidences for one in outcomes) and any(one.shadow for one in outcomes)
    assert any(one.num_beside for one in outcomes)
    own = "cuda" if kind in RECORDED else kind
    assert {name: count > 9 for name, count in calls.items()} == {name: own == name for name in calls}


@most_executors
def test_exit_heads_change_no_token(kind):
    engine = "views" if kind in ("views", *RECORDED) else "compiled"
    made = Target(target(kind).model, target(kind).tokenizer, engine=engine, exit_heads=some_heads((1, 2, 3)))
    check_policy(kind, Programs(3), recorded(kind, made) if kind in RECORDED else made)


@most_executors
def test_a_corpus_is_drafted_from_where_a_row_has_nothing_of_its_own(kind, corpus):
    policy, (request, wanted) = Noted(LOOKUP, 4, num_rounds=9), plain(kind, 7)
    engine = engine_of(kind, policy=policy, datastore=corpus)
    engine.submit(request)
    assert drain(engine).completions[0].tokens == wanted.tokens
    stored = [one for _, rounds in policy.seen for round_ in rounds for one in round_.rows if one.source == CORPUS]
    assert sum(one.num_accepted for one in stored) > 3


@most_executors
def test_the_same_request_again_takes_few_rounds_and_one_program(kind, monkeypatch):
    """Compiled programs draft from finished responses without coming back to Python."""
    calls, run = [], CompiledRounds.run
    monkeypatch.setattr(CompiledRounds, "run", lambda *given, **named: calls.append(1) or run(*given, **named))
    responses, (request, wanted), num_rounds = Responses(), plain(kind, 7), []
    for _ in range(2):
        policy = Noted(LOOKUP, 8, num_rounds=90)
        engine = engine_of(kind, policy=policy, responses=responses)
        engine.submit(request)
        calls.clear()
        assert drain(engine).completions[0].tokens == wanted.tokens
        num_rounds.append(sum(len(rounds) for _, rounds in policy.seen))
    drafted = [one for _, rounds in policy.seen for round_ in rounds for one in round_.rows]
    assert num_rounds[1] == -(-len(wanted.tokens) // 9) < num_rounds[0] / 2
    assert {one.source for one in drafted if one.num_drafted} == {RESPONSES}
    assert len(calls) == (kind == "cpu")


def test_compiled_programs_choose_among_all_texts_as_python_does(corpus):
    outcomes = {}
    for kind in ("eager", "cpu"):
        responses, policy = some_responses(kind), Noted(LOOKUP, 4, num_rounds=50)
        for at in (2, 3, 5, 6, 7, 0):
            engine = engine_of(kind, policy=policy, responses=responses, datastore=corpus)
            engine.submit(plain(kind, at)[0])
            drain(engine)
        rows = [one for _, rounds in policy.seen for round_ in rounds for one in round_.rows]
        outcomes[kind] = [(one.source, one.match, one.num_drafted, one.num_accepted) for one in rows]
    assert outcomes["eager"] == outcomes["cpu"]
    assert {source for source, match, *_ in outcomes["cpu"] if match} == set(SOURCES)


@every_executor
def test_only_finished_responses_are_kept(kind):
    responses, (request, wanted) = Responses(), plain(kind, 7)
    engine = engine_of(kind, policy=Noted(LOOKUP, 4), responses=responses)
    request_id = engine.submit(request)
    engine.step()
    engine.cancel(request_id)
    while engine.has_work:
        engine.step()
    assert len(responses) == 0
    engine.submit(request)
    drain(engine)
    found = responses.find(request.prompt)
    assert responses.continuation(found, 999) == wanted.tokens


# ---------------------------------------------------------------------------------------------------- the same rounds


def seen_in(outcome):
    shadow = outcome.shadow
    looks = None if shadow is None else (shadow.layers, shadow.hits.tolist(), shadow.confidences.tolist())
    return outcome._replace(shadow=looks)


def decoded(family, num_rows, policy, new, sampled, penalties=(), heads=None, **shape):
    """What every row came to, round by round, and the keys and values that its rows wrote."""
    model = build("llama", **shape).bfloat16() if family == "bfloat16" else build(family, **shape)
    made = Target(model, engine="compiled", exit_heads=heads)  # which has not seen yet which tokens are frequent
    engine = engine_of("cpu", made, policy=policy, max_batch_size=num_rows, max_cached_tokens=1024)
    ways = ({"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 1.1})
    for i, prompt in enumerate(make_prompts(LENGTHS[:num_rows], seed=num_rows)):
        own = penalties[i] if penalties else {}
        engine.submit(prompt * (1 + i % 2), max_new_tokens=new + i, seed=i, **ways[sampled[i] * (1 + i % 2)], **own)
    rounds, written = [], []
    while engine.has_work:
        rounds += engine.step()
        for row in engine.rows:
            pairs = [engine.cache.read(layer, row.pages, row.num_cached) for layer in range(engine.stack.num_layers)]
            written.append([float(one.double().sum()) for pair in pairs for one in pair])
    told = [(r.plan, r.exit_layer, r.program_index, [row._replace(told="") for row in r.rows]) for r in rounds]
    told = [(*parts, [row._replace(completion=None) for row in rows]) for *parts, rows in told]
    heard = [(plan, one.exit_layer, [*map(seen_in, one.rows)]) for plan, of_plan in policy.seen for one in of_plan]
    return {i: one.stats for i, one in finished(rounds).items()}, told, heard, written


def check_same_rounds(*given, make, **shape):
    found = [decoded(given[0], given[1], make(), *given[2:], **shape)]
    with only_eager():
        found.append(decoded(given[0], given[1], make(), *given[2:], **shape))
    for whole, eager in zip(*found, strict=True):
        assert whole == eager
    return found[0]


@settings(max_examples=20)
@given(
    seed=st.integers(0, 1 << 16),
    num_rows=st.integers(1, 6),
    family=st.sampled_from(["llama", "qwen3", "mistral", "gemma3_text", "bfloat16"]),
    threads=st.integers(1, 3),
    sampled=st.lists(st.booleans(), min_size=6, max_size=6),
    penalties=st.lists(st.sampled_from([{}, {}, *PENALTIES]), min_size=6, max_size=6),
)
def test_the_compiled_executor_runs_the_rounds_of_the_eager_one(seed, num_rows, family, threads, sampled, penalties):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_same_rounds(family, num_rows, 24, sampled, penalties, make=lambda: Programs(seed, bits=(None,)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("family", ["llama", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_compiled_executor_drafts_through_exit_heads_as_the_eager_one(family, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = check_same_rounds(
            family, 3, 24, [True, False, True], make=lambda: Programs(8, bits=(None,)), heads=some_heads((1, 2))
        )
    finally:
        torch.set_num_threads(before)
    plans = [plan for plan, *_ in found[2] if plan.exit_layer in (1, 2)]
    assert len(plans) > 4 and any(plan.shadow for plan in plans)
    _, _, without, _ = decoded(family, 3, Programs(8, bits=(None,)), 24, [True, False, True])
    assert without != found[2], "the heads change what is drafted"


@pytest.mark.parametrize("num_rows", [1, 3])
def test_both_weigh_what_a_batch_would_draft_by_lookup(num_rows):
    _, _, heard, _ = check_same_rounds("llama", num_rows, 60, [False] * 6, make=Together)
    drafting = [[row.num_drafted > 0 for row in rows] for _, exit_layer, rows in heard if exit_layer == LOOKUP]
    assert bool(drafting) == (num_rows > 1) and all(sum(rows) > 1 for rows in drafting)
    accepted = [row.num_accepted for _, exit_layer, rows in heard if exit_layer == LOOKUP for row in rows]
    assert num_rows == 1 or sum(accepted) > 0


@pytest.mark.parametrize(("vocab", "threads"), [(9000, 2), (40_000, 1)])
def test_large_vocabularies_are_picked_from_by_all_threads_and_keep_noise_of_some_tokens(vocab, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        _, rounds, *_ = check_same_rounds(
            "llama", 3, 14, [True, True, False], make=lambda: Noted(2, 9, num_rounds=9), vocab_size=vocab
        )
        assert sum(len(row.drafted) for *_, rows in rounds for row in rows) > 30
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------------------------------------------------- programs


@every_executor
@pytest.mark.parametrize("exit_layer", [None, LOOKUP, 2])
def test_a_program_runs_at_least_one_round_and_none_after_its_deadline(kind, exit_layer):
    engine = engine_of(kind, policy=Always(exit_layer, 3, num_rounds=40), burst=0.0)
    request, wanted = plain(kind, 3)
    engine.submit(request)
    rounds = []
    while engine.has_work:
        step = engine.step()
        assert len(step) == 1 and step[0].rows[0].tokens
        rounds += step
    assert finished(rounds)[0].tokens == wanted.tokens


@every_executor
def test_a_layer_that_was_to_draft_nothing_is_not_what_drafted(kind):
    policy, (request, wanted) = Noted(2, 0, num_rounds=9), plain(kind, 3)
    engine = engine_of(kind, policy=policy)
    engine.submit(request)
    rounds = drain(engine).rounds
    assert finished(rounds)[0].tokens == wanted.tokens
    assert {round_.exit_layer for _, of_program in policy.seen for round_ in of_program} == {None}


@every_executor
@pytest.mark.parametrize("num_rounds", [1, 3, 1000])
def test_a_program_ends_with_its_last_round_or_with_that_of_a_row(kind, num_rounds):
    engine = engine_of(kind, policy=Always(3, 2, num_rounds=num_rounds))
    for at in (0, 3, 7):
        engine.submit(plain(kind, at)[0])
    rounds = drain(engine).rounds
    for program in programs(rounds):
        ends = [any(row.completion is not None for row in round_.rows) for round_ in program]
        last = 1 + IN_FLIGHT.get(kind, 0)
        assert not any(ends[:-last]) and (len(program) == num_rounds or any(ends[-last:]))


@most_executors
def test_nothing_of_a_row_is_handed_out_after_the_text_that_ended_it(kind):
    (request, wanted), (other, others) = plain(kind, 5), plain(kind, 7)
    assert wanted.finish_reason == "stop" and len(wanted.tokens) < request.max_new_tokens - 3
    for exit_layer in (LOOKUP, 2):
        engine = engine_of(kind, policy=Always(exit_layer, 4, num_rounds=1000))
        engine.submit(request)
        engine.submit(other)
        rounds = drain(engine).rounds  # which checks that a row's last round is the one with its completion
        done = finished(rounds)
        assert (done[0].tokens, done[0].text) == (wanted.tokens, wanted.text) and done[1].tokens == others.tokens


@every_executor
@pytest.mark.parametrize("name", ["noted", "adaptive"])
def test_there_are_no_rounds_after_the_text_that_ended_the_last_row(kind, name):
    request, wanted = plain(kind, 5)
    policy = Noted(2, 2, num_rounds=1000) if name == "noted" else name
    engine = engine_of(kind, policy=policy)
    engine.submit(request)
    rounds = drain(engine).rounds
    assert finished(rounds)[0].text == wanted.text
    assert all(round_.rows for round_ in rounds if round_.plan is not None)
    if name == "noted":
        outcomes = [outcome for _, of_program in policy.seen for outcome in of_program]
        assert len(outcomes) == len(rounds) and all(outcome.rows for outcome in outcomes)


class Fails:
    """A processor or criterion that raises once a row holds so many tokens."""

    def __init__(self, at, problem):
        self.at, self.problem = at, problem

    def __call__(self, ids, scores):
        if ids.shape[1] >= self.at:
            raise self.problem
        return False if scores is None else scores


@every_executor
@pytest.mark.parametrize("option", ["logits_processor", "stopping_criteria"])
@pytest.mark.parametrize("problem", [RuntimeError, KeyboardInterrupt])
def test_what_a_callers_code_raises_in_a_later_round_costs_no_other_row_a_token(kind, option, problem):
    (request, wanted), (other, others) = plain(kind, 0), plain(kind, 7)
    policy = Noted(2, 2, num_rounds=1000)
    engine = engine_of(kind, policy=policy)
    at = len(request.prompt) + 5  # within the first program
    first = engine.submit(other)
    bad = engine.submit(replace(request, **{option: (Fails(at, problem("no")),)}))
    before = []
    with pytest.raises(problem, match="no"):
        while engine.has_work:
            before += engine.step()
    assert option != "logits_processor" or not before, "it was the first program"
    audit_pages(engine)
    rounds = drain(engine, before=before).rounds
    assert len(rounds[0].rows) == 2 and len(rounds) > len(before), "what was decoded before is reported"
    told = [one.seconds for _, of_program in policy.seen for one in of_program]
    assert [*map(id, told)] == [id(one.seconds) for one in rounds if one.plan is not None], "every round, once"
    done = finished(rounds)
    assert done[first].tokens == others.tokens
    assert done[bad].finish_reason == "cancelled"
    assert len(done[bad].tokens) > 0 and done[bad].tokens == wanted.tokens[: len(done[bad].tokens)]


@most_executors
@pytest.mark.parametrize(("problem", "at"), [(KeyboardInterrupt, 1), (KeyboardInterrupt, 2), (MemoryError, 4)])
def test_an_interrupt_after_a_call_that_nobody_heard_of_costs_no_token(kind, problem, at, monkeypatch):
    owner, name = LATE.get(kind, (EagerExecutor, "_accept"))
    honest, calls = getattr(owner, name), []
    asked = [plain(kind, one) for one in (0, 3, 6, 7)]

    def interrupted(*given, **named):
        made = honest(*given, **named)
        calls.append(made)
        if len(calls) == at:
            raise problem
        return made

    monkeypatch.setattr(owner, name, interrupted)
    engine, rounds, raised = engine_of(kind, policy=Both(5), max_batch_size=3), [], 0
    for request, _ in asked:
        engine.submit(request)
    while engine.has_work:
        try:
            rounds += engine.step()
        except problem:
            raised += 1
        audit_pages(engine)
    assert raised == 1
    done = finished(rounds)
    assert [done[i].tokens for i in range(len(asked))] == [wanted.tokens for _, wanted in asked]


@every_executor
@pytest.mark.parametrize(("owner", "name"), [(Row, "keep"), (Frequencies, "add"), (Row, "completion")])
def test_a_row_that_is_interrupted_while_it_takes_its_last_tokens_is_cancelled_alone(kind, owner, name, monkeypatch):
    """Were it to go on, it would have no room, and write where others do."""
    (request, wanted), (other, others) = plain(kind, 0), plain(kind, 7)
    engine, honest, calls = engine_of(kind, policy=Always(2, 2, num_rounds=4)), getattr(owner, name), []
    first, second = engine.submit(request), engine.submit(other)

    def interrupted(*given, **named):
        made = honest(*given, **named)
        if not calls and any(row.request_id == first and row.room == 0 for row in engine.rows):
            calls.append(made)
            raise KeyboardInterrupt
        return made

    monkeypatch.setattr(owner, name, interrupted)
    rounds, raised = [], 0
    while engine.has_work:
        try:
            rounds += engine.step()
        except KeyboardInterrupt:
            raised += 1
        audit_pages(engine)
    done = [row.completion for round_ in rounds for row in round_.rows if row.completion is not None]
    assert raised == 1 and sorted(one.request_id for one in done) == [first, second]
    found = finished(rounds)
    assert (found[first].finish_reason, found[first].tokens) == ("cancelled", wanted.tokens)
    assert (found[second].tokens, found[second].text) == (others.tokens, others.text)
    assert engine.cache.num_free_pages == engine.cache.num_pages
