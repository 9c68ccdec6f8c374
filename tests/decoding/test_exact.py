"""Exact mode: speculation equals plain decoding bit for bit, logits included, in half precision too."""

import random
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.decoding.engine import Engine
from tests.helpers import Adversary, Schedule, ShortBlocks, drain, make_prompts
from tests.models import build
from tests.target import Target

FAMILIES = ("llama", "qwen3", "gemma3_text", "gemma2", "qwen3_moe")
SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
NEW = 14


@cache
def target(family, dtype):
    return ShortBlocks(build(family).to(getattr(torch, dtype)), engine="views")


@cache
def plain(family, dtype, prompt, seed, sampled):
    """Plain decoding of one prompt alone."""
    engine = Engine(target(family, dtype), policy="plain", max_batch_size=1, max_cached_tokens=128, exact=True)
    engine.submit(prompt, **options_of(seed, sampled))
    return drain(engine).completions[0]


def options_of(seed, sampled):
    return {"max_new_tokens": NEW, "keep_logits": True, "seed": seed, **(SAMPLED if sampled else {})}


def assert_same_bits(done, wanted):
    assert done.tokens == wanted.tokens
    for kind in ("logits", "scores"):
        pairs = zip(getattr(done, kind), getattr(wanted, kind), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), kind


@settings(max_examples=6)
@given(
    st.sampled_from(FAMILIES),
    st.sampled_from(["bfloat16", "bfloat16", "float32"]),
    st.integers(1, 8),
    st.sampled_from([3, 16, 50, 512]),  # prefill chunk
    st.sampled_from([5, 16, 128]),  # page size
    st.booleans(),
    st.integers(0, 10**6),
)
def test_random_plans_in_any_batch_and_order_of_arrival(family, dtype, batch, chunk, page_size, sampled, seed):
    dice = random.Random(seed)
    prompts = make_prompts([dice.choice([1, 2, 9, 17, 33, 40]) for _ in range(6)], seed % 3)
    kind = dice.choice([Schedule, Adversary])
    engine = Engine(
        target(family, dtype),
        policy=kind(seed, 4),
        max_batch_size=batch,
        max_cached_tokens=1280,
        prefill_chunk=chunk,
        page_size=page_size,
        exact=True,
    )
    rounds = []
    for i, prompt in enumerate(prompts):
        assert engine.submit(prompt, **options_of(i, sampled)) == i
        for _ in range(dice.randint(0, 2)):
            rounds += engine.step()
    done = drain(engine, before=rounds).completions
    for i, prompt in enumerate(prompts):
        assert_same_bits(done[i], plain(family, dtype, tuple(prompt), i, sampled))


@pytest.mark.parametrize("policy", ["adaptive", "fixed", "del", "pld", "gammatune+"])
def test_every_kind_of_policy(policy):
    made, prompts = target("llama", "bfloat16"), make_prompts([9, 33, 17])
    for done in made.generate(prompts, policy=policy, exact=True, max_new_tokens=NEW, seed=[0, 1, 2]):
        wanted = plain("llama", "bfloat16", tuple(prompts[done.request_id]), done.request_id, False)
        assert done.tokens == wanted.tokens


def test_learning_meanwhile_changes_no_bit():
    made = Target(build("llama").to(torch.bfloat16), engine="views")
    prompts = make_prompts([9, 12])
    wanted = made.generate(prompts, policy="plain", exact=True, max_new_tokens=24, keep_logits=True)
    for done in made.generate(prompts, exit_layer=1, exact=True, learn=True, max_new_tokens=24, keep_logits=True):
        assert_same_bits(done, wanted[done.request_id])
    assert made.exit_heads is not None


def test_costs_of_exact_mode_are_measured_apart():
    made = target("llama", "bfloat16")
    assert made.costs(exact=True) is made.costs(exact=True)
    assert made.costs(exact=True) is not made.costs()


def test_long_prompts_in_the_default_shapes():
    made = Target(build("qwen3", max_position_embeddings=512).to(torch.bfloat16), engine="views")
    prompts = make_prompts([300, 129, 128, 127])
    wanted = [made.generate([p], policy="plain", exact=True, max_new_tokens=8, keep_logits=True)[0] for p in prompts]
    engine = Engine(
        made, policy=Schedule(1, 4), max_batch_size=3, max_cached_tokens=1536, prefill_chunk=100, exact=True
    )
    for prompt in prompts:
        engine.submit(prompt, max_new_tokens=8, keep_logits=True)
    done = drain(engine).completions
    for i, one in enumerate(wanted):
        assert_same_bits(done[i], one)
