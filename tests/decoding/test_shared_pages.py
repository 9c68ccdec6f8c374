"""Requests that begin alike share pages: any of them writes what plain decoding writes, and no page is lost."""

from __future__ import annotations

import random
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

from selfspec.decoding.engine import Engine
from selfspec.decoding.prefix_cache import PrefixCache
from selfspec.executors.prefill import shares
from tests.cuda.standin import EXACT, with_runner
from tests.decoding.prefixes import audit_shared, family, finished, request
from tests.executors.engines import EXECUTORS, PAGE, RECORDED, Programs, alone, engine_of
from tests.helpers import Always, ShortBlocks, audit_cache, make_prompts
from tests.models import build
from tests.slow import slow
from tests.target import Target

every_executor = pytest.mark.parametrize("kind", [slow(kind) if kind == "cuda" else kind for kind in EXECUTORS])
# The stand-in for a device takes ten times as long, and pages are found and freed without it.
executors = pytest.mark.parametrize("kind", [slow(kind) if kind in RECORDED else kind for kind in EXECUTORS])
WAYS = (
    {},
    {"temperature": 0.9},
    {"speculative": False},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.3},
    {"temperature": 1.1, "presence_penalty": 0.8, "no_repeat_ngram_size": 2},
    {"logprobs": 2},
)


@cache
def wanted(kind, seed):
    """A request of a family, and what plain decoding makes of it."""
    dice = random.Random(seed)
    prompt = family(dice)
    asked = request(prompt, dice.choice([1, 4, 15, 24]), seed=seed, **dice.choice(WAYS))
    return asked, alone(kind, asked)


class Traffic(RuleBasedStateMachine):
    """Requests come, run and leave in any order; memory is short."""

    kind = "views"

    @initialize(seed=st.integers(0, 99), batch=st.integers(1, 4), chunk=st.sampled_from([5, 16, 40, 512]))
    def begin(self, seed, batch, chunk):
        self.engine = engine_of(
            self.kind, policy=Programs(seed), max_batch_size=batch, max_cached_tokens=24 * PAGE, prefill_chunk=chunk,
            prefix_cache=True, burst=0.0,
        )  # fmt: skip
        self.asked, self.done, self.cancelled = {}, {}, set()

    @rule(seed=st.integers(0, 30), times=st.integers(1, 3))
    def submit(self, seed, times):
        for _ in range(times):
            self.asked[self.engine.submit(wanted(self.kind, seed)[0])] = seed

    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            for round_ in self.engine.step():
                self.done |= {row.request_id: row.completion for row in round_.rows if row.completion is not None}
            audit_shared(self.engine)
        if self.kind != "cuda":
            audit_cache(self.engine, self.engine.target.model)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data):
        self.cancelled.add(data.draw(st.sampled_from(sorted(self.asked))))
        self.engine.cancel(max(self.cancelled))

    @invariant()
    def counts_add_up(self):
        if hasattr(self, "engine"):
            assert 0 <= self.engine.prefix_hits <= self.engine.prefix_queries

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.done |= finished(self.engine)
        assert self.done.keys() == self.asked.keys()
        for request_id, done in self.done.items():
            plain = wanted(self.kind, self.asked[request_id])[1]
            assert done.tokens == plain.tokens[: len(done.tokens)]
            if done.finish_reason == "cancelled":
                assert request_id in self.cancelled
            else:
                assert (done.tokens, done.text) == (plain.tokens, plain.text)
                assert [own.token for own in done.logprobs or ()] == [own.token for own in plain.logprobs or ()]


@executors
def test_any_traffic_is_decoded_as_each_request_alone(kind):
    machine = type(f"TrafficOf{kind}", (Traffic,), {"kind": kind})
    run_state_machine_as_test(machine, settings=settings(max_examples=6, stateful_step_count=10))


def system(length=70):
    return make_prompts([length], seed=3)[0]


@executors
def test_prompts_that_come_together_are_read_once(kind):
    """As the `n` outputs of a request do."""
    engine = engine_of(kind, policy=Programs(1), prefix_cache=True)
    asked = [request([*system(), *tail], seed=seed, temperature=0.9) for seed, tail in enumerate(([], [], [5, 6], [7]))]
    for one in asked:
        engine.submit(one)
    done = finished(engine)
    assert [done[i].tokens for i in range(4)] == [alone(kind, one).tokens for one in asked]
    assert [done[i].num_cached_tokens for i in range(4)] == [0, 64, 64, 64], "four full pages"
    assert (engine.prefix_hits, engine.prefix_queries) == (3 * 64, 4 * 70 + 3)


@every_executor
def test_rows_that_write_the_same_text_share_its_pages_while_they_decode(kind):
    """Their page tables change between two programs of the same rows."""
    engine = engine_of(kind, policy=Always(2, 3), prefix_cache=True, burst=0.0)
    asked = [request(system(20), 40) for _ in range(2)]
    for one in asked:
        engine.submit(one)
    done = finished(engine)
    assert [done[i].tokens for i in range(2)] == [alone(kind, one).tokens for one in asked]


@executors
def test_a_prompt_of_a_row_that_runs_is_found_as_soon_as_it_is_read(kind):
    engine = engine_of(kind, policy=Programs(2), prefix_cache=True, prefill_chunk=32, burst=0.0)
    first = engine.submit(request(system(), 30))
    engine.step()
    asked = request([*system(40), 9, 9, 9])
    second = engine.submit(asked)
    engine.step()
    assert engine.num_pages_in_use == 7 + 4 - 2
    done = finished(engine)
    assert done[second].num_cached_tokens == 32
    assert done[second].tokens == alone(kind, asked).tokens
    assert done[first].tokens == alone(kind, request(system(), 30)).tokens


def test_edits_of_weights_are_counted_without_a_walk_through_the_modules(monkeypatch):
    """It takes milliseconds where there are 32 layers, and every row counts edits wherever it fills a page."""
    engine, walks, honest = engine_of("eager", policy="plain", prefix_cache=True), [], torch.nn.Module.named_modules

    def counted(self, *given, **named):
        walks.append(self)
        return honest(self, *given, **named)

    monkeypatch.setattr(torch.nn.Module, "named_modules", counted)
    for prompt in (system(), [*system(50), 8, 8]):
        engine.submit(request(prompt, 40))
    assert finished(engine)[1].num_cached_tokens == 48 and not walks


def test_a_page_is_found_by_all_that_is_before_it_and_in_it():
    """The same tokens after others, or other tokens with the same hash, are no match."""
    engine = engine_of("eager", policy="plain", prefix_cache=True)
    page = make_prompts([PAGE], seed=5)[0]
    for prompt, found in (
        ([*page, *page, 1], 0),
        ([*page, *page, *page, 2], 2 * PAGE),  # not the third page, which has the tokens of the second
        ([3, *page, *page, 2], 0),
        ([*page, *page[:-1], page[-1] + 1, 2], 2 * PAGE - 1),
    ):
        engine.submit(request(prompt, 1))
        done = finished(engine)
        assert [one.num_cached_tokens for one in done.values()] == [found]
        assert [one.tokens for one in done.values()] == [alone("eager", request(prompt, 1)).tokens]


def test_compiled_layers_find_the_bits_that_they_would_write():
    engine = engine_of("cpu", policy=Programs(3), prefix_cache=True, max_batch_size=2)
    for prompt in (system(), [*system(50), 8, 8], [*system(), 4]):
        asked = request(prompt, 10, keep_logits=True)
        engine.submit(asked)
        [done] = finished(engine).values()
        plain = alone("cpu", asked)
        assert done.tokens == plain.tokens
        assert all(torch.equal(one, other) for one, other in zip(done.logits, plain.logits, strict=True))


@pytest.mark.parametrize("page_size", [16, slow(5), slow(32)])
def test_exact_mode_finds_the_bits_that_it_would_write(page_size):
    """Of prompts, whole tiles are computed in other shapes than the rest, and than outputs."""
    target = with_runner(ShortBlocks(build("llama").bfloat16(), engine="views"), kernels=EXACT, packing="copy")
    options = {"max_batch_size": 2, "max_cached_tokens": 256, "page_size": page_size, "exact": True}
    engine = Engine(target, policy=Programs(4), prefix_cache=True, prefill_chunk=21, **options)
    texts, found = [system(20)], 0
    for turn in range(5):
        asked = request(texts[-1], 13, keep_logits=True)
        engine.submit(asked)
        [done] = finished(engine).values()
        fresh = Engine(target, policy="plain", **options)
        fresh.submit(asked)
        [plain] = finished(fresh).values()
        assert done.tokens == plain.tokens
        assert all(torch.equal(one, other) for one, other in zip(done.logits, plain.logits, strict=True))
        found += done.num_cached_tokens
        texts.append([*texts[-1], *done.tokens, 7 + turn] if turn % 2 else [*texts[-1][:18], *make_prompts([11])[0]])
    assert found > 0


@pytest.mark.parametrize("kind", ["views", "eager"])
def test_probes_of_a_prompt_are_those_of_one_that_is_read_whole(kind):
    def seeds(prefix_cache):
        policy = Programs(5)
        policy.seed_layers = lambda row: (1, 2, 3)
        engine = engine_of(kind, policy=policy, prefix_cache=prefix_cache)
        for prompt in (system(), [*system(), 5, 6, 7]):
            engine.submit(request(prompt, 1))
            finished(engine, lambda engine: None)
        return [shadow.hits.tolist() for _, shadow in policy.seeds]

    whole, shared = seeds(False), seeds(True)
    assert whole[0] == shared[0]
    assert shared[1] == [hits[-len(own) :] for hits, own in zip(whole[1], shared[1], strict=True)]
    assert 0 < len(shared[1][0]) < len(whole[1][0])


def test_exit_heads_that_learn_leave_keys_and_values_valid():
    target = Target(build("llama"), engine="views")
    learner = target.learner_of(True, 2)
    engine = Engine(target, exit_layer=2, num_draft_tokens=3, learn=learner, prefix_cache=True, page_size=8)
    for found in (0, 30):
        engine.submit(request(system(31), 30))
        [done] = finished(engine).values()
        assert done.num_cached_tokens == found
    assert target.exit_heads is not None


# ------------------------------------------------------------------------------------------------- chunked prefill


@pytest.mark.parametrize(
    ("lacking", "budget", "expected"),
    [
        ([], 8, []),
        ([100], 8, [8]),
        ([100, 3, 50], 16, [8, 3, 5]),
        ([0, 100, 3], 8, [0, 5, 3]),
        ([2, 100, 100], 9, [2, 7, 0]),
        ([100, 0, 7], 1, [1, 0, 0]),
        ([4, 4], 100, [4, 4]),
        ([100, 90, 80], 10, [5, 0, 5]),
    ],
)
def test_half_of_a_step_is_for_the_row_that_came_first_and_half_for_those_that_need_least(lacking, budget, expected):
    assert shares(lacking, budget) == expected


def test_a_short_prompt_does_not_wait_for_a_long_one_nor_the_other_way_round():
    engine = engine_of("eager", policy="plain", max_batch_size=2, prefill_chunk=4, burst=0.0)
    long = engine.submit(request(make_prompts([100], seed=1)[0], 1))
    shorts = [engine.submit(request(make_prompts([3], seed=seed)[0], 3)) for seed in range(40)]
    ended = []
    while engine.has_work:
        for round_ in engine.step():
            ended += [row.request_id for row in round_.rows if row.completion is not None]
    assert ended[0] == shorts[0]
    assert 5 < ended.index(long) < 30, "half of every step is its own"


# ------------------------------------------------------------------------------------------------------- mutations


def any_parent(self, content, num_prompt, blocks, length, honest=PrefixCache._key):
    return honest(self, content, num_prompt, blocks, length)._replace(parent=0)


def users_are_not_counted(self, block):
    self._idle.pop(block, None)
    block.users = 1


def one_token_more_than_was_copied(self, prompt, blocks, to, honest=PrefixCache._copied):
    count = honest(self, prompt, blocks, to)
    return count and count + 1


def check_traffic(kind="eager"):
    for seed in range(6):
        dice = random.Random(seed)
        engine = engine_of(
            kind, policy=Programs(seed), max_batch_size=3, max_cached_tokens=18 * PAGE, prefill_chunk=24,
            prefix_cache=True, burst=0.0,
        )  # fmt: skip
        asked, done = {}, {}
        for _ in range(8):
            number = dice.randrange(12)
            asked[engine.submit(wanted(kind, number)[0])] = number
            for _ in range(dice.randint(0, 3)):
                for round_ in engine.step():
                    done |= {row.request_id: row.completion for row in round_.rows if row.completion is not None}
                audit_shared(engine)
        done |= finished(engine)
        for request_id, one in done.items():
            assert one.tokens == wanted(kind, asked[request_id])[1].tokens


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("_key", any_parent),
        ("_take", users_are_not_counted),
        ("_copied", one_token_more_than_was_copied),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_faults_of_the_cache_are_noticed(monkeypatch, name, fault):
    check_traffic()
    monkeypatch.setattr(PrefixCache, name, fault)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        check_traffic()


def unread_pages_are_shared(self, rows, honest=PrefixCache.publish):
    held = [(row, row.num_cached) for row in rows]
    for row, _ in held:
        row.num_cached = len(row.content) - 1
    try:
        honest(self, [row for row, _ in held])
    finally:
        for row, num_cached in held:
            row.num_cached = num_cached


def check_a_prompt_that_is_still_being_read():
    asked = request(make_prompts([5 * PAGE], seed=1)[0], 6)
    engine = engine_of("eager", policy="plain", max_batch_size=2, prefill_chunk=PAGE, prefix_cache=True, burst=0.0)
    engine.submit(asked)
    engine.step()
    engine.submit(asked)
    plain = alone("eager", asked).tokens
    assert [one.tokens for one in finished(engine).values()] == [plain, plain]


def test_pages_are_shared_when_they_are_read_not_before(monkeypatch):
    check_a_prompt_that_is_still_being_read()
    monkeypatch.setattr(PrefixCache, "publish", unread_pages_are_shared)
    with pytest.raises(AssertionError):
        check_a_prompt_that_is_still_being_read()
