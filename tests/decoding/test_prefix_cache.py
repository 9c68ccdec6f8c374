"""An engine whose prompts share what they begin with writes what a fresh one does, and leaks nothing."""

from __future__ import annotations

import random

import pytest
import torch

from selfspec.control.plan import Policy
from selfspec.decoding.engine import Engine
from selfspec.decoding.request import Request
from selfspec.executors.pick import Sampling
from selfspec.target import Target
from tests.executors.engines import EXECUTORS, RECORDED, Programs, alone, engine_of
from tests.helpers import audit_cache, make_prompts
from tests.models import build
from tests.slow import slow

executors = pytest.mark.parametrize("kind", [slow(kind) if kind in RECORDED else kind for kind in EXECUTORS])


PENALTIES = (
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.8, "frequency_penalty": 0.3},
    {"no_repeat_ngram_size": 2},
)


def request(prompt, max_new_tokens=12, **sampling):
    return Request(prompt, max_new_tokens, Sampling(**sampling), eos=frozenset())


def finish(engine, request_id, audit=False):
    """The completion of a request, after which nothing is left to do."""
    while engine.has_work:
        for round_ in engine.step():
            for row in round_.rows:
                if row.completion is not None and row.request_id == request_id:
                    done = row.completion
        if audit:
            audit_cache(engine, engine.target.model)
    return done


def ask(engine, wanted, audit=False):
    return finish(engine, engine.submit(wanted), audit)


@executors
@pytest.mark.parametrize("seed", range(3))
def test_a_conversation_is_written_as_by_fresh_engines(kind, seed):
    """Turns of any length, greedy and sampled, some of which go back and take another way."""
    dice = random.Random(seed)
    engine = engine_of(kind, policy=Programs(seed), max_batch_size=2, prefix_cache=True, prefill_chunk=9)
    history, kept = make_prompts([5], seed)[0], []
    for turn in range(5):
        if dice.random() < 0.4:
            history = history[: dice.randrange(1, len(history))]
        history = history + make_prompts([dice.randint(1, 9)], seed=10 * seed + turn)[0]
        sampling = {"temperature": dice.choice([0.0, 0.9]), "seed": turn} | dice.choice(PENALTIES)
        wanted = request(history, dice.randint(1, 20), **sampling)
        done, fresh = ask(engine, wanted, audit=True), alone(kind, wanted)
        assert (done.tokens, done.text) == (fresh.tokens, fresh.text)
        common = next((i for i, (a, b) in enumerate(zip(kept, history, strict=False)) if a != b), len(kept))
        assert done.num_cached_tokens == min(common, len(kept), len(history) - 1)
        history = history + done.tokens
        kept = history[:-1]


def test_only_what_is_new_is_read():
    engine = engine_of("eager", policy="plain", prefix_cache=True, prefill_chunk=4)
    first = ask(engine, request(make_prompts([40])[0], 8))
    again = make_prompts([40])[0] + first.tokens + [7, 8, 9]
    engine.submit(request(again, 3))
    assert engine.step()[0].plan is not None, "the new tokens fit in one chunk, with the last one written before"


@executors
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_cancelled_answer_leaves_what_was_read_and_written(kind, steps):
    engine = engine_of(kind, policy=Programs(steps), prefix_cache=True, prefill_chunk=8, burst=0.0)
    prompt = make_prompts([30])[0]
    request_id = engine.submit(request(prompt, 40))
    for _ in range(steps):
        engine.step()
    engine.cancel(request_id)
    cut = finish(engine, request_id)
    assert cut.finish_reason == "cancelled"
    following = request([*prompt, *cut.tokens, 5, 6], 15, temperature=0.9)
    done = ask(engine, following, audit=True)
    assert done.tokens == alone(kind, following).tokens
    assert done.num_cached_tokens == (len(prompt) + len(cut.tokens) - 1 if cut.tokens else min(8 * steps, 29))


def test_a_request_that_leaves_while_it_waits_takes_nothing_away():
    engine = engine_of("eager", policy="plain", max_batch_size=1, prefix_cache=True)
    prompt = make_prompts([20])[0]
    first = ask(engine, request(prompt, 6))
    waiting = engine.submit(request(make_prompts([5], seed=1)[0]))
    engine.cancel(waiting)
    assert finish(engine, waiting).finish_reason == "cancelled"
    following = request([*prompt, *first.tokens, 4], 5)
    done = ask(engine, following)
    assert done.num_cached_tokens == len(prompt) + len(first.tokens) - 1
    assert done.tokens == alone("eager", following).tokens


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


@executors
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_nothing_is_stale_after_an_interrupt(kind, at):
    engine = engine_of(kind, policy=Interrupted(Programs(at), at), prefix_cache=True, burst=0.0)
    prompt = make_prompts([11])[0]
    request_id = engine.submit(request(prompt, 40))
    with pytest.raises(KeyboardInterrupt):
        while True:
            engine.step()
    engine.cancel(request_id)
    cut = finish(engine, request_id)
    following = request([*prompt, *cut.tokens, 5, 6], 15)
    assert ask(engine, following, audit=True).tokens == alone(kind, following).tokens


def test_the_least_recently_used_pages_are_given_back_where_another_request_needs_them():
    engine = engine_of("eager", policy="plain", prefix_cache=True, max_cached_tokens=128)  # 8 pages of 16
    texts = [make_prompts([40], seed=seed)[0] for seed in range(3)]
    assert len({text[0] for text in texts}) == 3
    for text in (texts[0], texts[1], texts[0]):  # three pages each
        ask(engine, request(text, 4))
    assert ask(engine, request(texts[2], 4)).num_cached_tokens == 0
    assert ask(engine, request(texts[0], 4)).num_cached_tokens == 39
    done = ask(engine, request(texts[1], 4))
    assert 16 <= done.num_cached_tokens < 39, "its last pages went first"
    assert done.tokens == alone("eager", request(texts[1], 4)).tokens


def test_a_row_that_needs_more_pages_than_are_free_waits_for_them():
    engine = engine_of("eager", policy="plain", prefix_cache=True, max_cached_tokens=64, burst=0.0)
    prompt = make_prompts([10])[0]
    first = ask(engine, request(prompt, 6))  # one page
    other = engine.submit(request(make_prompts([20], seed=3)[0], 12))  # two of the other three
    engine.step()
    growing = request([*prompt, *first.tokens], 34)  # the one that is kept, and three more
    waiting = engine.submit(growing)
    engine.step()
    assert engine.num_waiting == 1
    assert finish(engine, waiting).tokens == alone("eager", growing).tokens
    assert other != waiting


def test_what_is_not_read_again_takes_no_memory():
    engine = engine_of("eager", policy="plain", prefix_cache=True, max_cached_tokens=64)
    first = ask(engine, request(make_prompts([20])[0], 40))
    assert engine.cache.num_free_pages == 0
    again = request([*make_prompts([20])[0], first.tokens[0]], 2)
    assert ask(engine, again).tokens == first.tokens[1:3]
    assert engine.num_pages_in_use == 0
    largest = request(make_prompts([1], seed=2)[0], 64)
    assert ask(engine, largest).tokens == alone("eager", largest).tokens


@pytest.mark.parametrize("backend", ["views", "compiled"])
@pytest.mark.parametrize("is_running", [False, True])
def test_keys_and_values_of_older_weights_are_not_used(backend, is_running):
    target = Target(build("llama"), engine=backend)
    engine = Engine(target, policy="plain", prefix_cache=True, burst=0.0)
    wanted = request(make_prompts([12])[0], 8)
    request_id = engine.submit(wanted)
    first = None if is_running else finish(engine, request_id)
    engine.step()
    with torch.no_grad():
        for parameter in target.model.parameters():
            parameter.mul_(1.3)
    first = first or finish(engine, request_id)
    following = request([*wanted.prompt, *first.tokens, 4], 8)
    done = ask(engine, following, audit=True)
    assert done.num_cached_tokens == 0
    assert done.tokens == ask(Engine(target, policy="plain"), following).tokens


def test_what_is_neither_on_nor_off_nor_a_cache_is_refused():
    with pytest.raises(ValueError, match=r"^prefix_cache must be True or False, got 1"):
        Engine(Target(build("llama"), engine="views"), policy="plain", prefix_cache=1)
