"""Log-probabilities of emitted tokens are those of a plain forward, whatever the plan and the executor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.executors.logprobs import token_logprobs
from selfspec.loading.target import Target
from selfspec.params import SamplingParams
from tests.helpers import Adversary, Always, decode, make_prompts, run
from tests.models import build, tiny

RAGGED = (12, 1, 20)
backends = pytest.mark.parametrize("backend", ["compiled", "views"])


def some_params(num_likely):
    ways = ({"repetition_penalty": 1.4}, {"temperature": 0.9, "top_k": 9}, {"temperature": 1.3, "presence_penalty": 1})
    return [SamplingParams(max_tokens=16, logprobs=num_likely, seed=i, **way) for i, way in enumerate(ways)]


def check_logprobs(model, row, num_likely):
    """Against one plain forward, from which ranks and likeliest tokens are read by sorting."""
    with torch.inference_mode():
        logits = model(torch.tensor([row.token_ids])).logits[0, row.num_prompt_tokens - 1 : -1]
    assert [one.token for one in row.logprobs] == row.completion_token_ids
    for one, line in zip(row.logprobs, logits.float().log_softmax(-1), strict=True):
        order = line.sort(descending=True, stable=True).indices.tolist()
        assert one.logprob == pytest.approx(float(line[one.token]), abs=1e-4)
        assert one.rank == 1 + order.index(one.token)
        assert [token for token, _ in one.top] == order[:num_likely]
        assert [logprob for _, logprob in one.top] == pytest.approx(line[order[:num_likely]].tolist(), abs=1e-4)


@backends
@pytest.mark.parametrize("num_likely", [0, 5])
def test_they_are_those_of_a_plain_forward(backend, num_likely):
    target, prompts = tiny("llama", backend=backend), make_prompts(RAGGED, seed=1)
    for policy in ("plain", Adversary(1, 4), Always(2, 4, num_rounds=9)):
        for row in run(target, prompts, policy, some_params(num_likely)).sequences.values():
            check_logprobs(target.model, row, num_likely)


@backends
def test_only_rows_that_ask_have_them_and_each_as_many_as_it_asks_for(backend):
    params = [SamplingParams(max_tokens=9, logprobs=asked) for asked in (None, 3, 0)]
    made = run(tiny("llama", backend=backend), make_prompts(RAGGED, seed=1), Always(2, 4, num_rounds=5), params)
    assert made.outputs[0].logprobs is None and not made.sequences["0"].logprobs
    assert [[len(one.top) for one in made.sequences[at].logprobs] for at in "12"] == [[3] * 9, [0] * 9]


@backends
def test_rounds_hand_out_those_of_their_tokens_and_no_more(backend):
    target, params = tiny("llama", backend=backend), SamplingParams(max_tokens=17, logprobs=2)
    made = run(target, make_prompts([9], seed=1), Always(3, 4, num_rounds=3), params)
    for row in made.rows("0"):
        assert [one.token for one in row.logprobs] == row.token_ids
    assert [one for row in made.rows("0") for one in row.logprobs] == made.sequences["0"].logprobs


@pytest.mark.parametrize("threads", [1, 2])
@backends
def test_of_equal_logits_the_lowest_token_comes_first(backend, threads):
    model = build("llama", vocab_size=9000)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight[:90].repeat(100, 1))  # each logit stands there a hundred times
    target, before = Target(model, backend=backend), torch.get_num_threads()
    params = SamplingParams(max_tokens=12, temperature=5.0, logprobs=20, ignore_eos=True)
    torch.set_num_threads(threads)
    try:
        rows = run(target, make_prompts([9], seed=1), Always(2, 6, num_rounds=9), params).sequences["0"].logprobs
    finally:
        torch.set_num_threads(before)
    for one in rows:
        tokens = [token for token, _ in one.top]
        assert tokens == [tokens[0] + 90 * i for i in range(20)] and tokens[0] < 90
        assert one.rank % 100 == (1 + one.token // 90) % 100
    assert max(one.rank for one in rows) > 100


@given(vocab=st.integers(1, 40), levels=st.integers(1, 9), wanted=st.integers(0, 20), seed=st.integers(0, 999))
def test_ties_are_ordered_as_a_stable_sort_orders_them(vocab, levels, wanted, seed):
    source = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (3, vocab), generator=source).float()
    logits[0, : vocab // 2] = float("-inf")
    tokens = torch.randint(vocab // 2, vocab, (3,), generator=source).tolist()
    for i, one in enumerate(token_logprobs(logits, tokens, wanted)):
        order = logits[i].sort(descending=True, stable=True).indices.tolist()
        assert (one.token, one.rank) == (tokens[i], 1 + order.index(tokens[i]))
        assert [token for token, _ in one.top] == order[:wanted]


@backends
def test_a_vocabulary_smaller_than_what_is_asked_for_is_listed_whole(backend):
    params = SamplingParams(max_tokens=4, logprobs=20, ignore_eos=True)
    [done] = decode(Target(build("llama", vocab_size=7), backend=backend), [[3, 1]], "plain", params)
    assert all({*row} == {*range(7)} for row in done.logprobs)


def check_prompt_logprobs(model, row, num_likely):
    with torch.inference_mode():
        lines = model(torch.tensor([row.request.prompt_token_ids])).logits[0, :-1].float().log_softmax(-1)
    assert [one.token for one in row.prompt_logprobs] == row.request.prompt_token_ids[1:]
    for one, line in zip(row.prompt_logprobs, lines, strict=True):
        order = line.sort(descending=True, stable=True).indices.tolist()
        assert one.logprob == pytest.approx(float(line[one.token]), abs=1e-4)
        assert one.rank == 1 + order.index(one.token) and [token for token, _ in one.top] == order[:num_likely]


@backends
def test_those_of_a_prompt_are_a_plain_forwards_however_it_is_read(backend):
    """In chunks, beside rows that do not ask, and after a row whose prefix the cache still holds."""
    target, prompts = tiny("llama", backend=backend), make_prompts([40, 1, 23, 40], seed=1)
    prompts[3] = prompts[0][:30] + prompts[2][:10]
    params = [SamplingParams(max_tokens=3, prompt_logprobs=asked) for asked in (2, 0, None, 5)]
    made = run(target, prompts, Adversary(1, 4), params, prefill_chunk=7, prefix_cache=True, max_num_seqs=2)
    for at, num_likely in (("0", 2), ("1", 0), ("3", 5)):
        check_prompt_logprobs(target.model, made.sequences[at], num_likely)
    assert made.sequences["2"].prompt_logprobs == []


def test_more_positions_than_are_scored_at_once_are_all_scored():
    target = Target(build("llama", max_position_embeddings=512))
    made = run(target, make_prompts([300], seed=2), "plain", SamplingParams(max_tokens=1, prompt_logprobs=0))
    check_prompt_logprobs(target.model, made.sequences["0"], 0)
