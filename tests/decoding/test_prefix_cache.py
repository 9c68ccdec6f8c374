"""Requests that begin alike share pages: any of them writes what plain decoding writes, and no page is lost."""

from __future__ import annotations

import itertools
import random
import sys
from contextlib import suppress
from functools import cache

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from selfspec.control.plan import Policy
from selfspec.core import Request
from selfspec.decoding import prefix_cache
from selfspec.decoding.prefix_cache import PrefixCache
from selfspec.loading.target import Target
from selfspec.params import SamplingParams, SpeculativeConfig
from tests import helpers
from tests.executors.requests import (
    PAGE,
    PENALTIES,
    alone,
    assert_same,
    engine_of,
    every_executor,
    most_executors,
    programs,
)
from tests.helpers import Always, Run, audit_cache, make_prompts, tokens_of
from tests.models import build

WAYS = (
    {},
    {"temperature": 0.9},
    {"speculative": False},
    *PENALTIES[:3],
    {"temperature": 1.1, "presence_penalty": 0.8, "no_repeat_ngram_size": 2},
    {"logprobs": 2},
)


def request(prompt, max_tokens=12, **params):
    return Request(list(prompt), SamplingParams(max_tokens=max_tokens, **params))


def system(length=70):
    return make_prompts([length], seed=3)[0]


def audit_shared(engine):
    """Every page is free, known or held; what several rows hold is written, and none of them writes to it."""
    holders = {}
    for row in engine.running:
        assert len({*row.pages}) == len(row.pages)
        for at, page in enumerate(row.pages):
            holders.setdefault(page, []).append((row, at))
    assert engine.num_pages_in_use == len(holders) <= engine.cache.num_pages - engine.cache.num_free_pages
    size = engine.cache.page_size
    for places in holders.values():
        texts = {tuple(row.token_ids[: (at + 1) * size]) for row, at in places}
        assert len(places) == 1 or len(texts) == 1
        assert len(places) == 1 or all((at + 1) * size <= row.num_cached for row, at in places)


def run_of(kind="eager", policy="plain", audit=audit_shared, **options):
    return Run(engine_of(kind, policy, prefix_cache=True, **{"max_step_seconds": 0.0, **options}), audit)


def ask(run, asked):
    """The output of a request, after which nothing is left to do."""
    name = run.add(asked)
    return run.finish(check=False).output(name)


# ----------------------------------------------------------------------------------------------------- any traffic


@cache
def wanted(kind, seed):
    """A request of a family, whose prompts begin with parts of others, and its plain output."""
    dice = random.Random(seed)
    parts = [make_prompts([length], seed=at)[0] for at, length in enumerate((17, 33, 5, 16, 9, 40))]
    prompt = [token for _ in range(dice.randint(1, 3)) for token in dice.choice(parts)]
    asked = request(prompt, dice.choice([1, 4, 15, 24]), seed=seed, **dice.choice(WAYS))
    return asked, alone(kind, asked)


class Traffic(RuleBasedStateMachine):
    """Requests come, run and leave in any order; memory is short."""

    kind = "eager"

    @initialize(seed=st.integers(0, 99), batch=st.integers(1, 4), chunk=st.sampled_from([5, 16, 40, 512]))
    def begin(self, seed, batch, chunk):
        sizes = {"max_num_seqs": batch, "max_num_cached_tokens": 24 * PAGE, "prefill_chunk": chunk}
        self.run = run_of(self.kind, programs(seed), **sizes)
        self.asked, self.aborted = {}, set()

    @rule(seed=st.integers(0, 30), times=st.integers(1, 3))
    def add(self, seed, times):
        for _ in range(times):
            self.asked[self.run.add(wanted(self.kind, seed)[0])] = seed

    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            self.run.step()

    @precondition(lambda self: self.asked.keys() - self.run.sequences.keys())
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.asked.keys() - self.run.sequences.keys())))
        self.run.engine.abort(name)
        self.aborted.add(name)

    @invariant()
    def counts_add_up(self):
        if hasattr(self, "run"):
            assert 0 <= self.run.engine.prefix_cache_hits <= self.run.engine.prefix_cache_queries

    def teardown(self):
        if not hasattr(self, "run"):
            return
        self.run.finish()
        assert self.run.sequences.keys() == self.asked.keys()
        for name, seed in self.asked.items():
            output, plain = self.run.output(name), wanted(self.kind, seed)[1]
            if output.finish_reason == "abort":
                assert name in self.aborted and output.token_ids == plain.token_ids[: len(output.token_ids)]
            else:
                assert_same(output, plain)


@most_executors
def test_any_traffic_is_decoded_as_each_request_alone(kind):
    machine = type(f"TrafficOf{kind}", (Traffic,), {"kind": kind})
    run_state_machine_as_test(machine, settings=settings(max_examples=6, stateful_step_count=10))


@most_executors
@pytest.mark.parametrize("seed", range(2))
def test_a_conversation_is_written_as_by_fresh_engines(kind, seed):
    """Turns of any length, greedy and sampled, some of which go back and take another way."""
    dice = random.Random(seed)
    run = run_of(kind, programs(seed), audit_cache, max_num_seqs=2, prefill_chunk=9, max_step_seconds=60.0)
    history, kept = make_prompts([5], seed)[0], []
    for turn in range(5):
        if dice.random() < 0.4:
            history = history[: dice.randrange(1, len(history))]
        history = history + make_prompts([dice.randint(1, 9)], seed=10 * seed + turn)[0]
        params = {"temperature": dice.choice([0.0, 0.9]), "seed": turn} | dice.choice([{}, *PENALTIES[:3]])
        asked = request(history, dice.randint(1, 20), **params)
        done = ask(run, asked)
        assert_same(done, alone(kind, asked))
        common = next((i for i, (a, b) in enumerate(zip(kept, history, strict=False)) if a != b), len(kept))
        assert done.num_cached_tokens == min(common, len(kept), len(history) - 1)
        history = history + done.token_ids
        kept = history[:-1]


@most_executors
def test_prompts_that_come_together_are_read_once(kind):
    """As the `n` outputs of a request do."""
    run = run_of(kind, programs(1), max_step_seconds=60.0)
    asked = [request([*system(), *tail], seed=seed, temperature=0.9) for seed, tail in enumerate(([], [], [5, 6], [7]))]
    for one in asked:
        run.add(one)
    outputs = run.finish().outputs
    assert tokens_of(outputs) == tokens_of([alone(kind, one) for one in asked])
    assert [one.num_cached_tokens for one in outputs] == [0, 64, 64, 64], "four full pages"
    assert (run.engine.prefix_cache_hits, run.engine.prefix_cache_queries) == (3 * 64, 4 * 70 + 3)


@every_executor
def test_rows_that_write_the_same_text_share_its_pages_while_they_decode(kind):
    """Their page tables change between two plans of the same rows."""
    run, asked = run_of(kind, Always(2, 3)), request(system(20), 40)
    for _ in range(2):
        run.add(asked)
    assert tokens_of(run.finish().outputs) == [alone(kind, asked).token_ids] * 2


@most_executors
def test_a_prompt_of_a_row_that_runs_is_found_as_soon_as_it_is_read(kind):
    run = run_of(kind, programs(2), prefill_chunk=32)
    asked = request(system(), 30), request([*system(40), 9, 9, 9])
    for one in asked:
        run.add(one)
        run.step()
    assert run.engine.num_pages_in_use == 7 + 4 - 2
    outputs = run.finish().outputs
    assert outputs[1].num_cached_tokens == 32
    assert tokens_of(outputs) == tokens_of([alone(kind, one) for one in asked])


# -------------------------------------------------------------------------------------------------- which pages


def test_only_what_is_new_is_read():
    run = run_of(prefill_chunk=4, max_step_seconds=60.0)
    first = ask(run, request(make_prompts([40])[0], 8))
    run.add(request([*make_prompts([40])[0], *first.token_ids, 7, 8, 9], 3))
    assert run.step()[0].plan is not None, "the new tokens fit in one chunk, with the last one written before"


def test_a_page_is_found_by_all_that_is_before_it_and_in_it():
    """The same tokens after others, or other tokens with the same hash, are no match."""
    run, page = run_of(), make_prompts([PAGE], seed=5)[0]
    for prompt, found in (
        ([*page, *page, 1], 0),
        ([*page, *page, *page, 2], 2 * PAGE),  # not the third page, which has the tokens of the second
        ([3, *page, *page, 2], 0),
        ([*page, *page[:-1], page[-1] + 1, 2], 2 * PAGE - 1),
    ):
        done = ask(run, request(prompt, 1))
        assert done.num_cached_tokens == found
        assert_same(done, alone("eager", request(prompt, 1)))


def test_the_least_recently_used_pages_are_given_back_where_another_request_needs_them():
    run = run_of(max_num_cached_tokens=128)  # 8 pages of 16
    texts = [make_prompts([40], seed=seed)[0] for seed in range(3)]
    assert len({text[0] for text in texts}) == 3
    for text in (texts[0], texts[1], texts[0]):  # three pages each
        ask(run, request(text, 4))
    assert ask(run, request(texts[2], 4)).num_cached_tokens == 0
    assert ask(run, request(texts[0], 4)).num_cached_tokens == 39
    done = ask(run, request(texts[1], 4))
    assert 16 <= done.num_cached_tokens < 39, "its last pages went first"
    assert_same(done, alone("eager", request(texts[1], 4)))


def test_a_row_that_needs_more_pages_than_are_free_waits_for_them():
    run, prompt = run_of(max_num_cached_tokens=64), make_prompts([10])[0]
    first = ask(run, request(prompt, 6))  # one page
    run.add(request(make_prompts([20], seed=3)[0], 12))  # two of the other three
    run.step()
    growing = request([*prompt, *first.token_ids], 34)  # the one that is kept, and three more
    name = run.add(growing)
    run.step()
    assert run.engine.num_waiting == 1
    assert_same(run.finish().output(name), alone("eager", growing))


def test_what_is_not_read_again_takes_no_memory():
    run, prompt = run_of(max_num_cached_tokens=64), make_prompts([20])[0]
    first = ask(run, request(prompt, 40))
    assert run.engine.cache.num_free_pages == 0
    assert ask(run, request([*prompt, first.token_ids[0]], 2)).token_ids == first.token_ids[1:3]
    assert run.engine.num_pages_in_use == 0
    largest = request(make_prompts([1], seed=2)[0], 64)
    assert_same(ask(run, largest), alone("eager", largest))


@pytest.mark.parametrize("backend", ["views", "compiled"])
@pytest.mark.parametrize("is_running", [False, True])
def test_keys_and_values_of_older_weights_are_not_used(backend, is_running):
    target = Target(build("llama"), backend=backend)
    run = Run(helpers.engine_of(target, prefix_cache=True, max_step_seconds=0.0))
    asked = request(make_prompts([12])[0], 8)
    name = run.add(asked)
    first = None if is_running else run.finish().output(name)
    run.step()
    with torch.no_grad():
        for parameter in target.model.parameters():
            parameter.mul_(1.3)
    first = first or run.finish(check=False).output(name)
    following = request([*asked.prompt_token_ids, *first.token_ids, 4], 8)
    run.audit = audit_cache
    done = ask(run, following)
    assert done.num_cached_tokens == 0
    assert tokens_of([done]) == tokens_of(helpers.decode(target, [following]))


def test_edits_of_weights_are_counted_without_a_walk_through_the_modules(monkeypatch):
    """It takes milliseconds where there are 32 layers, and every row counts edits wherever it fills a page."""
    run, walks, honest = run_of(), [], torch.nn.Module.named_modules

    def counted(self, *given, **named):
        walks.append(self)
        return honest(self, *given, **named)

    monkeypatch.setattr(torch.nn.Module, "named_modules", counted)
    for prompt in (system(), [*system(50), 8, 8]):
        run.add(request(prompt, 40))
    assert run.finish().outputs[1].num_cached_tokens == 48 and not walks


def test_compiled_layers_find_the_bits_that_they_would_write():
    made = run_of("cpu", programs(3, eager=0.0), max_num_seqs=2, max_step_seconds=60.0)
    for prompt in (system(), [*system(50), 8, 8], [*system(), 4]):
        asked = Request(prompt, SamplingParams(max_tokens=10), keep_logits=True)
        name = made.add(asked)
        row = made.finish().sequences[name]
        plain = Run(engine_of("cpu"))
        plain.add(asked)
        other = plain.finish().sequences["0"]
        assert row.completion_token_ids == other.completion_token_ids
        assert torch.equal(torch.stack(row.logits), torch.stack(other.logits))


@pytest.mark.parametrize("kind", ["eager", "cpu"])
def test_probes_of_a_prompt_are_those_of_one_that_is_read_whole(kind):
    def seeds(prefix_cache):
        policy = programs(5)
        policy.seed_layers = lambda row: (1, 2, 3)
        made = Run(engine_of(kind, policy, prefix_cache=prefix_cache))
        for prompt in (system(), [*system(), 5, 6, 7]):
            ask(made, request(prompt, 1))
        return [shadow.hits.tolist() for _, shadow in policy.seeds]

    whole, shared = seeds(False), seeds(True)
    assert whole[0] == shared[0]
    assert shared[1] == [hits[-len(own) :] for hits, own in zip(whole[1], shared[1], strict=True)]
    assert 0 < len(shared[1][0]) < len(whole[1][0])


def test_exit_heads_that_learn_leave_keys_and_values_valid():
    target = Target(build("llama"), backend="views")
    fixed = SpeculativeConfig(exit_layer=2, num_speculative_tokens=3, learn=True)
    learner = target.learner_of(fixed)
    made = Run(helpers.engine_of(target, fixed, learner=learner, prefix_cache=True, page_size=8))
    for found in (0, 30):
        assert ask(made, request(system(31), 30)).num_cached_tokens == found
    assert target.exit_heads is not None


# ---------------------------------------------------------------------------------------------- aborts and interrupts


@most_executors
@pytest.mark.parametrize("steps", [1, 4])
def test_an_aborted_answer_leaves_what_was_read_and_written(kind, steps):
    made, prompt = run_of(kind, programs(steps), audit_cache, prefill_chunk=8), make_prompts([30])[0]
    name = made.add(request(prompt, 40))
    for _ in range(steps):
        made.step()
    made.engine.abort(name)
    cut = made.finish().output(name)
    assert cut.finish_reason == "abort"
    following = request([*prompt, *cut.token_ids, 5, 6], 15, temperature=0.9)
    done = ask(made, following)
    assert_same(done, alone(kind, following))
    written = len(prompt) + len(cut.token_ids) - 1
    assert done.num_cached_tokens == (written if cut.token_ids else min(8 * steps, 29))


def test_a_request_that_leaves_while_it_waits_takes_nothing_away():
    made, prompt = run_of(max_num_seqs=1), make_prompts([20])[0]
    first = ask(made, request(prompt, 6))
    waiting = made.add(request(make_prompts([5], seed=1)[0]))
    made.engine.abort(waiting)
    assert made.finish().output(waiting).finish_reason == "abort"
    done = ask(made, request([*prompt, *first.token_ids, 4], 5))
    assert done.num_cached_tokens == len(prompt) + len(first.token_ids) - 1


class Interrupted(Policy):
    """Another policy, in whose place an interrupt comes at one of its calls."""

    def __init__(self, inner, at):
        self.inner, self.left = inner, at

    def _count(self):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def plan(self, rows):
        self._count()
        return self.inner.plan(rows)

    def observe(self, plan, rounds):
        self._count()
        self.inner.observe(plan, rounds)


@most_executors
@pytest.mark.parametrize("at", [1, 2, 4])
def test_nothing_is_stale_after_an_interrupt(kind, at):
    made, prompt = run_of(kind, Interrupted(programs(at), at), audit_cache), make_prompts([11])[0]
    name = made.add(request(prompt, 40))
    with pytest.raises(KeyboardInterrupt):
        while True:
            made.step()
    made.engine.abort(name)
    cut = made.finish().output(name)
    following = request([*prompt, *cut.token_ids, 5, 6], 15)
    assert_same(ask(made, following), alone(kind, following))


def is_interrupted_after(num_lines, made):
    """Step until nothing is left, with an interrupt after so many lines of the prefix cache; whether one came."""
    left = num_lines

    def on_line(frame, event, given):
        nonlocal left
        left -= event == "line"
        if left == 0:
            left = -1
            raise KeyboardInterrupt
        return on_line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, given: on_line if frame.f_code.co_filename == prefix_cache.__file__ else None)
    try:
        while made.engine.has_unfinished_requests():
            with suppress(KeyboardInterrupt):
                made.step()
    finally:
        sys.settrace(before)
    return left < 0


def test_an_interrupt_within_the_cache_loses_no_request_and_no_token():
    """Pages may be lost then, but none that a row reads is written or freed."""
    text = make_prompts([20])[0]
    asked = [request(text, 14), request(text, 20), request([*text, 5], 9), request([*text[:18], 7], 16)]
    plain = [alone("eager", one).token_ids for one in asked]
    for num_lines in itertools.count(1, 311):
        made = run_of(max_num_seqs=2, audit=None)
        names = [made.add(one) for one in asked * 2]
        came = is_interrupted_after(num_lines, made)
        assert sorted(made.sequences) == names
        for name in names:
            output = made.output(name)
            assert output.token_ids == plain[int(name) % 4] or output.finish_reason == "abort", num_lines
        if not came:
            break


# ------------------------------------------------------------------------------------------------------- mutations


def any_parent(self, content, num_prompt, blocks, length, honest=PrefixCache._key):
    return honest(self, content, num_prompt, blocks, length)._replace(parent=0)


def users_are_not_counted(self, block):
    self._idle.pop(block, None)
    block.users = 1


def one_token_more_than_was_copied(self, prompt, blocks, to, honest=PrefixCache._copied):
    count = honest(self, prompt, blocks, to)
    return count and count + 1


def unread_pages_are_shared(self, rows, honest=PrefixCache.publish):
    held = [(row, row.num_cached) for row in rows]
    for row, _ in held:
        row.num_cached = row.num_tokens - 1
    try:
        honest(self, [row for row, _ in held])
    finally:
        for row, num_cached in held:
            row.num_cached = num_cached


def check_traffic():
    for seed in range(6):
        dice = random.Random(seed)
        sizes = {"max_num_seqs": 3, "max_num_cached_tokens": 18 * PAGE, "prefill_chunk": 24}
        made, asked = run_of("eager", programs(seed), **sizes), {}
        for _ in range(8):
            seed = dice.randrange(12)
            asked[made.add(wanted("eager", seed)[0])] = seed
            for _ in range(dice.randint(0, 3)):
                made.step()
        made.finish()
        for name, seed in asked.items():
            assert made.output(name).token_ids == wanted("eager", seed)[1].token_ids


def check_a_prompt_that_is_still_being_read():
    asked = request(make_prompts([5 * PAGE], seed=1)[0], 6)
    made = run_of(max_num_seqs=2, prefill_chunk=PAGE)
    made.add(asked)
    made.step()
    made.add(asked)
    assert tokens_of(made.finish().outputs) == [alone("eager", asked).token_ids] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "name", "fault"),
    [
        (check_traffic, "_key", any_parent),
        (check_traffic, "_take", users_are_not_counted),
        (check_traffic, "_copied", one_token_more_than_was_copied),
        (check_a_prompt_that_is_still_being_read, "publish", unread_pages_are_shared),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_faults_of_the_cache_are_noticed(monkeypatch, check, name, fault):
    check()
    monkeypatch.setattr(PrefixCache, name, fault)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        check()
