"""Sampling: speculation gives the tokens of plain decoding under the same seed, and these follow the model's law."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

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

from selfspec.loading.target import Target
from selfspec.params import SamplingParams
from tests.helpers import Always, Schedule, decode, make_prompts, request, tokens_of
from tests.models import build, tiny
from tests.slow import FRESH, slow

SAMPLINGS = {
    "lengths": st.lists(st.integers(1, 20), min_size=1, max_size=8),
    "temperature": st.sampled_from([0.3, 0.8, 1.0, 2.0]),
    "top_k": st.sampled_from([0, 3, 30]),
    "top_p": st.sampled_from([1.0, 0.8]),
    "min_p": st.sampled_from([0.0, 0.1]),
    "seed": st.integers(-(1 << 63), (1 << 63) - 1),
    "page_size": st.sampled_from([4, 64]),
    "max_num_seqs": st.integers(1, 8),
}


def check_equals_plain(target, prompts, policy, params, **options):
    """The same tokens as plain decoding of every prompt alone."""
    several = params if isinstance(params, list) else [params] * len(prompts)
    plain = [decode(target, [prompt], "plain", own)[0] for prompt, own in zip(prompts, several, strict=True)]
    done = decode(target, prompts, policy, several, **options)
    assert tokens_of(done) == tokens_of(plain)
    return done


def check_any_sampling(target, lengths, page_size, max_num_seqs, **sampling):
    params = SamplingParams(max_tokens=12, **sampling)
    options = {"page_size": page_size, "max_num_seqs": max_num_seqs, "prefill_chunk": 7}
    check_equals_plain(target, make_prompts(lengths), Schedule(params.seed % 1000, 4), params, **options)


@given(**SAMPLINGS)
def test_any_batch_samples_the_tokens_of_plain_decoding(**case):
    check_any_sampling(tiny("llama"), **case)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
@FRESH
@given(**SAMPLINGS)
def test_any_batch_of_other_families_samples_the_tokens_of_plain_decoding(family, **case):
    """In float64, where rounding turns no near-tie."""
    check_any_sampling(Target(build(family).double(), backend="views"), **case)


def test_another_seed_gives_another_text_and_the_same_seed_the_same():
    [prompt] = make_prompts([6])
    params = [SamplingParams(max_tokens=12, temperature=1.0, seed=seed) for seed in (0, 1, 2, 0, 1, 2)]
    tokens = tokens_of(decode(tiny("llama"), [prompt] * 6, Schedule(0, 4), params))
    assert tokens[:3] == tokens[3:]
    assert len({tuple(one) for one in tokens}) == 3


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
USUAL = {"temperature one": ["compiled"], "all filters": ["views", "compiled"], "a repetition penalty": ["views"]}


def tiny_vocabulary(backend="auto"):
    """A model of 8 tokens whose logits are mild enough that most triples occur."""
    model = build("llama", vocab_size=VOCAB, eos_token_id=None, pad_token_id=None)
    model.lm_head.weight.data *= 0.2
    return Target(model, backend=backend)


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
    params = SamplingParams(max_tokens=num_tokens, logits_processors=processors or None, **sampling)
    asked = [request(PROMPT, replace(params, seed=seed)) for seed in range(draws)]
    policy = policy or Schedule(0, 4, confidences=(0.0, 0.0, 0.2))
    done = decode(target, asked, policy, max_num_seqs=500, max_num_cached_tokens=500 * 8)
    seen = Counter(tuple(one.token_ids) for one in done)
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


@pytest.mark.parametrize(
    ("law", "backend"),
    [(law, each) if each in USUAL.get(law, ()) else slow(law, each) for law in LAWS for each in ("views", "compiled")],
)
def test_samples_follow_the_models_law(law, backend):
    sampling, processors = LAWS[law]
    done = check_law(tiny_vocabulary(backend), sampling, processors)
    assert sum(one.stats.num_accepted_draft_tokens for one in done) > 100


def test_plain_samples_follow_the_models_law():
    check_law(tiny_vocabulary(), {"temperature": 1.0}, policy="plain")


def test_the_law_does_not_depend_on_how_good_the_draft_is():
    target = tiny_vocabulary()
    done = [check_law(target, {"temperature": 1.0}, num_tokens=2, policy=Always(e, 1)) for e in (1, 3)]
    assert [one.stats for one in done[0]] != [one.stats for one in done[1]]
    assert tokens_of(done[0]) == tokens_of(done[1])


def test_the_g_test_notices_a_law_that_is_a_sixth_off():
    law = dict.fromkeys(itertools.product(range(4), repeat=2), 1 / 16)
    fair = Counter(dict.fromkeys(law, 375))
    bent = Counter({key: 375 + (60 if key[0] == 0 else -60 if key[0] == 1 else 0) for key in law})
    assert goodness(fair, law) > 0.99
    assert goodness(bent, law) < 1e-3
