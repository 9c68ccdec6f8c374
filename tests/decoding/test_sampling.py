"""Sampling: speculation gives the tokens of plain decoding under the same seed, and these follow the model's law."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from selfspec.decoding.engine import Engine
from tests.helpers import Adversary, Always, Schedule, decode, make_prompts
from tests.models import build, tiny
from tests.slow import slow
from tests.target import Target

RAGGED = (12, 7, 1, 20, 3)
WAYS = {  # how the rows of one batch sample, each row its own way
    "temperature": [0.7, 1.0, 1.5, 0.0, 0.9],
    "top_k": [0, 5, 20, 0, 0],
    "top_p": [1.0, 0.9, 1.0, 1.0, 0.5],
    "min_p": [0.0, 0.0, 0.05, 0.0, 0.0],
    "seed": [0, 1, -5, 7, (1 << 63) - 1],
}


def check_equals_plain(target, prompts, policy, engine=None, **options):
    """The same tokens as plain decoding of every prompt alone."""
    expected = []
    for i, prompt in enumerate(prompts):
        own = {name: value[i] if isinstance(value, list) else value for name, value in options.items()}
        expected += decode(target, [prompt], "plain", **own)
    done = decode(target, prompts, policy, engine=engine, **options)
    assert [c.tokens for c in done] == [c.tokens for c in expected]
    return done


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "gpt2", "gpt_oss"])
@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_speculation_samples_the_tokens_of_plain_decoding(family, seed):
    done = check_equals_plain(tiny(family), make_prompts(RAGGED), Schedule(seed, 4), max_new_tokens=18, **WAYS)
    assert sum(c.stats.num_accepted_draft_tokens for c in done) > 0
    assert [c.seed for c in done] == WAYS["seed"]


SAMPLINGS = {
    "lengths": st.lists(st.integers(1, 20), min_size=1, max_size=8),
    "temperature": st.sampled_from([0.3, 0.8, 1.0, 2.0]),
    "top_k": st.sampled_from([0, 3, 30]),
    "top_p": st.sampled_from([1.0, 0.8]),
    "min_p": st.sampled_from([0.0, 0.1]),
    "seed": st.integers(-(1 << 63), (1 << 63) - 1),
    "page_size": st.sampled_from([4, 64]),
    "max_batch_size": st.integers(1, 8),
}


def check_any_sampling(target, lengths, seed, page_size, max_batch_size, **sampling):
    engine = {"page_size": page_size, "max_batch_size": max_batch_size, "prefill_chunk": 7}
    policy = Schedule(seed % 1000, 4)
    check_equals_plain(target, make_prompts(lengths), policy, engine, max_new_tokens=12, seed=seed, **sampling)


@given(**SAMPLINGS)
def test_any_batch_samples_the_tokens_of_plain_decoding(**case):
    check_any_sampling(tiny("llama"), **case)


def check_any_arrival(target, dice):
    """Requests that arrive between steps, in any order, with others cancelled beside them, keep their tokens."""
    rng = random.Random(dice)
    prompts = make_prompts([rng.randint(1, 20) for _ in range(9)], seed=3)
    options = [{"max_new_tokens": rng.randint(1, 16), "temperature": 0.9, "seed": i} for i in range(9)]
    expected = [decode(target, [p], "plain", **o)[0].tokens for p, o in zip(prompts, options, strict=True)]
    engine = Engine(
        target, policy=Schedule(dice, 4), max_batch_size=3, max_cached_tokens=120, page_size=8, prefill_chunk=9
    )
    waiting, names, doomed, rounds = list(range(9)), {}, set(), []
    rng.shuffle(waiting)
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.5:
            at = waiting.pop()
            names[engine.submit(prompts[at], **options[at])] = at
            if rng.random() < 0.2:
                victim = engine.submit(prompts[0], max_new_tokens=16, temperature=1.0, seed=99)
                doomed.add(victim)
        if doomed and rng.random() < 0.3:
            engine.cancel(rng.choice(sorted(doomed)))
        rounds += engine.step()
    done = {row.request_id: row.completion for round_ in rounds for row in round_.rows if row.completion}
    assert {names[i]: c.tokens for i, c in done.items() if i in names} == dict(enumerate(expected))
    assert set(done) == set(names) | doomed


@pytest.mark.parametrize("seed", range(3))
def test_the_compiled_engine_samples_the_tokens_of_its_own_plain_decoding(seed):
    target = compiled_target()
    done = check_equals_plain(target, make_prompts(RAGGED), Adversary(seed, 4), max_new_tokens=18, **WAYS)
    assert sum(c.stats.num_accepted_draft_tokens for c in done) > 0


@cache
def compiled_target():
    return Target(build("llama"), engine="compiled")


@pytest.mark.parametrize("dice", range(6))
def test_neither_arrival_nor_neighbours_nor_cancellations_change_a_token(dice):
    check_any_arrival(tiny("llama"), dice)


def test_another_seed_gives_another_text_and_the_same_seed_the_same():
    target, [prompt] = tiny("llama"), make_prompts([6])
    done = decode(target, [prompt] * 6, Schedule(0, 4), max_new_tokens=12, temperature=1.0, seed=[0, 1, 2, 0, 1, 2])
    tokens = [tuple(c.tokens) for c in done]
    assert tokens[:3] == tokens[3:]
    assert len(set(tokens)) == 3


# --------------------------------------------------------------------------------- the law, by exact enumeration

VOCAB, PROMPT, DRAWS = 8, [3, 5, 1], 2500
WARPERS = {
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}
LAWS = {
    "temperature one": ({"temperature": 1.0}, ()),
    "a high temperature": ({"temperature": 1.8}, ()),
    "a low temperature": ({"temperature": 0.5}, ()),
    "top-k": ({"temperature": 1.2, "top_k": 3}, ()),
    "top-p": ({"temperature": 1.2, "top_p": 0.8}, ()),
    "min-p": ({"temperature": 1.2, "min_p": 0.2}, ()),
    "all filters": ({"temperature": 1.5, "top_k": 6, "top_p": 0.95, "min_p": 0.05}, ()),
    "a repetition penalty": ({"temperature": 1.0}, (RepetitionPenaltyLogitsProcessor(1.7),)),
}
USUAL = {"temperature one", "all filters", "a repetition penalty"}


def tiny_vocabulary(engine="auto"):
    """A model of 8 tokens whose logits are mild enough that most triples occur."""
    model = build("llama", vocab_size=VOCAB, eos_token_id=None, pad_token_id=None)
    model.lm_head.weight.data *= 0.2
    return Target(model, engine=engine)


@torch.inference_mode()
def joint_law(model, prompt, num_tokens, sampling, processors=()):
    """Probability of every continuation of `num_tokens` tokens, with transformers' processors and warpers, in fp64."""
    warpers = [WARPERS[name](value) for name, value in sampling.items()]
    chain = LogitsProcessorList([*processors, *warpers])
    law = {(): 1.0}
    for _ in range(num_tokens):
        prefixes = torch.tensor([[*prompt, *prefix] for prefix in law])
        scores = chain(prefixes, model(prefixes).logits[:, -1].float())
        following = scores.double().softmax(-1).tolist()
        law = {
            (*a, t): p * q for (a, p), row in zip(law.items(), following, strict=True) for t, q in enumerate(row) if q
        }
    assert abs(sum(law.values()) - 1) < 1e-9
    return law


def check_law(target, sampling, processors=(), num_tokens=3, policy=None, draws=DRAWS):
    """A G-test of that many draws, seeds 0, 1, ..., against the enumerated law of the first tokens."""
    law = joint_law(target.model, PROMPT, num_tokens, sampling, processors)
    done = decode(
        target,
        [PROMPT] * draws,
        policy or Schedule(0, 4, confidences=(0.0, 0.0, 0.2)),
        engine={"max_batch_size": 500, "max_cached_tokens": 500 * 8},
        max_new_tokens=num_tokens,
        seed=list(range(draws)),
        logits_processor=tuple(processors),
        **sampling,
    )
    seen = Counter(tuple(c.tokens) for c in done)
    assert set(seen) <= set(law), "a token that the filters exclude was sampled"
    assert goodness(seen, law) > 1e-3
    return done


def goodness(seen, law):
    """The p-value of a G-test; cells that expect fewer than five draws are taken together."""
    total = sum(seen.values())
    cells = [(seen[key], p * total) for key, p in law.items()]
    big = [cell for cell in cells if cell[1] >= 5]
    rest = [sum(part) for part in zip((0, 0.0), *(cell for cell in cells if cell[1] < 5), strict=True)]
    if rest[1] > 0:
        big.append(tuple(rest))
    observed, expected = zip(*big, strict=True)
    return stats.power_divergence(observed, expected, lambda_="log-likelihood").pvalue


@pytest.fixture(scope="module", params=["views", "compiled"])
def eight_tokens(request):
    return tiny_vocabulary(request.param)


@pytest.mark.parametrize("law", [name if name in USUAL else slow(name) for name in LAWS])
def test_samples_follow_the_models_law(eight_tokens, law):
    sampling, processors = LAWS[law]
    done = check_law(eight_tokens, sampling, processors)
    assert sum(c.stats.num_accepted_draft_tokens for c in done) > 100


def test_plain_samples_follow_the_models_law(eight_tokens):
    check_law(eight_tokens, {"temperature": 1.0}, policy="plain")


def test_the_law_does_not_depend_on_how_good_the_draft_is(eight_tokens):
    done = [check_law(eight_tokens, {"temperature": 1.0}, num_tokens=2, policy=Always(e, 1)) for e in (1, 3)]
    assert done[0] != done[1]
    assert [c.tokens for c in done[0]] == [c.tokens for c in done[1]]


def test_the_g_test_notices_a_law_that_is_a_sixth_off():
    law = dict.fromkeys(itertools.product(range(4), repeat=2), 1 / 16)
    fair = Counter(dict.fromkeys(law, 375))
    bent = Counter({key: 375 + (60 if key[0] == 0 else -60 if key[0] == 1 else 0) for key in law})
    assert goodness(fair, law) > 0.99
    assert goodness(bent, law) < 1e-3
