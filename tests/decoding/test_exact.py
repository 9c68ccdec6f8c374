"""Exact mode: speculation equals plain decoding bit for bit, logits included, in half precision too."""

import random
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.decoding.engine import Engine
from selfspec.errors import UnsupportedModelError
from tests.helpers import Adversary, Schedule, drain, make_prompts
from tests.models import build
from tests.target import Target

SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
NEW = 14


@cache
def target(family, dtype):
    return Target(build(family).to(getattr(torch, dtype)), engine="compiled")


@cache
def plain(family, dtype, prompt, seed, sampled):
    """Plain decoding of one prompt alone."""
    engine = Engine(target(family, dtype), policy="plain", max_batch_size=1, max_cached_tokens=128, exact=True)
    engine.submit(prompt, **options_of(seed, sampled))
    return drain(engine).completions[0]


def options_of(seed, sampled):
    return {"max_new_tokens": NEW, "keep_logits": True, "seed": seed, **(SAMPLED if sampled else {})}


@settings(max_examples=6)
@given(
    st.sampled_from(["llama", "qwen3", "gemma3_text"]),
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
    engine = Engine(
        target(family, dtype), policy=dice.choice([Schedule, Adversary])(seed, 4), max_batch_size=batch,
        max_cached_tokens=1280, prefill_chunk=chunk, page_size=page_size, exact=True,
    )  # fmt: skip
    rounds = []
    for i, prompt in enumerate(prompts):
        assert engine.submit(prompt, **options_of(i, sampled)) == i
        for _ in range(dice.randint(0, 2)):
            rounds += engine.step()
    done = drain(engine, before=rounds).completions
    for i, prompt in enumerate(prompts):
        wanted = plain(family, dtype, tuple(prompt), i, sampled)
        assert done[i].tokens == wanted.tokens
        for kind in ("logits", "scores"):
            pairs = zip(getattr(done[i], kind), getattr(wanted, kind), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs), kind


def test_a_model_without_compiled_or_fused_layers_is_refused_by_name():
    for family, reason in (("gpt2", "its layers are of another kind"), ("llama", "here its own modules run")):
        with pytest.raises(UnsupportedModelError, match=f"{family}: exact mode needs .*, and {reason}; decode without"):
            Target(build(family), engine="views").generate([[3, 4]], exact=True)
