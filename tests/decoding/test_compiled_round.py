"""Rounds in one compiled call are those that are done in parts: equal drafts, picks, confidences, keys and values."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.api import Target
from selfspec.commands.failure import ending
from selfspec.control.plan import LOOKUP, NUM_BINS, Plan, SecondChoices, ShadowPlan, Steady, SurvivalStop
from selfspec.decoding import rounds, whole
from selfspec.decoding.engine import Engine
from selfspec.decoding.picker import Picker
from selfspec.target.compiled_round import Rounds
from tests.decoding.test_trees import Knowing, Seconds, check_known_trees, check_seconds
from tests.helpers import Adversary, Always, generate, make_prompts
from tests.models import build, tiny
from tests.slow import slow

LENGTHS = (9, 1, 20, 4, 13, 2, 7, 30)


class Dice(Adversary):
    """Any plan that one call can follow; and now and then one that it cannot."""

    def plan(self, rows):
        plan, dice = super().plan(rows), self.dice
        right = tuple(dice.random() for _ in range(NUM_BINS))
        rule = SecondChoices(right, right[::-1], dice.choice([-1, 0.05]), dice.choice([1, 3, 9]), dice.choice([0, 0.3]))
        drafts = plan.exit_layer is not None and plan.exit_layer != LOOKUP
        return replace(
            plan,
            keep_divergence=plan.keep_divergence and dice.random() < 0.1,
            stop=dice.choice([None, SurvivalStop(right, dice.random())]),
            second_choices=dice.choice([None, rule]) if drafts else None,
            draft_bits=dice.choice([None, 4]) if drafts else None,
            draft_vocab=dice.choice([None, 40]) if drafts else None,
        )


def compiled(family, **shape):
    model = build("llama", **shape).bfloat16() if family == "bfloat16" else build(family, **shape)
    return Target(model, engine="compiled")


class Drafts(Always):
    """Half of the layers draft as many tokens as there is room for, by turns themselves and by copies of them."""

    def __init__(self, longest):
        super().__init__(2, longest)
        self.copies = False

    def plan(self, rows):
        self.copies = not self.copies
        return replace(super().plan(rows), draft_bits=4 if self.copies else None)


@contextmanager
def in_parts():
    """No round is done in one call."""
    made = whole.compiled_round
    rounds.compiled_round = lambda *given: None
    try:
        yield
    finally:
        rounds.compiled_round = made


def decoded(family, num_rows, seed, policy, new, sampled, **shape):
    """What every row came to, and the keys and values that its rows wrote."""
    target = compiled(family, **shape)  # which has not seen yet which tokens are frequent
    engine = Engine(target, policy=policy, max_batch_size=num_rows)
    ways = ({"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 1.1})
    told = [ways[sampled[i] * (1 + i % 2)] for i in range(num_rows)]
    for i, prompt in enumerate(make_prompts(LENGTHS[:num_rows], seed=seed)):
        engine.submit(prompt, max_new_tokens=new + i, seed=i, **told[i])
    done, blocks, written = [], [], []
    while engine.has_work:
        result = engine.step()
        blocks.append(
            [(row.request_id, row.tokens, row.drafted, row.num_accepted, row.num_beside) for row in result.rows]
        )
        done += [row.completion for row in result.rows if row.completion is not None]
        for row in engine.rows:
            at = torch.tensor([row.pages[p // engine.cache.page_size] for p in range(row.num_cached)])
            within = torch.arange(row.num_cached) % engine.cache.page_size
            layers = engine.cache._layers.values()
            written.append([float(pages[at, within].double().sum()) for layer in layers for pages in layer])
    return [(one.request_id, one.tokens, one.stats) for one in done], blocks, written


@given(
    seed=st.integers(0, 1 << 16),
    num_rows=st.integers(1, len(LENGTHS)),
    family=st.sampled_from(["llama", "qwen3", "mistral", "bfloat16"]),
    threads=st.integers(1, 3),
    sampled=st.lists(st.booleans(), min_size=len(LENGTHS), max_size=len(LENGTHS)),
)
def test_any_plans_come_to_the_same_as_in_parts(seed, num_rows, family, threads, sampled):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = []
        for whole_rounds in (True, False):
            policy = Dice(seed, 4, longest=9)
            given = (family, num_rows, seed, policy, 16, sampled)
            if whole_rounds:
                came = decoded(*given)
            else:
                with in_parts():
                    came = decoded(*given)
            told = [(plan, [(one._replace(shadow=None), seen_in(one)) for one in outs]) for plan, outs in policy.seen]
            found.append((*came, told))
        assert found[0] == found[1]
    finally:
        torch.set_num_threads(before)


def seen_in(outcome):
    shadow = outcome.shadow
    return None if shadow is None else (shadow.layers, shadow.hits.tolist(), shadow.confidences.tolist())


def test_rounds_that_look_at_layers_are_done_in_one_call(monkeypatch):
    made, looked = whole.compiled_round, []

    def counted(stack, cache, rows, plan, *more):
        done = made(stack, cache, rows, plan, *more)
        if plan.shadow is not None:
            looked.append((plan.exit_layer, plan.draft_bits, plan.keep_divergence, done is not None))
            assert done is None or [i for i, one in enumerate(done) if one.shadow is not None] == [*plan.shadow.rows]
        return done

    monkeypatch.setattr(rounds, "compiled_round", counted)
    for seed in range(3):
        decoded("llama", 3, seed, Dice(seed, 4), 70, [False, True, False])
    assert {None, LOOKUP, 1, 2} <= {one[0] for one in looked} and {None, 4} == {one[1] for one in looked}
    assert all(diverges != is_done for _, _, diverges, is_done in looked)


class LooksBesideLookup(Always):
    """Looks at layers while lookup drafts little, and says that rounds in which layers draft much are to follow."""

    steady = Steady()

    def plan(self, rows):
        self.steady, shadow = Steady(8, usual=super().plan(rows)), ShadowPlan((1, 3), (0,), 20)
        return Plan(LOOKUP, tuple([min(2, row.room - 1) for row in rows]), shadow=shadow)


def test_no_round_follows_in_a_call_that_looks_at_layers(monkeypatch):
    run, told = Rounds.run, []

    def counted(self, *given):
        done = run(self, *given)
        told.append((given[-1] is not None, len(done)))
        return done

    monkeypatch.setattr(Rounds, "run", counted)
    target, [prompt] = compiled("llama"), make_prompts([9])
    [answer] = target.generate([prompt], max_new_tokens=40, policy=LooksBesideLookup(2, 9))
    assert answer.tokens == generate(target.model, prompt, 40)
    assert told and {*told} == {(True, 1)}


def test_most_rounds_are_done_in_one_call(monkeypatch):
    calls = {True: 0, False: 0}

    def counted(*given, made=whole.compiled_round):
        done = made(*given)
        calls[done is not None] += 1
        return done

    monkeypatch.setattr(rounds, "compiled_round", counted)
    for seed in range(3):
        decoded("llama", 3, seed, Dice(seed, 4), 70, [False, True, False])
    assert calls[True] > 3 * calls[False] > 0


def test_only_layers_that_are_compiled_do_whole_rounds():
    assert Picker(compiled("llama").stack).rounds is not None
    assert Picker(tiny("gpt_oss").stack).rounds is None


@pytest.mark.parametrize(("vocab", "threads"), [(9000, 2), (40_000, 1), slow(9000, 1), slow(40_000, 2)])
def test_large_vocabularies_are_picked_from_by_all_threads_and_keep_noise_of_some_tokens(vocab, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        given = ("llama", 3, 1), (14, [True, True, False])
        found = [decoded(*given[0], Drafts(9), *given[1], vocab_size=vocab)]
        with in_parts():
            found.append(decoded(*given[0], Drafts(9), *given[1], vocab_size=vocab))
        assert found[0] == found[1]
        assert sum(len(drafted) for step in found[0][1] for drafted in [one[2] for one in step]) > 30
    finally:
        torch.set_num_threads(before)


def left_where_they_are(rounds, cache, rows, *given, run=Rounds.run):
    """As if accepted nodes had not been moved: something else is where they belong."""
    done = run(rounds, cache, rows, *given)
    for row, judged in zip(rows, done[0].rows, strict=True):
        for at in [row.start + i for i, node in enumerate(judged.path) if node != i]:
            cache._pool[:, :, row.pages[at // cache.page_size], at % cache.page_size] = 0.5
    return done


@pytest.mark.parametrize("check", [check_known_trees, check_seconds])
def test_accepted_nodes_that_are_left_where_they_are_are_noticed(monkeypatch, check):
    check("llama", target=compiled("llama"))
    monkeypatch.setattr(Rounds, "run", left_where_they_are)
    with pytest.raises(AssertionError):
        check("llama", target=compiled("llama"))


def test_rows_of_several_pages_and_trees_of_some_rows_only():
    """Small pages, so that the page of a node is not its row's first one."""
    target = compiled("llama")
    prompts, outputs = make_prompts(LENGTHS[:4], seed=1), {}
    for paged in (128, 5):
        for policy in ("plain", Knowing(0, 4, outputs), Seconds(1, 4, plain=False)) if outputs else ("plain",):
            engine = Engine(target, policy=policy, max_batch_size=4, max_cached_tokens=640, page_size=paged)
            for prompt in prompts:
                engine.submit(prompt, max_new_tokens=24)
            done = sorted((row.completion.request_id, row.completion.tokens)
                          for result in engine.run() for row in result.rows if row.completion is not None)  # fmt: skip
            if not outputs:
                outputs = {i: (len(prompts[i]), tokens) for i, tokens in done}
            assert [outputs[i][1] for i, _ in done] == [tokens for _, tokens in done]


def test_too_little_memory_is_an_error_that_costs_no_token():
    target = compiled("llama")
    [whole_output] = [one.tokens for one in target.generate(make_prompts((9,)), max_new_tokens=12, policy="plain")]
    engine = Engine(target, policy="plain")
    engine.submit(make_prompts((9,))[0], max_new_tokens=12)
    found = [token for row in engine.step().rows for token in row.tokens]
    made = engine._picker.rounds._lib
    engine._picker.rounds._lib = SimpleNamespace(selfspec_rounds=lambda *given: 1)
    with pytest.raises(MemoryError, match="too little memory for a round of 1 tokens; decode fewer rows at once"):
        engine.step()
    engine._picker.rounds._lib = made
    found += [token for result in engine.run() for row in result.rows for token in row.tokens]
    assert found == whole_output


@pytest.mark.parametrize(
    ("problem", "said"), [(MemoryError("too little"), "too little"), (MemoryError(), "memory ran out")]
)
def test_the_command_says_so_in_one_sentence(capsys, problem, said):
    assert ending(problem) == 1
    assert capsys.readouterr().err.startswith(f"selfspec: {said}")
